"""The result of a benchmark as a table and a plot of ratios."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

BASELINES = {"load": "raw read into existing memory", "save": "raw write and sync"}
STALL = ": the call"
OURS, OTHERS, MB = "this library", ("stock DeepSpeed", "torch.distributed.checkpoint"), 1e6
COLORS = {OTHERS[0]: "#d9730d", OTHERS[1]: "#4f7f3b"}

Costs = Mapping[str, Sequence[Mapping[str, float]]]


def machine(device: str) -> dict[str, Any]:
    """Return the hardware, the system and the releases of a measurement."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    releases = ("torch", "deepspeed", "lightning")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "memory_bytes": pages,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        **{name: metadata.version(name) for name in releases},
    }


def ratios(costs: Costs, way: str, base: str) -> list[float]:
    """Return the ratio of the times of two methods, for each round."""
    pairs = zip(costs[way], costs[base], strict=True)
    return [one["seconds"] / other["seconds"] for one, other in pairs]


def _base_of(way: str, verb: str) -> str | None:
    base = "copy in memory" if STALL in way else BASELINES[verb]
    return base if way not in {base, BASELINES[verb]} else None


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _row(way: str, costs: Costs, verb: str, state_bytes: float) -> list[str]:
    of_way = costs[way]
    middle = {key: statistics.median(c[key] for c in of_way) for key in of_way[0]}
    base = _base_of(way, verb)
    return [
        way,
        f"{middle['seconds']:.4f}",
        f"{state_bytes / middle['seconds'] / 1e9:.2f}",
        f"{middle['system']:.4f}",
        f"{middle['faults']:.0f}",
        f"{middle['read'] / state_bytes:.3f}",
        f"{middle['written'] / state_bytes:.3f}",
        f"{middle['disk_read'] / state_bytes:.3f}",
        f"{middle['memory'] / MB:.1f}",
        f"{middle['temporary_disk'] / state_bytes:.3f}" if "temporary_disk" in middle else "",
        _range(ratios(costs, way, base)) if base else "",
        *(_range(r) if (r := _compared(way, other, costs)) else "" for other in OTHERS),
    ]


def _compared(way: str, other: str, costs: Costs) -> list[float]:
    """Return the ratio of this library's time to that of other software, if both were measured."""
    same = way.replace(OURS, other)
    return ratios(costs, way, same) if same != way and same in costs else []


_TITLES = (
    "way",
    "seconds",
    "state per second, GB",
    "system time, s",
    "page faults",
    "read / state",
    "written / state",
    "read from disk / state",
    "memory of one rank, MB",
    "temporary disk / state",
    "/ raw",
    "/ stock DeepSpeed",
    "/ DCP",
)


def _sections(result: Mapping[str, Any]) -> Iterator[tuple[str, str, Costs]]:
    """Yield the verb, the engine and ranks, and the costs of each method."""
    for verb in ("save", "load"):
        for name, costs in result["figures"][verb].items():
            yield verb, name, costs


def table(result: Mapping[str, Any]) -> str:
    """Return all figures as Markdown."""
    here = result["machine"]
    heading = (
        f"{result['state_bytes'] / MB:.0f} MB of state (fp32 masters, Adam's two moments), "
        f"{result['rounds']} rounds; medians, and ratios round by round with minimum and maximum. "
        "System time, page faults and bytes are sums over ranks, without processes that torch "
        "starts; memory is the maximum that a rank allocated; temporary disk is the space of a "
        "save beyond the last checkpoint. Raw reads compute the checksums of a load. "
        f"DCP: torch.distributed.checkpoint. Machine: {here['cores']} cores, "
        f"load {here['load_average']:.1f}, {here['memory_bytes'] / 1e9:.0f} GB, {here['device']}, "
        f"{here['system']}; torch {here['torch']}, DeepSpeed {here['deepspeed']}, Python "
        f"{here['python']}."
    )
    lines = [heading]
    for verb, name, costs in _sections(result):
        lines += ["", f"**{verb}, {name}**", "", "| " + " | ".join(_TITLES) + " |"]
        lines.append("|" + "---|" * len(_TITLES))
        rows = (_row(way, costs, verb, result["state_bytes"]) for way in costs)
        lines += ["| " + " | ".join(row) + " |" for row in rows]
    for name, of_name in result["figures"]["convert"].items():
        seconds = [cost["seconds"] for cost in of_name]
        kept, temporary = (
            of_name[0][key] / result["state_bytes"] for key in ("disk", "temporary_disk")
        )
        times = f"{kept:.2f} times the state on disk, and {temporary:.2f} times meanwhile"
        lines += ["", f"**ds_to_universal, {name}**: {_range(seconds)} s, {times}"]
    return "\n".join([*lines, ""])


def write_plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw this library's time relative to other software: saves, loads on equal and other counts.

    Points are medians, lines reach from the minimum to the maximum of all rounds.
    """
    panels: dict[str, list[tuple[str, str, list[float]]]] = {}
    for verb, name, costs in _sections(result):
        engine, ranks = name.split(", ")
        equal = len(set(ranks.removesuffix(" ranks").split(" to "))) == 1
        kind = "save" if verb == "save" else f"load, {'same' if equal else 'other'} device count"
        for way in (OURS, f"{OURS}, background{STALL}"):
            for other in OTHERS:
                if found := _compared(way, other, costs):
                    stall = ", stall of a background save" if STALL in way else ""
                    label = f"{engine}, {ranks}{stall}"
                    panels.setdefault(kind, []).append((label, other, found))
    heights = [len(rows) + 1.5 for rows in panels.values()]
    figure = Figure(figsize=(8, 0.8 + 0.26 * sum(heights)), layout="constrained")
    axes_of = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)
    for axes, (kind, rows) in zip(axes_of[:, 0], panels.items(), strict=True):
        for y, (_, other, found) in enumerate(rows):
            axes.plot([min(found), max(found)], [y, y], color=COLORS[other], lw=2)
            axes.plot(statistics.median(found), y, "o", color=COLORS[other], ms=7)
        axes.axvline(1, color="black", lw=0.8)
        axes.set_yticks(range(len(rows)), [label for label, *_ in rows], fontsize=8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_title(kind, fontsize=10, loc="left")
        axes.set_xscale("log")
        axes.set_xticks([0.1, 0.25, 0.5, 1, 2, 4], ["0.1", "0.25", "0.5", "1", "2", "4"])
        axes.minorticks_off()
    figure.supxlabel("time of this library / time of the other; left of 1: faster", fontsize=9)
    marks = [Line2D([], [], color=c, marker="o", label=f"/ {o}") for o, c in COLORS.items()]
    figure.legend(handles=marks, loc="outside upper right", ncols=2, fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
