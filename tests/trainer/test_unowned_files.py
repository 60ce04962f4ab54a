"""Runs keep files that this library did not write, and continue."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from typing_extensions import override

from tests.support.fits import (
    SMALL_BUCKETS,
    Data,
    FitCase,
    RegressionNet,
    StockOnCPU,
    error_of,
    quiet_trainer,
)
from tests.support.outcome import NOTHING, captured_log, captured_warnings
from tests.support.ranks import Pools
from tests.trainer._async_save import async_case, fit_with

pytestmark = pytest.mark.engine

MINE = "the user's only one"


def snapshot(*folders: Path) -> dict[str, bytes]:
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in files}


# -- direct saves -------------------------------------------------------------------------------


def fit_and_save(run: FitCase, path: str) -> tuple[dict[int, str], int]:
    """Train and save after step 2; return the errors of saves, by step, and the last step."""
    actor = fit_with(run, {2: lambda trainer: trainer.save_checkpoint(path)})
    return actor.errors, actor.trainer.global_step


@pytest.mark.parametrize("async_save", [False, True], ids=["blocking", "background"])
def test_an_occupied_path_is_refused_by_the_save_call(
    pools: Pools, tmp_path: Path, *, async_save: bool
) -> None:
    """Also with background saves."""
    root = tmp_path / "results"
    root.mkdir()
    (root / "table.csv").write_text(MINE)
    run = async_case(tmp_path / "run", async_save=async_save)
    for errors, last in pools.run(2, partial(fit_and_save, run, str(root))):
        assert list(errors) == [2]
        assert "it contains table.csv" in errors[2]
        assert f"Save to {root}/step-2, or" in errors[2]
        assert last == 6
    assert snapshot(root) == {str(root / "table.csv"): MINE.encode()}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


# -- from Lightning's own strategy to this one ----------------------------------------------------


NAMES: dict[str, Any] = {
    "filename": "best",
    "monitor": "val_loss",
    "save_top_k": 1,
    "save_last": True,
    "enable_version_counter": True,
}
"""Options for checkpoints with fixed names, which Lightning overwrites."""


def fit_with_stock(root: str, epochs: int) -> None:
    warnings.simplefilter("ignore")
    options: dict[str, Any] = {"stage": 2, **SMALL_BUCKETS}
    saves = ModelCheckpoint(dirpath=root, **NAMES)
    quiet_trainer(StockOnCPU(**options), saves, max_epochs=epochs).fit(RegressionNet(), Data())


class Puts(Callback):
    """Puts a file into a checkpoint at the start of an epoch, as zero_to_fp32.py may do."""

    def __init__(self, path: str, epoch: int) -> None:
        self.path, self.epoch = path, epoch

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.current_epoch == self.epoch and trainer.is_global_zero:
            Path(self.path).write_text(MINE)


class Worse(RegressionNet):
    """A module whose best checkpoint is replaced in each epoch."""

    @override
    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("val_loss", torch.tensor(-float(self.current_epoch)))


def outcome(case: FitCase) -> dict[str, Any]:
    """Fit; return the last step, the callback's paths, and the messages."""
    trainer, net, data, _ = replace(case, net=Worse.of).make()
    with captured_warnings() as warned, captured_log("lightning_elastic_zero") as logged:
        trainer.fit(net, **data, ckpt_path=case.ckpt_path)
    callback = trainer.checkpoint_callback
    assert isinstance(callback, ModelCheckpoint)
    return {
        "step": trainer.global_step,
        "last": Path(callback.last_model_path).name,
        "best": Path(callback.best_model_path).name,
        "messages": "\n".join([*logged, *warned]),
    }


def test_a_run_continues_from_lightnings_last_and_keeps_lightnings_files(
    worlds: Pools, tmp_path: Path
) -> None:
    """The next resume uses this library's checkpoint."""
    root = str(tmp_path)
    worlds.run(2, partial(fit_with_stock, root, 1))
    stock = [tmp_path / "best.ckpt", tmp_path / "last.ckpt"]
    before = snapshot(*stock)
    assert len(before) > 6
    plan = FitCase(root, 2, epochs=3, ckpt_path="last", checkpoint=NAMES)
    for found in worlds.run(2, partial(outcome, plan)):
        assert (found["step"], found["last"]) == (6, "last-v1.ckpt")
        assert found["best"] == "best-v1.ckpt"
    assert snapshot(*stock) == before
    ours = sorted(path.parent.name for path in tmp_path.glob("*/manifest.json"))
    assert ours == ["best-v1.ckpt", "last-v1.ckpt"]
    again = FitCase(root, 2, epochs=4, ckpt_path="last", checkpoint=NAMES)
    for found in worlds.run(1, partial(outcome, again)):
        assert (found["step"], found["last"]) == (8, "last-v1.ckpt")
    assert snapshot(*stock) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("best-v1.ckpt", "best.ckpt", "last-v1.ckpt", "last.ckpt")
    ]


@pytest.mark.parametrize("async_save", [False, True], ids=["blocking", "background"])
def test_a_file_put_into_last_is_kept_and_the_run_continues(
    worlds: Pools, tmp_path: Path, *, async_save: bool
) -> None:
    """If a background save is running, it keeps the old checkpoint under another name."""
    options = {**NAMES, "filename": "{epoch}", "save_top_k": -1}
    put, strategy = partial(Puts, f"{tmp_path}/last.ckpt/model.bin", 2), {"async_save": async_save}
    plan = FitCase(str(tmp_path), 2, epochs=4, checkpoint=options, strategy=strategy)
    plan = replace(plan, callbacks=(put,))
    found = worlds.run(2, partial(outcome, plan))
    assert found[0]["step"] == 8
    kept = [path.parent for path in tmp_path.glob("last*/model.bin")]
    assert [path.name for path in kept] == ["last.ckpt"] or async_save
    assert (kept[0] / "model.bin").read_text() == MINE
    assert (kept[0] / "manifest.json").is_file()
    if kept[0].name == "last.ckpt":
        assert {result["last"] for result in found} == {"last-v1.ckpt"}
        text = "it contains files that this library did not write"
        assert f"{text}: model.bin" in found[0]["messages"]
    else:
        assert f"last.ckpt was kept as {kept[0]}: it contains files that" in found[0]["messages"]


def test_top_k_keeps_a_checkpoint_with_a_users_file(worlds: Pools, tmp_path: Path) -> None:
    root, options = str(tmp_path), {**NAMES, "filename": "{epoch}", "save_last": False}
    put = partial(Puts, f"{root}/epoch=0.ckpt/pytorch_model.bin", 1)
    plan = FitCase(root, 2, epochs=3, checkpoint=options, callbacks=(put,))
    found = worlds.run(2, partial(outcome, plan))
    assert found[0]["best"] == "epoch=2.ckpt"
    assert "epoch=0.ckpt is not deleted, because it contains files that" in found[0]["messages"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0.ckpt", "epoch=2.ckpt"]
    assert (tmp_path / "epoch=0.ckpt" / "pytorch_model.bin").read_text() == MINE
    assert (tmp_path / "epoch=0.ckpt" / "manifest.json").is_file()


# -- names that ModelCheckpoint overwrites ------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"save_last": True}, "last.ckpt"),
        ({"filename": "best"}, "best.ckpt"),
        ({}, "epoch=7-step=900.ckpt"),
        ({"filename": "a{epoch:02d}", "auto_insert_metric_name": False}, "a07.ckpt"),
    ],
    ids=str,
)
def test_names_that_would_overwrite_files_are_refused_in_setup(
    options: dict[str, Any], name: str, worlds: Pools, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(MINE)
    for error in worlds.run(2, partial(error_of, FitCase(str(tmp_path), 2, checkpoint=options))):
        assert error.startswith("SaveError: ModelCheckpoint(enable_version_counter=False) would ")
        assert f"{name}, which is a file" in error
    assert snapshot(tmp_path) == {str(tmp_path / name): MINE.encode()}


def test_files_with_other_names_are_kept_and_accepted(worlds: Pools, tmp_path: Path) -> None:
    (tmp_path / "resnet-50.ckpt").write_text(MINE)
    for error in worlds.run(2, partial(error_of, FitCase(str(tmp_path), 2))):
        assert error == NOTHING
    assert (tmp_path / "resnet-50.ckpt").read_text() == MINE
