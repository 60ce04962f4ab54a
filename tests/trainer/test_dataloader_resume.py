"""Data that cannot resume inside an epoch are refused, or restart the epoch if allowed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.support.fits import FitCase, error_of, fit
from tests.support.outcome import error_text
from tests.support.ranks import Pools
from tests.trainer._recorded_data import Shard
from tests.trainer._recorded_runs import (
    RunRecord,
    assert_continued,
    assert_refused,
    fit_stock,
    from_step,
    record,
    recorded,
    records,
)

pytestmark = pytest.mark.engine

SAVE = "step 0.3"
AT = {SAVE: 3}
OWN = recorded(
    kind="own batches", length=60, batch_size=6, trainer={"use_distributed_sampler": False}
)
"""Batches in the user's own order, which Lightning does not change."""


def saved(
    run: FitCase, worlds: Pools, root: Path, *points: str, world: int = 2
) -> tuple[FitCase, RunRecord]:
    """Fit, saving inside an epoch or at other moments; return the run and its record."""
    saving = replace(run, save=points or (SAVE,), root=str(root))
    return saving, record(worlds, world, saving)


@pytest.mark.parametrize(
    "run",
    [recorded(kind="iterable", length=60), replace(OWN, kind="user's loader")],
    ids=lambda run: run.kind,
)
@pytest.mark.parametrize("world", [2, 3])
def test_data_that_cannot_be_positioned_are_refused_with_a_remedy(
    run: FitCase, world: int, worlds: Pools, tmp_path: Path
) -> None:
    """Also on the same number of ranks."""
    saving, _ = saved(run, worlds, tmp_path)
    resumed = saving.resumed(SAVE, batch_size=2 if run.kind == "iterable" else 12 // world)
    assert_refused(
        *(worlds, world, resumed, "CheckpointMismatchError"),
        "saved in epoch 0 after 3 of its optimizer steps",
        "cannot start at a given sample",
        "resume_at(epoch, samples)",
        'on_unresumable_data="restart_epoch"',
    )


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_epoch_restarts_with_a_warning_if_allowed(
    world: int, worlds: Pools, tmp_path: Path
) -> None:
    run = recorded(kind="iterable", length=60, strategy={"on_unresumable_data": "restart_epoch"})
    saving, reference = saved(run, worlds, tmp_path)
    seen = record(worlds, world, saving.resumed(SAVE))
    again = [reference.steps[step] for step in range(5)]
    assert [seen.steps[step] for step in range(3, 13)] == [*again, *again]
    assert seen.global_step == 13
    assert any("Epoch 0 starts over" in text for text in seen.messages)


class SelectsShard(Callback):
    """Selects the data of each epoch at its start, as users do with ``set_epoch`` of a data set."""

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        loader.dataset.number = trainer.current_epoch


def shards_of(run: FitCase) -> dict[str, Any]:
    return {"train_dataloaders": DataLoader(Shard(0, run.length), run.batch_size)}


def test_hooks_at_the_start_of_an_epoch_that_restarts_are_called(
    worlds: Pools, tmp_path: Path
) -> None:
    """A save that the resume makes up for is at the start of the epoch, too."""
    policy = {"on_unresumable_data": "restart_epoch"}
    run = recorded(length=60, strategy=policy, data=shards_of, callbacks=(SelectsShard,))
    run = replace(run, checkpoint={"every_n_train_steps": 7, "filename": "kept"})
    saving, reference = saved(run, worlds, tmp_path, "step 1.2", world=1)
    shutil.rmtree(kept := tmp_path / "kept.ckpt")  # as if killed before this save
    seen = record(worlds, 1, saving.resumed("step 1.2"))
    assert seen.events[0] == "epoch 1 starts at 7"
    assert [seen.steps[7 + step] for step in range(5)] == [
        reference.steps[5 + step] for step in range(5)
    ]
    assert not any("is not called" in text for text in seen.messages)
    position = json.loads((kept / "manifest.json").read_text())["progress"]["sampler"]
    assert (position["epoch"], position["epoch_steps"]) == (1, 0)


@pytest.mark.parametrize("kind", ["seeks", "own batches"])
@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_resume_at_is_enough_to_position_data(
    kind: str, world: int, worlds: Pools, tmp_path: Path
) -> None:
    run = recorded(kind="seeks", length=60) if kind == "seeks" else OWN
    saving, reference = saved(run, worlds, tmp_path)
    micro = 12 // world if kind == "own batches" else {4: 3}.get(world, 2)
    (seen,) = assert_continued(worlds, world, saving, reference, AT, batch_size=micro)
    assert world != 2 or seen.losses == from_step(reference.losses, 3)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_workers_begin_at_the_resumed_position(
    world: int, persistent: bool, worlds: Pools, tmp_path: Path
) -> None:
    """Lightning starts the workers before `resume_at`; later epochs start at their first sample."""
    options = {"num_workers": 2, "persistent_workers": persistent}
    run = recorded(kind="seeks", length=48, batch_size=6, loader=options)
    saving, reference = saved(run, worlds, tmp_path)
    assert_continued(worlds, world, saving, reference, AT, batch_size=12 // world)


@pytest.mark.parametrize(("source", "point", "done"), [(1, "step 0.4", 4), (2, "step 0.3", 6)])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_items_that_are_batches_are_consumed_once(
    source: int, point: str, done: int, world: int, worlds: Pools, tmp_path: Path
) -> None:
    """With batch_size=None, positions are counted in items."""
    run = recorded(kind="items", length=48, global_batch=None, epochs=1)
    saving, reference = saved(run, worlds, tmp_path, point, world=source)
    before = [i for step in range(done // source) for i in reference.steps[step]]
    seen = record(worlds, world, saving.resumed(point))
    after = [i for ids in seen.steps.values() for i in ids]
    repeated = done % world  # The position is rounded down to a step.
    assert len(before) + len(after) == 4 * (12 + repeated)
    assert set(before) | set(after) == set(range(48))


@pytest.mark.long
def test_items_in_a_global_batch_need_their_size(worlds: Pools, tmp_path: Path) -> None:
    run = recorded(kind="items", length=48, global_batch=16, epochs=1)
    assert_refused(worlds, 2, run, "UnsupportedError", "logging_batch_size_per_gpu")
    sized = replace(run, strategy={"logging_batch_size_per_gpu": 4})
    assert_eight_a_step(sized, worlds, tmp_path)
    texts = ("global_batch_size=6", "the DataLoader makes batches of 4 itself")
    assert_refused(worlds, 3, replace(sized, global_batch=6), "UnsupportedError", *texts)


@pytest.mark.long
def test_batches_of_a_batch_sampler_as_sampler_are_not_split(worlds: Pools, tmp_path: Path) -> None:
    run = recorded(kind="batch sampler as sampler", length=48, global_batch=12, epochs=1)
    error = "UnsupportedError: global_batch_size=12 on 2 devices"
    assert_refused(worlds, 2, run, error, "the DataLoader makes batches of 4 itself")
    assert_eight_a_step(run, worlds, tmp_path)


def assert_eight_a_step(run: FitCase, worlds: Pools, root: Path) -> None:
    saving, reference = saved(replace(run, global_batch=8), worlds, root)
    for world in (1, 2):
        (seen,) = assert_continued(worlds, world, saving, reference, AT)
        assert {len(ids) for ids in seen.steps.values()} == {8}


@pytest.mark.parametrize("point", [3, 5, 7])
@pytest.mark.parametrize("kind", ["a stream first", "a stream and a shorter one"])
def test_each_of_several_loaders_resumes_at_its_position(
    kind: str, point: int, worlds: Pools, tmp_path: Path
) -> None:
    """Also with other batch sizes, after a shorter loader has restarted, and after two resumes."""
    run = recorded(kind=kind, length=64, global_batch=None, batch_size=4, epochs=2)
    at = {f"step 0.{point}": point}
    saving, reference = saved(run, worlds, tmp_path / "first", *at)
    assert reference.global_step == 16
    save_again = {"save": ("step 0.7",), "root": str(tmp_path)}
    assert_continued(worlds, 2, saving, reference, at, **save_again)
    if point < 7:
        assert_continued(worlds, 2, replace(saving, root=str(tmp_path)), reference, {"step 0.7": 7})
    assert_continued(worlds, 1, saving, reference, at, batch_size=8)


@pytest.mark.parametrize("suffix", ["", ", once"])
@pytest.mark.parametrize("global_batch", [None, 8])
@pytest.mark.parametrize("points", [(4,), pytest.param((1, 2, 4, 5), marks=pytest.mark.long)])
def test_a_loader_that_ends_within_a_step_resumes_there(
    points: tuple[int, ...],
    global_batch: int | None,
    suffix: str,
    worlds: Pools,
    tmp_path: Path,
) -> None:
    trainer = {"use_distributed_sampler": False}
    kind = f"a shorter batch sampler{suffix}"
    run = recorded(kind=kind, length=48, global_batch=global_batch, epochs=2)
    run = replace(run, trainer=trainer | ({} if global_batch else {"accumulate_grad_batches": 2}))
    at = {f"step 0.{steps}": steps for steps in points}
    saving, reference = saved(run, worlds, tmp_path, *at)
    assert reference.global_step == 12
    first, last = (dict(each) for each in (list(at.items())[::2], list(at.items())[1::2]))
    for world, size, some in ((2, 2, at), (1, 4, first), (1, 2, last)):
        if size * world == 4 or global_batch is not None:
            assert_continued(worlds, world, saving, reference, some, batch_size=size)


def test_a_stream_that_has_restarted_is_refused(worlds: Pools, tmp_path: Path) -> None:
    run = recorded(kind="a shorter stream", length=64, global_batch=None, batch_size=4, epochs=1)
    saving, reference = saved(run, worlds, tmp_path, "step 0.2", "step 0.6")
    assert_continued(worlds, 2, saving, reference, {"step 0.2": 2})
    text = "samples that the DataLoader of SeekableStream had yielded"
    assert_refused(worlds, 2, saving.resumed("step 0.6"), "CheckpointMismatchError", text)


@pytest.mark.long
def test_a_stateful_loader_that_has_restarted_ends_no_epoch(worlds: Pools, tmp_path: Path) -> None:
    """Its state has its place in the pass, but not that the pass is not its first."""
    run = recorded(kind="a shorter stateful one", length=64, global_batch=None, batch_size=4)
    run = replace(run, epochs=1)
    saving, reference = saved(run, worlds, tmp_path, "step 0.2", "step 0.6")
    assert reference.global_step == 8
    assert_continued(worlds, 2, saving, reference, {"step 0.2": 2, "step 0.6": 6})


IN_FOURS = recorded(length=96, batch_size=3, global_batch=None, epochs=1)
"""Three steps are 12 micro-batches, and 36 samples."""


def micro_batches(size: int, accumulate: int) -> dict[str, Any]:
    return {"batch_size": size, "trainer": {"accumulate_grad_batches": accumulate}}


@pytest.mark.parametrize("kind", ["stateful", "stateful, sized"])
@pytest.mark.parametrize(
    ("point", "size", "accumulate", "texts"),
    [
        ("step 0.3", 6, 2, ("12 micro-batches of each rank", "continues after 6")),
        ("step 0.3", 6, 4, ("12 micro-batches of each rank", "continues after 4")),
        ("step 0.3", 3, 5, ("12 micro-batches of each rank", "continues after 10")),
        ("step 0.3", 3, 13, ("12 micro-batches of each rank", "continues after 0")),
        ("step 0.1", 2, 4, ("12 samples in 4 micro-batches", "has 8")),
    ],
)
def test_a_state_at_another_place_than_the_position_is_refused(
    point: str,
    size: int,
    accumulate: int,
    texts: tuple[str, ...],
    kind: str,
    worlds: Pools,
    tmp_path: Path,
) -> None:
    """A loader's own state counts the micro-batches of the saved run."""
    run = replace(IN_FOURS, kind=kind, **micro_batches(3, 4))
    saving, _ = saved(run, worlds, tmp_path, point, world=1)
    resumed = saving.resumed(point, **micro_batches(size, accumulate))
    texts += ("own state", "keep batch_size and accumulation", "restart_epoch")
    assert_refused(worlds, 1, resumed, "CheckpointMismatchError", *texts)


@pytest.mark.parametrize("kind", ["stateful", "stateful, sized"])
@pytest.mark.parametrize(
    ("size", "accumulate", "begin"), [(3, 2, 36), (3, 6, 36), (6, 2, 0), (3, 5, 0), (3, 13, 0)]
)
def test_a_state_is_restored_at_the_position_only(
    size: int, accumulate: int, begin: int, kind: str, worlds: Pools, tmp_path: Path
) -> None:
    """If allowed, the epoch starts over with another micro-batch, or inside a new global batch."""
    policy = {} if begin else {"on_unresumable_data": "restart_epoch"}
    run = replace(IN_FOURS, kind=kind, strategy=policy, **micro_batches(3, 4))
    saving, _ = saved(run, worlds, tmp_path, world=1)
    seen = record(worlds, 1, saving.resumed(SAVE, **micro_batches(size, accumulate)))
    assert [i for ids in seen.steps.values() for i in ids] == [*range(begin, 96)]
    starts_over = [text for text in seen.messages if "Epoch 0 starts over after 3" in text]
    assert len(starts_over) == (begin == 0)


@pytest.mark.long
def test_states_of_other_loaders_are_refused(worlds: Pools, tmp_path: Path) -> None:
    run = replace(IN_FOURS, kind="stateful", **micro_batches(3, 4))
    saving, _ = saved(run, worlds, tmp_path, world=1)
    resumed = saving.resumed(SAVE, kind="a shorter stateful one")
    text = "loaders with a state were 1 in the saved run, are 2"
    assert_refused(worlds, 1, resumed, "CheckpointMismatchError", text)


@pytest.mark.long
def test_a_stock_runs_state_at_another_place_is_not_restored(worlds: Pools, tmp_path: Path) -> None:
    run = replace(IN_FOURS, kind="stateful, sized", root=str(tmp_path), **micro_batches(3, 4))
    worlds.run(1, partial(fit_stock, replace(run, save=(SAVE,))))
    for size, accumulate, begin in ((3, 2, 36), (6, 2, 0)):
        seen = record(worlds, 1, run.resumed(SAVE, **micro_batches(size, accumulate)))
        assert min(min(ids) for ids in seen.steps.values()) == begin
        assert any("Data starts at its first" in text for text in seen.messages) == (begin == 0)


def fit_then_save(run: FitCase, path: str) -> None:
    """Save after a fit that has ended inside an epoch, when Lightning has reset the loaders."""
    trainer, net, data, _ = run.make()
    trainer.fit(net, **data, ckpt_path=run.ckpt_path)
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("kind", ["stateful", pytest.param("seeks", marks=pytest.mark.long)])
def test_a_save_after_a_fit_continues_at_its_end(kind: str, worlds: Pools, tmp_path: Path) -> None:
    """Without a length, a batch was fetched ahead and not trained on."""
    run = recorded(kind=kind, length=60, global_batch=None, batch_size=6, epochs=1, noise=0.1)
    whole = record(worlds, 2, run)
    path = str(tmp_path / "after.ckpt")
    worlds.run(2, partial(fit_then_save, replace(run, max_steps=3), path))
    resumed = record(worlds, 2, replace(run, ckpt_path=path, seed=5))
    assert resumed.steps == from_step(whole.steps, 3)
    assert resumed.losses == {at: loss for at, loss in whole.losses.items() if at >= 3}


@pytest.mark.long
def test_a_finished_run_that_is_started_again_saves_nothing(worlds: Pools, tmp_path: Path) -> None:
    """Its data and random states are restored in on_train_start only."""
    run, path = recorded(epochs=1), str(tmp_path / "after.ckpt")
    worlds.run(2, partial(fit_then_save, run, path))
    again = replace(run, ckpt_path=path)
    for error in worlds.run(2, partial(error_of_save, again, str(tmp_path / "again.ckpt"))):
        assert "this run has loaded a checkpoint, and not begun to train" in error
    assert not (tmp_path / "again.ckpt").exists()


def error_of_save(run: FitCase, path: str) -> str:
    return error_text(lambda: fit_then_save(run, path))


@pytest.mark.parametrize("last", [True, "link"])
def test_a_refused_resume_replaces_no_checkpoint(last: Any, worlds: Pools, tmp_path: Path) -> None:
    """A save during the exception would contain the loaded step and unrestored data."""
    run = recorded(kind="stateful", length=60, epochs=1)
    saving, whole = saved(run, worlds, tmp_path)
    saving_in_exceptions = (
        partial(
            ModelCheckpoint,
            dirpath=str(tmp_path),
            save_on_exception=True,
            save_last=last,
            every_n_train_steps=99,
        ),
        partial(OnExceptionCheckpoint, str(tmp_path)),
    )
    resumed = saving.resumed(SAVE, callbacks=saving_in_exceptions)
    before = sorted(tmp_path.glob("*.ckpt"))
    assert_refused(worlds, 3, resumed, "CheckpointMismatchError", "one state per rank")
    missing = replace(resumed, ckpt_path=str(tmp_path / "none.ckpt"))
    assert_refused(worlds, 2, missing, "CheckpointNotFoundError")
    assert sorted(tmp_path.glob("*.ckpt")) == before
    assert record(worlds, 2, resumed).steps == from_step(whole.steps, 3)


class SavesAtStart(Callback):
    """Saves at the start of training, before data and random states are restored."""

    def __init__(self, path: str) -> None:
        self.path = path

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def test_a_save_before_a_run_has_resumed_is_refused(worlds: Pools, tmp_path: Path) -> None:
    saves = partial(SavesAtStart, str(tmp_path / "start.ckpt"))
    run = recorded(epochs=1, dropout=0.2, callbacks=(saves,))
    saving, whole = saved(run, worlds, tmp_path)
    resumed = saving.resumed(SAVE)
    assert_refused(worlds, 2, resumed, "UnsupportedError", "not begun to train")
    first = replace(resumed, ckpt_path=str(tmp_path / "start.ckpt"), callbacks=())
    assert record(worlds, 2, first).losses == whole.losses


@pytest.mark.parametrize(
    ("kind", "point", "begin"),
    [
        *(("stateful", point, begin) for point, begin in (("step 0.1", 1), ("inside 0.2", 2))),
        *(("stateful", point, begin) for point, begin in (("step 0.4", 4), ("inside 1.1", 6))),
        *((kind, "step 0.5", 5) for kind in ("iterable", "stateful")),
    ],
)
def test_a_batch_that_lightning_has_prefetched_is_trained_on_once(
    kind: str, point: str, begin: int, worlds: Pools, tmp_path: Path
) -> None:
    """A loader's own state is that of the last step; at the end of an epoch, the epoch is done."""
    run = recorded(kind=kind, length=60, batch_size=3)
    saving, reference = saved(run, worlds, tmp_path, point)
    assert len(reference.steps) == 10
    for seen in worlds.run(2, partial(fit, saving.resumed(point))):
        assert seen.steps == from_step(reference.steps, begin)


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 3])
def test_torchdatas_loader_resumes_on_any_world(world: int, worlds: Pools, tmp_path: Path) -> None:
    """For data with a length, this library determines the order without the loader's state."""
    pytest.importorskip("torchdata")
    saving, reference = saved(recorded(kind="torchdata"), worlds, tmp_path)
    assert_continued(worlds, world, saving, reference, AT)


@pytest.mark.long
def test_other_data_are_refused_only_inside_an_epoch(worlds: Pools, tmp_path: Path) -> None:
    saving, _ = saved(recorded(), worlds, tmp_path)
    text = "that of the saved run (dataset_length was 53, is 70)"
    other = saving.resumed(SAVE, length=70)
    assert_refused(worlds, 2, other, "CheckpointMismatchError", text)
    ended, _ = saved(recorded(epochs=1), worlds, tmp_path, "epoch 0")
    seen = record(worlds, 2, ended.resumed("epoch 0", epochs=2, length=70))
    assert sorted(seen.steps) == [5, 6, 7, 8, 9, 10]


SAVE_LATER = "step 1.2"
"""Inside the second epoch, which a sampler that counts epochs would take for its first."""


@pytest.mark.parametrize("kind", ["numpy", "random", "torch"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_samplers_own_generators_continue_their_order(
    kind: str, world: int, worlds: Pools, tmp_path: Path
) -> None:
    run = recorded(kind=kind, batch_size=3)
    saving, reference = saved(run, worlds, tmp_path, SAVE_LATER)
    assert reference.steps[0] != reference.steps[5]  # The epochs have different orders.
    assert_continued(worlds, world, saving, reference, {SAVE_LATER: 7})


@pytest.mark.long
def test_a_sampler_that_counts_its_epochs_is_refused_or_restarted(
    worlds: Pools, tmp_path: Path
) -> None:
    """A new process counts from zero, which is right only in the first epoch and at its end."""
    points = (SAVE, "epoch 0", SAVE_LATER, "epoch 1")
    saving, reference = saved(recorded(kind="counts", epochs=3), worlds, tmp_path, *points)
    reason = "OwnGenerator put epoch 1 in another order"
    for seen in assert_continued(worlds, 2, saving, reference, AT | {"epoch 0": 5}):
        assert not any("another order" in text for text in seen.messages)
    texts = (f"{reason} than in the saved run", "set_epoch(epoch)")
    assert_refused(worlds, 2, saving.resumed(SAVE_LATER), "CheckpointMismatchError", *texts)
    restart = {"on_unresumable_data": "restart_epoch"}
    allowed = saving.resumed(SAVE_LATER, strategy=restart, epochs=2)
    seen, ended = records(worlds, 2, [allowed, saving.resumed("epoch 1")])
    assert seen.global_step == 12
    assert all(any(reason in text for text in each.messages) for each in (seen, ended))


@pytest.mark.long
def test_a_schedule_that_ends_before_a_repeated_epoch_is_named(
    worlds: Pools, tmp_path: Path
) -> None:
    """With ``max_steps``, the run ends with its schedule; without, OneCycleLR raises an error."""
    policy = {"on_unresumable_data": "restart_epoch"}
    run = replace(OWN, kind="user's loader", schedule="onecycle", strategy=policy)
    run = replace(run, length=36, batch_size=12, epochs=1)
    saving, reference = saved(run, worlds, tmp_path, "step 0.2", world=1)
    assert reference.global_step == 3
    (seen,) = records(worlds, 1, [saving.resumed("step 0.2", epochs=2, max_steps=3)])
    assert seen.rates == from_step(reference.rates, 2)
    assert not any("OneCycleLR raises" in text for text in seen.messages)
    (message,) = worlds.run(1, partial(error_of, saving.resumed("step 0.2")))
    assert "Tried to step 4 times" in message
    strategy = {**policy, "load_hyperparameters": False}
    other = saving.resumed("step 0.2", schedule="step", strategy=strategy)
    (seen,) = records(worlds, 1, [other])
    (warning,) = [text for text in seen.messages if "OneCycleLR raises" in text]
    assert "Pass Trainer(max_steps=3)" in warning
    assert "for 2 more steps and pass load_hyperparameters=False" in warning


@pytest.mark.long
def test_orders_of_numpy_integers_are_compared(worlds: Pools, tmp_path: Path) -> None:
    workers = {"num_workers": 1}
    run = recorded(kind="numpy indices", noise=0.1, loader=workers, epochs=1)
    saving, reference = saved(run, worlds, tmp_path)
    for seen in worlds.run(2, partial(fit, saving.resumed(SAVE))):
        assert seen.steps == from_step(reference.steps, 3)
        assert seen.losses == from_step(reference.losses, 3)
    unseeded = recorded(kind="numpy indices, unseeded", epochs=1)
    saving, _ = saved(unseeded, worlds, tmp_path, world=1)
    text = "NumPyIndices put epoch 0 in another order than in the saved run"
    for world in (1, 2):
        assert_refused(worlds, world, saving.resumed(SAVE), "CheckpointMismatchError", text)


def test_an_order_that_cannot_be_compared_is_refused(worlds: Pools, tmp_path: Path) -> None:
    """On one device, the save warns."""
    saving, seen = saved(recorded(kind="anonymous", epochs=1), worlds, tmp_path, world=1)
    reason = "NumPyIndices yields objects that cannot be"
    assert_refused(worlds, 2, saving, f"UnsupportedError: {reason}")
    warning = f"will be refused on resume: {reason} compared"
    assert sum(warning in text for text in seen.messages) == 1
    error = f"3 of its optimizer steps, and {reason}"
    assert_refused(worlds, 1, saving.resumed(SAVE), "CheckpointMismatchError", error)


@pytest.mark.long
def test_a_sampler_may_change_when_an_epoch_starts(worlds: Pools) -> None:
    """Also in the first epoch, because its order is not read before."""
    seen = record(worlds, 2, recorded(kind="changed"))
    assert sorted(seen.steps[0]) == list(range(7, 19))
    assert sorted(seen.steps[5]) == list(range(14, 26))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ranks", "ranks, later"])
def test_a_sampler_that_differs_between_ranks_is_refused_in_any_epoch(
    kind: str, worlds: Pools
) -> None:
    text = "OwnGenerator gives each rank another order of the samples"
    assert_refused(worlds, 2, recorded(kind=kind), "UnsupportedError", text)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["range", "own distributed sampler"])
def test_ordered_samplers_yield_consecutive_samples_on_any_world(
    kind: str, worlds: Pools, tmp_path: Path
) -> None:
    saving, reference = saved(recorded(kind=kind), worlds, tmp_path)
    for first in (0, 5):
        for step in range(4):
            assert reference.steps[first + step] == list(range(12 * step, 12 * (step + 1)))
    for world in (1, 2, 3):
        (seen,) = assert_continued(worlds, world, saving, reference, AT)
        assert not any("shuffled" in text for text in (*reference.messages, *seen.messages))


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
def test_data_that_cannot_resume_cause_a_warning_at_the_start(
    kind: str, expected: str, worlds: Pools
) -> None:
    run = recorded(kind=kind, length=60, epochs=1)
    allowed = replace(run, strategy={"on_unresumable_data": "restart_epoch"})
    seen = records(worlds, 2, [run, allowed])
    warned = [
        [text for text in each.messages if "A checkpoint inside an epoch" in text] for each in seen
    ]
    assert [len(texts) for texts in warned] == [int(bool(expected)), 0]
    for text in warned[0]:
        assert expected in text
        assert "resume_at(epoch, samples)" in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "changes", "expected"),
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
    world: int, changes: dict[str, Any], expected: str, worlds: Pools, tmp_path: Path
) -> None:
    run = recorded(global_batch=None, batch_size=6, length=60, schedule="lambda")
    saving, reference = saved(run, worlds, tmp_path)
    seen = record(worlds, world, saving.resumed(SAVE, **changes))
    assert any(expected in text for text in seen.messages), seen.messages
    first = [i for step, ids in seen.steps.items() if step < 5 for i in ids]
    assert set(first) >= {i for step in (3, 4) for i in reference.steps[step]}


@pytest.mark.long
@pytest.mark.parametrize(("stage", "logged"), [(2, None), (3, 5)])
def test_a_changed_global_batch_of_a_stock_checkpoint_is_reported(
    stage: int, logged: int | None, worlds: Pools, tmp_path: Path
) -> None:
    """Also if its ``logging_batch_size_per_gpu``, which affects DeepSpeed's log only, is wrong."""
    size = {} if logged is None else {"logging_batch_size_per_gpu": logged}
    accumulation = {"accumulate_grad_batches": 2}
    run = recorded(global_batch=None, batch_size=6, length=96, epochs=1, stage=stage, strategy=size)
    saving = replace(run, trainer=accumulation, root=str(tmp_path), save=(SAVE,))
    reference: RunRecord = worlds.run(2, partial(fit_stock, saving))[0]
    resumed = replace(run, root=str(tmp_path)).resumed(SAVE)
    seen = record(worlds, 1, resumed)
    texts = [text for text in seen.messages if "The global batch changes" in text]
    assert len(texts) == 1
    assert "from 24 samples (2 devices, accumulation 2) to 6 (1 device, accum" in texts[0]
    rest = sorted(i for ids in from_step(reference.steps, 3).values() for i in ids)
    assert sorted(i for ids in seen.steps.values() for i in ids) == rest
    same = record(worlds, 2, replace(resumed, trainer=accumulation))
    assert not any("global batch changes" in text for text in same.messages)
    assert same.steps == from_step(reference.steps, 3)


def test_a_stock_checkpoint_with_batches_of_one_sample_keeps_its_position(
    worlds: Pools, tmp_path: Path
) -> None:
    """Lightning's strategy also uses 1 if it does not find the loader's batch size."""
    run = recorded(global_batch=None, batch_size=1, length=16, epochs=1, root=str(tmp_path))
    reference: RunRecord = worlds.run(2, partial(fit_stock, replace(run, save=(SAVE,))))[0]
    seen = record(worlds, 1, replace(run.resumed(SAVE), batch_size=2))
    assert not any("global batch changes" in text for text in seen.messages)
    assert seen.steps == from_step(reference.steps, 3)


@pytest.mark.long
def test_the_global_batch_of_a_single_file_is_unknown(worlds: Pools, tmp_path: Path) -> None:
    """The file does not contain the number of ranks, so the position counts optimizer steps."""
    run = recorded(global_batch=None, batch_size=6, length=96, epochs=1, root=str(tmp_path))
    saving = replace(run, save=(SAVE,))
    reference: RunRecord = worlds.run(2, partial(fit_stock, saving, ddp=True))[0]
    seen = record(worlds, 2, run.resumed(SAVE))
    assert not any("global batch changes" in text for text in seen.messages)
    assert seen.steps == from_step(reference.steps, 3)


@pytest.mark.long
def test_intervals_without_a_global_batch_cause_a_warning(worlds: Pools, tmp_path: Path) -> None:
    """Lightning's integers then count batches of one device."""
    trainer = {"val_check_interval": 2}
    run = recorded(global_batch=None, batch_size=6, validate=True, trainer=trainer)
    saving, _ = saved(run, worlds, tmp_path)
    trainer = {**trainer, "accumulate_grad_batches": 2}
    seen = record(worlds, 1, saving.resumed(SAVE, trainer=trainer))
    warning = "Trainer(val_check_interval=2) counts batches of one device: 2 optimizer steps in"
    assert any(warning in text for text in seen.messages), seen.messages
    assert not any("global batch changes" in text for text in seen.messages)


@pytest.mark.long
def test_random_states_of_another_world_cause_one_warning(worlds: Pools, tmp_path: Path) -> None:
    saving, _ = saved(recorded(dropout=0.1), worlds, tmp_path)
    messages = [record(worlds, world, saving.resumed(SAVE)).messages for world in (2, 3)]
    counts = [sum("starts a new stream" in text for text in texts) for texts in messages]
    assert counts == [0, 1]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (recorded(global_batch=10), "global_batch_size=10 cannot be shared by 3 devices"),
        (
            recorded(trainer={"accumulate_grad_batches": 4}),
            "accumulate_grad_batches=4) and global_batch_size=12 contradict each other",
        ),
        (
            recorded(kind="seeks", batch_size=3, global_batch=6),
            "needs micro-batches of 2 samples, and the DataLoader makes batches of 3 itself",
        ),
        (
            recorded(kind="two, one uncut"),
            "needs micro-batches of 2 samples, and the DataLoader makes batches of 3 itself",
        ),
        (
            recorded(kind="no length"),
            "global_batch_size=12 needs a training loader with a batch_size",
        ),
        (
            recorded(length=7, loader={"drop_last": True}),
            "7 samples do not fill one global batch of 12",
        ),
    ],
)
def test_impossible_batch_sizes_are_refused_before_training(
    run: FitCase, expected: str, worlds: Pools
) -> None:
    assert_refused(worlds, 3, run, "UnsupportedError", expected)
