"""Kill and restart a run in random ways for a given time, and check each restart bitwise.

    python -m tests.jobs.soak --minutes 60 --seed 1 --plot soak.png

A job of torchrun's elastic agent, with one to four nodes on this machine, trains a deterministic
model, whose state after each step does not depend on the number of devices. Workers and nodes are
killed at any time and during saves, nodes join, all nodes are killed and restarted with another
ZeRO stage and other save options, and the newest checkpoint is damaged. Each world records its
state when it starts.

With ``--nodes``, each step is saved on ``node://``: each node has its own disk, which is lost when
the node is killed, and the damaged file is one of two copies.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from typing_extensions import override

from tests.jobs._job import RENDEZVOUS, Job, StepRecord, in_own_mounts, job
from tests.jobs._soak_run import SAVE_EVERY, SoakRun
from tests.support.processes import HANG_TIMEOUT_S
from tests.support.ranks import ROOT, environment

MOST_NODES = 4
SCRIPT = Path(__file__).with_name("_soak_run.py")

KILL_WORKER, KILL_NODE = "a worker is killed", "a node is killed"
KILL_IN_SAVE = "a node is killed in a save"
JOIN, OTHER_STAGE = "a node joins", "all are killed, another stage"
DAMAGE = "all are killed, the newest checkpoint is damaged"


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the job, and its cost."""

    kind: str
    at: float
    """Time of the event, in seconds."""

    world: int
    """Number of nodes after the event."""

    step: int
    """The last step that any rank completed before the next world started."""

    published: int
    """The step of the newest intact checkpoint just after the event."""

    in_background: bool = True
    """Whether the lost world saved in the background."""

    resumed: int = -1
    """The step from which the next world continued."""

    seconds: float = 0.0
    """Time from the event to the next world's first step."""

    @property
    def lost(self) -> int:
        return self.step - self.resumed


@dataclass
class SoakJob(Job):
    run: SoakRun = field(default_factory=lambda: SoakRun(""))
    generation: int = 0
    """Number of jobs started so far, which makes the rendezvous ids unique."""

    @override
    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes=1:{MOST_NODES}", "--nproc-per-node=1", "--max-restarts=1000"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}"),
            f"--rdzv-id=soak-{self.generation}",
            f"--rdzv-conf=is_host=0,{RENDEZVOUS}",
            *(str(SCRIPT), self.run.write()),
        ]

    @override
    def settings(self, node: int) -> dict[str, str]:
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(ROOT)}
        return {**super().settings(node), **own}

    @property
    def alive(self) -> list[int]:
        return [node for node in self.agents if node not in self.killed]

    def saved(self) -> Iterator[Path]:
        """Yield the folders of checkpoints, published or not."""
        return self.checkpoints.glob("step=*.ckpt")


@dataclass
class SoakJobOnNodes(SoakJob):
    """A job whose nodes see a disk of their own at the same path."""

    def disk(self, node: int) -> Path:
        return self.folder / f"disk-{node}"

    @override
    def prefix(self, node: int) -> tuple[str, ...]:
        (local := self.folder / "local").mkdir(exist_ok=True)
        self.disk(node).mkdir(exist_ok=True)
        return in_own_mounts([("mount", "--bind", str(self.disk(node)), str(local))])

    @override
    def saved(self) -> Iterator[Path]:
        return self.folder.glob("disk-*/run/step=*.ckpt")

    @override
    def unpublished(self) -> list[Path]:
        return [path for path in self.saved() if not (path / "manifest.json").exists()]


class Soak:
    """The driver: it disturbs a job for a given time, and checks the results."""

    def __init__(self, nodes: SoakJob, seed: int) -> None:
        self.nodes, self.random = nodes, random.Random(seed)
        self.events: list[Event] = []
        self.damaged: set[tuple[int, int]] = set()
        """Inode and time of the manifests of damaged checkpoints, which a later save replaces."""

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._start_all()
        began = self._wait_for_step(since=0.0, world=len(self.nodes.alive)).time
        while time.monotonic() < until:
            # At any time within a step, and before or after any save.
            time.sleep(self.random.uniform(0.0, 3.0))
            event = self._do(self._choose())
            start = self._wait_for_step(event.at, event.world)
            # Within an hour, two worlds may use the same port.
            steps = [line for line in self._steps() if line.time >= began]
            first = min(
                line.time
                for line in steps
                if line.met_at == start.met_at and line.time >= start.time
            )
            # A node that joins stops the others only some steps later, so count the steps of the
            # last world until then. After a resume from an older checkpoint, earlier worlds may
            # have come further.
            before = [line for line in steps if line.time < start.time]
            last = max(before, key=lambda line: line.time, default=None)
            of_last = (line.step for line in before if last and line.met_at == last.met_at)
            step = max(of_last, default=0)
            event = replace(event, step=step, resumed=start.step, seconds=first - event.at)
            began = start.time
            self.events.append(event)
            print(
                f"{event.kind}: {event.world} nodes, ZeRO-{self.nodes.run.stage}, continued from "
                f"step {event.resumed} of {event.step} after {event.seconds:.0f} s",
                flush=True,
            )
        self.nodes.end()

    def _choose(self) -> str:
        kinds = [KILL_WORKER, OTHER_STAGE, DAMAGE]
        alive = len(self.nodes.alive)
        if alive > 1:
            kinds += [KILL_NODE, KILL_NODE, KILL_IN_SAVE]
        if alive < MOST_NODES:
            kinds += [JOIN, JOIN]
        return self.random.choice(kinds)

    def _do(self, kind: str) -> Event:
        """Perform an event; return the details that are known immediately."""
        nodes = self.nodes
        node = self.random.choice(nodes.alive)
        if kind == KILL_IN_SAVE:
            nodes.stop_in_a_save(node)
        at = time.time()
        if kind == KILL_WORKER:
            nodes.signal(node, signal.SIGKILL, agent=False)
        elif kind in {KILL_NODE, KILL_IN_SAVE}:
            nodes.kill(node)
            if isinstance(nodes, SoakJobOnNodes):
                shutil.rmtree(nodes.disk(node))
        alive = nodes.alive
        if kind in {OTHER_STAGE, DAMAGE}:
            nodes.kill(*alive)
        step = max((line.step for line in self._steps()), default=0)
        in_background = nodes.run.async_save or nodes.run.on_nodes
        if kind == DAMAGE:
            self._damage_newest(copies=min(2, len(alive)) if nodes.run.on_nodes else 1)
        published = max(self._intact(), default=0)
        if kind in {OTHER_STAGE, DAMAGE}:
            self._start_all(alive)
        elif kind == JOIN:
            nodes.start(min(set(range(MOST_NODES)) - set(nodes.alive)))
        return Event(kind, at, len(nodes.alive), step, published, in_background)

    def _start_all(self, before: Sequence[int] = ()) -> None:
        """Start a job with another stage and save options, and another size if disks are shared."""
        nodes = self.nodes
        nodes.generation += 1
        nodes.run = replace(
            nodes.run,
            stage=self.random.choice([1, 2, 3]),
            async_save=self.random.random() < 0.5,
            module_weights=self.random.random() < 0.5,
        )
        size = self.random.randint(1, MOST_NODES)
        nodes.start(*(before if before and nodes.run.on_nodes else range(size)))

    def _damage_newest(self, copies: int) -> None:
        """Change a byte of a copy of the newest checkpoint, if there is an older one."""
        *others, newest = sorted(self._intact().items()) or [(0, Path())]
        if not others:
            return
        if copies == 1:
            self.damaged.add(_written(newest[1]))
        path = self.random.choice(sorted(newest[1].rglob("checkpoint/*_optim_states.pt")))
        data = bytearray(path.read_bytes())
        # The second half of the file contains the tensors.
        data[self.random.randrange(len(data) // 2, len(data) * 3 // 4)] ^= 0x10
        path.write_bytes(data)

    def _intact(self) -> dict[int, Path]:
        """Return the published checkpoints that were not damaged, by step."""
        found = {}
        for path in self.nodes.saved():
            with suppress(FileNotFoundError):  # A live run deletes checkpoints.
                if _written(path) not in self.damaged:
                    found[int(path.stem.rpartition("=")[2])] = path
        return found

    def _steps(self) -> list[StepRecord]:
        return [line for line in self.nodes.lines() if line.is_step]

    def _wait_for_step(self, since: float, world: int) -> StepRecord:
        found: list[StepRecord] = []

        def taken() -> bool:
            lines = self.nodes.lines()
            new = [line for line in lines if line.time > since and not line.is_step]
            met = {line.met_at for line in new if line.world == world}
            began = {line.met_at for line in lines if line.is_step and line.met_at in met}
            found[:] = [line for line in new if line.met_at in began]
            return bool(found)

        self.nodes.wait_until(taken, f"step of a world of {world} ranks")
        return found[-1]


def _written(checkpoint: Path) -> tuple[int, int]:
    """Return a value that distinguishes a published checkpoint from its replacement."""
    status = (checkpoint / "manifest.json").stat()
    return status.st_ino, status.st_mtime_ns


def wrong_restarts(soak: Soak, folder: Path) -> list[str]:
    """Return a message for each restart that was not bitwise from the newest intact save.

    A blocking save is linked only after all ranks have agreed on it. If a rank is lost between,
    the checkpoint is published, but ``last.ckpt`` still names the previous one.
    """
    wrong = [
        f"{event.kind}: continued from step {event.resumed}, although {event.published} is "
        "published"
        for event in soak.events
        if event.resumed < event.published - (0 if event.in_background else SAVE_EVERY)
    ]
    recorded = _recorded(folder)
    undisturbed = _undisturbed(folder / "undisturbed", {step for step, _ in recorded})
    for step, held in recorded:
        differs = sorted(key for key, value in undisturbed[step].items() if held.get(key) != value)
        if differs or set(held) != set(undisturbed[step]):
            wrong.append(f"the state at step {step} differs in {differs[:3]}")
    return wrong


def _recorded(folder: Path) -> list[tuple[int, dict[str, str]]]:
    """Return the recorded steps and states."""
    found = []
    for path in folder.glob("held-*.jsonl"):
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                values = json.loads(line)
                found.append((int(values["step"]), dict(values["held"])))
    return found


def _undisturbed(folder: Path, steps: Iterable[int]) -> dict[int, dict[str, str]]:
    """Return the states of an undisturbed run on one device after these steps."""
    wanted = tuple(sorted(steps))
    if not wanted:
        return {}
    folder.mkdir()
    run = SoakRun(str(folder), stage=1, record_at=wanted)
    variables = {**environment(), "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, str(SCRIPT), run.write()],
        check=True,
        cwd=ROOT,
        env=variables,
        timeout=HANG_TIMEOUT_S + max(wanted),
    )
    return dict(_recorded(folder))


@contextmanager
def soak_job(folder: Path, *, on_nodes: bool = False) -> Iterator[SoakJob]:
    with job(folder, kind=SoakJobOnNodes if on_nodes else SoakJob) as nodes:
        assert isinstance(nodes, SoakJob)
        nodes.run = SoakRun(str(folder), on_nodes=on_nodes)
        yield nodes


def report(events: list[Event]) -> Iterator[str]:
    yield "| | restarts | lost steps | maximum | seconds to the next step, median | maximum |"
    yield "|---|---:|---:|---:|---:|---:|"
    for kind in sorted({event.kind for event in events}):
        of_kind = [event for event in events if event.kind == kind]
        yield _row(kind, of_kind)
    if events:
        yield _row("**all**", events)


def _row(name: str, events: list[Event]) -> str:
    lost, seconds = [e.lost for e in events], [e.seconds for e in events]
    return (
        f"| {name} | {len(events)} | {sum(lost)} | {max(lost)} | {median(seconds):.0f} | "
        f"{max(seconds):.0f} |"
    )


def plot(lines: list[StepRecord], events: list[Event], path: Path) -> None:
    from matplotlib.figure import Figure

    began = min(line.time for line in lines)
    axes = (figure := Figure(figsize=(11, 5), layout="constrained")).subplots()
    for world in range(1, MOST_NODES + 1):
        of_world = [line for line in lines if line.is_step and line.world == world]
        minutes = [(line.time - began) / 60 for line in of_world]
        steps = [line.step for line in of_world]
        axes.plot(minutes, steps, ".", markersize=2, label=f"{world} nodes")
    for event in events:
        axes.axvline((event.at - began) / 60, color="0.8", linewidth=0.5, zorder=0)
    axes.set(xlabel="minutes", ylabel="optimizer step", title="Each vertical line is an event")
    axes.legend(markerscale=6)
    figure.savefig(path, dpi=110)


def main() -> int:
    """Run the soak from the command line; return 1 if a restart was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", action="store_true", help="save on node://; needs root")
    parser.add_argument("--plot", type=Path, help="file for a plot of the steps over time")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        soak_job(Path(folder) / "run", on_nodes=options.nodes) as nodes,
    ):
        soak = Soak(nodes, options.seed)
        soak.run(options.minutes * 60)
        wrong = wrong_restarts(soak, nodes.folder)
        if options.plot:
            plot(nodes.lines(), soak.events, options.plot)
    print(*report(soak.events), *wrong, f"silent errors: {len(wrong)}", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
