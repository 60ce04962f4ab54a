"""Which directories a fit checks before its first step: those into which it will save."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from torch import distributed

from lightning_elastic_zero.errors import CheckpointNotFoundError
from lightning_elastic_zero.trainer.checkpoint_io import _saves
from tests.support.fits import Data, RegressionNet, elastic, quiet_trainer
from tests.support.outcome import error_text
from tests.support.ranks import Pools


class Exporting(Checkpoint):
    """Saves by itself, wherever it likes."""

    dirpath = "s3://bucket/exports"


@pytest.mark.parametrize(
    ("callback", "saves"),
    [
        (ModelCheckpoint(), True),
        (ModelCheckpoint(save_top_k=0), False),
        (ModelCheckpoint(save_top_k=0, save_last=True), True),
        (OnExceptionCheckpoint("folder"), True),
        (Exporting(), False),
    ],
    ids=["each", "none", "last", "in an exception", "a user's own"],
)
def test_only_callbacks_that_save_through_the_strategy_are_checked(
    callback: Checkpoint, saves: bool
) -> None:
    assert _saves(callback) == saves


def errors_in_a_file(root: str, options: dict[str, Any]) -> str:
    """Return the errors of a fit whose checkpoints would lie in a file."""
    checkpoints = ModelCheckpoint(dirpath=f"{root}/file/checkpoints")
    trainer = quiet_trainer(elastic(), checkpoints, Exporting(), max_epochs=1, **options)
    return error_text(lambda: trainer.fit(RegressionNet(), Data()))


@pytest.mark.engine
def test_an_impossible_directory_is_refused_before_training(worlds: Pools, tmp_path: Path) -> None:
    """A trial run, which saves nothing, is not refused."""
    (tmp_path / "file").touch()
    for said in worlds.run(2, partial(errors_in_a_file, str(tmp_path), {})):
        assert said.startswith("SaveError")
        assert f"{tmp_path}/file/checkpoints" in said
    quick: dict[str, Any] = {"fast_dev_run": True}
    for said in worlds.run(2, partial(errors_in_a_file, str(tmp_path), quick)):
        assert said == "nothing was raised"


def fit_from_nowhere(root: str) -> tuple[bool, str, list[str]]:
    """Resume a missing path; return if stock handlers catch it, its text, and what remains."""
    checkpoints = ModelCheckpoint(dirpath=f"{root}/run/checkpoints")
    trainer = quiet_trainer(elastic(), checkpoints, max_epochs=1)
    try:
        trainer.fit(RegressionNet(), Data(), ckpt_path=f"{root}/nowhere.ckpt")
    except FileNotFoundError as error:
        caught, text = isinstance(error, CheckpointNotFoundError), str(error)
    distributed.barrier()
    return caught, text, [entry.name for entry in Path(root).rglob("*")]


@pytest.mark.engine
@pytest.mark.parametrize("there_before", [False, True])
def test_a_missing_checkpoint_leaves_no_trace(
    there_before: bool, worlds: Pools, tmp_path: Path
) -> None:
    """A missing ckpt_path is a FileNotFoundError on all ranks, as with Lightning's strategies.

    Directories that only this fit has made are removed; others stay.
    """
    if there_before:
        (tmp_path / "run").mkdir()
    for caught, text, left in worlds.run(2, partial(fit_from_nowhere, str(tmp_path))):
        assert caught
        assert f"{tmp_path}/nowhere.ckpt" in text
        assert left == (["run"] if there_before else [])
