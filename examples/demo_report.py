"""What the demo shows at the end: a table of its phases and a picture of its loss curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from demo_phases import Phase
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Curve = dict[int, float]
"""A loss, or a difference of losses, for each step from 1."""

TITLES = ("run", "processes", "steps", "lost", "loss", "difference")
TITLES_OF_CHECKPOINTS = ("save s", "load s", "MB saved", "MB read")
COLORS = ("#0b6e99", "#d9730d", "#4f7f3b")


@dataclass(frozen=True)
class Comparison:
    """The loss curves of a run that changed its process count and of one that did not."""

    elastic: Curve
    uninterrupted: Curve

    @property
    def difference(self) -> Curve:
        """How far they are from each other at each step."""
        return {step: abs(self.elastic[step] - loss) for step, loss in self.uninterrupted.items()}


def table(phases: Sequence[Phase], comparison: Comparison) -> str:
    """Say what each phase did, in a line each."""
    rows: list[tuple[str, ...]] = [TITLES + TITLES_OF_CHECKPOINTS]
    rows += [_training(phase, comparison) + _checkpoints(phase) for phase in phases]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]))
    return "\n".join(lines)


def _training(phase: Phase, comparison: Comparison) -> tuple[str, ...]:
    """Give a phase's steps, losses and distance from the uninterrupted run."""
    losses = phase.losses()
    first, last = phase.start_step + 1, phase.stop_step
    distance = max(comparison.difference[step] for step in range(first, last + 1))
    return (
        phase.run,
        str(phase.processes),
        f"{first}-{last}",
        str(max(losses) - last),
        f"{losses[first]:.3f} > {losses[last]:.3f}",
        f"{distance:.1e}" if phase.run == "elastic" else "",
    )


def _checkpoints(phase: Phase) -> tuple[str, ...]:
    """Give a phase's last save, and its load if it had one."""
    events = {event.event: event for event in phase.events()}
    start, save = events["start"], events["save"]
    loaded = start.bytes > 0
    return (
        f"{save.seconds:.2f}",
        f"{start.seconds:.2f}" if loaded else "",
        f"{save.bytes / 1e6:.1f}",
        f"{start.bytes / 1e6:.1f}" if loaded else "",
    )


def draw(phases: Sequence[Phase], comparison: Comparison, path: Path) -> None:
    """Draw both curves and, below them, how far they are from each other."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw_losses(losses, phases, comparison)
    _draw_differences(differences, phases, comparison)
    for axes in (losses, differences):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)


def _draw_losses(axes: Axes, phases: Sequence[Phase], comparison: Comparison) -> None:
    """Draw the uninterrupted run as a broad band, the elastic one on top of it."""
    reference = comparison.uninterrupted
    label = "4 processes, never stopped"
    axes.plot(list(reference), list(reference.values()), color="0.82", linewidth=6, label=label)
    elastic = [phase for phase in phases if phase.run == "elastic"]
    for phase, color in zip(elastic, COLORS, strict=True):
        label = f"{phase.processes} processes, steps {phase.start_step + 1} to {phase.stop_step}"
        axes.plot(*_part(comparison.elastic, phase), color=color, linewidth=1.8, label=label)
    for before, after in pairwise(elastic):
        axes.annotate(
            f"killed\n{before.processes} \N{RIGHTWARDS ARROW} {after.processes} processes",
            (after.start_step, 0.86),
            xycoords=("data", "axes fraction"),
            xytext=(6, 0),
            textcoords="offset points",
            color="0.35",
        )
        axes.axvline(after.start_step, color="0.5", linestyle=":", linewidth=1.2)
    axes.set_ylabel("training loss (nats per character)")
    axes.set_title("One ZeRO-3 run on 4, then 2, then 3 processes, and one that was never stopped")
    axes.legend(frameon=False, loc="upper right")


def _draw_differences(axes: Axes, phases: Sequence[Phase], comparison: Comparison) -> None:
    """Draw the absolute difference."""
    elastic = [phase for phase in phases if phase.run == "elastic"]
    for phase, color in zip(elastic, COLORS, strict=True):
        steps = range(phase.start_step + 1, phase.stop_step + 1)
        axes.bar(steps, [comparison.difference[step] for step in steps], color=color)
        if phase.start_step:
            axes.axvline(phase.start_step, color="0.5", linestyle=":", linewidth=1.2)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("difference")
    axes.set_xlabel("optimizer step")
    axes.set_xticks([0, *(phase.stop_step for phase in elastic)])


def _part(curve: Curve, phase: Phase) -> tuple[list[int], list[float]]:
    """Cut out a phase, with the step before it: so the pieces of a line meet."""
    steps = [step for step in curve if phase.start_step <= step <= phase.stop_step]
    return steps, [curve[step] for step in steps]
