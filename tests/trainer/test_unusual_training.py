"""Unusual training configurations, each of which once took wrong steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.support.fits import Watch, elastic, fit, quiet_trainer
from tests.support.ranks import Pools
from tests.trainer._recorded_data import IndexedSamples, StatefulLoader, Stream
from tests.trainer._recorded_runs import (
    RecordingNet,
    RunRecord,
    assert_continued,
    assert_refused,
    from_step,
    record,
    recorded,
    records,
)

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("world", [1, 2])
def test_deepspeeds_logging_batch_size_is_ignored(world: int, worlds: Pools) -> None:
    run = recorded(global_batch=16, batch_size=2, strategy={"logging_batch_size_per_gpu": 4})
    assert {len(ids) for ids in record(worlds, world, run).steps.values()} == {16}


def fitted_with(batch_sizes: list[int], length: int) -> list[tuple[int, int]]:
    """Fit one Trainer repeatedly; return the steps and batches of each fit's epoch."""
    strategy = elastic(global_batch_size=12)
    trainer = quiet_trainer(strategy, max_epochs=1, limit_train_batches=3)
    net, found, before = RecordingNet(recorded()), [], 0
    for epoch, size in enumerate(batch_sizes):
        trainer.fit_loop.max_epochs = epoch + 1
        trainer.fit(net, DataLoader(IndexedSamples(length, 0.0), batch_size=size, shuffle=True))
        found.append((trainer.global_step - before, int(trainer.num_training_batches)))
        before = trainer.global_step
    return found


@pytest.mark.long
def test_every_fit_computes_its_own_micro_batches(worlds: Pools) -> None:
    found = worlds.run(2, partial(fitted_with, [2, 6, 3, 1], 60))[0]
    assert found == [(3, 9), (3, 3), (3, 6), (3, 18)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_fraction_of_several_loaders_refers_to_the_longest(world: int, worlds: Pools) -> None:
    run = recorded(kind="two", trainer={"limit_train_batches": 0.7})
    assert len(record(worlds, world, run).steps) == 2 * 3


@pytest.mark.long
@pytest.mark.parametrize("batch_size", [12, 6])
def test_a_batch_that_is_none_is_counted_and_resumed(
    batch_size: int, worlds: Pools, tmp_path: Path
) -> None:
    """As the only batch of a step, or as the first of two."""
    run = recorded(
        kind="None instead of a batch",
        batch_size=batch_size,
        schedule="step",
        validate=True,
        trainer={"val_check_interval": 0.5},
    )
    moments = ("step 0.1", "inside 0.1", "step 0.2", "inside 0.2", "step 0.4", "step 1.2")
    reference = record(worlds, 1, replace(run, save=moments, root=str(tmp_path)))
    trained = [sample for ids in reference.steps.values() for sample in ids]
    assert not {*range(12, 12 + batch_size)} & {*trained}
    assert len(trained) == 2 * (60 - batch_size)
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert len(paths) == (4 if batch_size == 12 else 6)
    runs = [replace(run, ckpt_path=str(path)) for path in paths]
    for path, seen in zip(paths, records(worlds, 1, runs), strict=True):
        assert seen.steps == from_step(reference.steps, min(seen.steps)), path.name
        for found, expected in ((seen.losses, reference.losses), (seen.rates, reference.rates)):
            assert found == {step: expected[step] for step in seen.steps}, path.name
        assert seen.events == reference.events[len(reference.events) - len(seen.events) :], (
            path.name
        )
        is_exact = not path.name.startswith("inside")
        for name in ("global_step", *(("buffer", "drawn") if is_exact else ())):
            assert getattr(seen, name) == getattr(reference, name), path.name
        assert _compared_counters(seen) == _compared_counters(reference), path.name


def _compared_counters(seen: RunRecord) -> dict[str, object]:
    """Return the loops' counters without those that a batch without samples does not increment.

    Also without the loggers' axis, which a resume sets to the number of optimizer steps, while
    Lightning also counts such a batch.
    """
    excluded = ("total.started", "current.started", "zero_grad.", "_batches_that_stepped")
    return {k: v for k, v in seen.loops["end"].items() if not any(map(k.count, excluded))}


@pytest.mark.long
def test_manual_optimization_with_accumulation_is_refused(worlds: Pools) -> None:
    error = "UnsupportedError: global_batch_size=12 with manual"
    assert_refused(worlds, 2, recorded(manual=True), error, "batch_size=6")


class BackwardTwice(RecordingNet):
    """A net with manual optimization and two backward passes per step."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override] # no loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for half in batch[0].chunk(2):
            self.manual_backward(self.loss(half).mean())
        optimizer.step()


@pytest.mark.long
@pytest.mark.parametrize(("stage", "count"), [(0, 0), (2, 1)])
def test_several_backward_passes_per_step_cause_a_warning_in_zero(
    stage: int, count: int, worlds: Pools
) -> None:
    """DeepSpeed does not add up their gradients."""
    run = recorded(manual=True, batch_size=6, epochs=1, stage=stage)
    once, twice = records(worlds, 2, [run, replace(run, net=BackwardTwice)])
    warned = [text for text in twice.messages if "manual_backward" in text]
    assert len(warned) == count
    assert all(f"ZeRO-{stage} does not add up the gradients" in text for text in warned)
    assert not any("manual_backward" in text for text in once.messages)


@pytest.mark.parametrize("manual", [True, False])
def test_manual_and_automatic_optimization_do_not_resume_each_other(
    manual: bool, worlds: Pools, tmp_path: Path
) -> None:
    """Lightning would count the steps from 0 again."""
    root = str(tmp_path)
    run = recorded(manual=manual, batch_size=6, epochs=1, save=("step 0.3",), root=root)
    record(worlds, 2, run)
    other = run.resumed("step 0.3", manual=not manual)
    said = ("saved after 3 optimizer steps", "Set automatic_optimization of the module as in")
    assert_refused(worlds, 2, other, "CheckpointMismatchError", *said)


def drop_loops(_trainer: Any, _module: Any, checkpoint: dict[str, Any]) -> None:
    del checkpoint["loops"]


@pytest.mark.long
def test_a_run_whose_hook_drops_the_loops_counts_from_0(worlds: Pools, tmp_path: Path) -> None:
    run = recorded(batch_size=6, save=("step 0.3",), root=str(tmp_path))
    whole = record(worlds, 2, run)
    drops = partial(LambdaCallback, on_load_checkpoint=drop_loops)
    seen = record(worlds, 2, run.resumed("step 0.3", callbacks=(drops,)))
    assert seen.steps == {step - 3: ids for step, ids in from_step(whole.steps, 3).items()}


class StepsEverySecondBatch(RecordingNet):
    """A net with manual optimization and the gradients of two batches per step."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override] # no loss
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch[0]).mean() / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.long
def test_a_save_that_lacks_gradients_of_manual_optimization_causes_a_warning(
    worlds: Pools, tmp_path: Path
) -> None:
    """A resume from a save between two steps does not repeat their batches."""
    run = recorded(manual=True, batch_size=6, stage=0, length=72, root=str(tmp_path))
    run = replace(run, net=StepsEverySecondBatch, save=("step 0.3", "step 0.4", "step 1.2"))
    messages = record(worlds, 2, run).messages
    (warning,) = [text for text in messages if "lacks the gradients" in text]
    assert "lacks the gradients of 1 manual_backward calls" in warning


class FetchesBatches(RecordingNet):
    """A net whose ``training_step`` fetches a number of batches."""

    each = 1

    @override
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        parts = []
        for _ in range(self.each):
            (x, index), *_ = next(dataloader_iter)
            self.ids.append((self.trainer.global_step, index.tolist(), 0.0))
            parts.append(self.loss(x).mean())
        return torch.stack(parts).mean()


class FetchesTwoBatches(FetchesBatches):
    each = 2


def test_a_step_that_fetches_its_batches_may_fetch_only_one(worlds: Pools, tmp_path: Path) -> None:
    """With several batches, a resume would repeat samples."""
    run = recorded(length=96, batch_size=12, save=("step 0.3",), root=str(tmp_path))
    run = replace(run, net=FetchesBatches)
    reference = record(worlds, 2, run)
    for world in (1, 2):
        assert_continued(worlds, world, run, reference, {"step 0.3": 3})
    error = "UnsupportedError: training_step has taken 4 batches from"
    assert_refused(worlds, 2, replace(run, net=FetchesTwoBatches), error)
    error = "UnsupportedError: training_step(dataloader_iter) with accumulate_grad_batches=2"
    assert_refused(worlds, 2, replace(run, batch_size=3), error)


class CountedLoader(StatefulLoader):
    requests: ClassVar[list[int]] = []
    """Batches taken at each call of ``state_dict``; the strategy's copies share the list."""

    @override
    def state_dict(self) -> dict[str, int]:
        self.requests.append(self.taken)
        return super().state_dict()


class CountedSizedLoader(CountedLoader):
    @override
    def __len__(self) -> int:
        return 5


def requests_per_batch(kind: type[CountedLoader]) -> list[int]:
    """Return the calls of the loader's ``state_dict`` in each batch except the first and last."""
    loader, counts = kind(Stream(60), batch_size=12), []
    counting = LambdaCallback(on_train_batch_start=lambda *_: counts.append(len(kind.requests)))
    trainer, net, _, _ = recorded(epochs=1, watch=Watch).make(counting)
    trainer.fit(net, loader)
    return [after - before for before, after in pairwise(counts[1:])]


@pytest.mark.parametrize("kind", [CountedLoader, CountedSizedLoader])
def test_states_of_loaders_are_requested_once_per_batch(
    kind: type[CountedLoader], worlds: Pools
) -> None:
    assert worlds.run(1, partial(requests_per_batch, kind)) == [[1, 1, 1]]


def test_states_of_loaders_survive_two_resumes(worlds: Pools, tmp_path: Path) -> None:
    run = recorded(kind="stateful", length=60, epochs=1, root=str(tmp_path))
    reference = record(worlds, 2, replace(run, save=("step 0.2",)))
    record(worlds, 2, run.resumed("step 0.2", save=("inside 0.2",)))
    for seen in worlds.run(2, partial(fit, run.resumed("inside 0.2"))):
        assert seen.steps == from_step(reference.steps, 2)


def test_an_epoch_that_is_shorter_after_a_resume_ends_immediately(
    worlds: Pools, tmp_path: Path
) -> None:
    """Its schedule makes the step of the epoch's end."""
    run = recorded(save=("step 0.3",), root=str(tmp_path), schedule="epoch")
    shorter = run.resumed("step 0.3", trainer={"limit_train_batches": 2})
    whole, seen = records(worlds, 2, [run, shorter])
    assert {step: len(ids) for step, ids in seen.steps.items()} == {3: 12, 4: 12}
    assert seen.rates == dict.fromkeys((3, 4), whole.rates[5])
    assert any("ends here" in text for text in seen.messages)
    assert not any("before `optimizer.step()`" in text for text in seen.messages)
