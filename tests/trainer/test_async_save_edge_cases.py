"""Saving behind training where it is hardest: between backward and the step, and as runs end."""

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
from deepspeed import comm

from lightning_elastic_zero.errors import ElasticZeroError
from tests.support.processes import PROMPT_TIMEOUT_S
from tests.support.ranks import Pools
from tests.trainer._async_save import (
    OTHER,
    AsyncSaveSpec,
    elastic_strategy_of,
    is_published,
    kept,
    open_later,
    save_other,
    shorten_drain_timeout,
    step_of,
    wait_for_writers,
)
from tests.trainer._async_save_edge_cases import (
    CALLBACKS,
    SAVE_POINTS,
    HeldManifest,
    StepLoggingNet,
    UnrestorableState,
    best_of,
    check_same_as_blocking_save,
)

pytestmark = pytest.mark.engine

FAILS_IN_S = PROMPT_TIMEOUT_S
"""A call that takes longer hangs."""


# -- between backward and the step -----------------------------------------------------------------


@pytest.mark.parametrize("place", SAVE_POINTS)
@pytest.mark.parametrize(("stage", "max_snapshot_bytes"), [(1, None), (3, None), (1, 0)])
def test_no_step_tears_a_snapshot(
    stage: int, max_snapshot_bytes: int | None, place: str, pools: Pools, tmp_path: Path
) -> None:
    """Saved between backward and the step, or before a step by hand."""
    check_same_as_blocking_save(stage, max_snapshot_bytes, SAVE_POINTS[place], pools, tmp_path)


# -- saves that are given up -----------------------------------------------------------------------


def give_up_the_second(run: AsyncSaveSpec) -> list[dict[str, str]]:
    """End by an exception during ModelCheckpoint's second save; list entries then and later."""

    def first(trainer: pl.Trainer) -> None:
        trainer.strategy.barrier()
        run.gate.touch()
        elastic_strategy_of(trainer).wait_for_save()
        trainer.strategy.barrier()
        run.gate.unlink(missing_ok=True)

    def second(trainer: pl.Trainer) -> None:
        trainer.strategy.barrier()
        raise ZeroDivisionError

    run.actions = {1: partial(save_other, run), 3: first, 5: second}
    trainer, net, data, director = run.make()
    director.passes_on = (ZeroDivisionError,)
    with pytest.MonkeyPatch.context() as patch:
        shorten_drain_timeout(patch, 0.5, 0.5)
        with suppress(ZeroDivisionError):
            trainer.fit(net, data)
        comm.barrier()
        seen = [kept(run)]
        comm.barrier()
        run.gate.touch()
        wait_for_writers()
    return [*seen, kept(run)]


@pytest.mark.long
def test_an_abandoned_save_deletes_nothing(pools: Pools, tmp_path: Path) -> None:
    run = AsyncSaveSpec(
        str(tmp_path), gated=True, checkpoint={"save_top_k": 1, "filename": "{step}"}
    )
    left = OTHER | {"step=2.ckpt": "step=2.ckpt"}
    for seen in pools.run(2, partial(give_up_the_second, run), FAILS_IN_S):
        assert seen == [left, left]


def save_over(first: AsyncSaveSpec, second: AsyncSaveSpec, *, free_first: bool) -> dict[str, Any]:
    """Abandon a save just before it is published, and save to its path in another fit."""
    target, manifest = Path(first.root) / "last.ckpt", HeldManifest()
    seen: dict[str, Any] = {}

    def save_and_end(trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(str(target))
        raise ZeroDivisionError

    def free(when: str) -> None:
        manifest.free.set()
        wait_for_writers()
        seen[when] = step_of(target) if is_published(target) else None
        comm.barrier()

    with pytest.MonkeyPatch.context() as patch:
        shorten_drain_timeout(patch, 0.5, 0.5)
        manifest.patch(patch)
        first.actions = {2: save_and_end}
        trainer, net, data, director = first.make()
        director.passes_on = (ZeroDivisionError,)
        with suppress(ZeroDivisionError):
            trainer.fit(net, data)
        assert manifest.held == (comm.get_rank() == 0)
        seen["given up"] = is_published(target)
        comm.barrier()
        if free_first:
            free("freed")
        second.actions = {4: lambda trainer: trainer.save_checkpoint(str(target))}
        trainer, net, data, director = second.make()
        trainer.fit(net, data)
        seen["saved"] = step_of(target)
        comm.barrier()
        free("end")
    return {**seen, "errors": director.errors}


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("free_first", [False, True])
def test_an_abandoned_save_is_never_published(
    async_save: bool, free_first: bool, pools: Pools, tmp_path: Path
) -> None:
    first, second = (
        AsyncSaveSpec(str(tmp_path)),
        AsyncSaveSpec(str(tmp_path), async_save=async_save),
    )
    call = partial(save_over, first, second, free_first=free_first)
    for seen in pools.run(2, call, FAILS_IN_S):
        assert not seen["given up"]
        assert seen.get("freed") is None
        assert not seen["errors"]
        assert seen["saved"] == 4
        assert seen["end"] == 4
    assert not list(tmp_path.glob(".zero-*"))


def fail_with_a_save_held(run: AsyncSaveSpec) -> int:
    """Raise while the writer is paused for good; count the timeouts spent on it."""
    patience_s, spent, wait = 3.125, list[float](), threading.Event.wait

    def counted(event: threading.Event, timeout: float | None = None) -> bool:
        happened = wait(event, timeout)
        if timeout == patience_s and not happened:
            spent.append(timeout)
        return happened

    def act(trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(str(Path(run.root) / "a.ckpt"))
        trainer.strategy.barrier()
        raise ZeroDivisionError

    run.actions = {3: act}
    trainer, net, data, director = run.make()
    director.passes_on = (ZeroDivisionError,)
    with pytest.MonkeyPatch.context() as patch:
        shorten_drain_timeout(patch, patience_s, 1.0)
        patch.setattr(threading.Event, "wait", counted)
        with suppress(ZeroDivisionError):
            trainer.fit(net, data)
        comm.barrier()
        run.gate.touch()
        wait_for_writers()
    return len(spent)


@pytest.mark.long
def test_only_one_timeout_is_spent_on_a_hanging_save(pools: Pools, tmp_path: Path) -> None:
    options = {"save_on_exception": True, "filename": "{step}", "every_n_epochs": 9}
    run = AsyncSaveSpec(str(tmp_path), gated=True, checkpoint=options)
    assert pools.run(2, partial(fail_with_a_save_held, run), FAILS_IN_S) == [1, 1]
    assert kept(run) == {"step=3.ckpt": "step=3.ckpt"}
    assert not is_published(tmp_path / "a.ckpt")


# -- saves before SLURM's requeueing ---------------------------------------------------------------


def requeue_in_a_wait(run: AsyncSaveSpec, wait: str) -> dict[str, Any]:
    """Send a signal while training waits for the save before; save in its handler."""
    root = Path(run.root)
    requeued = root / "hpc_ckpt_1.ckpt"
    seen: dict[str, Any] = {}

    def act(trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(str(root / "a.ckpt"))
        trainer.strategy.barrier()
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        open_later(run.gate, 1.5)
        if wait == "save":
            trainer.save_checkpoint(str(root / "b.ckpt"))
        else:
            elastic_strategy_of(trainer).wait_for_save()

    def handle(*_: object) -> None:
        seen["held"] = not is_published(root / "a.ckpt")
        trainer.save_checkpoint(str(requeued))
        seen["requeued"] = is_published(requeued)

    run.actions = {3: act}
    trainer, net, data, director = run.make()
    before = signal.signal(signal.SIGUSR2, handle)
    try:
        trainer.fit(net, data)
    finally:
        signal.signal(signal.SIGUSR2, before)
    return {**seen, "errors": director.errors}


@pytest.mark.long
@pytest.mark.parametrize("wait", ["save", "wait_for_save"])
def test_requeueing_while_a_save_is_waited_for_writes_both_saves(
    wait: str, pools: Pools, tmp_path: Path
) -> None:
    run = AsyncSaveSpec(str(tmp_path), gated=True)
    for seen in pools.run(2, partial(requeue_in_a_wait, run, wait), FAILS_IN_S):
        assert seen == {"held": True, "requeued": True, "errors": {}}
    there = {"a.ckpt", "hpc_ckpt_1.ckpt"} | ({"b.ckpt"} if wait == "save" else set())
    assert {path.name for path in tmp_path.glob("*.ckpt") if is_published(path)} == there
    assert not list(tmp_path.glob(".zero-*"))


def requeue_after_a_failure(run: AsyncSaveSpec, *, over: bool) -> dict[str, Any]:
    """Save for requeueing when a background save has failed, or is about to fail."""
    root = Path(run.root)
    requeued = root / "hpc_ckpt_1.ckpt"
    seen: dict[str, Any] = {}

    def act(trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(str(root / "a.ckpt"))
        director.gate = None
        trainer.strategy.barrier()
        open_later(run.gate, 0.5)
        writer = elastic_strategy_of(trainer)._manager._writer
        assert writer is not None
        while over and writer.busy:
            time.sleep(0.01)
        trainer.save_checkpoint(str(requeued))
        seen["requeued"] = is_published(requeued)

    run.actions = {3: act}
    trainer, net, data, director = run.make()
    with suppress(ElasticZeroError):
        trainer.fit(net, data)
    return {**seen, "errors": director.errors}


@pytest.mark.long
@pytest.mark.parametrize("over", [True, False])
def test_requeueing_saves_after_a_failed_save(over: bool, pools: Pools, tmp_path: Path) -> None:
    run = AsyncSaveSpec(str(tmp_path), gated=True, fails_on=1)
    for seen in pools.run(2, partial(requeue_after_a_failure, run, over=over), FAILS_IN_S):
        assert seen == {"requeued": True, "errors": {}}
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]


# -- what is saved, and under which names ----------------------------------------------------------


def save_what_is_strange(run: AsyncSaveSpec) -> dict[int, str]:
    root, holder = Path(run.root), UnrestorableState()

    def without(trainer: pl.Trainer) -> None:
        holder.strange = None
        trainer.save_checkpoint(str(root / "b.ckpt"))

    run.actions = {2: lambda trainer: trainer.save_checkpoint(str(root / "a.ckpt")), 4: without}
    trainer, net, data, director = run.make()
    trainer.callbacks.append(holder)  # type: ignore[attr-defined]
    trainer.fit(net, data)
    return director.errors


@pytest.mark.long
def test_state_that_cannot_be_unpickled_is_refused_by_place(pools: Pools, tmp_path: Path) -> None:
    run = AsyncSaveSpec(str(tmp_path))
    for errors in pools.run(2, partial(save_what_is_strange, run), FAILS_IN_S):
        assert list(errors) == [2]
        assert "callbacks" in errors[2]
        assert "UnrestorableState" in errors[2]
        assert "last_error" in errors[2]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["b.ckpt"]
    assert not list(tmp_path.glob(".zero-*"))


def save_without_memory(run: AsyncSaveSpec) -> dict[int, str]:
    """Save where rank 1 gets no memory, and then where it does."""
    root = Path(run.root)

    def refuse(*_: object, **__: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    def save_poor(trainer: pl.Trainer) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if comm.get_rank() == 1:
                patch.setattr(mmap, "mmap", refuse)
            trainer.save_checkpoint(str(root / "a.ckpt"))

    run.actions = {2: save_poor, 4: lambda trainer: trainer.save_checkpoint(str(root / "b.ckpt"))}
    trainer, net, data, director = run.make()
    trainer.fit(net, data)
    return director.errors


def test_a_rank_without_memory_is_named_on_all_ranks(pools: Pools, tmp_path: Path) -> None:
    for errors in pools.run(
        2, partial(save_without_memory, AsyncSaveSpec(str(tmp_path))), FAILS_IN_S
    ):
        assert list(errors) == [2]
        assert errors[2].startswith("SaveError")
        for text in ("rank 1", "max_snapshot_bytes", "async_save"):
            assert text in errors[2]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["b.ckpt"]
    assert not list(tmp_path.glob(".zero-*"))


def save_what_was_doomed(run: AsyncSaveSpec) -> dict[int, str]:
    """Save to a path whose deletion waits for a link, and only then move the link."""
    root = Path(run.root)
    link, scheduled, other = (root / f"{name}.ckpt" for name in ("last", "a", "other"))

    def point(trainer: pl.Trainer, target: Path) -> None:
        if comm.get_rank() == 0:
            link.unlink(missing_ok=True)
            link.symlink_to(target.name)
        trainer.strategy.barrier()

    def save(trainer: pl.Trainer, path: Path) -> None:
        trainer.save_checkpoint(str(path))
        elastic_strategy_of(trainer).wait_for_save()
        trainer.strategy.barrier()

    def schedule_delete(trainer: pl.Trainer) -> None:
        save(trainer, scheduled)
        save(trainer, other)
        point(trainer, scheduled)
        elastic_strategy_of(trainer).remove_checkpoint(scheduled)
        save(trainer, scheduled)
        point(trainer, other)

    run.actions = {2: schedule_delete, 4: lambda trainer: save(trainer, root / "b.ckpt")}
    trainer, net, data, director = run.make()
    trainer.fit(net, data)
    return director.errors


def test_a_pending_deletion_does_not_hit_a_new_save_to_the_path(
    pools: Pools, tmp_path: Path
) -> None:
    for errors in pools.run(
        2, partial(save_what_was_doomed, AsyncSaveSpec(str(tmp_path))), FAILS_IN_S
    ):
        assert not errors
    assert is_published(tmp_path / "a.ckpt")
    assert is_published(tmp_path / "b.ckpt")


@pytest.mark.long
@pytest.mark.parametrize("callbacks", CALLBACKS)
def test_names_in_the_background_are_those_of_blocking_saves(
    callbacks: str, pools: Pools, tmp_path: Path
) -> None:
    found = {}
    for name in ("blocking", "behind"):
        run = AsyncSaveSpec(str(tmp_path / name), async_save=name == "behind", net=StepLoggingNet)
        best = pools.run(2, partial(best_of, run, callbacks), FAILS_IN_S)
        found[name] = ({file: step_of(Path(run.root) / "kept" / file) for file in kept(run)}, best)
    assert found["behind"] == found["blocking"]
    steps, best = found["blocking"]
    assert len(steps) > 1
    assert all(best[0].values())
