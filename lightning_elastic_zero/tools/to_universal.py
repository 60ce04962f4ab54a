"""Target ``universal`` of ``convert``: a Universal Checkpoint of DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.core.manifest import Manifest
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.requirements import version_of
from lightning_elastic_zero.core.save_files import OURS, TAG
from lightning_elastic_zero.core.tensors import unplain
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.formats.deepspeed_files import LATEST_UNIVERSAL
from lightning_elastic_zero.formats.elastic_write import model_entries
from lightning_elastic_zero.formats.reader import WEIGHT
from lightning_elastic_zero.formats.torch_write import TorchFileWriter
from lightning_elastic_zero.storage.file_write import as_save_error, write_durably
from lightning_elastic_zero.tools.selection import ConvertOptions, check_optimizer, source_of
from lightning_elastic_zero.tools.view import OpenCheckpoint, entry_of

#
#     target/
#     ├── latest_universal                            the text "checkpoint"
#     └── checkpoint/                                 Lightning requires this name
#         ├── zero/<parameter>/fp32.pt, <state>.pt, step.pt
#         ├── zero/optimizer_state.pt                 hyperparameters, counters
#         ├── mp_rank_00_model_states.pt              for ZeRO-1/2
#         └── zero_pp_rank_0_mp_rank_00_model_states.pt   for ZeRO-3
#
# DeepSpeed's own loader restores Adam's two moments, but no buffers or frozen weights. The model
# file has them for other readers, such as this library.

_MASTER = "fp32"
STEP = "step"
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


def write_universal(
    checkpoint: OpenCheckpoint, folder: Path, options: ConvertOptions, progress: Progress
) -> None:
    """Write a folder for ``engine.load_checkpoint`` with ``load_universal``.

    Raises UnsupportedError if a parameter's name cannot name a folder, or a group has several
    steps.
    """
    check_optimizer(checkpoint, options)
    _check_steps(checkpoint)

    def save(tree: object, folder: Path, name: str, builder: TorchFileWriter | None = None) -> None:
        writer = builder or TorchFileWriter()
        writer.write(tree, folder, name, save_id="", progress=progress, crc32=True)

    tag = folder / TAG
    (tag / "zero").mkdir(parents=True)
    for parameter in checkpoint.manifest.optimized:
        if "/" in parameter.name:
            msg = (
                f"{checkpoint.path}: a Universal Checkpoint has a folder per parameter, but the "
                f"name {parameter.name!r} contains a slash: --rename it, or write dcp"
            )
            raise UnsupportedError(msg)
        place = tag / "zero" / parameter.name
        with as_save_error(place):
            place.mkdir()
        for key in (WEIGHT, *checkpoint.state_names(parameter.name)):
            builder = TorchFileWriter()
            source = source_of(checkpoint, entry_of(parameter, key))
            tensor = builder.add(source).view(parameter.shape)
            save({"param": tensor}, place, f"{key or _MASTER}.pt", builder)
        if (step := checkpoint.step(parameter.name)) is not None:
            save(step, place, f"{STEP}.pt")
    for name in _MODEL_FILES:
        builder = TorchFileWriter()
        save(_universal_model(checkpoint, builder), tag, name, builder)
    # The list shows whether files are missing; nothing else in this format does.
    files = [path.relative_to(tag).as_posix() for path in sorted(tag.rglob("*.pt"))]
    state = {**_universal_optimizer(checkpoint), OURS: {"files": files}}
    save(state, tag / "zero", "optimizer_state.pt")
    write_durably(folder / LATEST_UNIVERSAL, TAG.encode())


def _check_steps(checkpoint: OpenCheckpoint) -> None:
    """Check that each group has one step count: DeepSpeed has one flat buffer per group."""
    for group in checkpoint.manifest.groups:
        counted: dict[object, str] = {}
        for name in group.names:
            step = checkpoint.step(name)
            counted.setdefault(step if step is None else float(step), name)
        if len(counted) > 1:
            several = ", ".join(f"{step} of {name}" for step, name in counted.items())
            msg = (
                f"{checkpoint.path}: a parameter group has different steps ({several}), but a "
                "Universal Checkpoint holds one step per group: write dcp"
            )
            raise UnsupportedError(msg)


def _deepspeed_version(manifest: Manifest) -> str:
    """Return a DeepSpeed release; its loader requires one."""
    return manifest.writer.deepspeed or version_of("deepspeed") or "0.16.0"


def _universal_optimizer(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    groups = [
        {**unplain(group.hyperparameters), "params": [index]}
        for index, group in enumerate(manifest.groups)
    ]
    steps = (checkpoint.step(p.name) for p in manifest.optimized)
    step = next((step for step in steps if step is not None), None)
    return {
        # The stage of the model file that readers prefer.
        "zero_stage": 1,
        "ds_version": _deepspeed_version(manifest),
        "partition_count": manifest.world_size,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {STEP: step}}, "param_groups": groups},
    }


def _universal_model(checkpoint: OpenCheckpoint, builder: TorchFileWriter) -> dict[str, Any]:
    """Return DeepSpeed's model file, in which trained weights are empty."""
    manifest = checkpoint.manifest
    progress = manifest.progress
    frozen = {
        p.name: builder.add(source_of(checkpoint, entry_of(p))).view(p.shape)
        for p in manifest.frozen
    }
    empty = {p.name: torch.empty(0, dtype=getattr(torch, p.dtype)) for p in manifest.optimized}
    # Copies, so that each storage has the buffer's own size.
    buffers = {name: tensor.clone() for name, tensor in checkpoint.buffers.items()}
    names = [group.names for group in manifest.groups]
    shared = checkpoint.reader.module_state(0, manifest.world_size)
    return {
        **shared.client_state,
        **model_entries(manifest, names, {**empty, **frozen}, frozen, buffers),
        "lr_scheduler": shared.lr_scheduler,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": [],
        "ds_config": {
            "gradient_accumulation_steps": progress.gradient_accumulation_steps,
            "train_batch_size": progress.global_batch_size,
        },
        "ds_version": _deepspeed_version(manifest),
    }
