"""ModelCheckpoint's links are created by this library, when their target is published."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed import comm
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_elastic_zero.checkpoint.manager import CheckpointManager
from lightning_elastic_zero.checkpoint.types import SaveRequest
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import OneRank
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.storage.folders import folder_at
from tests.support.fits import FitCase, RegressionNet, Watch, elastic_strategy_of, fit
from tests.support.outcome import error_text
from tests.support.ranks import Pools
from tests.support.small_checkpoints import before_each_syscall
from tests.trainer._async_save import async_case, fit_with, is_published, kept, step_of

pytestmark = pytest.mark.engine

MODES = pytest.mark.parametrize("async_save", [False, True], ids=["blocking", "background"])
LINKED: dict[str, Any] = {"save_top_k": 1, "filename": "{step}", "save_last": "link"}


def watch_last_before_syscalls(run: FitCase) -> list[str]:
    """Train; return the successive targets of last.ckpt ("" if missing or dangling)."""
    last = Path(run.root) / "kept" / "last.ckpt"
    seen: list[str] = []

    def look() -> None:
        name = last.resolve().name if is_published(last) else ""
        if (seen or name) and seen[-1:] != [name]:
            seen.append(name)

    with before_each_syscall(look):
        errors = fit_with(run).errors
    assert not errors, errors
    return seen


@MODES
def test_a_kill_never_leaves_last_missing_or_dangling(
    pools: Pools, tmp_path: Path, *, async_save: bool
) -> None:
    run = async_case(tmp_path, async_save=async_save, checkpoint=LINKED)
    found = pools.run(2, partial(watch_last_before_syscalls, run))[0]
    assert found == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]


def watch_the_last(run: FitCase, scores: list[float]) -> list[tuple[str, int]]:
    """Train with a score per epoch; return the best name and the step of last.ckpt after each."""
    seen: list[tuple[str, int]] = []

    def look(trainer: pl.Trainer) -> None:
        elastic_strategy_of(trainer).wait_for_save()
        manifest = Path(run.root) / "kept" / "last.ckpt" / "manifest.json"
        saved = json.loads(manifest.read_text()) if manifest.exists() else {}
        callback: Any = trainer.checkpoint_callback
        step = saved.get("progress", {}).get("global_steps", 0)
        seen.append((Path(callback.best_model_path).name, step))

    trainer, net, data, actor = run.make()
    actor.actions = dict.fromkeys([*range(3, 2 * len(scores), 2), -1], look)
    callback: Any = trainer.checkpoint_callback
    candidates = callback._monitor_candidates
    callback._monitor_candidates = lambda trainer: {
        **candidates(trainer),
        "score": torch.tensor(scores[trainer.current_epoch]),
    }
    trainer.fit(net, **data)
    assert not actor.errors, actor.errors
    return seen


@MODES
def test_last_is_the_newest_save(pools: Pools, tmp_path: Path, *, async_save: bool) -> None:
    options = LINKED | {"monitor": "score", "mode": "max"}
    scores = [1.0, 0.5, 0.7, 2.0, 0.1]
    every = async_case(tmp_path, async_save=async_save, epochs=5, checkpoint=options)
    for seen in pools.run(2, partial(watch_the_last, every, scores)):
        best = ["step=2.ckpt"] * 3 + ["step=8.ckpt"] * 2
        assert seen == list(zip(best, [2, 4, 6, 8, 10], strict=True))
    kept_names = {path.name for path in (tmp_path / "kept").iterdir() if path.name[0] != "."}
    assert kept_names == {"step=8.ckpt", "last.ckpt"}


@pytest.mark.long
@MODES
def test_last_is_the_newest_of_rare_saves(
    pools: Pools, tmp_path: Path, *, async_save: bool
) -> None:
    options = LINKED | {"monitor": "score", "mode": "max", "every_n_epochs": 2}
    run = async_case(tmp_path, async_save=async_save, epochs=4, checkpoint=options)
    for seen in pools.run(2, partial(watch_the_last, run, [0.0, 1.0, 9.0, 0.5])):
        assert seen == [("", 0), ("step=4.ckpt", 4), ("step=4.ckpt", 4), ("step=4.ckpt", 8)]


class Due(Watch):
    """Makes a ``train_time_interval`` end at given steps; records the step of ``last.ckpt``."""

    def __init__(self, by_time: list[int], case: FitCase) -> None:
        super().__init__(case)
        self.by_time = by_time
        self.steps: dict[int, int] = {}

    def look(self, trainer: pl.Trainer) -> None:
        elastic_strategy_of(trainer).wait_for_save()
        last = self.of.path("last")
        self.steps[trainer.global_step] = step_of(last) if is_published(last) else 0

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.look(trainer)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        for callback in trainer.checkpoint_callbacks:
            is_due = trainer.global_step in self.by_time
            callback._last_time_checked = -math.inf if is_due else math.inf  # type: ignore[attr-defined]

    @override
    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.look(trainer)

    @override
    def seen(self, *_: Any) -> dict[int, int]:
        return self.steps


class FallingScore(RegressionNet):
    """Logs a score that is best in the first step; ``score_of_epoch`` after each epoch only."""

    @override
    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        self.log("score", -float(self.global_step))
        return super().training_step(batch, _)

    @override
    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("score_of_epoch", -float(self.global_step))


class SkippingScore(FallingScore):
    """Skips the rest of each epoch after its first batch."""

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx else None


def with_saves(
    root: Path, save_last: Any, saves: dict[str, Any], by_time: list[int], **changes: Any
) -> FitCase:
    """Return a fit of three epochs of two steps, whose result is the step of the last save."""
    fixed = {"monitor": "score", "mode": "max", "filename": "{step}", "save_last": save_last}
    saves = {**fixed, "enable_version_counter": True, **saves}
    case = FitCase(str(root), epochs=3, checkpoint=saves, net=FallingScore.of)
    return replace(case, watch=partial(Due, by_time), **changes)


BY_TIME = {"train_time_interval": timedelta(days=1)}
BY_STEP = {"val_check_interval": 0.5}
"""Validate after each step."""


@pytest.mark.parametrize("save_last", ["link", True])
@pytest.mark.parametrize(
    ("saves", "options", "due"),
    [
        (BY_TIME, {}, [1, 3, 4]),
        ({**BY_TIME, "monitor": "score_of_epoch", "save_on_train_epoch_end": False}, {}, [2, 4, 5]),
        ({"every_n_train_steps": 2}, {}, [2, 4, 6]),
        ({"every_n_train_steps": 3}, {}, [3, 6]),
        ({"every_n_epochs": 2}, {}, [4]),
        ({}, {}, [2, 4, 6]),
        ({}, BY_STEP, [1, 2, 3, 4, 5, 6]),
    ],
    ids=["time", "time, deferred", "last step", "steps", "epochs", "each epoch", "each validation"],
)
def test_last_is_the_newest_due_save_even_if_the_best_k_reject_it(
    saves: dict[str, Any],
    options: dict[str, Any],
    due: list[int],
    save_last: Any,
    pools: Pools,
    tmp_path: Path,
) -> None:
    """With ``save_last=True``, Lightning does so for steps and times, not for epochs."""
    run = with_saves(tmp_path, save_last, saves, due, trainer=options)
    is_of_epochs = not saves.keys() & {"train_time_interval", "every_n_train_steps"}
    kept = due[:1] if is_of_epochs and save_last is True else due
    expected = {at: max((step for step in kept if step <= at), default=0) for at in range(7)}
    for seen in pools.run(2, partial(fit, run)):
        assert seen == expected


def test_last_of_two_callbacks_does_not_move_back(pools: Pools, tmp_path: Path) -> None:
    """At each end of an epoch, Lightning also links the last save of the one that saves rarely."""
    fixed: dict[str, Any] = {"save_last": "link", "enable_version_counter": False}
    rare = partial(ModelCheckpoint, tmp_path, "rare-{step}", every_n_epochs=2, **fixed)
    often = {"every_n_train_steps": 2, "monitor": None, **fixed}
    run = with_saves(tmp_path, "link", often, [], callbacks=(rare,))
    assert pools.run(1, partial(fit, run))[0] == {0: 0, 1: 0, 2: 2, 3: 2, 4: 4, 5: 4, 6: 6}


def test_no_save_is_due_when_the_rest_of_an_epoch_is_skipped(pools: Pools, tmp_path: Path) -> None:
    run = with_saves(tmp_path, "link", {"every_n_epochs": 2}, [], net=SkippingScore.of)
    assert pools.run(2, partial(fit, run)) == [{0: 0, 1: 0, 2: 2, 3: 2}] * 2


class LinksFail:
    """An action that makes all later links fail on rank 0."""

    def __init__(self) -> None:
        self.symlink_to = Path.symlink_to

    def __call__(self, trainer: pl.Trainer) -> None:
        elastic_strategy_of(trainer).wait_for_save()

        def refuse(path: Path, *_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        if comm.get_rank() == 0:
            Path.symlink_to = refuse  # type: ignore[method-assign,assignment]

    def end(self) -> None:
        Path.symlink_to = self.symlink_to  # type: ignore[method-assign]


def fail_the_second_link(run: FitCase) -> dict[str, Any]:
    """Make the second link fail; return the remaining entries and the error."""
    links_fail = LinksFail()
    trainer, net, data, actor = run.make()
    actor.actions = {3: links_fail}
    error = error_text(lambda: trainer.fit(net, **data))
    links_fail.end()
    comm.barrier()
    return {"error": error, "remaining": kept(run), "replaced": replaced(trainer)}


def replaced(trainer: pl.Trainer) -> list[bool]:
    """Return whether the method of each ModelCheckpoint is replaced."""
    return ["_link_checkpoint" in vars(callback) for callback in trainer.checkpoint_callbacks]


@MODES
def test_a_failed_link_is_raised_and_keeps_its_target(
    pools: Pools, tmp_path: Path, *, async_save: bool
) -> None:
    run = async_case(tmp_path, async_save=async_save, checkpoint=LINKED)
    for seen in pools.run(2, partial(fail_the_second_link, run)):
        assert seen["error"].startswith("SaveError"), seen
        assert "Could not link " in seen["error"]
        assert "step=4.ckpt: No space left on device" in seen["error"]
        assert "rank 0" in seen["error"]
        assert seen["remaining"] == {name: name for name in ("step=2.ckpt", "step=4.ckpt")} | {
            "last.ckpt": "step=2.ckpt"
        }
        assert seen["replaced"] == [False]


class Plain(ModelCheckpoint):
    """A subclass that uses Lightning's method."""


class Own(ModelCheckpoint):
    """A subclass that overrides Lightning's method."""

    links: list[str]

    @staticmethod
    @override
    def _link_checkpoint(trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
        Own.links.append(Path(filepath).name)


def look_at_callbacks(root: str) -> dict[str, Any]:
    """Fit twice with callbacks of several kinds; the second fit raises."""
    Own.links = []
    seen: dict[str, Any] = {}

    def look(trainer: pl.Trainer) -> None:
        seen["during the first"] = replaced(trainer)

    def fail(trainer: pl.Trainer) -> None:
        seen["during the second"] = replaced(trainer)
        raise ZeroDivisionError

    run = async_case(Path(root), async_save=False, epochs=1, checkpoint=LINKED)
    trainer, net, data, actor = run.make()
    actor.actions = {1: look}
    for kind in (Plain, Own, ModelCheckpoint):
        folder = Path(root) / f"{kind.__name__}-more"
        trainer.callbacks.append(kind(dirpath=folder, **LINKED))  # type: ignore[attr-defined]
    patched = []
    last: Any = trainer.checkpoint_callbacks[-1]
    last._link_checkpoint = lambda _, path, __: patched.append(Path(path).name)
    trainer.fit(net, **data)
    seen["after the first"] = replaced(trainer)
    seen["links"] = (list(Own.links), patched, trainer.checkpoint_callbacks[-1] is last)
    actor.actions, actor.passes_on = {3: fail}, (ZeroDivisionError,)
    trainer.fit_loop.max_epochs = 2
    with pytest.raises(ZeroDivisionError):
        trainer.fit(net, **data)
    seen["after the second"] = replaced(trainer)
    return seen


@pytest.mark.long
def test_only_lightnings_method_is_replaced_and_only_during_a_run(
    pools: Pools, tmp_path: Path
) -> None:
    for seen in pools.run(2, partial(look_at_callbacks, str(tmp_path))):
        assert seen["during the first"] == seen["during the second"] == [True, True, False, True]
        assert seen["after the first"] == seen["after the second"] == [False, False, False, True]
        assert seen["links"] == (["step=2.ckpt"], ["step=2.ckpt"], True)
    assert not (tmp_path / "Own-more" / "last.ckpt").is_symlink()
    assert is_published(tmp_path / "Plain-more" / "last.ckpt")


def test_links_do_not_wait_for_a_save_that_did_not_start(tmp_path: Path) -> None:
    target, link = tmp_path / "a.ckpt", tmp_path / "last.ckpt"
    target.mkdir()
    manager = CheckpointManager(Timeouts(), background=True)
    manager.start(LiveEngine(SimpleNamespace(optimizer=None)), 0)
    with pytest.raises(UnsupportedError):
        manager.save_async(SaveRequest(LiveEngine("no engine"), target), OneRank())
    manager.link(str(target), str(link), OneRank())
    assert str(link.readlink()) == "a.ckpt"
    assert manager.stop(interrupted=False) is None


def test_an_abandoned_save_that_is_published_creates_its_links(tmp_path: Path) -> None:
    target, link = tmp_path / "a.ckpt", tmp_path / "last.ckpt"
    manager = CheckpointManager(Timeouts(), background=True)
    manager.start(LiveEngine(SimpleNamespace(optimizer=None)), 0)
    queue = manager._queue
    save = queue.begin_save(folder_at(target))
    manager.link(str(target), str(link), OneRank())
    manager.stop(interrupted=True)
    assert not link.is_symlink()
    target.mkdir()
    queue.end_save(save, published=True)
    assert str(link.readlink()) == "a.ckpt"


def fail_on_all_ranks(run: FitCase) -> dict[str, str]:
    """Raise on all ranks after the third step; list the folder."""

    def fail(_: pl.Trainer) -> None:
        raise ZeroDivisionError

    fit_with(run, {3: fail}, raises=(ZeroDivisionError,))
    comm.barrier()
    return kept(run)


@MODES
def test_last_points_to_the_save_of_save_on_exception(
    pools: Pools, tmp_path: Path, *, async_save: bool
) -> None:
    run = async_case(
        tmp_path, async_save=async_save, checkpoint=LINKED | {"save_on_exception": True}
    )
    for remaining in pools.run(2, partial(fail_on_all_ranks, run)):
        assert remaining["last.ckpt"] == "step=3.ckpt"
