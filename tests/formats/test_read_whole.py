"""A checkpoint read in one plain process equals the state in memory of its writer's engine."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.formats.dumps import describe_dumps
from lightning_elastic_zero.formats.open import open_checkpoint
from tests.formats._read_whole import read_whole
from tests.support.foreign_checkpoints import names, unpack
from tests.support.oracle import same_bits

DIRECTORIES = [n for n in names() if not n.startswith(("dumps", "universal-corrupt"))]


@pytest.mark.parametrize("name", DIRECTORIES)
def test_every_tensor_is_read_bit_for_bit(name: str, tmp_path: Path) -> None:
    fixture = unpack(name, tmp_path)
    truth = fixture.truth()
    found = read_whole(fixture.checkpoint)
    kinds = {key.partition("/")[0] for key in found} - {"buffer", "frozen"}
    wanted = [k for k in truth if k.partition("/")[0] in {*kinds, "frozen"}]
    assert kinds >= {"master"}
    assert set(wanted) <= set(found)
    for key, tensor in found.items():
        kind, _, rest = key.partition("/")
        held = truth.get(f"buffer/0/{rest}" if kind == "buffer" else key)
        if held is None:
            assert not tensor.numel(), f"{key} was not held"
        else:
            assert same_bits(held.flatten().to(tensor.dtype), tensor.flatten()), key


@pytest.mark.parametrize("name", ["zero2-ds0.19", "zero3-ds0.19", "dumps2"])
def test_each_opened_file_counts_as_progress(name: str, tmp_path: Path) -> None:
    """Rank 0 opens the files of all ranks while the others wait."""
    fixture = unpack(name, tmp_path)
    checkpoint = fixture.checkpoint
    if name.startswith("dumps"):
        describe_dumps(checkpoint, fixture.setup.model(3))
    calls: list[int] = []
    with closing(open_checkpoint(checkpoint, progress=Progress(lambda: calls.append(1)))) as source:
        opened = len(calls)
        source.check_all()
        files = sum(path.suffix == ".pt" for path in checkpoint.rglob("*"))
        assert opened >= 1
        assert len(calls) >= files


def test_bf16_checkpoints_are_read_into_fp16(tmp_path: Path) -> None:
    path = unpack("zero2-ds0.19", tmp_path).checkpoint
    wide, narrow = read_whole(path), read_whole(path, dtype=torch.float16)
    for key in (k for k in wide if k.startswith("master/")):
        assert same_bits(wide[key].half(), narrow[key]), key
