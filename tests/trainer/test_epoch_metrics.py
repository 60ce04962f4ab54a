"""What an epoch sums up is the same whether the run was stopped in its midst or not."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.support.ranks import Pools
from tests.trainer._epoch_metrics import LoggedValues, all_values, values_of
from tests.trainer._recorded_runs import RunSpec, from_step

pytestmark = pytest.mark.engine

MOMENTS = (
    *("inside 0.0", "step 0.2", "inside 0.2", "validating 2", "validated 2", "step 0.5", "epoch 0"),
    *("starting 1", "inside 1.3", "step 1.3"),
)
LATER = {
    "step 0.2": ("late",),
    "step 0.5": ("late",),
    "step 1.3": ("late",),
    "epoch 0": ("by hand of 1", "the mean of all of 1", "scalars of 1", "bounds"),
}
"""Logged in a hook of the module's that comes after that of the callback which saved; and what an
epoch's end is taken to reset there."""
OTHERS = {"bounds", "correlation", "val", "val_mean", "best"}
"""Of metrics that no rule shares out; and of validation's samples, which are filled up for three
ranks."""
LOCAL = {"mine", "late", "loss"}
"""Logged without ``sync_dist``: a mean over a rank's own samples, others on other ranks."""


def saving(root: Path, **options: object) -> RunSpec:
    """Return a run that saves at all moments; validation is in the midst of an epoch too."""
    run = RunSpec(
        save=MOMENTS,
        root=str(root),
        epochs=4,
        validate=True,
        trainer={"val_check_interval": 0.5, "enable_checkpointing": True},
    )
    return replace(run, **options)  # type: ignore[arg-type]


def resumed(run: RunSpec) -> dict[str, RunSpec]:
    """Return the runs that go on from what was saved, by moment."""
    runs = {moment: run.resumed(moment) for moment in run.save}
    return {moment: of for moment, of in runs.items() if Path(str(of.ckpt_path)).exists()}


@pytest.mark.parametrize(
    ("asynchronous", "moments"),
    [*((False, MOMENTS[i::3]) for i in range(3)), (True, ("inside 0.2", "step 1.3"))],
)
def test_values_and_decisions_are_those_of_the_whole_run(
    asynchronous: bool, moments: tuple[str, ...], worlds: Pools, tmp_path: Path
) -> None:
    """Epochs' values, rates, early stopping, on every rank and from every moment, bit for bit."""
    run = saving(tmp_path, save=moments, strategy={"async_save": asynchronous})
    whole = worlds.run(2, partial(values_of, run))
    runs = resumed(run)
    assert set(runs) == set(moments)
    assert len(set(whole[0].rates.values())) > 1
    assert whole[0].stopped
    # Another way to log the same is no obstacle.
    ranks = worlds.run(2, partial(all_values, list(runs.values()), "bar"))
    unlike = {
        (rank, moment): found
        for rank, of_rank in enumerate(ranks)
        for moment, seen in zip(runs, of_rank, strict=True)
        if (found := _unlike(whole[rank], seen, lacks=LATER.get(moment, ())))
    }
    assert not unlike


def _unlike(whole: LoggedValues, seen: LoggedValues, lacks: tuple[str, ...]) -> dict[str, object]:
    """Return what a run saw or decided otherwise, beside the whole run's."""
    first = min(seen.rates)
    rates = from_step(whole.rates, first)
    pairs = {
        "rates": (seen.rates, rates),
        "stopped": (seen.stopped, whole.stopped),
        "best": (seen.best, whole.best),
    }
    for kind, mine, others in (
        ("seen", seen.epochs, whole.epochs),
        ("logged", seen.logged, whole.logged),
    ):
        for epoch in mine:
            for name in mine[epoch].keys() | others[epoch].keys():
                at = f"{kind} {name} of {epoch}"
                pairs[at] = (mine[epoch].get(name), others[epoch].get(name))
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return {name: pair for name, pair in differing.items() if not any(map(name.count, lacks))}


@pytest.mark.long
@pytest.mark.parametrize("moments", [("step 0.2", "epoch 0"), ("inside 0.2", "step 0.4")])
@pytest.mark.parametrize(
    ("saved_on", "world", "stage", "batch_size"),
    [(2, 1, 3, 2), (2, 3, 2, 2), (1, 2, 2, 6), (3, 2, 1, 6)],
)
def test_another_world_sums_up_the_same(
    saved_on: int,
    world: int,
    stage: int,
    batch_size: int,
    moments: tuple[str, ...],
    worlds: Pools,
    tmp_path: Path,
) -> None:
    """What is summed up over all ranks, up to the order of a sum; and the same decisions.

    ZeRO-3's hooks count in attributes of every metric whose forward is called. With a batch size of
    6, two devices take one batch for a step: a metric has a single value of what is left of the
    epoch at one rank, and those of the run that saved at another.
    """
    run = saving(tmp_path, save=moments, stage=stage, batch_size=batch_size)
    whole = worlds.run(saved_on, partial(values_of, run, "correlation"))[0]
    runs = resumed(run)
    of_rank = worlds.run(world, partial(all_values, list(runs.values()), "correlation"))[0]
    for moment, seen in zip(runs, of_rank, strict=True):
        assert all(whole.rates[step] == rate for step, rate in seen.rates.items()), moment
        assert seen.stopped == whole.stopped, moment
        told = "correlation cover only the batches after the resume"
        assert any(told in text for text in seen.said) == (moment != "epoch 0"), moment
        for epoch in seen.epochs.keys() - {"0"}:
            for name in whole.epochs[epoch].keys() - OTHERS:
                if f"{name} of {epoch}" in LATER.get(moment, ()):
                    continue
                value = whole.epochs[epoch][name]
                here = seen.epochs[epoch].get(name, math.nan)
                if name in LOCAL or name.endswith("_step"):
                    assert math.isfinite(here), (moment, epoch, name)
                else:
                    assert math.isclose(here, value, rel_tol=1e-4), (moment, epoch, name)
