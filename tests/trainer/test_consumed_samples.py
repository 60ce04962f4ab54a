"""In each step, a resumed run consumes the samples of an uninterrupted run."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.fits import FitCase, fit, fits
from tests.support.ranks import Pools
from tests.trainer._recorded_runs import (
    RunRecord,
    assert_continued,
    from_step,
    record,
    recorded,
    records,
)

pytestmark = pytest.mark.engine


def long(*values: Any) -> list[Any]:
    """Mark parameters as long."""
    tuples = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*each, marks=pytest.mark.long) for each in tuples]


STEPS = 5
"""Steps per epoch: 53 samples, padded to five global batches of 12."""

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
"""Moments of saves, with the optimizer step from which a resumed run continues."""

VALIDATIONS = {
    f"{moment} {step}": step
    for step in (2, 3, 4, 5, 6, 7, 9)
    for moment in ("validating", "validated")
}

SHORT: dict[str, Any] = {"kind": "seeks", "length": 52, "validate": True, "stage": 3}
"""Data without a length; the last step has 4 samples in fewer micro-batches than other steps."""

SCENARIOS: dict[str, FitCase] = {
    "dropout and random samples": recorded(dropout=0.3, noise=0.1),
    "ZeRO-3, validated": recorded(stage=3, dropout=0.2, validate=True),
    "ZeRO-1": recorded(stage=1, dropout=0.2),
    "workers": recorded(noise=0.1, loader={"num_workers": 2}),
    "persistent workers": recorded(
        noise=0.1, loader={"num_workers": 2, "persistent_workers": True}
    ),
    "validated twice an epoch": recorded(validate=True, trainer={"val_check_interval": 0.5}),
    "validated at every step": recorded(validate=True, trainer={"val_check_interval": 1}),
    "validated over epochs": recorded(
        validate=True, trainer={"val_check_interval": 3, "check_val_every_n_epoch": None}
    ),
    "plateau": recorded(validate=True, schedule="plateau", epochs=4),
    "plateau, stepwise": recorded(
        validate=True, schedule="plateau, stepwise", trainer={"val_check_interval": 0.5}
    ),
    "epochs' schedule": recorded(validate=True, schedule="epoch"),
    "every third step": recorded(schedule="frequency"),
    "one cycle": recorded(schedule="onecycle"),
    "warm-up and cosine": recorded(schedule="warmup"),
    "lambda": recorded(schedule="lambda"),
    "max_steps": recorded(epochs=None, max_steps=10, validate=True),
    "some batches": recorded(trainer={"limit_train_batches": 4}, schedule="onecycle"),
    "a part of the batches": recorded(trainer={"limit_train_batches": 0.9}),
    "last batch dropped": recorded(loader={"drop_last": True}),
    "user's sampler": recorded(kind="sampler"),
    "two loaders": recorded(kind="two"),
    "two loaders, the longer one": recorded(kind="two, as long as the longer"),
    "own distributed sampler": recorded(
        kind="own distributed sampler", trainer={"use_distributed_sampler": False}
    ),
    "loaders made anew": recorded(trainer={"reload_dataloaders_every_n_epochs": 1}),
    "validated by the clock": recorded(
        validate=True, trainer={"val_check_interval": "00:01:00:00"}
    ),
    "manual optimization": recorded(manual=True, batch_size=12, dropout=0.2, validate=True),
    "a short last window": recorded(**SHORT, dropout=0.2, schedule="lambda"),
    "short windows, a limit beyond the data": recorded(
        **SHORT, schedule="plateau, stepwise", trainer={"limit_train_batches": 7}
    ),
    "short windows, validated over epochs": recorded(
        **SHORT,
        schedule="frequency",
        trainer={"val_check_interval": 3, "check_val_every_n_epoch": None},
    ),
    "short windows, validated twice an epoch": recorded(
        **SHORT, schedule="step", trainer={"limit_train_batches": 5, "val_check_interval": 0.5}
    ),
    "uneven": recorded(global_batch=11, strategy={"allow_uneven_batches": True}),
}
OTHER_WORLDS = (1, 3, 4)

SHORTER = {"some batches": 4, "a part of the batches": 4, "last batch dropped": 4}


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run and its saves."""

    run: FitCase
    seen: list[RunRecord]
    """The records of all ranks."""
    steps: int
    """Steps per epoch."""

    def points(self) -> dict[str, int]:
        """Return the existing saves, with the step from which a resumed run continues."""
        root = Path(self.run.root)
        at = {**POINTS, **VALIDATIONS}
        saved = {name for name in at if (root / f"{name.replace(' ', '-')}.ckpt").exists()}
        total = self.seen[0].global_step
        if self.steps != STEPS:
            # Shorter epochs change the global steps of these moments.
            at |= {"epoch 0": self.steps, "starting 1": self.steps, "inside 1.0": self.steps}
            at |= {"step 1.3": self.steps + 3}
        at |= {"end": total, "after": total}
        return {name: at[name] for name in at if name in saved}

    def drawn(self, seed: int, count: int, purpose: str) -> dict[str, int]:
        """Return ``count`` random saves, which depend on the seed and the purpose."""
        saved = self.points()
        return {p: saved[p] for p in random.Random(f"{seed} {purpose}").sample([*saved], count)}

    def dealt(self, seed: int, world: int) -> dict[str, int]:
        """Return a world's share of the saves; the shares depend on the seed."""
        offset = OTHER_WORLDS.index(world) - seed
        return {
            point: begin
            for index, (point, begin) in enumerate(self.points().items())
            if (index - offset) % len(OTHER_WORLDS) == 0
        }


class References(dict[str, Reference]):
    """The reference run of each scenario: run once on demand, on two ranks, with all saves."""

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


@pytest.mark.parametrize("points", ["drawn", *long("all")])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_same_world_continues_bit_for_bit(
    scenario: str, points: str, references: References, worlds: Pools, seed: int
) -> None:
    """Samples, losses, rates, hooks, buffers and random numbers are equal, from every step.

    A point inside a window repeats the window with other random numbers.
    """
    reference = references[scenario]
    assert len(reference.points()) >= 9
    begins = reference.points() if points == "all" else reference.drawn(seed, 2, scenario)
    runs = [reference.run.resumed(point) for point in begins]
    for rank, resumed in enumerate(worlds.run(2, partial(fits, runs))):
        expected = reference.seen[rank]
        for (point, begin), seen in zip(begins.items(), resumed, strict=True):
            assert seen.steps == from_step(expected.steps, begin), point
            assert seen.rates == from_step(expected.rates, begin), point
            assert seen.axis == expected.axis[len(expected.axis) - len(seen.axis) :], point
            assert len(seen.axis) == expected.global_step - begin, point
            assert seen.global_step == expected.global_step
            _check_events(expected, seen, point)
            _check_loops(expected, seen, point)
            if point.startswith("inside"):
                continue
            assert seen.losses == from_step(expected.losses, begin), point
            if begin < expected.global_step:
                assert seen.epoch == expected.epoch, point
                assert seen.buffer == expected.buffer, point
                assert seen.drawn == expected.drawn, point


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
        runs = [replace(run, batch_size=3) for run in runs]  # Its batches cannot be split.
    expected = reference.seen[0]
    for (point, begin), seen in zip(points.items(), records(worlds, world, runs), strict=True):
        assert seen.steps == from_step(expected.steps, begin), point
        assert seen.rates == from_step(expected.rates, begin), point
        assert seen.global_step == expected.global_step, point
        assert seen.axis == expected.axis[len(expected.axis) - len(seen.axis) :], point
        _check_events(expected, seen, point)


def _check_events(expected: RunRecord, seen: RunRecord, point: str) -> None:
    """Check that the events are the last ones of the uninterrupted run."""
    tail = expected.events[len(expected.events) - len(seen.events) :]
    assert seen.events == tail, point


def _check_loops(reference: RunRecord, seen: RunRecord, point: str) -> None:
    """Check that all counters of the loops equal those of the uninterrupted run."""
    for moment, counts in seen.loops.items():
        expected = reference.loops[moment]
        differing = {
            key: (counts.get(key), expected.get(key))
            for key in counts.keys() | expected.keys()
            if counts.get(key) != expected.get(key)
        }
        assert not differing, (point, moment)


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "target"),
    [(1, 6), (6, 4), (4, 1), (2, 3), (3, 2), *long(*product((1, 2, 3, 4, 6), repeat=2))],
)
def test_every_pair_of_worlds_takes_the_same_steps(
    source: int, target: int, worlds: Pools, tmp_path: Path
) -> None:
    """From inside an epoch and inside a window, with different accumulations."""
    saving = recorded(save=("step 0.3", "inside 1.1"), root=str(tmp_path))
    expected = record(worlds, source, saving)
    points = {"step 0.3": 3, "inside 1.1": 6}
    if not Path(str(saving.resumed("inside 1.1").ckpt_path)).exists():
        del points["inside 1.1"]  # This world does not accumulate gradients.
    for seen in assert_continued(worlds, target, saving, expected, points):
        assert all(len(samples) == 12 for samples in seen.steps.values())


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_two_changes_of_world_make_one_run(stage: int, worlds: Pools, tmp_path: Path) -> None:
    run = recorded(stage=stage, epochs=3, validate=True, schedule="onecycle")
    expected = record(worlds, 4, run)
    others = [record(worlds, world, run) for world in (2, 3)]
    first = replace(run, save=("inside 0.2", "step 0.2"), root=str(tmp_path))
    record(worlds, 4, first)
    path = next(tmp_path.glob("*0.2.ckpt"))
    second = replace(run, save=("inside 1.3",), root=str(tmp_path), ckpt_path=str(path))
    then = record(worlds, 2, second)
    assert then.steps == from_step(expected.steps, 2)
    (last,) = assert_continued(worlds, 3, second, expected, {"inside 1.3": 8})
    losses = {**expected.losses, **then.losses, **last.losses}
    near = max(abs(o.losses[s] - expected.losses[s]) for o in others for s in expected.losses)
    assert max(abs(losses[s] - expected.losses[s]) for s in losses) <= 2 * near + 1e-7


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "point"), [(1, "end"), (2, "after"), (3, "epoch 1"), *long((2, "end"), (3, "after"))]
)
def test_a_run_stopped_by_max_steps_continues(
    point: str, world: int, worlds: Pools, tmp_path: Path
) -> None:
    """The run stops within an epoch that Lightning considers complete."""
    short = recorded(save=(point,), root=str(tmp_path), epochs=None, max_steps=8)
    record(worlds, 2, short)
    for limit in ({"epochs": None, "max_steps": 14}, {"epochs": 3, "max_steps": -1}):
        expected = record(worlds, 2, recorded(**limit))
        (seen,) = assert_continued(worlds, world, short, expected, {point: 8}, **limit)
        assert seen.global_step == expected.global_step
        assert world != 2 or seen.losses == from_step(expected.losses, 8)


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_finished_run_continues_for_more_epochs(
    world: int, worlds: Pools, tmp_path: Path
) -> None:
    short = recorded(save=("end",), root=str(tmp_path), epochs=1)
    _, expected = records(worlds, 2, [short, recorded(epochs=3)])
    (seen,) = assert_continued(worlds, world, short, expected, {"end": 5}, epochs=3)
    assert seen.epoch == expected.epoch
    # Without a schedule, the change of the planned steps is not reported.
    assert not any("was planned for" in text for text in seen.messages)


@pytest.mark.long
def test_numpy_rates_keep_their_type(worlds: Pools, tmp_path: Path) -> None:
    """A step with an np.float32 rate differs from one with a Python float."""
    saving = recorded(schedule="numpy", save=("step 0.2",), root=str(tmp_path))
    for expected, seen in worlds.run(2, partial(fits, [saving, saving.resumed("step 0.2")])):
        assert {type(rate).__name__ for rate in expected.rates.values()} == {"float32"}
        assert {type(rate).__name__ for rate in seen.rates.values()} == {"float32"}
        assert seen.rates == from_step(expected.rates, 2)
        assert seen.losses == from_step(expected.losses, 2)


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [
        (recorded(schedule="warmup", epochs=3), "inside 1.3", 8),
        (recorded(schedule="onecycle", epochs=3), "step 0.2", 2),
        (recorded(schedule="lambda", stage=3), "epoch 0", 5),
        (recorded(schedule="epoch", validate=True, epochs=3), "inside 1.0", 5),
    ],
    ids=lambda plan: plan[0].schedule,
)
def test_a_new_rate_equals_that_of_a_run_that_always_had_it(
    plan: tuple[FitCase, str, int], worlds: Pools, tmp_path: Path
) -> None:
    """With load_hyperparameters=False and several schedules."""
    run, point, begin = plan
    saving = replace(run, rate=0.003, root=str(tmp_path), save=(point,))
    _, expected = records(worlds, 2, [saving, run])
    own = {"rate": run.rate, "strategy": {"load_hyperparameters": False}}
    for world in (2, 3):
        (seen,) = assert_continued(worlds, world, saving, expected, {point: begin}, **own)
        assert seen.rates == from_step(expected.rates, begin)
        assert len(set(seen.rates.values())) > 1


@pytest.mark.long
@pytest.mark.parametrize("target", [1, 3, *long(4, 6)])
def test_losses_differ_only_by_the_order_of_sums(
    target: int, worlds: Pools, tmp_path: Path
) -> None:
    """Losses of consecutive steps differ far more, so that no step is skipped or repeated."""
    saving = recorded(save=("step 0.3",), root=str(tmp_path), epochs=4, length=120)
    expected = record(worlds, 2, saving)
    other, seen = records(worlds, target, [replace(saving, save=()), saving.resumed("step 0.3")])
    other_world = max(abs(expected.losses[step] - other.losses[step]) for step in expected.losses)
    resumed = max(abs(expected.losses[step] - loss) for step, loss in seen.losses.items())
    assert set(seen.losses) == set(range(3, 40))
    steps = [abs(expected.losses[step] - expected.losses[step + 1]) for step in range(39)]
    step = statistics.median(steps)
    print(f"differences: other world {other_world:.2g}, resumed {resumed:.2g}, step {step:.2g}")
    assert max(other_world, resumed) < 1e-4
    assert statistics.median(steps) > 10 * 1e-4
