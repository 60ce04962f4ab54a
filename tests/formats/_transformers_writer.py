"""Programs of ranks that write a checkpoint with Transformers' Trainer.

Nothing here may import ``lightning_elastic_zero``. Only one row needs Transformers.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from accelerate import PartialState
from torch.utils.data import Dataset, SequentialSampler

from tests.formats._deepspeed_writers import MORE, keep, wait_for_gathers
from tests.formats._fixture_table import FixtureRow
from tests.support.engines import GLOBAL_BATCH, Net, batch
from tests.support.oracle import dump


class Samples(Dataset[Any]):
    def __init__(self, steps: int) -> None:
        batches = [batch(step, 0, 1) for step in range(steps)]
        self.samples = [{"x": x, "y": y} for xs, ys in batches for x, y in zip(xs, ys, strict=True)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.samples[index]


class LossNet(Net):
    def train(self, mode: bool = True) -> LossNet:
        """Train all modules except BatchNorm."""
        super().train(mode)
        self.bn.eval()
        return self

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        loss = (super().forward(x).float() - y).pow(2).mean()
        return {"loss": loss}


class InOrder(transformers.Trainer):
    """A Trainer that does not shuffle."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class SaveWhenDue(transformers.TrainerCallback):
    """Records the engine's state when it is saved."""

    def __init__(self, row: FixtureRow, folder: str) -> None:
        self.row, self.folder = row, folder
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the state and request a save at the row's step only."""
        if state.global_step == self.row.steps:
            keep(dump(self.trainer.model_wrapped, self.row.setup), self.folder, "truth")
        control.should_save = state.global_step == self.row.steps


def train(row: FixtureRow, folder: str) -> None:
    """Train with a Trainer that saves once and creates its own optimizer. Collective."""
    wait_for_gathers()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    arguments = transformers.TrainingArguments(
        output_dir=f"{folder}/checkpoint",
        deepspeed=row.setup.config(),
        per_device_train_batch_size=GLOBAL_BATCH // row.setup.world,
        max_steps=row.steps + MORE,
        save_steps=row.steps,
        accelerator_config={"use_configured_state": True},
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        learning_rate=1e-3,
        weight_decay=0.1,
        disable_tqdm=True,
        report_to=[],
    )
    saver = SaveWhenDue(row, folder)
    trainer = InOrder(
        model=LossNet(0, hidden=row.setup.hidden),
        args=arguments,
        train_dataset=Samples(row.steps + MORE + 1),
        callbacks=[saver],
    )
    saver.trainer = trainer
    trainer.train()
