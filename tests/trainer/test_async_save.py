"""Saving behind training: what is written, when it is there, and who hears that it failed."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.support.checkpoints import files_of
from tests.support.outcome import error_text
from tests.support.ranks import Pools
from tests.trainer._async_save import (
    OTHER,
    AsyncSaveSpec,
    elastic_strategy_of,
    is_published,
    kept,
    open_later,
    save_other,
)

pytestmark = pytest.mark.engine


def save_in_the_midst(run: AsyncSaveSpec, step: int = 2) -> dict[str, Any]:
    """Save after a step, train to the end, and only then let the writer write."""
    seen: dict[str, Any] = {}
    target = Path(run.root) / "a.ckpt"

    def look(trainer: pl.Trainer) -> None:
        seen["there at the end"] = target.exists()
        run.gate.touch()

    run.actions = {step: lambda trainer: trainer.save_checkpoint(str(target)), -1: look}
    trainer, net, data, director = run.make()
    trainer.fit(net, data)
    figures = elastic_strategy_of(trainer).last_save
    assert figures is not None, (director.errors, director.causes)
    return {**seen, "errors": director.errors, "figures": figures}


@pytest.mark.cases(2)
@pytest.mark.parametrize(("stage", "precision"), [(1, "32-true"), (2, "bf16-true"), (3, "32-true")])
def test_a_background_save_equals_a_blocking_save(
    stage: int, precision: str, pools: Pools, tmp_path: Path
) -> None:
    blocking = AsyncSaveSpec(
        str(tmp_path / "blocking"), stage, async_save=False, precision=precision
    )
    behind = AsyncSaveSpec(str(tmp_path / "behind"), stage, precision=precision)
    for run in (blocking, behind):
        run.gated = True
        pools.run(2, partial(save_in_the_midst, run))
    expected = files_of(Path(blocking.root) / "a.ckpt")
    found = files_of(Path(behind.root) / "a.ckpt")
    assert found.keys() == expected.keys()
    for name, tree in expected.items():
        assert found[name] == tree, name


@pytest.mark.long
def test_training_does_not_wait_for_a_background_save(pools: Pools, tmp_path: Path) -> None:
    for seen in pools.run(2, partial(save_in_the_midst, AsyncSaveSpec(str(tmp_path), gated=True))):
        assert not seen["there at the end"]
        assert seen["figures"].waited_s < seen["figures"].seconds
    assert is_published(tmp_path / "a.ckpt")


def step_while_copying(run: AsyncSaveSpec) -> None:
    """Save, with the copying thread paused until just before the next step."""
    target = str(Path(run.root) / "a.ckpt")

    def save(trainer: pl.Trainer) -> None:
        writer = elastic_strategy_of(trainer)._manager._writer
        assert writer is not None
        writer._snapshotter._thread.submit(time.sleep, 1.0)
        trainer.save_checkpoint(target)

    run.actions = {2: save}
    trainer, net, data, director = run.make()
    trainer.fit(net, data)
    assert not director.errors


def test_the_next_step_waits_for_copies(pools: Pools, tmp_path: Path) -> None:
    blocking = AsyncSaveSpec(str(tmp_path / "blocking"), async_save=False)
    pools.run(2, partial(save_in_the_midst, blocking))
    behind = AsyncSaveSpec(str(tmp_path / "behind"))
    pools.run(2, partial(step_while_copying, behind))
    expected = files_of(Path(blocking.root) / "a.ckpt")
    assert files_of(Path(behind.root) / "a.ckpt") == expected


def save_with_little_memory(run: AsyncSaveSpec) -> dict[str, Any]:
    """Save after a step; let the writer write after the next micro-batch, or later."""
    seen: dict[str, Any] = {}
    target = str(Path(run.root) / "a.ckpt")

    class Opens(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            if trainer.global_step == 1 and not trainer.fit_loop._should_accumulate():
                trainer.save_checkpoint(target)
            elif trainer.global_step == 1 and run.max_snapshot_bytes is not None:
                open_later(run.gate, 0.5)
            elif "open at the next step" not in seen and trainer.global_step == 2:
                seen["open at the next step"] = run.gate.exists()

    trainer, net, data, director = run.make()
    trainer.callbacks.append(Opens())  # type: ignore[attr-defined]

    def look(trainer: pl.Trainer) -> None:
        writer = elastic_strategy_of(trainer)._manager._writer
        assert writer is not None
        seen["memory"] = writer._snapshotter._memory.size_bytes
        run.gate.touch()

    director.actions[-1] = look
    trainer.fit(net, data)
    figures = elastic_strategy_of(trainer).last_save
    assert figures is not None, (director.errors, director.causes)
    return {**seen, "figures": figures}


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
def test_state_without_room_for_a_copy_delays_the_step_only(
    stage: int, pools: Pools, tmp_path: Path
) -> None:
    saved, memory = {}, {}
    for most in (None, 2500, 0):
        run = AsyncSaveSpec(
            str(tmp_path / str(most)), stage, max_snapshot_bytes=most, gated=True, accumulate=2
        )
        ranks = pools.run(2, partial(save_with_little_memory, run))
        saved[most] = files_of(Path(run.root) / "a.ckpt")
        memory[most] = [seen["memory"] for seen in ranks]
        assert all(seen["open at the next step"] == (most is not None) for seen in ranks)
        assert all(seen["figures"].waited_s < 20 for seen in ranks)
    assert saved[2500] == saved[None]
    assert saved[0] == saved[None]
    assert memory[None][1] > 2500 >= memory[2500][1] > memory[0][1]
    assert memory[0][1] == 0 or stage == 3  # its part of the frozen weights has to be copied


def save_twice(run: AsyncSaveSpec) -> dict[str, Any]:
    """Save with a writer that fails, then twice more, the second time with one that does not."""
    root = Path(run.root)
    run.gate.touch()

    def again(trainer: pl.Trainer) -> None:
        director.gate = None
        trainer.save_checkpoint(str(root / "c.ckpt"))

    run.actions = {
        2: lambda trainer: trainer.save_checkpoint(str(root / "a.ckpt")),
        4: lambda trainer: trainer.save_checkpoint(str(root / "b.ckpt")),
        5: again,
    }
    trainer, net, data, director = run.make()
    trainer.fit(net, data)
    return {"errors": director.errors, "causes": director.causes}


@pytest.mark.parametrize(("fails_on", "max_snapshot_bytes"), [(0, None), (1, None), (1, 0)])
def test_a_failed_background_save_is_raised_on_all_ranks_at_the_next_save(
    fails_on: int, max_snapshot_bytes: int | None, pools: Pools, tmp_path: Path
) -> None:
    run = AsyncSaveSpec(
        str(tmp_path), gated=True, fails_on=fails_on, max_snapshot_bytes=max_snapshot_bytes
    )
    ranks = pools.run(2, partial(save_twice, run))
    for seen in ranks:
        assert list(seen["errors"]) == [4]
        assert "a.ckpt could not be saved in the background" in seen["errors"][4]
        assert "the disk is broken" in seen["errors"][4]
        assert f"rank {fails_on}" in seen["errors"][4]
        assert seen["errors"][4].startswith("SaveError")
        assert "SaveError" in seen["causes"][4]
    assert "OSError" in ranks[fails_on]["causes"][4]
    assert [p.name for p in sorted(tmp_path.glob("*.ckpt"))] == ["c.ckpt"]
    assert not list(tmp_path.glob(".zero-*"))


def fail_at_the_end(run: AsyncSaveSpec) -> str:
    run.gate.touch()
    run.actions = {5: lambda trainer: trainer.save_checkpoint(str(Path(run.root) / "a.ckpt"))}
    trainer, net, data, _ = run.make()
    return error_text(lambda: trainer.fit(net, data))


@pytest.mark.long
def test_a_failed_background_save_is_raised_at_the_end_of_the_fit(
    pools: Pools, tmp_path: Path
) -> None:
    for error in pools.run(
        2, partial(fail_at_the_end, AsyncSaveSpec(str(tmp_path), gated=True, fails_on=1))
    ):
        assert error.startswith("SaveError")
        assert "rank 1" in error
        assert "the disk is broken" in error


def watch_folder(run: AsyncSaveSpec) -> dict[str, dict[str, str]]:
    """List ModelCheckpoint's folder during its first and second save, and afterwards."""
    seen: dict[str, dict[str, str]] = {}

    def first(trainer: pl.Trainer) -> None:
        trainer.strategy.barrier()
        seen["first held"] = kept(run)
        trainer.strategy.barrier()
        run.gate.touch()
        elastic_strategy_of(trainer).wait_for_save()
        seen["first there"] = kept(run)
        trainer.strategy.barrier()
        run.gate.unlink(missing_ok=True)

    def second(trainer: pl.Trainer) -> None:
        seen["second held"] = kept(run)
        trainer.strategy.barrier()
        run.gate.touch()
        if run.fails_on is not None and director.gate is not None:
            director.gate.fails_on = run.fails_on
        elastic_strategy_of(trainer).wait_for_save()
        seen["second there"] = kept(run)

    run.actions = {1: partial(save_other, run), 3: first, 5: second}
    trainer, net, data, director = run.make()
    trainer.fit(net, data)
    assert not director.errors, director.errors
    seen["end"] = kept(run)
    return seen


def test_top_k_deletes_when_the_successor_is_published(pools: Pools, tmp_path: Path) -> None:
    run = AsyncSaveSpec(
        str(tmp_path), gated=True, checkpoint={"save_top_k": 1, "filename": "{step}"}
    )
    for seen in pools.run(2, partial(watch_folder, run)):
        assert seen["first held"] == OTHER
        assert seen["first there"] == OTHER | {"step=2.ckpt": "step=2.ckpt"}
        assert seen["second held"] == seen["first there"]
        assert seen["second there"] == OTHER | {"step=4.ckpt": "step=4.ckpt"}
        assert seen["end"] == OTHER | {"step=6.ckpt": "step=6.ckpt"}


def linked(name: str) -> dict[str, str]:
    return {"last.ckpt": name, name: name}


@pytest.mark.long
def test_last_leads_to_the_last_published_checkpoint(pools: Pools, tmp_path: Path) -> None:
    options = {"save_top_k": 1, "filename": "{step}", "save_last": "link"}
    for seen in pools.run(
        2, partial(watch_folder, AsyncSaveSpec(str(tmp_path), gated=True, checkpoint=options))
    ):
        assert seen["first held"] == OTHER
        assert seen["first there"] == OTHER | linked("step=2.ckpt")
        assert seen["second held"] == seen["first there"]
        assert seen["second there"] == OTHER | linked("step=4.ckpt")
        assert seen["end"] == OTHER | linked("step=6.ckpt")


def fail_the_second(run: AsyncSaveSpec) -> tuple[dict[str, str], str]:
    """Make ModelCheckpoint's second save fail; return the remaining entries."""

    def other_first(trainer: pl.Trainer) -> None:
        save_other(run, trainer)
        trainer.strategy.barrier()
        run.gate.touch()

    def break_disk(_: pl.Trainer) -> None:
        assert director.gate is not None
        director.gate.fails_on = 1

    run.actions = {1: other_first, 3: break_disk}
    trainer, net, data, director = run.make()
    error = ""
    try:
        trainer.fit(net, data)
    except Exception as raised:  # noqa: BLE001 - it is what the test looks at
        error = str(raised)
    return kept(run), error


@pytest.mark.long
@pytest.mark.parametrize("save_last", [None, "link"])
def test_a_failed_background_save_deletes_nothing(
    save_last: str | None, pools: Pools, tmp_path: Path
) -> None:
    options = {"save_top_k": 1, "filename": "{step}", "save_last": save_last}
    run = AsyncSaveSpec(str(tmp_path), gated=True, epochs=2, checkpoint=options)
    old = linked("step=2.ckpt") if save_last else {"step=2.ckpt": "step=2.ckpt"}
    for left, error in pools.run(2, partial(fail_the_second, run)):
        assert "the disk is broken" in error
        assert left == OTHER | old


def do_now(what: str, trainer: pl.Trainer, first: Path) -> None:
    """Do something that has to wait for a save."""
    if what == "save":
        trainer.save_checkpoint(str(first.with_name("b.ckpt")))
    elif what == "load":
        trainer.strategy.load_checkpoint(str(first))
    elif what == "hpc":
        requeued = first.with_name("hpc_ckpt_1.ckpt")
        trainer.save_checkpoint(str(requeued))
        assert is_published(requeued)
    elif what == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        raise {"KeyboardInterrupt": KeyboardInterrupt, "exception": ZeroDivisionError}[what]


def save_then(run: AsyncSaveSpec, what: str) -> dict[str, Any]:
    """Save with a writer paused for a second, and at once do something that has to wait."""
    first = Path(run.root) / "a.ckpt"
    seen: dict[str, Any] = {}

    def act(trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(str(first))
        seen["before"] = is_published(first)
        trainer.strategy.barrier()
        open_later(run.gate, 1.0)
        do_now(what, trainer, first)
        seen["after"] = is_published(first)

    run.actions = {3: act}
    trainer, net, data, director = run.make()
    director.passes_on = (ZeroDivisionError,)
    handler = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(net, data)
    except (ZeroDivisionError, SystemExit, SIGTERMException) as error:
        seen["raised"] = type(error).__name__
    finally:
        signal.signal(signal.SIGINT, handler)
    return {**seen, "errors": director.errors, "end": is_published(first)}


@pytest.mark.long
@pytest.mark.parametrize("what", ["save", "load", "hpc"])
def test_saves_loads_and_requeueing_wait_for_the_save_in_flight(
    what: str, pools: Pools, tmp_path: Path
) -> None:
    for seen in pools.run(2, partial(save_then, AsyncSaveSpec(str(tmp_path), gated=True), what)):
        assert not seen["errors"]
        assert not seen["before"]
        assert seen["after"]


@pytest.mark.long
@pytest.mark.parametrize("what", ["exception", "SIGTERM", "KeyboardInterrupt"])
def test_an_interrupted_run_publishes_its_save_in_flight(
    what: str, pools: Pools, tmp_path: Path
) -> None:
    for seen in pools.run(2, partial(save_then, AsyncSaveSpec(str(tmp_path), gated=True), what)):
        assert "raised" in seen
        assert not seen["before"]
        assert seen["end"]
    assert not list(tmp_path.glob(".zero-*"))


@pytest.mark.long
def test_save_on_exception_waits_for_the_save_in_flight(pools: Pools, tmp_path: Path) -> None:
    options = {"save_on_exception": True, "filename": "{step}", "every_n_epochs": 9}
    run = AsyncSaveSpec(str(tmp_path), gated=True, checkpoint=options)
    for seen in pools.run(2, partial(save_then, run, "exception")):
        assert seen["end"]
    assert kept(run)["step=3.ckpt"] == "step=3.ckpt"
    places = (tmp_path / "a.ckpt", tmp_path / "kept" / "step=3.ckpt")
    first, second = ((place / "manifest.json").stat().st_mtime_ns for place in places)
    assert first < second


def save_after(run: AsyncSaveSpec) -> bool:
    trainer, net, data, _ = run.make()
    trainer.fit(net, data)
    trainer.save_checkpoint(str(Path(run.root) / "a.ckpt"))
    return is_published(Path(run.root) / "a.ckpt")


def test_a_save_after_the_fit_is_published_when_the_call_returns(
    pools: Pools, tmp_path: Path
) -> None:
    assert all(pools.run(2, partial(save_after, AsyncSaveSpec(str(tmp_path), epochs=1))))


@pytest.mark.long
def test_one_rank_saves_in_the_background(pools: Pools, tmp_path: Path) -> None:
    run = AsyncSaveSpec(str(tmp_path), gated=True)
    assert not pools.run(1, partial(save_in_the_midst, run))[0]["there at the end"]
    assert is_published(tmp_path / "a.ckpt")
