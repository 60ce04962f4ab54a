"""Measure the goodput of a run that is killed at random, by save interval, and compare with theory.

    python examples/benchmarks/goodput.py [--mtbf 15] [--intervals 0.5 1 3 9] [--kills 6]

Real ranks train, save at an interval, are killed (SIGKILL, all at once) at exponentially
distributed times and are restarted from ``ckpt_path="last"``. Goodput is useful time over wall
time. Useful time is the number of steps in published checkpoints at the end, times the duration of
a step in an undisturbed run. Runs with each interval and undisturbed runs take turns, so that other
load on the machine affects all of them; in one turn all are killed after the same time. Processes
are forked from one that has imported all modules; otherwise restarts would take most of the time.
The times of the kills are stratified: one from each n-th of the distribution, in random order, so
that few of them represent it.

Theory is the expected time of J. T. Daly, A higher order estimate of the optimum checkpoint
interval for restart dumps, Future Generation Computer Systems 22 (2006), 303-312: with M between
failures, R for a restart, a stall of d seconds and P seconds from one save's call to the next

    goodput = (P - d) / M * exp(-R / M) / (exp(P / M) - 1)

d, R and the duration of a step are means of the measurements of the same run. P is the interval
plus half a step, since a save is called at the end of a batch. A failure also loses the time that a
background save takes until it is published, at every interval, so this time counts as part of R.
"At these kills" applies the same formula to the times of the kills instead of their distribution:
its difference from the measurement is not due to the random times.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from goodput_run import PATIENCE_S, Run, RunSettings  # type: ignore[import-not-found]


@dataclass(frozen=True)
class Cycle:
    """The time from one kill to the next."""

    killed_after_s: float
    useful_steps: int
    restart_s: float = math.nan
    """Time until training continued; NaN if the run was killed before."""

    stalls_s: list[float] = field(default_factory=list)
    saves_s: list[float] = field(default_factory=list)
    """Times until publication."""


@dataclass(frozen=True)
class Costs:
    """Inputs of the theory, in seconds."""

    step_s: float
    stall_s: float
    save_s: float
    restart_s: float


def goodput_of(period_s: float, costs: Costs, mtbf_s: float) -> float:
    """Return the goodput that Daly's model expects.

    Args:
        period_s: from one save's call to the next.
        costs: measured costs.
        mtbf_s: mean time between failures.
    """
    lost_s = costs.restart_s + costs.save_s - costs.stall_s
    useful = (period_s - costs.stall_s) / mtbf_s
    return useful * math.exp(-lost_s / mtbf_s) / math.expm1(period_s / mtbf_s)


def goodput_at(kills_s: Sequence[float], period_s: float, costs: Costs) -> float:
    """Return the expected goodput of the same run with failures at these times."""
    useful_s = 0.0
    for kill_s in kills_s:
        # The clock of ModelCheckpoint starts with training: the first save has no stall before it.
        saves = int(max(kill_s - costs.restart_s - costs.save_s, 0.0) / period_s)
        useful_s += saves * period_s - max(saves - 1, 0) * costs.stall_s
    return useful_s / sum(kills_s)


def period_of(interval_s: float, costs: Costs) -> float:
    """Return the seconds between saves for a ``train_time_interval``."""
    return max(interval_s + costs.step_s / 2, costs.stall_s + costs.step_s)


def kill_times(mtbf_s: float, kills: int, seed: int) -> list[float]:
    """Return exponentially distributed times, one from each part of the distribution."""
    random_numbers = random.Random(seed)
    parts = random_numbers.sample(range(kills), kills)
    return [-mtbf_s * math.log1p(-(part + random_numbers.random()) / kills) for part in parts]


def run_until_kill(run: Run, kill_s: float, step_s: float) -> Cycle:
    """Start a run, and kill it after this many seconds."""
    before = run.published_step()
    run.start()
    run.wait_until(run.began + kill_s)
    seconds = run.kill()
    starts = run.events("start")
    if starts and starts[0]["step"] != before:
        sys.exit(f"resumed from step {starts[0]['step']} of a checkpoint of step {before}")
    return cycle_of(run, seconds, run.published_step() - before, step_s)


def cycle_of(run: Run, killed_after_s: float, useful_steps: int, step_s: float) -> Cycle:
    """Return the events of a run until its kill."""
    steps, saves = run.events("step"), run.events("save")
    return Cycle(
        killed_after_s,
        useful_steps,
        max(steps[0]["at"] - run.began - step_s, 0.0) if steps else math.nan,
        [save["stall_s"] for save in saves],
        [save["save_s"] for save in saves],
    )


def undisturbed_step(run: Run, seconds: float) -> float:
    """Return the duration of a step without saves and kills."""
    run.start()
    is_running = run.wait_until(run.began + PATIENCE_S, lambda: len(run.events("step")) > 1)
    if is_running:
        run.wait_until(time.monotonic() + seconds)
    run.kill()
    if not is_running:
        sys.exit(f"an undisturbed run had not taken two steps after {PATIENCE_S} s")
    times = [step["at"] for step in run.events("step")][1:]
    return float(times[-1] - times[0]) / (len(times) - 1)


def first_checkpoint(run: Run) -> Cycle:
    """Make a checkpoint from which all runs start, like after a kill; return its cost."""
    run.start()
    saved = run.wait_until(run.began + PATIENCE_S, lambda: bool(run.events("save")))
    seconds = run.kill()
    if not saved:
        sys.exit(f"a run had not saved anything after {PATIENCE_S} s")
    return cycle_of(run, seconds, useful_steps=0, step_s=0.0)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run every interval once in each turn; return all measurements."""
    # The process from which ranks are forked finds these scripts, and imports all modules once.
    found = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(PYTHONPATH=os.pathsep.join(found), DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["goodput_worker"])

    def run(name: str, interval_s: float | None) -> Run:
        own = (options.ranks, options.stage, options.parameters, options.batch, options.async_save)
        return Run(context, RunSettings(folder / name, interval_s, *own))

    runs = {interval_s: run(f"every-{interval_s}", interval_s) for interval_s in options.intervals}
    undisturbed, first = run("undisturbed", None), run("first", 0.0)
    cycles: dict[float, list[Cycle]] = {interval_s: [] for interval_s in runs}
    steps_s: list[float] = []
    try:
        first_cycle = first_checkpoint(first)
        for one in runs.values():
            source = first.settings.folder / "checkpoints"
            shutil.copytree(source, one.settings.folder / "checkpoints", symlinks=True)
        for turn, kill_s in enumerate(kill_times(options.mtbf, options.kills, options.seed)):
            steps_s.append(undisturbed_step(undisturbed, options.undisturbed))
            for interval_s, one in runs.items():
                cycles[interval_s].append(run_until_kill(one, kill_s, steps_s[-1]))
            done = f"turn {turn + 1} of {options.kills}: killed after {kill_s:.1f} s"
            print(f"{done}, a step {steps_s[-1]:.3f} s", file=sys.stderr, flush=True)
    finally:
        for one in (undisturbed, first, *runs.values()):
            one.kill()
    return {"steps_s": steps_s, "cycles": cycles, "first": first_cycle}


def evaluate(options: argparse.Namespace, measured: dict[str, Any]) -> dict[str, Any]:
    """Return measured and expected goodputs, and the inputs of the latter."""
    cycles: dict[float, list[Cycle]] = measured["cycles"]
    every = [cycle for of_interval in cycles.values() for cycle in of_interval]
    # If all were killed before, use the first run.
    saved = [cycle for cycle in every if cycle.saves_s] or [measured["first"]]
    resumed = [c for c in every if not math.isnan(c.restart_s)] or [measured["first"]]
    costs = Costs(
        step_s=mean(measured["steps_s"]),
        stall_s=mean(stall_s for cycle in saved for stall_s in cycle.stalls_s),
        save_s=mean(save_s for cycle in saved for save_s in cycle.saves_s),
        restart_s=mean(cycle.restart_s for cycle in resumed),
    )
    rows = []
    for interval_s, of_interval in cycles.items():
        kills_s = [cycle.killed_after_s for cycle in of_interval]
        period_s = period_of(interval_s, costs)
        steps = sum(cycle.useful_steps for cycle in of_interval)
        row = {
            "interval_s": interval_s,
            "seconds": sum(kills_s),
            "steps": steps,
            "saves": sum(len(cycle.stalls_s) for cycle in of_interval),
            "measured": steps * costs.step_s / sum(kills_s),
            "at_these_kills": goodput_at(kills_s, period_s, costs),
            "theory": goodput_of(period_s, costs, options.mtbf),
        }
        rows.append(row)
    return {"costs": asdict(costs), "rows": rows}


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mtbf", type=float, default=15.0, help="mean seconds between kills")
    default = [0.5, 1.0, 3.0, 9.0]
    parser.add_argument("--intervals", type=float, nargs="+", default=default, help="seconds")
    parser.add_argument("--kills", type=int, default=6, help="of the run with each interval")
    parser.add_argument("--undisturbed", type=float, default=3.0, help="seconds in each turn")
    parser.add_argument("--parameters", type=float, default=4e6)
    parser.add_argument("--batch", type=int, default=8, help="samples per step and rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--async-save", action="store_true", help="save in the background")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="a disk to save to")
    parser.add_argument("--out", type=Path, default=Path(".cache/goodput"), help="all outputs")
    return parser.parse_args()


def main() -> None:
    """Run all measurements, and report them."""
    options = parse_options()
    # Ending this process ends its ranks: as an exception, the signal reaches the code that kills
    # them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        measured = measure(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # Imported late: each rank imports this script, and does not need a plotting library.
    from goodput_report import report  # type: ignore[import-not-found]

    report(options, evaluate(options, measured), measured)


if __name__ == "__main__":
    main()
