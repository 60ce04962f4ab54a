"""The benchmarks print their measurements, for every method and pair of worlds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import HANG_TIMEOUT_S

ROOT = Path(__file__).parents[2]
RAW_READS = {"raw read into existing memory", "raw read into new memory"}
WAYS_TO_LOAD = {*RAW_READS, "this library", "torch.distributed.checkpoint"}
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def printed_by(script: str, *options: str) -> str:
    """Run a benchmark; return its output."""
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples/benchmarks" / script), *options],
        check=False,
        capture_output=True,
        text=True,
        timeout=HANG_TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def rows_of(printed: str) -> list[list[str]]:
    """Return the cells of a table, without its heading."""
    return [[c.strip() for c in line.split("|")[1:-1]] for line in printed.splitlines()[2:]]


@pytest.mark.long
def test_growth_is_measured(tmp_path: Path) -> None:
    """For any size and number of ranks, little more than the bytes of the state are moved."""
    rows = rows_of(
        printed_by(
            *("growth.py", "--sizes", "2e6", "4e6", "--ranks", "1", "2", "--rounds", "1"),
            *("--folder", str(tmp_path)),
        )
    )
    assert [row[:2] for row in rows] == [["2", "1"], ["2", "2"], ["4", "1"], ["4", "2"]]
    for _, _, _, _, written, _, _, _, read, _, opened in rows:
        assert 1.0 <= float(written) < 1.05
        assert 1.0 <= float(read) < 1.05
        assert int(opened) > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_agreements_are_counted() -> None:
    """Each kind of step costs every rank some operations; ``all_gather`` sends all to all."""
    rows = rows_of(printed_by("agreements.py", "--worlds", "2", "8", "--steps", "3"))
    kinds = ["run_all", "broadcast", "gather", "all_gather"]
    assert [row[:2] for row in rows] == [[n, kind] for n in ("2", "8") for kind in kinds]
    value_kb = 0.04  # of JSON, and some more
    for ranks, kind, _, first, first_kb, another, another_kb in rows:
        assert min(float(first), float(another)) >= 4
        least_kb = int(ranks) * value_kb if kind == "all_gather" else 0.0
        assert min(float(first_kb), float(another_kb)) > least_kb


@pytest.mark.long
def test_background_saves_are_measured(tmp_path: Path) -> None:
    """Each method has its line, and this library wrote the state once."""
    printed = printed_by(
        *("background.py", "--megabytes", "8", "--rounds", "1", "--folder", str(tmp_path))
    )
    assert float(re.findall(r"ours wrote ([\d.]+) times the state", printed)[0]) < 1.05
    for way in ("ours, until published in training", "raw write in training", "dcp async_save"):
        assert re.search(rf"^{way}.* [\d.]+$", printed, re.MULTILINE), way
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_every_way_is_measured_as_often_as_asked(tmp_path: Path) -> None:
    """Saves and loads on equal and different worlds, with the state's bytes, in every output.

    Bytes show that a method has done its work: a save that failed silently would be the fastest.
    """
    options = ["--no-universal", "--parameters", "2e6", "--stages", "3", "--precisions", "fp32"]
    options += ["--pairs", "2:2", "2:1", "--rounds", "2"]
    printed_by("save_load.py", *options, "--folder", str(tmp_path), "--out", str(tmp_path / "out"))
    found = json.loads((tmp_path / "out/figures.json").read_text())
    figures, state_bytes = found["figures"], found["state_bytes"]
    (saves,) = figures["save"].values()
    loads = figures["load"]
    assert loads.keys() == {"ZeRO-3 fp32, 2 to 2", "ZeRO-3 fp32, 2 to 1"}
    assert loads["ZeRO-3 fp32, 2 to 2"].keys() == {*WAYS_TO_LOAD, "stock DeepSpeed"}
    assert loads["ZeRO-3 fp32, 2 to 1"].keys() == WAYS_TO_LOAD
    for costs in (saves, *loads.values()):
        assert {len(of_way) for of_way in costs.values()} == {2}
    for way in ("this library", "stock DeepSpeed", "torch.distributed.checkpoint"):
        assert all(state_bytes <= c["written"] < 1.05 * state_bytes for c in saves[way])
    # A save keeps the last checkpoint until it is published; torch overwrites it.
    assert all(0.5 * state_bytes < c["temporary_disk"] for c in saves["this library"])
    column = "background: the call"
    for way in (f"this library, {column}", f"torch.distributed.checkpoint, {column}"):
        assert way in saves
    assert "torch.distributed.checkpoint, background process: the wait after it" in saves
    for costs in loads.values():
        assert all(state_bytes <= c["read"] < 1.05 * state_bytes for c in costs["this library"])
        new = (cost["faults"] for cost in costs["raw read into new memory"])
        assert all(faults > state_bytes / PAGE_BYTES for faults in new)
    text = (tmp_path / "out/figures.md").read_text()
    assert all(f"| {way} |" in text for costs in loads.values() for way in costs)
    assert (tmp_path / "out/figures.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
