"""The benchmark: what it prints is what it has measured, of every way on every pair of worlds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.timeouts import HANG_TIMEOUT_S

ROOT = Path(__file__).parents[2]
WAYS_TO_LOAD = {
    "warm read into memory",
    "this library",
    "torch.distributed.checkpoint",
    "cold read into memory",
    "this library, cold",
}


@pytest.mark.long
def test_every_way_is_measured_as_often_as_asked(tmp_path: Path) -> None:
    """Saves and loads on like and unlike worlds, with the bytes of the state, in every output.

    Bytes show that a way has done its work: a save that failed in silence would be the fastest.
    """
    command = [sys.executable, str(ROOT / "examples/benchmarks/save_load.py"), "--no-universal"]
    command += ["--parameters", "2e6", "--stages", "3", "--precisions", "fp32"]
    command += ["--pairs", "2:2", "2:1", "--rounds", "2"]
    command += ["--folder", str(tmp_path), "--out", str(tmp_path / "out")]
    ran = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=HANG_TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"},
    )
    assert ran.returncode == 0, ran.stderr
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
    # A save keeps the last one until it is published; torch's writes over it.
    assert all(0.5 * state_bytes < c["temporary_disk"] for c in saves["this library"])
    behind = "background: the call"
    for way in (f"this library, {behind}", f"torch.distributed.checkpoint, {behind}"):
        assert way in saves
    assert "torch.distributed.checkpoint, background process: the wait after it" in saves
    for costs in loads.values():
        assert all(state_bytes <= c["read"] < 1.05 * state_bytes for c in costs["this library"])
    text = (tmp_path / "out/figures.md").read_text()
    assert all(f"| {way} |" in text for costs in loads.values() for way in costs)
    assert (tmp_path / "out/figures.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
