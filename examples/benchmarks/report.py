"""What a run of the benchmark has found, as a table and a picture."""

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

BASELINES = {
    ": the call": "copy in memory",
    "cold": "cold read into memory",
    "load": "warm read into memory",
    "save": "raw write and sync",
}
"""What a way is compared with, by words in its name, or by what it does; the first that fits."""

OURS, OTHERS, MB = "this library", ("stock DeepSpeed", "torch.distributed.checkpoint"), 1e6
COLORS = {OURS: "#0b6e99", OTHERS[0]: "#d9730d", OTHERS[1]: "#4f7f3b"}
OTHER_COLOR = "#9b9b9b"

Costs = Mapping[str, Sequence[Mapping[str, float]]]


def machine(device: str) -> dict[str, Any]:
    """Return what the figures hold for."""
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
    """Return how much longer a way took than another, round by round."""
    pairs = zip(costs[way], costs[base], strict=True)
    return [one["seconds"] / other["seconds"] for one, other in pairs]


def _base_of(way: str, verb: str) -> str | None:
    words = (base for word, base in BASELINES.items() if word in way or word == verb)
    base = next(words)
    return None if way in BASELINES.values() else base


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _row(way: str, costs: Costs, verb: str, state_bytes: float) -> list[str]:
    of_way = costs[way]
    middle = {key: statistics.median(c[key] for c in of_way) for key in of_way[0]}
    base = _base_of(way, verb)
    return [
        way,
        f"{middle['seconds']:.4f}",
        f"{middle['read'] / state_bytes:.3f}",
        f"{middle['written'] / state_bytes:.3f}",
        f"{middle['disk_read'] / state_bytes:.3f}",
        f"{middle['memory'] / MB:.1f}",
        f"{middle['temporary_disk'] / state_bytes:.3f}" if "temporary_disk" in middle else "",
        _range(ratios(costs, way, base)) if base else "",
        *(_beside(other, way, costs) for other in OTHERS),
    ]


def _beside(other: str, way: str, costs: Costs) -> str:
    """Return how much longer this library took than other software for the same thing."""
    same = way.replace(OURS, other)
    return _range(ratios(costs, way, same)) if same != way and same in costs else ""


_TITLES = (
    "way",
    "seconds",
    "read / state",
    "written / state",
    "from disk / state",
    "memory of a rank, MB",
    "temporary disk / state",
    "times the machine's limit",
    "times stock's",
    "times torch's",
)


def _sections(result: Mapping[str, Any]) -> Iterator[tuple[str, str, Costs]]:
    """Yield verb, what it is done with, and its costs."""
    for verb in ("save", "load"):
        for name, costs in result["figures"][verb].items():
            yield verb, name, costs


def table(result: Mapping[str, Any]) -> str:
    """Return all figures as Markdown."""
    here = result["machine"]
    heading = (
        f"{result['state_bytes'] / MB:.0f} MB of state (fp32 masters, Adam's two moments), "
        f"{result['rounds']} rounds, medians; ratios round by round with least and greatest. "
        "Bytes are summed over ranks, without those of a process that torch starts; memory is the "
        "most that one rank held above what it held before, temporary disk what a save over its "
        f"last one takes above what is there before and after. The machine: {here['cores']} cores, "
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
    """Draw the seconds of all saves and loads, each way beside the others."""
    sections = list(_sections(result))
    # So that each bar is as thick, whichever ways are in its section.
    bars = [len(costs) + 2 for _, _, costs in sections]
    figure = Figure(figsize=(9, 0.5 + 0.16 * sum(bars)), layout="constrained")
    all_axes = figure.subplots(len(sections), 1, squeeze=False, height_ratios=bars)[:, 0]
    for axes, (verb, name, costs) in zip(all_axes, sections, strict=True):
        ways = list(costs)
        seconds = [[cost["seconds"] for cost in costs[way]] for way in ways]
        middle = [statistics.median(of_way) for of_way in seconds]
        lows = [m - min(s) for m, s in zip(middle, seconds, strict=True)]
        highs = [max(s) - m for m, s in zip(middle, seconds, strict=True)]
        colors = [
            next((color for word, color in COLORS.items() if word in way), OTHER_COLOR)
            for way in ways
        ]
        axes.barh(ways, middle, color=colors, xerr=(lows, highs), error_kw={"lw": 0.8})
        axes.invert_yaxis()
        axes.set_title(f"{verb}, {name}", fontsize=8, loc="left")
        axes.tick_params(labelsize=6)
    all_axes[-1].set_xlabel("seconds: median, least and greatest", fontsize=7)
    figure.savefig(path, dpi=110)
