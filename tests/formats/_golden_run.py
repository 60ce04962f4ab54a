"""The run of the golden checkpoints, and its state according to DeepSpeed and torch."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from deepspeed import comm, zero
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from lightning.pytorch.callbacks import Callback
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

SAMPLES, GLOBAL_BATCH, WIDTH = 42, 6, 5
STEPS = 9
"""Optimizer steps before the save, in the middle of the second epoch: an epoch has seven."""

EPOCHS = 2
CALLBACK = {"epochs": (1, 2.5, "three"), "tensor": torch.arange(3)}
"""State of a user's callback."""

Held = dict[str, Any]
"""``kind/...`` to a tensor, or to the ``repr`` of anything else."""


@dataclass(frozen=True)
class GoldenRun:
    stage: int
    world: int
    precision: str
    """``32-true`` or ``bf16-true``."""
    save: str = ""
    """Folder for the checkpoint and the state at the save; empty: save nothing."""
    load: str = ""
    """The checkpoint to resume from."""
    seed: int = 3
    rate: float = 0.01


@dataclass(frozen=True)
class Resumed:
    held: Held
    samples: list[int]
    """Samples of all ranks until the end of the epoch, sorted."""
    callback: dict[str, Any]


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    @override
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), index


class GoldenNet(pl.LightningModule):
    def __init__(self, run: GoldenRun) -> None:
        super().__init__()
        self.of = run
        self.seen: list[int] = []
        self.epoch_of_seen = -1

    @override
    def configure_model(self) -> None:
        if hasattr(self, "first"):
            return
        torch.manual_seed(self.of.seed)
        self.first = nn.Linear(WIDTH, 7)
        self.frozen = nn.Linear(7, 3).requires_grad_(requires_grad=False)
        self.scale = nn.Parameter(torch.randn(3))
        self.last = nn.Linear(3, 1)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(7))

    @override
    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, index = batch
        if self.epoch_of_seen != self.current_epoch:
            self.epoch_of_seen, self.seen = self.current_epoch, []
        self.seen += index.tolist()
        x = x.to(self.first.weight.dtype)
        hidden = self.first(x)
        self.mean.lerp_(hidden.detach().mean(0), 0.1)
        dropped = nn.functional.dropout(torch.tanh(hidden), 0.2)
        out = self.last(torch.tanh(self.frozen(dropped)) * self.scale)
        return torch.as_tensor((out.squeeze(1) - x.sum(1)).float().square().mean())

    @override
    def configure_optimizers(self) -> Any:
        rate = self.of.rate
        # By name: in ZeRO-3 every parameter is one-dimensional here.
        trained = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        matrices = [p for name, p in trained if name.endswith("weight")]
        vectors = [p for name, p in trained if not name.endswith("weight")]
        groups = [
            {"params": matrices, "lr": rate, "weight_decay": 0.1},
            {"params": vectors, "lr": rate / 2, "weight_decay": 0.0, "betas": (0.8, 0.95)},
        ]
        optimizer = torch.optim.AdamW(groups)
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "interval": "step"}}

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(), batch_size=1, shuffle=True)


class Witness(Callback):  # The golden checkpoints contain the name of this class.
    def __init__(self, run: GoldenRun) -> None:
        self.of = run
        self.kept = CALLBACK if run.save else {}
        self.held: Held = {}

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.kept

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if self.of.load and not self.held:
            self.held = held_by(trainer, pl_module)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if not self.of.save or self.held or trainer.global_step < STEPS:
            return
        folder = Path(self.of.save)
        self.held = held_by(trainer, pl_module)
        self.held["samples/seen"] = torch.tensor(gather_samples(pl_module.seen))
        trainer.save_checkpoint(folder / "checkpoint")
        if comm.get_rank() == 0:
            torch.save(self.held, folder / "truth.pt")
        trainer.should_stop = True


def gather_samples(samples: list[int]) -> list[int]:
    parts: list[Any] = [None] * comm.get_world_size()
    distributed.all_gather_object(parts, samples)
    return sorted(index for part in parts for index in part)


def held_by(trainer: pl.Trainer, net: GoldenNet) -> Held:
    engine: Any = trainer.strategy.deepspeed_engine  # type: ignore[attr-defined]
    held: Held = {}
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed may have linked parameters to their states before there were any.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in net.named_parameters():
        with zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            kind = "weight" if parameter.requires_grad else "frozen"
            held[f"{kind}/{name}"] = parameter.detach().clone()
        if parameter.requires_grad:
            held[f"master/{name}"] = safe_get_full_fp32_param(parameter).clone()
            for state in ("exp_avg", "exp_avg_sq"):
                value = safe_get_full_optimizer_state(parameter, state)
                held[f"{state}/{name}"] = value.detach().clone()
    inner = engine.optimizer.optimizer
    held["scalar/step"] = repr(sorted({float(s["step"]) for s in inner.state.values() if s}))
    for index, group in enumerate(inner.param_groups):
        for key in sorted(group.keys() - {"params"}):
            held[f"group/{index}/{key}"] = repr(group[key])
    counters = {
        "engine_steps": engine.global_steps,
        "engine_samples": engine.global_samples,
        "trainer_steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
    }
    held |= {f"counter/{name}": repr(value) for name, value in counters.items()}
    own: list[Any] = [None] * comm.get_world_size()
    distributed.all_gather_object(own, (net.mean.detach().clone(), torch.get_rng_state()))
    for rank, (mean, state) in enumerate(own):
        held[f"buffer/{rank}/mean"] = mean
        held[f"random/{rank}/torch"] = state
    return held


def fit(run: GoldenRun) -> Resumed:
    from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

    warnings.simplefilter("ignore")
    pl.seed_everything(run.seed, workers=True, verbose=False)
    torch.manual_seed(run.seed + comm.get_rank() if comm.is_initialized() else run.seed)
    net, witness = GoldenNet(run), Witness(run)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=run.world,
        strategy=ElasticDeepSpeedStrategy(
            stage=run.stage,
            global_batch_size=GLOBAL_BATCH,
            reduce_bucket_size=100,
            allgather_bucket_size=100,
        ),
        precision=run.precision,  # type: ignore[arg-type]
        max_epochs=EPOCHS,
        callbacks=[witness],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, ckpt_path=run.load or None)
    return Resumed(witness.held, gather_samples(net.seen), witness.kept)
