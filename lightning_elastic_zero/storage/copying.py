"""Copying a checkpoint so that the copy outlives a power cut.

Not by ``shutil.copytree``: that copies what others put into the folder too, shows no progress
within a file of many GB, so that the other ranks would take rank 0 for stalled, and syncs nothing.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from lightning_elastic_zero.storage.file_ownership import classify_files
from lightning_elastic_zero.storage.paths import sync_directory
from lightning_elastic_zero.storage.writeback import Writeback

_BLOCK_BYTES = 1 << 20


def copy_checkpoint(source: Path, target: Path, on_block: Callable[[], None]) -> None:
    """Copy a checkpoint of this library's, and nothing that somebody else put into it.

    Args:
        source: what is copied.
        target: where nothing is yet.
        on_block: called now and then, at least every MiB: a large copy takes minutes.

    Raises:
        OSError: the copy is not whole.
    """
    contents = classify_files(source)
    if contents.problem:
        raise OSError(errno.EINVAL, contents.problem, str(source))
    target.mkdir()
    for name in contents.ours:
        (target / name).parent.mkdir(exist_ok=True)
        _copy_file(source / name, target / name, on_block)
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
