"""DeepSpeed as it is installed: the accelerator that it uses, its operators, its own script."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import util
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

from lightning_elastic_zero.engine.deepspeed_internals import compatible_operators
from lightning_elastic_zero.engine.release_check import check_builder, check_ops
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.requirements import DEEPSPEED, version_of

log = logging.getLogger(__name__)

_OLD_S = 600.0
"""No operator's build takes longer: who holds such a lock elsewhere has ended too."""

_LOOK_AGAIN_S = 0.5
"""From closing a lock to removing it takes microseconds."""


def use_accelerator(name: str, *, compiles: bool = True) -> None:
    """Set DeepSpeed's accelerator to the one that the trainer uses: ``"cpu"`` or ``"cuda"``.

    DeepSpeed decides once per process, by ``DS_ACCELERATOR`` or by what it finds.

    Args:
        name: the accelerator.
        compiles: whether to wait, where need be, while DeepSpeed compiles what speeds gloo up.

    Raises:
        UnsupportedError: it has decided otherwise already.
    """
    os.environ.setdefault("DS_ACCELERATOR", name)
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415 (after the variable is set)

    chosen = get_accelerator().device_name()
    if chosen != name:
        msg = (
            f"the trainer runs on {name}, but DeepSpeed has chosen {chosen} in this process: set "
            f"the environment variable DS_ACCELERATOR={name} before the script starts"
        )
        raise UnsupportedError(msg)
    if name == "cpu":
        _do_without_shared_memory_op(get_accelerator(), tries=compiles)


def report_abandoned_builds(config: Mapping[str, Any]) -> None:
    """Warn of locks that whatever loads an operator waits for; one rank of each node does.

    Args:
        config: DeepSpeed's, which tells whether an operator is needed.

    Raises:
        UnsupportedError: an old lock is that of an operator that nothing replaces.
    """
    offload = (config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    for name, lock in abandoned_builds().items():
        try:
            age_s = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            continue  # Removed since.
        msg = (
            f"a killed build of the operator {name} has probably left its lock: no process that is "
            f"visible here holds it, and it is {age_s / 60:.0f} minutes old. Whatever loads the "
            f"operator waits without end. If no other machine builds it now, delete {lock}"
        )
        if name == "async_io" and offload.get("device") == "nvme" and age_s > _OLD_S:
            raise UnsupportedError(msg)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            log.warning("%s", msg)


def abandoned_builds() -> dict[str, Path]:
    """Return the locks of operators' builds that no process has open, as far as one sees.

    torch (``torch.utils.file_baton``) makes the file before it builds or loads an operator, keeps
    it open, and closes and removes it at the end. Who finds it waits until it is gone: after a
    build that was killed, for ever. None is removed here: it may be another machine's.
    """
    first = _unheld_locks()
    if first:
        time.sleep(_LOOK_AGAIN_S)  # Until one that was just closed is removed.
    again = _unheld_locks() if first else {}
    return {lock.parent.name: lock for lock, stamp in again.items() if first.get(lock) == stamp}


def _unheld_locks() -> dict[Path, tuple[int, int]]:
    """Return locks that no process has open, each with its inode and time of change."""
    if root := os.environ.get("TORCH_EXTENSIONS_DIR"):
        locks = Path(root).glob("*/lock")
    else:
        from torch.utils.cpp_extension import get_default_build_root  # noqa: PLC0415 (is slow)

        python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
        locks = Path(get_default_build_root()).glob(f"{python}_*/*/lock")
    found = {}
    for lock in locks:
        with suppress(OSError):
            status = lock.stat()
            if not _is_open(status):
                found[lock] = (status.st_ino, status.st_ctime_ns)
    return found


def _is_open(file: os.stat_result) -> bool:
    """Whether a process that may be looked at has a file open."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    if os.path.samestat(descriptor.stat(), file):
                        return True
    return False


def _do_without_shared_memory_op(
    accelerator: Any,  # noqa: ANN401 (untyped library)
    *,
    tries: bool,
) -> None:
    """Make DeepSpeed start on a machine that cannot compile its shared-memory collectives.

    They are an optional speed-up beside gloo, but ``init_distributed`` raises where they do not
    build. DeepSpeed consults its table of compatible ops first; what cannot be built is not.

    Args:
        accelerator: DeepSpeed's.
        tries: whether they are built at all.
    """
    from deepspeed import ops  # noqa: PLC0415 (DeepSpeed takes seconds to import)

    found = version_of(DEEPSPEED.package)
    check_ops(ops, accelerator, found)
    builder = accelerator.create_op_builder("ShareMemCommBuilder")
    if builder is None:
        return
    check_builder(builder, found)
    table = compatible_operators(ops)
    if not table.get(builder.NAME, False):
        return
    if tries and (lock := abandoned_builds().get(builder.NAME)):
        log.warning("going on without DeepSpeed's shared-memory collectives: nobody holds %s", lock)
        tries = False
    if not tries:
        table[builder.NAME] = False
        return
    try:
        builder.load()
    except (RuntimeError, ImportError, OSError, SubprocessError) as error:
        log.warning("going on without DeepSpeed's shared-memory collectives: %s", error)
        table[builder.NAME] = False


def recovery_script() -> Path | None:
    """Return DeepSpeed's own ``zero_to_fp32.py``, which checkpoints carry; None where it lacks."""
    spec = util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return None
    script = Path(next(iter(spec.submodule_search_locations))) / "utils" / "zero_to_fp32.py"
    return script if script.is_file() else None
