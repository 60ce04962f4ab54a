"""One phase of the demo: what ``demo.py`` starts, stops and starts again with other device counts.

It is train.py on CPU with a diary: a file to which rank 0 adds a line of JSON per step, save and
load. Every phase is given the epochs of the whole run, so none of them knows that it will be
stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path

import lightning as L
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from gpt import GPT, Batch, StdlibText
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

SEED = 1
BLOCK_SIZE = 64
BATCH_SIZE = 12  # what fits on a device, say: 2 processes take 2 such micro-batches per step


class EventLogger(Callback):
    """Writes down what happens when it happens, for those who watch from outside.

    Args:
        path: a file of JSON lines, one per event, each with ``event``, ``step`` and ``time_s``.
        strategy: what saves and loads; it knows the figures.
        first_step: what to add to the steps of this fit.
    """

    def __init__(self, path: Path, strategy: ElasticDeepSpeedStrategy, first_step: int) -> None:
        self.path, self.strategy, self.first_step = path, strategy, first_step
        self.noted_save = strategy.last_save
        self.seen: list[int] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note where this phase begins, and what loading took if there was something to load."""
        load = self.strategy.last_load
        figures = {} if load is None else {"seconds": load.seconds, "bytes": load.bytes}
        self._note(trainer, "start", **figures)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Note a save of the step before, and see which samples the model is about to get."""
        self._note_new_save(trainer)
        self.seen += fingerprints(batch)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Note the loss and the samples of the global batch, when an optimizer step is done."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        of_all_ranks = trainer.strategy.all_gather(torch.tensor(self.seen))
        self.seen.clear()
        loss = trainer.callback_metrics["train_loss"].item()
        self._note(trainer, "step", loss=loss, samples=digest(of_all_ranks))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the loss on text that is not trained on."""
        self._note(trainer, "validation", loss=trainer.callback_metrics["val_loss"].item())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the save of the last step."""
        self._note_new_save(trainer)

    def _note_new_save(self, trainer: L.Trainer) -> None:
        save = self.strategy.last_save
        if save is not None and save is not self.noted_save:
            self.noted_save = save
            self._note(trainer, "save", seconds=save.seconds, bytes=save.bytes)

    def _note(self, trainer: L.Trainer, event: str, **figures: float | str) -> None:
        if not trainer.is_global_zero:
            return
        step = self.first_step + trainer.global_step
        line = {"event": event, "step": step, "time_s": time.time(), **figures}
        # Opened for each line: this process may be killed at any time.
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def fingerprints(batch: Batch) -> list[int]:
    """Return a number for each sample, made of all its characters."""
    tokens, _ = batch
    hashes = (hashlib.blake2b(sample.numpy().tobytes(), digest_size=8) for sample in tokens.cpu())
    return [int.from_bytes(value.digest(), "little", signed=True) for value in hashes]


def digest(samples: Tensor) -> str:
    """Name a set of samples, whoever took which of them, in whatever order."""
    ordered = samples.flatten().sort().values.cpu()
    return hashlib.blake2b(ordered.numpy().tobytes(), digest_size=8).hexdigest()


class OffsetLogger(TensorBoardLogger):
    """A TensorBoard logger whose steps begin at ``first_step``."""

    first_step = 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write at the step's place in the whole run."""
        super().log_metrics(metrics, None if step is None else self.first_step + step)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run_dir", type=Path, required=True, help="TensorBoard's files")
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder for them")
    parser.add_argument("--diary", type=Path, required=True, help="a file of JSON lines to write")
    parser.add_argument("--devices", type=int, required=True, help="processes of this phase")
    parser.add_argument("--epochs", type=int, required=True, help="of the fit")
    parser.add_argument("--samples", type=int, required=True, help="per epoch")
    parser.add_argument("--global_batch_size", type=int, required=True, help="samples per step")
    parser.add_argument("--save_every", type=int, required=True, help="optimizer steps")
    parser.add_argument("--start_step", type=int, default=0, help="that of the last checkpoint")
    parser.add_argument("--weights_of", type=Path, help="a checkpoint: its weights in a new run")
    return parser.parse_args()


def load_weights(model: GPT, checkpoint: Path) -> None:
    """Put weights into a model, and nothing else: DeepSpeed's own tool gets them out."""
    model.configure_model()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(str(checkpoint)))


def main() -> None:
    """Train until the end, or until someone ends this process."""
    arguments = parse_arguments()
    L.seed_everything(SEED)

    data = StdlibText(BATCH_SIZE, BLOCK_SIZE, arguments.samples)
    # Without dropout: on another device count it would draw other numbers, as good, and the curves
    # could not be compared to the last bits.
    model = GPT(data.vocab_size, BLOCK_SIZE, dropout=0.0)
    first_step = 0  # of a fit that counts from 0
    if arguments.weights_of is not None:
        load_weights(model, arguments.weights_of)
        first_step = arguments.start_step
    # purge_step: TensorBoard forgets the steps that were lost when the run was stopped.
    purge_step = arguments.start_step or None
    logger = OffsetLogger(
        arguments.run_dir, name=None, version="", default_hp_metric=False, purge_step=purge_step
    )
    logger.first_step = first_step
    strategy = ElasticDeepSpeedStrategy(stage=3, global_batch_size=arguments.global_batch_size)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy=strategy,
        plugins=[LightningEnvironment()],  # also inside a SLURM or torchrun job: this machine only
        max_epochs=arguments.epochs,
        gradient_clip_val=1.0,
        callbacks=[
            EventLogger(arguments.diary, strategy, first_step),
            ModelCheckpoint(
                dirpath=arguments.checkpoints,
                filename="{step}",
                monitor="step",
                mode="max",
                save_top_k=2,
                save_last="link",
                every_n_train_steps=arguments.save_every,
                enable_version_counter=False,  # one last.ckpt, in every phase the same
            ),
        ],
        logger=logger,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    goes_on = arguments.start_step and arguments.weights_of is None
    trainer.fit(model, data, ckpt_path="last" if goes_on else None)


if __name__ == "__main__":
    main()
