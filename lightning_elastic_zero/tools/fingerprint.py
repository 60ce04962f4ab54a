"""``fingerprint``: a checksum of a checkpoint's state that does not depend on the sharding.

It covers weights, frozen weights, buffers, element-wise states and scalar states (steps), with
their names, dtypes and shapes. A step counter in a parameter group counts as the ``step`` of each
member. The formula and its error rates are in ``core/fingerprint``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from lightning_elastic_zero.core.fingerprint import (
    STEP,
    Fingerprint,
    FingerprintPart,
    TensorId,
    run_part,
    scalars_part,
)
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import Scalar
from lightning_elastic_zero.formats.reader import WEIGHT
from lightning_elastic_zero.tools.view import OpenCheckpoint, StateRun, open_view, run_parts


def fingerprint_checkpoint(
    path: str | os.PathLike[str],
    *,
    threads: int = 0,
    progress: Progress = NO_PROGRESS,
    allow_pickle: bool = False,
) -> Fingerprint:
    """Compute the fingerprint of a checkpoint of any kind.

    Args:
        path: Directory, file or URL of the checkpoint.
        threads: Number of threads; 0: one per processor.
        progress: Receives the number of bytes read, from any thread.
        allow_pickle: Build Python objects of any class; this can run code.

    Raises:
        CheckpointNotFoundError: Nothing is at the path.
        CheckpointFormatError: It is not a checkpoint that can be read.
        CheckpointCorruptedError: A checksum does not match.
        CheckpointMismatchError: It contains several models.
        UnsupportedError: The run that wrote it cannot be resumed.
    """

    def work(part: int, parts: int) -> FingerprintPart:
        with open_view(path, allow_pickle=allow_pickle, progress=progress) as checkpoint:
            return _share(checkpoint, part, parts)

    total = FingerprintPart()
    for part in run_parts(work, threads):
        total += part
    return total.total()


def tensor_fingerprints(
    path: str | os.PathLike[str], progress: Progress = NO_PROGRESS, *, allow_pickle: bool = False
) -> Mapping[tuple[str, str], str]:
    """Compute the checksum of each tensor, by name and state key."""
    parts: dict[tuple[str, str], FingerprintPart] = {}
    with open_view(path, allow_pickle=allow_pickle, progress=progress) as checkpoint:
        for run in checkpoint.runs():
            at = (run.entry.name, run.entry.key)
            parts[at] = parts.get(at, FingerprintPart()) + _part_of(run)
    totals = ((at, part.total()) for at, part in sorted(parts.items()))
    return {at: total.optimizer if at[1] else total.weights for at, total in totals}


def _share(checkpoint: OpenCheckpoint, part: int, parts: int) -> FingerprintPart:
    total = FingerprintPart()
    for run in checkpoint.runs(part, parts):
        total += _part_of(run)
    if part == 0:
        for parameter in checkpoint.manifest.optimized:
            if parameter.numel:
                total += scalars_part(parameter.name, _scalars(checkpoint, parameter.name))
    return total


def _part_of(run: StateRun) -> FingerprintPart:
    """Return the contribution of a run to the fingerprint."""
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
    """Yield a parameter's scalar states, and the step count if its group keeps it."""
    manifest = checkpoint.manifest
    group = manifest.groups[checkpoint.parameters[name].group or 0]
    kept = {key.name for key in group.scalars}
    scalars = checkpoint.scalars(name)
    yield from ((key, scalars[key]) for key in sorted(kept))
    step = group.hyperparameters.get(STEP)
    if STEP not in kept and group.state and isinstance(step, int | float):
        yield STEP, step
