"""Types of saving and loading: the live engine, options, and results.

The interface through which saves and loads use a live engine, without importing DeepSpeed.

Selection of what a save writes, and its warnings: weights left out, objects to allow.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.manifest import Manifest, Plain
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.tensors import RankState, RestoreTargets
from lightning_elastic_zero.core.text import format_tree_path
from lightning_elastic_zero.formats.client_state import Objects
from lightning_elastic_zero.formats.pickles import find_refused

REPORT_EVERY_S = 10.0
"""How often long reading and writing says how far it is."""

log = logging.getLogger(__name__)

ShowBytes: TypeAlias = Callable[[str, int, int], None]
"""Told what is being done (``"reading"``), how many bytes of it this rank has done since it was
told last, and how many there will be; 0: nobody knows."""


def show_nothing(_doing: str, _count: int, _total: int, /) -> None:
    """Show nothing of what is done."""


def accept_any(_manifest: Manifest, /) -> None:
    """Refuse no checkpoint."""


class LiveState(Protocol):
    """What a live engine offers; ``lightning_elastic_zero.engine`` implements it twice."""

    def describe(self) -> Manifest:
        """Return what it is, as a manifest without files."""
        ...

    def rank_state(self, *, exclude_frozen: bool, keep_module_weights: bool) -> RankState:
        """Return what this rank holds, by reference."""
        ...

    def weights_match_masters(self) -> bool:
        """Whether this rank's trained weights are its masters, rounded; True without masters."""
        ...

    def keeps_masters(self) -> bool:
        """Whether masters are restored as they were saved, and not rounded to the weights."""
        ...

    def module_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the persistent module buffers, by reference."""
        ...

    def module(self) -> torch.nn.Module:
        """Return the module; its weights may be partitioned."""
        ...

    def check_optimizer(
        self, source: Manifest, *, state: bool, hyperparameters: bool, stepped: bool
    ) -> None:
        """Refuse the state, and the hyperparameters, of another optimizer.

        Args:
            source: of the checkpoint.
            state: whether the optimizer's state is wanted.
            hyperparameters: whether those of the parameter groups are.
            stepped: whether the saved run may have taken a step.
        """
        ...

    def check_scheduler(self, saved: Mapping[str, object]) -> None:
        """Refuse the state of another kind of scheduler."""
        ...

    def allocate_targets(self, source: Manifest, *, with_optimizer: bool) -> RestoreTargets:
        """Allocate buffers to fill, and then to commit or to roll back; nothing live is lost."""
        ...


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """What a save writes."""

    weights_only: bool = False
    """Masters, frozen weights and buffers, and no optimizer state."""
    exclude_frozen: bool = False
    """Leave out weights that the optimizer does not own; a load keeps the model's own."""
    left_out: frozenset[str] = frozenset()
    """Names of frozen weights and buffers that are not to be written; trained ones always are."""
    module_weights: bool = False
    """Write the low-precision weights too, for tools that insist on them."""
    sampler: Mapping[str, Plain] = field(default_factory=dict)
    """How far the run is in its data, for the manifest's ``progress.sampler``."""
    module_buffers: Mapping[str, torch.Tensor] | None = None
    """Module buffers to save in the place of the live ones: those of the last optimizer step."""
    step: int | None = None
    """Optimizer steps as the trainer counts them; None: as the engine does."""
    fingerprint: bool = False
    """Compute the state's fingerprint, and record it beside the state."""
    show: ShowBytes = show_nothing
    """Told how far this rank is; not of a save in the background."""
    warned_objects: set[str] | None = field(default_factory=set)
    """Places of objects that were told of already, since a load refuses them; None: nobody is."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a load restores."""

    optimizer_state: bool = True
    """False: a fresh optimizer on the saved weights."""
    hyperparameters: bool = True
    """False: learning rate, weight decay, ... stay as they are configured now."""
    lr_scheduler: bool = True
    """False: the engine's scheduler stays as it is, even if hyperparameters are restored."""
    strict: bool = True
    """False: frozen parameters and buffers may be missing, or too many; with a fresh optimizer
    trained parameters too."""
    strict_optimizer: bool = True
    """False: other parameters may be trained than when saved, and in other groups."""
    allow_pickle: bool = False
    """Build Python objects of any class from the trainer's state; that can run code."""
    fallback: bool = False
    """Where the checkpoint is damaged, take the newest older one beside it that is sound."""
    fingerprint: bool = False
    """Compare the state that is live after the load with the fingerprint that its save recorded."""
    show: ShowBytes = show_nothing
    """Told how far this rank is."""
    check: Callable[[Manifest], None] = accept_any
    """Called on each rank before anything is changed; raises to refuse the checkpoint."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of names in the checkpoint, and what they are in the model."""
    rank_entry_path: tuple[str, ...] = ()
    """Path of an entry of the client state that is wanted of other ranks too, where as many as
    there are now did not save: of those whose part this rank takes over."""


@dataclass(frozen=True, slots=True)
class CheckpointStats:
    """Duration and size of a save or load."""

    path: str
    """Absolute path of the checkpoint."""
    seconds: float
    """Seconds from the call until all ranks have finished."""
    bytes: int
    """Bytes that all ranks wrote or read."""
    waited_s: float
    """Seconds for which this rank's training was stopped."""
    step: int = 0
    """Optimizer steps at the save, as counted by the trainer, or by DeepSpeed without one."""
    write_s: float = 0.0
    """Seconds of a save until all ranks have written and synced their files."""
    publish_s: float = 0.0
    """Seconds of a save from then until publication."""
    fingerprint: str = ""
    """Checksum of the saved state, or of the live state after a load; empty if it was not requested
    or could not be compared."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of a load."""

    client_state: dict[str, Any]
    """State of trainer, module, data module and callbacks, or your ``client_state``."""
    manifest: Manifest
    """Manifest of the checkpoint; for other software, as far as it could be read."""
    stats: CheckpointStats
    """Path, seconds and bytes."""
    source_summary: str = ""
    """Kind, writer and missing state of an incomplete checkpoint; otherwise empty."""
    rank_entries: Mapping[int, Any] = field(default_factory=dict)
    """Requested entries of other ranks, by rank of the save."""
    instead_of: str = ""
    """The damaged checkpoint that an older one replaced (``fallback``); usually empty."""
    fingerprint_result: str = ""
    """Result of the comparison of fingerprints, in words; empty if it was not requested."""
    group_origins: tuple[int | None, ...] = ()
    """For each live parameter group, the index of its saved group; None: it is new."""


def io_progress(
    doing: str,
    ranks: Ranks,
    show: ShowBytes = show_nothing,
    total_bytes: int = 0,
    check_cancelled: Callable[[], None] = lambda: None,
) -> Progress:
    """Return the progress of long I/O, which this rank reports to the other ranks and shows."""
    done, reported = 0, time.monotonic()

    def check() -> None:
        check_cancelled()
        ranks.progress.check()

    def advance(count: int) -> None:
        nonlocal done, reported
        done += count
        show(doing, count, total_bytes)
        if ranks.rank == 0 and time.monotonic() - reported > REPORT_EVERY_S:
            reported = time.monotonic()
            log.info("%s a checkpoint: %.1f GB on rank 0 so far", doing, done / 1e9)

    return Progress(check, advance)


@dataclass(frozen=True, slots=True)
class EngineHandle:
    """An engine's state and its steps, as callables; ``api.engine_handle`` makes one."""

    open: Callable[[], LiveState]
    """Returns the engine's state; raises for an engine that is not supported."""
    global_step: Callable[[], int]
    """Returns the number of optimizer steps, by which ranks tell one call from another."""
    add_step_pre_hook: Callable[[Callable[[], None]], Callable[[], None]]
    """Registers what is called right before an optimizer step; returns what removes it."""
    updates_state_before_step: Callable[[], bool]
    """Whether optimizer states change before the optimizer steps, as with Muon."""
    recovery_script: Callable[[], Path | None]
    """Returns the script that is laid beside the files of a checkpoint."""
    before_change: Callable[[], None] = lambda: None
    """Waits until no save in the background reads the engine's own tensors any more."""

    def at_step(self) -> str:
        """Return where the run stands, for the name of a step that all ranks take."""
        return f"at step {self.global_step()}"


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
