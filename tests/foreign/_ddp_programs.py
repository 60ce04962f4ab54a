"""What ranks do with Trainers: DDP saves in the middle of an epoch, ZeRO goes on from it."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from tests.foreign._resume_programs import Look, ResumingModel
from tests.foreign._torch_writers import Run, held, keep
from tests.foreign._trainer_writers import LitNet, Watch
from tests.support.engines import Setup
from tests.support.oracle import Dump

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "use_distributed_sampler": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class UnshardedNet(LitNet):
    """Gives each parameter a gradient."""

    @override
    def training_step(self, pair: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        return super().training_step(pair, _) + 0 * self.never.sum()


class Keep(pl.Callback):
    """Records the state at the end."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        keep(held(pl_module, trainer.optimizers[0], self.run), self.run)


def fit_ddp(run: Run) -> None:
    """Fit, and save in the middle of an epoch. Collective."""
    warnings.simplefilter("ignore")
    setup = Setup(run.world, hidden=5)
    trainer = pl.Trainer(
        devices=run.world,
        strategy="ddp",
        max_steps=run.steps,
        callbacks=[Watch(), Keep(run)],
        **QUIET,
    )
    trainer.fit(UnshardedNet(setup, hidden=setup.hidden))
    trainer.save_checkpoint(run.path)


def start(path: str, target: Setup, options: dict[str, Any]) -> tuple[int, Dump | None]:
    """Fit one step from a checkpoint; return the step and the state before it. Collective."""
    from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

    warnings.simplefilter("ignore")
    look = Look(target)
    trainer = pl.Trainer(
        devices=target.world,
        strategy=ElasticDeepSpeedStrategy(config=target.config(), **options),
        max_steps=1,
        callbacks=[look],
        **QUIET,
    )
    trainer.fit(ResumingModel(target, seed=7, hidden=target.hidden), ckpt_path=path)
    return look.step, look.before
