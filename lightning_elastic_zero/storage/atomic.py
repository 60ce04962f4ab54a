"""Giving a name to something else: in one step where the system can exchange two names."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_HERE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}


def exchange_names(one: Path, other: Path) -> bool:
    """Exchange two names in one step; links are exchanged, not followed.

    Returns:
        Whether it was done: the C library, the kernel or the filesystem may not be able to.

    Raises:
        OSError: the system can, but did not.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    result = renameat2(
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(one)),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(other)),
        ctypes.c_uint(_RENAME_EXCHANGE),
    )
    if result == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_HERE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def put_in_place(new: Path, target: Path, aside: Path) -> None:
    """Rename to the target, in one step; what is there is then called ``new`` or ``aside``.

    Where the system cannot exchange two names, a directory gives way by two renames, and the name
    is free for some microseconds. If the second one fails, the first is taken back; an interrupt
    in between ends with the new one in its place, which is whole.

    Args:
        new: a directory or a link, on the disk.
        target: where it is to be found. A link there is replaced, if the new one is a link too.
        aside: a free name beside the target.

    Raises:
        OSError: it could not be done, and the target is what it was.
    """
    if not os.path.lexists(target) or not (_is_directory(new) or _is_directory(target)):
        new.replace(target)
    elif not exchange_names(new, target):
        try:
            target.rename(aside)
            new.rename(target)
        except OSError:
            rename_if_free(aside, target)
            raise
        except BaseException:
            rename_if_free(new, target)
            raise


def rename_if_free(path: Path, target: Path) -> None:
    """Rename what is there to the target, if nothing has that name."""
    if os.path.lexists(path) and not os.path.lexists(target):
        path.rename(target)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
