"""Metadata and chunks of directories of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    SerializationFormat,
)
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_elastic_zero.core.progress import NO_PROGRESS
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.dcp_read import (
    Chunk,
    DcpReader,
    Metadata,
    overlaps,
    read_metadata,
)
from lightning_elastic_zero.formats.dcp_write import RowsSource, write_directory
from lightning_elastic_zero.formats.newest import verify_share
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.formats.torch_read import StoredRun
from lightning_elastic_zero.storage.file_write import CHUNK_BYTES
from lightning_elastic_zero.tools.conversion import convert_checkpoint
from lightning_elastic_zero.tools.verification import verify_checkpoint
from tests.formats._fuzz_metadata import BEFORE, CLASSES, MEMBERS, valid_metadata
from tests.support.plain_checkpoints import write_dcp

MODULE = b"ctorch.distributed.checkpoint.metadata\n"
FILE = "__0_0.distcp"


def _read(data: bytes, folder: Path) -> Metadata:
    (folder / ".metadata").write_bytes(data)
    return read_metadata(folder)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_round_trips(protocol: int, tmp_path: Path) -> None:
    found = _read(pickle.dumps(valid_metadata(3), protocol), tmp_path)
    weight, epoch = found.leaves
    assert found.ordered
    assert (weight.path, epoch.path) == (("model", "weight"), ("epoch",))
    assert weight.tensor is not None
    assert (weight.tensor.shape, weight.tensor.dtype) == (torch.Size([3, 3]), torch.float32)
    assert weight.chunks == tuple(Chunk((row, 0), (1, 3), FILE, row, 1) for row in range(3))
    assert epoch.tensor is None
    assert epoch.chunks == (Chunk((), (), FILE, 3, 1),)


def six_properties(self: TensorProperties) -> tuple[Any, ...]:
    """Return the state of torch 2.15, which also stores the strides."""
    contiguous = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    return (self.dtype, self.layout, False, contiguous, False, (3, 1))


def test_metadata_of_torch_2_15_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorProperties, "__getstate__", six_properties)
    weight, _ = _read(pickle.dumps(valid_metadata(3)), tmp_path).leaves
    assert weight.tensor is not None
    assert (weight.tensor.shape, weight.tensor.dtype) == (torch.Size([3, 3]), torch.float32)


ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@ALONE
def test_a_directory_written_under_torch_2_15_loads_in_older_releases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older releases refuse metadata with more than five properties."""
    values = torch.arange(12.0)
    rows = RowsSource(("w",), (3, 4), values.dtype, lambda start, stop: values[start:stop])
    with monkeypatch.context() as newer:
        older = TensorProperties.__setstate__
        newer.setattr(TensorProperties, "__getstate__", six_properties)
        newer.setattr(TensorProperties, "__setstate__", lambda self, state: older(self, state[:5]))
        write_directory(tmp_path / "ours", [rows], {("step",): 3})
        save({"w": values}, checkpoint_id=tmp_path / "torch")
    with pytest.raises(Exception, match="too many values"):
        FileSystemReader(tmp_path / "torch").read_metadata()
    found: dict[str, Any] = {"w": torch.zeros(3, 4), "step": 0}
    load(found, checkpoint_id=tmp_path / "ours")
    assert torch.equal(found["w"], values.view(3, 4))
    assert found["step"] == 3


@ALONE
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"serialization_format": SerializationFormat.SAFETENSORS}, "SerializationFormat.SAFET"),
        ({}, "flatten_state_dict=False, so model, optimizer are pickled objects"),
    ],
)
def test_other_options_of_torchs_writer_are_named(
    option: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tree = {"model": {"w": torch.ones(3)}, "optimizer": {"state": {"w": torch.ones(3)}}, "epoch": 3}
    planner = DefaultSavePlanner(flatten_state_dict=bool(option))
    save(tree, storage_writer=FileSystemWriter(tmp_path, **option), planner=planner)
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(tmp_path)


@ALONE
def test_objects_of_a_flat_tree_are_read(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save({"w": torch.ones(3), "epoch": 3}, checkpoint_id=tmp_path, planner=planner)
    with closing(open_checkpoint(tmp_path)) as source:
        assert source.manifest.names() == ("w",)


def test_overlapping_or_missing_chunks_are_refused(tmp_path: Path) -> None:
    for change in ("offsets", "sizes"):
        metadata = valid_metadata(3)
        chunk = metadata.state_dict_metadata["model.weight"].chunks[2]  # type: ignore[union-attr]
        places = metadata.storage_data
        setattr(chunk, change, torch.Size([1, 0] if change == "offsets" else [1, 2]))
        metadata.storage_data = {**places}
        with pytest.raises(CheckpointCorruptedError, match="each of its elements once"):
            _read(pickle.dumps(metadata), tmp_path)


@pytest.mark.parametrize("name", [b"Metadata", b"_MEM_FORMAT_ENCODING"])
def test_classes_of_this_process_do_not_change(name: bytes, tmp_path: Path) -> None:
    state = b"(N}X\x07\x00\x00\x00changedK\x07st"
    for target in (MODULE + name + b"\n", MODULE + name + b"\n)\x81"):
        with pytest.raises(CheckpointCorruptedError, match="is damaged, or not of torch's"):
            _read(b"\x80\x02" + target + state + pickle.BUILD + pickle.STOP, tmp_path)
    assert [*(dict(vars(shared)) for shared in (*CLASSES, *MEMBERS))] == BEFORE


@pytest.mark.parametrize("name", [b"os\nsystem", b"torch\nload", b"builtins\neval", b"torch\nhub"])
def test_other_classes_are_not_imported(name: bytes, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=rf"object of {name.decode().replace(chr(10), '.')}"):
        _read(b"\x80\x02c" + name + b"\n)R.", tmp_path)


def test_small_chunks_are_read_once_from_one_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also next to a chunk that is read in several parts."""
    weights = {f"w{i}": torch.full((16,), float(i)) for i in range(50)}
    weights["large"] = torch.arange(1 << 16, dtype=torch.float32)
    reader = open_checkpoint(write_dcp(tmp_path / "dcp", {"model": weights}))
    sizes, preadv, opened, real_open = list[int](), os.preadv, list[str](), os.open

    def counted(descriptor: int, buffers: Sequence[memoryview], *rest: int) -> int:
        sizes.append(preadv(descriptor, buffers, *rest))
        return sizes[-1]

    def noted(path: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(Path(path).name)
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(os, "open", noted)
    assert isinstance(reader, DcpReader)
    values = reader.load_tree(dict(reader._full_state.weights))
    assert values.keys() == weights.keys()
    assert all(torch.equal(values[name], weights[name]) for name in weights)
    assert opened == [FILE]
    assert len(sizes) < 60
    assert sum(sizes) < (tmp_path / "dcp" / FILE).stat().st_size + 3 * CHUNK_BYTES


@pytest.mark.parametrize("at", [0, 1])
def test_an_error_of_the_disk_is_not_damage(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a fallback would take an older checkpoint. In the index of a chunk, or in its data."""
    weights = {"w": torch.arange(1 << 20, dtype=torch.float32)}
    reader = open_checkpoint(write_dcp(tmp_path / "dcp", {"model": weights}))
    calls, preadv = list[int](), os.preadv

    def fail(descriptor: int, buffers: Sequence[memoryview], offset: int, *flags: int) -> int:
        calls.append(offset)
        if len(calls) > at * 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        reader.verify(0, 1, NO_PROGRESS)
    assert len(calls) > at * 3


# -- a save that was killed while it overwrote the directory ---------------------------------------

NAMES = ("a", "b", "c", "d")
HOUR_S = 3600


def _save_in_two_files(folder: Path, steps: Sequence[int] | None, global_step: int = 0) -> Path:
    """Save parameters with these steps, or by an optimizer that counts none."""
    state = {
        name: {"exp_avg": torch.ones(64), "step": torch.tensor(float(step))}
        for name, step in zip(NAMES, steps or (0, 0, 0, 0), strict=True)
    }
    if steps is None:
        state = {name: {"momentum_buffer": torch.ones(64)} for name in NAMES}
    optimizer = {"state": state, "param_groups": [{"params": list(NAMES), "lr": 0.1}]}
    tree = {"model": {name: torch.ones(64) for name in NAMES}, "optimizer_0": optimizer}
    save(tree, storage_writer=FileSystemWriter(folder, thread_count=2), no_dist=True)
    state_of_trainer = {"pytorch-lightning_version": "2.6.6", "global_step": global_step}
    torch.save(state_of_trainer if global_step else {"mine": 1}, folder / "meta.pt")
    return folder


def _date(folder: Path, after_s: float) -> None:
    """Set the time of one of the files, relative to that of ``.metadata``."""
    written_s = (folder / ".metadata").stat().st_mtime + after_s
    os.utime(folder / "__0_1.distcp", (written_s, written_s))


@ALONE
@pytest.mark.parametrize(
    ("global_step", "after_s", "message"),
    [
        (1, -HOUR_S, "Adam has taken 2 steps, but meta.pt is of step 1, and files have different"),
        (0, HOUR_S, r"__0_1.distcp: written after .metadata.* 2 steps there, 1 in other"),
    ],
)
def test_a_directory_overwritten_in_part_is_refused(
    global_step: int, after_s: float, message: str, tmp_path: Path
) -> None:
    """A save overwrites the files in place, and .metadata last. Sizes and checksums match."""
    folder, newer = (
        _save_in_two_files(tmp_path / str(step), [step] * 4, global_step and step)
        for step in (1, 2)
    )
    assert verify_checkpoint(newer).is_sound
    shutil.copy(newer / "__0_1.distcp", folder)
    _date(folder, after_s)
    with pytest.raises(CheckpointFormatError, match=message):
        verify_share(folder, 0, 1, NO_PROGRESS)
    assert not verify_checkpoint(folder).is_sound
    with pytest.raises(CheckpointFormatError, match=message):
        convert_checkpoint(folder, tmp_path / "out", "fp32")


@ALONE
def test_different_steps_or_times_alone_are_no_damage(tmp_path: Path) -> None:
    """A parameter without a gradient takes no step, and a copy may lose the times of its files."""
    unequal = _save_in_two_files(tmp_path / "unequal", [5, 5, 2, 2], 5)
    copied = _save_in_two_files(tmp_path / "copied", [5, 5, 5, 5])
    silent = _save_in_two_files(tmp_path / "silent", None)
    twice = _save_in_two_files(tmp_path / "twice", [10, 10, 10, 10], 5)
    for folder in (copied, silent):
        _date(folder, HOUR_S)
    found = {folder: verify_checkpoint(folder) for folder in (unequal, copied, silent, twice)}
    assert all(each.is_sound for each in found.values()), found
    assert (found[unequal].note, found[copied].note) == ("", "")
    assert "__0_1.distcp: written after .metadata" in found[silent].note
    assert "touch" in found[silent].note
    assert "Adam has taken 10 steps, but meta.pt is of step 5: maybe" in found[twice].note


Box = tuple[list[int], list[int], list[int], tuple[int, int]]


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(0, n - at)) for n, at in zip(shape, starts, strict=True)]
    numel = torch.Size(shape).numel()
    start = draw(st.integers(0, numel - 1))
    return shape, starts, sizes, (start, draw(st.integers(start + 1, numel)))


@given(boxes())
def test_overlaps_of_a_box_and_a_run_are_found_once(case: Box) -> None:
    shape, starts, sizes, (start, stop) = case
    elements = torch.arange(torch.Size(shape).numel()).reshape(shape)
    box = elements[tuple(slice(o, o + n) for o, n in zip(starts, sizes, strict=True))].reshape(-1)
    wanted = {int(e): at for at, e in enumerate(box.tolist()) if start <= e < stop}
    found: dict[int, int] = {}
    run = StoredRun(torch.empty(0), start, stop)
    for at, low, high in overlaps(run, shape, starts, sizes):
        for shift in range(high - low):
            assert low + shift not in found
            found[low + shift] = at + shift
    assert found == wanted
