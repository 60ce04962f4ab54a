"""The goodput benchmark counts only steps in checkpoints, and agrees with theory."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from statistics import mean
from types import ModuleType

import pytest

from tests.support.processes import output_of

BENCHMARKS = Path(__file__).parents[2] / "examples/benchmarks"


@pytest.fixture
def goodput(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module of the script."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("goodput")


@pytest.mark.cases(1)
@pytest.mark.parametrize(("stall_s", "save_s"), [(0.5, 0.5), (0.1, 3.0)])
@pytest.mark.parametrize("period_s", [1.0, 5.0, 40.0])
def test_theory_is_the_mean_of_many_kills(
    goodput: ModuleType, stall_s: float, save_s: float, period_s: float
) -> None:
    """Daly's expectation equals the count over a hundred thousand failures.

    Two effects of counting are small compared with the time between failures: the first save after
    a start has no stall before it, and it is published one stall after its state.
    """
    costs = goodput.Costs(step_s=0.1, stall_s=stall_s, save_s=save_s, restart_s=2.0)
    counted = goodput.goodput_at(goodput.kill_times(100.0, 100_000, seed=1), period_s, costs)
    assert counted == pytest.approx(goodput.goodput_of(period_s, costs, 100.0), rel=0.02)


def test_kill_times_are_exponential(goodput: ModuleType) -> None:
    """The mean of few times is already exact, and so is the number of times above it."""
    times = goodput.kill_times(15.0, 1000, seed=2)
    assert sum(times) / 1000 == pytest.approx(15.0, rel=0.01)
    assert sum(time > 15.0 for time in times) == pytest.approx(1000 / 2.71828, abs=1)
    assert times != sorted(times)


@pytest.mark.long
def test_goodput_follows_from_the_records(goodput: ModuleType, tmp_path: Path) -> None:
    """A short run of the whole benchmark with background saves; a busy machine may reach none.

    The script fails if a start continues from another step than that of the newest checkpoint, so
    all counted steps are useful.
    """
    command: list[str | Path] = [sys.executable, BENCHMARKS / "goodput.py", "--async-save"]
    command += ["--mtbf", "8", "--kills", "2", "--intervals", "0.2", "2", "--parameters", "1e5"]
    command += ["--undisturbed", "0.5", "--folder", tmp_path, "--out", tmp_path / "out"]
    output_of(command, tmp_path, {**os.environ, "PYTHONPATH": str(BENCHMARKS.parents[1])})
    found = json.loads((tmp_path / "out/goodput.json").read_text())
    wanted_s = goodput.kill_times(8.0, 2, seed=1)
    assert [row["interval_s"] for row in found["rows"]] == [0.2, 2.0]
    for row in found["rows"]:
        cycles = found["cycles"][str(row["interval_s"])]
        killed_s = [cycle["killed_after_s"] for cycle in cycles]
        assert all(at >= wanted for at, wanted in zip(killed_s, wanted_s, strict=True))
        steps = sum(cycle["useful_steps"] for cycle in cycles)
        assert row["measured"] == pytest.approx(steps * mean(found["steps_s"]) / sum(killed_s))
    text = (tmp_path / "out/goodput.md").read_text()
    assert all(f"| {row['interval_s']:g} | " in text for row in found["rows"])
    assert (tmp_path / "out/goodput.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
