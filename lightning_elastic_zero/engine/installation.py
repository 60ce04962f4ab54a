"""DeepSpeed as it is installed: the accelerator that it uses, its operators, its own script."""

from __future__ import annotations

import logging
import os
from importlib import util
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

from lightning_elastic_zero.engine.deepspeed_internals import compatible_operators
from lightning_elastic_zero.engine.release_check import check_builder, check_ops
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.requirements import DEEPSPEED, version_of

log = logging.getLogger(__name__)


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
