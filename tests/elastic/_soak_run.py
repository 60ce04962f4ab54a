"""One rank of the soak: trains a model whose state after each step is known, from the newest save.

Run by torchrun's agents; or alone, with the steps at which it tells what it holds.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from typing_extensions import override

from tests.elastic.recorder import Recorder
from tests.faults._deterministic_training import DeterministicModel, state_digests
from tests.support.fits import elastic

SAVE_EVERY = 5
"""Optimizer steps between two saves: the most that an event may cost."""

STEP_S = 0.2
"""What a step takes besides: a save is then a part of the time, as in a real run."""


@dataclass(frozen=True, slots=True)
class SoakRun:
    folder: str
    stage: int = 3
    async_save: bool = False
    module_weights: bool = False
    told_at: tuple[int, ...] = ()
    """Steps after which an undisturbed run tells what it holds; empty: a run of the soak."""

    @classmethod
    def read(cls, text: str) -> SoakRun:
        plain = json.loads(text)
        return cls(**{**plain, "told_at": tuple(plain["told_at"])})

    def write(self) -> str:
        return json.dumps(asdict(self))


class Watch(Recorder):
    """Records each step, and the state at the start of a world by DeepSpeed's functions."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step:
            held = state_digests(trainer, pl_module)
            if trainer.is_global_zero:
                tell(self.folder, trainer.global_step, held)
        super().on_train_start(trainer, pl_module)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.step, self.samples = trainer.global_step, []
        self.write({"event": "step", "step": self.step}, trainer)
        time.sleep(STEP_S)


class ReportEvents(Callback):
    """Records the state of an undisturbed run after some steps."""

    def __init__(self, run: SoakRun) -> None:
        self.run = run

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if trainer.global_step in self.run.told_at:
            tell(Path(self.run.folder), trainer.global_step, state_digests(trainer, pl_module))


def tell(folder: Path, step: int, held: dict[str, str]) -> None:
    """Record the state after a step."""
    line = json.dumps({"step": step, "held": held, "time": time.time()})
    with (folder / f"held-{os.getpid()}.jsonl").open("a") as file:
        file.write(f"{line}\n")


def main(run: SoakRun) -> None:
    """Train until this is killed, or until all is recorded."""
    warnings.simplefilter("ignore")
    callbacks: list[Callback] = [ReportEvents(run)]
    if not run.told_at:
        saves = ModelCheckpoint(
            dirpath=Path(run.folder) / "checkpoints",
            filename="{step}",
            monitor="step",
            mode="max",
            save_top_k=3,
            save_last="link",
            every_n_train_steps=SAVE_EVERY,
            enable_version_counter=False,
        )
        callbacks = [saves, Watch(run.folder)]
    strategy = elastic(
        stage=run.stage,
        async_save=run.async_save,
        save_module_weights=run.module_weights,
        fallback=True,
        fingerprint=True,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=callbacks,
        max_epochs=-1,
        max_steps=max(run.told_at, default=-1),
        logger=False,
        enable_checkpointing=not run.told_at,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DeterministicModel(), ckpt_path=None if run.told_at else "last")


if __name__ == "__main__":
    main(SoakRun.read(sys.argv[1]))
