"""Fingerprints of live state: computed from all ranks, and compared after a load.

A fingerprint covers names, shapes and dtypes as well as elements. State that a load restores under
other names, in other dtypes or not at all cannot be compared; the result states why. All other
state must be equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import xxhash

from lightning_elastic_zero.checkpoint.streams import can_pin
from lightning_elastic_zero.checkpoint.types import SaveOptions, state_to_save
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.compatibility import RestoreScope
from lightning_elastic_zero.core.fingerprint import (
    STEP,
    Fingerprint,
    FingerprintPart,
    TensorId,
    add_up,
    run_part,
    scalars_part,
)
from lightning_elastic_zero.core.layout import spans
from lightning_elastic_zero.core.manifest import MODULE_WEIGHTS, SCALARS, Group, Manifest
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import (
    RankState,
    bit_sums,
    dtype_name,
    is_on_device,
)
from lightning_elastic_zero.core.text import format_ranks
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.errors import CheckpointCorruptedError, CheckpointFormatError

PIECE_BYTES = 8 << 20
"""Bytes between two reports of progress: about 0.3 ms."""

_Run: TypeAlias = "tuple[TensorId, int, torch.Tensor]"
"""A tensor, the index of the first element, and the elements."""


def live_fingerprint(
    manifest: Manifest,
    state: RankState,
    ranks: Ranks,
    step: str = "fingerprint",
    progress: Progress | None = None,
) -> Fingerprint:
    """Compute the fingerprint that a checkpoint of a state would have. Collective.

    Tensors on a device are read through a small buffer. ``progress`` replaces ``ranks.progress``.
    """

    def own_part() -> list[int]:
        return rank_part(manifest, state, ranks.rank, progress or ranks.progress).to_plain()

    # Through rank 0, so that ranks do not receive the parts of all others.
    parts = ranks.gather(step, own_part)
    return Fingerprint.from_text(
        ranks.broadcast(f"{step}: add up", lambda: str(add_up(parts or []).total()))
    )


@torch.no_grad()
def rank_part(
    manifest: Manifest,
    state: RankState,
    rank: int,
    progress: Progress = NO_PROGRESS,
) -> FingerprintPart:
    """Return one rank's part: flat buffers, pieces of frozen weights; on rank 0 module buffers."""
    total = FingerprintPart()
    for index, flat in enumerate(state.flats):
        group = manifest.groups[manifest.buffers[index].group]
        step = group.hyperparameters.get(STEP)
        kept_apart = STEP not in flat.scalars and group.state and not manifest.weights_only
        apart = step if kept_apart and isinstance(step, int | float) else None
        scalars = flat.scalars if apart is None else {**flat.scalars, STEP: apart}
        firsts = (f.name for f in flat.fragments if f.start == 0 and not manifest.weights_only)
        for name in firsts:
            total += scalars_part(name, scalars.items())
    buffer = _HostBuffer()
    for which, start, values in _runs(manifest, state, rank):
        for at, stop in spans(0, values.numel(), PIECE_BYTES // values.dtype.itemsize):
            total += run_part(which, start + at, buffer.on_host(values[at:stop]))
            progress.check()
    return total


def _runs(manifest: Manifest, state: RankState, rank: int) -> Iterator[_Run]:
    """Yield the runs of elements in a rank's part."""
    shapes = {p.name: p.shape for p in manifest.parameters}
    for flat in state.flats:
        for fragment in flat.fragments:
            name, shape = fragment.name, shapes[fragment.name]
            where = slice(fragment.offset, fragment.offset + fragment.stop - fragment.start)
            master = flat.master[where]
            yield _weight(name, master, shape), fragment.start, master
            for key, values in ({} if manifest.weights_only else flat.elementwise).items():
                which = TensorId("optimizer", name, key, values.dtype, shape)
                yield which, fragment.start, values[where]
    for fragment in manifest.frozen_layout().on_rank(rank):
        piece = state.frozen[fragment.name]
        which = _weight(fragment.name, piece, shapes[fragment.name])
        yield which, fragment.start, piece.reshape(-1)
    for name, tensor in ({} if rank else state.module_buffers).items():
        if tensor.numel():
            yield _weight(name, tensor, tuple(tensor.shape)), 0, tensor.reshape(-1)


class _HostBuffer:
    """Host memory for one piece of a tensor on a device; pinned where that makes copies fast."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def on_host(self, piece: torch.Tensor) -> torch.Tensor:
        """Return a piece on the host; it is valid until the next call."""
        if not is_on_device(piece):
            return piece
        if self._memory is None:
            pins = can_pin(piece.device)
            self._memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pins)
        return self._memory[: piece.nbytes].view(piece.dtype).copy_(piece)


def _weight(name: str, values: torch.Tensor, shape: tuple[int, ...]) -> TensorId:
    return TensorId("weights", name, "", values.dtype, shape)


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state in a checkpoint."""

    where: str
    """Path of the checkpoint."""
    recorded: str
    """Recorded fingerprint; empty if none."""
    manifest: Manifest
    """With the model's names."""
    buffers: Mapping[str, torch.Tensor]
    """Saved module buffers."""
    renamed: bool
    """Whether names differ from the saved ones."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a comparison without a difference."""

    fingerprint: str
    """Fingerprint of the live state; empty if it was not computed."""
    text: str
    """Result in words."""


@dataclass(frozen=True, slots=True)
class _ComparedState:
    """The live state of this rank."""

    manifest: Manifest
    """The engine's manifest, without state that the save left out."""
    state: RankState
    weights: str
    """Digest of the weights that each rank has whole. Buffers may differ between ranks."""
    matches: bool
    """Whether the weights equal the rounded masters, or need not."""


def check_loaded(
    saved: SavedState, live: LiveEngine, scope: RestoreScope, ranks: Ranks, step: str
) -> Verdict:
    """Compare the live state with the recorded fingerprint. Collective.

    Raises:
        CheckpointCorruptedError: the states differ; the message has both fingerprints.
        CheckpointFormatError: the recorded fingerprint is invalid.
    """
    if not saved.recorded:
        return Verdict("", "its save recorded no fingerprint")
    recorded = _parsed(saved)
    why_not = ranks.broadcast(f"{step}: compare", lambda: _why_not(saved, live, scope))
    if why_not["weights"] and why_not["optimizer"]:
        return Verdict("", f"not compared with the fingerprint of its save: {why_not['weights']}")
    with_optimizer = not why_not["optimizer"]
    held = ranks.run_all(
        f"{step}: look at the engine",
        lambda: _compared_state(saved, live, with_optimizer=with_optimizer),
    )
    found = live_fingerprint(held.manifest, held.state, ranks, f"{step}: fingerprint")
    compared = [part for part in ("weights", "optimizer") if not why_not[part]]
    if any(getattr(found, part) != getattr(recorded, part) for part in compared):
        raise CheckpointCorruptedError(_difference(saved.where, compared, recorded, found))
    _check_weights(saved.where, held, ranks, step)
    if len(compared) > 1:
        return Verdict(str(found), f"the state is the one that was saved (fingerprint {found})")
    (part,) = compared
    (other,) = {"weights", "optimizer"} - {part}
    number = getattr(found, part)
    whose = (
        "the weights are those that were saved"
        if part == "weights"
        else "the optimizer's state is the one that was saved"
    )
    text = f"{whose} (fingerprint {number}); {other} not compared: {why_not[other]}"
    return Verdict(number, text)


def _parsed(saved: SavedState) -> Fingerprint:
    try:
        return Fingerprint.from_text(saved.recorded)
    except ValueError as error:
        msg = (
            f"{saved.where} records an invalid fingerprint: {error}. Pass fingerprint=False to "
            "load it without a comparison"
        )
        raise CheckpointFormatError(msg) from error


def _compared_state(saved: SavedState, live: LiveEngine, *, with_optimizer: bool) -> _ComparedState:
    manifest = _as_saved(saved.manifest, live.describe(), with_optimizer=with_optimizer)
    state = live.rank_state(exclude_frozen=False, keep_module_weights=True)
    left_out = set(saved.manifest.excluded)
    whole = [t for name, t in state.module_weights.items() if name not in left_out]
    # Each by itself: they may be on different devices.
    sums = [bit_sums([torch.view_as_real(t) if t.is_complex() else t]) for t in whole]
    weights = xxhash.xxh3_64_hexdigest(repr((sums, state.replica_sums)).encode())
    state = replace(state, module_weights={})
    state = state_to_save(state, manifest, SaveOptions())
    # A resume also restores weights that are not the rounded masters.
    matches = MODULE_WEIGHTS in saved.manifest.rank_state or live.weights_match_masters()
    return _ComparedState(manifest, state, weights, matches)


def _check_weights(where: str, held: _ComparedState, ranks: Ranks, step: str) -> None:
    """Compare weights with masters and between ranks, which the fingerprint does not cover.

    Raises CheckpointCorruptedError if they differ.
    """
    of_ranks = ranks.gather(f"{step}: weights", lambda: [held.weights, held.matches]) or []

    def faults() -> list[str]:
        others = [rank for rank, (weights, _) in enumerate(of_ranks) if weights != of_ranks[0][0]]
        stale = [rank for rank, (_, matches) in enumerate(of_ranks) if not matches]
        found = [f"{format_ranks(others)}: other weights than rank 0"] if others else []
        if stale:
            found.append(f"{format_ranks(stale)}: weights that are not the masters, rounded")
        return found

    if found := ranks.broadcast(f"{step}: compare weights", faults):
        msg = (
            f"{where} was loaded, but ranks hold another state: {'; '.join(found)}. Do not train "
            "on it: the memory of a machine or this library is at fault. Resume on other machines, "
            "and report it"
        )
        raise CheckpointCorruptedError(msg)


def _as_saved(saved: Manifest, here: Manifest, *, with_optimizer: bool) -> Manifest:
    """Return the engine's manifest without state that the save left out."""
    left_out, buffers = set(saved.excluded), set(saved.module_buffers)
    return replace(
        here,
        weights_only=not with_optimizer,
        excluded=tuple(p.name for p in here.parameters if p.group is None and p.name in left_out),
        module_buffers=tuple(name for name in here.module_buffers if name in buffers),
    )


def _why_not(saved: SavedState, live: LiveEngine, scope: RestoreScope) -> dict[str, str]:
    """Return why the weights or the optimizer's state cannot be compared; empty if they can."""
    if saved.renamed:
        return dict.fromkeys(("weights", "optimizer"), "its names have changed")
    held, here = saved.manifest, _as_saved(saved.manifest, live.describe(), with_optimizer=True)
    kept = {name: b for name, b in live.module_buffers().items() if name in here.module_buffers}
    weights = _first_difference(
        {**_weights(held), **_buffers(saved.buffers)},
        {**_weights(here), **_buffers(kept)},
    )
    if MODULE_WEIGHTS in held.rank_state and (held.weights_only or not scope.optimizer_state):
        weights = weights or "the module's weights are restored, and it has that of the masters"
    if held.groups and not live.keeps_masters():
        weights = weights or "load_from_fp32_weights is false, so that the masters are rounded"
    if held.weights_only or not held.groups:
        return {"weights": weights, "optimizer": "it has none"}
    if not scope.optimizer_state:
        return {"weights": weights, "optimizer": "it is not restored"}
    optimizer = _first_difference(dict(_states(held)), dict(_states(here)))
    if SCALARS in held.rank_state and not held.has_same_partition(here):
        optimizer = optimizer or "each part of the weights had its own scalar states"
    if not optimizer and not scope.hyperparameters and any(map(_counts_apart, held.groups)):
        optimizer = "step counts are not restored"
    return {"weights": weights, "optimizer": optimizer}


def _weights(manifest: Manifest) -> dict[str, str]:
    """Return dtype and shape of each weight by name; for trained ones, of the master."""
    trained = ((p, manifest.master_dtype) for p in manifest.optimized)
    frozen = ((p, p.dtype) for p in manifest.frozen)
    return {p.name: f"{dtype} {p.shape}" for p, dtype in (*trained, *frozen)}


def _buffers(buffers: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{dtype_name(b.dtype)} {tuple(b.shape)}" for name, b in buffers.items()}


def _states(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield each optimizer state of each parameter, with its kind, dtype and shape."""
    shapes = {p.name: p.shape for p in manifest.optimized}
    for group in manifest.groups:
        for name in group.names:
            for key in group.state:
                kind = key.dtype if key.kind == "elementwise" else "scalar"
                yield f"{name}: {key.name}", f"{kind} {shapes[name]}"
            if _counts_apart(group):
                yield f"{name}: {STEP}", f"scalar {shapes[name]}"


def _counts_apart(group: Group) -> bool:
    """Whether the step count is in the parameter group instead of its states."""
    kept = any(key.name == STEP and key.kind == "scalar" for key in group.state)
    step = group.hyperparameters.get(STEP)
    return bool(group.state) and not kept and isinstance(step, int | float)


def _first_difference(saved: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Describe the first name that differs; empty if none does."""
    for name in sorted(saved.keys() | here.keys()):
        if saved.get(name) != here.get(name):
            was, now = saved.get(name, "not there"), here.get(name, "not there")
            return f"{name} was {was} when it was saved and is {now} here"
    return ""


def _difference(where: str, compared: list[str], recorded: Fingerprint, found: Fingerprint) -> str:
    parts = " and ".join(p for p in compared if getattr(found, p) != getattr(recorded, p))
    return (
        f"{where} was loaded, and the live state differs from the saved one: {parts} "
        f"differ. Its save recorded the fingerprint {recorded}, the live state has {found}. The "
        "engine holds what was loaded: do not train on it. If `lightning-elastic-zero fingerprint "
        f"{where}` prints the number that its save recorded, the file is sound, and the memory of "
        "a machine or this library is at fault: resume on other machines, and report it. If it "
        "prints another one, the state was damaged in memory while it was saved: resume from "
        "another checkpoint"
    )
