"""A run that was taken up consumes, step by step, the samples of one that was never stopped."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Pools
from tests.trainer._recorded_runs import (
    RunRecord,
    RunSpec,
    assert_continued,
    fit,
    fits,
    from_step,
    record,
    records,
)

pytestmark = pytest.mark.engine


def long(*values: Any) -> list[Any]:
    """Mark parameters for the long run."""
    tuples = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*each, marks=pytest.mark.long) for each in tuples]


STEPS = 5
"""Of an epoch: 53 samples, filled up to five global batches of 12."""

POINTS = {
    "starting 0": 0,
    "inside 0.0": 0,
    "step 0.2": 2,
    "inside 0.2": 2,
    "step 0.5": 5,
    "epoch 0": 5,
    "starting 1": 5,
    "inside 1.0": 5,
    "step 1.3": 8,
    "end": 10,
    "after": 10,
}
"""Moments of a save, and the optimizer step at which a run goes on from there."""

VALIDATIONS = {
    f"{what} {step}": step for step in (2, 3, 4, 5, 6, 7, 9) for what in ("validating", "validated")
}

SHORT: dict[str, Any] = {"kind": "seeks", "length": 52, "validate": True, "stage": 3}
"""Data without a length whose last step has 4 samples, in fewer micro-batches than the others."""

SCENARIOS: dict[str, RunSpec] = {
    "dropout and random samples": RunSpec(dropout=0.3, noise=0.1),
    "ZeRO-3, validated": RunSpec(stage=3, dropout=0.2, validate=True),
    "ZeRO-1": RunSpec(stage=1, dropout=0.2),
    "workers": RunSpec(noise=0.1, loader={"num_workers": 2}),
    "persistent workers": RunSpec(noise=0.1, loader={"num_workers": 2, "persistent_workers": True}),
    "validated twice an epoch": RunSpec(validate=True, trainer={"val_check_interval": 0.5}),
    "validated at every step": RunSpec(validate=True, trainer={"val_check_interval": 1}),
    "validated over epochs": RunSpec(
        validate=True, trainer={"val_check_interval": 3, "check_val_every_n_epoch": None}
    ),
    "plateau": RunSpec(validate=True, schedule="plateau", epochs=4),
    "plateau, stepwise": RunSpec(
        validate=True, schedule="plateau, stepwise", trainer={"val_check_interval": 0.5}
    ),
    "epochs' schedule": RunSpec(validate=True, schedule="epoch"),
    "every third step": RunSpec(schedule="frequency"),
    "one cycle": RunSpec(schedule="onecycle"),
    "warm-up and cosine": RunSpec(schedule="warmup"),
    "lambda": RunSpec(schedule="lambda"),
    "max_steps": RunSpec(epochs=None, max_steps=10, validate=True),
    "some batches": RunSpec(trainer={"limit_train_batches": 4}, schedule="onecycle"),
    "a part of the batches": RunSpec(trainer={"limit_train_batches": 0.9}),
    "last batch dropped": RunSpec(loader={"drop_last": True}),
    "user's sampler": RunSpec(kind="sampler"),
    "two loaders": RunSpec(kind="two"),
    "two loaders, the longer one": RunSpec(kind="two, as long as the longer"),
    "own distributed sampler": RunSpec(
        kind="own distributed sampler", trainer={"use_distributed_sampler": False}
    ),
    "loaders made anew": RunSpec(trainer={"reload_dataloaders_every_n_epochs": 1}),
    "validated by the clock": RunSpec(validate=True, trainer={"val_check_interval": "00:01:00:00"}),
    "positional arguments": RunSpec(kind="positional"),
    "manual optimization": RunSpec(manual=True, batch_size=12, dropout=0.2, validate=True),
    "a short last window": RunSpec(**SHORT, dropout=0.2, schedule="lambda"),
    "short windows, a limit beyond the data": RunSpec(
        **SHORT, schedule="plateau, stepwise", trainer={"limit_train_batches": 7}
    ),
    "short windows, validated over epochs": RunSpec(
        **SHORT,
        schedule="frequency",
        trainer={"val_check_interval": 3, "check_val_every_n_epoch": None},
    ),
    "short windows, validated twice an epoch": RunSpec(
        **SHORT, schedule="step", trainer={"limit_train_batches": 5, "val_check_interval": 0.5}
    ),
    "uneven": RunSpec(global_batch=11, strategy={"allow_uneven_batches": True}),
}
SOME_SCENARIOS = pytest.mark.cases(3)
"""In ``make test``, from two of their points each; all from all of them in ``make test-long``."""

OTHER_WORLDS = (1, 3, 4)

SHORTER = {"some batches": 4, "a part of the batches": 4, "last batch dropped": 4}


@dataclass(frozen=True)
class Reference:
    """A run that was never stopped, and where it saved."""

    run: RunSpec
    seen: list[RunRecord]
    """What each rank saw."""
    steps: int
    """Of an epoch."""

    def points(self) -> dict[str, int]:
        """Return the saves that were made, and where a run resumes from each."""
        root = Path(self.run.root)
        at = {**POINTS, **VALIDATIONS}
        made = {name for name in at if (root / f"{name.replace(' ', '-')}.ckpt").exists()}
        total = self.seen[0].global_step
        if self.steps != STEPS:
            # The names tell steps of an epoch; epochs are shorter here.
            at |= {"epoch 0": self.steps, "starting 1": self.steps, "inside 1.0": self.steps}
            at |= {"step 1.3": self.steps + 3}
        at |= {"end": total, "after": total}
        return {name: at[name] for name in at if name in made}

    def drawn(self, seed: int, count: int, where: str) -> dict[str, int]:
        """Return as many of the saves, always the same of one seed."""
        made = self.points()
        return {p: made[p] for p in random.Random(f"{seed} {where}").sample([*made], count)}

    def dealt(self, seed: int, world: int) -> dict[str, int]:
        """Return the saves for one of the other worlds; each seed gives other ones."""
        place = OTHER_WORLDS.index(world) - seed
        return {
            point: begin
            for index, (point, begin) in enumerate(self.points().items())
            if (index - place) % len(OTHER_WORLDS) == 0
        }


class References(dict[str, Reference]):
    """Every scenario, run once on two ranks on demand, saving at every kind of point."""

    def __init__(self, worlds: Pools, roots: pytest.TempPathFactory) -> None:
        super().__init__()
        self._worlds, self._roots = worlds, roots

    def __missing__(self, name: str) -> Reference:
        root = str(self._roots.mktemp("reference"))
        saving = replace(SCENARIOS[name], save=(*POINTS, *VALIDATIONS), root=root)
        seen = self._worlds.run(2, partial(fit, saving))
        self[name] = Reference(saving, seen, SHORTER.get(name, STEPS))
        return self[name]


@pytest.fixture(scope="module")
def references(worlds: Pools, tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(worlds, tmp_path_factory)


@SOME_SCENARIOS
@pytest.mark.parametrize("points", ["drawn", *long("all")])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_same_world_continues_bit_for_bit(
    scenario: str, points: str, references: References, worlds: Pools, seed: int
) -> None:
    """Samples, losses, rates, hooks, buffers and random numbers, from every point."""
    reference = references[scenario]
    assert len(reference.points()) >= 9
    begins = reference.points() if points == "all" else reference.drawn(seed, 2, scenario)
    runs = [reference.run.resumed(point) for point in begins]
    for rank, of_rank in enumerate(worlds.run(2, partial(fits, runs))):
        whole = reference.seen[rank]
        for (point, begin), seen in zip(begins.items(), of_rank, strict=True):
            assert seen.steps == from_step(whole.steps, begin), point
            assert seen.losses == from_step(whole.losses, begin), point
            assert seen.rates == from_step(whole.rates, begin), point
            assert seen.axis == whole.axis[len(whole.axis) - len(seen.axis) :], point
            assert len(seen.axis) == whole.global_step - begin, point
            assert seen.global_step == whole.global_step
            _check_events(whole, seen, point)
            _check_loops(whole, seen, point)
            if begin < whole.global_step:
                assert seen.epoch == whole.epoch, point
                assert seen.buffer == whole.buffer, point
                assert seen.drawn == whole.drawn, point


@SOME_SCENARIOS
@pytest.mark.parametrize("other", ["drawn", *long(*OTHER_WORLDS)])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_another_world_takes_the_same_steps_at_the_same_rates(
    scenario: str, other: str | int, references: References, worlds: Pools, seed: int
) -> None:
    reference = references[scenario]
    if isinstance(other, int):
        world, points = other, reference.dealt(seed, other)
    else:
        world = random.Random(f"{seed} {scenario}").choice(OTHER_WORLDS)
        points = reference.drawn(seed, 1, f"{scenario} elsewhere")
    runs = [reference.run.resumed(point) for point in points]
    if reference.run.kind == "seeks" and world == 4:
        runs = [replace(run, batch_size=3) for run in runs]  # its batches are not cut
    whole = reference.seen[0]
    for (point, begin), seen in zip(points.items(), records(worlds, world, runs), strict=True):
        assert seen.steps == from_step(whole.steps, begin), point
        assert seen.rates == from_step(whole.rates, begin), point
        assert seen.global_step == whole.global_step, point
        assert seen.axis == whole.axis[len(whole.axis) - len(seen.axis) :], point
        _check_events(whole, seen, point)


def _check_events(whole: RunRecord, seen: RunRecord, point: str) -> None:
    """Check that hooks run as in the whole run; those at the save's moment may run again."""
    tail = whole.events[len(whole.events) - len(seen.events) :]
    assert seen.events == tail, point


def _check_loops(whole: RunRecord, seen: RunRecord, point: str) -> None:
    """Check that every counter of the loops equals the whole run's, at each micro-batch."""
    for moment, counts in seen.loops.items():
        others = whole.loops[moment]
        unlike = {
            key: (counts.get(key), others.get(key))
            for key in counts.keys() | others.keys()
            if counts.get(key) != others.get(key)
        }
        assert not unlike, (point, moment)


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "target"),
    [(1, 6), (6, 4), (4, 1), (2, 3), (3, 2), *long(*product((1, 2, 3, 4, 6), repeat=2))],
)
def test_every_pair_of_worlds_takes_the_same_steps(
    source: int, target: int, worlds: Pools, tmp_path: Path
) -> None:
    """From inside an epoch and inside a window, with any two accumulations."""
    saving = RunSpec(save=("step 0.3", "inside 1.1"), root=str(tmp_path))
    whole = record(worlds, source, saving)
    points = {"step 0.3": 3, "inside 1.1": 6}
    if not Path(str(saving.resumed("inside 1.1").ckpt_path)).exists():
        del points["inside 1.1"]  # this world has no window to be inside of
    for seen in assert_continued(worlds, target, saving, whole, points):
        assert all(len(samples) == 12 for samples in seen.steps.values())


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_two_changes_of_world_make_one_run(stage: int, worlds: Pools, tmp_path: Path) -> None:
    run = RunSpec(stage=stage, epochs=3, validate=True, schedule="onecycle")
    whole = record(worlds, 4, run)
    others = [record(worlds, world, run) for world in (2, 3)]
    first = replace(run, save=("inside 0.2", "step 0.2"), root=str(tmp_path))
    record(worlds, 4, first)
    path = next(tmp_path.glob("*0.2.ckpt"))
    second = replace(run, save=("inside 1.3",), root=str(tmp_path), ckpt_path=str(path))
    then = record(worlds, 2, second)
    assert then.steps == from_step(whole.steps, 2)
    (last,) = assert_continued(worlds, 3, second, whole, {"inside 1.3": 8})
    losses = {**whole.losses, **then.losses, **last.losses}
    near = max(abs(o.losses[s] - whole.losses[s]) for o in others for s in whole.losses)
    assert max(abs(losses[s] - whole.losses[s]) for s in losses) <= 2 * near + 1e-7


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "point"), [(1, "end"), (2, "after"), (3, "epoch 1"), *long((2, "end"), (3, "after"))]
)
def test_a_run_stopped_by_max_steps_continues(
    point: str, world: int, worlds: Pools, tmp_path: Path
) -> None:
    """In mid-epoch, where Lightning takes the epoch for done."""
    short = RunSpec(save=(point,), root=str(tmp_path), epochs=None, max_steps=8)
    record(worlds, 2, short)
    for limit in ({"epochs": None, "max_steps": 14}, {"epochs": 3, "max_steps": -1}):
        whole = record(worlds, 2, RunSpec(**limit))
        (seen,) = assert_continued(worlds, world, short, whole, {point: 8}, **limit)
        assert seen.global_step == whole.global_step
        assert world != 2 or seen.losses == from_step(whole.losses, 8)


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_finished_run_continues_for_more_epochs(
    world: int, worlds: Pools, tmp_path: Path
) -> None:
    short = RunSpec(save=("end",), root=str(tmp_path), epochs=1)
    _, whole = records(worlds, 2, [short, RunSpec(epochs=3)])
    (seen,) = assert_continued(worlds, world, short, whole, {"end": 5}, epochs=3)
    assert seen.epoch == whole.epoch
    assert not any("was planned for" in text for text in seen.messages)  # no schedule was


@pytest.mark.long
def test_numpy_rates_keep_their_type(worlds: Pools, tmp_path: Path) -> None:
    """A step with np.float32 differs from one with Python's float."""
    whole = RunSpec(schedule="numpy", save=("step 0.2",), root=str(tmp_path))
    for of_whole, seen in worlds.run(2, partial(fits, [whole, whole.resumed("step 0.2")])):
        assert {type(rate).__name__ for rate in of_whole.rates.values()} == {"float32"}
        assert {type(rate).__name__ for rate in seen.rates.values()} == {"float32"}
        assert seen.rates == from_step(of_whole.rates, 2)
        assert seen.losses == from_step(of_whole.losses, 2)


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [
        (RunSpec(schedule="warmup", epochs=3), "inside 1.3", 8),
        (RunSpec(schedule="onecycle", epochs=3), "step 0.2", 2),
        (RunSpec(schedule="lambda", stage=3), "epoch 0", 5),
        (RunSpec(schedule="epoch", validate=True, epochs=3), "inside 1.0", 5),
    ],
    ids=lambda plan: plan[0].schedule,
)
def test_a_new_rate_equals_that_of_a_run_that_always_had_it(
    plan: tuple[RunSpec, str, int], worlds: Pools, tmp_path: Path
) -> None:
    """With load_hyperparameters=False, after a warm-up, in a cycle, in an epoch's schedule."""
    run, point, begin = plan
    saving = replace(run, rate=0.003, root=str(tmp_path), save=(point,))
    _, whole = records(worlds, 2, [saving, run])
    own = {"rate": run.rate, "strategy": {"load_hyperparameters": False}}
    for world in (2, 3):
        (seen,) = assert_continued(worlds, world, saving, whole, {point: begin}, **own)
        assert seen.rates == from_step(whole.rates, begin)
        assert len(set(seen.rates.values())) > 1


@pytest.mark.long
@pytest.mark.parametrize("target", [1, 3, *long(4, 6)])
def test_losses_differ_by_the_order_of_sums_only(
    target: int, worlds: Pools, tmp_path: Path
) -> None:
    """Losses of two steps differ by far more: none is skipped or taken twice."""
    saving = RunSpec(save=("step 0.3",), root=str(tmp_path), epochs=4, length=120)
    whole = record(worlds, 2, saving)
    other, seen = records(worlds, target, [replace(saving, save=()), saving.resumed("step 0.3")])
    apart = max(abs(whole.losses[step] - other.losses[step]) for step in whole.losses)
    distance = max(abs(whole.losses[step] - loss) for step, loss in seen.losses.items())
    assert set(seen.losses) == set(range(3, 40))
    steps = [abs(whole.losses[step] - whole.losses[step + 1]) for step in range(39)]
    print(f"apart {apart:.2g}, resumed {distance:.2g}, a step {statistics.median(steps):.2g}")
    assert max(apart, distance) < 1e-4
    assert statistics.median(steps) > 10 * 1e-4
