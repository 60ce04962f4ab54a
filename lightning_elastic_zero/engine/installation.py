"""The installed DeepSpeed: its accelerator, the builds of its operators, its ``initialize``."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import torch

from lightning_elastic_zero.core.requirements import DEEPSPEED, version_of
from lightning_elastic_zero.engine.deepspeed import compatible_operators, missing
from lightning_elastic_zero.engine.support import refuse
from lightning_elastic_zero.errors import UnsupportedError

log = logging.getLogger(__name__)

_OLD_S = 600.0
"""Longer than any operator's build. An older lock is abandoned, even on another machine."""

_LOOK_AGAIN_S = 0.5
"""Closing and removing a lock take microseconds."""


def use_accelerator(name: str, *, compiles: bool = True) -> None:
    """Set DeepSpeed's accelerator to the trainer's: ``"cpu"`` or ``"cuda"``.

    DeepSpeed decides once per process, by ``DS_ACCELERATOR`` or by detection. ``compiles``: whether
    DeepSpeed may compile its gloo extension. Raises UnsupportedError if DeepSpeed already uses
    another accelerator.
    """
    os.environ.setdefault("DS_ACCELERATOR", name)
    from deepspeed.accelerator import get_accelerator  # after the variable is set

    chosen = get_accelerator().device_name()
    if chosen != name:
        msg = (
            f"the trainer runs on {name}, but DeepSpeed uses {chosen} in this process: set the "
            f"environment variable DS_ACCELERATOR={name} before the script starts"
        )
        raise UnsupportedError(msg)
    if name == "cpu":
        _do_without_shared_memory_op(get_accelerator(), tries=compiles)


def report_abandoned_builds(config: Mapping[str, Any]) -> None:
    """Warn about abandoned locks that block the loading of an operator, on one rank per node.

    Raises UnsupportedError if an old lock blocks an operator that the config requires.
    """
    offload = (config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    for name, lock in abandoned_builds().items():
        try:
            age_s = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            continue  # Removed in the meantime.
        msg = (
            f"operator {name}: a lock, probably of a killed build, blocks loading it forever. No "
            f"visible process has it open, and it is {age_s / 60:.0f} minutes old. If no other "
            f"machine is building the operator now, delete {lock}"
        )
        if name == "async_io" and offload.get("device") == "nvme" and age_s > _OLD_S:
            raise UnsupportedError(msg)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            log.warning("%s", msg)


def abandoned_builds() -> dict[str, Path]:
    """Return the locks of operator builds that no visible process has open.

    torch (``torch.utils.file_baton``) creates the file before it builds or loads an operator and
    removes it at the end. Other processes wait until then, forever if the build was killed. No lock
    is removed here: it may belong to another machine. Since 2.14, torch locks a file that it never
    removes, and the system releases the lock of a killed build.
    """
    if torch.__version__ >= "2.14":
        return {}
    first = _unheld_locks()
    if first:
        time.sleep(_LOOK_AGAIN_S)  # Allow a lock that was just closed to be removed.
    again = _unheld_locks() if first else {}
    return {lock.parent.name: lock for lock, stamp in again.items() if first.get(lock) == stamp}


def _unheld_locks() -> dict[Path, tuple[int, int]]:
    """Return the locks that no process has open, with inode and time of change."""
    if root := os.environ.get("TORCH_EXTENSIONS_DIR"):
        locks = Path(root).glob("*/lock")
    else:
        from torch.utils.cpp_extension import get_default_build_root

        python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
        locks = Path(get_default_build_root()).glob(f"{python}_*/*/lock")
    identities = {}
    for lock in locks:
        with suppress(OSError):
            status = lock.stat()
            if not _is_open(status):
                identities[lock] = (status.st_ino, status.st_ctime_ns)
    return identities


def _is_open(file: os.stat_result) -> bool:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    if os.path.samestat(descriptor.stat(), file):
                        return True
    return False


def _do_without_shared_memory_op(accelerator: Any, *, tries: bool) -> None:
    """Let DeepSpeed start on a machine that cannot compile its shared-memory collectives.

    They only speed up gloo, but ``init_distributed`` raises if they do not build, unless its table
    of compatible operators excludes them. ``tries``: whether to build them at all.
    """
    from deepspeed import ops

    release = version_of(DEEPSPEED.package)
    lost = [
        *missing("deepspeed.ops", ops, release),
        *missing("the accelerator", accelerator, release),
    ]
    refuse(lost)
    builder = accelerator.create_op_builder("ShareMemCommBuilder")
    if builder is None:
        return
    refuse([*missing("an operator's builder", builder, release)])
    table = compatible_operators(ops)
    if not table.get(builder.NAME, False):
        return
    if tries:
        reason: object = None
        if lock := abandoned_builds().get(builder.NAME):
            reason = f"stale lock {lock}"
        else:
            try:
                builder.load()
            except (RuntimeError, ImportError, OSError, SubprocessError) as error:
                reason = error
        if reason is None:
            return
        log.warning("continuing without DeepSpeed's shared-memory collectives: %s", reason)
    table[builder.NAME] = False


def replace_initialize(wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Make ``deepspeed.initialize`` return ``wrap(engine)``; return a function that undoes it."""
    import deepspeed

    original = deepspeed.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        engine, *rest = original(*args, **kwargs)
        return (wrap(engine), *rest)

    def restore() -> None:
        deepspeed.initialize = original

    deepspeed.initialize = initialize
    return restore
