"""Programs of ranks whose Trainer continues from a checkpoint of Lightning's own strategy."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import distributed
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.formats._restore_programs import wanted_of
from tests.formats._trainer_writers import DECAY, LitNet, Steps, Watch
from tests.support.checkpoints import compare_states
from tests.support.engines import Engine, EngineCase, batch
from tests.support.fits import quiet_trainer
from tests.support.foreign_checkpoints import Fixture
from tests.support.oracle import MORE, Dump, ReferenceComparison, compare_with_reference, dump
from tests.support.outcome import captured_log


@dataclass(frozen=True)
class Resumed:
    differing: dict[str, int]
    """Differences from the state of the writer, right after the load."""
    step: int
    callback: dict[str, Any]
    """The state that was restored to the callback."""
    mine: Any
    """The state that was restored to the module."""
    rates: list[float]
    """Learning rates of the first group, before each step."""
    log: str
    """The log messages of the load."""
    compare_with_reference: ReferenceComparison
    """Further training, compared with an engine that was given the state of the writer."""


class Kept(Watch):
    """Restores its state; has the state key of the writer's callback."""

    @property
    @override
    def state_key(self) -> str:
        return "Watch"

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given = state_dict


class Look(Callback):
    """Records the engine's state when training starts, and when it ends."""

    def __init__(self, setup: EngineCase) -> None:
        self.of = setup
        self.rates: list[float] = []
        self.before: Dump | None = None
        self.after: Dump | None = None
        self.step = -1

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.step = trainer.global_step
        self.before = dump(trainer.strategy.deepspeed_engine, self.of)  # type: ignore[attr-defined]

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.after = dump(trainer.strategy.deepspeed_engine, self.of)  # type: ignore[attr-defined]


class StepsFrom(Steps):
    """Batches from a given step on."""

    first = 0

    @override
    def __getitem__(self, step: int) -> Any:
        return super().__getitem__(step + self.first)

    @override
    def __len__(self) -> int:
        return self.steps


class ResumingModel(LitNet):
    """The writer's module with another seed, which restores its own state."""

    mine: Any = None
    first = 0
    """The step of the first batch."""

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        # Lightning continues in mid-epoch, but restarts the data of a plain loader.
        remaining = StepsFrom(self.setup_, 8)
        remaining.first = self.first
        return DataLoader(remaining, batch_size=None)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mine = checkpoint.get("mine")


def trainer_of(target: EngineCase, *callbacks: Callback, **options: Any) -> pl.Trainer:
    from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

    strategy = ElasticDeepSpeedStrategy(config=target.config())
    precision = "bf16-true" if target.precision == "bf16" else "32-true"
    own = {"precision": precision, "use_distributed_sampler": False, **options}
    return quiet_trainer(strategy, *callbacks, **own)


def resume(fixture: Fixture, target: EngineCase, path: str) -> Resumed | None:
    """Resume from a checkpoint for two more steps. Collective."""
    warnings.simplefilter("ignore")
    look, kept = Look(target), Kept()
    trainer = trainer_of(target, look, kept, max_steps=fixture.setup_steps + MORE)
    module = ResumingModel(target, seed=7, hidden=target.hidden)
    module.first = fixture.setup_steps
    with captured_log("lightning.pytorch.utilities.rank_zero") as messages:
        trainer.fit(module, ckpt_path=path)
    wanted = wanted_of(fixture, target, look.before) if look.before is not None else None
    ran = (module.losses, look.after)
    other = compare_with_reference(target, fixture.setup_steps, wanted, ran, train_as_fit)
    if wanted is None or look.before is None or other is None:
        return None
    return Resumed(
        differing=compare_states(wanted, look.before).differing,
        step=look.step,
        callback=kept.given,
        mine=module.mine,
        rates=look.rates,
        log="\n".join(messages),
        compare_with_reference=other,
    )


def train_as_fit(engine: Engine, setup: EngineCase, first: int, last: int) -> list[float]:
    """Train as the Trainer does with the writer's module."""
    losses = []
    for step in range(first, last):
        engine.module.bn.eval()
        x, y = batch(step, distributed.get_rank(), setup.world)
        # Lightning casts the floats of a batch.
        loss = (engine(x).float() - y.to(setup.dtype)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        for group in engine.optimizer.optimizer.param_groups:
            group["lr"] *= DECAY
    return losses


class ValidatingModel(ResumingModel):
    """Records its weights when it is validated."""

    weights: dict[str, torch.Tensor]

    def validation_step(self, *_: Any) -> None:
        """Compute nothing."""

    @override
    def on_validation_epoch_end(self) -> None:
        # During the step itself, the root module's parameters are in use.
        import deepspeed

        parameters = dict(self.named_parameters())
        cut = [p for p in parameters.values() if hasattr(p, "ds_id")]
        with deepspeed.zero.GatheredParameters(cut, enabled=bool(cut)):
            self.weights = {name: p.detach().clone() for name, p in parameters.items()}

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Steps(self.setup_, 1), batch_size=None)


def validate(fixture: Fixture, target: EngineCase) -> dict[str, torch.Tensor]:
    """Validate with a checkpoint; return the weights in forward. Collective."""
    warnings.simplefilter("ignore")
    trainer = trainer_of(target, inference_mode=False)
    module = ValidatingModel(target, seed=7, hidden=target.hidden)
    trainer.validate(module, ckpt_path=str(fixture.checkpoint), verbose=False)
    return module.weights
