"""Target ``dcp`` of ``convert``: a directory of ``torch.distributed.checkpoint``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.tensors import unplain
from lightning_elastic_zero.storage.file_write import as_save_error
from lightning_elastic_zero.tools.selection import (
    ConvertOptions,
    cast_weight,
    check_optimizer,
    selected_weights,
)
from lightning_elastic_zero.tools.view import OpenCheckpoint, TensorEntry


def write_dcp(
    checkpoint: OpenCheckpoint, folder: Path, options: ConvertOptions, progress: Progress
) -> None:
    """Write a directory of ``torch.distributed.checkpoint``, as FSDP2 code loads it.

    ``{"model": {name: tensor}, "optimizer": {"state": {name: {...}}, "param_groups": [...]}}``, as
    ``torch.distributed.checkpoint.state_dict.get_state_dict`` returns it.
    """
    # Importing it takes a second.
    from lightning_elastic_zero.formats.dcp_write import RowsSource, write_directory

    def rows(
        path: tuple[str | int, ...], entry: TensorEntry, dtype: torch.dtype | None = None
    ) -> RowsSource:
        stored = dtype or checkpoint.dtype(entry)
        return RowsSource(
            path,
            entry.shape,
            stored,
            lambda a, b: cast_weight(checkpoint, entry, checkpoint.elements(entry, a, b), stored),
        )

    tensors: list[RowsSource] = []
    for weight in selected_weights(checkpoint, options):
        name, *others = weight.names
        first = rows(("model", name), weight.entry, weight.source.dtype)
        tensors.append(first)
        tensors += [replace(first, path=("model", n), same_as=first.path) for n in others]
    objects: dict[tuple[str | int, ...], Any] = {}
    if options.optimizer or (options.optimizer is None and not checkpoint.manifest.weights_only):
        check_optimizer(checkpoint, options)
        tensors += [
            rows(("optimizer", "state", entry.name, entry.key), entry)
            for entry in checkpoint.states()
        ]
        objects = dict(_dcp_groups(checkpoint))
        for parameter in checkpoint.manifest.optimized:
            # torch's optimizers convert Python numbers to tensors when they load.
            for key, value in checkpoint.scalars(parameter.name).items():
                path = ("optimizer", "state", parameter.name, key)
                if isinstance(value, torch.Tensor):
                    flat = value.reshape(-1)
                    tensors.append(RowsSource(path, (), flat.dtype, partial(_slice, flat)))
                else:
                    objects[path] = value
    with as_save_error(folder):
        write_directory(folder, tensors, objects, progress)


def _slice(flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return flat[start:stop]


def _dcp_groups(checkpoint: OpenCheckpoint) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    for index, group in enumerate(checkpoint.manifest.groups):
        at = ("optimizer", "param_groups", index)
        yield (*at, "params"), list(group.names)
        for key, value in group.hyperparameters.items():
            yield (*at, key), unplain(value)
