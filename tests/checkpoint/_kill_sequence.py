"""A run that is killed and restarted in one folder, with each mode of saving."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.storage.disk_checkpoints import repair_all
from lightning_elastic_zero.storage.ownership import ProcessIdentity
from tests.support.deterministic_training import Table, Training, published, train
from tests.support.processes import PROMPT_TIMEOUT_S
from tests.support.ranks import Pools, World
from tests.support.save_steps import KillPoint
from tests.support.state_digests import read_digests
from tests.support.tables import KILLS

PATIENCE_S = 0.3
"""Time for which surviving ranks may continue before a launcher would kill them too."""

RUN_S = PROMPT_TIMEOUT_S
"""A run that takes longer hangs."""

WORLDS = (2, 3, 2, 1)
STAGES = (2, 3, 1)


@dataclass
class KillSequence:
    """Successive runs in one folder, each of which is killed."""

    pools: Pools
    root: Path
    table: Table
    """The state after each step of an undisturbed run, which every run must have."""
    row: str
    """The row of the printed table."""
    strategy: Mapping[str, Any] = field(default_factory=dict)
    """Options of the strategy, such as the mode of saves."""
    wrong: list[str] = field(default_factory=list)
    _count: int = 0
    _began: int = 0
    """The step from which the last run started."""
    _linked: bool = False
    """Whether ``last.ckpt`` has existed, after which it must never disappear."""

    def kill(self, kill_point: KillPoint) -> bool:
        """Kill a run at a step, and check its files; return whether it reached the step."""
        (self.root / "landed").unlink(missing_ok=True)
        self._run(self._until_dead, kill_point)
        landed = (self.root / "landed").exists()
        self._check(f"{kill_point}", landed=landed)
        return landed

    def kill_at_random(self, draw: random.Random) -> None:
        """Kill one rank or all at a random instant of a run that saves."""
        delay_s, everyone = draw.uniform(0, 0.6), draw.random() < 0.5

        def strike(world: World) -> None:
            _wait_for(self.root / "started", world)
            time.sleep(delay_s)
            for pid in world.pids if everyone else [draw.choice(world.pids)]:
                os.kill(pid, signal.SIGKILL)
            self._until_dead(world)

        self._run(strike, None)
        self._check(f"after {delay_s:.3f} s, {everyone=}", landed=True)

    def run_undisturbed(self) -> None:
        """Run once undisturbed; this removes the leftovers of killed runs."""
        self._run(self._until_dead, None, steps=2)
        self._check("undisturbed", landed=None)
        # A truncated owner file names no process that could be dead, so it is removed by age.
        hidden = [
            str(path)
            for path in self.root.glob("*/.zero-*")
            if not (path.suffix == ".json" and ProcessIdentity.read(path) is None)
        ]
        if hidden:
            self.wrong.append(f"left behind: {hidden}")

    # -- one run -----------------------------------------------------------------------------

    def _run(
        self, watch: Callable[[World], None], kill_point: KillPoint | None, steps: int = 4
    ) -> None:
        self._count += 1
        size = WORLDS[self._count % len(WORLDS)]
        training = Training(
            str(self.root),
            STAGES[self._count % len(STAGES)],
            steps,
            self._resume_from(),
            kill_point,
        )
        training = replace(training, strategy=self.strategy)
        (self.root / "started").unlink(missing_ok=True)
        world = self.pools.start(size)
        try:
            for connection in world.ranks:
                connection.send(partial(train, training))
            watch(world)
        finally:
            output = world.output_tail() if not (self.root / "started").exists() else ""
            world.end()
        self._check_restart(training, output)

    def _until_dead(self, world: World) -> None:
        """Wait until all ranks have ended, or until one died and the others had time to react."""
        waiting = list(world.ranks)
        end = time.monotonic() + RUN_S
        while waiting and (ready := wait(waiting, max(0.0, end - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                waiting.remove(connection)
                with suppress(EOFError, OSError):
                    kind, *_ = _unpickled(connection)
                    if kind == "value":
                        continue
                end = min(end, time.monotonic() + PATIENCE_S)

    def _resume_from(self) -> str | None:
        """Return the newest checkpoint of one of the folders, or its last."""
        over, top = self.root / "over", self.root / "top"
        repair_all(over)
        last = top / "last.ckpt"
        ways = itertools.chain([over / "same.ckpt"] if self._count % 2 else [last])
        for path in (*ways, last, over / "same.ckpt", *_newest(top)):
            if path.exists():
                return str(path)
        return None

    # -- checks ------------------------------------------------------------------------------

    def _check_restart(self, training: Training, output: str) -> None:
        started = self.root / "started"
        if not started.exists():
            self._note("not restarted", f"from {training.ckpt_path}: {output[-1500:]}")
            return
        held = {int(step): values for step, values in json.loads(started.read_text()).items()}
        self._began = max(held, default=0)
        if training.ckpt_path is None:
            return
        KILLS.count(self.row, "restarts")
        for step, values in held.items():
            if differ := [key for key, value in values.items() if self.table[step][key] != value]:
                self._note("silent errors", f"restart at step {step} from {training}: {differ}")

    def _check(self, what: str, *, landed: bool | None) -> None:
        """Compare every published checkpoint with the trained state, bit for bit."""
        if landed is not None:
            KILLS.count(self.row, "tried")
            KILLS.count(self.row, "landed", by=landed)
        floor_path = self.root / "floor"
        floor = json.loads(floor_path.read_text()) if floor_path.exists() else {}
        for name in ("over", "top"):
            repair_all(self.root / name)
            found = published(self.root / name)
            sound = [s for s, path in found.items() if self._is_sound(s, path, what)]
            # A run that started from an older checkpoint saves older steps than those that it
            # replaces.
            if max(sound, default=0) < min(floor.get(name, 0), self._began + 1):
                self._note("last-good losses", f"{what}: {name} has {sound}, had {floor[name]}")
        last = self.root / "top" / "last.ckpt"
        if (last / "manifest.json").exists():
            self._linked = True
        elif last.is_symlink() or self._linked:
            leads = f"leads to {last.readlink()}" if last.is_symlink() else "is gone"
            self._note("links to nothing", f"{what}: last.ckpt {leads}")

    def _is_sound(self, step: int, path: Path, what: str) -> bool:
        KILLS.count(self.row, "checkpoints checked")
        try:
            values = read_digests(path)
        except ElasticZeroError as error:
            self._note("not loadable", f"{what}: {error}")
            return False
        wanted = {key: value for key, value in self.table[step].items() if key != "lr"}
        if differ := [key for key, value in wanted.items() if values.get(key) != value]:
            self._note("silent errors", f"{what}: {path.name} at step {step}: {differ}")
        return not differ

    def _note(self, column: str, text: str) -> None:
        KILLS.count(self.row, column)
        self.wrong.append(f"{column}: {text}")


MakeChain = Callable[[str, str], KillSequence]
"""Makes a sequence for a mode of saves and a row of the table."""


def _newest(folder: Path) -> list[Path]:
    return [path for _, path in sorted(published(folder).items(), reverse=True)]


def _unpickled(connection: Connection) -> tuple[str, Any]:
    import pickle

    answer: tuple[str, Any] = pickle.loads(connection.recv_bytes())  # noqa: S301 (from our child)
    return answer


def _wait_for(path: Path, world: World) -> None:
    end = time.monotonic() + RUN_S
    while not path.exists():
        assert time.monotonic() < end, world.output_tail()
        time.sleep(0.005)


MODES: dict[str, Mapping[str, Any]] = {
    "blocking": {},
    "background": {"async_save": True},
}
"""Options of the strategy, by the mode's name in the tables."""


def wait_for_published(trainer: pl.Trainer) -> None:
    """Wait until a background save is published; raise ElasticZeroError if it failed."""
    wait_for_save = getattr(trainer.strategy, "wait_for_save", None)
    if wait_for_save is not None:
        wait_for_save()
