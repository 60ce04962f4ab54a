"""Measure goodput by save interval, of a run that is killed at random, beside what theory gives.

    python examples/benchmarks/goodput.py [--mtbf 15] [--intervals 0.5 1 3 9] [--kills 6]

Real ranks train, save every so many seconds, are killed (SIGKILL, all at once) at exponentially
distributed times and are started again from ``ckpt_path="last"``. Goodput is useful time over wall
time: steps that a published checkpoint holds at the end, times what a step takes in a run to which
nothing happens. Runs with each interval, and undisturbed ones, take turns, so that what else the
machine does is shared; in one turn all are killed after the same time. Processes are forked from
one that has imported all, or restarts would take most of the time. The times of the kills are
stratified: one in each n-th of the distribution, in random order, so that few of them represent it.

Theory is the expected time of J. T. Daly, A higher order estimate of the optimum checkpoint
interval for restart dumps, Future Generation Computer Systems 22 (2006), 303-312: with M between
failures, R for a restart, a stall of d seconds and P seconds from one save's call to the next one's

    goodput = (P - d) / M * exp(-R / M) / (exp(P / M) - 1)

d, R and the time of a step are means of what was measured in the same run. P is the interval and
half a step, because a save is called at the end of a batch. What a save in the background takes
until it is published is lost with a failure at every interval, as a restart is, and counts as part
of R. "At these kills" is the same arithmetic for the times at which this run was killed, instead of
their distribution: what is left between it and the measurement is not the luck of the draw.
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
    """From one kill to the next."""

    killed_after_s: float
    useful_steps: int
    restart_s: float = math.nan
    """Until training went on; NaN where it was killed before."""

    stalls_s: list[float] = field(default_factory=list)
    saves_s: list[float] = field(default_factory=list)
    """Until published."""


@dataclass(frozen=True)
class Costs:
    """What theory is told, in seconds."""

    step_s: float
    stall_s: float
    save_s: float
    restart_s: float


def goodput_of(period_s: float, costs: Costs, mtbf_s: float) -> float:
    """Return the goodput that Daly's model expects.

    Args:
        period_s: from one save's call to the next one's.
        costs: as measured.
        mtbf_s: mean time between failures.
    """
    lost_s = costs.restart_s + costs.save_s - costs.stall_s
    useful = (period_s - costs.stall_s) / mtbf_s
    return useful * math.exp(-lost_s / mtbf_s) / math.expm1(period_s / mtbf_s)


def goodput_at(kills_s: Sequence[float], period_s: float, costs: Costs) -> float:
    """Return the goodput that the same run would have with failures at these times."""
    useful_s = 0.0
    for kill_s in kills_s:
        # ModelCheckpoint's clock begins with training: before the first save there is no stall.
        saves = int(max(kill_s - costs.restart_s - costs.save_s, 0.0) / period_s)
        useful_s += saves * period_s - max(saves - 1, 0) * costs.stall_s
    return useful_s / sum(kills_s)


def period_of(interval_s: float, costs: Costs) -> float:
    """Return the seconds between saves that ``train_time_interval`` leads to."""
    return max(interval_s + costs.step_s / 2, costs.stall_s + costs.step_s)


def kill_times(mtbf_s: float, kills: int, seed: int) -> list[float]:
    """Return exponentially distributed times, one from each part of the distribution."""
    random_numbers = random.Random(seed)
    parts = random_numbers.sample(range(kills), kills)
    return [-mtbf_s * math.log1p(-(part + random_numbers.random()) / kills) for part in parts]


def live_through(run: Run, kill_s: float, step_s: float) -> Cycle:
    """Start a run and kill it after so many seconds."""
    before = run.published_step()
    run.start()
    run.wait_until(run.began + kill_s)
    seconds = run.kill()
    starts = run.events("start")
    if starts and starts[0]["step"] != before:
        sys.exit(f"went on from step {starts[0]['step']} of a checkpoint of step {before}")
    return cycle_of(run, seconds, run.published_step() - before, step_s)


def cycle_of(run: Run, killed_after_s: float, useful_steps: int, step_s: float) -> Cycle:
    """Return what a run has noted until it was killed."""
    steps, saves = run.events("step"), run.events("save")
    return Cycle(
        killed_after_s,
        useful_steps,
        max(steps[0]["at"] - run.began - step_s, 0.0) if steps else math.nan,
        [save["stall_s"] for save in saves],
        [save["save_s"] for save in saves],
    )


def undisturbed_step(run: Run, seconds: float) -> float:
    """Return what a step takes where nothing is saved and nobody is killed."""
    run.start()
    began = run.wait_until(run.began + PATIENCE_S, lambda: len(run.events("step")) > 1)
    if began:
        run.wait_until(time.monotonic() + seconds)
    run.kill()
    if not began:
        sys.exit(f"an undisturbed run had not taken two steps after {PATIENCE_S} s")
    times = [step["at"] for step in run.events("step")][1:]
    return float(times[-1] - times[0]) / (len(times) - 1)


def first_checkpoint(run: Run) -> Cycle:
    """Make a checkpoint for all runs to begin with, as restarts do; return what it cost."""
    run.start()
    saved = run.wait_until(run.began + PATIENCE_S, lambda: bool(run.events("save")))
    seconds = run.kill()
    if not saved:
        sys.exit(f"a run had not saved anything after {PATIENCE_S} s")
    return cycle_of(run, seconds, useful_steps=0, step_s=0.0)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Take every interval once in each turn; return all that was measured."""
    # The process that ranks are forked from finds these scripts, and imports all once.
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
        begun = first_checkpoint(first)
        for one in runs.values():
            begin = first.settings.folder / "checkpoints"
            shutil.copytree(begin, one.settings.folder / "checkpoints", symlinks=True)
        for turn, kill_s in enumerate(kill_times(options.mtbf, options.kills, options.seed)):
            steps_s.append(undisturbed_step(undisturbed, options.undisturbed))
            for interval_s, one in runs.items():
                cycles[interval_s].append(live_through(one, kill_s, steps_s[-1]))
            done = f"turn {turn + 1} of {options.kills}: killed after {kill_s:.1f} s"
            print(f"{done}, a step {steps_s[-1]:.3f} s", file=sys.stderr, flush=True)
    finally:
        for one in (undisturbed, first, *runs.values()):
            one.kill()
    return {"steps_s": steps_s, "cycles": cycles, "first": begun}


def evaluate(options: argparse.Namespace, measured: dict[str, Any]) -> dict[str, Any]:
    """Return goodputs, measured and expected, and what the latter follow from."""
    cycles: dict[float, list[Cycle]] = measured["cycles"]
    every = [cycle for of_interval in cycles.values() for cycle in of_interval]
    # Where none came so far before it was killed, what the first run of all has told.
    saved = [cycle for cycle in every if cycle.saves_s] or [measured["first"]]
    went_on = [c for c in every if not math.isnan(c.restart_s)] or [measured["first"]]
    costs = Costs(
        step_s=mean(measured["steps_s"]),
        stall_s=mean(stall_s for cycle in saved for stall_s in cycle.stalls_s),
        save_s=mean(save_s for cycle in saved for save_s in cycle.saves_s),
        restart_s=mean(cycle.restart_s for cycle in went_on),
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
    """Return what was asked for."""
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
    parser.add_argument("--async-save", action="store_true", help="save behind training")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="a disk to save to")
    parser.add_argument("--out", type=Path, default=Path(".cache/goodput"), help="all outputs")
    return parser.parse_args()


def main() -> None:
    """Run everything, and report what was measured."""
    options = parse_options()
    # Whoever ends this ends its processes too: as an exception it passes where they are killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        measured = measure(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # Not before: each rank imports this script, and needs no library for plots.
    from goodput_report import report  # type: ignore[import-not-found]

    report(options, evaluate(options, measured), measured)


if __name__ == "__main__":
    main()
