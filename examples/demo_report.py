"""What the demo shows at the end: a table of its phases and a picture of its loss curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from demo_phases import Event, Phase
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Run = dict[int, Event]
"""What was noted of each step, from 1."""

Curve = dict[int, float]
"""A loss, or a difference of losses, for each step from 1."""

TITLES = ("run", "processes", "steps", "lost", "loss", "difference", "same samples")
TITLES_OF_CHECKPOINTS = ("save s", "load s", "MB saved", "MB read")
COLORS = ("#0b6e99", "#d9730d", "#4f7f3b")
OTHER_COLOR = "#a3245a"


@dataclass(frozen=True)
class Comparison:
    """Runs, of which one was never interrupted."""

    runs: Mapping[str, Run]

    @classmethod
    def of(cls, *runs: Sequence[Phase]) -> Comparison:
        """Put runs together from their phases; each has the name of its last one."""
        return cls({phases[-1].run: _joined(phases) for phases in runs})

    def losses(self, run: str) -> Curve:
        """Give a run's loss at each step."""
        return {step: event.loss for step, event in self.runs[run].items()}

    def difference(self, run: str) -> Curve:
        """Give how far a run is from the uninterrupted one at each step."""
        losses = self.losses(run)
        reference = self.losses("uninterrupted")
        return {step: abs(losses[step] - reference[step]) for step in losses.keys() & reference}

    def same_samples(self, run: str) -> set[int]:
        """Give the steps in which a run took the same samples as the uninterrupted one."""
        reference = self.runs["uninterrupted"]
        return {
            step
            for step, event in self.runs[run].items()
            if event.samples and step in reference and event.samples == reference[step].samples
        }


def _joined(phases: Sequence[Phase]) -> Run:
    """Give a run's steps; one that was lost counts when it is done again."""
    run: Run = {}
    for phase in phases:
        run |= {step: event for step, event in phase.steps().items() if step <= phase.stop_step}
    return dict(sorted(run.items()))


def summarize(comparison: Comparison) -> str:
    """Say how far the runs are from the uninterrupted one."""
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


def draw(elastic: Sequence[Phase], comparison: Comparison, path: Path) -> None:
    """Draw the three curves and, below them, how far two are from the third."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw_losses(losses, elastic, comparison)
    _draw_differences(differences, elastic, comparison)
    for axes in (losses, differences):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)


def _draw_losses(axes: Axes, elastic: Sequence[Phase], comparison: Comparison) -> None:
    """Draw the uninterrupted run as a broad band, the others on top of it."""
    reference = comparison.losses("uninterrupted")
    label = "4 processes, never stopped"
    axes.plot(list(reference), list(reference.values()), color="0.82", linewidth=6, label=label)
    for phase, color in zip(elastic, COLORS, strict=True):
        label = f"elastic, {phase.processes} processes: steps {phase.start_step + 1} to "
        steps, losses = _part(comparison.losses("elastic"), phase.start_step, phase.stop_step)
        axes.plot(steps, losses, color=color, linewidth=1.8, label=f"{label}{phase.stop_step}")
    steps, losses = _part(comparison.losses("weights-only"), elastic[0].stop_step)
    label = "weights only: new runs on the same 2 and 3 processes"
    axes.plot(steps, losses, color=OTHER_COLOR, linewidth=1.2, linestyle="--", label=label)
    for before, after in pairwise(elastic):
        axes.annotate(
            f"killed in mid-epoch\n{before.processes} \N{RIGHTWARDS ARROW} {after.processes} "
            "processes",
            (after.start_step, 0.45),
            xycoords=("data", "axes fraction"),
            xytext=(6, 0),
            textcoords="offset points",
            color="0.35",
        )
        axes.axvline(after.start_step, color="0.5", linestyle=":", linewidth=1.2)
    axes.set_ylabel("training loss (nats per character)")
    axes.set_title("A ZeRO-3 run on 4, then 2, then 3 processes, killed twice in mid-epoch")
    axes.legend(loc="upper right", framealpha=1, edgecolor="none")


def _draw_differences(axes: Axes, elastic: Sequence[Phase], comparison: Comparison) -> None:
    """Draw the absolute differences, on a scale on which both can be seen; 0 has no place on it."""
    difference = comparison.difference("elastic")
    for phase, color in zip(elastic, COLORS, strict=True):
        steps, heights = _part(difference, phase.start_step + 1, phase.stop_step)
        axes.bar(steps, heights, color=color)
        if phase.start_step:
            axes.axvline(phase.start_step, color="0.5", linestyle=":", linewidth=1.2)
    steps, heights = _part(comparison.difference("weights-only"), elastic[0].stop_step + 1)
    axes.plot(steps, heights, color=OTHER_COLOR, linewidth=1.2, linestyle="--")
    axes.set_yscale("log")
    axes.set_ylim(1e-8, 10)
    axes.set_yticks([1e-7, 1e-4, 1e-1])
    axes.minorticks_off()
    axes.set_ylabel("difference")
    axes.set_xlabel("optimizer step")
    axes.set_xticks([0, *(phase.stop_step for phase in elastic)])


def _part(curve: Curve, first: int, last: float = float("inf")) -> tuple[list[int], list[float]]:
    """Cut out some steps."""
    steps = [step for step in sorted(curve) if first <= step <= last]
    return steps, [curve[step] for step in steps]
