"""What users hang on a run comes back, or is refused by name before anything is published."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.engine._setup import Setup
from tests.engine._user_state_programs import numbers_of_numpy, refused_saves
from tests.engine._worker_pool import Pools

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("setup", [Setup(2, "1", "fp32"), Setup(2, "3", "fp32")], ids=str)
def test_numbers_of_numpy_come_back(setup: Setup, pools: Pools, tmp_path: Path) -> None:
    """A schedule over NumPy, a state, a loss scale: a resumed run goes on as the first one did."""
    program = partial(numbers_of_numpy, setup, str(tmp_path))
    for went_on, resumed in pools.run(setup.world, program):
        assert resumed == went_on
        assert went_on["states"][0] == {"scale": 0.10000000149011612, "count": 7, "flag": True}


def test_what_no_load_could_read_is_not_saved(pools: Pools, tmp_path: Path) -> None:
    """The error names the place, and nothing is published, whatever it is that cannot be read."""
    setup = Setup(2, "2")
    for found in pools.run(setup.world, partial(refused_saves, setup, str(tmp_path))):
        assert "the trainer's state holds 'mine', which holds itself" in found["within"]
        assert (
            "callbacks.Mine.0, a FailsToUnpickle that can be pickled but not be made"
            in found["unmade"]
        )
        assert (
            "the scheduler's state.lr_lambdas.0.ratio is a Fraction, and what is saved has to be "
            "plain data"
        ) in found["scheduler"]
        assert "the module's buffers.bn.sparse is a Tensor" in found["buffer"]
        assert found["left"] == ""
