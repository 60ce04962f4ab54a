"""Selection of what a save writes, and its warnings: weights left out, objects to allow."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from lightning_elastic_zero.checkpoint.types import SaveOptions
from lightning_elastic_zero.formats.elastic.client_state import Objects
from lightning_elastic_zero.formats.safe_pickle.unpickler import find_refused
from lightning_elastic_zero.formats.tree_path import format_tree_path
from lightning_elastic_zero.manifest import Manifest
from lightning_elastic_zero.tensor_state import RankState

log = logging.getLogger(__name__)


def manifest_to_save(manifest: Manifest, options: SaveOptions) -> Manifest:
    """Return a live engine's manifest as it is saved: stage, progress, and what is left out.

    Of the frozen weights and buffers alone anything is left out.
    """
    manifest = replace(
        manifest,
        # An engine without an optimizer has no stage: the files are ZeRO-1's.
        stage=manifest.stage or int(not manifest.groups),
        progress=replace(manifest.progress, sampler=options.sampler or manifest.progress.sampler),
    )
    if options.weights_only or not manifest.groups:
        groups = tuple(replace(group, state=()) for group in manifest.groups)
        manifest = replace(manifest, weights_only=True, groups=groups)
    left_out = {
        p.name
        for p in manifest.parameters
        if p.group is None
        and (
            (options.exclude_frozen and bool(manifest.groups))
            or options.left_out.issuperset({p.name, *p.aliases})
        )
    }
    in_order = [p.name for p in manifest.parameters if p.name in left_out]
    buffers = [name for name in manifest.module_buffers if name in options.left_out]
    return replace(
        manifest,
        excluded=(*in_order, *buffers),
        module_buffers=tuple(n for n in manifest.module_buffers if n not in options.left_out),
    )


def state_to_save(state: RankState, manifest: Manifest, options: SaveOptions) -> RankState:
    """Return what of a rank's state is written."""
    frozen, kept = {p.name for p in manifest.frozen}, options.module_buffers or {}
    return replace(
        state,
        frozen={n: t for n, t in state.frozen.items() if n in frozen},
        module_buffers={
            name: kept.get(name, state.module_buffers[name]) for name in manifest.module_buffers
        },
    )


def warn_of_objects(path: Path, objects: Objects, warned: set[str] | None) -> None:
    """Rank 0: warn, once, of what a load will refuse to build unless it is allowed to."""
    if warned is None:
        return
    new = [(at, value) for at, value in objects if format_tree_path(at) not in warned]
    warned.update(format_tree_path(at) for at, _ in new)
    for where, what in find_refused(new).items():
        log.warning(
            "%s: %s holds %s, no plain data: this checkpoint can be loaded only with "
            "allow_pickle=True, by whoever trusts it. Save numbers, strings, lists, dicts or "
            "tensors in its place.",
            path,
            where,
            what,
        )
