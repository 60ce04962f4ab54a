"""ModelCheckpoint: kept, deleted and refused checkpoints."""

from __future__ import annotations

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
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint

from lightning_elastic_zero.api import ElasticOptions
from lightning_elastic_zero.core.manifest import TrainingProgress
from lightning_elastic_zero.errors import SaveError, UnsupportedError
from lightning_elastic_zero.storage.disk_checkpoints import PREVIOUS_PREFIX, StagedDirectory
from lightning_elastic_zero.tools.verification import newest_sound_checkpoint
from lightning_elastic_zero.trainer.model_checkpoint import (
    LoadedSaves,
    ModelCheckpointHooks,
    _on_rank_zero,
)
from tests.support.fits import FitCase, error_of, fit, listing
from tests.support.outcome import captured_warnings
from tests.support.ranks import Pools
from tests.support.small_checkpoints import before_each_syscall

pytestmark = pytest.mark.engine


def checkpoints_of(worlds: Pools, root: Path, world: int = 2, **checkpoint: Any) -> dict[str, bool]:
    """Fit three epochs of two steps; list the folder."""
    worlds.run(world, partial(fit, FitCase(str(root), 2, epochs=3, checkpoint=checkpoint)))
    return listing(str(root))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"save_top_k": 2, "monitor": "val_loss"}, 2),
        ({"save_top_k": -1, "every_n_epochs": 1}, 3),
        ({"save_top_k": -1, "every_n_train_steps": 1, "save_on_train_epoch_end": False}, 6),
        ({"save_top_k": 1, "save_last": True, "every_n_epochs": 2}, 2),
        ({"save_top_k": 1, "save_last": "link"}, 2),
        ({"save_top_k": 1, "save_weights_only": True}, 1),
        ({"save_top_k": -1, "train_time_interval": timedelta(microseconds=1)}, 6),
    ],
    ids=str,
)
def test_exactly_the_expected_checkpoints_are_kept(
    options: dict[str, Any], expected: int, worlds: Pools, tmp_path: Path
) -> None:
    found = checkpoints_of(worlds, tmp_path, **options)
    assert len(found) == expected
    assert all(found.values()), found


@pytest.mark.long
def test_last_saved_on_fewer_ranks_has_no_old_shards(worlds: Pools, tmp_path: Path) -> None:
    root = str(tmp_path)
    worlds.run(3, partial(fit, FitCase(root, 3)))
    files = tmp_path / "last.ckpt" / "checkpoint"
    assert len(list(files.glob("*_optim_states.pt"))) == 3
    worlds.run(2, partial(fit, FitCase(root, 1, epochs=2, ckpt_path="last")))
    assert len(list(files.glob("*_optim_states.pt"))) == 2
    assert not [p for p in files.iterdir() if "rank_2" in p.name]


def test_last_is_found_after_a_kill_between_two_renames(worlds: Pools, tmp_path: Path) -> None:
    """Lightning's search would find nothing, and the run would begin again at step 0."""
    case = FitCase(str(tmp_path), 2)
    saved = worlds.run(2, partial(fit, case))[0]
    StagedDirectory.create(tmp_path / "last.ckpt", "killed")
    (tmp_path / "last.ckpt").rename(tmp_path / f"{PREVIOUS_PREFIX}killed")
    again = replace(case, epochs=2, ckpt_path="last")
    assert worlds.run(1, partial(fit, again))[0]["start"] == saved["end"]


def test_top_k_keeps_the_checkpoint_resumed_from(worlds: Pools, tmp_path: Path) -> None:
    root = str(tmp_path)
    options = {"save_top_k": 1, "save_last": "link", "every_n_epochs": 1}
    worlds.run(2, partial(fit, FitCase(root, 2, checkpoint=options)))
    resumed = (tmp_path / "last.ckpt").resolve()
    again = FitCase(root, 2, epochs=3, ckpt_path="last", checkpoint=options)
    worlds.run(1, partial(fit, again))
    assert (resumed / "manifest.json").is_file()
    assert (tmp_path / "last.ckpt").resolve() != resumed


def fit_with_own_scores(root: str) -> dict[str, Any]:
    """Fit with a score that differs between the ranks, and gives two epochs one name on rank 0."""
    options: dict[str, Any] = {"monitor": "score", "mode": "max", "filename": "{score:.1f}"}
    options |= {"save_top_k": 2, "save_last": "link", "enable_version_counter": True}
    trainer, net, data, _ = FitCase(root, epochs=4, checkpoint=options).make()
    callback: Any = trainer.checkpoint_callback
    candidates, rank = callback._monitor_candidates, comm.get_rank()
    callback._monitor_candidates = lambda trainer: {
        **candidates(trainer),
        "score": torch.tensor([1.0, 2.0, 2.01, 4.0][trainer.current_epoch] + 0.07 * rank),
    }
    with captured_warnings() as warned:
        trainer.fit(net, **data)
    best = [callback.best_model_path, *callback.best_k_models]
    warnings = [text for text in warned if "the ranks log other values" in text]
    return {"best": [Path(path).name for path in best], "warnings": warnings}


def test_a_name_with_a_metric_of_each_rank_is_rank_zeros(worlds: Pools, tmp_path: Path) -> None:
    """As in stock; one warning names the remedy."""
    first, second = worlds.run(2, partial(fit_with_own_scores, str(tmp_path)))
    kept = ["score=2.0-v1.ckpt", "score=4.0.ckpt"]
    assert [*listing(str(tmp_path))] == ["last.ckpt", *kept]
    assert first["best"] == second["best"] == [kept[1], *kept]
    assert len(first["warnings"]) == 1
    assert "score=1.0.ckpt. Log them with sync_dist=True" in first["warnings"][0]
    assert not second["warnings"]


def fit_nested(spec: FitCase) -> tuple[int, list[str]]:
    """Fit with a slash in the names; return the final step, and the targets of last.ckpt."""
    trainer, net, data, _ = spec.make()
    seen: list[str] = []
    last = Path(spec.root) / "last.ckpt"

    def look(*_: Any) -> None:
        if last.is_symlink():
            seen.append(str(last.resolve().relative_to(spec.root)) if last.exists() else "")

    with before_each_syscall(look):
        trainer.fit(net, **data, ckpt_path=spec.ckpt_path)
    return trainer.global_step, seen


@pytest.mark.long
def test_a_slash_in_the_name_changes_nothing(worlds: Pools, tmp_path: Path) -> None:
    """Lightning puts each checkpoint into a folder of its own."""
    options: dict[str, Any] = {"filename": "{epoch}-{val/loss:.3f}", "save_last": "link"}
    options |= {"monitor": "epoch", "mode": "max", "save_top_k": 2}
    run = tmp_path / "run"
    spec = FitCase(str(run), epochs=4, checkpoint=options)
    step, lasts = worlds.run(1, partial(fit_nested, spec))[0]
    names = [f"epoch={epoch}-val/loss=0.000.ckpt" for epoch in range(4)]
    assert [*dict.fromkeys(lasts)] == names
    kept = sorted(str(path.relative_to(run)) for path in run.glob("*/*.ckpt"))
    assert kept == names[2:]
    assert newest_sound_checkpoint(run) == run / names[3]
    shard = next((run / names[3]).rglob("*_optim_states.pt"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert newest_sound_checkpoint(run) == run / names[2]
    assert newest_sound_checkpoint(tmp_path) is None, "another run's"
    for path in ("last", str(run / names[3])):
        again = replace(spec, ckpt_path=path, epochs=3, strategy={"fallback": True})
        assert worlds.run(1, partial(fit, again))[0]["step"] == step * 3 // 4


class FailsAfterStep3(Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            raise ZeroDivisionError


def fail_and_restart(spec: FitCase) -> list[list[str]]:
    """Fail, evaluate with another Trainer, and resume; list the folder after each."""
    trainer, net, data, _ = spec.make(FailsAfterStep3())
    with pytest.raises(ZeroDivisionError):
        trainer.fit(net, **data)
    found = [[*listing(spec.root)]]
    trainer, net, data, _ = spec.make()
    trainer.validate(net, **data)
    found.append([*listing(spec.root)])
    trainer.fit(net, **data, ckpt_path="last")
    assert trainer.global_step == 4
    return [*found, [*listing(spec.root)]]


def test_the_checkpoint_of_a_failure_is_deleted_once_a_resumed_run_has_ended(
    worlds: Pools, tmp_path: Path
) -> None:
    """Not by an evaluation before. If it stayed, "last" would resume from it again."""
    options = {"filename": "{step}", "every_n_train_steps": 2, "save_top_k": -1}
    saves = (partial(OnExceptionCheckpoint, str(tmp_path)),)
    spec = FitCase(str(tmp_path), epochs=2, checkpoint=options, callbacks=saves)
    failed, evaluated, resumed = worlds.run(1, partial(fail_and_restart, spec))[0]
    assert failed == evaluated == ["on_exception.ckpt", "step=2.ckpt"]
    assert resumed == ["step=2.ckpt", "step=4.ckpt"]


class Listing(Callback):
    """Lists the folder of the checkpoints before each batch."""

    def __init__(self, folder: str) -> None:
        self.folder, self.names = folder, set[str]()

    def on_train_batch_start(self, *_: Any) -> None:
        self.names |= {*listing(self.folder)}


def fit_and_list(spec: FitCase) -> set[str]:
    """Fit; return the names that were in the folder before any batch."""
    before_batches = Listing(spec.root)
    fit(spec, before_batches)
    return before_batches.names


@pytest.mark.parametrize("async_save", [False, True], ids=["blocking", "background"])
def test_a_folder_of_checkpoints_holds_nothing_else(
    worlds: Pools, tmp_path: Path, *, async_save: bool
) -> None:
    """Neither during a run, except for the save in flight, nor after it."""
    options = {"monitor": "step", "mode": "max", "filename": "{step}", "save_last": "link"}
    spec = FitCase(str(tmp_path), 2, epochs=3, checkpoint={**options, "save_top_k": 2})
    names, _ = worlds.run(
        2, partial(fit_and_list, replace(spec, strategy={"async_save": async_save}))
    )
    assert listing(str(tmp_path)) == {"last.ckpt": True, "step=4.ckpt": True, "step=6.ckpt": True}
    if not async_save:
        assert names == {"last.ckpt", "step=2.ckpt", "step=4.ckpt"}


@pytest.mark.parametrize(
    ("path", "verb", "error"),
    [
        ("ftp://bucket/run", "fit", "UnsupportedError"),
        ("nowhere.ckpt", "fit", "CheckpointNotFoundError"),
        ("nowhere.ckpt", "test", "CheckpointNotFoundError"),
        ("", "fit", "CheckpointFormatError"),
    ],
)
def test_paths_without_a_checkpoint_are_refused_on_every_rank(
    path: str, verb: str, error: str, worlds: Pools, tmp_path: Path
) -> None:
    """A test must not run with fresh weights."""
    ckpt_path = path if "://" in path else str(tmp_path / path)
    plan = FitCase(str(tmp_path / "out"), 2, ckpt_path=ckpt_path)
    for message in worlds.run(2, partial(error_of, plan, verb)):
        assert message.startswith(error), message
        assert path in message


def test_a_file_of_another_strategy_is_not_a_save_that_a_resume_continues(tmp_path: Path) -> None:
    """It may have the name ``last.ckpt``."""
    hooks = ModelCheckpointHooks(ElasticOptions().manager(), lambda *_: None)
    hooks._loaded = LoadedSaves(tmp_path / "a.ckpt", TrainingProgress(), 1, {}, "")
    (tmp_path / "last.ckpt").touch()
    trainer: Any = SimpleNamespace(checkpoint_callbacks=[])
    assert not hooks._is_made(trainer, ModelCheckpoint(), str(tmp_path / "last.ckpt"))


def test_an_error_of_rank_0_is_raised_on_all_ranks() -> None:
    """Of any kind: otherwise the others would wait for its answer."""
    sent: list[Any] = []

    def broadcast(given: Any) -> Any:
        sent.append(given)
        return sent[0]

    def look() -> None:
        msg = "names a folder that is not supported"
        raise UnsupportedError(msg)

    for is_first in (True, False):
        trainer: Any = SimpleNamespace(
            is_global_zero=is_first, strategy=SimpleNamespace(broadcast=broadcast)
        )
        with pytest.raises(SaveError, match="UnsupportedError: names a folder"):
            _on_rank_zero(trainer, look)
