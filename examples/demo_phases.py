"""The phases of the demo: each is a process group that runs ``demo_worker.py``."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
OUTPUT = EXAMPLES.parent / "demo_output"

GLOBAL_BATCH_SIZE = 48  # samples per optimizer step, over all processes
SAMPLES = 1140  # per epoch: 23 steps and three quarters; the last step is filled up
STEPS_PER_EPOCH = math.ceil(SAMPLES / GLOBAL_BATCH_SIZE)
SAVE_EVERY = 6  # steps: every second checkpoint is in the middle of an epoch
LOST_STEPS = 3  # a phase is killed this many steps after its last checkpoint
PHASE_TIMEOUT_S = 600
POLL_S = 0.2


class DemoError(Exception):
    """A check of the demo failed."""


@dataclass(frozen=True)
class Event:
    """One line of the event log of a worker."""

    event: str
    """``start``, ``step``, ``validation`` or ``save``."""

    step: int
    """Number of optimizer steps done."""

    time_s: float
    """Seconds since 1970."""

    loss: float = math.nan
    """Loss of the global batch at a step, or of the validation text at a validation."""

    samples: str = ""
    """At a step: a digest of the sorted samples of all processes."""

    seconds: float = math.nan
    """Duration of a save, or of the load before a start."""

    bytes: int = 0
    """Bytes written or read by all processes; 0 at a start without a load."""


@dataclass(frozen=True)
class Phase:
    """A part of a run on one process count."""

    run: str
    """Name of the run, and of its folder."""

    processes: int
    """Number of training processes."""

    start_step: int
    """Optimizer steps before the phase; greater than 0: it starts from a checkpoint."""

    stop_step: int
    """Optimizer steps at its last checkpoint."""

    epochs: int
    """Epochs that it is asked to train; it may be killed before."""

    weights_of: Path | None = None
    """Checkpoint whose weights start a new run; None: the phase resumes from "last"."""

    @property
    def first_step(self) -> int:
        """Step of the whole run at which the steps of this phase start."""
        return 0 if self.weights_of is None else self.start_step

    @property
    def total_steps(self) -> int:
        """Optimizer steps at the end of its last epoch."""
        return self.first_step + self.epochs * STEPS_PER_EPOCH

    @property
    def killed(self) -> bool:
        """Whether it is killed before its end."""
        return self.stop_step < self.total_steps

    @property
    def end_step(self) -> int:
        """Optimizer steps after which it may end, including those that a kill loses."""
        return self.stop_step + LOST_STEPS * self.killed

    @property
    def checkpoints(self) -> Path:
        """Folder of its checkpoints: that of its run, or its own for a new run."""
        return OUTPUT / self.run / f"checkpoints-{self.first_step}"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint that ModelCheckpoint writes at the last step that counts."""
        return self.checkpoints / f"step={self.stop_step - self.first_step}.ckpt"

    @property
    def log(self) -> Path:
        """Path of the output of its processes."""
        return OUTPUT / "logs" / f"{self.run}-{self.start_step}.log"

    @property
    def event_log(self) -> Path:
        """Path of the file to which its rank 0 writes events."""
        return self.log.with_suffix(".jsonl")

    def events(self) -> list[Event]:
        """Return the events up to now."""
        if not self.event_log.exists():
            return []
        lines = self.event_log.read_text().splitlines(keepends=True)
        return [Event(**json.loads(line)) for line in lines if line.endswith("\n")]

    def steps(self) -> dict[int, Event]:
        """Return the event of each step, including lost steps."""
        return {event.step: event for event in self.events() if event.event == "step"}

    def command(self) -> list[str]:
        """Return the command that starts it; Lightning starts the other processes."""
        options: dict[str, object] = {
            "--run_dir": OUTPUT / self.run,
            "--checkpoints": self.checkpoints,
            "--event_log": self.event_log,
            "--devices": self.processes,
            "--epochs": self.epochs,
            "--samples": SAMPLES,
            "--global_batch_size": GLOBAL_BATCH_SIZE,
            "--save_every": SAVE_EVERY,
            "--start_step": self.start_step,
        }
        if self.weights_of is not None:
            options["--weights_of"] = self.weights_of
        words = [str(word) for option in options.items() for word in option]
        return [sys.executable, str(EXAMPLES / "demo_worker.py"), *words]


class Progress:
    """Shows the progress of a phase: one changing line on a terminal, else one per half epoch."""

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.started_s = time.monotonic()
        self.shown_step = 0
        self.terminal = sys.stdout.isatty()

    @property
    def seconds(self) -> float:
        """Seconds since the start of the phase."""
        return time.monotonic() - self.started_s

    def show(self, steps: dict[int, Event]) -> None:
        """Show the latest step."""
        step = max(steps, default=0)
        is_new = self.shown_step // (STEPS_PER_EPOCH // 2) < step // (STEPS_PER_EPOCH // 2)
        if self.terminal or is_new:
            self.shown_step = step
            self._print(self._where(step, steps), end="" if self.terminal else "\n")

    def _where(self, step: int, steps: dict[int, Event]) -> str:
        if not step:
            return "starting"
        return f"step {step:>2}/{self.phase.total_steps}  loss {steps[step].loss:.3f}"

    def end(self, text: str) -> None:
        """Print a last line."""
        self._print(text, end="\n")

    def _print(self, text: str, end: str) -> None:
        title = f"{self.phase.run} on {self.phase.processes}"
        start = "\r\033[K" if self.terminal else ""
        print(f"{start}{title:<19}{self.seconds:5.0f} s   {text}", end=end, flush=True)


def run_phase(phase: Phase) -> None:
    """Run a phase until it is killed or ends, and check that it wrote its checkpoint.

    Raises:
        DemoError: it failed or took too long. The message contains the end of its log.
    """
    progress = Progress(phase)
    with _running(phase) as process:
        while not _is_over(phase, process):
            progress.show(phase.steps())
            if progress.seconds > PHASE_TIMEOUT_S:
                raise _failure(phase, f"not done after {PHASE_TIMEOUT_S} s")
            time.sleep(POLL_S)
    last_step = max(phase.steps(), default=0)
    if last_step < phase.end_step or not phase.checkpoint.is_dir():
        raise _failure(phase, f"ended with exit code {process.returncode} at step {last_step}")
    saved = f"the checkpoint of step {phase.stop_step}"
    if phase.killed:
        progress.end(f"killed at step {last_step}, {last_step - phase.stop_step} after {saved}")
    else:
        # DeepSpeed's processes sometimes abort at exit, after all their work is done.
        note = f" (exit code {process.returncode})" if process.returncode else ""
        progress.end(f"finished with {saved}{note}")


@contextlib.contextmanager
def _running(phase: Phase) -> Iterator[subprocess.Popen[bytes]]:
    """Run a phase in its own process group; none of its processes outlives the block."""
    with phase.log.open("wb") as log:
        process = subprocess.Popen(
            phase.command(),
            env=_environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            # All at once and without a warning, as when a node is lost: no handler runs.
            with contextlib.suppress(ProcessLookupError):  # they have ended by themselves
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_over(phase: Phase, process: subprocess.Popen[bytes]) -> bool:
    """Return whether a phase has ended, or has reached the step of its kill."""
    if process.poll() is not None:
        return True
    # A checkpoint gets its name when it is complete, so a kill is safe once the name exists.
    done = phase.checkpoint.is_dir() and max(phase.steps(), default=0) >= phase.end_step
    return phase.killed and done


def _environment() -> dict[str, str]:
    """Return the environment for a worker on CPU, without variables of other launchers."""
    foreign = {"LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "PL_GLOBAL_SEED"}
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return kept | {
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": "1",  # up to 4 processes may share 2 cores
        "PYTHONWARNINGS": "ignore::FutureWarning",  # of DeepSpeed's calls, at every step
    }


def _free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _failure(phase: Phase, what: str) -> DemoError:
    """Return the error of a phase, with the end of its log."""
    log = phase.log.read_text(errors="replace").splitlines()[-40:]
    where = f"{phase.run} on {phase.processes} processes (steps {phase.start_step + 1} to"
    return DemoError("\n".join([f"{where} {phase.stop_step}): {what}; end of {phase.log}:", *log]))
