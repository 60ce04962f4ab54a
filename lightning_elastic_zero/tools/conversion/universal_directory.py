"""A Universal Checkpoint, which plain DeepSpeed loads at any stage, on any number of devices.

::

    target/
    ├── latest_universal                            the text "universal"
    └── universal/
        ├── zero/<parameter>/fp32.pt, <state>.pt, step.pt
        ├── zero/optimizer_state.pt                 hyperparameters, counters
        ├── mp_rank_00_model_states.pt              what ZeRO-1/2 looks for
        └── zero_pp_rank_0_mp_rank_00_model_states.pt   what ZeRO-3 looks for

DeepSpeed's own loader restores Adam's two moments, and no buffers and frozen weights; they are in
the model file for whoever reads them, this library for one.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.formats import WEIGHT
from lightning_elastic_zero.formats.deepspeed.constants import OURS
from lightning_elastic_zero.formats.torch_file import TorchFileWriter
from lightning_elastic_zero.manifest import Manifest
from lightning_elastic_zero.requirements import version_of
from lightning_elastic_zero.storage import write_durably
from lightning_elastic_zero.storage.exports import StagedExport, staged_export
from lightning_elastic_zero.tensor_state import unplain
from lightning_elastic_zero.tools.checkpoint_view import OpenCheckpoint, TensorEntry
from lightning_elastic_zero.tools.conversion.selection import (
    ConvertOptions,
    check_optimizer,
    source_of,
)
from lightning_elastic_zero.tools.progress_line import OnBytes

TAG = "universal"
_MASTER = "fp32"
_STEP = "step"
_LONGEST_NAME = 255
"""Of a folder, in bytes, on nearly all file systems."""
_FIRST_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


def write_universal_directory(
    checkpoint: OpenCheckpoint, target: Path, options: ConvertOptions, on_bytes: OnBytes
) -> None:
    """Write the folder that ``engine.load_checkpoint`` is given, with ``load_universal``.

    Raises:
        CheckpointFormatError: the optimizer counts steps that are no number.
        UnsupportedError: a parameter's name can be no folder's, or a group counts several steps.
    """
    options.check_whole("a Universal Checkpoint")
    check_optimizer(checkpoint, options)
    _check_names(checkpoint)
    _check_steps(checkpoint)
    with staged_export(target) as export:
        folder = export.path / TAG
        (folder / "zero").mkdir(parents=True)
        for parameter in checkpoint.manifest.optimized:
            _write_parameter(checkpoint, parameter.name, folder / "zero", on_bytes)
        for name in _FIRST_MODEL_FILES:
            _write_model_file(checkpoint, folder, name, on_bytes)
        # Of files that are not there, nothing else tells.
        files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.pt"))]
        state = {**_optimizer_state(checkpoint), OURS: {"files": files}}
        _save(state, folder / "zero", "optimizer_state.pt", on_bytes)
        write_durably(export.path / "latest_universal", TAG.encode())
        _publish(export)


def lost_scalars(checkpoint: OpenCheckpoint) -> tuple[str, ...]:
    """Return the states of one value that a Universal Checkpoint cannot hold: all but ``step``.

    DeepSpeed takes each other file beside ``fp32.pt`` for a tensor of the parameter's shape.
    """
    groups = checkpoint.manifest.groups
    found = {key.name for group in groups for key in group.state if key.kind == "scalar"}
    return tuple(sorted(found - {_STEP}))


def _check_names(checkpoint: OpenCheckpoint) -> None:
    for parameter in checkpoint.manifest.optimized:
        name = parameter.name
        if "/" in name or len(os.fsencode(name)) > _LONGEST_NAME:
            why = '"/" in it' if "/" in name else f"more than {_LONGEST_NAME} bytes"
            msg = (
                f"{checkpoint.path}: a Universal Checkpoint has a folder for each parameter, and "
                f"the name {name[:80]!r} has {why}: rename it (--rename), or write dcp or elastic"
            )
            raise UnsupportedError(msg)


def _check_steps(checkpoint: OpenCheckpoint) -> None:
    """Refuse what DeepSpeed refuses: it has one flat buffer for a group, with one step."""
    for group in checkpoint.manifest.groups:
        counted: dict[object, str] = {}
        for name in group.names:
            step = checkpoint.step(name)
            counted.setdefault(step if step is None else float(step), name)
        if len(counted) > 1:
            several = ", and ".join(f"{step} of {name}" for step, name in counted.items())
            msg = (
                f"{checkpoint.path}: the optimizer has counted {several}, and a Universal "
                "Checkpoint has one step for a group: write dcp or elastic, which keep each"
            )
            raise UnsupportedError(msg)


def _publish(export: StagedExport) -> None:
    export.drop_sums()
    export.publish()


def _save(
    tree: object,
    folder: Path,
    name: str,
    on_bytes: OnBytes,
    builder: TorchFileWriter | None = None,
) -> None:
    builder = builder or TorchFileWriter()
    builder.write(tree, folder, name, save_id="", on_bytes=on_bytes)


def _write_parameter(
    checkpoint: OpenCheckpoint, name: str, folder: Path, on_bytes: OnBytes
) -> None:
    shape = checkpoint.parameters[name].shape
    (folder / name).mkdir()
    for key in (WEIGHT, *checkpoint.state_keys(name, "elementwise")):
        entry = TensorEntry("trained", name, key, shape)
        builder = TorchFileWriter()
        tensor = builder.add(source_of(checkpoint, entry)).view(shape)
        file = f"{key or _MASTER}.pt"
        _save({"param": tensor}, folder / name, file, on_bytes, builder)
    if (step := checkpoint.step(name)) is not None:
        _save(step, folder / name, f"{_STEP}.pt", on_bytes)


def _version(manifest: Manifest) -> str:
    """Return a release of DeepSpeed, without which its loader refuses."""
    return manifest.writer.deepspeed or version_of("deepspeed") or "0.16.0"


def _optimizer_state(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    groups = [
        {**unplain(group.hyperparameters), "params": [index]}
        for index, group in enumerate(manifest.groups)
    ]
    steps = (checkpoint.step(p.name) for p in manifest.optimized)
    step = next((step for step in steps if step is not None), None)
    return {
        # That of the model file that readers take first.
        "zero_stage": 1,
        "ds_version": _version(manifest),
        "partition_count": manifest.world_size,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {_STEP: step}}, "param_groups": groups},
    }


def _shapes(manifest: Manifest) -> list[OrderedDict[str, torch.Size]]:
    """Return the parameters of each group, as ZeRO-1/2 has them in a flat buffer of its own."""
    shape_of = {p.name: torch.Size(p.shape) for p in manifest.parameters}
    return [
        OrderedDict((name, shape_of[name]) for name in group.names) for group in manifest.groups
    ]


def _write_model_file(
    checkpoint: OpenCheckpoint, folder: Path, name: str, on_bytes: OnBytes
) -> None:
    """Write what DeepSpeed keeps beside the optimizer; trained weights are empty in it."""
    manifest, builder = checkpoint.manifest, TorchFileWriter()
    progress = manifest.progress
    frozen = {
        p.name: builder.add(
            source_of(checkpoint, TensorEntry("frozen", p.name, WEIGHT, p.shape))
        ).view(p.shape)
        for p in manifest.frozen
    }
    empty = {p.name: torch.empty(0, dtype=getattr(torch, p.dtype)) for p in manifest.optimized}
    tree = {
        **_client_state(checkpoint),
        "module": {**empty, **frozen, **_copies(checkpoint.buffers)},
        "buffer_names": list(checkpoint.buffers),
        "optimizer": None,
        "lr_scheduler": None,
        "param_shapes": _shapes(manifest),
        "frozen_param_shapes": {p.name: torch.Size(p.shape) for p in manifest.frozen} or None,
        "frozen_param_fragments": frozen or None,
        "shared_params": {alias: p.name for p in manifest.parameters for alias in p.aliases},
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": [],
        "global_steps": progress.global_steps,
        "global_samples": progress.global_samples,
        "skipped_steps": progress.skipped_steps,
        "dp_world_size": manifest.world_size,
        "mp_world_size": 1,
        "ds_config": {
            "gradient_accumulation_steps": progress.gradient_accumulation_steps,
            "train_batch_size": progress.global_batch_size,
        },
        "ds_version": _version(manifest),
    }
    _save(tree, folder, name, on_bytes, builder)


def _client_state(checkpoint: OpenCheckpoint) -> Mapping[str, Any]:
    return checkpoint.reader.module_state(0, checkpoint.manifest.world_size).client_state


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy small tensors, each into a storage of its own size."""
    return {name: tensor.clone() for name, tensor in tensors.items()}
