"""Text that verbs print: tables and trees of parameters, plans and verdicts, as plain text."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lightning_elastic_zero.text import format_names
from lightning_elastic_zero.tools.inspection import CheckpointReport, ParameterReport
from lightning_elastic_zero.tools.progress_line import format_bytes
from lightning_elastic_zero.tools.resume_plan import ResumePlan
from lightning_elastic_zero.tools.verification import Verification


def select(
    parameters: Sequence[ParameterReport], pattern: str = "*", sort: str = "model"
) -> list[ParameterReport]:
    """Return the parameters whose names fit a pattern (``*.bias``), in an order.

    Args:
        parameters: in the model's order.
        pattern: as of ``fnmatch``.
        sort: ``"model"``: as they are, ``"name"``, ``"size"``: the largest first, or ``"dtype"``.
    """
    fitting = [p for p in parameters if fnmatch.fnmatchcase(p.name, pattern)]
    if sort == "name":
        fitting.sort(key=lambda p: p.name)
    elif sort == "size":
        fitting.sort(key=lambda p: -p.size_bytes)
    elif sort == "dtype":
        fitting.sort(key=lambda p: p.dtype)
    return fitting


def summary_lines(report: CheckpointReport) -> Iterator[str]:
    """Yield the summary of a checkpoint."""
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


def _damage(report: CheckpointReport) -> str:
    """Return the files that are missing or have a wrong size."""
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


def _rows(table: dict[str, str]) -> Iterator[str]:
    width = max(map(len, table))
    yield from (f"{name.ljust(width)}  {text}" for name, text in table.items() if text)


def group_lines(report: CheckpointReport) -> Iterator[str]:
    """Yield the parameter groups with hyperparameters and states."""
    for index, group in enumerate(report.groups):
        yield f"group {index}: {group.parameters} parameters, {group.elements:,} elements"
        for name, value in sorted(group.hyperparameters.items()):
            yield f"  {name} = {value}"
        for name, kind in group.state.items():
            yield f"  state {name}: {kind}"


def file_lines(report: CheckpointReport) -> Iterator[str]:
    """Yield the files with their sizes."""
    for file in report.files:
        size = "missing" if file.size_bytes is None else format_bytes(file.size_bytes)
        wrong = "" if file.size_bytes is None or not file.problem else f"  ({file.problem})"
        yield f"{size.rjust(10)}  {file.name}{wrong}"
    yield f"{format_bytes(report.file_bytes).rjust(10)}  in {len(report.files)} files"


def parameter_lines(parameters: Sequence[ParameterReport]) -> Iterator[str]:
    """Yield a row for each parameter."""
    width = max((len(p.name) for p in parameters), default=0)
    for p in parameters:
        shape = "x".join(map(str, p.shape)) or "scalar"
        group = "frozen" if p.group is None else f"group {p.group}"
        ties = f", tied to {', '.join(p.aliases)}" if p.aliases else ""
        size = format_bytes(p.size_bytes)
        yield f"{p.name.ljust(width)}  {shape:>16}  {p.dtype:>9}  {size:>9}  {group}{ties}"


@dataclass(slots=True)
class _Branch:
    """A module, and what is below it."""

    elements: int = 0
    size_bytes: int = 0
    below: dict[str, _Branch] = field(default_factory=dict)


def tree_lines(parameters: Sequence[ParameterReport], depth: int) -> Iterator[str]:
    """Yield the modules as a tree, each with all that is below it; alike neighbours as one.

    Args:
        parameters: those that count.
        depth: how many names deep.
    """
    root = _Branch()
    for p in parameters:
        branch = root
        for name in p.name.split("."):
            branch = branch.below.setdefault(name, _Branch())
            branch.elements += p.elements
            branch.size_bytes += p.size_bytes
    yield from _branch_lines(root, depth, "")


def _branch_lines(branch: _Branch, depth: int, indent: str) -> Iterator[str]:
    if not depth:
        return
    for names in _alike(branch):
        first = branch.below[names[0]]
        numbered = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
        times = "" if len(names) == 1 else f" x {len(names)}"
        size = format_bytes(first.size_bytes)
        yield f"{indent}{numbered}{times}  {first.elements:,} elements, {size}"
        yield from _branch_lines(first, depth - 1, f"{indent}  ")


def _alike(branch: _Branch) -> list[list[str]]:
    """Return the names below, numbered neighbours with the same below them together."""
    runs: list[list[str]] = []
    for name, inner in branch.below.items():
        last = runs[-1][-1] if runs else ""
        if last.isdigit() and name.isdigit() and _text(branch.below[last]) == _text(inner):
            runs[-1].append(name)
        else:
            runs.append([name])
    return runs


def _text(branch: _Branch) -> str:
    inner = ",".join(f"{name}:{_text(b)}" for name, b in branch.below.items())
    return f"{branch.elements}/{branch.size_bytes}({inner})"


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
    if not verified.bytes:
        return (
            f"{verified.path}: complete: {verified.kind} of step {verified.steps}; it has no "
            "checksums, so its bytes were NOT verified"
        )
    rate = format_bytes(verified.bytes / max(verified.seconds, 1e-9))
    masters = ", weights equal the rounded masters" if verified.compared_masters else ""
    return (
        f"{verified.path}: intact: {verified.kind} of step {verified.steps}, "
        f"{format_bytes(verified.bytes)} verified at {rate}/s{masters}"
    )
