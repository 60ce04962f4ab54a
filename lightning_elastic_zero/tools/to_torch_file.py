"""Targets ``fp32``, ``bf16`` and ``lightning`` of ``convert``: one file of ``torch.save``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.tensors import unplain
from lightning_elastic_zero.formats.torch_write import TorchFileWriter
from lightning_elastic_zero.tools.selection import (
    ConvertOptions,
    check_optimizer,
    selected_weights,
    source_of,
)
from lightning_elastic_zero.tools.view import OpenCheckpoint, entry_of

FILE_NAME = "weights"
"""Name of the file while it is written."""

_ONLY_WITH_OPTIMIZER = {
    "optimizer_states",
    "lr_schedulers",
    "loops",
    "state_dict",
    "precision_plugin",
}
"""Entries of a Lightning file that are useless without optimizer state, or written anew."""


def write_weights_file(
    checkpoint: OpenCheckpoint,
    folder: Path,
    options: ConvertOptions,
    progress: Progress,
    *,
    dtype: torch.dtype,
) -> None:
    """Write names and tensors, with weights in ``dtype``."""
    builder = TorchFileWriter()
    tree = _state_dict(builder, checkpoint, options, dtype)
    builder.write(tree, folder, FILE_NAME, save_id="", progress=progress, crc32=True)


def _state_dict(
    builder: TorchFileWriter,
    checkpoint: OpenCheckpoint,
    options: ConvertOptions,
    dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    tensors = {}
    for weight in selected_weights(checkpoint, options, dtype):
        tensor = builder.add(weight.source).view(weight.entry.shape)
        tensors.update(dict.fromkeys(weight.names, tensor))
    return tensors


def write_lightning(
    checkpoint: OpenCheckpoint, folder: Path, options: ConvertOptions, progress: Progress
) -> None:
    """Write a single Lightning file with the trainer's state, and the optimizer's if wanted."""
    manifest = checkpoint.manifest
    shared = checkpoint.reader.module_state(0, manifest.world_size)
    client, extra_states = dict(shared.client_state), dict(shared.extra_states)
    if not options.optimizer:
        client = {key: value for key, value in client.items() if key not in _ONLY_WITH_OPTIMIZER}
    builder = TorchFileWriter()
    tree: dict[str, Any] = {
        "epoch": 0,
        "global_step": manifest.progress.global_steps,
        "pytorch-lightning_version": manifest.writer.lightning or "2.5.0",
        **client,
        "state_dict": {**_state_dict(builder, checkpoint, options), **extra_states},
    }
    if options.optimizer:
        check_optimizer(checkpoint, options)
        optimizer = _optimizer_state(builder, checkpoint)
        optimizer["state"].update(checkpoint.reader.optimizer_state() or {})
        tree["optimizer_states"] = [optimizer]
        tree.setdefault("lr_schedulers", [])
    builder.write(tree, folder, FILE_NAME, save_id="", progress=progress, crc32=True)


def _optimizer_state(builder: TorchFileWriter, checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """Return the optimizer state with torch's numbering: one group after another."""
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for group in checkpoint.manifest.groups:
        first = len(state)
        for name in group.names:
            parameter = checkpoint.parameters[name]
            # Copies: torch.save would keep a shared step shared, and optimizers change it.
            scalars = {key: copy.deepcopy(value) for key, value in checkpoint.scalars(name).items()}
            for key in checkpoint.state_names(name):
                source = source_of(checkpoint, entry_of(parameter, key))
                scalars[key] = builder.add(source).view(parameter.shape)
            state[len(state)] = scalars
        ids = list(range(first, len(state)))
        groups.append({**unplain(group.hyperparameters), "params": ids})
    return {"state": state, "param_groups": groups}
