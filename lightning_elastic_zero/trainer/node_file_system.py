"""The file system of fsspec that Lightning needs for a ``dirpath`` on nodes.

A ``ModelCheckpoint`` lists its folder, and Lightning asks for the time of the last checkpoint.
After a join, the names are on each node, so these are the answers of this one. All else goes
through the strategy: no file can be opened here, and ``makedirs`` does nothing.
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from fsspec import AbstractFileSystem
from typing_extensions import override

from lightning_elastic_zero.core.manifest import MANIFEST_NAME
from lightning_elastic_zero.errors import UnsupportedError


class NodeFileSystem(AbstractFileSystem):
    """Files of this node, to look at; hidden ones are the library's own."""

    protocol: ClassVar[str] = "node"
    root_marker: ClassVar[str] = "/"

    @override
    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        file = Path(self._strip_protocol(path))
        status, kind = file.stat(), "directory" if file.is_dir() else "file"
        return {"name": str(file), "size": status.st_size, "type": kind, "mtime": status.st_mtime}

    @override
    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        entries = Path(self._strip_protocol(path)).iterdir()
        names = sorted(str(entry) for entry in entries if entry.name[0] != ".")
        return [*map(self.info, names)] if detail else names

    @override
    def modified(self, path: str) -> datetime:
        manifest = f"{path}/{MANIFEST_NAME}"
        # A folder is as old as its copy on this node.
        named = manifest if self.exists(manifest) else path
        return datetime.fromtimestamp(self.info(named)["mtime"], timezone.utc)

    @override
    def _open(self, path: str, *_: Any, **__: Any) -> NoReturn:
        msg = f"{path}: nodes have checkpoints only. Choose a path on a disk for other files"
        raise UnsupportedError(msg)
