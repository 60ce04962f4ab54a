"""Output of the command line: tables, verdicts, progress. Colours only on terminals."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from lightning_elastic_zero.core.manifest import Manifest, Parameter
from lightning_elastic_zero.core.progress import Progress, is_terminal, showing, tqdm_bar
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.tools.differences import CheckpointDifferences
from lightning_elastic_zero.tools.inspection import CheckpointReport, stored_bytes
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


def summary_lines(report: CheckpointReport) -> Iterator[str]:
    """Yield the summary of a checkpoint, then its parameter groups."""
    manifest, writer = report.manifest, report.manifest.writer
    names = {
        "lightning_elastic_zero": writer.library,
        "DeepSpeed": writer.deepspeed,
        "Lightning": writer.lightning,
        "torch": writer.torch,
    }
    by = ", ".join(f"{name} {version}" for name, version in names.items() if version)
    of_run = manifest.stage or writer.engine
    zero = f"ZeRO-{manifest.stage} on {manifest.grid}" if of_run else "no ZeRO"
    elements = sum(p.numel for p in manifest.parameters)
    size = format_bytes(sum(stored_bytes(manifest, p) for p in manifest.parameters))
    yield from _rows(
        {
            "path": report.path,
            "kind": report.kind,
            "written by": by or "unknown",
            "optimizer": " in ".join(filter(None, (writer.optimizer, writer.engine))),
            "run": f"{zero}, {manifest.precision}, masters in {manifest.master_dtype}",
            "progress": _progress(report),
            "contains": "weights only" if manifest.weights_only else "",
            "missing": ", ".join(report.lacks),
            "excluded": ", ".join(manifest.excluded),
            "other nodes": _elsewhere(report),
            "DAMAGED": _damage(report),
            "doubts": "; ".join(report.doubts),
            "note": report.note,
            "resumable on": "" if report.damage else report.resumable_on,
            "parameters": f"{len(manifest.parameters)}, {elements:,} elements, {size}",
            "buffers": ", ".join(manifest.module_buffers),
            "objects": ", ".join(manifest.client_objects),
        }
    )
    for index, group in enumerate(manifest.groups):
        numels = [p.numel for p in manifest.optimized if p.group == index]
        yield f"group {index}: {len(numels)} parameters, {sum(numels):,} elements"
        for name, value in sorted(group.hyperparameters.items()):
            yield f"  {name} = {value}"
        for key in group.state:
            yield f"  state {key.name}: {key.kind} {key.dtype}"


def _rows(table: dict[str, str]) -> Iterator[str]:
    yield from table_lines([(name, text) for name, text in table.items() if text])


def _elsewhere(report: CheckpointReport) -> str:
    names, count = report.elsewhere, len(report.files)
    return f"{len(names)} of {count} files: {format_names(names)}" if names else ""


def _damage(report: CheckpointReport) -> str:
    if not report.damage:
        return ""
    wrong = f"{len(report.damage)} of {len(report.files)} files: {format_names(report.damage)}"
    return f"{wrong}. Copy them again from an intact copy, or use another checkpoint"


def _progress(report: CheckpointReport) -> str:
    progress = report.manifest.progress
    parts = [f"step {progress.global_steps}"]
    if report.epoch is not None:
        parts.append(f"epoch {report.epoch}")
    if report.epoch_samples is not None:
        parts.append(f"{report.epoch_samples} samples in this epoch")
    if progress.global_samples:
        parts.append(f"{progress.global_samples} samples in total")
    if progress.global_batch_size:
        parts.append(f"global batch {progress.global_batch_size}")
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


def parameter_lines(manifest: Manifest, parameters: Sequence[Parameter]) -> Iterator[str]:
    """Yield a row for each parameter."""
    rows = []
    for p in parameters:
        shape = "x".join(map(str, p.shape)) or "scalar"
        group = "frozen" if p.group is None else f"group {p.group}"
        ties = f", tied to {', '.join(p.aliases)}" if p.aliases else ""
        rows.append((p.name, shape, p.dtype, format_bytes(stored_bytes(manifest, p)), group + ties))
    yield from table_lines(rows, right=(1, 2, 3))


def difference_lines(
    found: CheckpointDifferences, first: str, second: str, limit: int | None
) -> Iterator[str]:
    """Yield the summary of ``diff``, then at most ``limit`` differences of each kind.

    With a limit, tensors with other shapes or dtypes come first, then those with the largest
    relative differences.
    """
    if found.is_same:
        yield f"{found.compared} tensors compared: equal"
        return
    absent = ((first, found.only_in_first), (second, found.only_in_second))
    counts = [f"only in {side}: {len(names)}" for side, names in absent if names]
    if found.values:
        counts.append(f"other values that differ: {len(found.values)}")
    yield "; ".join((f"{len(found.tensors)} of {found.compared} tensors differ", *counts))
    ranked = [t for t in found.tensors if t.differing]
    if ranked:
        largest = max(ranked, key=lambda t: _nan_last(t.largest))
        relative = max(ranked, key=lambda t: _nan_last(t.largest_relative))
        yield (
            f"largest difference: {largest.largest:.3g} ({largest.title}); relative: "
            f"{relative.largest_relative:.3g} ({relative.title})"
        )
    tensors = found.tensors
    if limit is not None:
        order = sorted(tensors, key=lambda t: (t.change != "", _nan_last(t.largest_relative)))
        tensors = tuple(reversed(order))
    lines = [f"only in {side}: {name}" for side, names in absent for name in names[:limit]]
    lines += [f"{what}: {before} and {after}" for what, before, after in found.values[:limit]]
    lines += [
        f"{t.title}: {t.differing} of {t.elements} elements differ, by at most {t.largest:.3g} "
        f"(relative {t.largest_relative:.3g}){f'; {t.change}' if t.change else ''}"
        for t in tensors[:limit]
    ]
    yield from lines
    total = len(tensors) + len(found.values) + sum(len(names) for _, names in absent)
    if hidden := total - len(lines):
        yield f"and {hidden} more: --all prints them"


def _nan_last(value: float) -> tuple[bool, float]:
    return math.isnan(value), value


def verdict(verified: Verification) -> str:
    """Return the verdict of ``verify`` on a checkpoint."""
    if verified.problem:
        return f"{verified.path}: DAMAGED: {verified.problem}"
    what = f"{verified.kind} of step {verified.steps}"
    if verified.elsewhere:
        return (
            f"{verified.path}: {what}; NOT verified, because this node does not have these files: "
            f"{format_names(verified.elsewhere)}. {format_bytes(verified.bytes)} here are intact"
        )
    if verified.unverified:
        return (
            f"{verified.path}: complete: {what}; NOT verified, because these files have no "
            f"checksums: {format_names(verified.unverified)}"
        )
    rate = format_bytes(verified.bytes / max(verified.seconds, 1e-9))
    masters = ", weights equal the rounded masters" if verified.compared_masters else ""
    return (
        f"{verified.path}: intact: {what}, {format_bytes(verified.bytes)} verified at {rate}/s"
        f"{masters}"
    )
