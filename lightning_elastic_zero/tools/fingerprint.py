"""``fingerprint``: a checkpoint's number, equal for equal states however they are cut and stored.

The formula, and what it can and cannot show, is in ``state_fingerprint``. Equal are weights, frozen
weights, buffers, element-wise states and scalar states (steps) with equal names, types and shapes.
A step counter that an optimizer keeps in its parameter groups counts as each member's ``step``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from lightning_elastic_zero.formats import WEIGHT
from lightning_elastic_zero.state_fingerprint import (
    STEP,
    Fingerprint,
    FingerprintPart,
    TensorId,
    run_part,
    scalars_part,
)
from lightning_elastic_zero.storage import ignore_bytes
from lightning_elastic_zero.tensor_state import Scalar
from lightning_elastic_zero.tools.checkpoint_view import OpenCheckpoint, StateRun, open_view
from lightning_elastic_zero.tools.parallel import run_parts
from lightning_elastic_zero.tools.progress_line import OnBytes


def fingerprint_checkpoint(
    path: str | os.PathLike[str], *, threads: int = 0, on_bytes: OnBytes = ignore_bytes
) -> Fingerprint:
    """Compute the fingerprint of a checkpoint of any kind.

    Args:
        path: its directory, or file.
        threads: how many read and compute side by side; 0: as many as there are processors.
        on_bytes: told of what is read, from any thread.

    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointFormatError: something is there, but no checkpoint that can be read.
        CheckpointCorruptedError: bytes are not those that were written.
        UnsupportedError: a checkpoint is there of a run that cannot be resumed.
    """

    def work(part: int, parts: int) -> FingerprintPart:
        with open_view(path, on_bytes=on_bytes) as checkpoint:
            return _share(checkpoint, part, parts)

    total = FingerprintPart()
    for part in run_parts(work, threads):
        total += part
    return total.total()


def recorded_fingerprint(path: str | os.PathLike[str]) -> str:
    """Return the number that a checkpoint's save recorded beside the state; empty: it did not.

    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointFormatError: something is there, but no checkpoint that can be read.
        CheckpointCorruptedError: bytes are not those that were written.
    """
    with open_view(path) as checkpoint:
        return checkpoint.reader.recorded_fingerprint()


def tensor_fingerprints(
    path: str | os.PathLike[str], on_bytes: OnBytes = ignore_bytes
) -> Mapping[tuple[str, str], str]:
    """Compute the number of each tensor, by its name and state key, to find what differs."""
    found: dict[tuple[str, str], FingerprintPart] = {}
    with open_view(path, on_bytes=on_bytes) as checkpoint:
        for run in checkpoint.runs():
            at = (run.entry.name, run.entry.key)
            found[at] = found.get(at, FingerprintPart()) + part_of(run)
    totals = ((at, part.total()) for at, part in sorted(found.items()))
    return {at: total.optimizer if at[1] else total.weights for at, total in totals}


def _share(checkpoint: OpenCheckpoint, part: int, parts: int) -> FingerprintPart:
    total = FingerprintPart()
    for run in checkpoint.runs(part, parts):
        total += part_of(run)
    if part == 0:
        for parameter in checkpoint.manifest.optimized:
            if parameter.numel:
                total += scalars_part(parameter.name, _scalars(checkpoint, parameter.name))
    return total


def part_of(run: StateRun) -> FingerprintPart:
    """Return what a run adds."""
    entry = run.entry
    which = TensorId(
        "weights" if entry.key == WEIGHT else "optimizer",
        entry.name,
        entry.key,
        run.values.dtype,
        entry.shape,
    )
    return run_part(which, run.start, run.values)


def _scalars(checkpoint: OpenCheckpoint, name: str) -> Iterator[tuple[str, Scalar]]:
    """Yield a parameter's scalar states; the step of its group where that keeps it."""
    manifest = checkpoint.manifest
    group = manifest.groups[checkpoint.parameters[name].group or 0]
    kept = {key.name for key in group.state if key.kind == "scalar"}
    scalars = checkpoint.scalars(name)
    yield from ((key, scalars[key]) for key in sorted(kept))
    step = group.hyperparameters.get(STEP)
    if STEP not in kept and group.state and isinstance(step, int | float):
        yield STEP, step
