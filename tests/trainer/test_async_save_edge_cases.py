"""Difficult background saves: between backward and the step, and at the end of runs."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed import comm
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.storage import disk_checkpoints
from lightning_elastic_zero.storage.file_write import write_durably
from tests.support.checkpoints import files_of
from tests.support.fits import FitCase, RegressionNet, elastic_strategy_of
from tests.support.processes import PROMPT_TIMEOUT_S
from tests.support.ranks import Pools
from tests.trainer._async_save import (
    HELD_S,
    OTHER,
    Gate,
    StepActions,
    actor_of,
    async_case,
    fit_with,
    gate_of,
    in_background,
    is_published,
    kept,
    open_later,
    publish_held,
    save_other,
    save_to,
    shorten_drain_timeout,
    step_of,
    wait_for_writers,
)

pytestmark = pytest.mark.engine

FAILS_IN_S = PROMPT_TIMEOUT_S
"""A call that takes longer hangs."""


# -- between backward and the step -----------------------------------------------------------------


class Clipping(RegressionNet):
    """Saves during gradient clipping of its second step."""

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, SaveOnce):
                callback.act(self.trainer)


class ByHand(RegressionNet):
    """Calls DeepSpeed's engine directly, with manual optimization."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = self._loss(batch)
        engine: Any = self.trainer.model
        engine.backward(loss)
        engine.step()
        loop = self.trainer.fit_loop.epoch_loop.manual_optimization
        loop.optim_step_progress.increment_completed()
        return loss


class SaveOnce(Callback):
    """Saves at the second call, with a writer that is paused for a second."""

    def __init__(self, run: FitCase) -> None:
        self.run, self.times = run, 0

    def act(self, trainer: pl.Trainer) -> None:
        self.times += 1
        if self.times != 2:
            return
        open_later(gate_of(self.run), 1.0)
        save_to(self.run, "a")(trainer)


class BeforeStep(SaveOnce):
    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self.act(trainer)


class AfterBatch(SaveOnce):
    """Saves after a batch, so that the next step could tear the snapshot."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self.act(trainer)


class Muon(RegressionNet):
    """Trains its matrices with Muon, whose momentum DeepSpeed changes before the step."""

    def configure_optimizers(self) -> Any:
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        matrices, rest = [self.first.weight, self.last.weight], [self.first.bias, self.last.bias]
        for parameter in matrices:
            parameter.use_muon = True  # type: ignore[attr-defined]
        return MuonWithAuxAdam(
            [
                {"params": matrices, "lr": 0.01, "use_muon": True},
                {"params": rest, "lr": 0.01, "use_muon": False},
            ]
        )


SAVE_POINTS: dict[str, tuple[type[RegressionNet], type[SaveOnce], tuple[int, ...]]] = {
    "before the step": (RegressionNet, BeforeStep, (1, 3)),
    "clipping": (Clipping, SaveOnce, (1, 3)),
    "by hand": (ByHand, AfterBatch, (1, 3)),
    "after a batch": (RegressionNet, AfterBatch, (2,)),
    "Muon before the step": (Muon, BeforeStep, (2, 3)),
    "Muon after a batch": (Muon, AfterBatch, (2, 3)),
}
"""Each with its stages."""


SAVES_IN_S = 60.0
"""A fit that takes longer hangs."""


def save_at(run: FitCase, saver: type[SaveOnce]) -> None:
    """Save once at a point of the loop."""
    # Compiling Muon would take a minute per process.
    with torch.compiler.set_stance("force_eager"):
        assert not fit_with(run, {}, saver(run)).errors


@pytest.mark.parametrize(
    ("point", "stage"),
    [(point, stage) for point, (*_, stages) in SAVE_POINTS.items() for stage in stages],
)
def test_no_step_tears_a_snapshot(point: str, stage: int, pools: Pools, tmp_path: Path) -> None:
    """A step soon after the save does not change the saved state."""
    net, saver, _ = SAVE_POINTS[point]
    options = {"reduce_scatter": False} if net is Muon else {}  # It needs full gradients.
    made = partial(async_case, stage=stage, gated=True, net=net.of, strategy=options)
    found = {}
    for name in ("blocking", "background"):
        is_async = name == "background"
        run = made(tmp_path / name, async_save=is_async)
        pools.run(2, partial(save_at, run, saver), SAVES_IN_S)
        found[name] = files_of(run.path("a"))
    assert found["background"].keys() == found["blocking"].keys()
    for file, tree in found["blocking"].items():
        assert found["background"][file] == tree, file


# -- abandoned saves -------------------------------------------------------------------------------


def abandon_the_second(run: FitCase) -> list[dict[str, str]]:
    """Raise during ModelCheckpoint's second save; list the entries then and later."""

    def first(trainer: pl.Trainer) -> None:
        publish_held(run, trainer)
        trainer.strategy.barrier()
        gate_of(run).unlink(missing_ok=True)

    def second(trainer: pl.Trainer) -> None:
        trainer.strategy.barrier()
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        shorten_drain_timeout(patch, 0.5, 0.5)
        actions: StepActions = {1: partial(save_other, run), 3: first, 5: second}
        fit_with(run, actions, raises=(ZeroDivisionError,))
        comm.barrier()
        seen = [kept(run)]
        comm.barrier()
        gate_of(run).touch()
        wait_for_writers()
    return [*seen, kept(run)]


@pytest.mark.long
def test_an_abandoned_save_deletes_nothing(pools: Pools, tmp_path: Path) -> None:
    run = async_case(tmp_path, gated=True, checkpoint={"save_top_k": 1, "filename": "{step}"})
    remaining = OTHER | {"step=2.ckpt": "step=2.ckpt"}
    for seen in pools.run(2, partial(abandon_the_second, run), FAILS_IN_S):
        assert seen == [remaining, remaining]


class HeldManifest:
    """Replaces `write_durably`, so that the first manifest of a writer waits."""

    def __init__(self) -> None:
        self.free, self.held = threading.Event(), False

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        def write(path: Path, data: bytes) -> None:
            if path.name == "manifest.json" and in_background() and not self.held:
                self.held = True
                self.free.wait(HELD_S)
            write_durably(path, data)

        patch.setattr(disk_checkpoints, "write_durably", write)


def save_over(first: FitCase, second: FitCase, *, free_first: bool) -> dict[str, Any]:
    """Abandon a save just before its publication, and save to its path in another fit."""
    target, manifest = first.path("last"), HeldManifest()
    seen: dict[str, Any] = {}

    def save_and_end(trainer: pl.Trainer) -> None:
        save_to(first, "last")(trainer)
        raise ZeroDivisionError

    def free(when: str) -> None:
        manifest.free.set()
        wait_for_writers()
        seen[when] = step_of(target) if is_published(target) else None
        comm.barrier()

    with pytest.MonkeyPatch.context() as patch:
        shorten_drain_timeout(patch, 0.5, 0.5)
        manifest.patch(patch)
        fit_with(first, {2: save_and_end}, raises=(ZeroDivisionError,))
        assert manifest.held == (comm.get_rank() == 0)
        seen["abandoned"] = is_published(target)
        comm.barrier()
        if free_first:
            free("freed")
        errors = fit_with(second, {4: save_to(second, "last")}).errors
        seen["saved"] = step_of(target)
        comm.barrier()
        free("end")
    return {**seen, "errors": errors}


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("free_first", [False, True])
def test_an_abandoned_save_is_never_published(
    async_save: bool, free_first: bool, pools: Pools, tmp_path: Path
) -> None:
    first, second = (
        async_case(tmp_path),
        async_case(tmp_path, async_save=async_save),
    )
    call = partial(save_over, first, second, free_first=free_first)
    for seen in pools.run(2, call, FAILS_IN_S):
        assert not seen["abandoned"]
        assert seen.get("freed") is None
        assert not seen["errors"]
        assert seen["saved"] == 4
        assert seen["end"] == 4
    assert not list(tmp_path.glob(".zero-*"))


def fail_with_a_save_held(run: FitCase) -> int:
    """Raise while the writer is paused permanently; count the timeouts spent on it."""
    patience_s, spent, wait = 3.125, list[float](), threading.Event.wait

    def counted(event: threading.Event, timeout: float | None = None) -> bool:
        is_set = wait(event, timeout)
        if timeout == patience_s and not is_set:
            spent.append(timeout)
        return is_set

    def act(trainer: pl.Trainer) -> None:
        save_to(run, "a")(trainer)
        trainer.strategy.barrier()
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        shorten_drain_timeout(patch, patience_s, 1.0)
        patch.setattr(threading.Event, "wait", counted)
        fit_with(run, {3: act}, raises=(ZeroDivisionError,))
        comm.barrier()
        gate_of(run).touch()
        wait_for_writers()
    return len(spent)


@pytest.mark.long
def test_only_one_timeout_is_spent_on_a_hanging_save(pools: Pools, tmp_path: Path) -> None:
    options = {"save_on_exception": True, "filename": "{step}", "every_n_epochs": 9}
    run = async_case(tmp_path, gated=True, checkpoint=options)
    assert pools.run(2, partial(fail_with_a_save_held, run), FAILS_IN_S) == [1, 1]
    assert kept(run) == {"step=3.ckpt": "step=3.ckpt"}
    assert not is_published(tmp_path / "a.ckpt")


# -- saves before SLURM's requeueing ---------------------------------------------------------------


def requeue_in_a_wait(run: FitCase, wait: str) -> dict[str, Any]:
    """Send a signal while training waits for the previous save; save in its handler."""
    requeued = run.path("hpc_ckpt_1")
    seen: dict[str, Any] = {}

    def act(trainer: pl.Trainer) -> None:
        def handle(*_: object) -> None:
            seen["held"] = not is_published(run.path("a"))
            trainer.save_checkpoint(requeued)
            seen["requeued"] = is_published(requeued)

        signal.signal(signal.SIGUSR2, handle)
        save_to(run, "a")(trainer)
        trainer.strategy.barrier()
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        open_later(gate_of(run), 1.5)
        if wait == "save":
            save_to(run, "b")(trainer)
        else:
            elastic_strategy_of(trainer).wait_for_save()

    before = signal.getsignal(signal.SIGUSR2)
    try:
        return {"errors": fit_with(run, {3: act}).errors, **seen}
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.long
@pytest.mark.parametrize("wait", ["save", "wait_for_save"])
def test_requeueing_during_a_wait_for_a_save_publishes_both_saves(
    wait: str, pools: Pools, tmp_path: Path
) -> None:
    run = async_case(tmp_path, gated=True)
    for seen in pools.run(2, partial(requeue_in_a_wait, run, wait), FAILS_IN_S):
        assert seen == {"held": True, "requeued": True, "errors": {}}
    expected = {"a.ckpt", "hpc_ckpt_1.ckpt"} | ({"b.ckpt"} if wait == "save" else set())
    assert {path.name for path in tmp_path.glob("*.ckpt") if is_published(path)} == expected
    assert not list(tmp_path.glob(".zero-*"))


def requeue_after_a_failure(run: FitCase, *, failed: bool) -> list[bool]:
    """Save for requeueing after a background save has failed, or just before it fails."""
    published: list[bool] = []

    def act(trainer: pl.Trainer) -> None:
        save_to(run, "a")(trainer)
        actor_of(trainer).gate = None
        trainer.strategy.barrier()
        open_later(gate_of(run), 0.5)
        writer = elastic_strategy_of(trainer).checkpoint_manager._writer
        assert writer is not None
        while failed and writer.busy:
            time.sleep(0.01)
        save_to(run, "hpc_ckpt_1")(trainer)
        published.append(is_published(run.path("hpc_ckpt_1")))

    with suppress(ElasticZeroError):
        fit_with(run, {3: act})
    return published


@pytest.mark.long
@pytest.mark.parametrize("failed", [True, False])
def test_requeueing_saves_after_a_failed_save(failed: bool, pools: Pools, tmp_path: Path) -> None:
    run = async_case(tmp_path, gated=True, fails_on=1)
    call = partial(requeue_after_a_failure, run, failed=failed)
    assert pools.run(2, call, FAILS_IN_S) == [[True], [True]]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]


# -- contents and names of saves -------------------------------------------------------------------


class UnrestorableError(Exception):
    """Can be pickled but not unpickled, like many exceptions."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


class UnrestorableState(Callback):
    """Has such an object in its state at first."""

    error: UnrestorableError | None = UnrestorableError("a", "b")

    def state_dict(self) -> dict[str, Any]:
        return {"last_error": self.error}


def save_unrestorable_state(run: FitCase) -> dict[int, str]:
    callback = UnrestorableState()

    def save_without_it(trainer: pl.Trainer) -> None:
        callback.error = None
        save_to(run, "b")(trainer)

    return fit_with(run, {2: save_to(run, "a"), 4: save_without_it}, callback).errors


@pytest.mark.long
def test_state_that_cannot_be_unpickled_is_refused_with_its_keys(
    pools: Pools, tmp_path: Path
) -> None:
    run = async_case(tmp_path)
    for errors in pools.run(2, partial(save_unrestorable_state, run), FAILS_IN_S):
        assert list(errors) == [2]
        assert "callbacks" in errors[2]
        assert "UnrestorableState" in errors[2]
        assert "last_error" in errors[2]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["b.ckpt"]
    assert not list(tmp_path.glob(".zero-*"))


def save_without_memory(run: FitCase) -> dict[int, str]:
    """Save while rank 1 cannot allocate memory, and save again when it can."""

    def refuse(*_: object, **__: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    def save_and_fail(trainer: pl.Trainer) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if comm.get_rank() == 1:
                patch.setattr(mmap, "mmap", refuse)
            save_to(run, "a")(trainer)

    return fit_with(run, {2: save_and_fail, 4: save_to(run, "b")}).errors


def test_a_rank_without_memory_is_named_on_all_ranks(pools: Pools, tmp_path: Path) -> None:
    for errors in pools.run(2, partial(save_without_memory, async_case(tmp_path)), FAILS_IN_S):
        assert list(errors) == [2]
        assert errors[2].startswith("SaveError")
        for text in ("rank 1", "async_save"):
            assert text in errors[2]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["b.ckpt"]
    assert not list(tmp_path.glob(".zero-*"))


class Slow(Gate):
    """Pauses the writer that pickles it."""

    def __reduce__(self) -> Any:
        if in_background():
            time.sleep(0.1)
        return Slow, (self.path, self.fails_on)


class StepLoggingNet(RegressionNet):
    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        self.log("count", float(self.global_step))
        return self._loss(batch)


CALLBACKS: dict[str, list[dict[str, Any]]] = {
    "two of the same name": [{"monitor": "val_loss", "mode": "max"}, {"every_n_epochs": 1}],
    "one name for three": [
        {
            "filename": "best",
            "save_top_k": 3,
            "every_n_train_steps": 1,
            "monitor": "count",
            "mode": "min",
        }
    ],
}


def best_of(run: FitCase, callbacks: str) -> dict[str, bool]:
    """Train with slow writers; return whether each callback's best checkpoint is published."""
    folder = Path(run.root) / "kept"
    added = [ModelCheckpoint(dirpath=folder, **options) for options in CALLBACKS[callbacks]]
    trainer, net, data, actor = run.make(*added)
    actor.gate = Slow(str(gate_of(run)))
    trainer.fit(net, **data)
    best = [Path(callback.best_model_path) for callback in added]
    return {path.name: is_published(path) for path in best}


@pytest.mark.long
@pytest.mark.parametrize("callbacks", CALLBACKS)
def test_background_saves_have_the_names_of_blocking_saves(
    callbacks: str, pools: Pools, tmp_path: Path
) -> None:
    found = {}
    for name in ("blocking", "background"):
        is_async = name == "background"
        run = async_case(tmp_path / name, async_save=is_async, net=StepLoggingNet.of)
        best = pools.run(2, partial(best_of, run, callbacks), FAILS_IN_S)
        found[name] = ({file: step_of(Path(run.root) / "kept" / file) for file in kept(run)}, best)
    assert found["background"] == found["blocking"]
    steps, best = found["blocking"]
    assert len(steps) > 1
    assert all(best[0].values())
