"""A preempted run saves, ends, and continues on other machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from deepspeed import comm
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from lightning_elastic_zero import ElasticDeepSpeedStrategy
from lightning_elastic_zero.trainer.preemption import EXIT_CODE, NAME, PreemptionCheckpoint
from tests.support.fits import FitCase, fit
from tests.support.ranks import Pools
from tests.trainer._recorded_runs import from_step, recorded

pytestmark = [pytest.mark.engine]

STEPS = 10
GRACE_S = 30.0
"""Time between the notice and the kill, as with Kubernetes, Google Cloud and torchrun's agent."""

VALIDATED = 4
"""Batches of a rank in a validation."""


def is_inside_window_after(trainer: pl.Trainer, step: int) -> bool:
    """Whether the first micro-batch of the accumulation window after a step has ended."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    done = progress.current.processed
    return trainer.global_step == step and done % trainer.accumulate_grad_batches == 1


class SendsSignals(Callback):
    """Sends signals to this rank inside the window after a step, or during the following saves."""

    def __init__(self, names: tuple[str, ...], step: int, in_save: bool) -> None:
        self.names, self.step, self.in_save = names, step, in_save

    def _send(self) -> None:
        for name in self.names:
            os.kill(os.getpid(), signal.Signals[name])

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if is_inside_window_after(trainer, self.step) and not self.in_save:
            self._send()

    @override
    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step >= self.step and self.in_save:
            self._send()  # Again during the preempted save.


@dataclass(frozen=True)
class Preempted:
    code: int
    step: int
    seconds: float
    """Time from the notice to the end of the run; 0 on ranks without their own notice."""
    handlers_kept: bool


SAVES = {
    "every_n_train_steps": 2,
    "save_top_k": -1,
    "save_last": "link",
    "save_on_train_epoch_end": False,
}
"""Options of the ``ModelCheckpoint``."""


class NotifiesInValidation(Callback):
    """Creates the notice file during the validation after a step, and waits until it is read."""

    def __init__(self, file: Path, step: int, preemption: PreemptionCheckpoint | None) -> None:
        self.file, self.step, self.preemption = file, step, preemption
        self.validated = 0
        """Number of batches of this validation."""

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != self.step:
            return
        self.validated += 1
        if self.preemption is not None and self.validated == 2:
            self.file.touch()
            deadline = time.monotonic() + GRACE_S
            while not self.preemption._heard and time.monotonic() < deadline:
                time.sleep(0.05)


def fit_until_it_ends(run: FitCase, *first: Callback) -> Preempted:
    """Fit with callbacks, one of which is a PreemptionCheckpoint."""
    trainer, net, data, _ = run.make(*first)
    (preemption,) = (each for each in first if isinstance(each, PreemptionCheckpoint))
    signals = [signal.SIGTERM, signal.SIGUSR1]
    before, code = [*map(signal.getsignal, signals)], -1
    try:
        trainer.fit(net, **data)
    except SystemExit as error:
        code = int(str(error.code))
    seconds = time.monotonic() - preemption._heard_at if preemption._heard else 0.0
    handlers_kept = [*map(signal.getsignal, signals)] == before
    return Preempted(code, trainer.global_step, seconds, handlers_kept)


def fit_until_preempted_in_validation(run: FitCase) -> tuple[Preempted, int]:
    """Fit; the last rank gets a notice during the validation after step 5."""
    file = Path(run.root) / "notice"
    notified = comm.get_rank() == comm.get_world_size() - 1
    preemption = PreemptionCheckpoint(str(file) if notified else None)
    notifies = NotifiesInValidation(file, 5, preemption if notified else None)
    return fit_until_it_ends(run, notifies, preemption), notifies.validated


def fit_until_preempted(
    run: FitCase, names: tuple[str, ...] = (), in_save: bool = False
) -> Preempted:
    """Fit; the last rank gets a notice inside the window after step 3, by a file or signals."""
    notified = comm.get_rank() == comm.get_world_size() - 1
    file = Path(run.root) / "notice"

    def notify(trainer: pl.Trainer, *_: Any) -> None:
        if notified and not names and is_inside_window_after(trainer, 3):
            file.touch()
        if trainer.global_step >= 3:
            time.sleep(0.4)  # Time for the ranks' threads to agree, as in runs of realistic size.

    sends = [SendsSignals(names, 3, in_save)] if notified and names else []
    preemption = PreemptionCheckpoint(str(file) if notified else None)
    notifies = callbacks.LambdaCallback(on_train_batch_end=notify)
    return fit_until_it_ends(run, *sends, notifies, preemption)


@pytest.mark.parametrize(
    ("names", "in_save"),
    [
        ((), False),
        (("SIGTERM",), False),
        (("SIGUSR1",), False),
        (("SIGCONT", "SIGTERM"), False),
        (("SIGTERM", "SIGTERM"), False),
        (("SIGTERM",), True),
        (("SIGTERM", "SIGUSR1", "SIGTERM"), True),
    ],
    ids=["file", "TERM", "USR1", "CONT and TERM", "TERM twice", "TERM in a save", "many in a save"],
)
@pytest.mark.parametrize(
    ("stage", "background", "ranks", "others"), [(2, False, 2, 3), (3, True, 2, 1), (1, True, 1, 2)]
)
def test_a_preempted_run_ends_in_time_and_continues_on_another_world(
    names: tuple[str, ...],
    in_save: bool,
    stage: int,
    background: bool,
    ranks: int,
    others: int,
    worlds: Pools,
    tmp_path: Path,
) -> None:
    strategy = {"async_save": background}
    run = recorded(stage=stage, batch_size=3, root=str(tmp_path / "run"), strategy=strategy)
    run = replace(run, checkpoint=SAVES)
    reference = worlds.run(others, partial(fit, replace(run, checkpoint=None, strategy={})))
    ended = worlds.run(ranks, partial(fit_until_preempted, run, names, in_save))
    # Only the first rank exits with the code: Lightning kills all ranks if another one does.
    assert [e.code for e in ended] == [EXIT_CODE, *[0] * (ranks - 1)]
    (step,) = {e.step for e in ended}
    assert 3 <= step < STEPS
    assert 0.0 < max(e.seconds for e in ended) < GRACE_S
    assert all(e.handlers_kept for e in ended)
    assert (tmp_path / "run" / "notice").exists() == (not names)
    progress = json.loads((tmp_path / "run" / NAME / "manifest.json").read_text())["progress"]
    assert progress["micro_steps"] % progress["gradient_accumulation_steps"] == 0
    again = replace(run, ckpt_path="last", strategy={}, callbacks=(PreemptionCheckpoint,))
    resume = partial(fit, again)
    for resumed, expected in zip(worlds.run(others, resume), reference, strict=True):
        assert resumed.steps == from_step(expected.steps, step)
        assert resumed.global_step == STEPS
        for at, loss in resumed.losses.items():
            assert loss == pytest.approx(expected.losses[at], rel=1e-4), at


def test_a_run_that_is_preempted_in_its_last_step_completes(worlds: Pools, tmp_path: Path) -> None:
    """A continued run would find that it has all its steps, and neither validate nor save."""
    run = recorded(stage=1, root=str(tmp_path), checkpoint=SAVES, validate=True)
    run = replace(run, epochs=None, max_steps=4)
    ended = worlds.run(2, partial(fit_until_preempted, run, ("SIGTERM",)))
    assert [(e.code, e.step) for e in ended] == [(-1, 4)] * 2
    assert all(e.handlers_kept for e in ended)
    assert list(tmp_path.glob("*step=4*"))
    assert (tmp_path / NAME / "manifest.json").exists()


class SignalsGroup(Callback):
    """Has another process send SIGTERM to the group of this rank after a step, as torchrun does."""

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            kill = ["kill", "-TERM", "--", f"-{os.getpgrp()}"]
            subprocess.run(kill, check=True, start_new_session=True)
            time.sleep(0.4)  # The end of a worker would raise here.


def fit_in_own_group(run: FitCase) -> Preempted:
    """Fit in a process group of this rank and its workers, until the group gets a signal."""
    group = os.getpgrp()
    os.setpgid(0, 0)
    try:
        return fit_until_it_ends(run, SignalsGroup(), PreemptionCheckpoint())
    finally:
        os.setpgid(0, group)


@pytest.mark.long
def test_a_signal_to_the_group_leaves_workers_to_the_save(worlds: Pools, tmp_path: Path) -> None:
    loader = {"num_workers": 1, "persistent_workers": True}
    run = recorded(stage=1, root=str(tmp_path), checkpoint=SAVES, loader=loader)
    ended = worlds.run(2, partial(fit_in_own_group, run))
    assert [e.code for e in ended] == [EXIT_CODE, 0]
    assert (tmp_path / NAME / "manifest.json").exists()


def test_a_validation_is_finished_before_a_preempted_save(worlds: Pools, tmp_path: Path) -> None:
    run = recorded(stage=1, root=str(tmp_path), checkpoint=SAVES)
    run = replace(run, validate=True, validation={"batch_size": 1})
    ended = worlds.run(2, partial(fit_until_preempted_in_validation, run))
    assert [e.code for e, _ in ended] == [EXIT_CODE, 0]
    assert {validated for _, validated in ended} == {VALIDATED}


@pytest.mark.long
def test_without_a_notice_the_callback_changes_nothing(worlds: Pools, tmp_path: Path) -> None:
    run = recorded(stage=2, dropout=0.2, noise=0.1, root=str(tmp_path))
    without = worlds.run(2, partial(fit, run))
    with_callback = partial(fit, replace(run, callbacks=(PreemptionCheckpoint,)))
    for record, other in zip(worlds.run(2, with_callback), without, strict=True):
        assert record.losses == other.losses
        assert record.steps == other.steps
        assert record.drawn == other.drawn


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"signals": ("SIGTREM",)}, "there is no signal 'SIGTREM'"),
        ({"exit_code": 0}, "exit_code=0: expected 1 to 255"),
        ({"exit_code": 256}, "exit_code=256: expected 1 to 255"),
    ],
)
def test_preemption_options_are_checked_by_the_constructor(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PreemptionCheckpoint(**options)


@pytest.mark.parametrize(("has_folder", "logs"), [(False, True), (True, True), (False, False)])
def test_a_folder_with_a_new_number_in_each_start_causes_a_warning(
    has_folder: bool, logs: bool, tmp_path: Path
) -> None:
    saves = callbacks.ModelCheckpoint(str(tmp_path / "run") if has_folder else None)
    preemption = PreemptionCheckpoint()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ElasticDeepSpeedStrategy(),
        logger=CSVLogger(tmp_path) if logs else False,
        callbacks=[preemption, saves],
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        preemption.setup(trainer, pl.LightningModule(), "fit")
    warned = any("no ModelCheckpoint has a dirpath" in str(each.message) for each in found)
    assert warned == (logs and not has_folder)
