"""Copying a checkpoint so that the copy outlives a power cut."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from lightning_elastic_zero.storage.contents import contents_of
from lightning_elastic_zero.storage.places import sync_directory

_BLOCK_BYTES = 16 << 20


def copy_checkpoint(source: Path, target: Path, on_block: Callable[[], None]) -> None:
    """Copy a checkpoint of this library's, and nothing that somebody else put into it.

    Args:
        source: What is copied.

        target: Where nothing is yet.

        on_block: Called now and then, at least every 16 MiB: a large copy takes minutes.

    Raises:
        OSError: The copy is not whole.

    """
    contents = contents_of(source)
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
        while block := read.read(_BLOCK_BYTES):
            rest = memoryview(block)
            while rest:
                rest = rest[written.write(rest) :]
            # Block by block, so that none of these calls is as long as the file.
            os.fdatasync(written.fileno())
            on_block()
        os.fsync(written.fileno())
