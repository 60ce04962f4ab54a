"""A save records a fingerprint of its state; a resume compares it with that of the live state."""

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
from tests.support.outcome import captured_log, error_text
from tests.support.plain_checkpoints import make_state, manifest_of
from tests.support.ranks import Pools
from tests.trainer._failure_cases import engine as plain_engine

pytestmark = pytest.mark.engine

SAME = "the state is the one that was saved (fingerprint "


@dataclass(frozen=True)
class FingerprintResult:
    saved: str
    """The fingerprint of the last save."""
    live: str
    """The fingerprint of the live state after the load."""
    messages: tuple[str, ...]


def fit(plan: FitSpec, verb: str = "fit") -> FingerprintResult:
    trainer, net, data, _ = plan.make()
    with captured_log("lightning.pytorch.utilities.rank_zero", logging.INFO) as messages:
        getattr(trainer, verb)(net, data, ckpt_path=plan.ckpt_path)
    strategy = trainer.strategy
    assert isinstance(strategy, ElasticDeepSpeedStrategy)
    saved, loaded = (
        stats.fingerprint if stats else "" for stats in (strategy.last_save, strategy.last_load)
    )
    return FingerprintResult(
        saved, loaded, tuple(text for text in messages if text.startswith(("Saved", "Loaded")))
    )


def resume_with_a_flipped_bit(
    plan: FitSpec, rank: int, which: str = "masters"
) -> tuple[str, int, str]:
    """Resume, and flip one bit on one rank after the first load, before the comparison.

    Args:
        plan: of the run.
        rank: on which the bit flips.
        which: state with the bit: ``"masters"``, ``"weights"`` of the module, or ``"frozen"`` ones.

    Returns:
        The error, the number of trained batches, and the path of the last load.
    """
    flips = [rank]

    def flip_and_check(saved: Any, live: LiveEngine, *arguments: Any) -> Any:
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
        return check_loaded(saved, live, *arguments)

    trainer, net, data, _ = plan.make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "check_loaded", flip_and_check)
        error = error_text(lambda: trainer.fit(net, data, ckpt_path=plan.ckpt_path))
    strategy = trainer.strategy
    assert isinstance(strategy, ElasticDeepSpeedStrategy)
    loaded = strategy.last_load.path if strategy.last_load else ""
    return error, trainer.fit_loop.total_batch_idx + 1, loaded


def loaded_by_own_paths(root: str) -> str:
    """Load by different paths to one checkpoint; return the result of the comparison."""
    engine, rank = plain_engine(), comm.get_rank()
    path, link = Path(root, "a.ckpt"), Path(root, "link")
    save_checkpoint(engine, path, fingerprint=True)
    if rank == 1:
        link.symlink_to(path)
    loaded = load_checkpoint(engine, link if rank else path, fingerprint=True)
    return loaded.fingerprint_result


def saved_by(pools: Pools, root: Path, world: int = 2, **options: Any) -> FitSpec:
    """Fit an epoch; return the plan of a run that resumes from it for another epoch."""
    strategy = {"fingerprint": True, **options.pop("strategy", {})}
    plan = FitSpec(str(root), strategy=strategy, **options)
    pools.run(world, partial(fit, plan))
    return replace(plan, epochs=2, ckpt_path=str(root / "last.ckpt"))


def resumed(pools: Pools, plan: FitSpec, world: int, verb: str = "fit") -> FingerprintResult:
    """Resume in another folder; return the result of the first rank."""
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
    fingerprint = recorded_fingerprint(path)
    assert fingerprint == str(fingerprint_checkpoint(path))
    for stage, world in ((2, 2), (0, 3), (1, 1), (3, 2)):
        result = resumed(pools, replace(plan, stage=stage), world)
        assert result.live == fingerprint, (stage, world)
        (line,) = (text for text in result.messages if text.startswith("Loaded"))
        assert line.endswith(f"; {SAME}{fingerprint})"), line
        later = str(Path(plan.root, "resumed", "last.ckpt"))
        assert f"Saved {later}: fingerprint {result.saved}" in result.messages
        assert result.saved == str(fingerprint_checkpoint(later)) != fingerprint


@pytest.mark.long
def test_without_the_option_no_fingerprint_is_recorded_or_compared(
    pools: Pools, tmp_path: Path
) -> None:
    plan = saved_by(pools, tmp_path, strategy={"fingerprint": False})
    assert not recorded_fingerprint(tmp_path / "last.ckpt")
    result = resumed(pools, plan, 1)
    assert (result.saved, result.live) == ("", "")
    assert len(result.messages) == 1
    assert "fingerprint" not in result.messages[0]
    comparing = replace(plan, strategy={"fingerprint": True})
    assert "; its save recorded no fingerprint" in resumed(pools, comparing, 1).messages[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_bit_fails_on_all_ranks_before_training(
    rank: int, pools: Pools, tmp_path: Path
) -> None:
    """One bit of one master on one rank: every rank raises, with both fingerprints."""
    plan = saved_by(pools, tmp_path)
    fingerprint = recorded_fingerprint(tmp_path / "last.ckpt")
    seen = pools.run(2, partial(resume_with_a_flipped_bit, plan, rank))
    for error, batches, loaded in seen:
        assert not loaded
        assert error.startswith("CheckpointCorruptedError")
        assert f"recorded the fingerprint {fingerprint}, the live state has " in error
        assert "weights differ" in error
        assert batches == 0


@pytest.mark.long
@pytest.mark.parametrize("which", ["weights", "frozen"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_bit_of_a_replicated_weight_is_raised_on_all_ranks(
    which: str, rank: int, pools: Pools, tmp_path: Path
) -> None:
    plan = saved_by(pools, tmp_path, trainer={"precision": "bf16-true"})
    for error, batches, _ in pools.run(2, partial(resume_with_a_flipped_bit, plan, rank, which)):
        assert error.startswith("CheckpointCorruptedError")
        # Of frozen weights, the fingerprint covers the part that each rank saves.
        text = "weights differ" if which == "frozen" and "differ" in error else "rank 1: other"
        assert text in error
        assert batches == 0


@pytest.mark.long
def test_different_paths_on_ranks_to_one_checkpoint_can_be_loaded(
    pools: Pools, tmp_path: Path
) -> None:
    for result in pools.run(2, partial(loaded_by_own_paths, str(tmp_path))):
        assert result.startswith("the state is the one that was saved")


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
    result = resumed(pools, replace(plan, stage=3, seed=1), 2)
    assert result.live == recorded_fingerprint(tmp_path / "last.ckpt")
    assert SAME in result.messages[0]


@pytest.mark.long
def test_renamed_states_are_not_compared() -> None:
    """Names are part of the fingerprint."""
    manifest = manifest_of(make_state(), 2, 2)
    saved = SavedState("a.ckpt", f"{'0' * 16}-none", manifest, {}, renamed=True)
    result = check_loaded(saved, None, None, OneRank(), "load")  # type: ignore[arg-type]  # not used
    assert result.fingerprint == ""
    assert result.text.endswith("its names have changed")


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


@pytest.mark.parametrize(("options", "text"), [p[1:] for p in PARTIAL], ids=[p[0] for p in PARTIAL])
def test_state_changed_on_purpose_is_reported_and_not_compared(
    options: dict[str, Any], text: str, pools: Pools, tmp_path: Path
) -> None:
    plan = saved_by(pools, tmp_path)
    strategy = {**plan.strategy, **options.pop("strategy", {})}
    result = resumed(pools, replace(plan, strategy=strategy, **options), 1)
    assert text in result.messages[0], result.messages


@pytest.mark.long
def test_weights_are_compared_in_new_runs_and_evaluations(pools: Pools, tmp_path: Path) -> None:
    plan = saved_by(pools, tmp_path, checkpoint={"save_last": True, "save_weights_only": True})
    fingerprint = recorded_fingerprint(tmp_path / "last.ckpt")
    assert fingerprint == str(fingerprint_checkpoint(tmp_path / "last.ckpt"))
    plan = replace(plan, strategy={**plan.strategy, "load_optimizer_state": False})
    for verb in ("fit", "test"):
        result = resumed(pools, plan, 1, verb)
        assert result.live == fingerprint.split("-")[0]
        assert "the weights are those that were saved" in result.messages[0]
