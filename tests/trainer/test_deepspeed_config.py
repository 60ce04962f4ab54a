"""Settings in a user's DeepSpeed config that speak of checkpoints mean what they say."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.engine._worker_pool import Pools
from tests.trainer._fits import FitSpec, fit
from tests.trainer._rounded_masters import masters_are_rounded

pytestmark = pytest.mark.engine


def test_load_from_fp32_weights(worlds: Pools, tmp_path: Path) -> None:
    """False: masters without what rounding takes away; true, the default: as they were saved."""
    root = str(tmp_path)
    worlds.run(2, partial(fit, FitSpec(root, 2, trainer={"precision": "bf16-mixed"})))
    assert worlds.run(1, partial(masters_are_rounded, root, False)) == [True]
    assert worlds.run(3, partial(masters_are_rounded, root, True)) == [False] * 3
