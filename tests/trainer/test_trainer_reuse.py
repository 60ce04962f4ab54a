"""A strategy is sent, copied and used again; a Trainer keeps what its user has set."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
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
    RunSpec,
    from_step,
    gather_record,
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
"""What a user passes to a Trainer and may read again."""

LENGTH, GLOBAL_BATCH = 48, 12


def make_strategy(stage: int) -> ElasticDeepSpeedStrategy:
    """Return a strategy whose batches differ from the Trainer's settings."""
    return elastic(stage=stage, global_batch_size=GLOBAL_BATCH)


def make_trainer(strategy: ElasticDeepSpeedStrategy, *callbacks: Callback, **options: Any) -> Any:
    """Make a Trainer whose integers count global batches."""
    few = {"max_epochs": 2, "limit_train_batches": 3, "val_check_interval": 2, **options}
    return quiet_trainer(strategy, *callbacks, **few)


def settings_of(trainer: Any) -> dict[str, Any]:
    """Return the Trainer's settings, and the replacements of its callbacks' methods."""
    found = {name: getattr(trainer, name) for name in SETTINGS}
    found["callbacks"] = [type(callback).__name__ for callback in trainer.callbacks]
    given = {"log", "log_dict"}  # by Lightning, for good
    found["answered"] = [
        n for c in trainer.callbacks for n in vars(c) if callable(vars(c)[n]) and n not in given
    ]
    return found


def loaders() -> tuple[Any, Any]:
    """Return loaders to train and to validate on, whose batches are of two samples."""
    train = DataLoader(IndexedSamples(LENGTH, 0.0), batch_size=2, shuffle=True)
    return train, DataLoader(IndexedSamples(8, 0.0), batch_size=2)


def fit_copied(
    strategy: ElasticDeepSpeedStrategy,
    how: str = "",
    root: str = "",
    ckpt_path: str | None = None,
) -> RunRecord:
    """Fit with a pickled strategy, or with a copy of it or of its Trainer."""
    pl.seed_everything(3, workers=True, verbose=False)
    run = RunSpec(length=LENGTH, save=("step 1.1",) if root else (), root=root)
    net, watch = RecordingNet(run), EventRecorder(run)
    if how == "strategy":
        strategy = copy.deepcopy(strategy)
    trainer = make_trainer(strategy, watch)
    if how == "trainer":
        trainer = copy.deepcopy(trainer)
        (watch,) = (
            callback for callback in trainer.callbacks if isinstance(callback, EventRecorder)
        )
    trainer.fit(net, *loaders(), ckpt_path=ckpt_path)
    return gather_record(trainer, net, watch)


class RaisesAtStep(Callback):
    """Raises once after a step, or in setup."""

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


def settings_after(root: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]], dict[int, int]]:
    """Reuse one Trainer; return its settings first and after each use, and the steps."""
    pl.seed_everything(3, workers=True, verbose=False)
    fails, net = RaisesAtStep(), RecordingNet(RunSpec(length=LENGTH))
    saves = ModelCheckpoint(root, save_last=True, enable_version_counter=False)
    trainer = make_trainer(make_strategy(2), fails, saves, max_epochs=3)
    train, val = loaders()
    given, found = settings_of(trainer), {}
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
    trainer.fit_loop.max_epochs = given["max_epochs"] = 4
    trainer.fit(net, train, val)
    found["fitted again"] = settings_of(trainer)
    trainer.save_checkpoint(Path(root) / "after.ckpt")
    found["saved"] = settings_of(trainer)
    for of_one in found.values():
        of_one["max_epochs"] = given["max_epochs"]  # the test's own doing
    sizes: dict[int, int] = {}
    for step, ids, _ in net.ids:
        sizes[step] = sizes.get(step, 0) + len(ids)
    return given, found, sizes


@pytest.mark.parametrize("stage", [2, 3])
def test_pickled_and_copied_strategies_train_and_resume(
    stage: int, worlds: Pools, tmp_path: Path
) -> None:
    sent = make_strategy(stage)  # ranks get it as a pickle
    whole = worlds.run(2, partial(fit_copied, sent, root=str(tmp_path)))[0]
    assert sorted(whole.steps) == list(range(6))
    path = str(tmp_path / "step-1.1.ckpt")
    for how in ("strategy", "trainer"):
        seen = worlds.run(2, partial(fit_copied, sent, how))[0]
        assert (seen.steps, seen.losses) == (whole.steps, whole.losses)
    for how in ("", "trainer"):
        seen = worlds.run(2, partial(fit_copied, sent, how, ckpt_path=path))[0]
        assert seen.losses == from_step(whole.losses, 4)


@pytest.mark.parametrize("world", [1, 2])
def test_a_reused_trainer_keeps_its_users_settings(
    world: int, worlds: Pools, tmp_path: Path
) -> None:
    for given, found, sizes in worlds.run(world, partial(settings_after, str(tmp_path))):
        assert given["accumulate_grad_batches"] == 1
        assert list(found) == [
            "exception at 0",
            "exception at 4",
            "validate",
            "resumed",
            "fitted again",
            "saved",
        ]
        for moment, settings in found.items():
            assert settings == given, moment
        assert max(sizes) == 3 * 4 - 1
