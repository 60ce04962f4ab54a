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
SAMPLES = 1140  # per epoch: 23 steps and three quarters, and the last step is filled up
STEPS_PER_EPOCH = math.ceil(SAMPLES / GLOBAL_BATCH_SIZE)
SAVE_EVERY = 6  # steps: every second checkpoint lies in the middle of an epoch
LOST_STEPS = 3  # a phase is killed when it is so many steps past its last checkpoint
PHASE_TIMEOUT_S = 600
POLL_S = 0.2


class DemoError(Exception):
    """The demo did not show what it is to show."""


@dataclass(frozen=True)
class Event:
    """One line of a worker's diary."""

    event: str
    """``start``, ``step``, ``validation`` or ``save``."""

    step: int
    """Optimizer steps done."""

    time_s: float
    """When, in seconds since 1970."""

    loss: float = math.nan
    """Of the global batch at a step, of the validation text at a validation."""

    samples: str = ""
    """At a step: a digest of the samples in it, of all processes, sorted."""

    seconds: float = math.nan
    """What a save took, or the load before a start."""

    bytes: int = 0
    """What was written or read, over all processes; 0 where a start had nothing to load."""


@dataclass(frozen=True)
class Phase:
    """A stretch of a run on one process count."""

    run: str
    """The run's name, and that of its folder."""

    processes: int
    """How many processes train."""

    start_step: int
    """Optimizer steps before it; if there are any, it begins with a checkpoint."""

    stop_step: int
    """Optimizer steps up to its last checkpoint."""

    epochs: int
    """What it is told to train: it does not know that it will be killed."""

    weights_of: Path | None = None
    """A checkpoint of which it gets the weights, as a new run; else it goes on from "last"."""

    @property
    def first_step(self) -> int:
        """The step of the whole run that its own step 0 is."""
        return 0 if self.weights_of is None else self.start_step

    @property
    def total_steps(self) -> int:
        """Optimizer steps after the last of its epochs."""
        return self.first_step + self.epochs * STEPS_PER_EPOCH

    @property
    def killed(self) -> bool:
        """Whether it is killed before it is done, or ends by itself."""
        return self.stop_step < self.total_steps

    @property
    def end_step(self) -> int:
        """Optimizer steps when it may end: those that will be lost come on top."""
        return self.stop_step + LOST_STEPS * self.killed

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints: that of its run, or its own if it is a new one."""
        return OUTPUT / self.run / f"checkpoints-{self.first_step}"

    @property
    def checkpoint(self) -> Path:
        """What ModelCheckpoint writes at its last step that counts."""
        return self.checkpoints / f"step={self.stop_step - self.first_step}.ckpt"

    @property
    def log(self) -> Path:
        """A file with everything that its processes print."""
        return OUTPUT / "logs" / f"{self.run}-{self.start_step}.log"

    @property
    def diary(self) -> Path:
        """A file in which its rank 0 writes down what happens."""
        return self.log.with_suffix(".jsonl")

    def events(self) -> list[Event]:
        """Read what has happened so far."""
        if not self.diary.exists():
            return []
        lines = self.diary.read_text().splitlines(keepends=True)
        return [Event(**json.loads(line)) for line in lines if line.endswith("\n")]

    def steps(self) -> dict[int, Event]:
        """Return what was noted of each step, lost ones included."""
        return {event.step: event for event in self.events() if event.event == "step"}

    def command(self) -> list[str]:
        """Return the command that starts it; Lightning starts the other processes from there."""
        options: dict[str, object] = {
            "--run_dir": OUTPUT / self.run,
            "--checkpoints": self.checkpoints,
            "--diary": self.diary,
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
    """Where a phase is: one line that changes on a terminal, a line per half epoch elsewhere."""

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.started_s = time.monotonic()
        self.shown_step = 0
        self.terminal = sys.stdout.isatty()

    @property
    def seconds(self) -> float:
        """Seconds since the phase was started."""
        return time.monotonic() - self.started_s

    def show(self, steps: dict[int, Event]) -> None:
        """Show the latest step."""
        step = max(steps, default=0)
        news = self.shown_step // (STEPS_PER_EPOCH // 2) < step // (STEPS_PER_EPOCH // 2)
        if self.terminal or news:
            self.shown_step = step
            self._print(self._where(step, steps), end="" if self.terminal else "\n")

    def _where(self, step: int, steps: dict[int, Event]) -> str:
        if not step:
            return "starting"
        return f"step {step:>2}/{self.phase.total_steps}  loss {steps[step].loss:.3f}"

    def end(self, text: str) -> None:
        """Leave a last line behind."""
        self._print(text, end="\n")

    def _print(self, text: str, end: str) -> None:
        title = f"{self.phase.run} on {self.phase.processes}"
        start = "\r\033[K" if self.terminal else ""
        print(f"{start}{title:<19}{self.seconds:5.0f} s   {text}", end=end, flush=True)


def run_phase(phase: Phase) -> None:
    """Run a phase until it is killed or ends, and see that it left what the next one needs.

    Raises:
        DemoError: it failed, or takes too long. The message shows the end of its log.
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
        # DeepSpeed's processes now and then abort while they exit, when all their work is done.
        strange = f" (exit code {process.returncode})" if process.returncode else ""
        progress.end(f"finished with {saved}{strange}")


@contextlib.contextmanager
def _running(phase: Phase) -> Iterator[subprocess.Popen[bytes]]:
    """Run a phase as a process group of its own; none of its processes outlives the block."""
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
            # All of them at once and without a warning, as a node is lost: no handler runs.
            with contextlib.suppress(ProcessLookupError):  # they have ended by themselves
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_over(phase: Phase, process: subprocess.Popen[bytes]) -> bool:
    """Return whether a phase has ended, or is far enough to be killed."""
    if process.poll() is not None:
        return True
    # A checkpoint gets its name when it is complete: who sees the name may pull the plug.
    done = phase.checkpoint.is_dir() and max(phase.steps(), default=0) >= phase.end_step
    return phase.killed and done


def _environment() -> dict[str, str]:
    """Return this process's environment for a worker on CPU, without traces of other launchers."""
    foreign = {"LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "PL_GLOBAL_SEED"}
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return kept | {
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": "1",  # up to 4 processes share what may be 2 cores
        "PYTHONWARNINGS": "ignore::FutureWarning",  # of DeepSpeed's calls, at every step
    }


def _free_port() -> int:
    """Ask the system for a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _failure(phase: Phase, what: str) -> DemoError:
    """Return what happened to a phase, with the end of its log."""
    log = phase.log.read_text(errors="replace").splitlines()[-40:]
    where = f"{phase.run} on {phase.processes} processes (steps {phase.start_step + 1} to"
    return DemoError("\n".join([f"{where} {phase.stop_step}): {what}; {phase.log} ends so:", *log]))
