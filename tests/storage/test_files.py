from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lightning_elastic_zero.core.manifest import MANIFEST_NAME, FileEntry
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.save_files import SEEN_PREFIX
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointNotFoundError,
    SaveError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.storage import file_read as range_file
from lightning_elastic_zero.storage.disk_checkpoints import repair_target
from lightning_elastic_zero.storage.file_read import READ_BYTES, READERS, VerifiedFile
from lightning_elastic_zero.storage.file_write import (
    CHUNK_BYTES,
    ChecksummedWriter,
    replace_durably,
    write_durably,
)
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import (
    StorePath,
    check_local_path,
    parse_path,
    real_path,
)
from tests.support.processes import PROMPT_TIMEOUT_S

SAVE_ID = "5a7e"
TOKEN = f"{SEEN_PREFIX}{SAVE_ID}"
TAIL_BYTES = 777


def some_bytes(size_bytes: int, seed: int = 0) -> bytes:
    """Make bytes in which no two chunks are equal."""
    parts = range(-(-size_bytes // 16))
    return b"".join(xxhash.xxh3_128_digest(b"%d" % part, seed) for part in parts)[:size_bytes]


def write_file(directory: Path, data: bytes, name: str = "checkpoint/shard.pt") -> FileEntry:
    with ChecksummedWriter(directory, name) as file:
        file.write(data)
        return file.finish(SAVE_ID)


@contextmanager
def limited_file_size(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestChecksummedWriter:
    @given(
        sizes=st.lists(st.integers(0, 3 * CHUNK_BYTES), max_size=8),
        kind=st.sampled_from([bytes, bytearray, memoryview]),
    )
    def test_checksums_do_not_depend_on_the_writes(
        self, sizes: list[int], kind: Callable[[bytes], bytes | bytearray | memoryview]
    ) -> None:
        data = some_bytes(sum(sizes))
        with tempfile.TemporaryDirectory() as folder:
            with ChecksummedWriter(Path(folder), "a.pt") as file:
                start = 0
                for size_bytes in sizes:
                    assert file.write(kind(data[start : start + size_bytes])) == size_bytes
                    start += size_bytes
                record = file.finish(SAVE_ID)
            assert (Path(folder) / "a.pt").read_bytes() == data
            sidecar = (Path(folder) / "a.pt.sums").read_bytes()
        assert record == FileEntry("a.pt", len(data), xxhash.xxh3_128_hexdigest(sidecar))
        assert json.loads(sidecar) == {
            "algorithm": "xxh3_64",
            "chunk_bytes": CHUNK_BYTES,
            "size_bytes": len(data),
            "save_id": SAVE_ID,
            "sums": b"".join(
                xxhash.xxh3_64_digest(data[low : low + CHUNK_BYTES])
                for low in range(0, len(data), CHUNK_BYTES)
            ).hex(),
        }

    def test_progress_is_reported_at_least_every_16_mib(self, tmp_path: Path) -> None:
        reported: list[int] = []
        with ChecksummedWriter(tmp_path, "a.pt", Progress(show=reported.append)) as file:
            file.write(bytes(40 << 20))
        assert sum(reported) == 40 << 20
        assert max(reported) <= 16 << 20

    def test_a_file_is_never_overwritten(self, tmp_path: Path) -> None:
        write_file(tmp_path, b"one")
        with pytest.raises(SaveError, match=r"shard\.pt: File exists"):
            write_file(tmp_path, b"two")

    def test_a_full_disk_error_names_file_and_remedy(self, tmp_path: Path) -> None:
        with (
            limited_file_size(1 << 20),
            pytest.raises(SaveError, match=r"shard\.pt: .*Check free space"),
        ):
            write_file(tmp_path, bytes(2 << 20))
        assert not list(tmp_path.rglob("*.sums"))


@st.composite
def files_with_runs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Draw the size of a file and sorted runs: adjacent, empty, and at the borders of chunks."""
    chunks, tail = draw(st.integers(0, 12)), draw(st.sampled_from([0, 1, TAIL_BYTES]))
    size_bytes = chunks * CHUNK_BYTES + tail
    points = sorted(draw(st.lists(st.integers(0, size_bytes), max_size=24)))
    return size_bytes, list(zip(points[::2], points[1::2], strict=False))


class TestReplaceDurably:
    def test_only_the_named_file_changes(self, tmp_path: Path) -> None:
        (tmp_path / "latest").write_text("global_step5")
        (tmp_path / "other").write_text("mine")
        replace_durably(tmp_path / "latest", b"global_step10/checkpoint")
        assert (tmp_path / "latest").read_text() == "global_step10/checkpoint"
        assert (tmp_path / "other").read_text() == "mine"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "other"]

    def test_a_directory_is_not_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "latest").mkdir()
        (tmp_path / "latest" / "mine").touch()
        with pytest.raises(SaveError):
            replace_durably(tmp_path / "latest", b"new")
        assert [path.name for path in tmp_path.rglob("*")] == ["latest", "mine"]


class TestReadRuns:
    @given(case=files_with_runs(), read_chunks=st.integers(1, 4), data=st.data())
    def test_runs_are_read_exactly_and_each_chunk_once(
        self, case: tuple[int, list[tuple[int, int]]], read_chunks: int, data: st.DataObject
    ) -> None:
        """Whole chunks are read directly into their places, if given; only the edges are copied."""
        size_bytes, runs = case
        places = []
        for start, stop in runs:
            low = data.draw(st.integers(start, stop))
            places.append((low, bytearray(data.draw(st.integers(low, stop)) - low)))
        views = [(at, memoryview(memory)) for at, memory in places]
        content = some_bytes(size_bytes)
        chunks = (range(a // CHUNK_BYTES, -(-b // CHUNK_BYTES)) for a, b in runs if a < b)
        touched = {chunk for of_run in chunks for chunk in of_run}
        expected = sum(min(CHUNK_BYTES, size_bytes - chunk * CHUNK_BYTES) for chunk in touched)
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(range_file, "READ_BYTES", read_chunks * CHUNK_BYTES)
            record = write_file(Path(folder), content)
            with VerifiedFile(Path(folder), record, SAVE_ID) as file:
                for given_places in ((), views):
                    before = file.bytes_read
                    pieces = [(at, bytes(view)) for at, view in file.read_runs(runs, given_places)]
                    assert file.bytes_read - before == expected
                    wanted = b"".join(content[a:b] for a, b in runs)
                    assert b"".join(piece for _, piece in pieces) == wanted
                    assert all(content[at : at + len(piece)] == piece for at, piece in pieces)
        for at, memory in places:
            first = -(-at // CHUNK_BYTES) * CHUNK_BYTES
            last = max((at + len(memory)) // CHUNK_BYTES * CHUNK_BYTES, first)
            inner = slice(first - at, last - at) if first < last else slice(0, 0)
            outside = memory[: inner.start] + memory[inner.stop :]
            assert memory[inner] == content[at:][inner]
            assert not any(outside)

    @pytest.mark.parametrize("lost_bytes", [1, CHUNK_BYTES])
    def test_a_zeroed_chunk_is_refused_also_in_its_place(
        self, lost_bytes: int, tmp_path: Path
    ) -> None:
        content = some_bytes(3 * CHUNK_BYTES)
        record = write_file(tmp_path, content)
        with (tmp_path / record.name).open("r+b") as damaged:
            damaged.seek(CHUNK_BYTES)
            damaged.write(bytes(lost_bytes))
        place = memoryview(bytearray(len(content)))
        message = rf"shard\.pt.*bytes \[{CHUNK_BYTES}, {2 * CHUNK_BYTES}\) do not match"
        for places in ((), [(0, place)]):
            refused = pytest.raises(CheckpointCorruptedError, match=message)
            with VerifiedFile(tmp_path, record, SAVE_ID) as file, refused:
                next(file.read_runs([(0, len(content))], places))

    def test_pieces_are_bounded_and_aligned(self, tmp_path: Path) -> None:
        size_bytes = 2 * READ_BYTES + CHUNK_BYTES
        with VerifiedFile(tmp_path, write_file(tmp_path, bytes(size_bytes))) as file:
            pieces = [(start, view.nbytes) for start, view in file.read_runs([(8, size_bytes)])]
        whole, last = (READ_BYTES, READ_BYTES), (2 * READ_BYTES, CHUNK_BYTES)
        assert pieces == [(8, READ_BYTES - 8), whole, last]

    @pytest.mark.parametrize("cache", ["complete", "partial", "empty", "unknown"])
    def test_reads_that_wait_for_a_disk_are_under_way_together(
        self, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data, real = some_bytes(2 * READ_BYTES), os.preadv
        together = threading.Barrier(READERS)
        waited = []

        def preadv(file: int, memory: list[memoryview], start: int, flags: int = 0) -> int:
            if flags == os.RWF_NOWAIT and cache == "empty":
                raise BlockingIOError
            if flags == os.RWF_NOWAIT and cache == "unknown":
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            if flags == os.RWF_NOWAIT and cache == "partial":
                return real(file, [memory[0][:CHUNK_BYTES]], start)
            if not flags:
                together.wait(PROMPT_TIMEOUT_S)
                waited.append(start)
            return real(file, memory, start)

        with VerifiedFile(tmp_path, write_file(tmp_path, data)) as file:
            monkeypatch.setattr(os, "preadv", preadv)
            pieces = [bytes(view) for _, view in file.read_runs([(0, len(data))])]
        assert b"".join(pieces) == data
        every = list(range(0, len(data), READ_BYTES // READERS))
        if cache == "partial":  # Bytes that were read from the cache are not read again.
            every[0], every[READERS] = CHUNK_BYTES, READ_BYTES + CHUNK_BYTES
        assert sorted(waited) == ([] if cache == "complete" else every)

    def test_a_refused_read_is_over_in_all_threads(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The caller may then restore the memory into which they read."""
        data, real = some_bytes(READ_BYTES), os.preadv
        record = write_file(tmp_path, data)
        with (tmp_path / record.name).open("r+b") as damaged:
            damaged.write(b"damage")
        others, under_way = threading.Event(), list[int]()

        def preadv(file: int, memory: list[memoryview], start: int, flags: int = 0) -> int:
            if flags == os.RWF_NOWAIT:
                raise BlockingIOError
            under_way.append(start)
            if start:
                others.wait(PROMPT_TIMEOUT_S)
            else:  # The damaged bytes; long before the others.
                threading.Timer(0.3, others.set).start()
            found = real(file, memory, start)
            under_way.remove(start)
            return found

        refused = pytest.raises(CheckpointCorruptedError, match="do not match")
        with VerifiedFile(tmp_path, record, SAVE_ID) as file:
            monkeypatch.setattr(os, "preadv", preadv)
            with refused:
                next(file.read_runs([(0, len(data))]))
            assert not under_way

    def test_two_iterations_of_one_file_are_independent(self, tmp_path: Path) -> None:
        data = some_bytes(4 * CHUNK_BYTES)
        with VerifiedFile(tmp_path, write_file(tmp_path, data)) as file:
            file.read(0, 1)  # Later reads reuse this buffer.
            first = file.read_runs([(0, 10), (3 * CHUNK_BYTES, 3 * CHUNK_BYTES + 10)])
            _, view = next(first)
            assert file.read(CHUNK_BYTES, CHUNK_BYTES + 10) == data[CHUNK_BYTES : CHUNK_BYTES + 10]
            assert view == data[:10]
            assert next(first)[1] == data[3 * CHUNK_BYTES : 3 * CHUNK_BYTES + 10]

    @pytest.mark.parametrize("runs", [[(5, 9), (0, 3)], [(0, 5), (4, 9)], [(-1, 3)], [(0, 101)]])
    def test_unsorted_overlapping_or_outside_runs_are_refused(
        self, tmp_path: Path, runs: list[tuple[int, int]]
    ) -> None:
        refused = pytest.raises(ValueError, match="expected a sorted run")
        with VerifiedFile(tmp_path, write_file(tmp_path, bytes(100))) as file, refused:
            list(file.read_runs(runs))


SIZE_BYTES = 5 * CHUNK_BYTES + TAIL_BYTES


@pytest.fixture
def shard(tmp_path: Path) -> FileEntry:
    return write_file(tmp_path, some_bytes(SIZE_BYTES))


def change_sidecar(directory: Path, record: FileEntry, **fields: object) -> FileEntry:
    """Change fields of a sidecar; return a record that matches it."""
    path = directory / f"{record.name}.sums"
    data = json.dumps({**json.loads(path.read_bytes()), **fields}).encode()
    path.write_bytes(data)
    return FileEntry(record.name, record.size_bytes, xxhash.xxh3_128_hexdigest(data))


WRONG_SIZES = {
    size: f"it has {size} bytes, expected {SIZE_BYTES}"
    for size in (0, SIZE_BYTES - 1, SIZE_BYTES + 1)
}


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


class TestDamage:
    @given(position=st.integers(0, SIZE_BYTES - 1), bit=st.integers(0, 7))
    def test_a_flipped_bit_is_found_in_its_chunk_only(self, position: int, bit: int) -> None:
        data = some_bytes(SIZE_BYTES)
        low = position // CHUNK_BYTES * CHUNK_BYTES
        high = min(low + CHUNK_BYTES, SIZE_BYTES)
        with tempfile.TemporaryDirectory() as folder:
            record = write_file(Path(folder), data)
            path = Path(folder) / record.name
            flipped = bytes([data[position] ^ 1 << bit])
            path.write_bytes(data[:position] + flipped + data[position + 1 :])
            with VerifiedFile(Path(folder), record) as file:
                assert file.read(0, low) == data[:low]
                assert file.read(high, SIZE_BYTES) == data[high:]
                with pytest.raises(CheckpointCorruptedError) as caught:
                    file.read(low, high)
        assert f"{path} is damaged: its bytes [{low}, {high}) do not match" in str(caught.value)
        assert "Resume from another checkpoint" in str(caught.value)

    @pytest.mark.parametrize(
        ("suffix", "damage", "reason"),
        [
            *(
                ("", partial(os.truncate, length=size), reason)
                for size, reason in WRONG_SIZES.items()
            ),
            ("", Path.unlink, "it is missing"),
            (".sums", Path.unlink, "sums, are"),
            ("", put_pipe, "not a regular file"),
            (".sums", put_pipe, "not a regular file"),
        ],
        ids=["empty", "short", "long", "missing", "no sidecar", "pipe", "pipe as sidecar"],
    )
    def test_a_damaged_file_or_sidecar_is_refused_on_opening(
        self,
        suffix: str,
        damage: Callable[[Path], object],
        reason: str,
        tmp_path: Path,
        shard: FileEntry,
    ) -> None:
        damage(tmp_path / f"{shard.name}{suffix}")
        with pytest.raises(CheckpointCorruptedError, match=rf"shard\.pt is damaged: .*{reason}"):
            VerifiedFile(tmp_path, shard)

    @pytest.mark.parametrize(
        ("call", "name"),
        [("open", "shard.pt"), ("open", "shard.pt.sums"), ("preadv", "shard.pt")],
    )
    def test_an_error_of_the_disk_is_not_damage(
        self,
        call: str,
        name: str,
        tmp_path: Path,
        shard: FileEntry,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It may be temporary; damage would make a load fall back to an older checkpoint."""
        real = getattr(os, call)

        def failing(first: Any, *arguments: Any) -> Any:
            if call == "preadv" or str(first).endswith(name):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(first, *arguments)

        monkeypatch.setattr(os, call, failing)
        with pytest.raises(OSError, match=rf"Input/output error.*{name}") as caught:
            VerifiedFile(tmp_path, shard).read(0, SIZE_BYTES)
        assert caught.value.errno == errno.EIO

    def test_a_disk_error_at_the_manifest_is_not_damage(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / MANIFEST_NAME).write_text("{}")
        real = os.open

        def failing(path: Any, *arguments: Any) -> Any:
            if Path(path).name == MANIFEST_NAME:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return real(path, *arguments)

        monkeypatch.setattr(os, "open", failing)
        with pytest.raises(OSError, match=rf"Input/output error.*{MANIFEST_NAME}"):
            open_checkpoint(tmp_path)

    def test_a_file_truncated_while_open_is_an_error(
        self, tmp_path: Path, shard: FileEntry
    ) -> None:
        with VerifiedFile(tmp_path, shard) as file:
            os.truncate(tmp_path / shard.name, 100)
            with pytest.raises(CheckpointCorruptedError, match=r"shard\.pt.*ends at byte 100"):
                file.read(0, SIZE_BYTES)

    def test_the_checksums_of_another_file_are_refused(
        self, tmp_path: Path, shard: FileEntry
    ) -> None:
        other = write_file(tmp_path, some_bytes(SIZE_BYTES, seed=1), "checkpoint/other.pt")
        for suffix in ("", ".sums"):
            shutil.copy(tmp_path / f"{other.name}{suffix}", tmp_path / f"{shard.name}{suffix}")
        with pytest.raises(CheckpointCorruptedError, match=r"shard\.pt\.sums, have digest"):
            VerifiedFile(tmp_path, shard)

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"algorithm": "crc32"}, "algorithm 'crc32', expected 'xxh3_64'"),
            ({"chunk_bytes": 4096}, "chunk_bytes 4096, expected 65536"),
            ({"size_bytes": 1}, f"size_bytes 1, expected {SIZE_BYTES}"),
            ({"save_id": "0ther"}, "it belongs to save '0ther', expected '5a7e'"),
            ({"sums": "00" * 8}, "it has 1 checksums, expected 6"),
            ({"sums": "no hex"}, "its checksums are invalid"),
            ({"sums": None}, "its checksums are invalid"),
        ],
    )
    def test_each_field_of_a_sidecar_is_checked(
        self, tmp_path: Path, shard: FileEntry, fields: dict[str, object], reason: str
    ) -> None:
        record = change_sidecar(tmp_path, shard, **fields)
        with pytest.raises(CheckpointCorruptedError, match=rf"shard\.pt is damaged: .*{reason}"):
            VerifiedFile(tmp_path, record, SAVE_ID)


class TestPlaces:
    @pytest.mark.parametrize("url", ["s3://bucket/x.ckpt", "gs://b", "memory://m", "s3a+x.y://b"])
    def test_urls_are_refused_where_a_local_path_is_required(self, url: str) -> None:
        with pytest.raises(UnsupportedError, match=f"{url} .*Choose a path".replace("+", r"\+")):
            check_local_path(url)

    def test_urls_are_normalized(self) -> None:
        path = parse_path("S3://bucket//run/./step=1.ckpt/")
        assert path == StorePath("s3://bucket", "run/step=1.ckpt")
        assert str(path / "manifest.json") == "s3://bucket/run/step=1.ckpt/manifest.json"
        assert (path.name, path.stem, path.suffix) == ("step=1.ckpt", "step=1", ".ckpt")
        assert path.with_name("last.ckpt").parent == path.parent == StorePath("s3://bucket", "run")
        with pytest.raises(TypeError):
            os.fspath(path)  # type: ignore[call-overload]

    @pytest.mark.parametrize("url", ["http://host/x", "hdfs://a/b", "s3://", "s3://bucket/../x"])
    def test_other_schemes_are_refused(self, url: str) -> None:
        with pytest.raises(UnsupportedError, match=r"is not supported.*s3://, gs://, az://"):
            parse_path(url)

    @pytest.mark.parametrize(
        "path",
        [
            Path("s3://bucket/run"),
            os.path.realpath("file:///data/run"),
            "file:/data/run",
            "file://host/data",
        ],
    )
    def test_paths_made_of_urls_are_refused(self, path: str | Path) -> None:
        """Lightning creates such paths from a ``dirpath`` that begins with ``file://``."""
        with pytest.raises(UnsupportedError, match=r"was a URL before .*Pass a path instead"):
            parse_path(path)

    def test_local_paths_become_absolute(self, tmp_path: Path) -> None:
        link = tmp_path / "link"
        link.symlink_to(tmp_path)
        assert check_local_path(link / "a" / ".." / "b") == link / "b"
        assert check_local_path(f"file://{tmp_path}/a") == tmp_path / "a"
        assert check_local_path("a.ckpt") == Path.cwd() / "a.ckpt"

    def test_links_are_resolved_as_far_as_possible(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = Path(os.path.realpath(tmp_path))
        (folder / "deep" / "folder").mkdir(parents=True)
        (folder / "link").symlink_to(folder / "deep" / "folder")
        (folder / "circle").symlink_to("circle")
        monkeypatch.chdir(folder)
        assert real_path("link") == folder / "deep" / "folder"
        assert real_path(tmp_path / "link" / "a.ckpt") == folder / "deep" / "folder" / "a.ckpt"
        assert real_path(folder / "link" / ".." / "b") == folder / "deep" / "b"
        assert real_path(folder / "circle" / "a.ckpt") == folder / "circle" / "a.ckpt"
        assert folder_at(Path("link")).follow_links_if_exists().path == folder / "deep" / "folder"
        circular = folder_at(folder / "circle" / "a.ckpt")
        assert circular.follow_links_if_exists() == circular
        assert not repair_target(folder / "circle" / "a.ckpt")
        with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint|Too many"):
            open_checkpoint(circular.path)


class TestSharedDirectory:
    def test_a_token_that_appears_late_is_found(self, tmp_path: Path) -> None:
        timer = threading.Timer(0.3, write_durably, (tmp_path / TOKEN, b""))
        timer.start()
        folder_at(tmp_path).await_left(TOKEN)
        folder_at(tmp_path).remove_left(TOKEN)
        folder_at(tmp_path).remove_left(TOKEN)
        timer.join()
        assert not list(tmp_path.iterdir())

    def test_a_cached_lookup_is_refreshed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A network filesystem lists new names when the parent directory is opened."""
        opened: set[object] = set()
        scandir = os.scandir

        def opening(path: Path) -> object:
            opened.add(path)
            return scandir(path if path.parent in opened else tmp_path.parent)

        write_durably(tmp_path / TOKEN, b"")
        monkeypatch.setattr(os, "scandir", opening)
        folder_at(tmp_path).await_left(TOKEN, wait_s=0.2)

    @pytest.mark.parametrize("folder", [".", "missing"])
    def test_a_directory_that_is_not_shared_is_reported(self, tmp_path: Path, folder: str) -> None:
        write_durably(tmp_path / f"{SEEN_PREFIX}another", b"")
        start_s = time.monotonic()
        with pytest.raises(SaveError, match=r"does not see the file .* all machines share"):
            folder_at(tmp_path / folder).await_left(TOKEN, wait_s=0.2)
        assert time.monotonic() - start_s < PROMPT_TIMEOUT_S


def test_storage_needs_no_torch() -> None:
    code = "import lightning_elastic_zero.storage.file_read, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
