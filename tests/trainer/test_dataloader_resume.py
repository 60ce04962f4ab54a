"""Data that cannot be taken up is refused, or starts over where that is allowed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Pools
from tests.trainer._recorded_runs import RunRecord, RunSpec, error_of, fit, fits, from_step

pytestmark = pytest.mark.engine

SAVE = "step 0.3"
OWN = RunSpec(
    kind="own batches", length=60, batch_size=6, trainer={"use_distributed_sampler": False}
)
"""Batches in an order that Lightning is told to leave alone."""


def saved(run: RunSpec, worlds: Pools, root: Path) -> tuple[RunRecord, RunSpec]:
    """Fit on two ranks, saving in mid-epoch; return that run, and the one that resumes."""
    saving = replace(run, save=(SAVE,), root=str(root))
    return worlds.run(2, partial(fit, saving))[0], saving.resumed(SAVE)


@pytest.mark.parametrize("kind", ["iterable", "own batches without a place"])
@pytest.mark.parametrize("world", [2, 3])
def test_data_that_cannot_be_positioned_are_refused_with_a_remedy(
    kind: str, world: int, worlds: Pools, tmp_path: Path
) -> None:
    """Also on the same number of ranks."""
    run = RunSpec(kind="iterable", length=60)
    if kind != "iterable":
        run = replace(OWN, kind="user's loader")
    _, resumed = saved(run, worlds, tmp_path)
    if kind != "iterable":
        resumed = replace(resumed, batch_size=12 // world)
    for message in worlds.run(world, partial(error_of, resumed)):
        assert message.startswith("CheckpointMismatchError")
        assert "saved in epoch 0 after 3 of its optimizer steps" in message
        assert "cannot start at a given sample" in message
        assert "resume_at(epoch, samples)" in message
        assert 'on_unresumable_data="restart_epoch"' in message


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_epoch_restarts_with_a_warning_if_allowed(
    world: int, worlds: Pools, tmp_path: Path
) -> None:
    run = RunSpec(kind="iterable", length=60, strategy={"on_unresumable_data": "restart_epoch"})
    whole, resumed = saved(run, worlds, tmp_path)
    seen = worlds.run(world, partial(fit, resumed))[0]
    again = [whole.steps[step] for step in range(5)]
    assert [seen.steps[step] for step in range(3, 8)] == again
    assert [seen.steps[step] for step in range(8, 13)] == again
    assert seen.global_step == 13
    assert any("Epoch 0 starts over" in text for text in seen.messages)


@pytest.mark.parametrize("kind", ["seeks", "own batches"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_resume_at_is_enough_to_position_data(
    kind: str, world: int, worlds: Pools, tmp_path: Path
) -> None:
    run = RunSpec(kind="seeks", length=60) if kind == "seeks" else OWN
    whole, resumed = saved(run, worlds, tmp_path)
    micro = 12 // world if kind == "own batches" else {4: 3}.get(world, 2)
    seen = worlds.run(world, partial(fit, replace(resumed, batch_size=micro)))[0]
    assert seen.steps == from_step(whole.steps, 3)
    assert world != 2 or seen.losses == {s: v for s, v in whole.losses.items() if s >= 3}


@pytest.mark.parametrize("persistent", [True, pytest.param(False, marks=pytest.mark.long)])
def test_workers_begin_at_the_resumed_position(
    persistent: bool, worlds: Pools, tmp_path: Path
) -> None:
    """Lightning starts them before `resume_at`; later epochs begin at their beginning."""
    options = {"num_workers": 2, "persistent_workers": persistent}
    run = RunSpec(kind="seeks", length=48, batch_size=6, loader=options)
    whole, resumed = saved(run, worlds, tmp_path)
    for world in (1, 2):
        seen = worlds.run(world, partial(fit, replace(resumed, batch_size=12 // world)))[0]
        assert seen.steps == from_step(whole.steps, 3)


def test_items_that_are_batches_are_consumed_once(worlds: Pools, tmp_path: Path) -> None:
    """With batch_size=None a position is counted in items."""
    run = RunSpec(kind="items", length=48, global_batch=None, epochs=1)
    for source, point, done in ((1, "step 0.4", 4), (2, "step 0.3", 6)):
        saving = replace(run, save=(point,), root=str(tmp_path / f"{source}"))
        whole = worlds.run(source, partial(fit, saving))[0]
        before = [i for step in range(done // source) for i in whole.steps[step]]
        for world in (1, 2, 4):
            seen = worlds.run(world, partial(fit, saving.resumed(point)))[0]
            after = [i for ids in seen.steps.values() for i in ids]
            again = done % world  # rounded down to a step: none is skipped
            assert len(before) + len(after) == 4 * (12 + again)
            assert set(before) | set(after) == set(range(48))


def test_items_in_a_global_batch_need_their_size(worlds: Pools, tmp_path: Path) -> None:
    run = RunSpec(kind="items", length=48, global_batch=16, epochs=1)
    for message in worlds.run(2, partial(error_of, run)):
        assert message.startswith("UnsupportedError")
        assert "logging_batch_size_per_gpu" in message
    sized = replace(run, strategy={"logging_batch_size_per_gpu": 4})
    whole, resumed = saved(replace(sized, global_batch=8), worlds, tmp_path)
    for world in (1, 2):
        seen = worlds.run(world, partial(fit, resumed))[0]
        assert seen.steps == from_step(whole.steps, 3)
        assert {len(ids) for ids in seen.steps.values()} == {8}
    for message in worlds.run(3, partial(error_of, replace(sized, global_batch=6))):
        assert message.startswith("UnsupportedError")
        assert "global_batch_size=6" in message
        assert "batch_size=None yields items of 4 samples" in message


def test_batches_of_a_batch_sampler_as_sampler_are_not_cut(worlds: Pools, tmp_path: Path) -> None:
    run = RunSpec(kind="batch sampler as sampler", length=48, global_batch=12, epochs=1)
    for message in worlds.run(2, partial(error_of, run)):
        assert message.startswith("UnsupportedError: global_batch_size=12 on 2 devices")
        assert "yields items of 4 samples. Make" in message
        assert "a multiple of devices x 4" in message
    whole, resumed = saved(replace(run, global_batch=8), worlds, tmp_path)
    for world in (1, 2):
        seen = worlds.run(world, partial(fit, resumed))[0]
        assert seen.steps == from_step(whole.steps, 3)
        assert {len(ids) for ids in seen.steps.values()} == {8}


@pytest.mark.parametrize("point", [3, 5, 7])
@pytest.mark.parametrize("kind", ["a stream first", "a stream and a shorter one"])
def test_each_of_several_loaders_resumes_at_its_position(
    kind: str, point: int, worlds: Pools, tmp_path: Path
) -> None:
    """Also with other batch sizes, after a shorter one has restarted, and twice in a row."""
    run = RunSpec(kind=kind, length=64, global_batch=None, batch_size=4, epochs=2)
    saving = replace(run, save=(f"step 0.{point}",), root=str(tmp_path / "first"))
    whole = worlds.run(2, partial(fit, saving))[0]
    assert whole.global_step == 16
    again = replace(saving.resumed(f"step 0.{point}"), save=("step 0.7",), root=str(tmp_path))
    seen = worlds.run(2, partial(fit, again))[0]
    assert seen.steps == from_step(whole.steps, point)
    if point < 7:
        seen = worlds.run(2, partial(fit, again.resumed("step 0.7")))[0]
        assert seen.steps == from_step(whole.steps, 7)
    here = replace(saving.resumed(f"step 0.{point}"), batch_size=8)
    seen = worlds.run(1, partial(fit, here))[0]
    assert seen.steps == from_step(whole.steps, point)


@pytest.mark.parametrize("again", ["", ", once"])
@pytest.mark.parametrize("global_batch", [None, 8])
def test_a_loader_that_ends_within_a_step_resumes_there(
    global_batch: int | None, again: str, worlds: Pools, tmp_path: Path
) -> None:
    trainer = {"use_distributed_sampler": False}
    kind = f"a shorter batch sampler{again}"
    run = RunSpec(kind=kind, length=48, global_batch=global_batch, epochs=2)
    run = replace(run, trainer=trainer | ({} if global_batch else {"accumulate_grad_batches": 2}))
    points = {f"step 0.{steps}": steps for steps in (1, 2, 4, 5)}
    saving = replace(run, save=(*points,), root=str(tmp_path))
    whole = worlds.run(2, partial(fit, saving))[0]
    assert whole.global_step == 12
    for world, size in ((2, 2), (1, 4), (1, 2)):
        if size * world != 4 and global_batch is None:
            continue
        runs = [saving.resumed(point, batch_size=size) for point in points]
        of_runs = worlds.run(world, partial(fits, runs))[0]
        for begin, seen in zip(points.values(), of_runs, strict=True):
            assert seen.steps == from_step(whole.steps, begin), (world, size, begin)


def test_a_stream_that_has_restarted_is_refused(worlds: Pools, tmp_path: Path) -> None:
    run = RunSpec(kind="a shorter stream", length=64, global_batch=None, batch_size=4, epochs=1)
    saving = replace(run, save=("step 0.2", "step 0.6"), root=str(tmp_path))
    whole = worlds.run(2, partial(fit, saving))[0]
    seen = worlds.run(2, partial(fit, saving.resumed("step 0.2")))[0]
    assert seen.steps == from_step(whole.steps, 2)
    for message in worlds.run(2, partial(error_of, saving.resumed("step 0.6"))):
        assert message.startswith("CheckpointMismatchError")
        assert "samples that the DataLoader of SeekableStream had yielded" in message


@pytest.mark.long
def test_a_loaders_own_state_needs_the_same_world(worlds: Pools, tmp_path: Path) -> None:
    """It is of one rank among two; for three it means nothing."""
    run = RunSpec(kind="stateful", length=60)
    whole, resumed = saved(run, worlds, tmp_path)
    for seen in worlds.run(2, partial(fit, resumed)):
        assert seen.steps == from_step(whole.steps, 3)
    assert len(whole.steps) == 10
    for message in worlds.run(3, partial(error_of, resumed)):
        assert "one state per rank, saved on 2 ranks; this run has 3" in message


@pytest.mark.parametrize("point", ["step 0.1", "inside 0.2", "step 0.4", "inside 1.1"])
def test_a_loaders_own_state_is_that_of_the_last_step(
    point: str, worlds: Pools, tmp_path: Path
) -> None:
    """Lightning fetches a batch ahead."""
    run = RunSpec(kind="stateful", length=60, save=(point,), root=str(tmp_path))
    whole = worlds.run(2, partial(fit, run))[0]
    epoch, step = point.split()[1].split(".")
    for seen in worlds.run(2, partial(fit, run.resumed(point))):
        assert seen.steps == from_step(whole.steps, 5 * int(epoch) + int(step))


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 3])
def test_torchdatas_loader_resumes_on_any_world(world: int, worlds: Pools, tmp_path: Path) -> None:
    """For data with a length the order is ours, without its own state."""
    pytest.importorskip("torchdata")
    whole, resumed = saved(RunSpec(kind="torchdata"), worlds, tmp_path)
    assert worlds.run(world, partial(fit, resumed))[0].steps == from_step(whole.steps, 3)


@pytest.mark.long
def test_other_data_are_refused_in_mid_epoch_only(worlds: Pools, tmp_path: Path) -> None:
    run = RunSpec(save=("epoch 0",))
    _, resumed = saved(run, worlds, tmp_path)
    for message in worlds.run(2, partial(error_of, replace(resumed, length=70))):
        assert "that of the saved run (dataset_length was 53, is 70)" in message
    ended = replace(run, save=("epoch 0",), root=str(tmp_path), epochs=1)
    worlds.run(2, partial(fit, ended))
    longer = ended.resumed("epoch 0", epochs=2, length=70)
    seen = worlds.run(2, partial(fit, longer))[0]
    assert sorted(seen.steps) == [5, 6, 7, 8, 9, 10]


SAVE_LATER = "step 1.2"
"""In the second epoch, which a sampler in a new process takes for its first."""


@pytest.mark.parametrize("kind", ["numpy", "random", "torch"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_samplers_own_generators_continue_their_order(
    kind: str, world: int, worlds: Pools, tmp_path: Path
) -> None:
    run = RunSpec(kind=kind, save=(SAVE_LATER,), root=str(tmp_path))
    whole = worlds.run(2, partial(fit, run))[0]
    assert whole.steps[0] != whole.steps[5]  # epochs differ
    seen = worlds.run(world, partial(fit, run.resumed(SAVE_LATER)))[0]
    assert seen.steps == from_step(whole.steps, 7)


@pytest.mark.long
def test_a_sampler_that_counts_its_epochs_is_refused_or_restarted(
    worlds: Pools, tmp_path: Path
) -> None:
    """A new process counts from zero."""
    run = RunSpec(kind="counts", save=(SAVE, SAVE_LATER), root=str(tmp_path))
    whole = worlds.run(2, partial(fit, run))[0]
    seen = worlds.run(2, partial(fit, run.resumed(SAVE)))[0]
    assert seen.steps == from_step(whole.steps, 3)  # it counts alike until here
    for message in worlds.run(2, partial(error_of, run.resumed(SAVE_LATER))):
        assert message.startswith("CheckpointMismatchError")
        assert "OwnGenerator put epoch 1 in another order than in the saved run" in message
        assert "set_epoch(epoch)" in message
    allowed = run.resumed(SAVE_LATER, strategy={"on_unresumable_data": "restart_epoch"})
    seen = worlds.run(2, partial(fit, allowed))[0]
    assert seen.global_step == 12
    assert any("OwnGenerator put epoch 1 in another order" in text for text in seen.messages)


def test_orders_of_numpy_integers_are_compared(worlds: Pools, tmp_path: Path) -> None:
    workers = {"num_workers": 1}
    run = RunSpec(kind="numpy indices", noise=0.1, loader=workers, epochs=1)
    whole, resumed = saved(run, worlds, tmp_path)
    for seen in worlds.run(2, partial(fit, resumed)):
        assert seen.steps == from_step(whole.steps, 3)
        assert seen.losses == from_step(whole.losses, 3)
    run = RunSpec(kind="numpy indices, unseeded", epochs=1, save=(SAVE,), root=str(tmp_path))
    worlds.run(1, partial(fit, run))
    for world in (1, 2):
        for message in worlds.run(world, partial(error_of, run.resumed(SAVE))):
            assert "NumPyIndices put epoch 0 in another order than in the saved run" in message


def test_an_order_that_cannot_be_compared_is_refused(worlds: Pools, tmp_path: Path) -> None:
    """One device warns about it at the save."""
    run = RunSpec(kind="anonymous", epochs=1, save=(SAVE,), root=str(tmp_path))
    for message in worlds.run(2, partial(error_of, run)):
        assert message.startswith("UnsupportedError: NumPyIndices yields objects that cannot be")
    seen = worlds.run(1, partial(fit, run))[0]
    said = "will be refused on resume: NumPyIndices yields objects that cannot be compared"
    assert sum(said in text for text in seen.messages) == 1
    (message,) = worlds.run(1, partial(error_of, run.resumed(SAVE)))
    assert "3 of its optimizer steps, and NumPyIndices yields objects that cannot be" in message


@pytest.mark.long
def test_a_counting_sampler_at_an_epochs_end_resumes_with_a_warning_if_needed(
    worlds: Pools, tmp_path: Path
) -> None:
    run = RunSpec(kind="counts", save=("epoch 0", "epoch 1"), root=str(tmp_path), epochs=3)
    whole = worlds.run(2, partial(fit, run))[0]
    seen = worlds.run(2, partial(fit, run.resumed("epoch 0")))[0]
    assert seen.steps == from_step(whole.steps, 5)
    assert not any("another order" in text for text in seen.messages)
    seen = worlds.run(2, partial(fit, run.resumed("epoch 1")))[0]
    assert any("OwnGenerator put epoch 1 in another order" in text for text in seen.messages)


@pytest.mark.long
def test_a_sampler_may_change_when_an_epoch_starts(worlds: Pools) -> None:
    """Also in the first epoch: its order is not read before."""
    seen = worlds.run(2, partial(fit, RunSpec(kind="changed")))[0]
    assert sorted(seen.steps[0]) == list(range(7, 19))
    assert sorted(seen.steps[5]) == list(range(14, 26))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ranks", "ranks, later"])
def test_a_sampler_that_differs_between_ranks_is_refused_in_any_epoch(
    kind: str, worlds: Pools
) -> None:
    for message in worlds.run(2, partial(error_of, RunSpec(kind=kind))):
        assert message.startswith("UnsupportedError")
        assert "OwnGenerator gives each rank another order of the samples" in message


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_an_unshuffled_loader_that_lightning_shuffles_is_warned_of(
    world: int, worlds: Pools
) -> None:
    seen = worlds.run(world, partial(fits, [RunSpec(kind="in order"), RunSpec()]))[0]
    said = [[text for text in of.messages if "shuffled" in text] for of in seen]
    assert [len(texts) for texts in said] == [1, 0]
    assert said[0][0].startswith("The training DataLoader of IndexedSamples is shuffled although")
    assert "sampler=range(len(dataset))" in said[0][0]
    assert seen[0].steps == seen[1].steps


@pytest.mark.long
@pytest.mark.parametrize("kind", ["range", "own distributed sampler"])
def test_keep_order_yields_consecutive_samples_on_any_world(
    kind: str, worlds: Pools, tmp_path: Path
) -> None:
    whole, resumed = saved(RunSpec(kind=kind), worlds, tmp_path)
    for of_epoch in (0, 5):
        for step in range(4):
            assert whole.steps[of_epoch + step] == list(range(12 * step, 12 * (step + 1)))
    for world in (1, 2, 3):
        seen = worlds.run(world, partial(fit, resumed))[0]
        assert seen.steps == from_step(whole.steps, 3)
        assert not any("shuffled" in text for text in (*whole.messages, *seen.messages))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("iterable", "will be refused on resume: the DataLoader of Stream cannot start at"),
        ("stateful", "on another number of devices than 2: the StatefulLoader of Stream has one"),
        ("seeks", ""),
        ("plain", ""),
    ],
)
def test_data_that_cannot_resume_are_warned_of_at_the_start(
    kind: str, expected: str, worlds: Pools
) -> None:
    run = RunSpec(kind=kind, length=60, epochs=1)
    allowed = replace(run, strategy={"on_unresumable_data": "restart_epoch"})
    seen = worlds.run(2, partial(fits, [run, allowed]))[0]
    said = [[text for text in of.messages if "A checkpoint inside an epoch" in text] for of in seen]
    assert [len(texts) for texts in said] == [int(bool(expected)), 0]
    for text in said[0]:
        assert expected in text
        assert "resume_at(epoch, samples)" in text


@pytest.mark.parametrize("kind", ["iterable", "stateful"])
def test_a_batch_fetched_before_an_epochs_end_is_not_trained_on(
    kind: str, worlds: Pools, tmp_path: Path
) -> None:
    run = RunSpec(kind=kind, length=60, save=("step 0.5",), root=str(tmp_path))
    whole = worlds.run(2, partial(fit, run))[0]
    seen = worlds.run(2, partial(fit, run.resumed("step 0.5")))[0]
    assert seen.steps == from_step(whole.steps, 5)


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3])
def test_the_order_continues_under_another_seed(world: int, worlds: Pools, tmp_path: Path) -> None:
    whole, resumed = saved(RunSpec(), worlds, tmp_path)
    seen = worlds.run(world, partial(fit, replace(resumed, seed=99)))[0]
    assert seen.steps == from_step(whole.steps, 3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "now", "expected"),
    [
        (
            3,
            {"global_batch": None, "batch_size": 6},
            "from 12 samples (2 devices, accumulation 1) to 18 (3 devices, accumulation 1)",
        ),
        (2, {"global_batch": 18, "batch_size": 9}, "Pass global_batch_size=12 to keep it"),
        (2, {"epochs": 3}, "planned for 10 optimizer steps and is now planned for 15"),
    ],
)
def test_changed_batch_settings_are_reported_with_both_numbers(
    world: int, now: dict[str, Any], expected: str, worlds: Pools, tmp_path: Path
) -> None:
    run = RunSpec(global_batch=None, batch_size=6, length=60, schedule="lambda")
    whole, resumed = saved(run, worlds, tmp_path)
    seen = worlds.run(world, partial(fit, replace(resumed, **now)))[0]
    assert any(expected in text for text in seen.messages), seen.messages
    first = [i for step, ids in seen.steps.items() if step < 5 for i in ids]
    assert set(first) >= {i for step in (3, 4) for i in whole.steps[step]}


@pytest.mark.long
def test_counts_without_a_global_batch_are_warned_of(worlds: Pools, tmp_path: Path) -> None:
    """Lightning's integers then count the batches of one device."""
    run = RunSpec(
        global_batch=None,
        batch_size=6,
        validate=True,
        trainer={"val_check_interval": 2},
    )
    _, resumed = saved(run, worlds, tmp_path)
    trainer = {"val_check_interval": 2, "accumulate_grad_batches": 2}
    seen = worlds.run(1, partial(fit, replace(resumed, trainer=trainer)))[0]
    said = "Trainer(val_check_interval=2) counts batches of one device: 2 optimizer steps in"
    assert any(said in text for text in seen.messages), seen.messages
    assert not any("global batch changes" in text for text in seen.messages)


@pytest.mark.long
def test_random_states_of_another_world_are_warned_of_once(worlds: Pools, tmp_path: Path) -> None:
    _, resumed = saved(RunSpec(dropout=0.1), worlds, tmp_path)
    counts = []
    for world in (2, 3):
        messages = worlds.run(world, partial(fit, resumed))[0].messages
        counts.append(sum("starts a new stream" in text for text in messages))
    assert counts == [0, 1]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (RunSpec(global_batch=10), "global_batch_size=10 cannot be shared by 3 devices"),
        (
            RunSpec(trainer={"accumulate_grad_batches": 4}),
            "accumulate_grad_batches=4) and global_batch_size=12 contradict each other",
        ),
        (
            RunSpec(kind="seeks", batch_size=3, global_batch=6),
            "needs micro-batches of 2 samples, and the DataLoader with its own order yields 3",
        ),
        (
            RunSpec(kind="two, one uncut"),
            "needs micro-batches of 2 samples, and the DataLoader with its own order yields 3",
        ),
        (
            RunSpec(kind="no length"),
            "global_batch_size=12 needs a training loader with a batch_size",
        ),
        (
            RunSpec(length=7, loader={"drop_last": True}),
            "7 samples do not fill one global batch of 12",
        ),
    ],
)
def test_impossible_batch_sizes_are_refused_before_training(
    run: RunSpec, expected: str, worlds: Pools
) -> None:
    for message in worlds.run(3, partial(error_of, run)):
        assert message.startswith("UnsupportedError")
        assert expected in message
