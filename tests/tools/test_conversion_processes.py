"""``convert`` in its own processes: killed conversions, and the memory of a conversion."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.storage.disk_checkpoints import remove_leftovers
from lightning_elastic_zero.tools.conversion import TARGETS, convert_checkpoint
from lightning_elastic_zero.tools.fingerprint import fingerprint_checkpoint
from lightning_elastic_zero.tools.selection import ConvertOptions
from tests.support.fits import SMALL_BUCKETS
from tests.support.plain_checkpoints import make_state, write_elastic
from tests.support.processes import HANG_TIMEOUT_S, output_of
from tests.support.ranks import ROOT, ForkServer, Pools, Program
from tests.support.small_checkpoints import names_in


def convert_in_part(source: Path, target: Path, to: str) -> None:
    """Convert, and wait forever after a part has been written."""

    def stop(size_bytes: int) -> None:
        if size_bytes:
            print("writing", flush=True)
            threading.Event().wait()

    convert_checkpoint(source, target, to, progress=Progress(show=stop))


Stopped = Callable[[Path, Path, str], Program]


@pytest.fixture
def stopped_conversion(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stopped]:
    """Return a function that starts a process, which has then written a part of a conversion."""
    programs = []

    def start(source: Path, target: Path, to: str) -> Program:
        call = partial(convert_in_part, source, target, to)
        program = fork_server.start_program(call, tmp_path_factory.mktemp("output"), "convert")
        programs.append(program)
        end = time.monotonic() + HANG_TIMEOUT_S
        while not program.stdout.exists() or program.stdout.read_text() != "writing\n":
            assert program.poll() is None, program.stderr.read_text()
            assert time.monotonic() < end
            time.sleep(0.01)
        return program

    yield start
    for program in programs:
        kill(program)


def kill(program: Program) -> None:
    program.kill()
    program.wait(time.monotonic() + HANG_TIMEOUT_S)


def hidden(folder: Path) -> list[str]:
    return [path.name for path in sorted(folder.iterdir()) if path.name.startswith(".")]


@pytest.mark.cases(1)
@pytest.mark.parametrize("to", ["fp32", "safetensors", "lightning", "universal", "dcp"])
def test_a_killed_conversion_is_removed_by_the_next(
    to: str, stopped_conversion: Stopped, tmp_path: Path
) -> None:
    source = write_elastic(tmp_path / "a.ckpt", make_state(), 3, 2)
    folder = tmp_path / "out"
    folder.mkdir()
    process = stopped_conversion(source, folder / "target", to)
    written = hidden(folder)
    assert len(written) == 2  # The partial result and its owner file.
    convert_checkpoint(source, folder / "other", "fp32")
    assert hidden(folder) == written
    kill(process)
    assert hidden(folder) == written
    assert not (folder / "target").exists()
    convert_checkpoint(source, folder / "target", to)
    assert names_in(folder) == ["other", "target"]
    if to in {"universal", "dcp"}:
        assert fingerprint_checkpoint(folder / "target") == fingerprint_checkpoint(source)


def test_a_foreign_file_in_a_killed_conversion_is_kept(
    stopped_conversion: Stopped, tmp_path: Path
) -> None:
    source = write_elastic(tmp_path / "a.ckpt", make_state(), 3, 2)
    process = stopped_conversion(source, tmp_path / "target", "safetensors")
    (remains,) = (path for path in tmp_path.glob(".zero-export-*") if path.is_dir())
    kill(process)
    before = names_in(tmp_path)
    for foreign in (remains / "notes.txt", remains / "model.safetensors.bak"):
        foreign.write_text("mine")
        assert remove_leftovers(tmp_path) == []
        assert foreign.read_text() == "mine"
        assert names_in(tmp_path) == before
        foreign.unlink()
    owner = tmp_path / f".zero-owner-{remains.name.removeprefix('.zero-export-')}.json"
    assert remove_leftovers(tmp_path) == [remains, owner]
    assert names_in(tmp_path) == ["a.ckpt"]


@pytest.mark.long
def test_a_save_removes_a_killed_conversion(stopped_conversion: Stopped, tmp_path: Path) -> None:
    source = write_elastic(tmp_path / "a.ckpt", make_state(), 3, 2)
    process = stopped_conversion(source, tmp_path / "target", "safetensors")
    assert remove_leftovers(tmp_path) == []
    kill(process)
    (mine := tmp_path / ".zero-export-mine.json").write_text("{}")
    removed, _ = remove_leftovers(tmp_path)
    assert removed.name.startswith(".zero-export-")
    assert names_in(tmp_path) == sorted([mine.name, "a.ckpt"])


LARGE = "base_model.model.large.lora_A.default.weight"
SHAPES = {
    # Several chunks, and so many of one chunk each that keeping the last chunk of each would show.
    LARGE: (12, 1_000_000),
    **{f"base_model.model.small.{i}.lora_A.default.weight": (600_000,) for i in range(10)},
}
LIMIT_BYTES = 128 << 20
"""Memory that a conversion may allocate, above that of its process before."""

MOST_BYTES = 96 << 20
"""Limit of its peak.

Measured: 45 MB, and 100 MB for torch's directories, whose chunks torch reads as a whole.
"""

CONVERT_BOUNDED = """
import resource, sys
from pathlib import Path
from lightning_elastic_zero.tools.conversion import convert_checkpoint
from lightning_elastic_zero.tools.selection import ConvertOptions
import lightning_elastic_zero.formats.dcp_write
source, target, to, config, limit = sys.argv[1:]

def memory(what):  # ru_maxrss would be inherited from the parent process
    status = Path("/proc/self/status").read_text().splitlines()
    (found,) = (int(line.split()[1]) << 10 for line in status if line.startswith(what + ":"))
    return found

most = memory("VmData") + int(limit)
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
before = memory("VmRSS")
with_optimizer = to not in ("fp32", "bf16", "adapter")
options = ConvertOptions(optimizer=with_optimizer or None, adapter_config=config)
convert_checkpoint(source, target, to, options)
print(memory("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of 216 MB, with optimizer state."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    state = make_state(dict(SHAPES))
    state.groups, state.rates = (tuple(SHAPES),), (1e-3,)
    source = write_elastic(folder / "a.ckpt", state, 3, 2)
    assert sum(f.stat().st_size for f in source.rglob("*.pt")) > LIMIT_BYTES * 1.5
    return source


def convert_bounded(source: Path, target: Path, to: str, config: Path) -> int:
    words = (source, target, to, config, str(LIMIT_BYTES))
    printed = output_of((sys.executable, "-c", CONVERT_BOUNDED, *words), ROOT, os.environ)
    return int(printed.splitlines()[-1])


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("to", TARGETS)
def test_memory_is_bounded(to: str, large: Path, tmp_path: Path) -> None:
    """The limit (``ulimit -d``) is smaller than the state."""
    config = large.parent / "adapter_config.json"
    assert convert_bounded(large, tmp_path / "out", to, config) < MOST_BYTES
    # An adapter contains only the weights, which are a third of the state.
    written = sum(p.stat().st_size for p in [tmp_path / "out", *tmp_path.rglob("*")] if p.is_file())
    assert written >= 18_000_000 * 2


class Large(nn.Module):
    """A model of the same size, with one large and several smaller parameters."""

    def __init__(self) -> None:
        super().__init__()
        for index, shape in enumerate(SHAPES.values()):
            self.register_parameter(f"p{index}", nn.Parameter(torch.rand(shape)))

    def forward(self) -> torch.Tensor:
        return torch.stack([p.float().mean() for p in self.parameters()]).sum()


def save_with_deepspeed(folder: str, stage: int) -> None:
    """Train a step and save as stock DeepSpeed does. Collective."""
    import deepspeed

    model = Large()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **SMALL_BUCKETS},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine())
    engine.step()
    engine.save_checkpoint(folder)
    engine.destroy()


SOURCES = [
    *((kind, "safetensors") for kind in ("universal", "lightning", "zero2", "zero3")),
    ("zero3", "fp32"),
]
"""Checkpoints that are read by ranges, and targets; no file is read as a whole."""


@pytest.mark.long
@pytest.mark.parametrize(("kind", "to"), SOURCES)
def test_memory_is_bounded_for_other_sources(
    kind: str, to: str, large: Path, pools: Pools, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    if kind.startswith("zero"):
        pools.run(3, partial(save_with_deepspeed, str(source), int(kind[-1])))
    else:
        convert_checkpoint(large, source, kind, ConvertOptions(optimizer=True))
    config = large.parent / "adapter_config.json"
    assert convert_bounded(source, tmp_path / "out", to, config) < MOST_BYTES
