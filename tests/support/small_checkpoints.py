"""Small directories that look like checkpoints, and a hook before each system call."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_elastic_zero.core.progress import NO_PROGRESS
from lightning_elastic_zero.storage import disk_checkpoints as atomic
from lightning_elastic_zero.storage.disk_checkpoints import StagedDirectory

_looks: list[Callable[[], None]] = []
_hooked: list[Callable[[str, object], None]] = []
_looking = threading.local()
_one_at_a_time = threading.Lock()
_KINDS = ("open", "os.", "shutil.", "ctypes.")


def _on_event(event: str, _: object) -> None:
    if not _looks or not event.startswith(_KINDS) or getattr(_looking, "now", False):
        return
    _looking.now = True
    try:
        with _one_at_a_time:
            for look in tuple(_looks):
                look()
    finally:
        _looking.now = False


@contextmanager
def before_each_syscall(look: Callable[[], None]) -> Iterator[None]:
    """Call ``look`` before each audited system call in any thread, and at the end."""
    if _on_event not in _hooked:
        # An audit hook cannot be removed; without looks it does nothing.
        sys.addaudithook(_on_event)
        _hooked.append(_on_event)
    _looks.append(look)
    try:
        yield
    finally:
        _looks.remove(look)
    look()


class InterruptAtCall:
    """Raises KeyboardInterrupt before the n-th system call, and before the m-th after that."""

    def __init__(self, *calls: int) -> None:
        self.calls, self.seen = list(calls), 0

    def __call__(self) -> None:
        if not self.calls:
            return
        self.seen += 1
        if self.seen > self.calls[0]:
            self.seen = 0
            del self.calls[0]
            raise KeyboardInterrupt


SHARD = "checkpoint/mp_rank_00_model_states.pt"
"""A file of every ZeRO-1 and ZeRO-2 checkpoint."""


class NoEngine:
    """Replaces DeepSpeed's engine in a ``LiveEngine`` that has its own state."""

    optimizer = None


def manifest_of(files: dict[str, str], mark: str = "") -> str:
    rows = [{"name": name, "size_bytes": len(text)} for name, text in files.items()]
    return json.dumps({"format": "lightning_elastic_zero", "mark": mark, "files": rows})


def fill(path: Path, text: str, *, published: bool = True) -> Path:
    """Write a checkpoint whose files all contain one text."""
    shard = path / SHARD
    shard.parent.mkdir(parents=True, exist_ok=True)
    shard.write_text(text)
    if published:
        (path / "manifest.json").write_text(manifest_of({SHARD: text}, text))
    return path


def complete(text: str) -> dict[str, str]:
    return {SHARD: text, "manifest.json": manifest_of({SHARD: text}, text)}


def contents(directory: Path) -> dict[str, str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_text() for path in files}


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@contextmanager
def no_exchange(*, possible: bool = False) -> Iterator[None]:
    real = vars(atomic)["exchange_names"]
    if not possible:
        vars(atomic)["exchange_names"] = lambda *_: False
    try:
        yield
    finally:
        vars(atomic)["exchange_names"] = real


def publish_staged(
    staged: StagedDirectory,
    *,
    exchange: bool = True,
    instant: str = "",
    act: Callable[[], object] = lambda: None,
) -> bool:
    """Replace a checkpoint with "new", as a save does; return whether ``act`` was called.

    Args:
        staged: the filled directory.
        exchange: whether the file system can exchange names.
        instant: "synced", "set aside", "placed", "kept" (survives a power cut) or "cleaned".
        act: called once, at that instant.
    """
    acted, looks = False, 0

    def do() -> None:
        nonlocal acted
        if not acted:
            acted = True
            act()

    def look() -> None:
        nonlocal looks
        is_there = contents(staged.target) == complete("new")
        looks += is_there
        free = "" if os.path.lexists(staged.target) else "set aside"
        if instant == (("placed", "kept")[looks > 1] if is_there else free):
            do()

    staged.sync()
    if instant == "synced":
        do()
    with no_exchange(possible=exchange), before_each_syscall(look):
        staged.put_in_place()
        staged.clean(NO_PROGRESS)
    if instant == "cleaned":
        do()
    return acted
