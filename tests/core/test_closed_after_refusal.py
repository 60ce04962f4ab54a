"""Files of a checkpoint that cannot be opened: none stays open, whatever kind it is of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.tools.conversion import convert_checkpoint
from tests.foreign._fixtures import unpack
from tests.support.plain_checkpoints import make_state, write_elastic

_DAMAGED = b"This is no file of torch.save."


def _open_in(folder: Path) -> list[Path]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(link.readlink())
        except OSError:  # The one that lists them is closed again.
            continue
    return sorted(path for path in found if folder in path.parents)


def _kinds(kind: str, folder: Path) -> Path:
    if kind in {"universal", "dcp"}:
        whole = write_elastic(folder / "own.ckpt", make_state())
        convert_checkpoint(whole, folder / "converted", kind)
        return folder / "converted"
    if kind == "single":
        file = folder / "single" / "a.pt"
        file.parent.mkdir()
        torch.save({"epoch": 2, "neither": "weights"}, file)
        return file
    return unpack(kind, folder / "unpacked").checkpoint


def _damaged(whole: Path, target: Path) -> Iterator[Path]:
    """Yield a copy for each file, in which that file has other bytes, or none."""
    if whole.is_file():
        yield whole
        return
    for name in sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file()):
        for content in (_DAMAGED, b""):
            shutil.copytree(whole, target, symlinks=True)
            (target / name).write_bytes(content)
            yield target
            shutil.rmtree(target)


@pytest.mark.parametrize("kind", ["universal", "dcp", "zero1-ds0.19", "zero3-ds0.19", "single"])
def test_nothing_stays_open(kind: str, tmp_path: Path) -> None:
    """A reader that refuses what it is given has closed it by then, with its error still held."""
    whole = _kinds(kind, tmp_path)
    refused = []
    for path in _damaged(whole, tmp_path / "damaged"):
        try:
            reader = open_checkpoint(path)
        except ElasticZeroError as error:
            refused.append(error)
        else:
            reader.close()
        assert _open_in(tmp_path) == []
    assert refused
