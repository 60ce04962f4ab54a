"""A rank of the soak: it resumes from the newest save and trains a deterministic model.

torchrun's agents start it. Started alone, it records its state after given steps.
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

from tests.jobs.recorder import Recorder
from tests.support.deterministic_training import DeterministicModel, state_digests
from tests.support.fits import elastic

SAVE_EVERY = 5
"""Optimizer steps between two saves: the most steps that an event may lose."""

STEP_S = 0.2
"""Extra time per step, so that saves take a realistic part of the time."""


@dataclass(frozen=True, slots=True)
class SoakRun:
    folder: str
    stage: int = 3
    async_save: bool = False
    module_weights: bool = False
    on_nodes: bool = False
    """Save each step on ``node://``, where each node has its own disk."""
    record_at: tuple[int, ...] = ()
    """Steps after which an undisturbed run records its state; empty for a run of the soak."""

    @classmethod
    def read(cls, text: str) -> SoakRun:
        values = json.loads(text)
        return cls(**{**values, "record_at": tuple(values["record_at"])})

    @property
    def dirpath(self) -> str:
        """The folder of the checkpoints."""
        return f"node://{self.folder}/local/run" if self.on_nodes else f"{self.folder}/checkpoints"

    def write(self) -> str:
        return json.dumps(asdict(self))


class Watch(Recorder):
    """Records each step, and the state at the start of a world with DeepSpeed's functions."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step:
            held = state_digests(trainer, pl_module)
            if trainer.is_global_zero:
                write_state(self.folder, trainer.global_step, held)
        super().on_train_start(trainer, pl_module)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.step, self.samples = trainer.global_step, []
        self.write({"event": "step", "step": self.step}, trainer)
        time.sleep(STEP_S)


class StateRecorder(Callback):
    """Records the state of an undisturbed run after given steps."""

    def __init__(self, run: SoakRun) -> None:
        self.run = run

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if trainer.global_step in self.run.record_at:
            held = state_digests(trainer, pl_module)
            write_state(Path(self.run.folder), trainer.global_step, held)


def write_state(folder: Path, step: int, held: dict[str, str]) -> None:
    """Append the state after a step to a file."""
    line = json.dumps({"step": step, "held": held, "time": time.time()})
    with (folder / f"held-{os.getpid()}.jsonl").open("a") as file:
        file.write(f"{line}\n")


def main(run: SoakRun) -> None:
    """Train until the process is killed, or until all states are recorded."""
    warnings.simplefilter("ignore")
    callbacks: list[Callback] = [StateRecorder(run)]
    if not run.record_at:
        saves = ModelCheckpoint(
            dirpath=run.dirpath,
            filename="{step}",
            monitor="step",
            mode="max",
            save_top_k=3,
            save_last="link",
            every_n_train_steps=1 if run.on_nodes else SAVE_EVERY,
            enable_version_counter=False,
        )
        callbacks = [saves, Watch(run.folder)]
    strategy = elastic(
        stage=run.stage,
        async_save=run.async_save,
        save_module_weights=run.module_weights,
        fallback=True,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=callbacks,
        max_epochs=-1,
        max_steps=max(run.record_at, default=-1),
        logger=False,
        enable_checkpointing=not run.record_at,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DeterministicModel(), ckpt_path=None if run.record_at else "last")


if __name__ == "__main__":
    main(SoakRun.read(sys.argv[1]))
