"""What the command line prints: tables, verdicts, progress. Colours only on terminals."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from lightning_elastic_zero.core.progress import Progress, is_terminal, showing, tqdm_bar
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.tools.inspection import CheckpointReport, ParameterReport, ResumePlan
from lightning_elastic_zero.tools.verification import Verification

STYLES = {"DAMAGED": "bold red", "NOT verified": "yellow", ": intact:": "green"}
"""Styles of verdicts."""


def show(line: str, stream: TextIO, *, error: str = "") -> None:
    """Print a line; on a terminal, verdicts and the prefix ``error`` are coloured."""
    # https://no-color.org
    if not stream.isatty() or os.environ.get("NO_COLOR") or _is_dumb():
        print(line, file=stream)
        return
    # Slow to import, and needed on terminals only.
    from rich.console import Console
    from rich.text import Text

    text = Text(line)
    for words, style in STYLES.items():
        text.highlight_words([words], style)
    text.stylize("bold red", 0, len(error))
    # soft_wrap: a path longer than a line stays one word that can be copied.
    Console(file=stream, highlight=False, soft_wrap=True).print(text)


def _is_dumb() -> bool:
    return os.environ.get("TERM") in {None, "", "dumb"}


@contextmanager
def show_progress(action: str) -> Iterator[Progress]:
    """Show the bytes processed and the throughput on stderr while the context lasts.

    Nothing is shown for short work, or if stderr is not a terminal. Yields an object that any
    thread can report to.
    """
    with showing(tqdm_bar if is_terminal() and not _is_dumb() else None) as show_bytes:
        yield Progress(show=lambda count: show_bytes(action, count, 0))


def format_bytes(size_bytes: float) -> str:
    """Return a size with a decimal unit, such as ``1.5 GB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size_bytes) < 1000 or unit == "TB":  # noqa: PLR2004 (next unit)
            break
        size_bytes /= 1000
    return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"


def table_lines(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Yield rows with aligned columns; those with an index in ``right`` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def select(
    parameters: Sequence[ParameterReport], pattern: str = "*", sort: str = "model"
) -> list[ParameterReport]:
    """Return the parameters whose names match a pattern (``*.bias``), sorted.

    ``sort`` is ``"model"`` (unchanged), ``"name"``, ``"size"`` (largest first) or ``"dtype"``.
    """
    found = (p for p in parameters if fnmatch.fnmatchcase(p.name, pattern))
    return sorted(found, key=_SORT_KEYS[sort])


_SORT_KEYS: dict[str, Callable[[ParameterReport], Any]] = {
    "model": lambda _: 0,
    "name": lambda p: p.name,
    "size": lambda p: -p.size_bytes,
    "dtype": lambda p: p.dtype,
}


def summary_lines(report: CheckpointReport) -> Iterator[str]:
    """Yield the summary of a checkpoint, then its parameter groups."""
    writer = report.writer
    names = {
        "lightning_elastic_zero": writer.library,
        "DeepSpeed": writer.deepspeed,
        "Lightning": writer.lightning,
        "torch": writer.torch,
    }
    by = ", ".join(f"{name} {version}" for name, version in names.items() if version)
    of_run = report.stage or writer.engine
    zero = f"ZeRO-{report.stage} on {report.world_size} devices" if of_run else "no ZeRO"
    yield from _rows(
        {
            "path": report.path,
            "kind": report.kind,
            "written by": by or "unknown",
            "optimizer": " in ".join(filter(None, (writer.optimizer, writer.engine))),
            "run": f"{zero}, {report.precision}, masters in {report.master_dtype}",
            "progress": _progress(report),
            "contains": "weights only" if report.weights_only else "",
            "missing": ", ".join(report.lacks),
            "excluded": ", ".join(report.excluded),
            "DAMAGED": _damage(report),
            "doubts": "; ".join(report.doubts),
            "note": report.note,
            "resumable on": "" if report.damage else report.resumable_on,
            "parameters": f"{len(report.parameters)}, {report.elements:,} elements, "
            f"{format_bytes(sum(p.size_bytes for p in report.parameters))}",
            "buffers": ", ".join(report.module_buffers),
            "objects": ", ".join(report.client_objects),
        }
    )
    for index, group in enumerate(report.groups):
        yield f"group {index}: {group.parameters} parameters, {group.elements:,} elements"
        for name, value in sorted(group.hyperparameters.items()):
            yield f"  {name} = {value}"
        for name, kind in group.state.items():
            yield f"  state {name}: {kind}"


def _rows(table: dict[str, str]) -> Iterator[str]:
    yield from table_lines([(name, text) for name, text in table.items() if text])


def _damage(report: CheckpointReport) -> str:
    if not report.damage:
        return ""
    wrong = f"{len(report.damage)} of {len(report.files)} files: {format_names(report.damage)}"
    return f"{wrong}. Copy them again from an intact copy, or use another checkpoint"


def _progress(report: CheckpointReport) -> str:
    parts = [f"step {report.steps}"]
    if report.epoch is not None:
        parts.append(f"epoch {report.epoch}")
    if report.epoch_samples is not None:
        parts.append(f"{report.epoch_samples} samples in this epoch")
    if report.samples:
        parts.append(f"{report.samples} samples in total")
    if report.global_batch_size:
        parts.append(f"global batch {report.global_batch_size}")
    return ", ".join(parts)


def file_lines(report: CheckpointReport) -> Iterator[str]:
    """Yield a row for each file, then the total."""
    rows = []
    for file in report.files:
        size = "missing" if file.size_bytes is None else format_bytes(file.size_bytes)
        wrong = f"  ({file.problem})" if file.problem and file.size_bytes is not None else ""
        rows.append((size, file.name + wrong))
    rows.append((format_bytes(report.file_bytes), f"in {len(report.files)} files"))
    yield from table_lines(rows, right=(0,))


def parameter_lines(parameters: Sequence[ParameterReport]) -> Iterator[str]:
    """Yield a row for each parameter."""
    rows = []
    for p in parameters:
        shape = "x".join(map(str, p.shape)) or "scalar"
        group = "frozen" if p.group is None else f"group {p.group}"
        ties = f", tied to {', '.join(p.aliases)}" if p.aliases else ""
        rows.append((p.name, shape, p.dtype, format_bytes(p.size_bytes), group + ties))
    yield from table_lines(rows, right=(1, 2, 3))


def module_lines(parameters: Sequence[ParameterReport], depth: int) -> Iterator[str]:
    """Yield a row of totals for each module, with names cut to ``depth`` parts."""
    totals: dict[str, list[ParameterReport]] = {}
    for p in parameters:
        totals.setdefault(".".join(p.name.split(".")[:depth]), []).append(p)
    rows = [
        (
            name,
            f"{sum(p.elements for p in below):,} elements",
            format_bytes(sum(p.size_bytes for p in below)),
        )
        for name, below in totals.items()
    ]
    yield from table_lines(rows, right=(1, 2))


def plan_lines(plan: ResumePlan) -> Iterator[str]:
    """Yield the plan of a resume."""
    batches = ", ".join(f"{b.accumulation} x {b.micro_batch}" for b in plan.batches)
    yield from _rows(
        {
            "resume of": plan.path,
            "on": f"{plan.devices} devices, ZeRO-{plan.stage}",
            "reads": f"{format_bytes(plan.read_bytes_per_rank)} per rank, "
            f"{format_bytes(plan.read_bytes)} in total",
            "memory per rank": f"{format_bytes(plan.state_bytes_per_rank)} for masters and states, "
            f"{format_bytes(plan.weight_bytes_per_rank)} for weights, "
            f"{format_bytes(plan.gradient_bytes_per_rank)} for gradients, plus activations",
            "same batch": f"{plan.global_batch_size} samples as accumulation x micro-batch: "
            f"{batches}"
            if batches
            else "",
            "problems": "; ".join(plan.obstacles) or "none",
        }
    )


def verdict(verified: Verification) -> str:
    """Return the verdict of ``verify`` on a checkpoint."""
    if verified.problem:
        return f"{verified.path}: DAMAGED: {verified.problem}"
    what = f"{verified.kind} of step {verified.steps}"
    if not verified.bytes:
        return (
            f"{verified.path}: complete: {what}; it has no checksums, so its bytes were NOT "
            "verified"
        )
    rate = format_bytes(verified.bytes / max(verified.seconds, 1e-9))
    masters = ", weights equal the rounded masters" if verified.compared_masters else ""
    return (
        f"{verified.path}: intact: {what}, {format_bytes(verified.bytes)} verified at {rate}/s"
        f"{masters}"
    )
