"""Trainers that save in the background, with writers that tests can pause and make fail."""

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

from lightning_elastic_zero.checkpoint import background, manager
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy
from tests.support.fits import Data, RegressionNet, elastic, quiet_trainer
from tests.support.processes import PROMPT_TIMEOUT_S

HELD_S = PROMPT_TIMEOUT_S


def in_background() -> bool:
    """Return whether the caller runs in a writer's thread."""
    return threading.current_thread() is not threading.main_thread()


@dataclass
class Gate:
    """An object in a callback's state that pauses the writer, when pickled, until a file exists."""

    path: str
    fails_on: int | None = None
    """The rank whose writer raises an error."""

    def __reduce__(self) -> tuple[Callable[..., Gate], tuple[str, int | None]]:
        """Wait or fail in a writer's thread."""
        end = time.monotonic() + HELD_S
        while in_background() and not Path(self.path).exists() and time.monotonic() < end:
            time.sleep(0.01)
        if in_background() and self.fails_on == comm.get_rank():
            raise OSError(5, "the disk is broken")
        return Gate, (self.path, self.fails_on)


StepActions = dict[int, Callable[[pl.Trainer], None]]


class StepActor(Callback):
    """Performs actions after given steps (-1: at the end of training); its state has the gate."""

    def __init__(self, gate: Gate | None, actions: StepActions) -> None:
        self.gate, self.actions = gate, actions
        self.tensor, self.steps = torch.zeros(5), [0]
        self.passes_on: tuple[type[BaseException], ...] = ()
        self.errors: dict[int, str] = {}
        self.causes: dict[int, list[str]] = {}
        self.trainer: pl.Trainer

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the gate, and values that every step changes."""
        return {"gate": self.gate, "tensor": self.tensor, "steps": self.steps}

    def do(self, step: int, trainer: pl.Trainer) -> None:
        """Perform the action of a step, and record its error."""
        if step not in self.actions:
            return
        try:
            self.actions[step](trainer)
        except self.passes_on:
            raise
        except Exception as error:  # noqa: BLE001 - tests check it
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
    """A fit; by default three epochs of two steps."""

    root: str
    stage: int = 2
    async_save: bool = True
    precision: Any = "32-true"
    epochs: int = 3
    checkpoint: dict[str, Any] | None = None
    gated: bool = False
    fails_on: int | None = None
    accumulate: int = 1
    actions: StepActions = field(default_factory=dict)
    net: type[RegressionNet] = RegressionNet

    @property
    def gate(self) -> Path:
        """The file that the writer waits for."""
        return Path(self.root) / "open"

    def path(self, name: str) -> Path:
        return Path(self.root) / f"{name}.ckpt"

    def saves(self, name: str) -> Callable[[pl.Trainer], None]:
        """Return an action that saves to ``path(name)``."""
        return lambda trainer: trainer.save_checkpoint(self.path(name))

    def fit(
        self,
        actions: StepActions | None = None,
        *more: Callback,
        raises: tuple[type[BaseException], ...] = (),
    ) -> StepActor:
        """Train with actions until one of the errors, if any; return the ``StepActor``."""
        trainer, net, data, actor = self.make()
        actor.actions = {**self.actions, **(actions or {})}
        actor.passes_on, actor.trainer = raises, trainer
        trainer.callbacks.extend(more)  # type: ignore[attr-defined]
        try:
            trainer.fit(net, data)
        except raises:
            return actor
        assert not raises, "the fit ended without an error"
        return actor

    def make(self) -> tuple[pl.Trainer, RegressionNet, Data, StepActor]:
        warnings.simplefilter("ignore")
        Path(self.root).mkdir(exist_ok=True, parents=True)
        gate = Gate(str(self.gate), self.fails_on) if self.gated else None
        actor = StepActor(gate, self.actions)
        callbacks: list[Callback] = [actor]
        if self.checkpoint is not None:
            folder = str(Path(self.root) / "kept")
            options = {"enable_version_counter": False, **self.checkpoint}
            callbacks.append(ModelCheckpoint(dirpath=folder, **options))
        strategy = elastic(
            stage=self.stage,
            async_save=self.async_save,
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
        return trainer, self.net(), Data(), actor


def actor_of(trainer: pl.Trainer) -> StepActor:
    (actor,) = (c for c in trainer.callbacks if isinstance(c, StepActor))  # type: ignore[attr-defined]
    return actor


def elastic_strategy_of(trainer: pl.Trainer) -> ElasticDeepSpeedStrategy:
    assert isinstance(trainer.strategy, ElasticDeepSpeedStrategy)
    return trainer.strategy


def open_later(gate: Path, seconds: float) -> None:
    """Let all writers continue after a time; one rank creates the file."""
    if comm.get_rank() == 0:
        threading.Timer(seconds, gate.touch).start()


def is_published(path: Path) -> bool:
    return (path / "manifest.json").is_file()


def kept(run: AsyncSaveSpec) -> dict[str, str]:
    """Return the entries of ModelCheckpoint's folder, with their targets ("" if incomplete)."""
    found = sorted((Path(run.root) / "kept").iterdir())
    return {p.name: p.resolve().name if is_published(p) else "" for p in found if p.name[0] != "."}


def save_other(run: AsyncSaveSpec, trainer: pl.Trainer) -> None:
    """Publish a checkpoint unknown to ModelCheckpoint, so that the last good one is not its own."""
    run.gate.touch()
    trainer.save_checkpoint(str(Path(run.root) / "kept" / "other.ckpt"))
    elastic_strategy_of(trainer).wait_for_save()
    trainer.strategy.barrier()
    run.gate.unlink(missing_ok=True)


def publish_held(run: AsyncSaveSpec, trainer: pl.Trainer) -> None:
    """Let the paused writer publish the save in flight."""
    trainer.strategy.barrier()
    run.gate.touch()
    elastic_strategy_of(trainer).wait_for_save()


OTHER = {"other.ckpt": "other.ckpt"}


def shorten_drain_timeout(patch: pytest.MonkeyPatch, patience_s: float, abandon_s: float) -> None:
    """Make an ended run abandon its save sooner."""
    patch.setattr(manager, "DRAIN_TIMEOUT_S", patience_s)
    patch.setattr(background, "_CANCEL_TIMEOUT_S", abandon_s)


def wait_for_writers() -> None:
    """Wait on all ranks until the threads of abandoned writers have ended."""
    end = time.monotonic() + PROMPT_TIMEOUT_S
    while any(thread.name.startswith("elastic-zero saves") for thread in threading.enumerate()):
        assert time.monotonic() < end, "a writer did not end"
        time.sleep(0.01)
    comm.barrier()


def step_of(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "manifest.json").read_text())["progress"]["global_steps"])
