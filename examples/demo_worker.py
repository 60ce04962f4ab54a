"""One phase of the demo: what ``demo.py`` starts, stops and starts again with other device counts.

It is train.py on CPU with a diary: a file to which rank 0 adds a line of JSON per step, save and
load. Every phase is given the same number of epochs, so none of them knows that it will be stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import lightning as L
from gpt import GPT, Batch, StdlibText
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lightning_elastic_zero import ElasticDeepSpeedStrategy

SEED = 1
GLOBAL_BATCH_SIZE = 48  # samples per step over all processes: 2, 3 and 4 divide it
BLOCK_SIZE = 64


class Diary(Callback):
    """Writes down what happens when it happens, for those who watch from outside.

    Args:
        path: A file of JSON lines, one per event, each with ``event``, ``step`` and ``time_s``.

        strategy: What saves and loads; it knows the figures.
    """

    def __init__(self, path: Path, strategy: ElasticDeepSpeedStrategy) -> None:
        self.path, self.strategy = path, strategy
        self.noted_save = strategy.last_save

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note where this phase begins, and what loading took if there was something to load."""
        load = self.strategy.last_load
        figures = {} if load is None else {"seconds": load.seconds, "bytes": load.bytes}
        self._note(trainer, "start", **figures)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Note the loss of the global batch."""
        self._note(trainer, "step", loss=trainer.callback_metrics["train_loss"].item())

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the loss on text that is not trained on."""
        self._note(trainer, "validation", loss=trainer.callback_metrics["val_loss"].item())

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the save of the epoch before: Lightning saves when all other hooks are done."""
        self._note_new_save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the save at the end of the last epoch."""
        self._note_new_save(trainer)

    def _note_new_save(self, trainer: L.Trainer) -> None:
        save = self.strategy.last_save
        if save is not None and save is not self.noted_save:
            self.noted_save = save
            self._note(trainer, "save", seconds=save.seconds, bytes=save.bytes)

    def _note(self, trainer: L.Trainer, event: str, **figures: float) -> None:
        if not trainer.is_global_zero:
            return
        line = {"event": event, "step": trainer.global_step, "time_s": time.time(), **figures}
        # Opened for each line: this process may be killed at any time.
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run_dir", type=Path, required=True, help="checkpoints, TensorBoard")
    parser.add_argument("--diary", type=Path, required=True, help="a file of JSON lines to write")
    parser.add_argument("--devices", type=int, required=True, help="processes of this phase")
    parser.add_argument("--epochs", type=int, required=True, help="of the whole run")
    parser.add_argument("--steps_per_epoch", type=int, required=True)
    parser.add_argument("--resume_step", type=int, help="that of the last checkpoint")
    return parser.parse_args()


def main() -> None:
    """Train until the end, or until someone ends this process."""
    arguments = parse_arguments()
    L.seed_everything(SEED)

    steps = arguments.steps_per_epoch
    data = StdlibText(GLOBAL_BATCH_SIZE, BLOCK_SIZE, samples_per_epoch=steps * GLOBAL_BATCH_SIZE)
    model = GPT(data.vocab_size, BLOCK_SIZE, total_steps=steps * arguments.epochs)
    strategy = ElasticDeepSpeedStrategy(stage=3)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy=strategy,
        plugins=[LightningEnvironment()],  # also inside a SLURM or torchrun job: this machine only
        max_epochs=arguments.epochs,
        gradient_clip_val=1.0,
        callbacks=[
            Diary(arguments.diary, strategy),
            ModelCheckpoint(
                dirpath=arguments.run_dir / "checkpoints",
                filename="{epoch}",
                save_top_k=-1,
                save_last="link",
                enable_version_counter=False,  # one last.ckpt, in every phase the same
                save_on_train_epoch_end=True,
            ),
        ],
        # purge_step: TensorBoard forgets the steps that were lost when the run was stopped.
        logger=TensorBoardLogger(
            arguments.run_dir,
            name=None,
            version="",
            default_hp_metric=False,
            purge_step=arguments.resume_step,
        ),
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data, ckpt_path=None if arguments.resume_step is None else "last")


if __name__ == "__main__":
    main()
