"""Strategies can be pickled, copied and reused; a Trainer keeps the user's settings."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed import zero
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy
from tests.support.fits import elastic, quiet_trainer
from tests.support.ranks import Pools
from tests.trainer._recorded_data import IndexedSamples
from tests.trainer._recorded_runs import (
    EventRecorder,
    RecordingNet,
    RunRecord,
    from_step,
    gather_record,
    recorded,
)

pytestmark = pytest.mark.engine

SETTINGS = (
    "accumulate_grad_batches",
    "check_val_every_n_epoch",
    "limit_train_batches",
    "limit_val_batches",
    "log_every_n_steps",
    "max_epochs",
    "max_steps",
    "val_check_interval",
)
"""Options that a user passes to a Trainer and may read later."""

LENGTH, GLOBAL_BATCH = 48, 12


def make_strategy(stage: int) -> ElasticDeepSpeedStrategy:
    """Return a strategy whose global batch changes the Trainer's settings."""
    return elastic(stage=stage, global_batch_size=GLOBAL_BATCH)


def make_trainer(strategy: ElasticDeepSpeedStrategy, *callbacks: Callback, **options: Any) -> Any:
    """Create a Trainer whose integers count global batches."""
    limits = {"max_epochs": 2, "limit_train_batches": 3, "val_check_interval": 2, **options}
    return quiet_trainer(strategy, *callbacks, **limits)


def settings_of(trainer: Any) -> dict[str, Any]:
    """Return the Trainer's settings, and the replacements of its callbacks' methods."""
    found = {name: getattr(trainer, name) for name in SETTINGS}
    found["callbacks"] = [type(callback).__name__ for callback in trainer.callbacks]
    permanent = {"log", "log_dict"}  # Lightning sets these and keeps them.
    found["replaced"] = [
        n for c in trainer.callbacks for n in vars(c) if callable(vars(c)[n]) and n not in permanent
    ]
    return found


def loaders() -> tuple[Any, Any]:
    """Return loaders for training, with two batches per step on two ranks, and validation."""
    train = DataLoader(IndexedSamples(LENGTH, 0.0), batch_size=3, shuffle=True)
    return train, DataLoader(IndexedSamples(8, 0.0), batch_size=2)


def fit_copied(
    strategy: ElasticDeepSpeedStrategy,
    copied: str = "",
    root: str = "",
    ckpt_path: str | None = None,
) -> RunRecord:
    """Fit with a pickled strategy, or with a copy of the ``"strategy"`` or its ``"trainer"``."""
    pl.seed_everything(3, workers=True, verbose=False)
    run = recorded(length=LENGTH, save=("step 1.1",) if root else (), root=root)
    net, watch = RecordingNet(run), EventRecorder(run)
    if copied == "strategy":
        strategy = copy.deepcopy(strategy)
    trainer = make_trainer(strategy, watch)
    if copied == "trainer":
        trainer = copy.deepcopy(trainer)
        (watch,) = (
            callback for callback in trainer.callbacks if isinstance(callback, EventRecorder)
        )
    trainer.fit(net, *loaders(), ckpt_path=ckpt_path)
    return gather_record(trainer, net, watch)


class RaisesAtStep(Callback):
    """Raises once after a step, or in ``setup`` (step 0)."""

    at = -1

    def _raise_at(self, step: int) -> None:
        if step == self.at:
            self.at = -1
            msg = "out of luck"
            raise RuntimeError(msg)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._raise_at(trainer.global_step)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._raise_at(0)


def losses_of_second_fits(stage: int) -> tuple[list[Any], list[Any]]:
    """Fit a module twice; return the records of the second fit, and those of a new module's fit.

    Each gradient fills a bucket. The new module begins with the weights of the second fit.
    """
    found: list[list[Any]] = []
    weights, net = dict[str, torch.Tensor](), RecordingNet(recorded(length=LENGTH))
    for again in (False, True, False):
        pl.seed_everything(3, workers=True, verbose=False)
        if found:
            net = RecordingNet(recorded(length=LENGTH))
            net.configure_model()
            net.load_state_dict(weights)
        first = len(net.ids)
        strategy = elastic(stage=stage, global_batch_size=GLOBAL_BATCH, reduce_bucket_size=20)
        quiet_trainer(strategy, max_epochs=1).fit(net, loaders()[0])
        if again or found:
            found.append(net.ids[first:])
            continue
        with zero.GatheredParameters([*net.parameters()], enabled=stage == 3):
            weights = {name: value.clone() for name, value in net.state_dict().items()}
    return found[0], found[1]


def settings_after(root: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]], dict[int, int]]:
    """Reuse one Trainer; return its first settings, those after each use, and the step sizes."""
    pl.seed_everything(3, workers=True, verbose=False)
    fails, net = RaisesAtStep(), RecordingNet(recorded(length=LENGTH))
    saves = ModelCheckpoint(root, save_last=True, enable_version_counter=False)
    trainer = make_trainer(make_strategy(2), fails, saves, max_epochs=3)
    train, val = loaders()
    first, found = settings_of(trainer), {}
    for at in (0, 4):
        fails.at = at
        try:
            trainer.fit(net, train, val)
        except RuntimeError:
            found[f"exception at {at}"] = settings_of(trainer)
    trainer.validate(net, val, verbose=False)
    found["validate"] = settings_of(trainer)
    trainer.fit(net, train, val, ckpt_path=f"{root}/last.ckpt")
    found["resumed"] = settings_of(trainer)
    trainer.fit_loop.max_epochs = first["max_epochs"] = 4
    trainer.fit(net, train, val)
    found["fitted again"] = settings_of(trainer)
    trainer.save_checkpoint(Path(root) / "after.ckpt")
    found["saved"] = settings_of(trainer)
    for settings in found.values():
        settings["max_epochs"] = first["max_epochs"]  # The test itself has changed it.
    sizes: dict[int, int] = {}
    for step, ids, _ in net.ids:
        sizes[step] = sizes.get(step, 0) + len(ids)
    return first, found, sizes


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_pickled_and_copied_strategies_train_and_resume(
    stage: int, worlds: Pools, tmp_path: Path
) -> None:
    strategy = make_strategy(stage)  # Sent to ranks as a pickle.
    reference = worlds.run(2, partial(fit_copied, strategy, root=str(tmp_path)))[0]
    assert sorted(reference.steps) == list(range(6))
    path = str(tmp_path / "step-1.1.ckpt")
    for copied in ("strategy", "trainer"):
        seen = worlds.run(2, partial(fit_copied, strategy, copied))[0]
        assert (seen.steps, seen.losses) == (reference.steps, reference.losses)
    for copied in ("", "trainer"):
        seen = worlds.run(2, partial(fit_copied, strategy, copied, ckpt_path=path))[0]
        assert seen.losses == from_step(reference.losses, 4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_module_is_trained_again_as_a_new_one(stage: int, worlds: Pools) -> None:
    """Without the gradient hooks of the first engine."""
    for again, new in worlds.run(2, partial(losses_of_second_fits, stage)):
        assert len(again) == 2 * LENGTH // GLOBAL_BATCH
        assert again == new


@pytest.mark.parametrize("world", [1, 2])
def test_a_reused_trainer_keeps_its_users_settings(
    world: int, worlds: Pools, tmp_path: Path
) -> None:
    for first, found, sizes in worlds.run(world, partial(settings_after, str(tmp_path))):
        assert first["accumulate_grad_batches"] == 1
        assert list(found) == [
            "exception at 0",
            "exception at 4",
            "validate",
            "resumed",
            "fitted again",
            "saved",
        ]
        for moment, settings in found.items():
            assert settings == first, moment
        assert max(sizes) == 3 * 4 - 1
