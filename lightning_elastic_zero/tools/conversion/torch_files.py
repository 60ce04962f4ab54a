"""Single files of ``torch.save``: weights by name, and files as Lightning has them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.formats.torch_file import TorchFileWriter
from lightning_elastic_zero.storage.exports import staged_export
from lightning_elastic_zero.tensor_state import unplain
from lightning_elastic_zero.tools.checkpoint_view import OpenCheckpoint, TensorEntry
from lightning_elastic_zero.tools.conversion.selection import (
    ConvertOptions,
    check_optimizer,
    chosen_weights,
    source_of,
)
from lightning_elastic_zero.tools.progress_line import OnBytes

_FILE = "weights"


def write_fp32(
    checkpoint: OpenCheckpoint, target: Path, options: ConvertOptions, on_bytes: OnBytes
) -> None:
    """Write names and tensors, weights in fp32."""
    _write_weights(torch.float32, checkpoint, target, options, on_bytes)


def write_bf16(
    checkpoint: OpenCheckpoint, target: Path, options: ConvertOptions, on_bytes: OnBytes
) -> None:
    """Write names and tensors, weights in bf16: rounded as training rounds them."""
    _write_weights(torch.bfloat16, checkpoint, target, options, on_bytes)


def _write_weights(
    dtype: torch.dtype,
    checkpoint: OpenCheckpoint,
    target: Path,
    options: ConvertOptions,
    on_bytes: OnBytes,
) -> None:
    builder = TorchFileWriter()
    tree = _state_dict(builder, checkpoint, options, dtype)
    _write(builder, tree, target, on_bytes)


def _write(builder: TorchFileWriter, tree: object, target: Path, on_bytes: OnBytes) -> None:
    with staged_export(target) as export:
        builder.write(tree, export.path, _FILE, save_id="", on_bytes=on_bytes)
        export.publish(_FILE)


def _state_dict(
    builder: TorchFileWriter,
    checkpoint: OpenCheckpoint,
    options: ConvertOptions,
    dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """Add the weights; tied names share a tensor."""
    found = {}
    for entry, source in chosen_weights(checkpoint, options, dtype):
        tensor = builder.add(source).view(entry.shape)
        for name in (entry.name, *checkpoint.aliases(entry)):
            found[name] = tensor
    return found


# -- Lightning's file ------------------------------------------------------------------------------

_NOT_ALONE = {"optimizer_states", "lr_schedulers", "loops", "state_dict", "precision_plugin"}
"""Entries that make sense beside the optimizer's state only, or are written anew."""


def write_lightning(
    checkpoint: OpenCheckpoint, target: Path, options: ConvertOptions, on_bytes: OnBytes
) -> None:
    """Write a single file as Lightning has them, with all that the trainer had saved.

    With ``optimizer``, the optimizer's state is in it too, as torch's optimizers take it.
    """
    manifest = checkpoint.manifest
    shared = checkpoint.reader.module_state(0, manifest.world_size)
    client, extra_states = dict(shared.client_state), dict(shared.extra_states)
    if not options.optimizer:
        client = {key: value for key, value in client.items() if key not in _NOT_ALONE}
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
    _write(builder, tree, target, on_bytes)


def _optimizer_state(builder: TorchFileWriter, checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """Add an optimizer's state as torch counts it: group after group."""
    state: dict[int, Mapping[str, Any]] = {}
    groups = []
    for group in checkpoint.manifest.groups:
        first = len(state)
        for name in group.names:
            shape = checkpoint.parameters[name].shape
            entry = partial(TensorEntry, "trained", name, shape=shape)
            state[len(state)] = {
                # Of its own: optimizers count in place, and torch keeps what a file shares shared.
                **{key: copy.deepcopy(held) for key, held in checkpoint.scalars(name).items()},
                **{
                    key: builder.add(source_of(checkpoint, entry(key))).view(shape)
                    for key in checkpoint.state_keys(name, "elementwise")
                },
            }
        ids = list(range(first, len(state)))
        groups.append({**unplain(group.hyperparameters), "params": ids})
    return {"state": state, "param_groups": groups}
