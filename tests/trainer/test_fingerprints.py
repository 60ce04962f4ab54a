"""A save records the number of its state; a resume says that the live state has it, or fails."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm

from lightning_elastic_zero.api import load_checkpoint, save_checkpoint
from lightning_elastic_zero.checkpoint import load as loading
from lightning_elastic_zero.checkpoint.fingerprint import SavedState, check_loaded
from lightning_elastic_zero.coordination.ranks import OneRank
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.tools.fingerprint import fingerprint_checkpoint, recorded_fingerprint
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy
from tests.support.fits import FitSpec
from tests.support.outcome import error_text, log_heard
from tests.support.plain_checkpoints import make_state, manifest_of
from tests.support.ranks import Pools
from tests.trainer._failure_cases import engine as plain_engine

pytestmark = pytest.mark.engine

SAME = "the state is the one that was saved (fingerprint "


@dataclass(frozen=True)
class FingerprintResult:
    saved: str
    """The last save's."""
    live: str
    """Of what was live after the load."""
    messages: tuple[str, ...]


def fit(plan: FitSpec, verb: str = "fit") -> FingerprintResult:
    trainer, net, data, _ = plan.make()
    with log_heard("lightning.pytorch.utilities.rank_zero", logging.INFO) as said:
        getattr(trainer, verb)(net, data, ckpt_path=plan.ckpt_path)
    strategy = trainer.strategy
    assert isinstance(strategy, ElasticDeepSpeedStrategy)
    of = [stats.fingerprint if stats else "" for stats in (strategy.last_save, strategy.last_load)]
    return FingerprintResult(
        of[0], of[1], tuple(text for text in said if text.startswith(("Saved", "Loaded")))
    )


def resume_with_a_flipped_bit(
    plan: FitSpec, rank: int, which: str = "masters"
) -> tuple[str, int, str]:
    """Resume where one bit of one rank flips after the first load, before it is compared.

    Args:
        plan: of the run.
        rank: whose.
        which: of its ``"masters"``, the ``"weights"`` that forward reads, or ``"frozen"`` ones.

    Returns:
        The error, the batches that were trained on, and what was loaded in the end.
    """
    flips = [rank]

    def after_the_flip(saved: Any, live: LiveEngine, *of_load: Any) -> Any:
        if flips and comm.get_rank() == flips.pop():
            held = live.rank_state(exclude_frozen=False, keep_module_weights=True)
            if which == "masters":
                fragment = held.flats[0].fragments[0]
                held.flats[0].master.view(torch.int32)[fragment.offset] ^= 1
            else:
                trained = {f.name for flat in held.flats for f in flat.fragments}
                frozen = (name for name in held.frozen if held.module_weights[name].numel())
                name = next(frozen) if which == "frozen" else min(trained)
                bits = {2: torch.int16, 4: torch.int32}[held.module_weights[name].element_size()]
                held.module_weights[name].view(-1).view(bits)[0] ^= 1
        return check_loaded(saved, live, *of_load)

    trainer, net, data, _ = plan.make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "check_loaded", after_the_flip)
        error = error_text(lambda: trainer.fit(net, data, ckpt_path=plan.ckpt_path))
    strategy = trainer.strategy
    assert isinstance(strategy, ElasticDeepSpeedStrategy)
    loaded = strategy.last_load.path if strategy.last_load else ""
    return error, trainer.fit_loop.total_batch_idx + 1, loaded


def with_own_paths(root: str) -> tuple[str, str]:
    """Save to paths that differ between ranks; load one that ranks spell differently.

    Returns:
        The error of the save; the result of the comparison, or the error of the load.
    """
    engine, rank = plain_engine(), comm.get_rank()
    refused = error_text(
        lambda: save_checkpoint(engine, f"{root}/of-{rank}.ckpt", fingerprint=True)
    )
    path, link = Path(root, "a.ckpt"), Path(root, "link")
    save_checkpoint(engine, path, fingerprint=True)
    if rank == 1:
        link.symlink_to(path)
    told: list[str] = []

    def load() -> None:
        loaded = load_checkpoint(engine, link if rank else path, fingerprint=True)
        told.append(loaded.fingerprint_result)

    failed = error_text(load)
    return refused, told[0] if told else failed


def saved_by(pools: Pools, root: Path, world: int = 2, **options: Any) -> FitSpec:
    """Fit an epoch, and return the plan of a run that resumes from it for another one."""
    strategy = {"fingerprint": True, **options.pop("strategy", {})}
    plan = FitSpec(str(root), strategy=strategy, **options)
    pools.run(world, partial(fit, plan))
    return replace(plan, epochs=2, ckpt_path=str(root / "last.ckpt"))


def resumed(pools: Pools, plan: FitSpec, world: int, verb: str = "fit") -> FingerprintResult:
    """Resume in another folder; return the first rank's messages."""
    elsewhere = replace(plan, root=f"{plan.root}/resumed")
    first, *others = pools.run(world, partial(fit, elsewhere, verb))
    assert all(other.live == first.live for other in others)
    return first


@pytest.mark.parametrize("background", [False, True], ids=["blocking", "behind"])
def test_the_live_fingerprint_is_the_saved_one_on_any_world_and_stage(
    background: bool,
    pools: Pools,
    tmp_path: Path,
) -> None:
    plan = saved_by(pools, tmp_path, strategy={"async_save": background})
    path = tmp_path / "last.ckpt"
    number = recorded_fingerprint(path)
    assert number == str(fingerprint_checkpoint(path))
    for stage, world in ((2, 2), (0, 3), (1, 1), (3, 2)):
        told = resumed(pools, replace(plan, stage=stage), world)
        assert told.live == number, (stage, world)
        (line,) = (text for text in told.messages if text.startswith("Loaded"))
        assert line.endswith(f"; {SAME}{number})"), line
        later = str(Path(plan.root, "resumed", "last.ckpt"))
        assert f"Saved {later}: fingerprint {told.saved}" in told.messages
        assert told.saved == str(fingerprint_checkpoint(later)) != number


@pytest.mark.long
@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 3), (3, 2), (3, 1)])
def test_each_stage_records_the_fingerprint_of_its_files(
    stage: int, world: int, pools: Pools, tmp_path: Path
) -> None:
    saved_by(pools, tmp_path, world, stage=stage)
    path = tmp_path / "last.ckpt"
    assert recorded_fingerprint(path) == str(fingerprint_checkpoint(path))


@pytest.mark.long
def test_without_the_option_no_fingerprint_is_recorded_or_compared(
    pools: Pools, tmp_path: Path
) -> None:
    plan = saved_by(pools, tmp_path, strategy={"fingerprint": False})
    assert not recorded_fingerprint(tmp_path / "last.ckpt")
    told = resumed(pools, plan, 1)
    assert (told.saved, told.live) == ("", "")
    assert len(told.messages) == 1
    assert "fingerprint" not in told.messages[0]
    asks = replace(plan, strategy={"fingerprint": True})
    assert "; its save recorded no fingerprint" in resumed(pools, asks, 1).messages[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_bit_fails_on_all_ranks_before_training(
    rank: int, pools: Pools, tmp_path: Path
) -> None:
    """One bit of one master on one rank: every rank raises, with both numbers, and none trains."""
    plan = saved_by(pools, tmp_path)
    number = recorded_fingerprint(tmp_path / "last.ckpt")
    seen = pools.run(2, partial(resume_with_a_flipped_bit, plan, rank))
    for error, batches, loaded in seen:
        assert not loaded
        assert error.startswith("CheckpointCorruptedError")
        assert f"recorded the fingerprint {number}, the live state has " in error
        assert "weights differ" in error
        assert batches == 0


@pytest.mark.long
@pytest.mark.parametrize("which", ["weights", "frozen"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_bit_of_a_replicated_weight_is_raised_on_all_ranks(
    which: str, rank: int, pools: Pools, tmp_path: Path
) -> None:
    """Trained or frozen."""
    plan = saved_by(pools, tmp_path, trainer={"precision": "bf16-true"})
    for error, batches, _ in pools.run(2, partial(resume_with_a_flipped_bit, plan, rank, which)):
        assert error.startswith("CheckpointCorruptedError")
        # Of frozen ones the number has the part that each rank saves.
        told = "weights differ" if which == "frozen" and "differ" in error else "rank 1: other"
        assert told in error
        assert batches == 0


@pytest.mark.long
@pytest.mark.parametrize("which", ["load", "save"])
def test_differently_spelled_paths_load_but_do_not_save(
    which: str, pools: Pools, tmp_path: Path
) -> None:
    save, load = pools.run(2, partial(with_own_paths, str(tmp_path)))[1]
    if which == "load":
        assert load.startswith("the state is the one that was saved")
    else:
        assert save.startswith("SaveError")
        assert "Pass the same path on all ranks" in save


@pytest.mark.long
def test_fallback_compares_the_older_checkpoint(pools: Pools, tmp_path: Path) -> None:
    saves = {"save_top_k": -1, "every_n_train_steps": 1, "filename": "{step}"}
    strategy = {"fallback": True}
    plan = saved_by(pools, tmp_path, checkpoint=saves, strategy=strategy)
    plan = replace(plan, ckpt_path=str(tmp_path / "step=2.ckpt"), root=str(tmp_path / "resumed"))
    for _, batches, loaded in pools.run(2, partial(resume_with_a_flipped_bit, plan, 1)):
        assert loaded == str(tmp_path / "step=1.ckpt")
        assert batches == 4


@pytest.mark.long
def test_excluded_frozen_weights_are_not_compared(pools: Pools, tmp_path: Path) -> None:
    plan = saved_by(pools, tmp_path, strategy={"exclude_frozen_parameters": True})
    told = resumed(pools, replace(plan, stage=3, seed=1), 2)
    assert told.live == recorded_fingerprint(tmp_path / "last.ckpt")
    assert SAME in told.messages[0]


@pytest.mark.long
def test_renamed_states_are_not_compared() -> None:
    """Names are part of the fingerprint."""
    manifest = manifest_of(make_state(), 2, 2)
    saved = SavedState("a.ckpt", f"{'0' * 16}-none", manifest, {}, renamed=True)
    verdict = check_loaded(saved, None, None, OneRank(), "load")  # type: ignore[arg-type]  # not looked at
    assert verdict.fingerprint == ""
    assert verdict.text.endswith("its names have changed")


PARTIAL: list[tuple[str, dict[str, Any], str]] = [
    (
        "fresh",
        {"strategy": {"load_optimizer_state": False}},
        "; optimizer not compared: it is not restored",
    ),
    ("configured", {"strategy": {"load_hyperparameters": False}}, SAME),
    ("lenient", {"strategy": {"strict_optimizer": False}}, SAME),
    (
        "bf16",
        {"trainer": {"precision": "bf16-true"}},
        "; weights not compared: frozen.bias was float32",
    ),
    ("no name changes", {"strategy": {"rename": {"first": "first"}}}, SAME),
]


@pytest.mark.cases(3)
@pytest.mark.parametrize(("options", "says"), [p[1:] for p in PARTIAL], ids=[p[0] for p in PARTIAL])
def test_state_changed_on_purpose_is_reported_and_not_compared(
    options: dict[str, Any], says: str, pools: Pools, tmp_path: Path
) -> None:
    plan = saved_by(pools, tmp_path)
    strategy = {**plan.strategy, **options.pop("strategy", {})}
    told = resumed(pools, replace(plan, strategy=strategy, **options), 1)
    assert says in told.messages[0], told.messages


@pytest.mark.long
def test_weights_are_compared_in_new_runs_and_evaluations(pools: Pools, tmp_path: Path) -> None:
    plan = saved_by(pools, tmp_path, checkpoint={"save_last": True, "save_weights_only": True})
    number = recorded_fingerprint(tmp_path / "last.ckpt")
    assert number == str(fingerprint_checkpoint(tmp_path / "last.ckpt"))
    plan = replace(plan, strategy={**plan.strategy, "load_optimizer_state": False})
    for verb in ("fit", "test"):
        told = resumed(pools, plan, 1, verb)
        assert told.live == number.split("-")[0]
        assert "the weights are those that were saved" in told.messages[0]
