"""Files that can be trusted, and directories that appear whole or not at all.

``checksums`` writes a file together with the checksums of its chunks; ``verified_file`` reads runs
of its bytes and refuses every chunk that is not what was written. ``staging`` builds a directory
under a hidden name and publishes it in one step; ``deleting`` removes one in one step, ``copying``
copies it. ``paths`` knows which paths can be used at all; ``shared_directory`` proves that all
ranks see the same one, ``filesystem_capabilities`` what it can do, tried in a ``scratch_folder``.
Only what this library wrote is ever replaced or removed: ``file_ownership`` recognises it, and
``existing_target`` says what lies where something is to be saved. ``leftovers`` restores or removes
what a kill left; ``concurrent_runs`` warns of another run in the same folder.
"""

from __future__ import annotations

from lightning_elastic_zero.storage.checksums import (
    CHUNK_BYTES,
    SUMS_SUFFIX,
    ChecksummedWriter,
    as_save_error,
    ignore_bytes,
    sidecar_bytes,
    write_durably,
)
from lightning_elastic_zero.storage.concurrent_runs import RUN_MARKER_PREFIX, ConcurrentRunMonitor
from lightning_elastic_zero.storage.deleting import (
    DELETING_PREFIX,
    delete_checkpoint,
    ignore_progress,
)
from lightning_elastic_zero.storage.existing_target import (
    check_replaceable,
    inspect_target,
)
from lightning_elastic_zero.storage.file_ownership import can_replace, is_checkpoint
from lightning_elastic_zero.storage.filesystem_capabilities import Capability, probe_capabilities
from lightning_elastic_zero.storage.leftovers import (
    LINK_PREFIX,
    remove_leftovers,
    repair,
    repair_target,
)
from lightning_elastic_zero.storage.links import make_link
from lightning_elastic_zero.storage.paths import (
    check_local_path,
    existing_path,
    real_path,
    sync_directory,
)
from lightning_elastic_zero.storage.periodic_thread import PeriodicThread
from lightning_elastic_zero.storage.range_file import (
    READ_BYTES,
    RangeFile,
    bounded_stream,
)
from lightning_elastic_zero.storage.regular_file import open_file, read_file
from lightning_elastic_zero.storage.scratch_folder import leave_token, scratch_folder, token_name
from lightning_elastic_zero.storage.shared_directory import (
    TABLE_PREFIX,
    TOKEN_PREFIX,
    await_shared,
    leave_shared,
    remove_shared,
)
from lightning_elastic_zero.storage.staging import STAGING_PREFIX, StagedDirectory, staging_path
from lightning_elastic_zero.storage.verified_file import VerifiedFile

__all__ = [
    "CHUNK_BYTES",
    "DELETING_PREFIX",
    "LINK_PREFIX",
    "READ_BYTES",
    "RUN_MARKER_PREFIX",
    "STAGING_PREFIX",
    "SUMS_SUFFIX",
    "TABLE_PREFIX",
    "TOKEN_PREFIX",
    "Capability",
    "ChecksummedWriter",
    "ConcurrentRunMonitor",
    "PeriodicThread",
    "RangeFile",
    "StagedDirectory",
    "VerifiedFile",
    "as_save_error",
    "await_shared",
    "bounded_stream",
    "can_replace",
    "check_local_path",
    "check_replaceable",
    "delete_checkpoint",
    "existing_path",
    "ignore_bytes",
    "ignore_progress",
    "inspect_target",
    "is_checkpoint",
    "leave_shared",
    "leave_token",
    "make_link",
    "open_file",
    "probe_capabilities",
    "read_file",
    "real_path",
    "remove_leftovers",
    "remove_shared",
    "repair",
    "repair_target",
    "scratch_folder",
    "sidecar_bytes",
    "staging_path",
    "sync_directory",
    "token_name",
    "write_durably",
]
