"""A number that its type here cannot hold is refused by name; infinity and NaN stay what they are.

Where a run of elements is read from does not matter: files of every kind, in any order.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_elastic_zero.core.layout import Fragment, Layout, TransferPlan
from lightning_elastic_zero.core.progress import NO_PROGRESS
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.formats.reader import (
    WEIGHT,
    CheckpointReader,
    ReadRun,
    check_no_overflow,
)
from lightning_elastic_zero.formats.torch_read import StoredRun

NUMEL = (1 << 20) + 12
"""More elements than are looked at at a time."""


def zip_file(weight: torch.Tensor, folder: Path) -> Path:
    """Write a single file."""
    torch.save({"state_dict": {"w": weight}}, folder / "model.ckpt")
    return folder / "model.ckpt"


def legacy_file(weight: torch.Tensor, folder: Path) -> Path:
    """Write a single file that is no zip."""
    path = folder / "model.ckpt"
    torch.save({"state_dict": {"w": weight}}, path, _use_new_zipfile_serialization=False)
    return path


def transposed(weight: torch.Tensor, folder: Path) -> Path:
    """Write a single file whose elements lie in another order."""
    return zip_file(weight.view(4, -1).t().contiguous().t(), folder)


def directory(weight: torch.Tensor, folder: Path) -> Path:
    """Write a directory of ``torch.distributed.checkpoint``, without a process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It says that there is no process group.
        save({"model": {"w": weight}}, checkpoint_id=folder / "model.distcp", no_dist=True)
    return folder / "model.distcp"


KINDS = [zip_file, legacy_file, transposed, directory]

CASTS = [
    (torch.float64, torch.float32, 1e300),
    (torch.float64, torch.float32, -1e39),
    (torch.float32, torch.float16, 65520.0),
    (torch.float32, torch.bfloat16, 3.4e38),
    (torch.bfloat16, torch.float16, 1e30),
]
"""The type in the file, the one here, and a number that only the former can hold."""


def read(path: Path, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
    """Read elements of the one weight as a load does."""
    with closing(open_checkpoint(path)) as source:
        target = torch.zeros(stop - start, dtype=dtype)
        wanted = Fragment("w", start, stop, rank=0, buffer=0, offset=0)
        for _, transfers in TransferPlan([wanted], layout_of(source)).by_rank():
            source.read(transfers, [{WEIGHT: target}], NO_PROGRESS)
        return target


def layout_of(source: CheckpointReader) -> Layout:
    """Return where the weight lies, whether an optimizer owns it or not."""
    return source.layout() if source.manifest.optimized else source.frozen_layout()


@pytest.mark.parametrize("write", KINDS)
@pytest.mark.parametrize(("saved", "here", "number"), CASTS, ids=str)
def test_a_number_that_is_too_large_is_refused(
    write: Callable[..., Path],
    saved: torch.dtype,
    here: torch.dtype,
    number: float,
    tmp_path: Path,
) -> None:
    """By parameter, number and type; a run that does not hold it is read."""
    weight = torch.arange(NUMEL, dtype=torch.float32).remainder(7).to(saved)
    weight[0], weight[-3] = math.inf, number
    path = write(weight, tmp_path)
    told = f"w has the {saved} value {weight[-3].item():.9g}, which overflows {here}"
    with pytest.raises(CheckpointMismatchError, match=re.escape(told.replace("torch.", ""))):
        read(path, here, 0, NUMEL)
    assert torch.equal(read(path, here, 0, NUMEL - 3), weight[:-3].to(here))


@pytest.mark.parametrize("write", KINDS)
@pytest.mark.parametrize(("saved", "here", "number"), CASTS, ids=str)
def test_what_is_not_finite_in_the_file_stays_so(
    write: Callable[..., Path],
    saved: torch.dtype,
    here: torch.dtype,
    number: float,
    tmp_path: Path,
) -> None:
    """Infinities and NaN; and a number that is too large is no error in its own type."""
    weight = torch.ones(NUMEL, dtype=saved)
    weight[::1000], weight[1], weight[-1] = math.inf, -math.inf, math.nan
    found = read(write(weight, tmp_path), here, 0, NUMEL)
    torch.testing.assert_close(found, weight.to(here), rtol=0, atol=0, equal_nan=True)
    weight[5] = number
    found = read(write(weight, tmp_path), saved, 0, NUMEL)
    torch.testing.assert_close(found, weight, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("saved", "here", "reads"),
    [
        (torch.float32, torch.float32, 0),
        (torch.bfloat16, torch.float32, 0),
        (torch.float16, torch.bfloat16, 0),
        (torch.int64, torch.int64, 0),
        (torch.float64, torch.float32, 1),
    ],
)
def test_nothing_is_read_again_where_nothing_can_become_infinite(
    saved: torch.dtype, here: torch.dtype, reads: int
) -> None:
    """Only what was read into a narrower type and is not finite, in parts around it."""
    numel = 2 * NUMEL
    stored = torch.ones(numel, dtype=saved)
    if saved.is_floating_point:
        stored[-1] = math.inf
    wanted: list[StoredRun] = []

    def read_into(pairs: Iterable[tuple[torch.Tensor, StoredRun]]) -> int:
        for target, run in pairs:
            wanted.append(run)
            target.copy_(stored[run.start : run.stop])
        return 8

    read_run = ReadRun(stored.to(here), StoredRun(stored, 0, numel), "w", "")
    assert check_no_overflow(read_run, Path("file"), read_into) == 8 * reads
    assert len(wanted) == reads
    assert sum(run.stop - run.start for run in wanted) < NUMEL


def test_an_optimizer_state_is_named_with_what_helps() -> None:
    """The state, the parameter, and that a load without it is possible."""
    stored = torch.full((3,), 1e39, dtype=torch.float64)

    def read_into(pairs: Iterable[tuple[torch.Tensor, StoredRun]]) -> int:
        for target, run in pairs:
            target.copy_(stored[run.start : run.stop])
        return 0

    read_run = ReadRun(stored.to(torch.bfloat16), StoredRun(stored, 0, 3), "layer.w", "exp_avg")
    with pytest.raises(CheckpointMismatchError) as refusal:
        check_no_overflow(read_run, Path("folder/file"), read_into)
    told = str(refusal.value)
    assert "folder/file: the optimizer state exp_avg of layer.w has the float64 value 1e+39" in told
    assert "bfloat16 (at most 3.38953139e+38)" in told
    assert "load_optimizer_state=False" in told
    assert "precision" in told
