"""The results of ``goodput.py`` as a table and a picture."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from goodput import Costs, goodput_of, period_of  # type: ignore[import-not-found]
from matplotlib.figure import Figure
from report import machine  # type: ignore[import-not-found]


def report(
    options: argparse.Namespace, result: dict[str, Any], measured: Mapping[str, Any]
) -> None:
    """Print the table, and write the table, the picture and all figures to files."""
    optimum_s = math.sqrt(2 * result["costs"]["stall_s"] * options.mtbf)  # Young 1974
    result |= {"machine": machine("cpu"), "optimum_s": optimum_s}
    text = table(options, result)
    options.out.mkdir(parents=True, exist_ok=True)
    cycles = {i: [asdict(cycle) for cycle in of] for i, of in measured["cycles"].items()}
    raw = {"steps_s": measured["steps_s"], "cycles": cycles}
    (options.out / "goodput.json").write_text(json.dumps({**result, **raw}, indent=1))
    (options.out / "goodput.md").write_text(text)
    draw(options, result, options.out / "goodput.png")
    print(text)
    print(f"written: {options.out}/goodput.json, goodput.md, goodput.png")


def table(options: argparse.Namespace, result: Mapping[str, Any]) -> str:
    """Return all results as Markdown."""
    costs, here = result["costs"], result["machine"]
    way = "in the background" if options.async_save else "while training waits"
    heading = (
        f"ZeRO-{options.stage} on {options.ranks} ranks, {options.parameters / 1e6:g} million "
        f"parameters, saves {way}, {options.kills} kills with each interval, {options.mtbf:g} s "
        f"apart on average. Measured: a step {costs['step_s']:.3f} s, a save's stall "
        f"{costs['stall_s']:.2f} s, until published {costs['save_s']:.2f} s, a restart "
        f"{costs['restart_s']:.2f} s. Best interval by theory: {result['optimum_s']:.1f} s. The "
        f"machine: {here['cores']} cores, load {here['load_average']:.1f}."
    )
    lines = [
        heading,
        "",
        "| interval, s | wall, s | saves | useful steps | goodput | theory | at these kills |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['interval_s']:g} | {row['seconds']:.0f} | {row['saves']} | {row['steps']} | "
        f"{row['measured']:.3f} | {row['theory']:.3f} | {row['at_these_kills']:.3f} |"
        for row in result["rows"]
    ]
    return "\n".join([*lines, ""])


def draw(options: argparse.Namespace, result: Mapping[str, Any], path: Path) -> None:
    """Draw goodput by interval."""
    costs, rows = Costs(**result["costs"]), result["rows"]
    intervals = [row["interval_s"] for row in rows]
    low, high = min(intervals) / 1.5, max(intervals) * 1.5
    curve = [low * (high / low) ** (i / 200) for i in range(201)]
    expected = [goodput_of(period_of(i, costs), costs, options.mtbf) for i in curve]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(curve, expected, color="0.5", label="theory (Daly 2006)")
    at_kills = [row["at_these_kills"] for row in rows]
    axes.plot(intervals, at_kills, "x", color="#d9730d", label="the same, at these kills")
    axes.plot(intervals, [row["measured"] for row in rows], "o", color="#0b6e99", label="measured")
    axes.axvline(result["optimum_s"], color="0.5", linestyle=":", label="best interval by theory")
    axes.set_xscale("log")
    axes.set_xticks(intervals, [f"{interval:g}" for interval in intervals])
    axes.minorticks_off()
    axes.set_ylim(0, 1)
    axes.set_xlabel(f"seconds between saves, where failures are {options.mtbf:g} s apart")
    axes.set_ylabel("goodput")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
