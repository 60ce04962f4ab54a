"""What cannot be run everywhere: operators that DeepSpeed compiles."""

from __future__ import annotations

from functools import partial
from subprocess import SubprocessError

import pytest

from tests.engine._worker_pool import Pools


def missing_operator(name: str) -> str:
    """Return why an operator of DeepSpeed's cannot be had; nothing, where it can."""
    from deepspeed.ops import op_builder

    try:
        getattr(op_builder, name)().load()
    except (ImportError, OSError, RuntimeError, SubprocessError) as error:
        return f"{name} does not build here: {error}"
    return ""


def skip_without(name: str, pools: Pools) -> None:
    """Skip a test where an operator cannot be had; one process compiles it for all ranks."""
    if missing := pools.run(1, partial(missing_operator, name))[0]:
        pytest.skip(missing)
