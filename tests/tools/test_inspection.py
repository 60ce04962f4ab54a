"""``inspect``: reports on a checkpoint, from small files."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elastic_zero.tools.inspection import (
    device_counts,
    inspect_checkpoint,
    state_bytes,
    weight_bytes,
)
from tests.support.foreign_checkpoints import unpack
from tests.support.plain_checkpoints import make_state, write_elastic

Run = Callable[..., tuple[int, str, str]]


def bytes_read_by(call: Callable[[], object]) -> int:
    def counted() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(lines[0].removeprefix("rchar: "))

    before = counted()
    call()
    return counted() - before


def test_an_own_checkpoint_is_described_by_its_manifest(tmp_path: Path) -> None:
    report = inspect_checkpoint(write_elastic(tmp_path / "a.ckpt", make_state(), 2, 3))
    manifest, progress = report.manifest, report.manifest.progress
    assert (manifest.stage, manifest.world_size, manifest.precision) == (2, 3, "bf16")
    assert (progress.global_steps, progress.global_samples) == (3, 36)
    assert (report.epoch, report.epoch_samples) == (2, 12)
    head, frozen = (
        next(p for p in manifest.parameters if p.name == name)
        for name in ("head.weight", "frozen.weight")
    )
    assert (weight_bytes(manifest, head), state_bytes(manifest, head)) == (65 * 4, 65 * 8)
    assert (weight_bytes(manifest, frozen), state_bytes(manifest, frozen)) == (12 * 2, 0)
    for file in report.files:
        assert file.size_bytes == (tmp_path / "a.ckpt" / file.name).stat().st_size
    assert "1, 2, 3, 4, 6, 12 devices" in report.resumable_on


def test_stage_0_has_masters_and_ranks(tmp_path: Path, run: Run) -> None:
    path = write_elastic(tmp_path / "a.ckpt", make_state(), 0, 2)
    manifest = inspect_checkpoint(path).manifest
    head = next(p for p in manifest.parameters if p.name == "head.weight")
    sizes = weight_bytes(manifest, head), state_bytes(manifest, head)
    assert (head.dtype, *sizes) == ("bfloat16", 65 * 4, 65 * 8)
    assert "ZeRO-0 on 2 devices, bf16, masters in float32" in run("inspect", path)[1]
    torch.save({"w": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "w.pt")
    manifest = inspect_checkpoint(tmp_path / "w.pt").manifest
    assert weight_bytes(manifest, *manifest.parameters) == 6
    assert "no ZeRO, bf16" in run("inspect", tmp_path / "w.pt")[1]


@pytest.mark.parametrize(
    "name", ["zero2-ds0.19", "zero3-ds0.19", "bf16-ds0.19", "universal3", "lightning3"]
)
def test_checkpoints_of_other_software_are_described_alike(
    name: str, tmp_path: Path, run: Run
) -> None:
    fixture = unpack(name, tmp_path)
    report = inspect_checkpoint(fixture.checkpoint)
    assert report.manifest.progress.global_steps == fixture.setup_steps
    assert report.manifest.world_size == fixture.setup.world
    truth = fixture.truth()
    masters = {key.removeprefix("master/") for key in truth if key.startswith("master/")}
    assert masters == {p.name for p in report.manifest.optimized}
    assert report.files
    assert None not in [file.size_bytes for file in report.files]
    code, out, _ = run("inspect", fixture.checkpoint, "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(report.to_plain()))


def test_a_file_of_weights_is_described(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3, 2), "n": torch.tensor(1)}, tmp_path / "w.pt")
    report = inspect_checkpoint(tmp_path / "w.pt")
    assert report.manifest.weights_only
    found = [(p.name, p.shape, p.dtype) for p in report.manifest.parameters]
    assert found == [("w", (3, 2), "float32"), ("n", (), "int64")]
    assert "a new run" in report.resumable_on


def test_positions_of_an_optimizer_are_explained_if_shapes_allow(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tree: dict[str, Any] = {"state_dict": model.state_dict(), "epoch": 4, "global_step": 1}
    tree["optimizer_states"] = [optimizer.state_dict()]
    torch.save(tree, tmp_path / "a.ckpt")
    report = inspect_checkpoint(tmp_path / "a.ckpt")
    assert (report.epoch, report.manifest.progress.global_steps, report.doubts) == (4, 1, ())
    assert {p.group for p in report.manifest.parameters} == {0}
    # A buffer with the shape of a weight precedes it, so the positions are ambiguous.
    tree["state_dict"] = {"buffer": torch.ones(2, 3), **model.state_dict()}
    torch.save(tree, tmp_path / "b.ckpt")
    report = inspect_checkpoint(tmp_path / "b.ckpt")
    assert {p.group for p in report.manifest.parameters} == {None}
    assert "several" in report.doubts[0]


def test_no_tensor_is_read(tmp_path: Path) -> None:
    """A checkpoint a hundred times as large costs the same bytes, ours and others."""
    read = []
    for width in (10, 1000):
        state = make_state({"a": (width, 1000), "b": (width,)})
        own = write_elastic(tmp_path / f"{width}.ckpt", state, 1, 1)
        torch.save(state.masters, tmp_path / f"{width}.pt")
        inspect_checkpoint(own)  # Its imports are read now.
        paths = (own, tmp_path / f"{width}.pt")
        read += [bytes_read_by(partial(inspect_checkpoint, path)) for path in paths]
    assert (tmp_path / "1000.pt").stat().st_size > 4_000_000
    # The index of a file and the data around it; for our own, the manifest.
    assert max(read) < 200_000
    assert abs(read[0] - read[2]) < 1000


def test_parameters_are_selected(tmp_path: Path, run: Run) -> None:
    path = write_elastic(tmp_path / "a.ckpt", make_state())
    code, out, _ = run("inspect", path, "--filter", "*.weight", "--files")
    rows = [line.split()[0] for line in out.splitlines() if " group " in line or "frozen" in line]
    assert code == 0
    assert rows
    assert all(name.endswith(".weight") for name in rows)
    assert "ZeRO-2 on 2 devices, bf16" in out
    assert "step 3, epoch 2, 12 samples in this epoch, 36 samples in total, global batch 12" in out
    assert "checkpoint/mp_rank_00_model_states.pt" in out


@pytest.mark.parametrize(("suffix", "cut_bytes"), [("", 100), (".sums", 1)])
def test_missing_and_cut_files_are_named(
    suffix: str, cut_bytes: int, tmp_path: Path, run: Run
) -> None:
    path = write_elastic(tmp_path / "a.ckpt", make_state(), 2, 3)
    assert inspect_checkpoint(path).damage == ()
    assert "DAMAGED" not in run("inspect", path)[1]
    listed = {file.name for file in inspect_checkpoint(path).files}
    held = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}
    assert held - listed == {"manifest.json", "latest"}
    first, second, third, *_ = sorted(path.rglob(f"*_optim_states.pt{suffix}"))
    size_bytes = first.stat().st_size
    first.write_bytes(first.read_bytes()[:-cut_bytes])
    second.unlink()
    names = [file.relative_to(path).as_posix() for file in (first, second, third)]
    cut, gone = inspect_checkpoint(path).damage
    assert cut == f"{names[0]} has {size_bytes - cut_bytes} bytes, recorded are {size_bytes}"
    assert gone == f"{names[1]} is missing"
    code, out, _ = run("inspect", path, "--files")
    (summary,) = [summary for summary in out.splitlines() if summary.startswith("DAMAGED")]
    assert code == 0
    assert "2 of 8 files" in summary
    assert all(name in summary for name in names[:2])
    assert names[2] not in summary
    assert json.loads(run("inspect", path, "--json")[1])["damage"] == [cut, gone]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("zero2-ds0.19", "*_rank_1_*_optim_states.pt"),
        ("zero3-ds0.19", "*_rank_1_*_model_states.pt"),
        ("universal3", "zero/b.weight/exp_avg.pt"),
    ],
)
@pytest.mark.parametrize("kept", [0, 1, -1], ids=["nothing", "half", "all but a byte"])
def test_cut_files_of_other_software_are_named(
    name: str, pattern: str, kept: int, tmp_path: Path, run: Run
) -> None:
    path = unpack(name, tmp_path).checkpoint
    (cut,) = path.glob(f"*/{pattern}")
    data = cut.read_bytes()
    size_bytes = {0: 0, 1: len(data) // 2, -1: len(data) - 1}[kept]
    cut.write_bytes(data[:size_bytes])
    (problem,) = inspect_checkpoint(path).damage
    below = cut.relative_to(path).as_posix().partition("/")[2]
    assert problem == f"{below} has {size_bytes} bytes, and its end is missing"
    out = run("inspect", path)[1]
    assert problem in out
    assert "resumable on" not in out


@pytest.mark.parametrize("name", ["zero2-ds0.19", "zero3-ds0.19"])
def test_missing_files_of_other_software_are_named(name: str, tmp_path: Path, run: Run) -> None:
    fixture = unpack(name, tmp_path)
    assert inspect_checkpoint(fixture.checkpoint).damage == ()
    lost = max(Path(fixture.checkpoint).rglob("*_optim_states.pt"))
    lost.unlink()
    (problem,) = inspect_checkpoint(fixture.checkpoint).damage
    assert problem == f"{lost.name} is missing"
    files = fixture.setup.world * 2 if "zero3" in name else fixture.setup.world + 1
    assert f"1 of {files} files" in run("inspect", fixture.checkpoint)[1]


def test_device_counts_divide_the_global_batch() -> None:
    assert device_counts(12) == [1, 2, 3, 4, 6, 12]
