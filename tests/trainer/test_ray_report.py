"""Reports of checkpoints to Ray Train, and settings that contradict it; without Ray."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.integrations.ray import (
    RayCheckpointReport,
    _check_model_checkpoint,
    _path_in,
)


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
    ("folder", "options", "error"),
    [
        ("elsewhere", {"save_top_k": -1}, "keeps checkpoints below .*/run only"),
        ("run/checkpoints", {}, r"save_top_k=1\) would delete"),
        ("run/checkpoints", {"save_top_k": -1, "save_last": "link"}, None),
    ],
    ids=["elsewhere", "deletes", "right"],
)
def test_callbacks_whose_checkpoints_ray_cannot_keep_are_refused(
    folder: str, options: dict[str, object], error: str | None, tmp_path: Path
) -> None:
    callback = ModelCheckpoint(tmp_path / folder, **options)  # type: ignore[arg-type]
    if error is None:
        _check_model_checkpoint(callback, tmp_path / "run")
    else:
        with pytest.raises(UnsupportedError, match=error):
            _check_model_checkpoint(callback, tmp_path / "run")
