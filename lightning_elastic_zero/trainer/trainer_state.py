"""What a new run takes of a checkpoint beside its weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_elastic_zero.checkpoint import LoadResult


def without_progress(state: Mapping[str, Any], module: pl.LightningModule | None) -> dict[str, Any]:
    """Give what a new run takes over beside the weights: what the module itself had saved."""
    data = getattr(module.trainer, "datamodule", None) if module is not None else None
    progress = {"loops", "callbacks", type(data).__qualname__}
    kept = {key: value for key, value in state.items() if key not in progress}
    return {**kept, "epoch": 0, "global_step": 0, "lr_schedulers": []}


def is_slurm_requeue(path: str | os.PathLike[str]) -> bool:
    """Whether SLURM ends the job right after this save, by Lightning's name for it."""
    return Path(path).name.startswith("hpc_ckpt_")


def format_loaded(loaded: LoadResult, world_size: int) -> str:
    """Return a line on what was loaded, on how many devices, of where in the run, and its cost."""
    manifest, stats = loaded.manifest, loaded.stats
    saved, here = (
        f"{count} device{'s' if count > 1 else ''}" for count in (manifest.world_size, world_size)
    )
    found = loaded.found or f"saved on {saved} with ZeRO-{manifest.stage}"
    cost = f"{stats.bytes / 1e6:.1f} MB in {stats.seconds:.2f} s"
    return f"Loaded {stats.path} ({found}) on {here}{_place_in_run(loaded)}: {cost}"


def _place_in_run(loaded: LoadResult) -> str:
    """Return at which step and epoch a run goes on; empty where that was not recorded."""
    match loaded.manifest.progress.sampler:
        case {"global_step": int(step), "epoch": int(epoch), "epoch_is_over": bool(is_over)}:
            return f" at step {step}, epoch {epoch + is_over}"
    return ""


def format_not_resumed(dirpaths: Iterable[object]) -> tuple[str, bool]:
    """Return that training starts at step 0; and whether to warn, since checkpoints are there.

    Args:
        dirpaths: the folders into which callbacks save; None for one that has none.
    """
    folders = sorted({str(place) for place in dirpaths if place})
    found = [p for folder in folders for p in sorted(Path(folder).glob("*.ckpt"))]
    if dangling := [p for p in found if p.is_symlink() and not p.exists()]:
        text = (
            f"Training starts from step 0: {dangling[0]} is a link to a checkpoint that is "
            "gone. Pass the checkpoint that you want as ckpt_path."
        )
    elif found:
        text = (
            f"Training starts from step 0, although {found[0].parent} holds {len(found)} "
            f'checkpoints ({found[-1].name}, ...). Pass ckpt_path="last" or a path to resume.'
        )
    else:
        text = "No checkpoint was loaded: training starts from step 0."
    return text, bool(found)
