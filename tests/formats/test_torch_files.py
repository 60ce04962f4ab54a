"""Files of torch.save: written and read piece by piece, with any strides and any bits."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves, tree_structure

from lightning_elastic_zero.core.manifest import FileEntry
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointMismatchError,
    SaveError,
    UnsupportedError,
)
from lightning_elastic_zero.formats import torch_write as writing
from lightning_elastic_zero.formats.torch_read import (
    PLAIN_DATA,
    StoredRun,
    TorchFile,
    foreign_files,
)
from lightning_elastic_zero.formats.torch_write import ChunkedSource, TorchFileWriter, piecewise
from lightning_elastic_zero.storage import file_read as range_file
from lightning_elastic_zero.storage.file_read import RangeFile
from lightning_elastic_zero.storage.file_write import CHUNK_BYTES, ChecksummedWriter
from tests.support.bits import (
    NAME,
    SAVE_ID,
    any_bits,
    bits,
    bitwise_repr,
    open_verified,
    write_tree,
)
from tests.support.processes import output_of
from tests.support.ranks import ROOT


class Pair(NamedTuple):
    tensors: tuple[torch.Tensor, torch.Tensor]
    text: str


def test_tensors_in_objects_of_any_class_have_their_values(tmp_path: Path) -> None:
    """As hyperparameters and states of callbacks contain them; one tensor stays one."""
    one, layer = torch.arange(4.0), torch.nn.Linear(2, 2)
    tree = {
        "layer": layer,
        "weight": layer.weight,
        "deque": deque([one]),
        "pair": Pair((one, torch.tensor(3)), "x"),
        "namespace": Namespace(inner={"one": one}),
        "sets": {frozenset([torch.tensor(5)])},
    }
    torch.save(tree, tmp_path / "a.pt")
    with contextlib.closing(TorchFile(RangeFile(tmp_path / "a.pt"), "any class")) as file:
        found = file.load_tree(file.tree)
    assert bits(found["layer"].weight) == bits(layer.weight)
    assert found["layer"].weight is found["weight"]
    assert isinstance(found["weight"], torch.nn.Parameter)
    assert found["deque"][0] is found["pair"].tensors[0] is found["namespace"].inner["one"]
    assert bits(found["deque"][0]) == bits(one)
    assert found["pair"].tensors[1].item() == 3
    assert [[each.item() for each in inner] for inner in found["sets"]] == [[5]]


def test_tensors_in_sets_have_their_values(tmp_path: Path) -> None:
    torch.save({"a": {torch.tensor(5)}}, tmp_path / "a.pt")
    with contextlib.closing(TorchFile(RangeFile(tmp_path / "a.pt"), "stand-ins")) as file:
        assert [each.item() for each in file.load_tree(file.tree)["a"]] == [5]


def open_unverified(path: Path) -> TorchFile:
    return TorchFile(RangeFile(path), PLAIN_DATA)


def write_bytes(directory: Path, data: bytes) -> FileEntry:
    with ChecksummedWriter(directory, NAME) as file:
        file.write(data)
        return file.finish(SAVE_ID)


def open_pieces(folder: Path, *tensors: torch.Tensor) -> contextlib.closing[TorchFile]:
    """Open a file of a list of tensors, each written piece by piece."""
    builder = TorchFileWriter()
    tree = [builder.add(piecewise([one], one.dtype)) for one in tensors]
    return open_verified(folder, write_tree(folder, tree, builder))


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[int, int, int]]:
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
    def test_any_pieces_are_read_bit_for_bit(
        self, wanted: list[tuple[int, int, int]], stored: torch.dtype, read_chunks: int
    ) -> None:
        live = [any_bits(60_000, stored, seed) for seed in range(3)]
        size = sum(stop - start for _, start, stop in wanted)
        target = torch.zeros(size + 2, dtype=stored)
        expected, at, pieces = [bits(target[:1])], 1, []
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(range_file, "READ_BYTES", read_chunks * CHUNK_BYTES)
            with open_pieces(Path(folder), *live) as file:
                for which, start, stop in wanted:
                    slot = target[at : at + stop - start]
                    pieces.append((slot, StoredRun(file.tree[which], start, stop)))
                    expected.append(bits(live[which][start:stop]))
                    at += stop - start
                file.read_into(pieces)
        assert bits(target) == b"".join([*expected, bits(target[-1:])])
        assert not bits(target[-1:]).strip(b"\0")

    def test_only_the_edges_of_a_long_run_are_copied(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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

        with open_pieces(tmp_path, live) as file:
            monkeypatch.setattr(RangeFile, "read_runs", watched)
            file.read_into([(target, StoredRun(file.tree[0], start, stop))])
        assert bits(target) == bits(live[start:stop])
        copied = [size_bytes for address, size_bytes in given if address not in memory]
        assert len(copied) == 2
        assert sum(copied) < 2 * CHUNK_BYTES < target.nbytes

    def test_a_target_of_another_type_is_cast_as_by_tensor_to(self, tmp_path: Path) -> None:
        live = torch.randn(100_000)
        with open_verified(tmp_path, write_tree(tmp_path, {"a": live})) as file:
            for dtype in (torch.bfloat16, torch.float64):
                target = torch.zeros(100_000, dtype=dtype)
                file.read_into([(target, StoredRun(file.tree["a"], 0, 100_000))])
                assert torch.equal(target, live.to(dtype))

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
        self, stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
    ) -> None:
        """Quantized weights would be silently wrong if cast without their scales."""
        tree = {"a": torch.ones(8).to(stored)}
        torch.save(tree, tmp_path / "a.pt")
        file, target = open_unverified(tmp_path / "a.pt"), torch.zeros(8, dtype=wanted)
        message = f"elements of {stored}, expected {wanted}"
        with pytest.raises(CheckpointMismatchError, match=message):
            file.read_into([(target, StoredRun(file.tree["a"], 0, 8))])
        assert not target.any()
        same = torch.zeros(8, dtype=stored)
        file.read_into([(same, StoredRun(file.tree["a"], 0, 8))])
        assert torch.equal(same, torch.ones(8).to(stored))
        file.close()

    def test_a_run_costs_its_own_chunks_and_the_index(self, tmp_path: Path) -> None:
        live, reported = any_bits(1 << 22), list[int]()
        with open_pieces(tmp_path, live) as file:
            opening = file.bytes_read
            assert opening < 3 * CHUNK_BYTES
            target = torch.zeros(1 << 20)
            run = StoredRun(file.tree[0], 99, 99 + (1 << 20))
            read_bytes = file.read_into([(target, run)], Progress(show=reported.append))
            assert read_bytes == file.bytes_read - opening <= (4 << 20) + CHUNK_BYTES
        assert bits(target) == bits(live[99 : 99 + (1 << 20)])
        assert sum(reported) == 4 << 20

    def test_meta_tensors_and_their_views_are_read_and_foreign_ones_refused(
        self, tmp_path: Path
    ) -> None:
        live = any_bits(10_000, torch.bfloat16)
        record = write_tree(tmp_path, {"a": live})
        with open_verified(tmp_path, record, SAVE_ID) as file:
            a = file.tree["a"]
            assert (a.shape, a.dtype, a.device.type) == ((10_000,), torch.bfloat16, "meta")
            found = torch.empty(40, dtype=torch.bfloat16)
            file.read_into([(found, StoredRun(a[50:100], 0, 40))])
            assert bits(found) == bits(live[50:90])
            with pytest.raises(CheckpointFormatError, match="lacks the requested tensor"):
                file.read_into([(torch.empty(3), StoredRun(torch.zeros(3), 0, 3))])

    def test_loads_a_tree_as_torch_does(self, tmp_path: Path) -> None:
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
        assert tree_structure(found) == tree_structure(expected)
        for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            assert not isinstance(other, torch.Tensor) or one.stride() == other.stride()
        assert bitwise_repr(found) == bitwise_repr(expected)
        (first, inner), leaf = found["parameter"], found["leaf"]
        assert inner["again"] is first
        (first.sum() + leaf.sum()).backward()
        torch.optim.SGD([first, leaf], 1.0).step()
        assert bits(first.detach()) == bits(learned.detach() - 1)

    def test_runs_outside_tensor_or_target_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "a.pt"
        torch.save(torch.zeros(10), path)
        with contextlib.closing(open_unverified(path)) as file:
            for start, stop in ((-1, 3), (4, 3), (0, 11), (10, 11)):
                with pytest.raises(ValueError, match="is not within"):
                    file.read_into([(torch.ones(5), StoredRun(file.tree, start, stop))])
            for shape in ((5, 5), (0,), (2,), (1, 1), ()):
                with pytest.raises(ValueError, match="is not filled by 1 elements"):
                    file.read_into([(torch.ones(shape), StoredRun(file.tree, 0, 1))])

    def test_a_shard_of_2160_views_opens_within_a_second(self, tmp_path: Path) -> None:
        builder = TorchFileWriter()
        flats = [builder.add(piecewise([720_000], torch.float32)) for _ in range(3)]
        tree = {f"layer.{i}.weight": [f[i * 1000 :][:1000] for f in flats] for i in range(720)}
        record = write_tree(tmp_path, tree, builder)
        times_s = []
        for _ in range(3):
            start_s = time.process_time()
            with open_verified(tmp_path, record):
                times_s.append(time.process_time() - start_s)
        assert min(times_s) < 1


class TestDamage:
    def test_any_flipped_byte_is_found(self, tmp_path: Path) -> None:
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

    def test_damage_and_files_of_another_save_are_found_on_opening(self, tmp_path: Path) -> None:
        record = write_tree(tmp_path, {"a": any_bits(100_000)})
        path = tmp_path / record.name
        with pytest.raises(CheckpointCorruptedError, match=r"shard\.pt.* save '5a7e', .* '0ther'"):
            open_verified(tmp_path, record, "0ther")
        path.write_bytes(path.read_bytes().replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"))
        with pytest.raises(CheckpointCorruptedError, match=r"shard\.pt is damaged"):
            open_verified(tmp_path, record)
        os.truncate(path, record.size_bytes // 2)
        with pytest.raises(CheckpointCorruptedError, match=r"shard\.pt is damaged: it has"):
            open_verified(tmp_path, record)

    def test_a_file_of_torch_before_1_6_is_refused_with_the_remedy(self, tmp_path: Path) -> None:
        path = tmp_path / "a.pt"
        torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
        with contextlib.closing(foreign_files(tmp_path)) as files:
            with pytest.raises(UnsupportedError, match=r"before 1\.6.*torch\.save\(torch\.load"):
                files.get(path.name)
            torch.save(torch.load(path), path)
            assert files.load(path.name, files.tree(path.name)["a"]).tolist() == [1, 1, 1]

    def test_an_error_of_the_disk_is_raised_with_one_remedy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "a.pt"
        torch.save({"a": torch.zeros(9)}, path)

        errors, preadv = [OSError(errno.EIO, os.strerror(errno.EIO))], os.preadv

        def fail_once(
            descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0
        ) -> int:
            if flags == os.RWF_NOWAIT:
                raise BlockingIOError
            if errors:
                raise errors.pop()
            return preadv(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", fail_once)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
            open_unverified(path)
        assert caught.value.filename == str(path)
        assert str(caught.value).count("another attempt fails") == 1

    def test_an_error_that_the_caller_handles_is_not_raised(self, tmp_path: Path) -> None:
        path = write_bytes(tmp_path, b"PK" + bytes(100))
        try:
            (tmp_path / "missing").stat()
        except FileNotFoundError:
            with pytest.raises(CheckpointFormatError, match="is damaged, truncated or not a file"):
                open_verified(tmp_path, path)

    def test_valid_bytes_that_are_not_a_zip_are_the_wrong_format(self, tmp_path: Path) -> None:
        with pytest.raises(
            CheckpointFormatError,
            match=r"shard\.pt is damaged, truncated or not a file of torch\.save",
        ):
            open_verified(tmp_path, write_bytes(tmp_path, b"hello" * 100))

    def test_a_zip_that_torch_did_not_write_is_refused(self, tmp_path: Path) -> None:
        data = tmp_path / "x.zip"
        subprocess.run(
            [sys.executable, "-m", "zipfile", "-c", data, __file__], check=True, cwd=tmp_path
        )
        with pytest.raises(CheckpointFormatError, match=r"shard\.pt is a zip, but not of torch"):
            open_verified(tmp_path, write_bytes(tmp_path, data.read_bytes()))

    def test_a_class_that_is_not_plain_data_is_named_unless_allowed(self, tmp_path: Path) -> None:
        record = write_tree(tmp_path, {"x": Fraction(1, 3)})
        with pytest.raises(CheckpointFormatError, match=r"shard\.pt .*fractions\.Fraction"):
            open_verified(tmp_path, record)
        allowed = torch.serialization.safe_globals([Fraction])
        with allowed, open_verified(tmp_path, record) as file:
            assert file.tree == {"x": Fraction(1, 3)}

    @pytest.mark.parametrize("what", ["repeated", "itself", "deep", "expanded"])
    def test_a_small_file_of_a_huge_tree_is_refused(self, what: str, tmp_path: Path) -> None:
        repeated: Any = (1,)
        for _ in range(30):
            repeated = (repeated, repeated)
        itself: list[Any] = []
        itself.append(itself)
        deep: list[Any] = []
        for _ in range(250):
            deep = [deep]
        trees = {
            "repeated": (repeated, "repeat objects to"),
            "itself": (itself, "contains itself, or has more than 200 levels"),
            "deep": (deep, "contains itself, or has more than 200 levels"),
            "expanded": (torch.zeros(1).expand(10**12), "its tensors have 4000000000000 bytes"),
        }
        tree, message = trees[what]
        path = tmp_path / "small.pt"
        torch.save({"tree": tree}, path)
        assert path.stat().st_size < 5000
        with pytest.raises(CheckpointFormatError, match=message):
            open_unverified(path)

    def test_shared_and_expanded_values_of_ordinary_size_are_read(self, tmp_path: Path) -> None:
        shared = list(range(1000))
        tree = {"lists": [shared] * 500, "expanded": torch.zeros(1).expand(1000, 1000)}
        torch.save(tree, tmp_path / "small.pt")
        read = open_unverified(tmp_path / "small.pt")
        loaded = read.load_tree(read.tree)
        assert loaded["lists"] == tree["lists"]
        assert loaded["expanded"].shape == (1000, 1000)

    def test_a_tensor_larger_than_its_record_is_refused(self, tmp_path: Path) -> None:
        record = write_tree(tmp_path, {"a": torch.zeros(3), "secret": torch.zeros(1000)})
        data = (tmp_path / record.name).read_bytes()
        # The shape and stride of "a" are the first (3,) and (1,) in the pickle.
        changed = data.replace(b"K\x03\x85", b"K\x09\x85", 1)
        assert changed != data
        (tmp_path / NAME).unlink()
        (tmp_path / f"{NAME}.sums").unlink()
        with open_verified(tmp_path, write_bytes(tmp_path, changed)) as file:
            assert file.tree["a"].shape == (9,)
            with pytest.raises(CheckpointFormatError, match="exceeds its record"):
                file.load_tree(file.tree["a"])


DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int8, torch.uint8, torch.float8_e4m3fn),
)


class TestWriting:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_torch_load_reads_every_bit(
        self, tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        live, plain = any_bits(5000, dtype), any_bits(300, dtype, seed=1)
        builder = TorchFileWriter()
        pieces: list[torch.Tensor | int] = [live[:7], 5, live[7:4000], 0, live[4000:]]
        monkeypatch.setattr(writing, "COPY_BYTES", 64 * dtype.itemsize)
        flat = builder.add(piecewise(pieces, dtype))
        empty = builder.add(piecewise([], dtype))
        tree = {"a": flat[:10].view(2, 5), "rest": [flat[10:]], "plain": plain, "empty": empty}
        record = write_tree(tmp_path, tree, builder)
        for mmap in (False, True):
            found = torch.load(tmp_path / record.name, weights_only=True, mmap=mmap)
            joined = bits(found["a"]) + bits(found["rest"][0])
            zeros = bytes(5 * dtype.itemsize)
            assert joined == bits(live[:7]) + zeros + bits(live[7:])
            assert bits(found["plain"]) == bits(plain)
            assert found["a"].shape == (2, 5)
            assert found["empty"].shape == (0,)
            assert found["empty"].dtype == dtype

    def test_views_of_one_stand_in_share_one_storage(self, tmp_path: Path) -> None:
        live, builder = any_bits(100_000), TorchFileWriter()
        flat = builder.add(piecewise([live], live.dtype))
        tree = {f"p{i}": flat[i * 100 : i * 100 + 100] for i in range(1000)}
        record = write_tree(tmp_path, tree, builder)
        assert 400_000 < record.size_bytes < 550_000
        found = torch.load(tmp_path / record.name, weights_only=True)
        assert all(bits(found[f"p{i}"]) == bits(live[i * 100 : i * 100 + 100]) for i in range(1000))

    def test_many_stand_ins_share_few_mappings(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A process may have 65,530 of them. Each stand-in still has a storage of its own."""
        monkeypatch.setattr(writing, "_REGION_BYTES", 100_000)
        maps, builder = Path("/proc/self/maps"), TorchFileWriter()
        lives = [any_bits(numel, dtype) for numel in (1, 130, 30_000) for dtype in DTYPES]
        before = len(maps.read_text().splitlines())
        tree = [builder.add(piecewise([live], live.dtype)) for live in lives * 10]
        assert len(maps.read_text().splitlines()) - before < len(tree) / 2
        assert all(flat.data_ptr() % 64 == 0 for flat in tree)
        assert all(flat.untyped_storage().nbytes() == flat.nbytes for flat in tree)
        record = write_tree(tmp_path, tree, builder)
        found = torch.load(tmp_path / record.name, weights_only=True)
        assert [*map(bits, found)] == [*map(bits, lives * 10)]

    def test_a_source_ends_after_its_last_byte_is_written_and_every_byte_counts(
        self, tmp_path: Path
    ) -> None:
        events: list[str] = []
        builder = TorchFileWriter()

        def fetch(name: str, numel: int) -> Iterator[torch.Tensor]:
            yield torch.zeros(numel)
            events.append(name)

        tree = []
        for name, numel in (("a", 5 << 20), ("b", 5 << 20)):
            source = ChunkedSource(numel, torch.float32, partial(fetch, name, numel))
            tree.append(builder.add(piecewise([source], torch.float32)))
        assert not events
        written = [0]

        def note(size_bytes: int) -> None:
            written[0] += size_bytes
            if written[0] > 21 << 20:
                events.append("written")

        record = builder.write(tree, tmp_path, NAME, save_id=SAVE_ID, progress=Progress(show=note))
        assert written == [record.size_bytes] == [(tmp_path / NAME).stat().st_size]
        assert events.index("a") < events.index("written") < events.index("b")

    def test_the_crc32_of_each_record_is_that_of_its_source(self, tmp_path: Path) -> None:
        live, builder = any_bits(100_000), TorchFileWriter()
        marks = bytearray(b"PK\x07\x08" + bytes(4) + b"PK\x01\x02")
        mark = torch.frombuffer(marks, dtype=torch.uint8)
        tree = {
            "a": builder.add(piecewise([live[:70_000], 5, live[70_000:]], live.dtype)),
            "marks": [mark, mark.clone()],
            "empty": torch.empty(0),
        }
        builder.write(tree, tmp_path, NAME, save_id=SAVE_ID, crc32=True)
        with zipfile.ZipFile(tmp_path / NAME) as archive:
            assert archive.testzip() is None
            records = archive.infolist()
        assert all(record.CRC for record in records if record.file_size)
        data = (tmp_path / NAME).read_bytes()
        for record in records:
            sizes = struct.pack("<II", record.file_size, record.file_size)
            assert not record.CRC or b"PK\x07\x08" + struct.pack("<I", record.CRC) + sizes in data
        found = torch.load(tmp_path / NAME, weights_only=True)
        assert bits(found["a"]) == bits(live[:70_000]) + bytes(20) + bits(live[70_000:])
        assert bits(found["marks"][1]) == bits(mark)

    def test_pieces_are_cast_to_the_type_of_the_source(self, tmp_path: Path) -> None:
        live, builder = torch.randn(1000), TorchFileWriter()
        source = piecewise([live.double(), 2], torch.bfloat16)
        record = write_tree(tmp_path, {"a": builder.add(source)}, builder)
        found = torch.load(tmp_path / record.name, weights_only=True)["a"]
        assert torch.equal(found, torch.cat([live.bfloat16(), torch.zeros(2).bfloat16()]))

    def test_the_checksum_option_of_torch_is_restored(self, tmp_path: Path) -> None:
        torch.serialization.set_crc32_options(compute_crc32=True)
        write_tree(tmp_path, {})
        assert torch.serialization.get_crc32_options()
        with pytest.raises(SaveError):
            write_tree(tmp_path, {})
        with pytest.raises(AttributeError, match="local object"):
            TorchFileWriter().write(lambda: None, tmp_path, "other.pt", save_id=SAVE_ID)
        assert torch.serialization.get_crc32_options()

    def test_the_error_of_a_source_is_raised_and_no_sidecar_is_left(self, tmp_path: Path) -> None:
        def fail() -> Iterator[torch.Tensor]:
            yield torch.zeros(10)
            msg = "the device is gone"
            raise ConnectionError(msg)

        builder = TorchFileWriter()
        flat = builder.add(ChunkedSource(20, torch.float32, fail))
        with pytest.raises(ConnectionError, match="the device is gone"):
            write_tree(tmp_path, {"a": flat, "b": torch.zeros(1000)}, builder)
        assert not list(tmp_path.rglob("*.sums"))

    @pytest.mark.parametrize(
        ("chunks", "reason"),
        [
            ([torch.zeros(9)], "4 bytes too few"),
            ([torch.zeros(11)], "more elements than it declares"),
            ([torch.zeros(2, 5)], r"gave torch\.float32 of shape \(2, 5\)"),
        ],
    )
    def test_a_source_with_wrong_elements_is_refused(
        self, tmp_path: Path, chunks: list[torch.Tensor], reason: str
    ) -> None:
        builder = TorchFileWriter()
        flat = builder.add(ChunkedSource(10, torch.float32, lambda: iter(chunks)))
        with pytest.raises(ValueError, match=reason):
            write_tree(tmp_path, {"a": flat}, builder)

    def test_misplaced_sources_and_pieces_without_one_run_are_refused(self, tmp_path: Path) -> None:
        builder = TorchFileWriter()
        builder.add(piecewise([10], torch.float32))
        with pytest.raises(ValueError, match="has no place in the tree"):
            write_tree(tmp_path, {}, builder)
        for pieces in ([torch.zeros(4, 4).t()], [-1]):
            with pytest.raises(ValueError, match="A piece is"):
                piecewise(pieces, torch.float32)


MEMORY = """
import sys, tempfile, torch
from contextlib import closing
from pathlib import Path
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.formats.torch_write import TorchFileWriter, piecewise
from lightning_elastic_zero.formats.torch_read import StoredRun, TorchFile
from lightning_elastic_zero.storage.file_read import VerifiedFile

# With deterministic algorithms, torch.empty fills its memory.
torch.use_deterministic_algorithms(True)
peak = 0

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

def watch(size_bytes):
    global peak
    peak = max(peak, anonymous_bytes())

part = torch.randn(4 << 20)
with tempfile.TemporaryDirectory() as folder:
    torch.save({"warm": part[:9].clone()}, Path(folder) / "warm.pt")
    base = anonymous_bytes()
    builder = TorchFileWriter()
    flat = builder.add(piecewise([part.bfloat16(), 1 << 20] + [part] * 32, torch.float32))
    tree = {"a": flat[: part.numel()], "b": flat[part.numel() :]}
    record = builder.write(tree, Path(folder), "a.pt", save_id="x", progress=Progress(show=watch))
    assert record.size_bytes > 512 << 20
    writing, peak = peak - base, 0
    with closing(TorchFile(VerifiedFile(Path(folder), record))) as file:
        pieces = [
            (part, StoredRun(file.tree["b"], start, start + part.numel()))
            for start in range(1 << 20, file.tree["b"].numel(), part.numel())
        ]
        file.read_into(pieces, Progress(show=watch))
    reading = peak - base
print(writing >> 20, reading >> 20)
"""


@pytest.mark.long
def test_reading_and_writing_half_a_gib_takes_48_mib(tmp_path: Path) -> None:
    printed = output_of(
        (sys.executable, "-c", MEMORY), ROOT, {**os.environ, "TMPDIR": str(tmp_path)}
    )
    writing_mib, reading_mib = map(int, printed.split())
    assert writing_mib < 48
    assert reading_mib < 48


@pytest.mark.gpu
def test_pieces_are_written_from_and_read_to_a_device(tmp_path: Path) -> None:
    live, builder = any_bits(10_000_000).cuda(), TorchFileWriter()
    source = piecewise([live[:99], 5, live[99:]], live.dtype)
    with open_verified(tmp_path, write_tree(tmp_path, {"a": builder.add(source)}, builder)) as file:
        target = torch.zeros(9_999_901, device="cuda")
        file.read_into([(target, StoredRun(file.tree["a"], 104, 10_000_005))])
    assert bits(target.cpu()) == bits(live[99:].cpu())


def test_a_file_is_read_in_logical_order(tmp_path: Path) -> None:
    conv = torch.randn(64, 70, 31, 31).to(memory_format=torch.channels_last)
    matrix = torch.randn(40, 30).t()
    gaps = torch.randn(4, 6)[:, ::2]
    torch.save({"conv": conv, "matrix": matrix, "gaps": gaps}, tmp_path / "file.pt")
    file = TorchFile(RangeFile(tmp_path / "file.pt"))
    for name, live, start, stop in (
        ("conv", conv, 0, conv.numel()),
        ("conv", conv, 70 * 31 * 31 - 5, 3 * 70 * 31 * 31 + 7),
        ("matrix", matrix, 17, 1111),
        ("gaps", gaps, 1, 12),
    ):
        found = torch.empty(stop - start)
        file.read_into([(found, StoredRun(file.tree[name], start, stop))])
        assert torch.equal(found, live.reshape(-1)[start:stop])
    file.close()
