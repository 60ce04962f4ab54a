"""A directory of ``torch.distributed.checkpoint``, as FSDP2 code loads it.

``{"model": {name: tensor}, "optimizer": {"state": {name: {...}}, "param_groups": [...]}}``: what
``torch.distributed.checkpoint.state_dict.get_state_dict`` gives, by the model's names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.storage import as_save_error
from lightning_elastic_zero.storage.exports import staged_export
from lightning_elastic_zero.tensor_state import Scalar, unplain
from lightning_elastic_zero.tools.checkpoint_view import OpenCheckpoint, TensorEntry
from lightning_elastic_zero.tools.conversion.selection import (
    ConvertOptions,
    cast_weight,
    check_optimizer,
    chosen_weights,
)
from lightning_elastic_zero.tools.progress_line import OnBytes


def write_dcp_directory(
    checkpoint: OpenCheckpoint, target: Path, options: ConvertOptions, on_bytes: OnBytes
) -> None:
    """Write the directory; with the optimizer's state where there is some."""
    # Imported here, as that takes a second.
    from lightning_elastic_zero.formats.dcp.writer import (  # noqa: PLC0415
        RowsSource,
        write_directory,
    )

    def rows(
        path: tuple[str | int, ...], entry: TensorEntry, dtype: torch.dtype | None = None
    ) -> RowsSource:
        stored = dtype or checkpoint.dtype(entry)
        if entry.role == "buffer":
            flat = checkpoint.buffers[entry.name].reshape(-1)
            return RowsSource(path, entry.shape, stored, lambda a, b: flat[a:b])
        return RowsSource(
            path,
            entry.shape,
            stored,
            lambda a, b: cast_weight(checkpoint, entry, checkpoint.elements(entry, a, b), stored),
        )

    tensors: list[RowsSource] = []
    for entry, source in chosen_weights(checkpoint, options):
        first = rows(("model", entry.name), entry, source.dtype)
        tensors.append(first)
        tensors += [
            replace(first, path=("model", name), same_as=first.path)
            for name in checkpoint.aliases(entry)
        ]
    objects: dict[tuple[str | int, ...], Any] = {}
    if options.optimizer or (options.optimizer is None and not checkpoint.manifest.weights_only):
        check_optimizer(checkpoint, options)
        tensors += [
            rows(("optimizer", "state", entry.name, entry.key), entry)
            for entry in checkpoint.states()
        ]
        objects = dict(_groups(checkpoint))
        for path, value in _scalars(checkpoint):
            if isinstance(value, torch.Tensor):
                flat = value.reshape(-1)
                tensors.append(RowsSource(path, (), flat.dtype, lambda a, b, flat=flat: flat[a:b]))  # type: ignore[misc]
            else:
                objects[path] = value
    with staged_export(target) as export, as_save_error(target):
        write_directory(export.path, tensors, objects, on_bytes)
        export.publish()


def _scalars(checkpoint: OpenCheckpoint) -> Iterator[tuple[tuple[str | int, ...], Scalar]]:
    """Yield scalar states as they are: torch's optimizers turn numbers into tensors on load."""
    for parameter in checkpoint.manifest.optimized:
        for key, value in checkpoint.scalars(parameter.name).items():
            yield ("optimizer", "state", parameter.name, key), value


def _groups(checkpoint: OpenCheckpoint) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    for index, group in enumerate(checkpoint.manifest.groups):
        at = ("optimizer", "param_groups", index)
        yield (*at, "params"), list(group.names)
        for key, value in group.hyperparameters.items():
            yield (*at, key), unplain(value)
