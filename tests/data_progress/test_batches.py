"""Global batches on any number of devices, and the loop counters of a resumed run."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.core.manifest import Manifest, TrainingProgress
from lightning_elastic_zero.data_progress.batches import BatchPlan, plan_batches
from lightning_elastic_zero.data_progress.counters import (
    LOADER_STATES,
    fit_loop_at,
    infer_position,
    read_position,
    validation_counters_at,
    with_loader_states,
)
from lightning_elastic_zero.data_progress.position import (
    Consumed,
    DataPosition,
    LoaderRecord,
    Position,
    RunSettings,
)
from lightning_elastic_zero.errors import CheckpointFormatError, UnsupportedError

WORLDS = st.integers(1, 12)


def plan_or_none(size: int, most: int, world: int, *, uneven: bool) -> BatchPlan | None:
    try:
        return plan_batches(size, most, world, allow_uneven=uneven)
    except UnsupportedError:
        return None


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    world, accumulate = draw(WORLDS), draw(st.integers(1, 5))
    least = world * accumulate
    return BatchPlan(draw(st.integers(least, 4 * least)), world, accumulate)


@given(plans())
def test_micro_batches_make_up_the_global_batch(plan: BatchPlan) -> None:
    cut = [plan.micro_batches_of(rank) for rank in range(plan.world_size)]
    sizes = {size for of_rank in cut for size in of_rank}
    assert [sum(of_rank) for of_rank in cut] == [plan.samples_of(r) for r in range(plan.world_size)]
    assert sum(map(sum, cut)) == plan.global_batch_size
    assert {len(of_rank) for of_rank in cut} == {plan.accumulate}
    assert all(list(of_rank) == sorted(of_rank, reverse=True) for of_rank in cut)
    assert all(max(of_rank) - min(of_rank) <= 1 for of_rank in cut)
    assert max(sizes) == plan.largest_micro_batch
    assert min(sizes) >= 1
    assert plan.is_even == (len(sizes) == 1)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 8))
@example(25, 13, 1)  # a divisor beyond twice the fewest
@example(3, 1, 2)  # a rank with fewer samples than micro-batches
def test_a_plan_is_found_if_one_exists(size: int, most: int, world: int) -> None:
    """Equal micro-batches if they fill half the memory; else unequal ones, if allowed."""
    smallest, largest = size // world, -(-size // world)
    fitting = [a for a in range(1, smallest + 1) if -(-largest // a) <= most]
    equal = [a for a in fitting if size % (world * a) == 0 and a <= 2 * fitting[0]]
    for uneven, possible in ((False, equal), (True, equal or fitting)):
        found = plan_or_none(size, most, world, uneven=uneven)
        assert (found.accumulate if found else 0) == (possible[0] if possible else 0)


@given(plans())
def test_every_sample_has_the_same_weight(plan: BatchPlan) -> None:
    """Lightning's 1 / A, DeepSpeed's 1 / W and the weight give each sample the share 1 / G."""
    for rank in range(plan.world_size):
        for index, samples in enumerate(plan.micro_batches_of(rank)):
            weight = Fraction(plan.loss_weight(rank, index)).limit_denominator(10**6)
            share = weight / samples / plan.accumulate / plan.world_size
            assert share == Fraction(1, plan.global_batch_size)
            assert not plan.is_even or plan.loss_weight(rank, index) == 1.0


@given(st.integers(1, 100), st.integers(1, 32), WORLDS)
def test_equal_micro_batches_that_fill_the_memory_are_found(
    factor: int, most: int, world: int
) -> None:
    plan = plan_batches(factor * most * world, most, world)
    assert (plan.accumulate, plan.largest_micro_batch) == (factor, most)


def test_the_refusal_names_device_counts_and_the_option() -> None:
    with pytest.raises(UnsupportedError) as caught:
        plan_batches(48, 8, 5)
    message = str(caught.value)
    assert "global_batch_size=48 cannot be shared by 5 devices" in message
    assert "1, 2, 3, 4, 6, 8, 12, 16, 24, 48" in message
    assert "allow_uneven_batches=True" in message
    assert plan_batches(48, 8, 5, allow_uneven=True).accumulate == 2


@pytest.mark.parametrize(
    ("sizes", "uneven", "fit"),
    [
        ((720, 720, 17), False, "4, 5, 6, 8, 9, 10, 12, 15, 16, 18, 20, 24."),
        ((3, 8, 4), True, "1, 3"),
    ],
    ids=["the nearest counts", "fewer samples than devices"],
)
def test_the_refusal_names_counts_that_fit(
    sizes: tuple[int, int, int], uneven: bool, fit: str
) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(f"Device counts that fit: {fit}")):
        plan_batches(*sizes, allow_uneven=uneven)


def counts(ready: int, started: int, processed: int, completed: int) -> dict[str, int]:
    return {"ready": ready, "started": started, "processed": processed, "completed": completed}


def loops(
    epoch: tuple[int, int, int, int],
    batch: tuple[int, int, int, int],
    *,
    is_last: bool = False,
    before: int = 0,
    validated: int = 0,
) -> dict[str, Any]:
    """Return the state of a fit loop; ``before`` counts micro-batches of earlier epochs."""
    current = counts(*batch)
    val = counts(*[validated] * 4)
    steps = {"total": {"ready": 1, "completed": 1}, "current": {"ready": 1, "completed": 1}}
    # One more accumulation window was started than steps were taken.
    cleared = {part: {"ready": 2, "started": 2, "completed": 2} for part in steps}
    return {
        "state_dict": {"combined_loader": [{"some": "state"}]},
        "epoch_progress": {"total": counts(*epoch), "current": counts(*epoch)},
        "epoch_loop.batch_progress": {
            "total": {key: value + before for key, value in current.items()},
            "current": current,
            "is_last_batch": is_last,
        },
        "epoch_loop.val_loop.batch_progress": {
            "total": val,
            "current": dict(val),
            "is_last_batch": validated > 0,
        },
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": steps, "zero_grad": cleared}
        },
    }


@pytest.mark.parametrize(
    ("state", "validating", "expected"),
    [
        (loops((0, 0, 0, 0), (0, 0, 0, 0)), False, Position(0, 0)),
        (loops((1, 1, 0, 0), (4, 4, 4, 3)), False, Position(0, 2)),
        (loops((1, 1, 0, 0), (5, 5, 5, 4)), False, Position(0, 2)),
        (loops((1, 1, 0, 0), (5, 5, 4, 4)), False, Position(0, 2)),
        (loops((1, 1, 0, 0), (10, 10, 10, 9), is_last=True), False, Position(0, 5, is_over=True)),
        (loops((1, 1, 0, 0), (4, 4, 4, 4), validated=3), True, Position(0, 2, is_validated=True)),
        (loops((1, 1, 0, 0), (5, 5, 5, 5), validated=3), True, Position(0, 2)),
        (loops((1, 1, 0, 0), (4, 4, 4, 4)), True, Position(0, 2)),
        (
            loops((1, 1, 0, 0), (10, 10, 10, 10), is_last=True, validated=3),
            True,
            Position(0, 5, is_over=True, is_validated=True),
        ),
        (loops((1, 1, 1, 0), (10, 10, 10, 10), is_last=True), False, Position(1, 0)),
        (loops((1, 1, 1, 1), (10, 10, 10, 10), is_last=True), False, Position(1, 0)),
        (loops((2, 1, 1, 1), (10, 10, 10, 10), is_last=True), False, Position(1, 0)),
        # max_steps stopped the fit in mid-epoch, but the end of the epoch ran all the same.
        (loops((1, 1, 1, 0), (4, 4, 4, 4)), False, Position(0, 2, is_validated=True)),
        (loops((3, 3, 3, 3), (4, 4, 4, 4)), False, Position(2, 2, is_validated=True)),
        # on_train_batch_start returned -1: the rest of the epoch is skipped on purpose.
        (loops((1, 1, 0, 0), (4, 3, 4, 3), is_last=True), False, Position(0, 2, is_over=True)),
        (loops((1, 1, 0, 0), (5, 4, 5, 4), is_last=True), False, Position(0, 2, is_over=True)),
    ],
)
def test_positions_are_read(state: dict[str, Any], validating: bool, expected: Position) -> None:
    """Every moment of a fit at which a checkpoint can be saved, with 2 micro-batches per step."""
    assert read_position(state, 2, batches=10, validating=validating) == expected


@pytest.mark.parametrize("recorded", [False, True])
@given(st.data(), st.integers(1, 5), st.integers(0, 2))
def test_another_programs_position_is_inferred(
    recorded: bool, data: st.DataObject, accumulate: int, epoch: int
) -> None:
    """Also if the last step of an epoch has fewer micro-batches, after each of its steps."""
    batches = data.draw(st.integers(accumulate * accumulate, 40))
    per_epoch = math.ceil(batches / accumulate)
    taken = data.draw(st.integers(1, per_epoch))
    done = min(taken * accumulate, batches)
    state = loops(
        (epoch + 1, epoch + 1, epoch, epoch),
        (done, done, done, done),
        is_last=done == batches,
        before=epoch * batches,
    )
    step = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    step["total"]["completed"], step["current"]["completed"] = epoch * per_epoch + taken, taken
    progress = TrainingProgress(
        gradient_accumulation_steps=accumulate if recorded else 1, global_batch_size=12
    )
    found = infer_position(state, progress, RankGrid(2), 7)
    position = Position(epoch, taken, is_over=done == batches)
    assert found == DataPosition(position, 7, RunSettings(RankGrid(2), accumulate, 12))


def test_a_run_without_steps_has_no_accumulation() -> None:
    state = loops((1, 1, 0, 0), (6, 6, 6, 6))
    step = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    step["total"]["completed"] = step["current"]["completed"] = 0
    found = infer_position(state, TrainingProgress(), RankGrid(2), 0)
    assert found.settings.accumulate == 1


@given(st.integers(0, 12), st.integers(1, 5), st.booleans())
def test_every_moment_of_an_epoch_is_read(
    batches: int, accumulate: int, length_is_known: bool
) -> None:
    """Including the last step, which may have fewer micro-batches."""
    for moment in range(4 * batches + 1):
        ready, started, processed, completed = ((moment + at) // 4 for at in (3, 2, 1, 0))
        # If the length is unknown, the last batch is known only once it is fetched.
        is_last = not length_is_known and ready == batches
        state = loops((1, 1, 0, 0), (ready, started, processed, completed), is_last=is_last)
        steps = [n for n in range(1, processed + 1) if n % accumulate == 0 or n == batches]
        expected = Position(0, len(steps), is_over=0 < processed == batches)
        known = batches if length_is_known else math.inf
        assert read_position(state, accumulate, batches=known, validating=False) == expected


@pytest.mark.parametrize(
    ("current", "is_last", "finished"),
    [
        (counts(1, 1, 1, 1), True, True),
        (counts(3, 3, 3, 2), True, False),
        (counts(3, 3, 3, 3), False, False),
        (counts(0, 0, 0, 0), True, False),
    ],
)
def test_a_validation_ends_with_its_last_batch(
    current: dict[str, int], is_last: bool, finished: bool
) -> None:
    state = loops((1, 1, 0, 0), (4, 4, 4, 4))
    state["epoch_loop.val_loop.batch_progress"].update(current=current, is_last_batch=is_last)
    expected = Position(0, 2, is_validated=finished)
    assert read_position(state, 2, batches=10, validating=True) == expected


@given(
    st.integers(0, 5),
    st.integers(0, 9),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(0, 7),
)
@example(0, 1, (False, False, True), 2, 2, 3)
def test_a_written_position_is_read_in_the_new_worlds_units(
    epoch: int, steps: int, flags: tuple[bool, bool, bool], was: int, now: int, before: int
) -> None:
    is_over, is_validated, had_ended = flags
    had_ended = had_ended and steps > 0  # max_steps ends an epoch after any step
    in_epoch = steps > 0
    entered = epoch + in_epoch
    position = Position(epoch, steps, is_over=is_over and in_epoch, is_validated=is_validated)
    done = (steps * was,) * 4
    ended = epoch + had_ended
    state = loops((epoch + 1, epoch + 1, ended, ended), done, before=before * was, validated=3)
    written = fit_loop_at(state, position, was=was, now=now)
    batches = steps * now if position.is_over else 10**6
    read = read_position(written, now, batches=batches, validating=False)
    assert read == replace(position, is_validated=False)
    batch, val = (written[f"epoch_loop.{loop}batch_progress"] for loop in ("", "val_loop."))
    assert batch["current"] == counts(*[steps * now] * 4)
    assert batch["total"] == counts(*[(before + steps) * now] * 4)
    assert written["epoch_progress"]["current"] == counts(entered, entered, epoch, epoch)
    assert written["state_dict"] == {}
    # A validation that may be due is marked as started, without batches: Lightning then decides.
    pending = int(in_epoch and not is_validated)
    begun = counts(pending, pending, 0, 0)
    assert val == {"total": begun, "current": begun, "is_last_batch": False}


@pytest.mark.parametrize(
    ("position", "expected"),
    [(Position(0, 5, is_over=True), 9), (Position(0, 4, is_over=True), 8), (Position(0, 5), 10)],
)
def test_a_short_last_window_keeps_its_count(position: Position, expected: int) -> None:
    state = loops((1, 1, 0, 0), (9, 9, 9, 9), is_last=True)
    written = fit_loop_at(state, position, was=2, now=2)
    assert written["epoch_loop.batch_progress"]["current"] == counts(*[expected] * 4)


def test_loader_states_replace_the_saved_ones() -> None:
    fit = loops((1, 1, 0, 0), (4, 4, 4, 4))
    fit["state_dict"]["own"] = 7
    saved = {"fit_loop": fit, "validate_loop": {}}
    written = with_loader_states(saved, [{"at": 3}])
    assert written == {
        "fit_loop": {**fit, "state_dict": {"own": 7, LOADER_STATES: [{"at": 3}]}},
        "validate_loop": {},
    }
    assert with_loader_states(saved, [])["fit_loop"]["state_dict"] == {"own": 7}
    assert fit["state_dict"][LOADER_STATES] == [{"some": "state"}]


def test_totals_of_an_earlier_fit_are_moved_equally() -> None:
    state = loops((2, 2, 1, 1), (4, 4, 4, 3), before=20)
    state["epoch_progress"]["total"] = counts(7, 7, 6, 6)
    written = fit_loop_at(state, Position(1, 2), was=2, now=3)
    assert written["epoch_progress"]["total"] == counts(7, 7, 6, 6)
    assert written["epoch_loop.batch_progress"]["total"]["ready"] == 36


SETTINGS = RunSettings(
    grid=RankGrid(2),
    accumulate=3,
    global_batch_size=12,
    steps_per_epoch=10,
    planned_steps=40,
    batch_counts={"val_check_interval": 1.0},
)
ORDER = {"seed": 1, "dataset_length": 120}
RECORD = DataPosition(
    Position(2, 5, is_over=False, is_validated=True), 25, SETTINGS, (LoaderRecord(order=ORDER),)
)


def manifest_of(record: DataPosition, **changes: Any) -> Manifest:
    """Return a manifest with a record, and with changed fields of ``progress.sampler``."""
    progress = TrainingProgress(
        gradient_accumulation_steps=record.settings.accumulate,
        global_batch_size=record.settings.global_batch_size,
        sampler=json.loads(json.dumps({**record.to_plain(), **changes})),
    )
    empty: Any = ()
    return Manifest(
        *("id", 1, record.settings.grid.data, "fp32", "float32"), *(empty,) * 5, progress
    )


def test_a_record_is_described_in_samples() -> None:
    first = LoaderRecord(Consumed(48, passes=1), order_epoch=3, order_digest="d1")
    content = replace(RECORD, loaders=(first, LoaderRecord())).to_plain()
    assert content["epoch_samples"] == 60
    assert content["loaders"] == [
        {
            "consumed": {"samples": 48, "passes": 1},
            "has_restarted": False,
            "order": {},
            "has_run_seed": False,
            "order_epoch": 3,
            "order_digest": "d1",
        },
        {
            "consumed": None,
            "has_restarted": False,
            "order": {},
            "has_run_seed": False,
            "order_epoch": None,
            "order_digest": "",
        },
    ]


COUNTS = st.integers(0, 50)
LOADERS = st.builds(
    LoaderRecord,
    st.none() | st.builds(Consumed, COUNTS, COUNTS),
    st.booleans(),
    st.just(ORDER),
    has_run_seed=st.booleans(),
    order_epoch=st.none() | COUNTS,
    order_digest=st.text(max_size=3),
)
RECORDS = st.builds(
    DataPosition,
    st.builds(Position, COUNTS, COUNTS, is_over=st.booleans(), is_validated=st.booleans()),
    COUNTS,
    st.builds(
        RunSettings,
        grid=st.builds(RankGrid, st.integers(1, 3)),
        accumulate=st.integers(1, 3),
        global_batch_size=st.none() | st.integers(1, 50),
        steps_per_epoch=st.none() | COUNTS,
        planned_steps=st.none() | COUNTS,
        batch_counts=st.just(SETTINGS.batch_counts),
    ),
    st.lists(LOADERS, max_size=3).map(tuple),
)


@given(RECORDS)
@example(DataPosition(Position(0, 0), 0, RunSettings(RankGrid(1), 1, None)))
def test_a_record_round_trips_through_the_manifest(record: DataPosition) -> None:
    assert DataPosition.of(manifest_of(record), "here") == record


def test_samples_of_several_loaders_are_not_guessed() -> None:
    inferred = replace(RECORD, loaders=())
    assert inferred.consumed_of(0, is_only_one=True) == Consumed(60)
    assert inferred.consumed_of(0, is_only_one=False) is None
    two = replace(RECORD, loaders=(LoaderRecord(Consumed(7)), LoaderRecord()))
    assert [two.consumed_of(i, is_only_one=False) for i in (0, 1, 2)] == [Consumed(7), None, None]
    unknown = replace(inferred, settings=replace(SETTINGS, global_batch_size=None))
    assert unknown.consumed_of(0, is_only_one=True) is None


LOADER = LoaderRecord().to_plain()


@pytest.mark.parametrize(
    "change",
    [
        *({"epoch": value} for value in (None, "x", -1, math.inf)),
        *({"epoch_steps": -1}, {"global_step": -1}, {"planned_steps": "many"}),
        *({"loaders": 3}, {"loaders": [3]}, {"loaders": [{**LOADER, "order_epoch": -1}]}),
        {"loaders": [{**LOADER, "consumed": {"samples": -1, "passes": 0}}]},
        {"loaders": [{**LOADER, "consumed": {"samples": 1}}]},
    ],
)
def test_invalid_records_are_refused_with_the_file_name(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointFormatError, match="here"):
        DataPosition.of(manifest_of(RECORD, **change), "here")


@pytest.mark.parametrize("name", ["global_step", "loaders", "planned_steps"])
def test_a_missing_field_of_a_record_is_named(name: str) -> None:
    manifest = manifest_of(RECORD)
    fields = {key: value for key, value in manifest.progress.sampler.items() if key != name}
    damaged = replace(manifest, progress=replace(manifest.progress, sampler=fields))
    with pytest.raises(CheckpointFormatError, match=f"here.*{name}"):
        DataPosition.of(damaged, "here")


def test_a_missing_field_of_a_loader_has_its_default() -> None:
    manifest = manifest_of(RECORD, loaders=[{}, {"order": ORDER}])
    assert DataPosition.of(manifest, "here").loaders == (LoaderRecord(), LoaderRecord(order=ORDER))


@given(st.integers(1, 50), st.integers(0, 20), st.booleans())
def test_another_global_batch_skips_no_sample(size: int, steps: int, is_over: bool) -> None:
    """The validation of an epoch that is over is not repeated."""
    record = DataPosition(
        Position(0, steps, is_over=is_over, is_validated=True),
        steps,
        RunSettings(RankGrid(1), 1, global_batch_size=12),
    )
    position = record.at_batch_size(size)
    assert position.steps * size <= steps * 12 < (position.steps + 1) * size
    assert position.is_validated == (is_over or position.steps * size == steps * 12)


@pytest.mark.parametrize(("was", "now"), [(None, 6), (12, None), (None, None)])
def test_without_a_global_batch_a_position_is_unchanged(was: int | None, now: int | None) -> None:
    record = replace(RECORD, settings=replace(SETTINGS, global_batch_size=was))
    assert record.at_batch_size(now) == record.position


def test_a_restarted_window_is_not_counted() -> None:
    written = fit_loop_at(loops((1, 1, 0, 0), (3, 3, 3, 2)), Position(0, 1), was=2, now=2)
    optimizer = written["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    expected = {"ready": 1, "started": 1, "completed": 1}
    assert optimizer["zero_grad"] == {"total": expected, "current": expected}


def test_a_restarted_first_window_of_an_epoch_is_not_counted() -> None:
    inside = loops((2, 2, 1, 1), (1, 1, 1, 0), before=6)
    written = fit_loop_at(inside, Position(1, 0), was=3, now=3)["epoch_loop.batch_progress"]
    assert written["total"] == counts(6, 6, 6, 6)
    ended = loops((1, 1, 1, 0), (6, 6, 6, 6), before=0)
    written = fit_loop_at(ended, Position(1, 0), was=3, now=3)["epoch_loop.batch_progress"]
    assert written["total"] == counts(6, 6, 6, 6)


def test_a_repeated_validation_is_not_counted() -> None:
    saved = {"total": counts(9, 9, 9, 8), "current": counts(3, 3, 3, 2), "is_last_batch": False}
    written = validation_counters_at(saved, began=True, was=6, now=4)
    assert written["total"] == counts(4, 4, 4, 4)
    assert validation_counters_at(saved, began=False, was=0, now=4) == saved
    assert saved["total"] == counts(9, 9, 9, 8)
