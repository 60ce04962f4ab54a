"""What users hang on a run comes back, or is refused by name before anything is published."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.engine._user_state_programs import (
    ANNEALED,
    LoadingAfter,
    expand_frozen,
    global_state,
    leave,
    leave_buffer_on_meta,
    load_after,
    numbers_of_numpy,
    reassign_average,
    reassign_frozen,
    reassign_trained,
    refuse_hyperparameters,
    refused_saves,
)
from tests.support.checkpoints import Saved, refusal
from tests.support.engines import Engine, Setup
from tests.support.processes import PROMPT_TIMEOUT_S
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("setup", [Setup(2, "1", "fp32"), Setup(2, "3", "fp32")], ids=str)
def test_numbers_of_numpy_come_back(setup: Setup, pools: Pools, tmp_path: Path) -> None:
    """A schedule over NumPy, a state, a loss scale: a resumed run goes on as the first one did."""
    program = partial(numbers_of_numpy, setup, str(tmp_path))
    for went_on, resumed in pools.run(setup.world, program):
        assert resumed == went_on
        assert went_on["states"][0] == {"scale": 0.10000000149011612, "count": 7, "flag": True}


@pytest.mark.parametrize(
    ("setup", "steps"),
    [
        (Setup(2, "3", "bf16", optimizer=ANNEALED), 2),
        (Setup(2, "0", optimizer=ANNEALED), 2),
        (Setup(2, "0", optimizer=ANNEALED), 0),
        (Setup(2, "1", optimizer=ANNEALED), 2),
        (Setup(2, "B", "bf16", optimizer=ANNEALED), 2),
    ],
    ids=str,
)
def test_state_of_no_parameter_comes_back(
    setup: Setup, steps: int, pools: Pools, tmp_path: Path
) -> None:
    """What an optimizer keeps for the whole run is restored exactly; where it had none, none is."""
    program = partial(global_state, setup, str(tmp_path), steps)
    for went_on, resumed, stock in pools.run(setup.world, program):
        assert resumed == went_on
        assert ("sums" in went_on[0]) == bool(steps)
        if setup.stage:  # DeepSpeed's own files of stage 0 are not read for training.
            assert "state that belongs to no parameter (keys 'global')" in stock


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
            "the scheduler's state.lr_lambdas.0.ratio is a Fraction, but saved state has to be "
            "plain data"
        ) in found["scheduler"]
        assert "the module's buffers.bn.sparse is a Tensor" in found["buffer"]
        where = "the optimizer's state of no parameter.global.a.1 is a FailsToUnpickle"
        assert where in found["object"]
        assert "keeps state under the key 'global', which differs" in found["differing"]
        assert "AdamW keeps ['mine'] for NAME, which it does not step" in found["parameter"]
        assert found["left"] == ""


@pytest.mark.essential
@pytest.mark.parametrize(
    "setup",
    [Setup(2, "0"), Setup(2, "2", "bf16"), Setup(2, "3", sub_group=700)],
    ids=str,
)
def test_a_load_under_inference_mode_trains_on(setup: Setup, pools: Pools, tmp_path: Path) -> None:
    """As within a validation: the states that a load makes can be trained, bit for bit."""
    program = partial(load_after, setup, str(tmp_path), leave, torch.inference_mode)
    for differing, went_on, resumed in pools.run(setup.world, program):
        assert resumed == went_on
        assert not differing


@pytest.mark.essential
def test_a_buffer_that_an_evaluation_has_reassigned(pools: Pools, tmp_path: Path) -> None:
    """One that was made under inference mode, on one rank, is restored and can be trained."""
    setup = Setup(2, "2")
    change = partial(load_after, setup, str(tmp_path), reassign_average, contextlib.nullcontext)
    for differing, went_on, resumed in pools.run(setup.world, change):
        assert resumed == went_on
        assert not differing


@pytest.mark.essential
@pytest.mark.parametrize("setup", [Setup(2, "1"), Setup(2, "3")], ids=str)
def test_a_change_that_fails_on_one_rank(
    setup: Setup, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """All ranks raise at once, and say that the engine is of no use any more."""
    load = LoadingAfter(saved_by(setup).path, refuse_hyperparameters, unchanged=False)
    for refused in pools.run(setup.world, partial(refusal, setup, load, look=False)):
        assert refused.error == "RanksError", refused
        assert "now holds a mixture of states: TypeError: " in refused.message
        assert refused.seconds < PROMPT_TIMEOUT_S


@pytest.mark.essential
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (expand_frozen, "frozen weights that cannot be"),
        (leave_buffer_on_meta, "buffers that cannot be"),
        (reassign_frozen, "neither changed nor trained: frozen.bias."),
        (reassign_trained, "neither changed nor trained: b.bias."),
    ],
)
def test_what_cannot_be_written_on_one_rank(
    change: Callable[[Engine], None],
    says: str,
    pools: Pools,
    saved_by: Callable[..., Saved],
) -> None:
    """All ranks refuse it by name before anything is changed, and at once."""
    setup = Setup(2, "0" if change is reassign_trained else "1")
    load = LoadingAfter(saved_by(setup).path, change)
    program = partial(refusal, setup, load, look=False)
    for refused in pools.run(setup.world, program):
        assert refused.error == "CheckpointMismatchError", refused
        assert says in refused.message
        assert refused.seconds < PROMPT_TIMEOUT_S
