"""Copying a directory so that the copy outlives a power cut."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lightning_elastic_zero.storage.places import sync_directory
from lightning_elastic_zero.storage.writeback import Writeback

_BLOCK_BYTES = 1 << 20


def copy_directory(source: Path, target: Path, on_block: Callable[[], None]) -> None:
    """Copy a directory, its files and folders; links in it are followed.

    Args:
        source: What is copied.

        target: Where nothing is yet.

        on_block: Called now and then, at least every MiB: a large copy takes minutes.

    Raises:
        OSError: The copy is not whole.

    """
    for folder, _, names in os.walk(source, onerror=_raise):
        there = target / Path(folder).relative_to(source)
        there.mkdir()
        for name in names:
            _copy_file(Path(folder, name), there / name, on_block)
    for folder, _, _ in os.walk(target, topdown=False):
        sync_directory(Path(folder))


def _copy_file(source: Path, target: Path, on_block: Callable[[], None]) -> None:
    with source.open("rb") as read, target.open("xb", buffering=0) as written:
        writeback = Writeback(written.fileno(), on_block)
        while block := read.read(_BLOCK_BYTES):
            rest = memoryview(block)
            while rest:
                rest = rest[written.write(rest) :]
            writeback.wrote(len(block))
            on_block()
        writeback.finish()


def _raise(error: OSError) -> None:
    raise error
