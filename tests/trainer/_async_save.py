"""Trainers that save in the background, with writers that tests hold and let fail."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed import comm
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from typing_extensions import override

from lightning_elastic_zero.checkpoint import manager
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy
from tests.support.fits import Data, RegressionNet, elastic, quiet_trainer
from tests.support.processes import PROMPT_TIMEOUT_S

HELD_S = PROMPT_TIMEOUT_S


def in_background() -> bool:
    """Return whether this runs in a writer's thread."""
    return threading.current_thread() is not threading.main_thread()


@dataclass
class Gate:
    """Part of a callback's state: pauses the writer that pickles it until a file exists."""

    path: str
    fails_on: int | None = None
    """The rank whose writer fails here."""

    def __reduce__(self) -> tuple[Callable[..., Gate], tuple[str, int | None]]:
        """Wait or fail, if this is a writer's thread."""
        end = time.monotonic() + HELD_S
        while in_background() and not Path(self.path).exists() and time.monotonic() < end:
            time.sleep(0.01)
        if in_background() and self.fails_on == comm.get_rank():
            raise OSError(5, "the disk is broken")
        return Gate, (self.path, self.fails_on)


StepActions = dict[int, Callable[[pl.Trainer], None]]


class StepActor(Callback):
    """Acts after given steps (0: before training, -1: at its end), and holds the gate."""

    def __init__(self, gate: Gate | None, actions: StepActions) -> None:
        self.gate, self.actions = gate, actions
        self.tensor, self.steps = torch.zeros(5), [0]
        self.passes_on: tuple[type[BaseException], ...] = ()
        self.errors: dict[int, str] = {}
        self.causes: dict[int, list[str]] = {}
        self.trainer: pl.Trainer

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the gate, and a value that every step changes."""
        return {"gate": self.gate, "tensor": self.tensor, "steps": self.steps}

    def do(self, step: int, trainer: pl.Trainer) -> None:
        """Perform an action, and keep its error."""
        if step not in self.actions:
            return
        try:
            self.actions[step](trainer)
        except self.passes_on:
            raise
        except Exception as error:  # noqa: BLE001 - it is what tests look at
            self.errors[step] = f"{type(error).__name__}: {error}"
            self.causes[step] = causes_of(error)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self.tensor += 1
        self.steps.append(trainer.global_step)
        self.do(trainer.global_step, trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.do(-1, trainer)


def causes_of(error: BaseException) -> list[str]:
    """Return the classes of an error's causes."""
    found = []
    cause = error.__cause__
    while cause is not None:
        found.append(type(cause).__name__)
        cause = cause.__cause__
    return found


@dataclass
class AsyncSaveSpec:
    """One fit of three epochs of two steps."""

    root: str
    stage: int = 2
    async_save: bool = True
    precision: Any = "32-true"
    epochs: int = 3
    checkpoint: dict[str, Any] | None = None
    gated: bool = False
    fails_on: int | None = None
    max_snapshot_bytes: int | None = None
    accumulate: int = 1
    actions: StepActions = field(default_factory=dict)
    net: type[RegressionNet] = RegressionNet

    @property
    def gate(self) -> Path:
        """The file for which the writer waits."""
        return Path(self.root) / "open"

    def path(self, name: str) -> Path:
        return Path(self.root) / f"{name}.ckpt"

    def saves(self, name: str) -> Callable[[pl.Trainer], None]:
        """Return an action that saves under a name."""
        return lambda trainer: trainer.save_checkpoint(self.path(name))

    def fit(
        self,
        actions: StepActions | None = None,
        *more: Callback,
        raises: tuple[type[BaseException], ...] = (),
    ) -> StepActor:
        """Train with actions, until one of these errors if any; return what has acted."""
        trainer, net, data, actor = self.make()
        actor.actions = {**self.actions, **(actions or {})}
        actor.passes_on, actor.trainer = raises, trainer
        trainer.callbacks.extend(more)  # type: ignore[attr-defined]
        try:
            trainer.fit(net, data)
        except raises:
            return actor
        assert not raises, "the fit went on to its end"
        return actor

    def make(self) -> tuple[pl.Trainer, RegressionNet, Data, StepActor]:
        warnings.simplefilter("ignore")
        Path(self.root).mkdir(exist_ok=True, parents=True)
        gate = Gate(str(self.gate), self.fails_on) if self.gated else None
        director = StepActor(gate, self.actions)
        callbacks: list[Callback] = [director]
        if self.checkpoint is not None:
            folder = str(Path(self.root) / "kept")
            kept = {"enable_version_counter": False, **self.checkpoint}
            callbacks.append(ModelCheckpoint(dirpath=folder, **kept))
        strategy = elastic(
            stage=self.stage,
            async_save=self.async_save,
            max_snapshot_bytes=self.max_snapshot_bytes,
            allow_pickle=True,
            **self.net.strategy,
        )
        trainer = quiet_trainer(
            strategy,
            *callbacks,
            precision=self.precision,
            max_epochs=self.epochs,
            accumulate_grad_batches=self.accumulate,
        )
        return trainer, self.net(), Data(), director


def actor_of(trainer: pl.Trainer) -> StepActor:
    (actor,) = (c for c in trainer.callbacks if isinstance(c, StepActor))  # type: ignore[attr-defined]
    return actor


def elastic_strategy_of(trainer: pl.Trainer) -> ElasticDeepSpeedStrategy:
    assert isinstance(trainer.strategy, ElasticDeepSpeedStrategy)
    return trainer.strategy


def open_later(gate: Path, seconds: float) -> None:
    """Let the writer continue after a while, on one rank for all."""
    if comm.get_rank() == 0:
        threading.Timer(seconds, gate.touch).start()


def is_published(path: Path) -> bool:
    return (path / "manifest.json").is_file()


def kept(run: AsyncSaveSpec) -> dict[str, str]:
    """Return the entries of ModelCheckpoint's folder with their targets; "" means no checkpoint."""
    found = sorted((Path(run.root) / "kept").iterdir())
    return {p.name: p.resolve().name if is_published(p) else "" for p in found if p.name[0] != "."}


def save_other(run: AsyncSaveSpec, trainer: pl.Trainer) -> None:
    """Publish one unknown to ModelCheckpoint: then none of its own is the last good one."""
    run.gate.touch()
    trainer.save_checkpoint(str(Path(run.root) / "kept" / "other.ckpt"))
    elastic_strategy_of(trainer).wait_for_save()
    trainer.strategy.barrier()
    run.gate.unlink(missing_ok=True)


def publish_held(run: AsyncSaveSpec, trainer: pl.Trainer) -> None:
    """Let the writer publish the save in flight."""
    trainer.strategy.barrier()
    run.gate.touch()
    elastic_strategy_of(trainer).wait_for_save()


OTHER = {"other.ckpt": "other.ckpt"}


def shorten_drain_timeout(patch: pytest.MonkeyPatch, patience_s: float, abandon_s: float) -> None:
    """Make a run that has ended abandon its save sooner."""
    patch.setattr(manager, "DRAIN_TIMEOUT_S", patience_s)
    patch.setattr(manager, "_CANCEL_TIMEOUT_S", abandon_s)


def wait_for_writers() -> None:
    """Wait on all ranks until the threads of abandoned writers have ended."""
    end = time.monotonic() + PROMPT_TIMEOUT_S
    while any(thread.name.startswith("elastic-zero saves") for thread in threading.enumerate()):
        assert time.monotonic() < end, "a writer does not end"
        time.sleep(0.01)
    comm.barrier()


def step_of(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "manifest.json").read_text())["progress"]["global_steps"])
