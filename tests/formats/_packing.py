"""Pack folders of golden data. Other commits run this module, so it imports no project code."""

from __future__ import annotations

import tarfile
from pathlib import Path


def pack(folder: Path, archive: Path) -> None:
    """Pack a folder into an archive; equal files give equal bytes."""
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for path in sorted(folder.rglob("*")):
            tar.add(path, str(path.relative_to(folder)), recursive=False, filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.isdir() else 0o644
    return member
