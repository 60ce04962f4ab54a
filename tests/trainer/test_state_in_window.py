"""A save inside an accumulation window has the weights and the position of the last step."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    LambdaCallback,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from typing_extensions import override

from tests.support.fits import FitCase, error_of, fit
from tests.support.ranks import Pools
from tests.trainer._recorded_runs import RecordingNet, RunRecord, from_step, record, recorded

pytestmark = pytest.mark.engine

WARNING = "is saved inside an accumulation window"


class MomentumNet(RecordingNet):
    """A net with a frozen copy that follows it in every micro-batch (a momentum encoder)."""

    @override
    def configure_model(self) -> None:
        if hasattr(self, "first"):
            return
        super().configure_model()
        self.teacher = copy.deepcopy(self.first).requires_grad_(requires_grad=False)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for copied, source in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
            copied.data = copied.data * 0.9 + source.data * 0.1
        loss = super().training_step(batch, batch_idx)
        x = batch[0]
        return loss + (self.first(x) - self.teacher(x)).square().mean()


@pytest.mark.parametrize(("stage", "asynchronous"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize(
    "moment",
    ["step 0.2", *(pytest.param(m, marks=pytest.mark.long) for m in ("validated 1", "epoch 0"))],
)
def test_changing_frozen_weights_and_buffers_are_exact_after_a_step(
    moment: str, stage: int, asynchronous: bool, worlds: Pools, tmp_path: Path
) -> None:
    run = recorded(
        stage=stage,
        batch_size=3,
        save=(moment,),
        root=str(tmp_path),
        validate=True,
        dropout=0.2,
        trainer={"val_check_interval": 1},
        strategy={"async_save": asynchronous},
        net=MomentumNet,
    )
    reference = worlds.run(2, partial(fit, run))
    assert not any(WARNING in text for text in reference[0].messages)
    resumed = worlds.run(2, partial(fit, run.resumed(moment)))
    for seen, expected in zip(resumed, reference, strict=True):
        assert seen.weights == expected.weights
        assert seen.steps == from_step(expected.steps, min(seen.steps))


@pytest.mark.parametrize("kind", ["plain", "stateful"])
def test_a_save_inside_a_window_warns_and_repeats_the_window(
    kind: str, worlds: Pools, tmp_path: Path
) -> None:
    """The weights are exact, and a buffer that each micro-batch changes is not."""
    run = recorded(kind=kind, length=60, batch_size=3, root=str(tmp_path))
    run = replace(run, save=("inside 0.2", "inside 1.0"))
    reference = record(worlds, 2, run)
    warned = [text for text in reference.messages if WARNING in text]
    assert [text.split()[0] for text in warned] == [
        str(tmp_path / f"{moment.replace(' ', '-')}.ckpt") for moment in run.save
    ]
    for moment, begin in (("inside 0.2", 2), ("inside 1.0", 5)):
        seen = record(worlds, 2, run.resumed(moment))
        assert seen.steps == from_step(reference.steps, begin)
        assert seen.losses == from_step(reference.losses, begin)
        differing = {n for n, digest in seen.weights.items() if digest != reference.weights[n]}
        assert differing == {"mean"}


def saved_in(hook: str, run: FitCase) -> RunRecord:
    """Fit, and save in a hook of the third batch."""

    def save(trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(f"{run.root}/{hook}.ckpt")

    made: Any = partial(LambdaCallback, **{hook: save})
    return fit(replace(run, callbacks=(made,)))


@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_after_backward", "on_before_optimizer_step"]
)
@pytest.mark.parametrize("kind", ["plain", "stateful"])
def test_a_save_inside_a_batch_without_accumulation_repeats_the_batch(
    kind: str, hook: str, worlds: Pools, tmp_path: Path
) -> None:
    run = recorded(kind=kind, length=60, batch_size=6, root=str(tmp_path))
    reference = worlds.run(2, partial(saved_in, hook, run))
    assert sum(WARNING in text for text in reference[0].messages) == 1
    resumed = replace(run, ckpt_path=str(tmp_path / f"{hook}.ckpt"))
    for seen, expected in zip(worlds.run(2, partial(fit, resumed)), reference, strict=True):
        assert seen.steps == from_step(expected.steps, 2)
        assert seen.losses == from_step(expected.losses, 2)


def test_saves_by_time_wait_for_the_end_of_the_window(worlds: Pools, tmp_path: Path) -> None:
    """With an interval of 0 s, each of the three micro-batches of a step would save."""
    saves = partial(
        ModelCheckpoint,
        tmp_path,
        "{step}",
        train_time_interval=timedelta(0),
        save_top_k=-1,
        save_on_train_epoch_end=False,
    )
    run = recorded(epochs=1, callbacks=(saves,))
    seen = record(worlds, 2, run)
    assert not any(WARNING in text for text in seen.messages)
    names = {path.name for path in tmp_path.glob("*.ckpt")}
    assert names == {f"step={step}.ckpt" for step in range(1, seen.global_step + 1)}


class StopsInFirstWindow(Callback):
    """Stops the run after the first micro-batch of epoch 1, as a Timer may."""

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.current_epoch == 1


def test_a_stop_in_the_first_window_does_not_end_the_epoch(worlds: Pools, tmp_path: Path) -> None:
    run = recorded(epochs=3, batch_size=3, validate=True, schedule="plateau", root=str(tmp_path))
    reference = record(worlds, 2, run)
    stopped = replace(run, save=("epoch 1",), callbacks=(StopsInFirstWindow,))
    assert record(worlds, 2, stopped).global_step == 5
    seen = record(worlds, 2, run.resumed("epoch 1"))
    assert seen.steps == from_step(reference.steps, 5)
    assert seen.rates == from_step(reference.rates, 5)
    # Batches by their index in the run.
    assert seen.loops.keys() <= reference.loops.keys()


def test_a_failed_fetch_skips_no_batch(worlds: Pools, tmp_path: Path) -> None:
    """Lightning fetches batch 4 of a stream before it trains on batch 3, which is lost."""
    options = {"logging_batch_size_per_gpu": 6}
    run = recorded(kind="counting, kept", length=60, batch_size=6, strategy=options)
    reference = record(worlds, 2, run)
    saves = (partial(OnExceptionCheckpoint, str(tmp_path)),)
    trainer = {"enable_checkpointing": True}
    failing = replace(run, kind="counting, kept, failing", callbacks=saves, trainer=trainer)
    assert worlds.run(2, partial(error_of, failing)) == ["OSError: "] * 2
    seen = record(worlds, 2, replace(run, ckpt_path=str(tmp_path / "on_exception.ckpt")))
    assert seen.steps == from_step(reference.steps, 3)


class SavesAfterStep(RecordingNet):
    """Saves right after an optimizer step, before Lightning has counted it."""

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.trainer.global_step == 2:
            self.trainer.save_checkpoint(f"{self.of.root}/stepped.ckpt")


def test_a_save_after_a_step_that_is_not_counted_warns(worlds: Pools, tmp_path: Path) -> None:
    run = recorded(batch_size=6, epochs=1, root=str(tmp_path), net=SavesAfterStep)
    messages = record(worlds, 2, run).messages
    assert not any(WARNING in text for text in messages)
    (warning,) = [text for text in messages if "is saved inside a batch" in text]
    assert "the weights after this step and the position before the batch" in warning
