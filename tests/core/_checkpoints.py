"""Small directories that are checkpoints, for what only looks at files and never into them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_elastic_zero.storage import publish as atomic
from lightning_elastic_zero.storage.publish import StagedDirectory
from tests.core._syscall_hooks import before_each_syscall

SHARD = "checkpoint/mp_rank_00_model_states.pt"
"""A file that every checkpoint of ZeRO-1 and 2 has."""


def manifest_of(files: dict[str, str], mark: str = "") -> str:
    """Return a manifest that names files, with their sizes in bytes."""
    rows = [{"name": name, "size_bytes": len(text)} for name, text in files.items()]
    return json.dumps({"format": "lightning_elastic_zero", "mark": mark, "files": rows})


def fill(path: Path, text: str, *, published: bool = True) -> Path:
    """Write a checkpoint whose every file holds one text, into a directory that may be there."""
    shard = path / SHARD
    shard.parent.mkdir(parents=True, exist_ok=True)
    shard.write_text(text)
    if published:
        (path / "manifest.json").write_text(manifest_of({SHARD: text}, text))
    return path


def whole(text: str) -> dict[str, str]:
    """Return what ``fill`` leaves, as ``contents`` finds it."""
    return {SHARD: text, "manifest.json": manifest_of({SHARD: text}, text)}


def contents(directory: Path) -> dict[str, str]:
    """Return the text of each file in a tree."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_text() for path in files}


def names_in(directory: Path) -> list[str]:
    """List a directory, hidden names too."""
    return sorted(path.name for path in directory.iterdir())


@contextmanager
def no_exchange(*, possible: bool = False) -> Iterator[None]:
    """Make the system exchange two names within, or not."""
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
    """Publish "new" in the place of another one, as a save does; return whether an act was done.

    Args:
        staged: the directory, filled.
        exchange: whether names can be exchanged.
        instant: "synced", "set aside", "placed", "kept" (it outlives a power cut) or "cleaned".
        act: done once, when all before that instant is done.
    """
    acted, looks = False, 0

    def do() -> None:
        nonlocal acted
        if not acted:
            acted = True
            act()

    def look() -> None:
        nonlocal looks
        is_there = contents(staged.target) == whole("new")
        looks += is_there
        free = "" if os.path.lexists(staged.target) else "set aside"
        if instant == (("placed", "kept")[looks > 1] if is_there else free):
            do()

    staged.sync()
    if instant == "synced":
        do()
    with no_exchange(possible=exchange), before_each_syscall(look):
        staged.publish()
    if instant == "cleaned":
        do()
    return acted
