"""The report of the demo: a table of its phases and a picture of its loss curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from demo_phases import Event, Phase
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Run = dict[int, Event]
"""The event of each step, from 1."""

Curve = dict[int, float]
"""A loss, or a difference of losses, for each step from 1."""

TITLES = ("run", "processes", "steps", "lost", "loss", "difference", "same samples")
TITLES_OF_CHECKPOINTS = ("save s", "load s", "MB saved", "MB read")
COLORS = ("#0b6e99", "#d9730d", "#4f7f3b")
OTHER_COLOR = "#a3245a"


@dataclass(frozen=True)
class Comparison:
    """Runs, one of which was never interrupted."""

    runs: Mapping[str, Run]

    @classmethod
    def of(cls, *runs: Sequence[Phase]) -> Comparison:
        """Join the phases of each run; a run has the name of its last phase."""
        return cls({phases[-1].run: _joined(phases) for phases in runs})

    def losses(self, run: str) -> Curve:
        """Return a run's loss at each step."""
        return {step: event.loss for step, event in self.runs[run].items()}

    def difference(self, run: str) -> Curve:
        """Return the distance of a run's loss from the uninterrupted one at each step."""
        losses = self.losses(run)
        reference = self.losses("uninterrupted")
        return {step: abs(losses[step] - reference[step]) for step in losses.keys() & reference}

    def same_samples(self, run: str) -> set[int]:
        """Return the steps in which a run used the same samples as the uninterrupted one."""
        reference = self.runs["uninterrupted"]
        return {
            step
            for step, event in self.runs[run].items()
            if event.samples and step in reference and event.samples == reference[step].samples
        }


def _joined(phases: Sequence[Phase]) -> Run:
    """Return the events of a run's steps; a lost step counts when it is repeated."""
    run: Run = {}
    for phase in phases:
        run |= {step: event for step, event in phase.steps().items() if step <= phase.stop_step}
    return dict(sorted(run.items()))


def summarize(comparison: Comparison) -> str:
    """Return a summary of the distances from the uninterrupted run."""
    losses = comparison.losses("uninterrupted")
    step, largest = _largest(comparison, "elastic")
    other_step, other = _largest(comparison, "weights-only")
    return (
        f"In {len(losses)} steps the loss fell from {losses[1]:.3f} to {losses[max(losses)]:.3f}. "
        f"The elastic run took the same samples in {len(comparison.same_samples('elastic'))} of "
        f"them,\nand its curve was never further away than {largest:.1e} (at step {step}). With "
        f"the weights alone it was {other:.2f} (at step {other_step})."
    )


def _largest(comparison: Comparison, run: str) -> tuple[int, float]:
    return max(comparison.difference(run).items(), key=lambda item: item[1])


def table(phases: Sequence[Phase], comparison: Comparison) -> str:
    """Return a table with one line for each phase."""
    rows: list[tuple[str, ...]] = [TITLES + TITLES_OF_CHECKPOINTS]
    rows += [_training(phase, comparison) + _checkpoints(phase) for phase in phases]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]))
    return "\n".join(lines)


def _training(phase: Phase, comparison: Comparison) -> tuple[str, ...]:
    """Return a phase's steps, losses and distance from the uninterrupted run."""
    done = phase.steps()
    first, last = phase.start_step + 1, phase.stop_step
    steps = set(range(first, last + 1))
    difference = comparison.difference(phase.run)
    same = len(steps & comparison.same_samples(phase.run))
    compared = phase.run != "uninterrupted"
    return (
        phase.run,
        str(phase.processes),
        f"{first}-{last}",
        str(max(done) - last),
        f"{done[first].loss:.3f} > {done[last].loss:.3f}",
        f"{max(difference[step] for step in steps):.1e}" if compared else "",
        f"{same} of {len(steps)}" if compared else "",
    )


def _checkpoints(phase: Phase) -> tuple[str, ...]:
    """Return the figures of a phase's last save, and of its load, if any."""
    events = {event.event: event for event in phase.events()}
    start, save = events["start"], events["save"]
    loaded = start.bytes > 0
    return (
        f"{save.seconds:.2f}",
        f"{start.seconds:.2f}" if loaded else "",
        f"{save.bytes / 1e6:.1f}",
        f"{start.bytes / 1e6:.1f}" if loaded else "",
    )


def draw(elastic: Sequence[Phase], comparison: Comparison, path: Path) -> None:
    """Draw the elastic run over the uninterrupted one, with their difference below."""
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.2))
    _draw_losses(losses, elastic, comparison)
    _draw_differences(differences, elastic, comparison)
    for axes in (losses, differences):
        for phase, color in zip(elastic, COLORS, strict=True):
            axes.axvspan(phase.start_step, phase.stop_step, color=color, alpha=0.09, linewidth=0)
        for phase in elastic[1:]:
            axes.axvline(phase.start_step, color="0.35", linestyle=":", linewidth=1.2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0)
    figure.savefig(path, dpi=150)


def _draw_losses(axes: Axes, elastic: Sequence[Phase], comparison: Comparison) -> None:
    """Draw the uninterrupted run as a broad line, and the elastic phases on top of it."""
    reference = comparison.losses("uninterrupted")
    stopped = f"never stopped, on {elastic[0].processes} processes"
    resumed = "killed and resumed, on " + ", ".join(str(phase.processes) for phase in elastic)
    axes.plot(list(reference), list(reference.values()), color="0.7", linewidth=7, label=stopped)
    for phase, color in zip(elastic, COLORS, strict=True):
        steps, losses = _part(comparison.losses("elastic"), phase.start_step, phase.stop_step)
        label = resumed if phase is elastic[0] else None
        axes.plot(steps, losses, color=color, linewidth=2, label=label)
        axes.annotate(
            f"{phase.processes} processes",
            ((phase.start_step + phase.stop_step) / 2, 0.93),
            xycoords=("data", "axes fraction"),
            color=color,
            size=15,
            weight="bold",
            ha="center",
        )
    for before, after in pairwise(elastic):
        axes.annotate(
            "killed in the middle of an epoch;\nstock DeepSpeed refuses "
            f"{before.processes} \N{RIGHTWARDS ARROW} {after.processes}",
            (after.start_step, 0.47),
            xycoords=("data", "axes fraction"),
            xytext=(6, 0),
            textcoords="offset points",
            color="0.25",
            size=9,
        )
    axes.set_ylabel("training loss")
    axes.set_title("One ZeRO-3 run, killed twice, resumed on other numbers of processes")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.9), framealpha=0, edgecolor="none")


def _draw_differences(axes: Axes, elastic: Sequence[Phase], comparison: Comparison) -> None:
    """Draw the absolute differences on a logarithmic scale, which omits zeros."""
    difference = comparison.difference("elastic")
    for phase, color in zip(elastic, COLORS, strict=True):
        steps, heights = _part(difference, phase.start_step + 1, phase.stop_step)
        axes.bar(steps, heights, color=color)
    steps, heights = _part(comparison.difference("weights-only"), elastic[0].stop_step + 1)
    planned = len(comparison.same_samples("weights-only").intersection(steps))
    axes.plot(steps, heights, color=OTHER_COLOR, linewidth=1.2, linestyle="--")
    axes.set_yscale("log")
    axes.set_ylim(1e-8, 100)
    axes.set_yticks([1e-7, 1e-4, 1e-1])
    axes.minorticks_off()
    notes = (
        (1.5, OTHER_COLOR, f"weights alone: planned samples in {planned} of {len(steps)} steps"),
        (1e-6, "0.25", f"this library: {_largest(comparison, 'elastic')[1]:.1e} at most"),
    )
    for height, color, text in notes:
        axes.annotate(text, (elastic[0].stop_step + 1.5, height), color=color, size=9)
    axes.set_ylabel("distance from the\nrun never stopped")
    axes.set_xlabel("optimizer step")
    axes.set_xticks([0, *(phase.stop_step for phase in elastic)])


def _part(curve: Curve, first: int, last: float = float("inf")) -> tuple[list[int], list[float]]:
    """Return the steps of a range, and their values."""
    steps = [step for step in sorted(curve) if first <= step <= last]
    return steps, [curve[step] for step in steps]
