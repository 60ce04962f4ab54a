"""SIGTERM ends a fit on all ranks, also the second fit of a process, just after a resume."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    LambdaCallback,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.support.fits import elastic
from tests.support.processes import PROMPT_TIMEOUT_S
from tests.support.ranks import Pools
from tests.trainer._recorded_data import IndexedSamples
from tests.trainer._recorded_runs import RecordingNet, recorded
from tests.trainer.test_trainer_reuse import LENGTH, loaders, make_trainer

pytestmark = pytest.mark.engine


HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")
"""Hooks before, between and after the collectives of a step."""

VALIDATED = "on_validation_batch_end"
"""A hook during a validation, or during the sanity check."""


def terminates_at(places: tuple[tuple[str, int], ...]) -> Callback:
    """Return a callback that sends SIGTERM to this rank in given hooks of given batches."""

    def terminate(hook: str, trainer: pl.Trainer, *arguments: Any) -> None:
        is_first = hook != VALIDATED or arguments[3] == 0  # of the batches of a validation
        if is_first and (hook, trainer.fit_loop.epoch_loop.total_batch_idx) in places:
            os.kill(os.getpid(), signal.SIGTERM)

    return LambdaCallback(**{hook: partial(terminate, hook) for hook in (*HOOKS, VALIDATED)})


class Terminates(Callback):
    """Sends SIGTERM when training starts, or after a step."""

    at_start, at_step = False, -1

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.at_start:
            os.kill(os.getpid(), signal.SIGTERM)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.at_step:
            os.kill(os.getpid(), signal.SIGTERM)


def end_of(
    trainer: pl.Trainer, net: RecordingNet, train: Any, val: Any = None, path: str | None = None
) -> str:
    """Fit; return how it ended."""
    try:
        trainer.fit(net, train, val, ckpt_path=path)
    except SIGTERMException:
        return f"SIGTERM at {trainer.global_step}"
    return f"completed at {trainer.global_step}"


def terminated_repeatedly(root: str, background: bool, new_trainer: bool) -> list[str]:
    """Terminate two of three fits in one process, and catch the error; return how each ended."""
    pl.seed_everything(3, workers=True, verbose=False)
    before = signal.getsignal(signal.SIGTERM)
    terminates = Terminates()
    ends: list[str] = []

    def make() -> Any:
        saves = ModelCheckpoint(
            root, every_n_train_steps=1, save_last="link", enable_version_counter=False
        )
        strategy = elastic(global_batch_size=12, async_save=background)
        return make_trainer(strategy, terminates, saves, max_epochs=1, limit_train_batches=4)

    net, trainer = RecordingNet(recorded(length=LENGTH)), make()
    for at_start, at_step, name in ((False, 2, ""), (True, -1, "last"), (False, -1, "last")):
        terminates.at_start, terminates.at_step = at_start, at_step
        trainer = make() if new_trainer and ends else trainer
        path = str(Path(root, "last.ckpt")) if name else None
        ends.append(end_of(trainer, net, loaders()[0], path=path))
        assert signal.getsignal(signal.SIGTERM) is before
    return ends


@pytest.mark.parametrize("new_trainer", [False, True], ids=["one Trainer", "Trainers"])
@pytest.mark.parametrize("background", [False, True], ids=["waiting", "behind"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_second_fit_can_be_terminated_and_continued(
    world: int, background: bool, new_trainer: bool, worlds: Pools, tmp_path: Path
) -> None:
    call = partial(terminated_repeatedly, str(tmp_path), background, new_trainer)
    for first, second, third in worlds.run(world, call):
        assert first == "SIGTERM at 2"
        assert second in {"SIGTERM at 2", "SIGTERM at 3"}
        assert third == "completed at 4"


Places: TypeAlias = tuple[tuple[tuple[str, int], ...], ...]
"""For each rank: hooks with the number of their batch."""


def terminated_at(root: str, places: Places, stage: int, validates: bool) -> tuple[str, list[str]]:
    """Fit two epochs of four batches on ranks that get SIGTERM.

    Returns:
        How the fit ended, and the checkpoints saved by ``OnExceptionCheckpoint``.
    """
    terminates = terminates_at(places[dist.get_rank()])
    strategy = elastic(stage=stage, global_batch_size=12)
    saves = OnExceptionCheckpoint(root, "last")
    more: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 2, "val_check_interval": 4}
    more |= {"num_sanity_val_steps": 2, "limit_val_batches": 3} if validates else {}
    trainer = make_trainer(strategy, terminates, saves, limit_train_batches=4, **more)
    train = DataLoader(IndexedSamples(LENGTH, 0.0), batch_size=6, shuffle=True)
    val = DataLoader(IndexedSamples(LENGTH, 0.0), batch_size=6) if validates else None
    net = RecordingNet(recorded(length=LENGTH))
    return end_of(trainer, net, train, val), sorted(path.name for path in Path(root).glob("*.ckpt"))


TOGETHER = [
    *(((((HOOKS[a], 2),), ((HOOKS[b], 2),)), "SIGTERM at 3") for a in range(3) for b in range(3)),
    (((), ((HOOKS[1], 2),)), "SIGTERM at 3"),
    ((((HOOKS[1], 2),), ()), "SIGTERM at 3"),
    ((((HOOKS[0], 2), (HOOKS[2], 2)), ((HOOKS[1], 2),)), "SIGTERM at 3"),
    # A SIGTERM in the last batch of an epoch is handled when the next epoch starts, if any.
    ((((HOOKS[1], 3),), ()), "SIGTERM at 4"),
    (((), ((HOOKS[2], 3),)), "SIGTERM at 4"),
    # After the last batch of the fit, ranks exchange signals once more.
    ((((HOOKS[1], 7),), ()), "SIGTERM at 8"),
    (((), ((HOOKS[2], 7),)), "SIGTERM at 8"),
    (((), ()), "completed at 8"),
]

VALIDATING = [
    # In the batch before a validation, during a validation, and during the sanity check.
    ((((HOOKS[1], 3),), ()), "SIGTERM at 4"),
    (((), ((HOOKS[2], 3),)), "SIGTERM at 4"),
    ((((VALIDATED, 3),), ()), "SIGTERM at 4"),
    ((((VALIDATED, 3),), ((HOOKS[2], 3),)), "SIGTERM at 4"),
    (((), ((VALIDATED, 7),)), "SIGTERM at 8"),
    (((), ((VALIDATED, -1),)), "SIGTERM at 0"),
    ((((VALIDATED, -1),), ((VALIDATED, -1),)), "SIGTERM at 0"),
]
"""``total_batch_idx`` before the first batch is -1."""


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("places", "end", "validates"),
    [
        *((places, end, False) for places, end in TOGETHER),
        *((places, end, True) for places, end in VALIDATING),
    ],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_sigterm_ends_all_ranks_after_the_same_batch(
    stage: int, places: Places, end: str, validates: bool, worlds: Pools, tmp_path: Path
) -> None:
    call = partial(terminated_at, str(tmp_path), places, stage, validates)
    ends = worlds.run(2, call, timeout_s=PROMPT_TIMEOUT_S)
    saved = [] if end == "completed at 8" else ["last.ckpt"]
    assert ends == [(end, saved)] * 2


def evaluated(places: Places) -> str:
    """Validate on ranks that get SIGTERM, without a previous fit; return how it ended."""
    terminates = terminates_at(places[dist.get_rank()])
    trainer = make_trainer(elastic(stage=1, global_batch_size=12), terminates, max_epochs=1)
    try:
        trainer.validate(
            RecordingNet(recorded(length=LENGTH)),
            DataLoader(IndexedSamples(LENGTH, 0.0), batch_size=6),
            verbose=False,
        )
    except SIGTERMException:
        return "SIGTERM"
    return "completed"


def test_sigterm_ends_an_evaluation_immediately(worlds: Pools) -> None:
    """Ranks exchange signals only before training batches."""
    places: Places = (((VALIDATED, -1),),) * 2
    ends = worlds.run(2, partial(evaluated, places), timeout_s=PROMPT_TIMEOUT_S)
    assert ends == ["SIGTERM"] * 2
