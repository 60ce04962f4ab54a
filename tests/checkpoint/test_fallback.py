"""For a damaged checkpoint, the error names the newest intact one, and fallback=True loads it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_elastic_zero.checkpoint.fallback import find_fallback
from lightning_elastic_zero.checkpoint.types import LoadOptions
from lightning_elastic_zero.coordination.ranks import OneRank
from lightning_elastic_zero.core.manifest import MANIFEST_NAME, Manifest, manifest_from_json
from tests.checkpoint._damaged_loads import save_two
from tests.engine import _damaged_checkpoints
from tests.support.checkpoints import Saved, train_and_save
from tests.support.engines import EngineCase, engine_of
from tests.support.fits import FitCase, error_of, fit
from tests.support.oracle import differences, dump
from tests.support.outcome import captured_log
from tests.support.ranks import Pools


@dataclass(frozen=True)
class FallbackResult:
    message: str
    """Class and message of the error."""
    instead_of: str
    warnings: tuple[str, ...]
    is_older: bool
    """Rank 0: whether the engine has exactly the state of the older checkpoint."""


def load_from(
    setup: EngineCase, path: str, older: Saved, options: dict[str, Any]
) -> FallbackResult:
    """Load into a run with another seed."""
    from lightning_elastic_zero.api import load_checkpoint

    message, instead_of = "", ""
    with (
        captured_log("lightning_elastic_zero", logging.WARNING) as logged,
        engine_of(setup, 7, tilt=3.0) as engine,
    ):
        try:
            instead_of = load_checkpoint(engine, path, **options).instead_of
        except Exception as error:  # noqa: BLE001 (the test checks it)
            message = f"{type(error).__name__}: {error}"
        found = dump(engine, setup)
    same = found is None or not differences(older.dump(), found)
    return FallbackResult(message, instead_of, tuple(logged), same)


def fit_and_test(root: str, path: str) -> tuple[int, str]:
    """Resume with fallback, then test from the same path; return the step and the messages."""
    plan = FitCase(f"{root}/out", 2, epochs=2, ckpt_path=path, strategy={"fallback": True})
    return int(fit(plan)["step"]), error_of(plan, "test")


pytestmark = pytest.mark.engine

SETUP = EngineCase(2, "2")


@pytest.fixture(scope="module")
def kept(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three checkpoints of one run, after 1, 2 and 3 steps."""
    folder = tmp_path_factory.mktemp("kept")
    for steps, name in enumerate("abc", 1):
        saved = Saved(SETUP, str(folder / f"{name}.ckpt"))
        pools.run(2, partial(train_and_save, saved, steps=steps))
    return folder


@pytest.fixture
def folder(kept: Path, tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(kept, tmp_path / "run"))
    (copy / "last.ckpt").symlink_to("c.ckpt")
    return copy


def loaded(
    pools: Pools, path: Path, older: str = "a", *, fallback: bool = False
) -> list[FallbackResult]:
    """Load on two ranks, and compare with one of the older checkpoints."""
    saved = Saved(SETUP, str(path.parent / f"{older}.ckpt"))
    options = {"fallback": True} if fallback else {}
    return pools.run(2, partial(load_from, SETUP, str(path), saved, options))


def test_the_error_names_the_damage_and_the_newest_intact_checkpoint(
    pools: Pools, folder: Path
) -> None:
    _damaged_checkpoints.flip_bit(folder / "c.ckpt")
    _damaged_checkpoints.flip_bit(folder / "b.ckpt")
    for rank in loaded(pools, folder / "last.ckpt"):
        assert rank.message.startswith("CheckpointCorruptedError")
        assert "c.ckpt" in rank.message
        assert f"same folder is {folder / 'a.ckpt'} (step 1)" in rank.message
        assert "b.ckpt" not in rank.message
        assert "fallback=True" in rank.message
        assert "may belong to another run" in rank.message


@pytest.mark.parametrize(
    "damage",
    [
        _damaged_checkpoints.flip_bit,
        _damaged_checkpoints.lose_shard,
        _damaged_checkpoints.cut_manifest,
    ],
)
def test_fallback_loads_the_older_checkpoint_and_warns(
    damage: Callable[[Path], object], pools: Pools, folder: Path
) -> None:
    damage(folder / "c.ckpt")
    ranks = loaded(pools, folder / "last.ckpt", "b", fallback=True)
    assert [rank.message for rank in ranks] == ["", ""]
    assert [rank.instead_of for rank in ranks] == [str(folder / "last.ckpt")] * 2
    assert all(rank.is_older for rank in ranks)
    (warning,), () = (rank.warnings for rank in ranks)
    assert "c.ckpt" in warning
    assert f"{folder / 'b.ckpt'} (step 2) is loaded instead" in warning


def test_a_dangling_link_counts_as_damaged(pools: Pools, folder: Path) -> None:
    shutil.rmtree(folder / "c.ckpt")
    for rank in loaded(pools, folder / "last.ckpt"):
        assert rank.message.startswith("CheckpointNotFoundError")
        assert str(folder / "b.ckpt") in rank.message
    ranks = loaded(pools, folder / "last.ckpt", "b", fallback=True)
    assert [rank.message for rank in ranks] == ["", ""]


def test_missing_and_misspelt_paths_load_nothing(pools: Pools, folder: Path) -> None:
    for rank in loaded(pools, folder / "lsat.ckpt", fallback=True):
        assert rank.message.startswith("CheckpointNotFoundError")
        assert "sound" not in rank.message
        assert "last.ckpt" in rank.message
    for name in "abc":
        _damaged_checkpoints.flip_bit(folder / f"{name}.ckpt")
    for rank in loaded(pools, folder / "last.ckpt", fallback=True):
        assert rank.message.startswith("CheckpointCorruptedError")
        assert "fallback=True found no older intact checkpoint" in rank.message
    for rank in loaded(pools, folder / "last.ckpt"):
        assert "fallback" not in rank.message


def test_no_newer_checkpoint_replaces_an_older_one(pools: Pools, folder: Path) -> None:
    _damaged_checkpoints.flip_bit(folder / "b.ckpt")
    ranks = loaded(pools, folder / "b.ckpt", "a", fallback=True)
    assert [rank.message for rank in ranks] == ["", ""]
    assert all(rank.is_older for rank in ranks)


def test_newest_means_published_last_not_highest_step(pools: Pools, folder: Path) -> None:
    _damaged_checkpoints.flip_bit(folder / "c.ckpt")
    os.utime(folder / "b.ckpt" / "manifest.json", (1e9, 1e9))
    for rank in loaded(pools, folder / "last.ckpt"):
        assert str(folder / "a.ckpt") in rank.message


def rot_manifest(checkpoint: Path, damage: Callable[[Path], object]) -> None:
    """Make a manifest unreadable without changing file times, like a bad disk."""
    manifest = checkpoint / MANIFEST_NAME
    times = {path: path.stat().st_mtime_ns for path in (checkpoint, manifest)}
    damage(checkpoint)
    for path, time_ns in times.items():
        if path.exists():
            os.utime(path, ns=(time_ns, time_ns))


def proposed_for(
    checkpoint: Path, fits_model: Callable[[Manifest], bool] = lambda _: True
) -> str | None:
    """Return the name of the checkpoint that is proposed in place of another."""
    older = find_fallback(checkpoint, OneRank(), fits_model, LoadOptions())
    return None if older is None else Path(older[0]).name


@pytest.mark.parametrize(
    "damage", [_damaged_checkpoints.cut_manifest, _damaged_checkpoints.lose_manifest]
)
def test_without_a_manifest_only_earlier_files_are_proposed(
    damage: Callable[[Path], object], folder: Path
) -> None:
    rot_manifest(folder / "b.ckpt", damage)
    assert proposed_for(folder / "b.ckpt") == "a.ckpt"
    rot_manifest(folder / "a.ckpt", damage)
    assert proposed_for(folder / "a.ckpt") is None
    assert proposed_for(folder / "b.ckpt") is None
    assert proposed_for(folder / "last.ckpt") is None


def test_a_link_that_is_newer_than_its_checkpoint_changes_nothing(folder: Path) -> None:
    """Without its manifest, the time of the damaged checkpoint itself counts."""
    (folder / "best.ckpt").symlink_to("b.ckpt")
    rot_manifest(folder / "b.ckpt", _damaged_checkpoints.lose_manifest)
    assert proposed_for(folder / "best.ckpt") == "a.ckpt"


def test_nothing_is_proposed_for_checkpoints_of_other_software(folder: Path) -> None:
    """They may belong to another run, and so may any checkpoint in the same folder."""
    (folder / "file.ckpt").write_bytes(b"PK, and no more")
    shard = folder / "stock" / "global_step3" / "mp_rank_00_model_states.pt"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"")
    assert proposed_for(folder / "file.ckpt") is None
    assert proposed_for(folder / "stock") is None


@pytest.mark.parametrize(
    "damage", [_damaged_checkpoints.flip_bit, _damaged_checkpoints.cut_manifest]
)
def test_no_checkpoint_of_another_model_is_proposed(
    damage: Callable[[Path], object], folder: Path
) -> None:
    manifest = manifest_from_json((folder / "b.ckpt" / MANIFEST_NAME).read_text(), "b.ckpt")
    fits = partial(_shares_shapes, manifest)
    turned = [replace(p, shape=p.shape[::-1]) for p in manifest.parameters]
    other = replace(manifest, parameters=tuple(turned))
    (folder / "b.ckpt" / MANIFEST_NAME).write_text(other.to_json())
    times = (folder / "a.ckpt" / MANIFEST_NAME).stat().st_mtime_ns + 1
    os.utime(folder / "b.ckpt" / MANIFEST_NAME, ns=(times, times))
    rot_manifest(folder / "c.ckpt", damage)
    assert proposed_for(folder / "c.ckpt", fits) == "a.ckpt"


def _shares_shapes(model: Manifest, saved: Manifest) -> bool:
    return {(p.name, p.shape) for p in saved.parameters} == {
        (p.name, p.shape) for p in model.parameters
    }


@pytest.mark.parametrize(
    ("published", "proposed"), [("acb", "a.ckpt"), ("cab", "b.ckpt"), ("cba", "a.ckpt")]
)
def test_what_was_published_earlier_is_proposed_first(
    published: str, proposed: str, folder: Path
) -> None:
    """A later one with fewer steps is of another branch, unless a copy has lost the times."""
    for second, name in enumerate(published):
        os.utime(folder / f"{name}.ckpt" / MANIFEST_NAME, (second, second))
    _damaged_checkpoints.flip_bit(folder / "c.ckpt")
    assert proposed_for(folder / "c.ckpt") == proposed


def test_a_later_copy_of_the_damaged_step_is_proposed_first(folder: Path) -> None:
    """``save_last=True`` saves each step twice."""
    shutil.copytree(folder / "c.ckpt", folder / "d.ckpt")
    for second, name in enumerate("abcd"):
        os.utime(folder / f"{name}.ckpt" / MANIFEST_NAME, (second, second))
    _damaged_checkpoints.flip_bit(folder / "c.ckpt")
    assert proposed_for(folder / "c.ckpt") == "d.ckpt"


def test_a_newer_checkpoint_is_not_a_fallback(pools: Pools, folder: Path) -> None:
    rot_manifest(folder / "a.ckpt", _damaged_checkpoints.cut_manifest)
    for rank in loaded(pools, folder / "a.ckpt", "b", fallback=True):
        assert rank.message
        assert not rank.instead_of
        assert "b.ckpt" not in rank.message
        assert "c.ckpt" not in rank.message


def test_weights_only_checkpoints_are_not_a_fallback(pools: Pools, folder: Path) -> None:
    light = Saved(SETUP, str(folder / "light.ckpt"), {"weights_only": True})
    pools.run(2, partial(train_and_save, light, steps=2))
    before_c = (folder / "c.ckpt" / MANIFEST_NAME).stat().st_mtime - 0.01
    for path in (Path(light.path), Path(light.path) / MANIFEST_NAME):
        os.utime(path, (before_c, before_c))
    rot_manifest(folder / "c.ckpt", _damaged_checkpoints.cut_manifest)
    assert proposed_for(folder / "c.ckpt") == "b.ckpt"
    for name in "ab":
        shutil.rmtree(folder / f"{name}.ckpt")
    assert proposed_for(folder / "c.ckpt") is None


def test_fit_falls_back_but_test_does_not(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, partial(save_two, str(tmp_path)))
    _damaged_checkpoints.flip_bit(tmp_path / "1.ckpt")
    call = partial(fit_and_test, str(tmp_path), str(tmp_path / "1.ckpt"))
    for step, message in pools.run(2, call):
        assert step == 4
        assert message.startswith("CheckpointCorruptedError")
        assert str(tmp_path / "0.ckpt") in message
