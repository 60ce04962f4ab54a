"""Files that can be trusted, and directories that appear whole or not at all.

``checksums`` writes a file together with the checksums of its chunks; ``verified`` reads runs of
its bytes and refuses every chunk that is not what was written. ``staging`` builds a directory under
a hidden name and publishes it in one step; ``deleting`` lets one vanish in one step, ``copying``
makes another one of it. ``places`` knows which paths can be used at all, and proves that all ranks
see the same one. Only what this library wrote is ever replaced or removed: ``contents``
recognises it, and ``occupants`` says what lies where something is to be saved. ``leftovers`` puts
back or removes what a kill left; ``tenants`` sees that another run saves into the same folder.
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
from lightning_elastic_zero.storage.copying import copy_checkpoint
from lightning_elastic_zero.storage.deleting import DOOMED, delete, discard, no_work
from lightning_elastic_zero.storage.exchange import exchange_names
from lightning_elastic_zero.storage.leftovers import (
    LINKING,
    remove_leftovers,
    repair,
    repair_target,
)
from lightning_elastic_zero.storage.occupants import Occupant, check_replaceable, occupant_of
from lightning_elastic_zero.storage.places import (
    check_local_path,
    leave_table,
    leave_token,
    remove_tables,
    remove_token,
    see_table,
    see_token,
    sync_directory,
)
from lightning_elastic_zero.storage.ranges import READ_BYTES, RangeFile, read_file, steady_stream
from lightning_elastic_zero.storage.staging import StagedDirectory, staging_path
from lightning_elastic_zero.storage.tenants import RUN, Tenancy
from lightning_elastic_zero.storage.verified import VerifiedFile

__all__ = [
    "CHUNK_BYTES",
    "DOOMED",
    "LINKING",
    "READ_BYTES",
    "RUN",
    "SUMS_SUFFIX",
    "ChecksummedWriter",
    "FileRecord",
    "Occupant",
    "RangeFile",
    "StagedDirectory",
    "Tenancy",
    "VerifiedFile",
    "check_local_path",
    "check_replaceable",
    "copy_checkpoint",
    "delete",
    "discard",
    "exchange_names",
    "leave_table",
    "leave_token",
    "no_progress",
    "no_work",
    "occupant_of",
    "read_file",
    "remove_leftovers",
    "remove_tables",
    "remove_token",
    "repair",
    "repair_target",
    "see_table",
    "see_token",
    "staging_path",
    "steady_stream",
    "sync_directory",
    "write_durably",
]
