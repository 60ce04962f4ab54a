"""Checkpoints of format 1 by earlier code of this library load with today's code."""

from __future__ import annotations

import json
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elastic_zero.core.manifest import manifest_from_json
from tests.formats._golden_run import CALLBACK, SAMPLES, GoldenRun, Held, fit
from tests.formats.make_golden import RUNS
from tests.support.oracle import same_bits
from tests.support.ranks import Pools

DATA = Path(__file__).parent / "data" / "golden"
NAMES = sorted(RUNS)

OF_A_RANK = ("buffer", "random")
"""Kinds of state per rank, which are restored if the number of ranks is unchanged."""


def unpack(name: str, folder: Path) -> tuple[Path, Held]:
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    held: Held = torch.load(folder / "truth.pt", weights_only=True)
    return folder / "checkpoint", held


def differing(wanted: Held, found: Held) -> list[str]:
    return [key for key, value in wanted.items() if not same(value, found.get(key))]


def same(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return isinstance(found, torch.Tensor) and same_bits(wanted, found)
    return bool(wanted == found)


def wanted_on(held: Held, source: GoldenRun, world: int) -> Held:
    shared = {k: v for k, v in held.items() if k.partition("/")[0] not in (*OF_A_RANK, "samples")}
    if world == source.world:
        return shared | {k: v for k, v in held.items() if k.partition("/")[0] in OF_A_RANK}
    return shared | {f"buffer/{rank}/mean": held["buffer/0/mean"] for rank in range(world)}


@pytest.mark.parametrize("name", NAMES)
def test_the_manifest_is_read_and_written_unchanged(name: str, tmp_path: Path) -> None:
    checkpoint, held = unpack(name, tmp_path)
    text = (checkpoint / "manifest.json").read_text(encoding="utf-8")
    manifest = manifest_from_json(text, "manifest.json")
    assert (manifest.stage, manifest.world_size) == (RUNS[name].stage, RUNS[name].world)
    shapes = {p.name: p.shape for p in manifest.parameters}
    kinds = ("weight/", "frozen/")
    weights = {k.partition("/")[2]: v for k, v in held.items() if k.startswith(kinds)}
    assert shapes == {parameter: tuple(v.shape) for parameter, v in weights.items()}
    for index, group in enumerate(manifest.groups):
        fields = {f"group/{index}/{key}": repr(v) for key, v in group.hyperparameters.items()}
        assert fields == {k: v for k, v in held.items() if k.startswith(f"group/{index}/")}
        assert {state.name for state in group.state} == {"exp_avg", "exp_avg_sq", "step"}
    assert repr(manifest.progress.global_steps) == held["counter/engine_steps"]
    assert repr(manifest.progress.global_samples) == held["counter/engine_samples"]
    assert manifest.to_json() == text


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "world", "stage"),
    [
        pytest.param("zero1", 1, 3),
        pytest.param("zero1", 2, 1),
        pytest.param("zero1", 3, 2),
        pytest.param("zero2", 1, 2),
        pytest.param("zero2", 2, 3),
        pytest.param("zero2", 3, 1),
        pytest.param("zero3", 1, 1),
        pytest.param("zero3", 2, 3),
        pytest.param("zero3", 3, 2, marks=pytest.mark.essential),
    ],
)
def test_golden_checkpoints_resume(
    name: str, world: int, stage: int, worlds: Pools, tmp_path: Path
) -> None:
    checkpoint, held = unpack(name, tmp_path)
    source = RUNS[name]
    target = GoldenRun(stage, world, source.precision, load=str(checkpoint), seed=9, rate=0.9)
    for resumed in worlds.run(world, partial(fit, target)):
        assert not differing(wanted_on(held, source, world), resumed.held)
        assert sorted(held["samples/seen"].tolist() + resumed.samples) == [*range(SAMPLES)]
        assert resumed.callback["epochs"] == CALLBACK["epochs"]
        assert torch.equal(resumed.callback["tensor"], CALLBACK["tensor"])  # type: ignore[arg-type]


def test_each_archive_is_small_and_describes_its_origin() -> None:
    archives = sorted(DATA.iterdir())
    assert [path.name for path in archives] == [f"{name}.tar.xz" for name in NAMES]
    assert all(path.stat().st_size <= 40_000 for path in archives)
    for path in archives:
        with tarfile.open(path) as archive:
            about = archive.extractfile("about.json")
            assert about is not None
            assert json.load(about)["world"] == 2
