"""Background saves: their contents, when they are published, and how failures are reported."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from deepspeed import comm
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_elastic_zero.checkpoint import background
from lightning_elastic_zero.checkpoint.types import CheckpointStats
from lightning_elastic_zero.core.memory import memory_pools
from tests.support.checkpoints import files_of
from tests.support.fits import FitCase, elastic_strategy_of
from tests.support.outcome import captured_log, error_text
from tests.support.ranks import Pools
from tests.trainer._async_save import (
    OTHER,
    StepActor,
    actor_of,
    async_case,
    fit_with,
    gate_of,
    is_published,
    kept,
    open_later,
    publish_held,
    save_other,
    save_to,
)

pytestmark = pytest.mark.engine


def save_during_training(run: FitCase) -> dict[str, Any]:
    """Save after a step, train to the end, and only then let the writer continue."""
    seen: dict[str, Any] = {}

    def check(trainer: pl.Trainer) -> None:
        seen["exists at the end"] = run.path("a").exists()
        gate_of(run).touch()

    return {"stats": stats_of(fit_with(run, {2: save_to(run, "a"), -1: check})), **seen}


def stats_of(actor: StepActor) -> CheckpointStats:
    stats = elastic_strategy_of(actor.trainer).last_save
    assert stats is not None, (actor.errors, actor.causes)
    return stats


@pytest.mark.parametrize(("stage", "precision"), [(1, "32-true"), (2, "bf16-true"), (3, "32-true")])
def test_a_background_save_equals_a_blocking_save(
    stage: int, precision: str, pools: Pools, tmp_path: Path
) -> None:
    """Training does not wait for it."""
    made = partial(async_case, stage=stage, gated=True, trainer={"precision": precision})
    blocking = made(tmp_path / "blocking", async_save=False)
    background = made(tmp_path / "background")
    for run in (blocking, background):
        for seen in pools.run(2, partial(save_during_training, run)):
            assert seen["exists at the end"] == (run is blocking)
            assert (seen["stats"].waited_s < seen["stats"].seconds) == (run is background)
    expected = files_of(Path(blocking.root) / "a.ckpt")
    found = files_of(Path(background.root) / "a.ckpt")
    assert found.keys() == expected.keys()
    for name, tree in expected.items():
        assert found[name] == tree, name


def save_on_a_full_host(run: FitCase) -> tuple[list[bool], list[str]]:
    """Save twice while there is no memory, and once more; return which are published at once."""
    published: list[bool] = []

    def save(name: str, trainer: pl.Trainer, *, full: bool = False) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if full and comm.get_rank() == 1:
                root = Path(run.root, "proc")
                patch.setattr(background, "memory_pools", lambda: memory_pools(root))
            save_to(run, name)(trainer)
        published.append(is_published(run.path(name)))
        trainer.strategy.barrier()

    with captured_log("lightning_elastic_zero", logging.WARNING) as messages:
        fit_with(
            run,
            {
                1: partial(save, "a", full=True),
                2: partial(save, "b", full=True),
                3: partial(save, "c"),
                -1: lambda _: gate_of(run).touch(),
            },
        )
    return published, [text for text in messages if "async_save" in text]


def test_a_save_without_memory_for_a_copy_is_synchronous(pools: Pools, tmp_path: Path) -> None:
    """On all ranks, with one message of rank 0; later saves use memory that has become free."""
    proc = tmp_path / "proc" / "proc"
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text("d323d6f9")
    (proc / "meminfo").write_text("MemTotal: 99999 kB\nMemAvailable: 1 kB\n")
    run = async_case(tmp_path, gated=True)
    ranks = pools.run(2, partial(save_on_a_full_host, run))
    assert [published for published, _ in ranks] == [[True, True, False]] * 2
    (message,), others = (messages for _, messages in ranks)
    assert not others
    assert "Saves are synchronous, despite async_save" in message
    assert "has 0.0 GB of free memory" in message
    assert is_published(run.path("c"))


def save_twice(run: FitCase) -> tuple[dict[int, str], dict[int, list[str]]]:
    """Save with a writer that fails, save again, and save without a failure."""
    gate_of(run).touch()

    def save_successfully(trainer: pl.Trainer) -> None:
        actor_of(trainer).gate = None
        save_to(run, "c")(trainer)

    actor = fit_with(run, {2: save_to(run, "a"), 4: save_to(run, "b"), 5: save_successfully})
    return actor.errors, actor.causes


@pytest.mark.parametrize("fails_on", [0, 1])
def test_a_failed_background_save_is_raised_on_all_ranks_at_the_next_save(
    fails_on: int, pools: Pools, tmp_path: Path
) -> None:
    run = async_case(tmp_path, gated=True, fails_on=fails_on)
    ranks = pools.run(2, partial(save_twice, run))
    for errors, causes in ranks:
        assert list(errors) == [4]
        assert errors[4].startswith("SaveError")
        assert "a.ckpt could not be saved in the background" in errors[4]
        assert "the disk is broken" in errors[4]
        assert f"rank {fails_on}" in errors[4]
        assert "SaveError" in causes[4]
    assert "OSError" in ranks[fails_on][1][4]
    assert [p.name for p in sorted(tmp_path.glob("*.ckpt"))] == ["c.ckpt"]
    assert not list(tmp_path.glob(".zero-*"))


def watch_folder(run: FitCase) -> dict[str, dict[str, str]]:
    """List ModelCheckpoint's folder during and after its first two saves, and at the end."""
    seen: dict[str, dict[str, str]] = {}

    def first(trainer: pl.Trainer) -> None:
        trainer.strategy.barrier()
        seen["first held"] = kept(run)
        publish_held(run, trainer)
        seen["first published"] = kept(run)
        trainer.strategy.barrier()
        gate_of(run).unlink(missing_ok=True)

    def second(trainer: pl.Trainer) -> None:
        seen["second held"] = kept(run)
        publish_held(run, trainer)
        seen["second published"] = kept(run)

    actor = fit_with(run, {1: partial(save_other, run), 3: first, 5: second})
    assert not actor.errors, actor.errors
    return {**seen, "end": kept(run)}


@pytest.mark.parametrize("save_last", [None, pytest.param("link", marks=pytest.mark.long)])
def test_top_k_deletes_when_the_successor_is_published(
    save_last: str | None, pools: Pools, tmp_path: Path
) -> None:
    """The link ``last.ckpt`` points to the last published checkpoint."""
    options = {"save_top_k": 1, "filename": "{step}", "save_last": save_last}
    run = async_case(tmp_path, gated=True, checkpoint=options)
    for seen in pools.run(2, partial(watch_folder, run)):
        assert seen["first held"] == OTHER
        assert seen["first published"] == with_other("step=2.ckpt", save_last)
        assert seen["second held"] == seen["first published"]
        assert seen["second published"] == with_other("step=4.ckpt", save_last)
        assert seen["end"] == with_other("step=6.ckpt", save_last)


def with_other(name: str, save_last: str | None) -> dict[str, str]:
    return OTHER | {name: name} | ({"last.ckpt": name} if save_last else {})


def fail_the_second(run: FitCase) -> tuple[dict[str, str], str]:
    """Make ModelCheckpoint's second save fail; return the remaining entries."""

    def other_first(trainer: pl.Trainer) -> None:
        save_other(run, trainer)
        trainer.strategy.barrier()
        gate_of(run).touch()

    def break_disk(trainer: pl.Trainer) -> None:
        gate = actor_of(trainer).gate
        assert gate is not None
        gate.fails_on = 1

    error = error_text(lambda: fit_with(run, {1: other_first, 3: break_disk}))
    return kept(run), error


@pytest.mark.long
@pytest.mark.parametrize("save_last", [None, "link"])
def test_a_failed_background_save_deletes_nothing(
    save_last: str | None, pools: Pools, tmp_path: Path
) -> None:
    options = {"save_top_k": 1, "filename": "{step}", "save_last": save_last}
    run = async_case(tmp_path, gated=True, epochs=2, checkpoint=options)
    for remaining, error in pools.run(2, partial(fail_the_second, run)):
        assert "the disk is broken" in error
        assert remaining == with_other("step=2.ckpt", save_last)


def perform(action: str, trainer: pl.Trainer, run: FitCase) -> None:
    """Perform an action that must wait for a save."""
    if action == "save":
        save_to(run, "b")(trainer)
    elif action == "load":
        trainer.strategy.load_checkpoint(run.path("a"))
    elif action == "hpc":
        save_to(run, "hpc_ckpt_1")(trainer)
        assert is_published(run.path("hpc_ckpt_1"))
    elif action == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        raise {"KeyboardInterrupt": KeyboardInterrupt, "exception": ZeroDivisionError}[action]


ENDS = {
    "exception": (ZeroDivisionError,),
    "SIGTERM": (SIGTERMException,),
    "KeyboardInterrupt": (SystemExit,),
}
"""Exceptions with which Lightning ends the run."""


def save_then(run: FitCase, action: str) -> dict[str, Any]:
    """Save with a writer paused for a second, and perform an action that must wait."""
    seen: dict[str, Any] = {}

    def act(trainer: pl.Trainer) -> None:
        save_to(run, "a")(trainer)
        seen["before"] = is_published(run.path("a"))
        trainer.strategy.barrier()
        open_later(gate_of(run), 1.0)
        perform(action, trainer, run)
        seen["after"] = is_published(run.path("a"))

    handler = signal.getsignal(signal.SIGINT)
    try:
        actor = fit_with(run, {3: act}, raises=ENDS.get(action, ()))
    finally:
        signal.signal(signal.SIGINT, handler)
    return {**seen, "errors": actor.errors, "end": is_published(run.path("a"))}


@pytest.mark.long
@pytest.mark.parametrize("action", ["save", "load", "hpc"])
def test_saves_loads_and_requeueing_wait_for_the_save_in_flight(
    action: str, pools: Pools, tmp_path: Path
) -> None:
    for seen in pools.run(2, partial(save_then, async_case(tmp_path, gated=True), action)):
        assert not seen["errors"]
        assert not seen["before"]
        assert seen["after"]


@pytest.mark.long
@pytest.mark.parametrize("event", ENDS)
def test_an_interrupted_run_publishes_its_save_in_flight(
    event: str, pools: Pools, tmp_path: Path
) -> None:
    for seen in pools.run(2, partial(save_then, async_case(tmp_path, gated=True), event)):
        assert not seen["before"]
        assert seen["end"]
    assert not list(tmp_path.glob(".zero-*"))


@pytest.mark.long
def test_save_on_exception_waits_for_the_save_in_flight(pools: Pools, tmp_path: Path) -> None:
    options = {"save_on_exception": True, "filename": "{step}", "every_n_epochs": 9}
    run = async_case(tmp_path, gated=True, checkpoint=options)
    for seen in pools.run(2, partial(save_then, run, "exception")):
        assert seen["end"]
    assert kept(run)["step=3.ckpt"] == "step=3.ckpt"
    paths = (tmp_path / "a.ckpt", tmp_path / "kept" / "step=3.ckpt")
    first, second = ((path / "manifest.json").stat().st_mtime_ns for path in paths)
    assert first < second


def save_after(run: FitCase) -> bool:
    save_to(run, "a")(fit_with(run).trainer)
    return is_published(run.path("a"))


def test_a_save_after_the_fit_is_published_when_the_call_returns(
    pools: Pools, tmp_path: Path
) -> None:
    assert all(pools.run(2, partial(save_after, async_case(tmp_path, epochs=1))))


class FailsFrom(StepActor):
    """Makes saves fail from the third epoch on, and logs a value that decreases in each epoch."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.log("falls", -float(trainer.current_epoch))
        if trainer.current_epoch == 2 and self.gate is not None:
            self.gate.fails_on = 1


def fail_in_the_third_epoch(run: FitCase) -> dict[str, Any]:
    """Save at the end of each epoch; return the callback's paths at the end."""
    gate_of(run).touch()
    trainer, net, data, _ = run.make()
    error = error_text(lambda: trainer.fit(net, **data))
    saves: Any = trainer.checkpoint_callback
    names = {"best": saves.best_model_path, "last": saves.last_model_path}
    ranked = {Path(path).name: float(score) for path, score in saves.best_k_models.items()}
    best = saves.best_model_score
    score = None if best is None else float(best)
    return {"names": names, "ranked": ranked, "score": score, "error": error}


@pytest.mark.parametrize(
    ("options", "best"),
    [
        ({"monitor": "falls", "save_top_k": 3}, "step=4.ckpt"),
        ({"monitor": "falls", "mode": "max", "save_top_k": 3}, "step=2.ckpt"),
        ({"save_top_k": 1, "save_last": "link"}, ""),
    ],
    ids=["best", "worst", "newest"],
)
def test_model_checkpoint_does_not_name_a_failed_save(
    options: dict[str, Any], best: str, pools: Pools, tmp_path: Path
) -> None:
    options = {"filename": "{step}", "enable_version_counter": True, **options}
    run = async_case(tmp_path, epochs=4, checkpoint=options)
    run = replace(run, watch=partial(FailsFrom, gated=True))
    for seen in pools.run(2, partial(fail_in_the_third_epoch, run)):
        assert "the disk is broken" in seen["error"]
        names = seen["names"]
        assert Path(names["best"]).name == best
        assert all(Path(path, "manifest.json").is_file() for path in names.values() if path)
        assert not seen["ranked"].keys() & {"step=6.ckpt", "step=8.ckpt"}
        assert seen["score"] == (seen["ranked"][best] if best else None)
