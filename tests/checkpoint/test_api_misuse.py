"""Wrong use of the public functions: refused with a remedy, and files are closed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_elastic_zero.api import save_checkpoint
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.engine.support import check_config
from lightning_elastic_zero.errors import CheckpointFormatError, ElasticZeroError, UnsupportedError
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.tools.conversion import convert_checkpoint
from tests.support.foreign_checkpoints import unpack
from tests.support.plain_checkpoints import make_state, write_elastic
from tests.support.small_checkpoints import fill


@pytest.mark.parametrize("wrong", ["step5", [1, 2], 5])
def test_a_tag_as_client_state_is_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"client_state=.*a dictionary.*no tag") as refused:
        save_checkpoint(None, tmp_path / "x", wrong)
    assert repr(wrong) in str(refused.value)
    assert not (tmp_path / "x").exists()


def test_a_module_instead_of_an_engine_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Linear.*deepspeed\.initialize"):
        LiveEngine(nn.Linear(1, 1)).check()


@pytest.mark.parametrize("stage", ["3", 4, True, 2.0])
def test_an_invalid_stage_is_refused(stage: Any) -> None:
    """DeepSpeed accepts the string "3" and Lightning does not, so their behavior would differ."""
    with pytest.raises(UnsupportedError, match=r"stage: .*expected 0, 1, 2 or 3"):
        check_config({"zero_optimization": {"stage": stage}})
    check_config({"zero_optimization": {"stage": 3}})


def stock_tag_in(path: Path, tag: str) -> None:
    (path / tag).mkdir()
    (path / tag / "mp_rank_00_model_states.pt").write_text("of DeepSpeed")
    (path / "latest").write_text(tag)


def test_a_later_tag_of_deepspeed_is_an_error(tmp_path: Path) -> None:
    stock_tag_in(fill(tmp_path / "run", "ours"), "step9")
    with pytest.raises(CheckpointFormatError, match="step9") as refused:
        open_checkpoint(tmp_path / "run")
    assert str(tmp_path / "run" / "step9") in str(refused.value)


def test_the_tag_can_be_read_by_its_path(tmp_path: Path) -> None:
    stock_tag_in(fill(tmp_path / "run", "ours"), "step9")
    for tag, inside in (("step9", False), ("checkpoint", True)):
        with pytest.raises(Exception, match=r".") as refused:
            open_checkpoint(tmp_path / "run" / tag)
        assert ("is inside a checkpoint" in str(refused.value)) is inside


_DAMAGED = b"This is not a file of torch.save."


def _open_in(folder: Path) -> list[Path]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(link.readlink())
        except OSError:  # The descriptor of this listing is closed.
            continue
    return sorted(path for path in found if folder in path.parents)


def _kinds(kind: str, folder: Path) -> Path:
    if kind in {"universal", "dcp"}:
        intact = write_elastic(folder / "own.ckpt", make_state())
        convert_checkpoint(intact, folder / "converted", kind)
        return folder / "converted"
    if kind == "single":
        file = folder / "single" / "a.pt"
        file.parent.mkdir()
        torch.save({"epoch": 2, "neither": "weights"}, file)
        return file
    return unpack(kind, folder / "unpacked").checkpoint


def _damaged(intact: Path, target: Path) -> Iterator[Path]:
    if intact.is_file():
        yield intact
        return
    for name in sorted(p.relative_to(intact) for p in intact.rglob("*") if p.is_file()):
        for content in (_DAMAGED, b""):
            shutil.copytree(intact, target, symlinks=True)
            (target / name).write_bytes(content)
            yield target
            shutil.rmtree(target)


@pytest.mark.parametrize("kind", ["universal", "dcp", "zero1-ds0.19", "zero3-ds0.19", "single"])
def test_readers_close_files_that_they_refuse(kind: str, tmp_path: Path) -> None:
    intact = _kinds(kind, tmp_path)
    refused = []
    for path in _damaged(intact, tmp_path / "damaged"):
        try:
            reader = open_checkpoint(path)
        except ElasticZeroError as error:
            refused.append(error)
        else:
            reader.close()
        assert _open_in(tmp_path) == []
    assert refused
