"""A save inside an accumulation window contains the state of the last optimizer step."""

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
from typing_extensions import override

from tests.support.ranks import Pools
from tests.trainer._recorded_runs import (
    RecordingNet,
    RunRecord,
    RunSpec,
    fit,
    from_step,
    record,
)

pytestmark = pytest.mark.engine

WARNING = "Frozen weights have changed"


class MomentumNet(RecordingNet):
    """A net with a frozen copy that follows it in every micro-batch (a momentum encoder).

    Its buffers change in a hook at the end of each batch, and in validations.
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
        for copied, source in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
            copied.data = copied.data * 0.9 + source.data * 0.1
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
    """Move a tensor to the device as the Trainer moves batches; some callbacks do this."""
    trainer.strategy.batch_to_device(torch.zeros(1))


MOVES = partial(LambdaCallback, on_fit_start=move_a_batch, on_train_batch_end=move_a_batch)


@pytest.mark.parametrize(("stage", "asynchronous"), [(0, False), (2, False), (2, True)])
def test_frozen_weights_and_buffers_are_those_of_the_last_step(
    stage: int, asynchronous: bool, worlds: Pools, tmp_path: Path
) -> None:
    """Despite writes to ``.data``, hooks after the step, and a validation in the window."""
    run = RunSpec(
        stage=stage,
        save=("inside 0.2", "inside 1.0"),
        root=str(tmp_path),
        validate=True,
        trainer={"val_check_interval": 2},
        strategy={"async_save": asynchronous},
        net=MomentumNet,
        callbacks=(MOVES,),
    )
    reference = worlds.run(2, partial(fit, run))
    assert not any(WARNING in text for text in reference[0].messages)
    for moment in run.save:
        resumed = worlds.run(2, partial(fit, run.resumed(moment)))
        for seen, expected in zip(resumed, reference, strict=True):
            assert seen.weights == expected.weights, moment
            assert seen.steps == from_step(expected.steps, min(seen.steps)), moment


def test_frozen_weights_without_a_copy_cause_a_warning(worlds: Pools, tmp_path: Path) -> None:
    run = RunSpec(save=("inside 0.0", "inside 0.3"), root=str(tmp_path), net=MomentumNet)
    (warning,) = [text for text in record(worlds, 2, run).messages if WARNING in text]
    assert "teacher.bias, teacher.weight. This checkpoint" in warning


def saved_in(hook: str, run: RunSpec) -> RunRecord:
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
    """With the same random numbers of dropout and of the data set, in this process."""
    run = RunSpec(kind=kind, length=60, batch_size=6, dropout=0.5, noise=0.1, root=str(tmp_path))
    reference = worlds.run(2, partial(saved_in, hook, run))
    resumed = replace(run, ckpt_path=str(tmp_path / f"{hook}.ckpt"))
    for seen, expected in zip(worlds.run(2, partial(fit, resumed)), reference, strict=True):
        assert seen.steps == from_step(expected.steps, 2)
        assert seen.losses == from_step(expected.losses, 2)
        assert (seen.buffer, seen.drawn) == (expected.buffer, expected.drawn)
