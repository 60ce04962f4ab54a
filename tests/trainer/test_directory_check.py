"""Before its first step, a fit checks the directories to which it will save."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch import distributed

from lightning_elastic_zero.errors import CheckpointNotFoundError
from tests.support.fits import Data, RegressionNet, elastic, quiet_trainer
from tests.support.outcome import NOTHING, error_text
from tests.support.ranks import Pools


class Exporting(Checkpoint):
    """Saves to its own path, without the strategy."""

    dirpath = "s3://bucket/exports"


def errors_in_a_file(root: str, options: dict[str, Any]) -> str:
    """Return the error of a fit whose checkpoint directory would be inside a file."""
    checkpoints = ModelCheckpoint(dirpath=f"{root}/file/checkpoints")
    trainer = quiet_trainer(elastic(), checkpoints, Exporting(), max_epochs=1, **options)
    return error_text(lambda: trainer.fit(RegressionNet(), Data()))


@pytest.mark.engine
def test_an_impossible_directory_is_refused_before_training(worlds: Pools, tmp_path: Path) -> None:
    """A trial run (``fast_dev_run``) saves nothing, and is not refused."""
    (tmp_path / "file").touch()
    for error in worlds.run(2, partial(errors_in_a_file, str(tmp_path), {})):
        assert error.startswith("SaveError")
        assert f"{tmp_path}/file/checkpoints" in error
    trial: dict[str, Any] = {"fast_dev_run": True}
    for error in worlds.run(2, partial(errors_in_a_file, str(tmp_path), trial)):
        assert error == NOTHING


def fit_from_nowhere(root: str) -> tuple[bool, str, list[str]]:
    """Resume from a missing path.

    Returns:
        Whether ``except FileNotFoundError`` catches the error, its text, and the remaining files.
    """
    checkpoints = ModelCheckpoint(dirpath=f"{root}/run/checkpoints")
    trainer = quiet_trainer(elastic(), checkpoints, max_epochs=1)
    try:
        trainer.fit(RegressionNet(), Data(), ckpt_path=f"{root}/nowhere.ckpt")
    except FileNotFoundError as error:
        caught, text = isinstance(error, CheckpointNotFoundError), str(error)
    distributed.barrier()
    return caught, text, [entry.name for entry in Path(root).rglob("*")]


@pytest.mark.engine
@pytest.mark.parametrize("exists", [False, True])
def test_a_missing_checkpoint_leaves_no_trace(exists: bool, worlds: Pools, tmp_path: Path) -> None:
    """A missing ckpt_path raises FileNotFoundError on all ranks, as with Lightning's strategies.

    Directories that this fit created are removed; others stay.
    """
    if exists:
        (tmp_path / "run").mkdir()
    for caught, text, remaining in worlds.run(2, partial(fit_from_nowhere, str(tmp_path))):
        assert caught
        assert f"{tmp_path}/nowhere.ckpt" in text
        assert remaining == (["run"] if exists else [])
