"""Saves and stops that were due at the moment of a checkpoint, compared with a run as a whole."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed import comm
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.optim.lr_scheduler import ReduceLROnPlateau
from typing_extensions import override

from lightning_elastic_zero.trainer.preemption import PreemptionCheckpoint
from tests.support.fits import FitCase, RegressionNet, digests, elastic_strategy_of
from tests.support.outcome import captured_log
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

STEPS_PER_EPOCH = 2


class ScoredNet(RegressionNet):
    """Logs a given score for each epoch."""

    def __init__(self, scores: tuple[float, ...], _: FitCase) -> None:
        super().__init__()
        self.scores = scores

    @override
    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = super().training_step(batch, _)
        self.log("loss", loss, sync_dist=True)
        return loss

    @override
    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("score", torch.tensor(self.scores[self.current_epoch]), sync_dist=True)


class PlateauNet(ScoredNet):
    """Halves its rate after each step that did not improve the score."""

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        made = ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=0)
        plateau = {"scheduler": made, "interval": "step", "monitor": "score"}
        return {"optimizer": optimizer, "lr_scheduler": plateau}


class EndsAt(Callback):
    """Records the step of ``last.ckpt`` before each step; ends the run at a step.

    It kills the run, sends a signal to it, or requests a stop, as a user's callback may.
    """

    def __init__(
        self, last: Path, *, kill_at: int = -1, signal_at: int = -1, stop_at: int = -1
    ) -> None:
        self.last_path = last
        self.kill_at, self.signal_at, self.stop_at = kill_at, signal_at, stop_at
        self.last: dict[int, int] = {}

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        comm.barrier()
        manifest = self.last_path / "manifest.json"
        saved = json.loads(manifest.read_text()) if manifest.exists() else {}
        self.last[trainer.global_step] = saved.get("progress", {}).get("global_steps", 0)
        if trainer.global_step == self.kill_at:
            raise KeyboardInterrupt  # Lightning saves nothing more.

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.signal_at:
            os.kill(os.getpid(), signal.SIGUSR1)
        trainer.should_stop = trainer.should_stop or trainer.global_step == self.stop_at


class LooksAtBatches(ModelCheckpoint):
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        assert outputs["loss"].isfinite()
        super().on_train_batch_end(trainer, pl_module, outputs, *args)


def scored(
    root: Path,
    scores: tuple[float, ...],
    *saves: dict[str, Any],
    kind: type[ModelCheckpoint] = ModelCheckpoint,
    callbacks: tuple[Callable[[], Callback], ...] = (),
    trainer: dict[str, Any] | None = None,
    **ends: int,
) -> FitCase:
    """Return a fit with a score for each epoch; its first callback is an ``EndsAt``.

    Args:
        root: folder of logs; its folder ``kept`` is that of the saves.
        scores: of the epochs.
        saves: options of each ``ModelCheckpoint``.
        kind: class of each.
        callbacks: create further callbacks.
        trainer: options of the Trainer.
        ends: arguments of ``EndsAt``.
    """
    folder = root / "kept"
    ending = partial(EndsAt, folder / "last.ckpt", **ends)
    saving = [partial(kind, dirpath=folder, mode="max", **options) for options in saves]
    return FitCase(
        str(root),
        epochs=len(scores),
        checkpoint=None,
        callbacks=(ending, *callbacks, *saving),
        trainer=trainer or {},
        net=partial(ScoredNet, scores),
    )


@dataclass(frozen=True)
class Ended:
    step: int
    last: dict[int, int]
    """Step of ``last.ckpt`` before each step of this run."""
    kept: list[str]
    """Names in the folder."""
    best: list[str]
    """Name of each callback's best checkpoint."""
    tracked: list[list[str]]
    """Names of each callback's best k checkpoints."""
    weights: dict[str, str]
    rows: list[str]
    """Rows of the logger in this run: step and loss."""
    messages: list[str]
    loaded: str
    """Path of the loaded checkpoint."""


def fit_scored(case: FitCase) -> Ended:
    logger = CSVLogger(case.root, name="log")
    logs = {"logger": logger, "log_every_n_steps": 1}
    trainer, net, data, _ = replace(case, trainer={**logs, **case.trainer}).make()
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    (ending,) = (each for each in callbacks if isinstance(each, EndsAt))
    with captured_log("lightning.pytorch.utilities.rank_zero", 20) as messages:
        try:
            trainer.fit(net, **data, ckpt_path=case.ckpt_path)
        except SystemExit:  # of a preemption, or Lightning's at a KeyboardInterrupt
            assert {ending.kill_at, ending.signal_at} != {-1}
    comm.barrier()
    saving = [each for each in callbacks if isinstance(each, ModelCheckpoint)]
    file = Path(logger.log_dir) / "metrics.csv"
    rows = [line.split(",") for line in file.read_text().splitlines()] if file.exists() else []
    rows = rows if rows and "loss" in rows[0] else []
    columns = [rows[0].index(name) for name in ("step", "loss")] if rows else []
    return Ended(
        trainer.global_step,
        ending.last,
        sorted(path.name for path in Path(case.root, "kept").glob("[!.]*")),
        [Path(callback.best_model_path).name for callback in saving],
        [sorted(Path(path).name for path in callback.best_k_models) for callback in saving],
        digests(net),
        [" ".join(row[column] for column in columns) for row in rows[1:] if row[columns[1]]],
        list(messages),
        getattr(elastic_strategy_of(trainer).last_load, "path", ""),
    )


def fits_scored(*cases: FitCase) -> list[Ended]:
    return [fit_scored(case) for case in cases]


def resumed(case: FitCase, name: str, **changes: Any) -> FitCase:
    """Return a fit that resumes from a save and is not ended."""
    path = name if name == "last" else str(Path(case.root, "kept", name))
    _, *others = case.callbacks
    ending = partial(EndsAt, Path(case.root, "kept", "last.ckpt"))
    return replace(case, **{"ckpt_path": path, "callbacks": (ending, *others), **changes})


@pytest.mark.parametrize("kill_at", [2, 4], ids=["a link", "a separate checkpoint"])
def test_last_follows_a_resumed_run(kill_at: int, worlds: Pools, tmp_path: Path) -> None:
    """The best was before the resume, so that no later save is kept among the best."""
    options = {"monitor": "score", "save_top_k": 1, "save_last": "link", "filename": "{step}"}
    scores = (4.0, 3.0, 2.0, 1.0)
    run = scored(tmp_path / "whole", scores, options)
    killed = scored(tmp_path / "resumed", scores, options, kill_at=kill_at)
    runs = (run, killed, resumed(killed, "last"))
    whole, _, again = worlds.run(1, partial(fits_scored, *runs))[0]
    assert again.last == {step: at for step, at in whole.last.items() if step >= kill_at}
    assert again.kept == whole.kept == ["last.ckpt", "step=2.ckpt"]
    assert (again.best, again.weights) == (whole.best, whole.weights)


def test_a_last_checkpoint_that_was_moved_is_saved_at_the_end(
    worlds: Pools, tmp_path: Path
) -> None:
    """Without a due save, Lightning saves it there; the loaded state contains the old path."""
    options = {"train_time_interval": timedelta(days=1), "save_last": "link"}
    worlds.run(1, partial(fit_scored, scored(tmp_path, (1.0,), options)))
    folder = tmp_path / "kept"
    (folder / "last.ckpt").rename(folder / "moved.ckpt")
    run = resumed(scored(tmp_path, (1.0, 2.0), options), "moved.ckpt")
    (again,) = worlds.run(1, partial(fit_scored, run))
    assert again.kept == ["last.ckpt", "moved.ckpt"]
    saved = json.loads((folder / "last.ckpt" / "manifest.json").read_text())
    assert saved["progress"]["global_steps"] == again.step == 4


@pytest.mark.parametrize("is_killed_between", [True, False])
@pytest.mark.parametrize("at_epoch_end", [True, False], ids=["epoch", "validation"])
def test_each_callback_has_its_own_save_after_a_resume_from_the_firsts(
    at_epoch_end: bool, is_killed_between: bool, worlds: Pools, tmp_path: Path
) -> None:
    common = {"save_on_train_epoch_end": at_epoch_end}
    first = {"filename": "first-{step}", **common}
    second = {"monitor": "score", "filename": "second-{epoch}", "save_top_k": 2, **common}
    scores = (1.0, 3.0, 2.0)
    run = scored(tmp_path / "whole", scores, first, second)
    killed = scored(tmp_path / "killed", scores, first, second, kill_at=2 * STEPS_PER_EPOCH)
    worlds.run(1, partial(fit_scored, killed))
    folder = tmp_path / "killed" / "kept"
    if is_killed_between:
        shutil.rmtree(folder / "second-epoch=1.ckpt")
    before = (folder / "first-step=4.ckpt" / "manifest.json").stat().st_mtime_ns
    remade = scored(tmp_path / "again", scores, first, second)
    remade = replace(remade, ckpt_path=str(folder / "second-epoch=1.ckpt"))
    runs = (run, resumed(killed, "first-step=4.ckpt"), remade)
    for whole, ended, again in worlds.run(1, partial(fits_scored, *runs)):
        assert ended.best == whole.best == ["first-step=6.ckpt", "second-epoch=1.ckpt"]
        assert ended.tracked == whole.tracked
        # The one that the run was resumed from is kept.
        assert ended.kept == sorted([*whole.kept, "first-step=4.ckpt"])
        assert ended.weights == again.weights == whole.weights
    made = (folder / "second-epoch=1.ckpt" / "manifest.json").stat().st_mtime_ns
    assert made > before


def test_the_third_save_of_a_moment_is_made_after_a_resume_from_the_second(
    worlds: Pools, tmp_path: Path
) -> None:
    """The second was made by a resume from the first, which was killed before the third."""
    common: dict[str, Any] = {"save_top_k": -1, "save_on_train_epoch_end": True}
    others: dict[str, dict[str, Any]] = {
        "first": {},
        "second": {"every_n_epochs": 2},
        "third": {"monitor": "score"},
    }
    saves = [{"filename": f"{name}-{{step}}", **common, **own} for name, own in others.items()]
    killed = scored(tmp_path, (1.0, 2.0, 3.0), *saves, kill_at=2 * STEPS_PER_EPOCH)
    worlds.run(1, partial(fit_scored, killed))
    folder = tmp_path / "kept"
    for resumes_from, missing in (("first", ("second", "third")), ("second", ("third",))):
        for name in missing:
            shutil.rmtree(folder / f"{name}-step=4.ckpt")
        again = replace(resumed(killed, f"{resumes_from}-step=4.ckpt"), callbacks=killed.callbacks)
        worlds.run(1, partial(fit_scored, again))
        assert {f"{name}-step=4.ckpt" for name in others} <= {
            path.name for path in folder.iterdir()
        }


def test_weights_that_were_saved_after_the_loaded_checkpoint_are_not_saved_again(
    worlds: Pools, tmp_path: Path
) -> None:
    """Such a file records no position; one that no callback knows would never be deleted."""
    scores = (3.0, 2.0, 4.0)
    whole = {"filename": "whole-{step}"}
    weights = {"monitor": "score", "filename": "weights-{step}", "save_weights_only": True}
    killed = scored(tmp_path, scores, whole, weights, kill_at=STEPS_PER_EPOCH)
    runs = (killed, resumed(killed, "whole-step=2.ckpt"))
    again = worlds.run(1, partial(fits_scored, *runs))[0][1]
    assert again.kept == ["weights-step=6.ckpt", "whole-step=2.ckpt", "whole-step=6.ckpt"]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_preempted_step_is_logged_and_its_due_save_is_made(
    elsewhere: bool, worlds: Pools, tmp_path: Path
) -> None:
    """The message at the end of the run names the path from which it resumes."""
    options = {"filename": "{step}-{loss:.6f}", "every_n_train_steps": 3, "save_top_k": -1}
    options |= {"monitor": "loss", "save_last": "link", "save_on_train_epoch_end": False}
    run = scored(tmp_path / "whole", (1.0, 2.0), options)
    folder = str(tmp_path / "other") if elsewhere else None
    makes = (partial(PreemptionCheckpoint, dirpath=folder),)
    ended = scored(tmp_path / "ended", (1.0, 2.0), options, signal_at=3, callbacks=makes)
    path = f"{folder}/last-preempted.ckpt" if elsewhere else "last"
    both = partial(fits_scored, run, ended, resumed(ended, path))
    whole, preempted, again = worlds.run(1, both)[0]
    assert f'Start the same command again with ckpt_path="{path}".' in preempted.messages[-1]
    assert preempted.step == 3
    assert whole.rows == preempted.rows + again.rows
    assert len(preempted.rows) == 3
    assert [n for n in again.kept if n != "last-preempted.ckpt"] == whole.kept
    assert (again.best, again.weights) == (whole.best, whole.weights)


def test_a_deferral_that_never_ended_omits_no_later_save(worlds: Pools, tmp_path: Path) -> None:
    """Lightning defers saves before the first score, and with saves at the epoch's end for ever."""
    options = {"filename": "{step}", "every_n_train_steps": 1, "save_top_k": -1}
    options |= {"monitor": "score", "save_on_train_epoch_end": True}
    run = scored(tmp_path / "whole", (1.0, 2.0), options)
    makes = (PreemptionCheckpoint,)
    ended = scored(tmp_path / "ended", (1.0, 2.0), options, signal_at=3, callbacks=makes)
    runs = (run, ended, resumed(ended, "last-preempted.ckpt"))
    whole, _, again = worlds.run(1, partial(fits_scored, *runs))[0]
    assert [n for n in again.kept if n != "last-preempted.ckpt"] == whole.kept
    assert again.tracked == whole.tracked == [["step=3.ckpt", "step=4.ckpt"]]


def test_a_preempted_run_resumes_with_a_hook_that_needs_the_batch(
    worlds: Pools, tmp_path: Path
) -> None:
    made = partial(scored, tmp_path, (1.0, 2.0), {"every_n_train_steps": 3}, kind=LooksAtBatches)
    ended = made(signal_at=3, callbacks=(PreemptionCheckpoint,))
    runs = (ended, resumed(ended, "last-preempted.ckpt"))
    assert [seen.step for seen in worlds.run(1, partial(fits_scored, *runs))[0]] == [3, 4]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("ends", "name"),
    [
        ({"signal_at": 3}, "last-preempted.ckpt"),
        ({"signal_at": 1}, "last-preempted.ckpt"),
        ({"kill_at": 1}, "last.ckpt"),
        ({"kill_at": 1}, "epoch=0-step=1-v1.ckpt"),
    ],
    ids=["before both", "before both first", "after the first", "after the second"],
)
def test_callbacks_with_the_same_names_have_their_own_saves_after_a_resume(
    ends: dict[str, Any], name: str, worlds: Pools, tmp_path: Path
) -> None:
    """The second keeps the best, so another's file in its list would be deleted too early.

    The best of the second is the first save of an epoch.
    """
    each: dict[str, Any] = {"every_n_train_steps": 1, "save_last": "link"}
    best = {**each, "monitor": "epoch"}
    run = scored(tmp_path / "whole", (1.0, 2.0), each, best)
    makes = (PreemptionCheckpoint,)
    ended = scored(tmp_path / "ended", (1.0, 2.0), each, best, callbacks=makes, **ends)
    runs = (run, ended, resumed(ended, name))
    whole, _, again = worlds.run(1, partial(fits_scored, *runs))[0]
    loaded = Path(again.loaded).name
    assert [kept for kept in again.kept if kept != loaded] == whole.kept
    assert whole.kept == [
        *("epoch=1-step=3-v1.ckpt", "epoch=1-step=4.ckpt", "last-v1.ckpt", "last.ckpt")
    ]
    assert (again.best, again.tracked) == (whole.best, whole.tracked)


def fit_again(case: FitCase, name: str) -> dict[int, int]:
    """Fit twice with the same callbacks, the second time from a checkpoint of the first.

    Return the step of the second one's ``last-v1.ckpt`` before each step.
    """
    trainer, net, data, _ = case.make()
    ending: Any = trainer.callbacks[0]  # type: ignore[attr-defined]
    ending.last_path = ending.last_path.with_name("last-v1.ckpt")
    for path in (None, str(ending.last_path.with_name(name))):
        trainer.fit(net, **data, ckpt_path=path)
    seen: dict[int, int] = ending.last
    return seen


def test_a_second_fit_saves_the_steps_that_the_first_has_saved(
    worlds: Pools, tmp_path: Path
) -> None:
    """The first may have diverged, so its save must not be taken for the last one."""
    every_3 = {"every_n_train_steps": 3, "filename": "{step}", "save_last": "link"}
    every_2 = {"every_n_train_steps": 2, "filename": "other-{step}"}
    run = scored(tmp_path, (1.0, 2.0), every_3, every_2, trainer={"max_steps": 3})
    (last,) = worlds.run(1, partial(fit_again, run, "other-step=2.ckpt"))
    assert last == {0: 0, 1: 0, 2: 0}
    assert (tmp_path / "kept" / "last-v1.ckpt").readlink().name == "step=3-v1.ckpt"


BY_STEP = {"val_check_interval": 0.5}
"""Validate after each step."""


def test_a_save_made_by_the_resume_keeps_the_update_of_a_plateau(
    worlds: Pools, tmp_path: Path
) -> None:
    """Killed between the saves of two callbacks, before a validation and the update after it."""
    scores = (2.0, 1.0)
    saves = [
        {"filename": f"{name}-{{step}}", "every_n_train_steps": every, "save_top_k": -1}
        for name, every in (("first", 3), ("second", 1))
    ]
    whole, killed = (
        replace(made, net=partial(PlateauNet, scores))
        for made in (
            scored(tmp_path / "whole", scores, *saves, trainer=BY_STEP),
            scored(tmp_path, scores, *saves, trainer=BY_STEP, kill_at=3),
        )
    )
    worlds.run(1, partial(fit_scored, killed))
    shutil.rmtree(tmp_path / "kept" / "second-step=3.ckpt")
    # The first one makes the save for the second one.
    both = (resumed(killed, f"{name}-step=3.ckpt") for name in ("first", "second"))
    reference, *seen = worlds.run(1, partial(fits_scored, whole, *both))[0]
    assert [each.weights for each in seen] == [reference.weights] * 2


@pytest.mark.parametrize(
    ("trainer", "saves", "stop"),
    [
        ({}, {}, 6),
        ({}, {"every_n_train_steps": 2}, 6),
        (BY_STEP, {}, 3),
        ({"min_epochs": 4}, {}, 8),
    ],
    ids=["at an epoch's end", "after the epoch's last step", "within an epoch", "later"],
)
def test_a_stop_by_early_stopping_is_final(
    trainer: dict[str, Any], saves: dict[str, Any], stop: int, worlds: Pools, tmp_path: Path
) -> None:
    """Without the callback, the run trains on."""
    makes = (partial(EarlyStopping, "score", mode="max", patience=2),)
    saves = {"save_last": "link", "filename": "{step}", **saves}
    scores = (4.0, 3.0, 2.0, 5.0, 6.0)
    made = partial(scored, tmp_path, scores, saves, trainer=trainer)
    run = made(callbacks=makes)
    runs = (run, resumed(run, "last"), resumed(made(), "last"))
    whole, again, longer = worlds.run(1, partial(fits_scored, *runs))[0]
    assert whole.step == again.step == stop
    assert again.kept == whole.kept
    if not saves.get("every_n_train_steps"):  # otherwise, the callback requests it again
        assert any("remove EarlyStopping" in text for text in again.messages)
    assert again.weights == whole.weights
    assert longer.step == len(scores) * STEPS_PER_EPOCH


@pytest.mark.parametrize("patience", [2, 0])
def test_another_stop_ends_only_its_run(patience: int, worlds: Pools, tmp_path: Path) -> None:
    """Such as that of a Timer before a job's deadline."""
    makes = (partial(EarlyStopping, "score", mode="max", patience=patience),)
    made = partial(scored, tmp_path, (1.0, 2.0, 3.0), {"save_last": "link"}, callbacks=makes)
    stopped = made(stop_at=STEPS_PER_EPOCH)
    ended, again = worlds.run(1, partial(fits_scored, stopped, resumed(stopped, "last")))[0]
    assert (ended.step, again.step) == (2, 6)
