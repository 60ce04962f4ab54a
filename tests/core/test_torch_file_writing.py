from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.formats import torch_write as writing
from lightning_elastic_zero.formats.torch_read import StoredRun
from lightning_elastic_zero.formats.torch_write import (
    ChunkedSource,
    PiecewiseSource,
    TorchFileWriter,
)
from tests.support.bits import NAME, SAVE_ID, any_bits, bits, open_verified, write_tree

ROOT = Path(__file__).parents[2]

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
]


class TestWriting:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_anybody_can_load_it(
        self, tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """``torch.load(weights_only=True)`` gives every bit of pieces, zeros and plain tensors."""
        live, plain = any_bits(5000, dtype), any_bits(300, dtype, seed=1)
        builder = TorchFileWriter()
        pieces: list[torch.Tensor | int] = [live[:7], 5, live[7:4000], 0, live[4000:]]
        monkeypatch.setattr(writing, "COPY_BYTES", 64 * dtype.itemsize)
        flat = builder.add(PiecewiseSource(pieces, dtype))
        empty = builder.add(PiecewiseSource([], dtype))
        tree = {"a": flat[:10].view(2, 5), "rest": [flat[10:]], "plain": plain, "empty": empty}
        record = write_tree(tmp_path, tree, builder)
        for mmap in (False, True):
            found = torch.load(tmp_path / record.name, weights_only=True, mmap=mmap)
            whole = bits(found["a"]) + bits(found["rest"][0])
            zeros = bytes(5 * dtype.itemsize)
            assert whole == bits(live[:7]) + zeros + bits(live[7:])
            assert bits(found["plain"]) == bits(plain)
            assert found["a"].shape == (2, 5)
            assert found["empty"].shape == (0,)
            assert found["empty"].dtype == dtype

    def test_views_of_one_stand_in_share_one_storage(self, tmp_path: Path) -> None:
        """A thousand views of a flat buffer cost the flat buffer once."""
        live, builder = any_bits(100_000), TorchFileWriter()
        flat = builder.add(PiecewiseSource([live], live.dtype))
        tree = {f"p{i}": flat[i * 100 : i * 100 + 100] for i in range(1000)}
        record = write_tree(tmp_path, tree, builder)
        assert 400_000 < record.size_bytes < 550_000
        found = torch.load(tmp_path / record.name, weights_only=True)
        assert all(bits(found[f"p{i}"]) == bits(live[i * 100 : i * 100 + 100]) for i in range(1000))

    def test_a_source_ends_with_its_last_byte(self, tmp_path: Path) -> None:
        """The last part of one has been written when it is asked for more, and not before."""
        said: list[str] = []
        builder = TorchFileWriter()

        def fetch(name: str, numel: int) -> Iterator[torch.Tensor]:
            yield torch.zeros(numel)
            said.append(name)

        tree = []
        for name, numel in (("a", 5 << 20), ("b", 5 << 20)):
            source = ChunkedSource(numel, torch.float32, partial(fetch, name, numel))
            tree.append(builder.add(PiecewiseSource([source], torch.float32)))
        assert not said
        written = [0]

        def note(size_bytes: int) -> None:
            written[0] += size_bytes
            if written[0] > 21 << 20:
                said.append("written")

        builder.write(tree, tmp_path, "x.pt", save_id="5a7e", progress=Progress(show=note))
        assert said.index("a") < said.index("written") < said.index("b")

    def test_pieces_are_cast(self, tmp_path: Path) -> None:
        """A piece of another type is written in the source's."""
        live, builder = torch.randn(1000), TorchFileWriter()
        source = PiecewiseSource([live.double(), 2], torch.bfloat16)
        record = write_tree(tmp_path, {"a": builder.add(source)}, builder)
        found = torch.load(tmp_path / record.name, weights_only=True)["a"]
        assert torch.equal(found, torch.cat([live.bfloat16(), torch.zeros(2).bfloat16()]))

    def test_checksum_option_of_torch_is_put_back(self, tmp_path: Path) -> None:
        """The process-wide switch is as it was, also after a failure."""
        torch.serialization.set_crc32_options(compute_crc32=True)
        write_tree(tmp_path, {})
        assert torch.serialization.get_crc32_options()
        with pytest.raises(SaveError):
            write_tree(tmp_path, {})
        with pytest.raises(AttributeError, match="local object"):
            TorchFileWriter().write(lambda: None, tmp_path, "other.pt", save_id=SAVE_ID)
        assert torch.serialization.get_crc32_options()

    def test_failing_source(self, tmp_path: Path) -> None:
        """What a source raises amid the file arrives as it is, and the file has no sidecar."""

        class Failing(PiecewiseSource):
            def chunks(self) -> Iterator[torch.Tensor]:
                yield torch.zeros(10)
                msg = "the device is gone"
                raise ConnectionError(msg)

        builder = TorchFileWriter()
        flat = builder.add(Failing([20], torch.float32))
        with pytest.raises(ConnectionError, match="the device is gone"):
            write_tree(tmp_path, {"a": flat, "b": torch.zeros(1000)}, builder)
        assert not list(tmp_path.rglob("*.sums"))

    @pytest.mark.parametrize(
        ("chunks", "reason"),
        [
            ([torch.zeros(9)], "4 bytes too few"),
            ([torch.zeros(11)], "more elements than it said"),
            ([torch.zeros(10, dtype=torch.float64)], r"of torch\.float32 gave torch\.float64"),
            ([torch.zeros(2, 5)], r"gave torch\.float32 of shape \(2, 5\)"),
        ],
    )
    def test_source_that_breaks_its_word(
        self, tmp_path: Path, chunks: list[torch.Tensor], reason: str
    ) -> None:
        """A source that gives other elements than it said is an error, never a shifted file."""

        class Broken(PiecewiseSource):
            def chunks(self) -> Iterator[torch.Tensor]:
                yield from chunks

        builder = TorchFileWriter()
        flat = builder.add(Broken([10], torch.float32))
        with pytest.raises(ValueError, match=reason):
            write_tree(tmp_path, {"a": flat}, builder)

    def test_stand_in_that_is_not_in_the_tree(self, tmp_path: Path) -> None:
        """A source that would be lost is an error."""
        builder = TorchFileWriter()
        builder.add(PiecewiseSource([10], torch.float32))
        with pytest.raises(ValueError, match="has no place in the tree"):
            write_tree(tmp_path, {}, builder)

    def test_pieces_are_checked(self) -> None:
        """A piece that has no one run of memory is refused at once."""
        for pieces in ([torch.zeros(4, 4).t()], [-1]):
            with pytest.raises(ValueError, match="A piece is"):
                PiecewiseSource(pieces, torch.float32)

    def test_progress_adds_up(self, tmp_path: Path) -> None:
        """Progress is told of every byte of the file."""
        told: list[int] = []
        builder = TorchFileWriter()
        tree = [builder.add(PiecewiseSource([1 << 20], torch.float32))]
        record = builder.write(
            tree, tmp_path, NAME, save_id=SAVE_ID, progress=Progress(show=told.append)
        )
        assert sum(told) == record.size_bytes == (tmp_path / NAME).stat().st_size


MEMORY = """
import sys, tempfile, torch
from contextlib import closing
from pathlib import Path
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.formats.torch_write import PiecewiseSource, TorchFileWriter
from lightning_elastic_zero.formats.torch_read import StoredRun, TorchFile
from lightning_elastic_zero.storage.files import VerifiedFile

# Where deterministic algorithms are asked for, torch.empty fills what it gives.
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
    flat = builder.add(PiecewiseSource([part.bfloat16(), 1 << 20] + [part] * 32, torch.float32))
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


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """Writing and reading half a GiB takes a few buffers, whatever the size."""
    result = subprocess.run(
        [sys.executable, "-c", MEMORY],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    writing_mib, reading_mib = map(int, result.stdout.split())
    assert writing_mib < 48
    assert reading_mib < 48


@pytest.mark.gpu
def test_from_and_to_a_device(tmp_path: Path) -> None:
    """Elements on a device are written from there and read to there, bit for bit."""
    live, builder = any_bits(10_000_000).cuda(), TorchFileWriter()
    source = PiecewiseSource([live[:99], 5, live[99:]], live.dtype)
    with open_verified(tmp_path, write_tree(tmp_path, {"a": builder.add(source)}, builder)) as file:
        target = torch.zeros(9_999_901, device="cuda")
        file.read_into([(target, StoredRun(file.tree["a"], 104, 10_000_005))])
    assert bits(target.cpu()) == bits(live[99:].cpu())
