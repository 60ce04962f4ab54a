"""Files that can be trusted, and directories that appear whole or not at all.

``checksums`` writes a file together with the checksums of its chunks; ``verified`` reads runs of
its bytes and refuses every chunk that is not what was written. ``staging`` builds a directory under
a hidden name and publishes it in one step; ``deleting`` lets one vanish in one step, ``copying``
makes another one of it. ``places`` knows which paths can be used at all, and proves that all ranks
see the same one.
"""

from __future__ import annotations

from lightning_elastic_zero.storage.checksums import (
    CHUNK_BYTES,
    SUMS_SUFFIX,
    ChecksummedWriter,
    FileRecord,
    no_progress,
    write_durably,
)
from lightning_elastic_zero.storage.copying import copy_directory
from lightning_elastic_zero.storage.deleting import DOOMED, delete, no_work
from lightning_elastic_zero.storage.exchange import exchange_names
from lightning_elastic_zero.storage.places import (
    check_local_path,
    leave_token,
    remove_token,
    see_token,
    sync_directory,
)
from lightning_elastic_zero.storage.ranges import READ_BYTES, RangeFile, read_file, steady_stream
from lightning_elastic_zero.storage.staging import (
    LINKING,
    StagedDirectory,
    remove_leftovers,
    repair,
    repair_target,
    staging_path,
)
from lightning_elastic_zero.storage.verified import VerifiedFile

__all__ = [
    "CHUNK_BYTES",
    "DOOMED",
    "LINKING",
    "READ_BYTES",
    "SUMS_SUFFIX",
    "ChecksummedWriter",
    "FileRecord",
    "RangeFile",
    "StagedDirectory",
    "VerifiedFile",
    "check_local_path",
    "copy_directory",
    "delete",
    "exchange_names",
    "leave_token",
    "no_progress",
    "no_work",
    "read_file",
    "remove_leftovers",
    "remove_token",
    "repair",
    "repair_target",
    "see_token",
    "staging_path",
    "steady_stream",
    "sync_directory",
    "write_durably",
]
