"""Exchanging two names in one step, where the system can."""

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
