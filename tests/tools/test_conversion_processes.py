"""``convert`` in its own processes: killed conversions, and the memory of a conversion."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elastic_zero.storage.publish import remove_leftovers
from lightning_elastic_zero.tools.conversion import TARGETS, convert_checkpoint
from lightning_elastic_zero.tools.fingerprint import fingerprint_checkpoint
from lightning_elastic_zero.tools.weight_files import ConvertOptions
from tests.support.plain_checkpoints import STATES, WholeState, make_state, write_elastic
from tests.support.processes import HANG_TIMEOUT_S, output_of
from tests.support.ranks import ROOT
from tests.support.small_checkpoints import names_in

ABOUT = {"ds_version": "0.19.8", "mp_world_size": 1}


def write_stock(folder: Path, state: WholeState, stage: int, world_size: int) -> Path:
    tag = folder / "global_step3"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    for rank in range(world_size):
        if stage == 3 or not rank:
            prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            name = f"{prefix}mp_rank_00_model_states.pt"
            torch.save(_model_file(state, stage, world_size, rank), tag / name)
        shard = (
            _shard_3(state, world_size, rank) if stage == 3 else _shard_2(state, world_size, rank)
        )
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": shard, **ABOUT}, tag / name)
    return folder


def _piece(tensor: torch.Tensor, world_size: int, rank: int) -> torch.Tensor:
    numel = -(-tensor.numel() // world_size)
    piece = torch.zeros(numel, dtype=tensor.dtype)
    mine = tensor.reshape(-1)[rank * numel : (rank + 1) * numel]
    piece[: mine.numel()] = mine
    return piece


def _model_file(state: WholeState, stage: int, world_size: int, rank: int) -> dict[str, Any]:
    cut = stage == 3
    weights = {
        name: torch.empty(0, dtype=torch.bfloat16) if cut else tensor.bfloat16()
        for name, tensor in state.masters.items()
    }
    frozen = {
        name: _piece(tensor, world_size, rank) if cut else tensor
        for name, tensor in state.frozen.items()
    }
    return {
        "module": {**weights, **({} if cut else frozen), **state.buffers},
        "buffer_names": list(state.buffers),
        "param_shapes": [OrderedDict((n, state.masters[n].shape) for n in g) for g in state.groups],
        "frozen_param_shapes": {n: t.shape for n, t in state.frozen.items()} or None,
        "frozen_param_fragments": frozen or None,
        "shared_params": {},
        "global_steps": int(state.step),
        "global_samples": 36,
        "skipped_steps": 0,
        "dp_world_size": world_size,
        "ds_config": {"train_batch_size": 12, "gradient_accumulation_steps": 1},
        **ABOUT,
    }


def _groups(state: WholeState) -> list[dict[str, Any]]:
    return [
        {**state.hyperparameters, "lr": rate, "params": [index]}
        for index, rate in enumerate(state.rates)
    ]


def _shard_2(state: WholeState, world_size: int, rank: int) -> dict[str, Any]:
    masters, states, paddings = [], {}, []
    for index, names in enumerate(state.groups):
        flat = torch.cat([state.masters[n].reshape(-1) for n in names])
        padding = -flat.numel() % world_size if rank == world_size - 1 else 0
        paddings.append(padding)
        piece = _piece(flat, world_size, rank)
        masters.append(piece[: piece.numel() - padding].clone())
        of_group = {
            key: _piece(
                torch.cat([state.states[n][key].reshape(-1) for n in names]), world_size, rank
            )
            for key in STATES
        }
        states[index] = {"step": torch.tensor(state.step), **of_group}
    return {
        "zero_stage": 2,
        "partition_count": [world_size] * len(state.groups),
        "group_paddings": paddings,
        "base_optimizer_state": {"state": states, "param_groups": _groups(state)},
        "single_partition_of_fp32_groups": masters,
    }


def _shard_3(state: WholeState, world_size: int, rank: int) -> dict[str, Any]:
    def flat(whole: dict[str, torch.Tensor], names: tuple[str, ...]) -> torch.Tensor:
        return torch.cat([_piece(whole[name], world_size, rank) for name in names])

    states = {
        index: {
            "step": torch.tensor(state.step),
            **{key: flat({n: state.states[n][key] for n in names}, names) for key in STATES},
        }
        for index, names in enumerate(state.groups)
    }
    return {
        "zero_stage": 3,
        "partition_count": world_size,
        "optimizer_state_dict": {"state": states, "param_groups": _groups(state)},
        "fp32_flat_groups": [flat(state.masters, names) for names in state.groups],
    }


CONVERT = """
import sys, threading
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.tools.conversion import convert_checkpoint
source, target, to = sys.argv[1:]

def stop(size_bytes):
    if size_bytes:
        print("writing", flush=True)
        threading.Event().wait()

convert_checkpoint(source, target, to, progress=Progress(show=stop))
"""


@contextmanager
def stopped_conversion(source: Path, target: Path, to: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that is stopped after it has written a part of a conversion."""
    with subprocess.Popen(
        [sys.executable, "-c", CONVERT, source, target, to], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "writing\n"
            yield process
        finally:
            process.kill()
            process.wait(HANG_TIMEOUT_S)


def hidden(folder: Path) -> list[str]:
    return [path.name for path in sorted(folder.iterdir()) if path.name.startswith(".")]


@pytest.mark.cases(2)
@pytest.mark.parametrize("to", ["fp32", "safetensors", "lightning", "universal", "dcp", "elastic"])
def test_a_killed_conversion_is_removed_by_the_next(to: str, tmp_path: Path) -> None:
    source = write_elastic(tmp_path / "a.ckpt", make_state(), 3, 2)
    folder = tmp_path / "out"
    folder.mkdir()
    with stopped_conversion(source, folder / "target", to) as process:
        written = hidden(folder)
        assert len(written) == 2  # What is written, and who writes it.
        convert_checkpoint(source, folder / "other", "fp32")
        assert hidden(folder) == written
        process.kill()
        process.wait(HANG_TIMEOUT_S)
        assert hidden(folder) == written
        assert not (folder / "target").exists()
    convert_checkpoint(source, folder / "target", to)
    assert names_in(folder) == ["other", "target"]
    if to in {"universal", "dcp", "elastic"}:
        assert fingerprint_checkpoint(folder / "target") == fingerprint_checkpoint(source)


def test_a_foreign_file_in_a_killed_conversion_stays(tmp_path: Path) -> None:
    source = write_elastic(tmp_path / "a.ckpt", make_state(), 3, 2)
    with stopped_conversion(source, tmp_path / "target", "safetensors"):
        (left,) = (path for path in tmp_path.glob(".zero-export-*") if path.is_dir())
    before = names_in(tmp_path)
    for stranger in (left / "notes.txt", left / "model.safetensors.bak"):
        stranger.write_text("mine")
        assert remove_leftovers(tmp_path) == []
        assert stranger.read_text() == "mine"
        assert names_in(tmp_path) == before
        stranger.unlink()
    owner = tmp_path / f".zero-owner-{left.name.removeprefix('.zero-export-')}.json"
    assert remove_leftovers(tmp_path) == [left, owner]
    assert names_in(tmp_path) == ["a.ckpt"]


def test_a_save_removes_a_killed_conversion(tmp_path: Path) -> None:
    source = write_elastic(tmp_path / "a.ckpt", make_state(), 3, 2)
    with stopped_conversion(source, tmp_path / "target", "safetensors"):
        assert remove_leftovers(tmp_path) == []
    (mine := tmp_path / ".zero-export-mine.json").write_text("{}")
    left, _ = remove_leftovers(tmp_path)
    assert left.name.startswith(".zero-export-")
    assert names_in(tmp_path) == sorted([mine.name, "a.ckpt"])


LARGE = "base_model.model.large.lora_A.default.weight"
SHAPES = {
    # In several chunks; and so many in one chunk each that to keep the last of each would show.
    LARGE: (12, 1_000_000),
    **{f"base_model.model.small.{i}.lora_A.default.weight": (600_000,) for i in range(10)},
}
LIMIT_BYTES = 128 << 20
"""Of data that a conversion may have beside what its process had before."""

MOST_BYTES = 96 << 20
"""That it has at a time, as it is: 45 MB, and 100 from torch's directories, whose chunks torch
reads whole."""

CONVERT_BOUNDED = """
import resource, sys
from pathlib import Path
from lightning_elastic_zero.tools.conversion import ConvertOptions, convert_checkpoint
import lightning_elastic_zero.formats.dcp_write
source, target, to, config, limit = sys.argv[1:]

def memory(what):  # ru_maxrss would be that of the process that has started this one
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
def state() -> WholeState:
    """Return a state of 216 MB, with optimizer state."""
    state = make_state(dict(SHAPES))
    state.groups, state.rates = (tuple(SHAPES),), (1e-3,)
    return state


@pytest.fixture(scope="module")
def large(state: WholeState, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    source = write_elastic(folder / "a.ckpt", state, 3, 2)
    assert sum(f.stat().st_size for f in source.rglob("*.pt")) > LIMIT_BYTES * 1.5
    return source


def convert_bounded(source: Path, target: Path, to: str, config: Path) -> int:
    words = (source, target, to, config, str(LIMIT_BYTES))
    printed = output_of((sys.executable, "-c", CONVERT_BOUNDED, *words), ROOT, os.environ)
    return int(printed.splitlines()[-1])


@pytest.mark.cases(1)
@pytest.mark.cases(2)
@pytest.mark.parametrize("to", TARGETS)
def test_memory_is_bounded(to: str, large: Path, tmp_path: Path) -> None:
    """Under a limit (``ulimit -d``) that is smaller than the state."""
    config = large.parent / "adapter_config.json"
    assert convert_bounded(large, tmp_path / "out", to, config) < MOST_BYTES
    # The adapter's weights are a third of it, and all that is there of it.
    written = sum(p.stat().st_size for p in [tmp_path / "out", *tmp_path.rglob("*")] if p.is_file())
    assert written >= 18_000_000 * 2


SOURCES = [
    *((kind, "safetensors") for kind in ("universal", "lightning", "zero2", "zero3")),
    ("zero2", "elastic"),
    ("zero3", "fp32"),
]
"""Kinds of checkpoints that are read a range at a time, and targets: no file is read whole."""


@pytest.mark.cases(1)
@pytest.mark.cases(2)
@pytest.mark.parametrize(("kind", "to"), SOURCES)
def test_memory_is_bounded_for_other_sources(
    kind: str, to: str, state: WholeState, large: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    if kind.startswith("zero"):
        write_stock(source, state, int(kind[-1]), 3)
        assert fingerprint_checkpoint(source) == fingerprint_checkpoint(large)
    else:
        convert_checkpoint(large, source, kind, ConvertOptions(optimizer=True))
    config = large.parent / "adapter_config.json"
    assert convert_bounded(source, tmp_path / "out", to, config) < MOST_BYTES
