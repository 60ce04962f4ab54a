"""A Trainer's run whose state is known bit for bit, for any number of devices and ZeRO stage.

Gradients do not depend on the weights. They are integers that any number of ranks up to 4 divides,
so sums over ranks are exact in any order. One undisturbed run therefore gives the expected state of
every other run after each step.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from deepspeed import comm
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.fits import elastic, quiet_trainer
from tests.support.ranks import Pools
from tests.support.save_steps import KillPoint, SaveStepTracer
from tests.support.state_digests import bits_of, digest

SIZES = (30_000, 5, 50_001)
GLOBAL_BATCH, STEPS_PER_EPOCH = 12, 1000

Table = dict[int, dict[str, str]]
"""For each step, digests of the state after it."""


class Layer(nn.Module):
    """A weight whose gradient is the input."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


class DeterministicModel(pl.LightningModule):
    """A model whose state after each step is known in advance."""

    def configure_model(self) -> None:
        if hasattr(self, "layers"):
            return
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer(numel) for numel in SIZES)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(3))

    def training_step(self, _: object, __: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.global_step)
        self.seen += 1.5
        drawn = [torch.randint(1, 99, (n,), generator=generator) * 12.0 for n in SIZES]
        losses = [layer(g) for layer, g in zip(self.layers, drawn, strict=True)]
        return torch.stack(losses).sum()

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        groups: list[dict[str, Any]] = [
            {"params": [first]},
            {"params": others, "weight_decay": 0.5},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.97)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def train_dataloader(self) -> DataLoader[Any]:
        samples = TensorDataset(torch.zeros(GLOBAL_BATCH * STEPS_PER_EPOCH))
        return DataLoader(samples, batch_size=GLOBAL_BATCH // self.trainer.world_size)


def state_digests(trainer: pl.Trainer, module: nn.Module) -> dict[str, str]:
    """Return digests of the state of a run, gathered by DeepSpeed's own functions; collective."""
    wrapped: Any = trainer.strategy.model and trainer.strategy.model.optimizer
    if hasattr(wrapped, "_lazy_init_hp_params_optimizer_state"):
        # ZeRO-1/2 links its states once, which may be before there are any.
        wrapped._hp_optimizer_states_linked = False
        wrapped._lazy_init_hp_params_optimizer_state()
    found = {f"buffer/{n}": digest(bits_of(b)) for n, b in module.named_buffers()}
    for name, parameter in module.named_parameters():
        tensors = {
            "weight": safe_get_full_fp32_param(parameter),
            "exp_avg": safe_get_full_optimizer_state(parameter, "exp_avg"),
            "exp_avg_sq": safe_get_full_optimizer_state(parameter, "exp_avg_sq"),
        }
        found |= {f"{key}/{name}": digest(bits_of(t)) for key, t in tensors.items()}
    groups = trainer.optimizers[0].param_groups
    return {**found, "lr": repr([group["lr"] for group in groups])}


@dataclass(frozen=True)
class Training:
    root: str
    stage: int = 2
    steps: int = 3
    """Number of steps to train."""
    ckpt_path: str | None = None
    kill_point: KillPoint | None = None
    strategy: Mapping[str, Any] = field(default_factory=dict)
    """Options of the strategy, such as the mode of saves."""
    saves: bool = True
    recorded: bool = False
    """Return the state after each step, instead of only at the start."""

    @property
    def over(self) -> Path:
        """The folder in which one checkpoint is overwritten after each step."""
        return Path(self.root) / "over"

    @property
    def top(self) -> Path:
        """The folder with the newest two checkpoints and a link to the last."""
        return Path(self.root) / "top"


class SaveEachStep(Callback):
    def __init__(self, training: Training) -> None:
        self.training = training
        self.held: Table = {}
        self.tracer: SaveStepTracer | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step:
            self.held[trainer.global_step] = state_digests(trainer, pl_module)
        kill_point, root = self.training.kill_point, Path(self.training.root)
        if kill_point is not None:
            self.tracer = SaveStepTracer(kill_point, root, comm.get_rank(), comm.get_world_size())
            self.tracer.watch()
            trainer.strategy.barrier()
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + self.training.steps
        if comm.get_rank() == 0:
            (root / "started").write_text(json.dumps(self.held))

    def on_train_batch_start(self, *_: Any) -> None:
        """Record the newest published checkpoints: a later kill must not lose any of them."""
        if comm.get_rank() == 0 and self.training.saves:
            record_newest_steps(self.training)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if self.training.recorded:
            self.held[trainer.global_step] = state_digests(trainer, pl_module)
        if self.training.saves:
            trainer.save_checkpoint(self.training.over / "same.ckpt")


class LinkedModelCheckpoint(ModelCheckpoint):
    """Links to its last save, which may not be published yet."""

    def __init__(self, ledger: SaveEachStep, **options: Any) -> None:
        super().__init__(**options)
        self.ledger = ledger

    def _save_last_checkpoint(self, *args: Any) -> None:
        super()._save_last_checkpoint(*args)
        if self.ledger.tracer is not None:
            self.ledger.tracer.reach("after the link is asked for")


def published(folder: Path) -> dict[int, Path]:
    """Return the published checkpoints of a folder, by step."""
    found = {}
    for manifest in folder.glob("*/manifest.json"):
        path = manifest.parent
        if not path.name.startswith(".") and not path.is_symlink():
            found[int(json.loads(manifest.read_text())["progress"]["global_steps"])] = path
    return found


def record_newest_steps(training: Training) -> None:
    """Write the newest step of each folder to a file, atomically."""
    floor = {f.name: max(published(f), default=0) for f in (training.over, training.top)}
    path = Path(training.root) / "floor"
    path.with_suffix(".new").write_text(json.dumps(floor))
    path.with_suffix(".new").replace(path)


def train(training: Training) -> Table:
    """Train; record the state at the start or after each step."""
    warnings.simplefilter("ignore")
    Path(training.root).mkdir(exist_ok=True)
    ledger = SaveEachStep(training)
    callbacks: list[Callback] = [ledger]
    if training.saves:
        checkpoints = LinkedModelCheckpoint(
            ledger,
            dirpath=training.top,
            filename="{step}",
            monitor="step",
            mode="max",
            save_top_k=2,
            save_last="link",
            every_n_train_steps=1,
            enable_version_counter=False,
        )
        callbacks.append(checkpoints)
    strategy = elastic(stage=training.stage, **training.strategy)
    trainer = quiet_trainer(strategy, *callbacks, max_epochs=1)
    trainer.fit(DeterministicModel(), ckpt_path=training.ckpt_path)
    return ledger.held


def undisturbed(pools: Pools, root: Path, steps: int) -> Table:
    """Return the state after each step of a run without saves."""
    training = Training(str(root), stage=1, steps=steps, saves=False, recorded=True)
    return pools.run(1, partial(train, training))[0]
