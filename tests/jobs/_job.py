"""A torchrun job on one machine: nodes (an agent with its workers), and the recorded steps."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest

from tests.support.processes import HANG_TIMEOUT_S, free_port
from tests.support.ranks import ROOT, environment
from tests.support.tables import ELASTIC


@dataclass(frozen=True, slots=True, order=True)
class StepRecord:
    time: float
    """Seconds of the clock that all nodes share."""

    event: str
    step: int
    rank: int
    world: int
    met_at: str
    """Address and port of the world's store, which identify the world."""

    pid: int
    samples: tuple[int, ...] = ()
    loss: float = 0.0

    @property
    def is_step(self) -> bool:
        """Whether this is an optimizer step, not a start."""
        return self.event == "step"


@dataclass(frozen=True, slots=True)
class Step:
    samples: tuple[int, ...]
    """Samples of all ranks, sorted."""

    loss: float


Undisturbed: TypeAlias = dict[int, Step]
"""The steps of an undisturbed run, by number."""


def read_lines(folder: Path) -> list[StepRecord]:
    """Return the records of all ranks, sorted by time, without incomplete last lines."""
    found = []
    for path in folder.glob("steps-*.jsonl"):
        for text in path.read_text().splitlines():
            with suppress(ValueError):
                values = json.loads(text)
                found.append(StepRecord(**{**values, "samples": tuple(values.get("samples", ()))}))
    return sorted(found)


def steps_of(lines: Iterable[StepRecord]) -> dict[tuple[str, int], Step]:
    """Return the steps that all ranks of their world completed, by world and step."""
    by_step: dict[tuple[str, int], dict[int, StepRecord]] = defaultdict(dict)
    for line in lines:
        if line.is_step:
            by_step[line.met_at, line.step][line.rank] = line
    return {
        key: Step(tuple(sorted(s for r in ranks.values() for s in r.samples)), ranks[0].loss)
        for key, ranks in by_step.items()
        if len(ranks) == next(iter(ranks.values())).world
    }


def check_steps(lines: list[StepRecord], undisturbed: Mapping[int, Step]) -> None:
    """Check that each step, including repeated ones, equals that of the undisturbed run."""
    steps = steps_of(lines)
    assert {step for _, step in steps} == set(undisturbed)
    for (_, number), step in steps.items():
        assert step.samples == undisturbed[number].samples, f"step {number}"
        assert step.loss == pytest.approx(undisturbed[number].loss, rel=1e-5), f"step {number}"


def repeated_steps(lines: list[StepRecord]) -> dict[float, int]:
    """Return the number of steps that each world after the first repeated, by its start time."""
    starts: dict[str, StepRecord] = {}
    for line in lines:
        if not line.is_step:
            starts.setdefault(line.met_at, line)
    _, *later = starts.values()
    found = {}
    for start in later:
        before = [line.step for line in lines if line.is_step and line.time < start.time]
        found[start.time] = max(before, default=0) - start.step
    return found


def seconds_to_next_step(lines: list[StepRecord], since: float) -> float:
    """Return the time from an instant to the first step of a world that started later."""
    began = {line.met_at for line in lines if not line.is_step and line.time > since}
    later = [line.time for line in lines if line.is_step and line.met_at in began]
    return min(later) - since


def count_event(event: str, lines: list[StepRecord], since: float) -> None:
    """Record the cost of an event for the table."""
    repeated = next(steps for start, steps in repeated_steps(lines).items() if start > since)
    ELASTIC.count(event, "tried")
    ELASTIC.count(event, "repeated steps", repeated)
    ELASTIC.count(event, "seconds to the next step", round(seconds_to_next_step(lines, since)))


def start_process(
    command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process in its own session, which appends its output to a log."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def in_own_mounts(commands: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return a prefix that runs a command in a mount namespace, after mount commands."""
    text = " && ".join(shlex.join(command) for command in commands)
    return ("unshare", "--mount", "sh", "-c", f'{text} && exec "$@"', "sh")


EXAMPLE = ROOT / "examples" / "torchrun"

RENDEZVOUS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=8"
"""A lost node is detected after 8 s, instead of 15."""

GLOBAL_BATCH, SAMPLES, EPOCHS, SAVE_EVERY = 48, 480, 3, 5
STEPS = SAMPLES // GLOBAL_BATCH * EPOCHS

AT, LATER = 12, 22
"""Steps after which events occur; the last saves before them are at steps 10 and 20."""

NOTICED = "all ranks save and end after this step"
"""Message of a rank that received the signal."""


def arguments(folder: Path, *more: str) -> list[str]:
    """Return arguments for the example: a small model and the recorder."""
    return [
        "--model.n_embd=32",
        "--model.n_layer=1",
        "--model.dropout=0",  # Each rank would draw its own random numbers.
        f"--data.samples_per_epoch={SAMPLES}",
        "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--trainer.limit_val_batches=0",
        f"--trainer.max_epochs={EPOCHS}",
        f"--trainer.callbacks.init_args.every_n_train_steps={SAVE_EVERY}",
        "--trainer.callbacks+=tests.jobs.recorder.Recorder",
        f"--trainer.callbacks.folder={folder}",
        *more,
    ]


@dataclass
class Job:
    """A job; node n has the address 127.0.0.(n+2)."""

    folder: Path
    port: int
    more: tuple[str, ...] = ()
    """Additional arguments of the example."""

    own_settings: dict[str, str] = field(default_factory=dict)
    """Additional environment variables of the nodes."""

    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)

    def start(self, *nodes: int) -> None:
        """Start or restart nodes with the script of the example."""
        for node in nodes:
            self.killed.discard(node)
            self.agents[node] = start_process(
                [*self.prefix(node), *self.command()],
                self.folder / f"node-{node}.log",
                {**environment(), **self.settings(node)},
            )

    def command(self) -> list[str]:
        return ["sh", str(EXAMPLE / "start.sh"), *arguments(self.folder, *self.more)]

    def prefix(self, node: int) -> tuple[str, ...]:
        """Return the prefix of a node's command; nodes on loopback addresses need none."""
        return ()

    def settings(self, node: int) -> dict[str, str]:
        return {
            "PYTHON": sys.executable,
            "RUN_DIR": str(self.folder),
            "STORE": f"127.0.0.1:{self.port}",
            "ADDRESS": f"127.0.0.{node + 2}",
            "RENDEZVOUS": RENDEZVOUS,
            "GLOO_SOCKET_IFNAME": "lo",
            **self.own_settings,
        }

    def processes(self, node: int, *, agent: bool) -> list[psutil.Process]:
        """Return a node's workers, after its agent if requested."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.agents[node].pid)
            workers = process.children(recursive=True)
            return [process, *workers] if agent else workers
        return []

    def signal(self, node: int, number: int, *, agent: bool = True) -> float:
        """Send a signal to a node's workers, and by default to its agent; return the time."""
        now = time.time()
        for process in self.processes(node, agent=agent):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return now

    def kill(self, *nodes: int) -> float:
        """Kill the agents and workers of nodes; return the time."""
        self.killed.update(nodes)
        now = min([self.signal(node, signal.SIGKILL) for node in nodes])
        for node in nodes:
            self.agents[node].wait(HANG_TIMEOUT_S)
        return now

    @property
    def checkpoints(self) -> Path:
        """The directory with the checkpoints, which nodes may see under another path."""
        return self.folder / "checkpoints"

    def last_step(self) -> int:
        """Return the step of the newest published checkpoint; 0 if there is none."""
        name = (self.checkpoints / "last.ckpt").resolve().stem
        return int(name.rpartition("=")[2]) if "=" in name else 0

    def stop_in_a_save(self, node: int) -> None:
        """Stop a node's workers (with rank 0) during a save, before it is published."""

        def stopped() -> bool:
            if not self.unpublished():
                return False
            self.signal(node, signal.SIGSTOP, agent=False)
            # A thread only stops after its current system call, which may publish the save.
            self.wait_until(lambda: self._have_stopped(node), "stop")
            if self.unpublished():
                return True
            self.signal(node, signal.SIGCONT, agent=False)
            return False

        self.wait_until(stopped, "save")

    def _have_stopped(self, node: int) -> bool:
        for process in self.processes(node, agent=False):
            for stat in Path(f"/proc/{process.pid}/task").glob("*/stat"):
                with suppress(OSError):
                    if stat.read_text().rpartition(")")[2].split()[0] not in "tTZX":
                        return False
        return True

    def unpublished(self) -> list[Path]:
        """Return the hidden folders of running or dead saves."""
        return list(self.checkpoints.glob(".zero-staging-*"))

    def hold(self, step: int) -> None:
        """Make ranks wait at the end of a step, until `release`."""
        (self.folder / f"hold-{step}").touch()

    def release(self, step: int) -> None:
        (self.folder / f"hold-{step}").unlink()

    def lines(self) -> list[StepRecord]:
        return read_lines(self.folder)

    def wait_for_step(self, step: int, world: int) -> None:
        """Wait until all ranks of a world of this size have completed a step."""
        event = f"step {step} on {world} ranks"
        self._wait_for_all(world, lambda line: line.step == step and line.is_step, event)

    def wait_for_start(self, world: int, since: float) -> None:
        """Wait until all ranks of a world of this size have started training after an instant."""
        self._wait_for_all(world, lambda line: line.time > since, f"world of {world} ranks")

    def _wait_for_all(self, world: int, wanted: Callable[[StepRecord], bool], event: str) -> None:
        def found() -> bool:
            of_world: dict[str, set[int]] = {}
            for line in self.lines():
                if line.world == world and wanted(line):
                    of_world.setdefault(line.met_at, set()).add(line.rank)
            return any(len(ranks) == world for ranks in of_world.values())

        self.wait_until(found, event)

    def wait_until(self, condition: Callable[[], bool], event: str) -> None:
        """Wait for a condition; raise TimeoutError if all agents end before."""
        until = time.monotonic() + HANG_TIMEOUT_S
        while not condition():
            if time.monotonic() > until or not any(a.poll() is None for a in self.agents.values()):
                msg = f"no {event}\n{self.output_tail()}"
                raise TimeoutError(msg)
            time.sleep(0.01)

    def finish(self) -> None:
        """Wait for all agents that were not killed; all must succeed."""
        until = time.monotonic() + HANG_TIMEOUT_S
        for node, agent in self.agents.items():
            if node not in self.killed:
                status = agent.wait(max(0.0, until - time.monotonic()))
                assert status == 0, f"node {node} ended with {status}\n{self.output_tail()}"

    def log_of(self, node: int) -> str:
        return (self.folder / f"node-{node}.log").read_text(errors="replace")

    def signals_sent(self, node: int) -> int:
        return self.log_of(node).count("closing signal SIGTERM")

    def forced(self) -> list[int]:
        """Return the nodes whose agents killed workers that did not end within 30 s of SIGTERM."""
        return [node for node in self.agents if "forcefully exiting" in self.log_of(node)]

    def output_tail(self) -> str:
        return "\n".join(f"-- node {node}\n{self.log_of(node)[-6000:]}" for node in self.agents)

    def end(self) -> None:
        for node in self.agents:
            self.signal(node, signal.SIGKILL)
            self.agents[node].wait(HANG_TIMEOUT_S)
        # Workers whose agent was killed are not its children any more.
        for pid in {line.pid for line in self.lines()}:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if str(self.folder) in " ".join(psutil.Process(pid).cmdline()):
                    os.kill(pid, signal.SIGKILL)


@contextmanager
def job(folder: Path, *more: str, kind: type[Job] = Job) -> Iterator[Job]:
    """Yield a job without nodes; its store is a separate process that outlives all nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    with store_of_example(port, folder / "store.log"):
        nodes = kind(folder, port, more)
        try:
            yield nodes
        finally:
            nodes.end()


@contextmanager
def store_of_example(port: int, log: Path) -> Iterator[None]:
    """Run the example's store, ready to accept connections."""
    command = [sys.executable, str(EXAMPLE / "store.py"), "--host=127.0.0.1", f"--port={port}"]
    with log.open("wb") as output:
        store = subprocess.Popen(command, env=environment(), stdout=output, stderr=output)
    try:
        until = time.monotonic() + HANG_TIMEOUT_S
        while f"listening for agents on port {port}" not in log.read_text():
            assert store.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield
        store.terminate()
        assert store.wait(HANG_TIMEOUT_S) == 0, log.read_text()
    finally:
        store.kill()
        store.wait()
