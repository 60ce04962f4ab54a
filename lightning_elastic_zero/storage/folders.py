"""The folder at a path: on a disk, or in a store, which ``StorePath.store`` chooses by the URL."""

from __future__ import annotations

import os

from lightning_elastic_zero.storage.disk_folder import DiskFolder
from lightning_elastic_zero.storage.folder import Folder
from lightning_elastic_zero.storage.paths import StorePath, parse_path
from lightning_elastic_zero.storage.store_folder import StoreFolder


def folder_at(path: str | os.PathLike[str] | StorePath) -> Folder:
    """Return the folder at a path or URL, absolute; links are not resolved.

    Raises:
        UnsupportedError: see ``parse_path``.
    """
    parsed = parse_path(path)
    return StoreFolder(parsed) if isinstance(parsed, StorePath) else DiskFolder(parsed)
