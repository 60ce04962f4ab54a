"""The nodes of a torchrun job on one machine: an agent each, its workers, and their steps."""

from __future__ import annotations

import json
import os
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
    """In seconds, by the clock that all nodes share here."""

    event: str
    step: int
    rank: int
    world: int
    met_at: str
    """Address and port of the store in which the world's ranks met: no two worlds have the same."""

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
    """Of all ranks, sorted."""

    loss: float


Undisturbed: TypeAlias = dict[int, Step]
"""The steps of a run to which nothing happens, by number."""


def read_lines(folder: Path) -> list[StepRecord]:
    """Return the records of all ranks by time, without a last line that was cut."""
    found = []
    for path in folder.glob("steps-*.jsonl"):
        for text in path.read_text().splitlines():
            with suppress(ValueError):
                plain = json.loads(text)
                found.append(StepRecord(**{**plain, "samples": tuple(plain.get("samples", ()))}))
    return sorted(found)


def steps_of(lines: Iterable[StepRecord]) -> dict[tuple[str, int], Step]:
    """Return the steps that all ranks of a world have completed, by world and step."""
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
    """Check that each step, repeated ones included, equals that of the undisturbed run."""
    steps = steps_of(lines)
    assert {step for _, step in steps} == set(undisturbed)
    for (_, number), step in steps.items():
        assert step.samples == undisturbed[number].samples, f"step {number}"
        assert step.loss == pytest.approx(undisturbed[number].loss, rel=1e-5), f"step {number}"


def steps_taken_again(lines: list[StepRecord]) -> dict[float, int]:
    """Return how many steps were repeated by each world after the first, by its start."""
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
    """Return the time from an instant to the first step of a world that began later."""
    began = {line.met_at for line in lines if not line.is_step and line.time > since}
    later = [line.time for line in lines if line.is_step and line.met_at in began]
    return min(later) - since


def count_event(event: str, lines: list[StepRecord], since: float) -> None:
    """Record the cost of an event for the table."""
    again = next(steps for start, steps in steps_taken_again(lines).items() if start > since)
    ELASTIC.count(event, "tried")
    ELASTIC.count(event, "steps taken again", again)
    ELASTIC.count(event, "seconds to the next step", round(seconds_to_next_step(lines, since)))


def start_process(
    command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, which adds its output to a log."""
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


EXAMPLE = ROOT / "examples" / "torchrun"

RENDEZVOUS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=8"
"""A node that is gone is known to be after 8 s, in the place of 15."""

GLOBAL_BATCH, SAMPLES, EPOCHS, SAVE_EVERY = 48, 480, 3, 5
STEPS = SAMPLES // GLOBAL_BATCH * EPOCHS

AT, LATER = 12, 22
"""Steps after which things happen; the last saves were at steps 10 and 20."""

NOTICED = "all ranks save and end after this batch"
"""What a rank writes when it receives the signal."""


def arguments(folder: Path, *more: str) -> list[str]:
    """Return arguments for the example: a small model, and the recorder."""
    return [
        "--model.n_embd=32",
        "--model.n_layer=1",
        "--model.dropout=0",  # ranks draw random numbers of their own
        f"--data.samples_per_epoch={SAMPLES}",
        "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--trainer.limit_val_batches=0",
        f"--trainer.max_epochs={EPOCHS}",
        f"--trainer.callbacks.init_args.every_n_train_steps={SAVE_EVERY}",
        "--trainer.callbacks+=tests.elastic.recorder.Recorder",
        f"--trainer.callbacks.folder={folder}",
        *more,
    ]


@dataclass
class Job:
    """A job's nodes by number; each has its own address, 127.0.0.2 and up."""

    folder: Path
    port: int
    more: tuple[str, ...] = ()
    """Further arguments of the example."""

    own_settings: dict[str, str] = field(default_factory=dict)
    """Further environment of the nodes."""

    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)

    def start(self, *nodes: int) -> None:
        """Start or restart nodes by the example's own script."""
        for node in nodes:
            self.killed.discard(node)
            self.agents[node] = start_process(
                [*self.entered(node), *self.command()],
                self.folder / f"node-{node}.log",
                {**environment(), **self.settings(node)},
            )

    def command(self) -> list[str]:
        return ["sh", str(EXAMPLE / "start.sh"), *arguments(self.folder, *self.more)]

    def entered(self, node: int) -> tuple[str, ...]:
        """Return the prefix of a node's command: empty on loopback addresses."""
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
            below = process.children(recursive=True)
            return [process, *below] if agent else below
        return []

    def signal(self, node: int, number: int, *, agent: bool = True) -> float:
        """Send a signal to a node's workers, and to its agent; return the time."""
        now = time.time()
        for process in self.processes(node, agent=agent):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return now

    def kill(self, *nodes: int) -> float:
        """Kill nodes, agents and workers at once; return the time."""
        self.killed.update(nodes)
        now = min([self.signal(node, signal.SIGKILL) for node in nodes])
        for node in nodes:
            self.agents[node].wait(HANG_TIMEOUT_S)
        return now

    @property
    def checkpoints(self) -> Path:
        """The directory behind the nodes' own paths."""
        return self.folder / "checkpoints"

    def last_step(self) -> int:
        """Return the step of the newest published checkpoint; 0 if there is none."""
        name = (self.checkpoints / "last.ckpt").resolve().stem
        return int(name.rpartition("=")[2]) if "=" in name else 0

    def stop_in_a_save(self, node: int) -> None:
        """Stop the workers of rank 0's node during a save, before it is published."""

        def stopped() -> bool:
            if not self.unpublished():
                return False
            self.signal(node, signal.SIGSTOP, agent=False)
            # A thread stops when its system call ends: it may be the one that publishes.
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
        """Make ranks wait at the end of a step, until `go_on`."""
        (self.folder / f"hold-{step}").touch()

    def go_on(self, step: int) -> None:
        (self.folder / f"hold-{step}").unlink()

    def lines(self) -> list[StepRecord]:
        return read_lines(self.folder)

    def wait_for_step(self, step: int, world: int) -> None:
        """Wait until all ranks of a world of this size have completed a step."""
        what = f"step {step} on {world} ranks"
        self._wait_for_all(world, lambda line: line.step == step and line.is_step, what)

    def wait_for_start(self, world: int, since: float) -> None:
        """Wait until all ranks of a world of this size have started training after an instant."""
        self._wait_for_all(world, lambda line: line.time > since, f"world of {world} ranks")

    def _wait_for_all(self, world: int, wanted: Callable[[StepRecord], bool], what: str) -> None:
        def found() -> bool:
            of_world: dict[str, set[int]] = {}
            for line in self.lines():
                if line.world == world and wanted(line):
                    of_world.setdefault(line.met_at, set()).add(line.rank)
            return any(len(ranks) == world for ranks in of_world.values())

        self.wait_until(found, what)

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for a condition; raise TimeoutError if all agents end without it."""
        until = time.monotonic() + HANG_TIMEOUT_S
        while not holds():
            if time.monotonic() > until or not any(a.poll() is None for a in self.agents.values()):
                msg = f"no {what}\n{self.output_tail()}"
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
        # Workers whose agent was killed are nobody's children any more.
        for pid in {line.pid for line in self.lines()}:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if str(self.folder) in " ".join(psutil.Process(pid).cmdline()):
                    os.kill(pid, signal.SIGKILL)


@contextmanager
def job(folder: Path, *more: str, kind: type[Job] = Job) -> Iterator[Job]:
    """Yield a job without nodes; its store runs on none of them, and outlives all."""
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
        while f"agents may come to port {port}" not in log.read_text():
            assert store.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield
        store.terminate()
        assert store.wait(HANG_TIMEOUT_S) == 0, log.read_text()
    finally:
        store.kill()
        store.wait()
