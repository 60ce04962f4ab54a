"""Runs in which ranks share sequences continue exactly, on any number of ranks per sequence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import Pools

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.integrations._hf_programs import Run
from tests.integrations._sequence_programs import (
    SharedCase,
    loop_shared,
    refused_loaders,
    train_shared,
)

pytestmark = pytest.mark.engine

Layout = tuple[int, int, tuple[int, int]]
"""Ranks, ranks per sequence, (micro-batch, accumulation). A step has 12 samples, an epoch two."""

ALONE: Layout = (1, 1, (2, 6))
TWO_OF_ONE: Layout = (2, 1, (2, 3))
THREE_OF_ONE: Layout = (3, 1, (2, 2))
ONE_OF_TWO: Layout = (2, 2, (4, 3))
TWO_OF_TWO: Layout = (4, 2, (2, 3))
ONE_OF_FOUR: Layout = (4, 4, (2, 6))
"""Data ranks of so many ranks. With the last three, an odd number of steps ends within a round."""

Whole = Callable[..., tuple[Path, Run]]


def fit(hf_ranks: Pools, layout: Layout, folder: Path, **case: Any) -> Run:
    """Return what rank 0 has observed in a run of the Trainer."""
    world, sequence, micro = layout
    described = {"samples": 24, "stage": 2, "sequence": sequence, "micro": micro, **case}
    run: Run = hf_ranks.run(world, partial(train_shared, SharedCase(str(folder), **described)))[0]
    return run


@pytest.fixture(scope="session")
def whole(hf_ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return a run of two epochs, which saved after each step; made once per session."""
    made: dict[str, tuple[Path, Run]] = {}

    def get(layout: Layout, stage: int = 2, **case: Any) -> tuple[Path, Run]:
        case["stage"] = stage
        name = f"{layout} {case}"
        if name not in made:
            folder = tmp_path_factory.mktemp("shared")
            made[name] = (folder, fit(hf_ranks, layout, folder, state_at=(1, 2, 3), **case))
        return made[name]

    return get


def factor(layout: Layout, stage: int) -> int:
    """Return by what DeepSpeed multiplies gradients."""
    return 1 if stage == 3 else layout[1]


def assert_continues(run: Run, wanted: Run, last: int) -> None:
    """Assert that a run went on after a step with the whole run's state, samples and rates."""
    assert run.first_state.keys() == wanted.states[last].keys()
    for name, tensor in wanted.states[last].items():
        assert torch.equal(run.first_state[name], tensor), name
    steps = range(last + 1, 5)
    assert run.samples == {step: wanted.samples[step] for step in steps}
    assert run.rates == {step: wanted.rates[step] for step in steps}


def assert_same_losses(run: Run, wanted: Run, before: int, now: int, scale: float) -> None:
    """Assert equal losses; if the factor of gradients changes, one warning has both."""
    for step, loss in run.losses.items():
        assert loss == pytest.approx(scale * wanted.losses[step], rel=1e-4), step
    assert len(run.warnings) == (before != now)
    for warning in run.warnings:
        assert f"gradients by {now} instead of {before}" in warning
        assert "are not a multiple" not in warning


def check_trainer(
    source: Layout, target: Layout, last: int, whole: Whole, hf_ranks: Pools, copy: Path, stage: int
) -> None:
    folder, wanted = whole(source)
    shutil.copytree(folder, copy)
    before, now = factor(source, 2), factor(target, stage)
    resume = str(copy / f"checkpoint-{last}")
    run = fit(hf_ranks, target, copy, resume=resume, scale=before / now, stage=stage)
    assert_continues(run, wanted, last)
    assert_same_losses(run, wanted, before, now, before / now)
    seen = [each.log[-2]["num_input_tokens_seen"] for each in (run, wanted)]
    assert seen[0] == seen[1] == 48 * 8
    assert f"on {target[0]} device" in run.shown


def test_a_shared_run_continues_in_the_middle_of_a_later_epoch(
    whole: Whole, hf_ranks: Pools, tmp_path: Path
) -> None:
    """The Trainer goes on with the next sample, also within a round of micro-batches."""
    check_trainer(TWO_OF_TWO, ALONE, 3, whole, hf_ranks, tmp_path / "copy", 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "target", "last", "stage"),
    [
        (ALONE, TWO_OF_TWO, 1, 3),
        (TWO_OF_TWO, ONE_OF_FOUR, 2, 2),
        (ONE_OF_FOUR, THREE_OF_ONE, 3, 1),
        (ONE_OF_TWO, TWO_OF_TWO, 3, 2),
        (TWO_OF_TWO, TWO_OF_TWO, 1, 2),
        (THREE_OF_ONE, ONE_OF_TWO, 2, 3),
    ],
)
def test_the_trainer_continues_on_other_sequence_ranks(
    source: Layout,
    target: Layout,
    last: int,
    stage: int,
    whole: Whole,
    hf_ranks: Pools,
    tmp_path: Path,
) -> None:
    check_trainer(source, target, last, whole, hf_ranks, tmp_path / "copy", stage)


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "target", "last"),
    [
        (TWO_OF_TWO, ALONE, 3),
        (ALONE, TWO_OF_TWO, 1),
        (TWO_OF_TWO, ONE_OF_FOUR, 2),
        (ONE_OF_TWO, ONE_OF_TWO, 3),
        (ONE_OF_TWO, TWO_OF_ONE, 1),
    ],
)
def test_accelerate_continues_on_other_sequence_ranks(
    source: Layout, target: Layout, last: int, hf_ranks: Pools, tmp_path: Path
) -> None:
    """Epochs have as many steps as without sequence parallelism."""
    scale = source[1] / target[1]
    saves = SharedCase(
        str(tmp_path), 2, samples=24, sequence=source[1], micro=source[2], state_at=(1, 2, 3)
    )
    resume = f"{tmp_path}/step_{last}"
    loads = replace(
        saves, sequence=target[1], micro=target[2], state_at=(), resume=resume, scale=scale
    )
    wanted = hf_ranks.run(source[0], partial(loop_shared, saves))[0]
    run = hf_ranks.run(target[0], partial(loop_shared, loads, last))[0]
    assert_continues(run, wanted, last)
    assert_same_losses(run, wanted, source[1], target[1], 1.0)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "stage"), [(TWO_OF_TWO, 2), (ONE_OF_FOUR, 2), (TWO_OF_TWO, 3)])
def test_gradients_are_multiplied_as_the_warning_states(
    layout: Layout, stage: int, whole: Whole
) -> None:
    before, now = (whole(each, stage=stage)[1].log[0]["grad_norm"] for each in (ALONE, layout))
    assert now / before == pytest.approx(factor(layout, stage), rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(("bucket", "multiplied"), [(1000, False), (10_000, True)])
def test_zero3_without_reduce_scatter_multiplies_gradients_of_small_parameters(
    bucket: int, multiplied: bool, whole: Whole
) -> None:
    """The norm is between the two factors if the embedding is larger than a bucket."""
    zero = {"reduce_scatter": False, "reduce_bucket_size": bucket}
    case = {"stage": 3, "config": {"zero_optimization": zero}}
    before, now = (whole(each, **case)[1].log[0]["grad_norm"] for each in (ALONE, TWO_OF_TWO))
    assert 1 < now / before < 2 + 1e-3
    assert (now / before == pytest.approx(2, rel=1e-3)) is multiplied


@pytest.mark.long
def test_a_stock_save_within_a_round_causes_a_warning(
    whole: Whole, hf_ranks: Pools, tmp_path: Path
) -> None:
    """DeepSpeed's loader has not trained on the first samples of the epoch."""
    folder, _ = whole(TWO_OF_TWO, bound=False)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for step in (1, 2):
        run = fit(hf_ranks, TWO_OF_TWO, copy, resume=str(copy / f"checkpoint-{step}"))
        warned = [w for w in run.warnings if "it was saved without elastic()" in w]
        assert len(warned) == step % 2


@pytest.mark.long
def test_an_epoch_that_is_not_a_multiple_of_the_rounds_causes_a_warning(
    whole: Whole, hf_ranks: Pools, tmp_path: Path
) -> None:
    folder, _ = whole(ONE_OF_TWO, samples=36)
    run = fit(
        hf_ranks,
        TWO_OF_TWO,
        tmp_path,
        samples=36,
        resume=str(folder / "checkpoint-1"),
    )
    (warning,) = run.warnings
    assert "gradients by" not in warning
    assert "36 samples are not a multiple of 24, which all ranks read in sp_size" in warning
    assert "Leave out 12 samples" in warning


@pytest.mark.long
def test_loaders_whose_batches_cannot_be_shared_are_refused(hf_ranks: Pools) -> None:
    reasons = (
        "an iterable dataset",
        "split_batches=True",
        "even_batches=False",
        "Call elastic(accelerator) before prepare()",
    )
    for errors in hf_ranks.run(2, refused_loaders):
        for error, reason in zip(errors, reasons, strict=True):
            assert error.startswith("UnsupportedError: ")
            assert "sequence parallelism (sp_size=2)" in error
            assert reason in error
