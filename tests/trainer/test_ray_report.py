"""Reports of checkpoints to Ray Train, and settings that contradict it; without Ray."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.integrations.ray import (
    RayCheckpointReport,
    _check_last,
    _check_model_checkpoint,
    _path_in,
)
from tests.support.fits import FitCase, error_of
from tests.support.ranks import Pools


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_error_names_the_command_that_installs_it() -> None:
    with pytest.raises(ImportError, match=r"pip install 'ray\[train\]>=2\.55'"):
        RayCheckpointReport()


def test_a_checkpoint_path_starts_with_rays_folder(tmp_path: Path) -> None:
    """Also through a link, because Ray compares prefixes of paths."""
    (tmp_path / "disk" / "run" / "checkpoints" / "step=5.ckpt").mkdir(parents=True)
    (tmp_path / "storage").symlink_to("disk")
    (tmp_path / "disk/run/checkpoints/last.ckpt").symlink_to("step=5.ckpt")
    run = tmp_path / "storage" / "run"
    for path in ("disk/run/checkpoints/step=5.ckpt", "storage/run/checkpoints/last.ckpt"):
        assert _path_in(run, str(tmp_path / path)) == f"{run}/checkpoints/step=5.ckpt"


@pytest.mark.parametrize("path", ["run/checkpoints/last-preempted.ckpt", "elsewhere/step=5.ckpt"])
def test_replaced_and_outside_checkpoints_are_not_reported_to_ray(
    path: str, tmp_path: Path
) -> None:
    """Ray would delete the newest state of a run, or would not find it."""
    assert _path_in(tmp_path / "run", str(tmp_path / path)) is None


@pytest.mark.parametrize(
    ("folder", "options", "last_name", "error"),
    [
        ("elsewhere", {"save_top_k": -1}, "last", "keeps checkpoints below .*/run only"),
        ("run/checkpoints", {}, "last", r"save_top_k=1\) would delete"),
        ("run/checkpoints", {"save_top_k": -1, "save_last": True}, "{epoch}-last", "would delete"),
        ("run/checkpoints", {"save_top_k": -1, "filename": "model"}, "last", "Put .step. into it"),
        ("run/checkpoints", {"save_top_k": -1, "save_last": True}, "last-{epoch}", None),
        ("run/checkpoints", {"save_top_k": -1, "save_last": "link"}, "{epoch}-last", None),
    ],
    ids=["elsewhere", "deletes", "deletes last", "names", "copy", "link"],
)
def test_callbacks_whose_checkpoints_ray_cannot_keep_are_refused(
    folder: str, options: dict[str, Any], last_name: str, error: str | None, tmp_path: Path
) -> None:
    callback = ModelCheckpoint(tmp_path / folder, **options)
    callback.CHECKPOINT_NAME_LAST = last_name
    if error is None:
        _check_model_checkpoint(callback, tmp_path / "run")
    else:
        with pytest.raises(UnsupportedError, match=error):
            _check_model_checkpoint(callback, tmp_path / "run")


def test_callbacks_of_which_only_some_are_found_as_last_are_refused(tmp_path: Path) -> None:
    """Ray may delete all checkpoints of the others, and keep only those that are not found."""
    linked, unlinked = (
        ModelCheckpoint(tmp_path, save_top_k=-1, save_last=last) for last in ("link", None)
    )
    _check_last([linked, linked])
    _check_last([unlinked, unlinked])  # resumed by a path
    with pytest.raises(UnsupportedError, match='save_last="link" to each'):
        _check_last([linked, unlinked])


class RayTrain:
    """Stands for ``ray.train``; reports are in a file, and those but the newest are deleted."""

    CheckpointUploadMode = SimpleNamespace(NO_UPLOAD=None)

    def __init__(self, run: Path, lost_step: int | None) -> None:
        self._run, self._lost_step = run, lost_step

    def get_context(self) -> Any:
        disk = SimpleNamespace(type_name="local")
        storage = SimpleNamespace(storage_filesystem=disk, experiment_fs_path=str(self._run))
        return SimpleNamespace(get_storage=lambda: storage)

    def Checkpoint(self, path: str, _: Any) -> Any:  # noqa: N802 - Ray's name
        return SimpleNamespace(path=path)

    def get_all_reported_checkpoints(self) -> list[Any]:
        return [
            SimpleNamespace(checkpoint=SimpleNamespace(path=path), metrics=metrics)
            for path, metrics in reports(self._run).items()
        ]

    def report(
        self, metrics: dict[str, Any], checkpoint: Any, *, checkpoint_upload_mode: None
    ) -> None:
        if metrics["step"] == self._lost_step:
            raise ConnectionError
        if dist.get_rank() == 0:
            known = {**reports(self._run), checkpoint.path: metrics}
            for path in [*known][:-2]:
                shutil.rmtree(path)
                del known[path]
            (self._run / "reports.json").write_text(json.dumps(known))


def reports(run: Path) -> dict[str, dict[str, Any]]:
    """Return the metrics of the kept checkpoints, by path."""
    file = run / "reports.json"
    found: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    return found


def fit_under_ray(case: FitCase, lost_step: int | None = None) -> str:
    """Fit; return the error. The workers of one step are lost before its report."""
    ray = RayTrain(Path(case.root).parent, lost_step)
    with patch.dict(sys.modules, {"ray.train": ray}):
        return error_of(case)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def reporting(run: Path, **checkpoint: Any) -> FitCase:
    """Return a fit of two steps that saves at the end of its epoch, and reports."""
    saves = {"save_top_k": -1, "filename": "{step}", **checkpoint}
    return FitCase(str(run / "checkpoints"), checkpoint=saves, callbacks=(RayCheckpointReport,))


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_lost_report_is_repeated_with_the_metrics_of_its_step(
    epochs: int, worlds: Pools, run: Path
) -> None:
    """Ray takes a missing metric for the best; with one epoch, nothing is left to train."""
    case = reporting(run, save_last="link")
    lost = worlds.run(2, partial(fit_under_ray, case, lost_step=2))
    assert all(error.startswith("ConnectionError") for error in lost)
    assert not reports(run)
    again = replace(case, epochs=epochs, ckpt_path="last")
    assert not any(worlds.run(2, partial(fit_under_ray, again)))
    found = [*reports(run).values()]
    assert [each["step"] for each in found] == [2, 4][:epochs]
    assert [each["epoch"] for each in found] == [0, 1][:epochs]
    assert all("val_loss" in each for each in found)


def test_a_restart_that_would_lose_reported_progress_is_refused(worlds: Pools, run: Path) -> None:
    """As when nothing is found as the last checkpoint; weights alone are not reported."""
    weights = partial(
        ModelCheckpoint, run / "weights", save_weights_only=True, every_n_train_steps=1
    )
    case = reporting(run)
    case = replace(case, callbacks=(*case.callbacks, weights))
    assert not any(worlds.run(2, partial(fit_under_ray, case)))
    path = f"{run}/checkpoints/step=2.ckpt"
    assert [*reports(run)] == [path]
    again = replace(case, epochs=2, ckpt_path="last")
    for error in worlds.run(2, partial(fit_under_ray, again)):
        assert error.startswith("CheckpointNotFoundError")
        assert f"ckpt_path={path!r}" in error
    assert not any(worlds.run(2, partial(fit_under_ray, replace(again, ckpt_path=path))))
    assert [each["step"] for each in reports(run).values()] == [2, 4]


def test_a_reported_checkpoint_that_is_replaced_by_another_step_is_refused(
    worlds: Pools, run: Path
) -> None:
    """Ray would delete the newest state by the report of an old one."""
    case = reporting(run, filename="{epoch}", every_n_train_steps=1)
    for error in worlds.run(2, partial(fit_under_ray, case)):
        assert error.startswith("UnsupportedError")
        assert "epoch=0.ckpt was reported to Ray Train at step 1, and now contains step 2" in error
        assert "{step}" in error
