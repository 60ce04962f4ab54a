"""One phase of the demo, started and killed by ``demo.py``.

This is train.py on CPU with an event log: a file to which rank 0 appends a line of JSON for each
step, save and load. Every phase gets the epochs of the whole run, so that a kill is unexpected.
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
BATCH_SIZE = 12  # limit of a device: 2 processes take 2 such micro-batches per step


class EventLogger(Callback):
    """Writes events to a file as they happen, for the process that watches the phase.

    Args:
        path: a file of JSON lines, one per event, each with ``event``, ``step`` and ``time_s``.
        strategy: the strategy, which has the figures of saves and loads.
        first_step: offset that is added to the steps of this fit.
    """

    def __init__(self, path: Path, strategy: ElasticDeepSpeedStrategy, first_step: int) -> None:
        self.path, self.strategy, self.first_step = path, strategy, first_step
        self.noted_save = strategy.last_save
        self.seen: list[int] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the first step of this phase, and the figures of its load, if any."""
        load = self.strategy.last_load
        figures = {} if load is None else {"seconds": load.seconds, "bytes": load.bytes}
        self._note(trainer, "start", **figures)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Write a save of the previous step, and remember the samples of the batch."""
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
        """After an optimizer step, write the loss and the samples of the global batch."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        of_all_ranks = trainer.strategy.all_gather(torch.tensor(self.seen))
        self.seen.clear()
        loss = trainer.callback_metrics["train_loss"].item()
        self._note(trainer, "step", loss=loss, samples=digest(of_all_ranks))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the loss on text that is not used for training."""
        self._note(trainer, "validation", loss=trainer.callback_metrics["val_loss"].item())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the save of the last step."""
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
    """Return a hash of each sample."""
    tokens, _ = batch
    hashes = (hashlib.blake2b(sample.numpy().tobytes(), digest_size=8) for sample in tokens.cpu())
    return [int.from_bytes(value.digest(), "little", signed=True) for value in hashes]


def digest(samples: Tensor) -> str:
    """Return a digest of a set of samples that does not depend on their order or ranks."""
    ordered = samples.flatten().sort().values.cpu()
    return hashlib.blake2b(ordered.numpy().tobytes(), digest_size=8).hexdigest()


class OffsetLogger(TensorBoardLogger):
    """A TensorBoard logger whose steps begin at ``first_step``."""

    first_step = 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write at the step of the whole run."""
        super().log_metrics(metrics, None if step is None else self.first_step + step)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run_dir", type=Path, required=True, help="TensorBoard's files")
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder for them")
    parser.add_argument(
        "--event_log", type=Path, required=True, help="a file of JSON lines to write"
    )
    parser.add_argument("--devices", type=int, required=True, help="processes of this phase")
    parser.add_argument("--epochs", type=int, required=True, help="of the fit")
    parser.add_argument("--samples", type=int, required=True, help="per epoch")
    parser.add_argument("--global_batch_size", type=int, required=True, help="samples per step")
    parser.add_argument("--save_every", type=int, required=True, help="optimizer steps")
    parser.add_argument("--start_step", type=int, default=0, help="step of the last checkpoint")
    parser.add_argument("--weights_of", type=Path, help="checkpoint whose weights start a new run")
    return parser.parse_args()


def load_weights(model: GPT, checkpoint: Path) -> None:
    """Load only the weights of a checkpoint, with DeepSpeed's own tool."""
    model.configure_model()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(str(checkpoint)))


def main() -> None:
    """Train until the end, or until the process is killed."""
    arguments = parse_arguments()
    L.seed_everything(SEED)

    data = StdlibText(BATCH_SIZE, BLOCK_SIZE, arguments.samples)
    # Without dropout: another device count would draw other random numbers, which are equally good,
    # but the curves could not be compared to the last bits.
    model = GPT(data.vocab_size, BLOCK_SIZE, dropout=0.0)
    first_step = 0  # of a fit that counts from 0
    if arguments.weights_of is not None:
        load_weights(model, arguments.weights_of)
        first_step = arguments.start_step
    # purge_step: TensorBoard drops the steps that were lost when the run was stopped.
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
            EventLogger(arguments.event_log, strategy, first_step),
            ModelCheckpoint(
                dirpath=arguments.checkpoints,
                filename="{step}",
                monitor="step",
                mode="max",
                save_top_k=2,
                save_last="link",
                every_n_train_steps=arguments.save_every,
                enable_version_counter=False,  # one last.ckpt for all phases
            ),
        ],
        logger=logger,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    resumes = arguments.start_step and arguments.weights_of is None
    trainer.fit(model, data, ckpt_path="last" if resumes else None)


if __name__ == "__main__":
    main()
