"""torch's own Muon, which steps matrices: in stage 0, where DeepSpeed leaves them whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import Saved, assert_continues, assert_restored
from tests.support.engines import Net, Setup
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

NEEDS_TORCHS_MUON = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="torch's Muon came with 2.9"
)


@dataclass(frozen=True)
class MatricesSetup(Setup):
    """A run that trains the matrices of its model only, as torch's Muon wants it."""

    zero: str = "0"
    optimizer: str = "torch.optim.Muon"
    grouping: str = "one"

    def model(self, seed: int) -> Net:
        """Make the model."""
        model = super().model(seed)
        for parameter in model.parameters():
            if parameter.ndim != 2:
                parameter.requires_grad = False
        return model


@NEEDS_TORCHS_MUON
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (MatricesSetup(2), MatricesSetup(3)),
        (MatricesSetup(3, precision="bf16"), MatricesSetup(2)),
        (MatricesSetup(1), MatricesSetup(2, precision="bf16")),
    ],
    ids=str,
)
def test_momentum_survives(
    source: MatricesSetup,
    target: MatricesSetup,
    pools: Pools,
    saved_by: Callable[..., Saved],
) -> None:
    """It is one value per element of a matrix, cut for the save as any other."""
    saved = saved_by(source)
    assert any(key.startswith("momentum_buffer/") for key in saved.dump())
    assert_restored(pools.run, target, saved, steps_before=1)


@NEEDS_TORCHS_MUON
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_goes_on_bit_for_bit(precision: str, pools: Pools, tmp_path: Path) -> None:
    """Its update is computed of the whole momentum, which all ranks have again."""
    setup = MatricesSetup(2, precision=precision)
    assert_continues(pools.run, setup, tmp_path)
