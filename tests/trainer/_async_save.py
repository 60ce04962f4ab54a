"""Trainers that save in the background, with writers that tests can pause and make fail."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed import comm
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_elastic_zero.checkpoint import background, manager
from tests.support.fits import FitCase, elastic_strategy_of
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

    def __init__(self, run: FitCase, *, gated: bool = False, fails_on: int | None = None) -> None:
        Path(run.root).mkdir(exist_ok=True, parents=True)
        self.gate = Gate(str(gate_of(run)), fails_on) if gated else None
        self.actions: StepActions = {}
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


def async_case(
    root: Path,
    stage: int = 2,
    *,
    async_save: bool = True,
    gated: bool = False,
    fails_on: int | None = None,
    checkpoint: dict[str, Any] | None = None,
    **changes: Any,
) -> FitCase:
    """Return a fit of three epochs of two steps, which a ``StepActor`` observes.

    Args:
        root: folder of its saves; ``ModelCheckpoint`` has the folder ``kept`` in it.
        stage: of ZeRO.
        async_save: whether it saves in the background.
        gated: writers wait until the file ``gate_of`` exists.
        fails_on: the rank whose writer then fails.
        checkpoint: options of ``ModelCheckpoint``.
        changes: other fields.
    """
    strategy = {"async_save": async_save, "allow_pickle": True, **changes.pop("strategy", {})}
    if checkpoint is not None:
        checkpoint = {"dirpath": str(root / "kept"), **checkpoint}
    watch = partial(StepActor, gated=gated, fails_on=fails_on)
    fields = {"epochs": 3, "watch": watch, "strategy": strategy, "checkpoint": checkpoint}
    return FitCase(str(root), stage, **{**fields, **changes})


def gate_of(run: FitCase) -> Path:
    """Return the file that a writer waits for."""
    return Path(run.root) / "open"


def save_to(run: FitCase, name: str) -> Callable[[pl.Trainer], None]:
    """Return an action that saves to ``run.path(name)``."""
    return lambda trainer: trainer.save_checkpoint(run.path(name))


def fit_with(
    run: FitCase,
    actions: StepActions | None = None,
    *first: Callback,
    raises: tuple[type[BaseException], ...] = (),
) -> StepActor:
    """Train with actions until one of the errors, if any; return the ``StepActor``."""
    trainer, net, data, actor = run.make(*first)
    actor.actions, actor.passes_on, actor.trainer = actions or {}, raises, trainer
    try:
        trainer.fit(net, **data)
    except raises:
        return actor
    assert not raises, "the fit ended without an error"
    return actor


def actor_of(trainer: pl.Trainer) -> StepActor:
    (actor,) = (c for c in trainer.callbacks if isinstance(c, StepActor))  # type: ignore[attr-defined]
    return actor


def open_later(gate: Path, seconds: float) -> None:
    """Let all writers continue after a time; one rank creates the file."""
    if comm.get_rank() == 0:
        threading.Timer(seconds, gate.touch).start()


def is_published(path: Path) -> bool:
    return (path / "manifest.json").is_file()


def kept(run: FitCase) -> dict[str, str]:
    """Return the entries of ModelCheckpoint's folder, with their targets ("" if incomplete)."""
    found = sorted((Path(run.root) / "kept").iterdir())
    return {p.name: p.resolve().name if is_published(p) else "" for p in found if p.name[0] != "."}


def save_other(run: FitCase, trainer: pl.Trainer) -> None:
    """Publish a checkpoint unknown to ModelCheckpoint, so that the last good one is not its own."""
    gate_of(run).touch()
    trainer.save_checkpoint(str(Path(run.root) / "kept" / "other.ckpt"))
    elastic_strategy_of(trainer).wait_for_save()
    trainer.strategy.barrier()
    gate_of(run).unlink(missing_ok=True)


def publish_held(run: FitCase, trainer: pl.Trainer) -> None:
    """Let the paused writer publish the save in flight."""
    trainer.strategy.barrier()
    gate_of(run).touch()
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
