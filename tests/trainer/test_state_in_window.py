"""A save inside a window contains the state of the last step, whatever has changed it since."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.support.fits import digests
from tests.support.outcome import warnings_heard
from tests.support.ranks import Pools
from tests.trainer._recorded_data import IndexedSamples
from tests.trainer._recorded_runs import (
    EventRecorder,
    RecordingNet,
    RunRecord,
    RunSpec,
    fit,
    from_step,
    gather_record,
    trainer_of,
)

pytestmark = pytest.mark.engine


class MomentumNet(RecordingNet):
    """A net with a frozen copy that follows it in every micro-batch.

    Its buffers change in a hook at a batch's end and in validations.
    """

    @override
    def configure_model(self) -> None:
        if hasattr(self, "first"):
            return
        super().configure_model()
        self.teacher = copy.deepcopy(self.first).requires_grad_(requires_grad=False)
        self.still = nn.Linear(3, 3).requires_grad_(requires_grad=False)
        self.batches: torch.Tensor
        self.validations: torch.Tensor
        self.register_buffer("batches", torch.zeros(1))
        self.register_buffer("validations", torch.zeros(1))

    @override
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for mine, followed in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
            mine.data = mine.data * 0.9 + followed.data * 0.1
        loss = super().training_step(batch, batch_idx)
        x = batch[0]
        return loss + (self.first(x) - self.teacher(x)).square().mean()

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    @override
    def on_validation_epoch_end(self) -> None:
        self.validations += 1


def move_a_batch(trainer: pl.Trainer, *_: Any, **__: Any) -> None:
    """Move a tensor as the Trainer moves batches, as callbacks that show samples do."""
    trainer.strategy.batch_to_device(torch.zeros(1))


def trained(run: RunSpec) -> tuple[RunRecord, dict[str, str], list[str]]:
    """Fit; return the record, the digests of the weights and buffers, and the warnings."""
    pl.seed_everything(run.seed, workers=True, verbose=False)
    net, watch = MomentumNet(run), EventRecorder(run)
    moves = LambdaCallback(on_fit_start=move_a_batch, on_train_batch_end=move_a_batch)
    trainer = trainer_of(run, [watch, moves])
    val = DataLoader(IndexedSamples(8, 0.0), batch_size=2) if run.validate else None
    with warnings_heard("Frozen weights have changed") as warned:
        trainer.fit(net, run.loaders(), val, ckpt_path=run.ckpt_path)
    return gather_record(trainer, net, watch), digests(net), warned


@pytest.mark.parametrize(("stage", "asynchronous"), [(0, False), (2, False), (2, True)])
def test_frozen_weights_and_buffers_are_those_of_the_last_step(
    stage: int, asynchronous: bool, worlds: Pools, tmp_path: Path
) -> None:
    """Users write to ``.data``, hooks follow the step, and the validation there is not repeated."""
    run = RunSpec(
        stage=stage,
        save=("inside 0.2", "inside 1.0"),
        root=str(tmp_path),
        validate=True,
        trainer={"val_check_interval": 2},
        strategy={"async_save": asynchronous},
    )
    whole = worlds.run(2, partial(trained, run))
    assert not whole[0][2]
    for moment in run.save:
        for seen, of in zip(
            worlds.run(2, partial(trained, run.resumed(moment))), whole, strict=True
        ):
            assert seen[1] == of[1], moment
            assert seen[0].steps == from_step(of[0].steps, min(seen[0].steps)), moment


def test_frozen_weights_without_a_copy_are_warned_of(worlds: Pools, tmp_path: Path) -> None:
    run = RunSpec(save=("inside 0.0", "inside 0.3"), root=str(tmp_path))
    (told,) = worlds.run(2, partial(trained, run))[0][2]
    assert "teacher.bias, teacher.weight. This checkpoint" in told


def saved_in(hook: str, run: RunSpec) -> RunRecord:
    """Fit, and save inside the third batch."""

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
    """With the same dropout and the same random numbers of the data set, in this process."""
    run = RunSpec(kind=kind, length=60, batch_size=6, dropout=0.5, noise=0.1, root=str(tmp_path))
    whole = worlds.run(2, partial(saved_in, hook, run))
    resumed = replace(run, ckpt_path=str(tmp_path / f"{hook}.ckpt"))
    for seen, of in zip(worlds.run(2, partial(fit, resumed)), whole, strict=True):
        assert seen.steps == from_step(of.steps, 2)
        assert seen.losses == from_step(of.losses, 2)
        assert (seen.buffer, seen.drawn) == (of.buffer, of.drawn)
