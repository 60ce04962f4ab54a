"""The named steps of a save, as seen by the saving process, which is killed at one of them.

The library has no part in this: the process under test watches its own system calls.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_elastic_zero.storage import disk_checkpoints as atomic

BY_EACH_RANK = (
    "during a shard",
    "after a shard's fsync",
    "after the sums' fsync",
)
"""Steps that every rank reaches, in its own files. Only rank 0 reaches the others."""

STEPS = (
    "before staging",
    "during a shard",
    "after a shard's fsync",
    "after the sums' fsync",
    "during the model file",
    "before the manifest",
    "after the manifest's fsync",
    "before a rename to a free name",
    "before the exchange",
    "after the exchange",
    "before two renames",
    "between two renames",
    "after the renames",
    "while the replaced one is deleted",
    "after the link is asked for",
    "before the link is changed",
    "while the new link is hidden",
    "after the link is changed",
    "before top-k deletes",
    "while top-k deletes",
)

TWO_RENAMES = ("before two renames", "between two renames")
"""Steps that are reached only where names cannot be exchanged."""

OFTEN = {
    "during a shard": 40,
    "during the model file": 8,
    "after the sums' fsync": 4,
    "while the replaced one is deleted": 12,
    "while top-k deletes": 12,
}
"""Visits to a step in the first saves of a run; other steps have about three."""

ALL, FIRST, OTHER = "all", "rank 0", "another"


@dataclass(frozen=True)
class KillPoint:
    step: str
    whom: str = ALL
    nth: int = 1

    @classmethod
    def drawn(cls, step: str, turn: int) -> KillPoint:
        """Return which ranks are killed, and at which visit to the step; ranks take turns."""
        draw = random.Random(f"{step}-{turn}")
        return cls(step, (ALL, FIRST, OTHER)[turn % 3], 1 + draw.randrange(OFTEN.get(step, 3)))


class SaveStepTracer:
    """Counts the steps that this process reaches, and kills at the selected one."""

    def __init__(self, kill_point: KillPoint, root: Path, rank: int, world: int) -> None:
        self._kill_point, self._root = kill_point, root
        self._rank, self._world = rank, world
        self._count = 0
        self._placed = False
        self._linked = False
        self._lock = threading.Lock()
        alone = kill_point.whom == OTHER and kill_point.step in BY_EACH_RANK
        self._acts = rank == (min(1, world - 1) if alone else 0)
        self._write, self._fsync = os.write, os.fsync
        (root / f"pid-{rank}").write_text(str(os.getpid()))

    def watch(self) -> None:
        os.write, os.fsync = self._on_write, self._on_fsync  # type: ignore[assignment]
        exchange = atomic.exchange_names

        def on_exchange(one: Path, other: Path) -> bool:
            if not one.name.startswith(".zero-staging-"):
                return exchange(one, other)
            if self._kill_point.step in TWO_RENAMES:
                return False
            self.reach("before the exchange")
            done = exchange(one, other)
            self._placed = True
            self.reach("after the exchange")
            return done

        atomic.exchange_names = on_exchange
        sys.addaudithook(self._on_event)

    def reach(self, step: str) -> None:
        if step != self._kill_point.step or not self._acts:
            return
        with self._lock:
            self._count += 1
            if self._count == self._kill_point.nth:
                self._strike()

    def _strike(self) -> None:
        (self._root / "landed").write_text(self._kill_point.step)
        ranks = {FIRST: [0], OTHER: [min(1, self._world - 1)], ALL: list(range(self._world))}
        victims = [int((self._root / f"pid-{r}").read_text()) for r in ranks[self._kill_point.whom]]
        # This process is the last one.
        for pid in sorted(victims, key=lambda pid: pid == os.getpid()):
            os.kill(pid, signal.SIGKILL)

    # -- detection of steps ------------------------------------------------------------------

    def _on_write(self, descriptor: int, data: Any) -> int:
        name = _path_of(descriptor).name
        half = memoryview(data)[: max(1, len(data) // 2)]
        if not name.endswith("_states.pt"):
            return self._write(descriptor, data)
        # The caller writes the rest with another call.
        count = self._write(descriptor, half)
        self.reach("during a shard" if "optim" in name else "during the model file")
        return count

    def _on_fsync(self, descriptor: int) -> None:
        path = _path_of(descriptor)
        if self._linked and path.is_dir():
            self._linked = False
            self.reach("after the link is changed")
        self._fsync(descriptor)
        if path.name.endswith("_optim_states.pt"):
            self.reach("after a shard's fsync")
        elif path.name.endswith(".sums"):
            self.reach("after the sums' fsync")
        elif path.name == "manifest.json":
            self.reach("after the manifest's fsync")
        elif self._placed and path.is_dir():
            self._placed = False
            self.reach("after the renames")

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if handle := self._HANDLERS.get(event):
            handle(self, *args)

    def _on_mkdir(self, path: Any, *_: object) -> None:
        if _name(path).startswith(".zero-staging-"):
            self.reach("before staging")

    def _on_open(self, path: Any, mode: object, _: object) -> None:
        if "x" in str(mode) and _name(path) == "manifest.json":
            self.reach("before the manifest")

    def _on_rename(self, source: Any, target: Any, *_: object) -> None:
        if _name(target).startswith(".zero-previous-"):
            self.reach("before two renames")
        elif _name(target).startswith(".zero-removed-"):
            self.reach("before top-k deletes")
        elif _name(source).startswith(".zero-link-"):
            self._linked = True
            self.reach("while the new link is hidden")
        elif _name(source).startswith(".zero-staging-"):
            parent = Path(os.fsdecode(source)).parent
            aside = any(n.startswith(".zero-previous-") for n in map(_name, parent.iterdir()))
            self._placed = True
            self.reach("between two renames" if aside else "before a rename to a free name")

    def _on_symlink(self, _: object, path: Any, *__: object) -> None:
        if _name(path).startswith(".zero-link-"):
            self.reach("before the link is changed")

    def _on_remove(self, path: Any, folder: int) -> None:
        where = str(_path_of(folder) if folder >= 0 else Path(os.fsdecode(path)).parent)
        if ".zero-removed-" in where:
            self.reach("while top-k deletes")
        elif ".zero-staging-" in where or ".zero-previous-" in where:
            self.reach("while the replaced one is deleted")

    _HANDLERS: dict[str, Callable[..., None]] = {  # noqa: RUF012
        "os.mkdir": _on_mkdir,
        "open": _on_open,
        "os.rename": _on_rename,
        "os.symlink": _on_symlink,
        "os.remove": _on_remove,
    }


def _path_of(descriptor: int) -> Path:
    try:
        return Path(f"/proc/self/fd/{descriptor}").readlink()
    except OSError:
        return Path()


def _name(path: Any) -> str:
    return Path(os.fsdecode(path)).name if isinstance(path, str | bytes | os.PathLike) else ""
