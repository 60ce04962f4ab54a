from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_elastic_zero.core.manifest import FileEntry
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointMismatchError,
)
from lightning_elastic_zero.formats.pickles import PLAIN_DATA
from lightning_elastic_zero.formats.torch_read import LegacyFile, StoredRun, TorchFile, is_legacy
from lightning_elastic_zero.formats.torch_write import PiecewiseSource, TorchFileWriter
from lightning_elastic_zero.storage import files as range_file
from lightning_elastic_zero.storage.checksums import CHUNK_BYTES, ChecksummedWriter
from lightning_elastic_zero.storage.files import RangeFile
from tests.support.bits import (
    NAME,
    SAVE_ID,
    any_bits,
    bits,
    bitwise_repr,
    open_verified,
    write_tree,
)


def open_unverified(path: Path) -> TorchFile | LegacyFile:
    """Open a file that nobody has recorded anything of."""
    if is_legacy(path):
        return LegacyFile(path, PLAIN_DATA)
    return TorchFile(RangeFile(path), PLAIN_DATA)


def write_bytes(directory: Path, data: bytes) -> FileEntry:
    """Write a file that is sound, but perhaps not of torch."""
    with ChecksummedWriter(directory, NAME) as file:
        file.write(data)
        return file.finish(SAVE_ID)


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Draw pieces of three tensors: which one, from where, to where; they may overlap."""
    points = st.integers(0, 60_000)
    return [
        (draw(st.integers(0, 2)), min(one, other), max(one, other))
        for one, other in draw(st.lists(st.tuples(points, points), max_size=8))
    ]


class TestReading:
    @given(
        wanted=requests(),
        stored=st.sampled_from([torch.float64, torch.bfloat16, torch.int8]),
        read_chunks=st.integers(1, 4),
    )
    def test_reads_any_pieces(
        self, wanted: list[tuple[int, int, int]], stored: torch.dtype, read_chunks: int
    ) -> None:
        """Any pieces, in any order, arrive bit for bit; what is between them stays as it was."""
        live = [any_bits(60_000, stored, seed) for seed in range(3)]
        size = sum(stop - start for _, start, stop in wanted)
        target = torch.zeros(size + 2, dtype=stored)
        expected, at, pieces = [bits(target[:1])], 1, []
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(range_file, "READ_BYTES", read_chunks * CHUNK_BYTES)
            builder = TorchFileWriter()
            tree = [builder.add(PiecewiseSource([one], stored)) for one in live]
            with open_verified(Path(folder), write_tree(Path(folder), tree, builder)) as file:
                for which, start, stop in wanted:
                    slot = target[at : at + stop - start]
                    pieces.append((slot, StoredRun(file.tree[which], start, stop)))
                    expected.append(bits(live[which][start:stop]))
                    at += stop - start
                file.read_into(pieces)
        assert bits(target) == b"".join([*expected, bits(target[-1:])])
        assert not bits(target[-1:]).strip(b"\0")

    def test_only_edges_are_copied(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of a long run all chunks but its two edges are read where they are wanted."""
        live = any_bits(1 << 20)
        start, stop = 1000, live.numel() - 1000
        target, given = torch.empty(stop - start, dtype=live.dtype), []
        memory = range(target.data_ptr(), target.data_ptr() + target.nbytes)
        read_runs = RangeFile.read_runs

        def watched(
            self: RangeFile,
            runs: Sequence[tuple[int, int]],
            places: Sequence[range_file.PlacedView] = (),
        ) -> Iterator[tuple[int, memoryview]]:
            for offset, view in read_runs(self, runs, places):
                given.append((torch.frombuffer(view, dtype=torch.uint8).data_ptr(), view.nbytes))
                yield offset, view

        builder = TorchFileWriter()
        tree = {"a": builder.add(PiecewiseSource([live], live.dtype))}
        with open_verified(tmp_path, write_tree(tmp_path, tree, builder)) as file:
            monkeypatch.setattr(RangeFile, "read_runs", watched)
            file.read_into([(target, StoredRun(file.tree["a"], start, stop))])
        assert bits(target) == bits(live[start:stop])
        copied = [size_bytes for address, size_bytes in given if address not in memory]
        assert len(copied) == 2
        assert sum(copied) < 2 * CHUNK_BYTES < target.nbytes

    def test_casts_only_where_types_differ(self, tmp_path: Path) -> None:
        """A target of another type gets what ``Tensor.to`` gives."""
        live = torch.randn(100_000)
        with open_verified(tmp_path, write_tree(tmp_path, {"a": live})) as file:
            for dtype in (torch.bfloat16, torch.float64):
                target = torch.zeros(100_000, dtype=dtype)
                file.read_into([(target, StoredRun(file.tree["a"], 0, 100_000))])
                assert torch.equal(target, live.to(dtype))

    @pytest.mark.parametrize("legacy", [False, True])
    @pytest.mark.parametrize(
        ("stored", "wanted"),
        [
            (torch.int8, torch.float32),
            (torch.uint8, torch.bfloat16),
            (torch.bool, torch.float32),
            (torch.float32, torch.int8),
            (torch.int8, torch.uint8),
            (torch.complex64, torch.float32),
        ],
        ids=str,
    )
    def test_integers_are_not_cast(
        self, stored: torch.dtype, wanted: torch.dtype, legacy: bool, tmp_path: Path
    ) -> None:
        """Quantized weights taken as numbers would be wrong by their scales, without a word."""
        torch.save(
            {"a": torch.ones(8).to(stored)},
            tmp_path / "a.pt",
            _use_new_zipfile_serialization=not legacy,
        )
        file, target = open_unverified(tmp_path / "a.pt"), torch.zeros(8, dtype=wanted)
        with pytest.raises(CheckpointMismatchError, match=f"elements of {stored} where {wanted}"):
            file.read_into([(target, StoredRun(file.tree["a"], 0, 8))])
        assert not target.any()
        same = torch.zeros(8, dtype=stored)
        file.read_into([(same, StoredRun(file.tree["a"], 0, 8))])
        assert torch.equal(same, torch.ones(8).to(stored))
        file.close()

    def test_reads_no_more_than_it_needs(self, tmp_path: Path) -> None:
        """A run costs its own chunks and the index, whatever the size of the file."""
        builder, live = TorchFileWriter(), any_bits(1 << 22)
        tree = {"a": builder.add(PiecewiseSource([live], live.dtype))}
        told: list[int] = []
        with open_verified(tmp_path, write_tree(tmp_path, tree, builder)) as file:
            opening = file.bytes_read
            assert opening < 3 * CHUNK_BYTES
            target = torch.zeros(1 << 20)
            run = StoredRun(file.tree["a"], 99, 99 + (1 << 20))
            read_bytes = file.read_into([(target, run)], Progress(show=told.append))
            assert read_bytes == file.bytes_read - opening <= (4 << 20) + CHUNK_BYTES
        assert bits(target) == bits(live[99 : 99 + (1 << 20)])
        assert sum(told) == 4 << 20

    def test_the_tree_has_no_values_to_take_by_mistake(self, tmp_path: Path) -> None:
        """A tensor of the tree has shape and type, and refuses to be computed with."""
        with open_verified(tmp_path, write_tree(tmp_path, {"a": torch.ones(2, 3)})) as file:
            tensor = file.tree["a"]
        assert (tensor.shape, tensor.dtype, tensor.device.type) == ((2, 3), torch.float32, "meta")
        with pytest.raises(RuntimeError, match="meta"):
            tensor.sum().item()

    def test_locates_what_is_in_the_file(self, tmp_path: Path) -> None:
        """The place of a tensor, and of views of it, is where its bytes are in the file."""
        live = any_bits(10_000, torch.bfloat16)
        tree = {"x": any_bits(77, torch.int8), "a": live, "b": live.view(100, 100)[3]}
        record = write_tree(tmp_path, tree)
        data = (tmp_path / record.name).read_bytes()
        with open_verified(tmp_path, record, SAVE_ID) as file:
            for tensor, expected in (
                (file.tree["x"], tree["x"]),
                (file.tree["a"][50:90], live[50:90]),
                (file.tree["b"], tree["b"]),
            ):
                start, stop = file.byte_range(tensor)
                assert data[start:stop] == bits(expected)
            with pytest.raises(ValueError, match="has no one place"):
                file.byte_range(file.tree["a"].view(100, 100).t())
            with pytest.raises(CheckpointFormatError, match=r"shard\.pt does not hold the tensor"):
                file.byte_range(torch.zeros(3))

    def test_loads_a_tree_as_torch_does(self, tmp_path: Path) -> None:
        """Whatever weights-only trees hold comes back as ``torch.load`` gives it."""
        flat = any_bits(1000)
        learned = torch.nn.Parameter(torch.randn(3))
        vars(learned).update(scale=torch.arange(2), kind="learned")
        fields = OrderedDict(a=1)
        vars(fields).update(kept=torch.arange(4))
        tree = OrderedDict(
            view=flat[10:20],
            strided=flat[::3].view(2, 167).t(),
            scalar=torch.tensor(3.5),
            flag=torch.tensor([True, False]),
            complex=torch.view_as_complex(torch.randn(4, 2).double()),
            small=torch.arange(300, dtype=torch.int16).to(torch.uint16),
            nested=[{"a": (1, "b", None, torch.arange(3))}, torch.Size([2, 3])],
            empty=torch.zeros(0, 4),
            counter=Counter({"a": 2, "b": 3}),
            parameter=[learned, {"again": learned}],
            frozen=torch.nn.Parameter(torch.zeros(2, 2).t(), requires_grad=False),
            leaf=torch.ones(2, requires_grad=True),
            computed=torch.ones(2, requires_grad=True) * 2,
            buffer=torch.nn.Buffer(torch.ones(2)),
            fields=fields,
        )
        record = write_tree(tmp_path, tree)
        expected = torch.load(tmp_path / record.name, weights_only=True)
        with open_verified(tmp_path, record) as file:
            found = file.load_tree(file.tree)
            assert bits(file.load_tree(file.tree["view"])) == bits(flat[10:20])
        assert type(found) is OrderedDict
        assert list(found) == list(expected)
        _assert_same(found, expected)
        assert bitwise_repr(found) == bitwise_repr(expected)
        (first, inner), leaf = found["parameter"], found["leaf"]
        assert inner["again"] is first
        (first.sum() + leaf.sum()).backward()
        torch.optim.SGD([first, leaf], 1.0).step()
        assert bits(first.detach()) == bits(learned.detach() - 1)

    @pytest.mark.parametrize("legacy", [False, True])
    def test_senseless_runs(self, tmp_path: Path, legacy: bool) -> None:
        """A run beyond its tensor, or beside its target, is refused before a byte is written."""
        path = tmp_path / "a.pt"
        torch.save(torch.zeros(10), path, _use_new_zipfile_serialization=not legacy)
        with contextlib.closing(open_unverified(path)) as file:
            for start, stop in ((-1, 3), (4, 3), (0, 11), (10, 11)):
                with pytest.raises(ValueError, match="is not within"):
                    file.read_into([(torch.ones(5), StoredRun(file.tree, start, stop))])
            for shape in ((5, 5), (0,), (2,), (1, 1), ()):
                with pytest.raises(ValueError, match="is not filled by 1 elements"):
                    file.read_into([(torch.ones(shape), StoredRun(file.tree, 0, 1))])

    def test_opens_fast(self, tmp_path: Path) -> None:
        """A shard of 2160 views takes less than a second of this process to open."""
        builder = TorchFileWriter()
        flats = [builder.add(PiecewiseSource([720_000], torch.float32)) for _ in range(3)]
        tree = {f"layer.{i}.weight": [f[i * 1000 :][:1000] for f in flats] for i in range(720)}
        record = write_tree(tmp_path, tree, builder)
        times_s = []
        for _ in range(3):
            start_s = time.process_time()
            with open_verified(tmp_path, record):
                times_s.append(time.process_time() - start_s)
        assert min(times_s) < 1


def _assert_same(found: object, expected: object) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert (found.shape, found.dtype, found.stride()) == (
            expected.shape,
            expected.dtype,
            expected.stride(),
        )
        assert bits(found.detach()) == bits(expected.detach())
    elif isinstance(expected, dict):
        assert type(found) is type(expected)
        assert list(found) == list(expected)
        for key, value in expected.items():
            _assert_same(found[key], value)
    elif type(expected) in {list, tuple}:
        assert type(found) is type(expected)
        for one, other in zip(found, expected, strict=True):  # type: ignore[call-overload]
            _assert_same(one, other)
    else:
        assert found == expected


class TestDamage:
    def test_a_flipped_byte_is_found_wherever_it_is(self, tmp_path: Path) -> None:
        """No flipped byte goes unnoticed, in the index or in data."""
        record = write_tree(tmp_path, {"a": any_bits(100_000), "b": [torch.arange(5)]})
        path = tmp_path / record.name
        data = path.read_bytes()
        for position in (*range(0, 1000, 50), *range(1000, len(data), 20_011), len(data) - 1):
            changed = data[position] ^ 0x10
            path.write_bytes(data[:position] + bytes([changed]) + data[position + 1 :])
            with (
                pytest.raises(CheckpointCorruptedError, match=r"shard\.pt is damaged: its bytes"),
                open_verified(tmp_path, record) as file,
            ):
                file.load_tree(file.tree)

    def test_a_damaged_index_is_found_on_opening(self, tmp_path: Path) -> None:
        """The pickle is verified before it is read."""
        record = write_tree(tmp_path, {"a": any_bits(100_000)})
        path = tmp_path / record.name
        path.write_bytes(path.read_bytes().replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"))
        with pytest.raises(CheckpointCorruptedError, match=r"shard\.pt is damaged"):
            open_verified(tmp_path, record)

    def test_cut_short(self, tmp_path: Path) -> None:
        """A file that lost its end is an error on opening, not a signal on reading."""
        record = write_tree(tmp_path, {"a": any_bits(100_000)})
        os.truncate(tmp_path / record.name, record.size_bytes // 2)
        with pytest.raises(CheckpointCorruptedError, match=r"shard\.pt is damaged: it has"):
            open_verified(tmp_path, record)

    def test_another_save(self, tmp_path: Path) -> None:
        """A file of another save is refused by name."""
        record = write_tree(tmp_path, {})
        with pytest.raises(CheckpointCorruptedError, match=r"shard\.pt.* save '5a7e', .* '0ther'"):
            open_verified(tmp_path, record, "0ther")

    def test_not_a_zip(self, tmp_path: Path) -> None:
        """Sound bytes that are no zip are the wrong format, not damage."""
        with pytest.raises(CheckpointFormatError, match=r"shard\.pt is not a file of torch\.save"):
            open_verified(tmp_path, write_bytes(tmp_path, b"hello" * 100))

    def test_zip_of_something_else(self, tmp_path: Path) -> None:
        """A zip that torch did not write is told apart."""
        data = tmp_path / "x.zip"
        subprocess.run(
            [sys.executable, "-m", "zipfile", "-c", data, __file__], check=True, cwd=tmp_path
        )
        with pytest.raises(CheckpointFormatError, match=r"shard\.pt is a zip, but not of torch"):
            open_verified(tmp_path, write_bytes(tmp_path, data.read_bytes()))

    def test_classes_that_are_not_plain_data(self, tmp_path: Path) -> None:
        """A class that ``weights_only`` refuses is named, unless it was allowed."""
        record = write_tree(tmp_path, {"x": Fraction(1, 3)})
        with pytest.raises(CheckpointFormatError, match=r"shard\.pt .*fractions\.Fraction"):
            open_verified(tmp_path, record)
        with (
            torch.serialization.safe_globals([Fraction]),
            open_verified(tmp_path, record) as file,
        ):
            assert file.tree == {"x": Fraction(1, 3)}

    def test_a_pickle_cannot_reach_beyond_its_storage(self, tmp_path: Path) -> None:
        """A tensor that claims more than its record holds is refused, not read from next door."""
        record = write_tree(tmp_path, {"a": torch.zeros(3), "secret": torch.zeros(1000)})
        data = (tmp_path / record.name).read_bytes()
        # The shape and stride of "a" are the first (3,) and (1,) in the pickle.
        changed = data.replace(b"K\x03\x85", b"K\x09\x85", 1)
        assert changed != data
        (tmp_path / NAME).unlink()
        (tmp_path / f"{NAME}.sums").unlink()
        with open_verified(tmp_path, write_bytes(tmp_path, changed)) as file:
            assert file.tree["a"].shape == (9,)
            with pytest.raises(CheckpointFormatError, match="does not fit into its record"):
                file.load_tree(file.tree["a"])
