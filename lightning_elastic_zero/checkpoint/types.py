"""Requests, options, results and progress of saves and loads."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.manifest import Manifest
from lightning_elastic_zero.core.progress import Progress, ShowBytes, show_nothing
from lightning_elastic_zero.core.tensors import RankState
from lightning_elastic_zero.core.text import format_tree_path
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.formats.client_state import Objects, find_unknown
from lightning_elastic_zero.formats.elastic_plan import writes_weights
from lightning_elastic_zero.storage.object_store import AnyPath

REPORT_EVERY_S = 10.0
"""Interval between log messages during long reads and writes."""

log = logging.getLogger(__name__)


def accept_any(_manifest: Manifest, /) -> None:
    """Refuse no checkpoint."""


def is_any_series(_path: AnyPath, _manifest: Manifest, /) -> bool:
    """Take all checkpoints for one series."""
    return True


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Options of a save."""

    weights_only: bool = False
    """Write masters, frozen weights and buffers, but no optimizer state."""
    exclude_frozen: bool = False
    """Leave out frozen weights; a load keeps those of the model."""
    left_out: frozenset[str] = frozenset()
    """Names of frozen weights and buffers to leave out. Trained weights are always written."""
    module_weights: bool = False
    """Also write the low-precision weights, for tools that require them."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the manifest's ``progress`` that the trainer counts, instead of the engine."""
    step: int | None = None
    """Optimizer steps as counted by the trainer; None: as counted by the engine."""
    show: ShowBytes = show_nothing
    """Shows this rank's progress; not used by background saves."""
    warned_entries: set[str] = field(default_factory=set)
    """Entries of the client state that were already warned of, because ranks differ in them."""
    warned_objects: set[str] | None = field(default_factory=set)
    """Paths of objects that were already warned of, as loads refuse them; None: no warnings."""
    examined_modules: set[tuple[str, type]] = field(default_factory=set)
    """Names and classes of modules already examined for entries that a save does not contain."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """One save on this rank: what is saved, and where."""

    engine: LiveEngine
    path: str | os.PathLike[str]
    """The checkpoint directory, or a URL in an object store; equal on all ranks."""
    client_state: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's state; rank 0's is saved for all ranks."""
    options: SaveOptions = field(default_factory=SaveOptions)
    rank_state: Mapping[str, Any] = field(default_factory=dict)
    """This rank's own state."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of a load."""

    optimizer_state: bool = True
    """False: the optimizer starts fresh on the saved weights."""
    hyperparameters: bool = True
    """False: learning rate, weight decay, ... keep their configured values."""
    counters: bool = True
    """False: step counters and loss scale stay as they are in the engine."""
    lr_scheduler: bool = True
    """False: the engine's scheduler stays as it is, even if hyperparameters are restored."""
    strict: bool = True
    """False: frozen parameters and buffers may be missing or unexpected; with a fresh optimizer
    also trained parameters."""
    strict_optimizer: bool = True
    """False: the set of trained parameters and their groups may differ from the save."""
    allow_pickle: bool = False
    """Unpickle objects of any class in the trainer's state, which can run arbitrary code."""
    fallback: bool = False
    """If the checkpoint is damaged, load the newest older intact one in its folder."""
    in_series: Callable[[AnyPath, Manifest], bool] = is_any_series
    """Whether a checkpoint belongs to the same series of saves as the damaged one; ``fallback``
    loads no other."""
    folders: tuple[str, ...] = ()
    """Folders of the run's callbacks, which may save into folders below them."""
    show: ShowBytes = show_nothing
    """Shows this rank's progress."""
    check: Callable[[Manifest], None] = accept_any
    """Called on each rank before anything is changed; raises to refuse the checkpoint."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of names in the checkpoint, and their replacements in the model."""


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
    requests: int = 0
    """Requests of all ranks to an object store, without repetitions; 0 on a disk, and 0 on
    ranks other than 0 for a load."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of a load."""

    client_state: dict[str, Any]
    """State of trainer, module, data module and callbacks, or your ``client_state``."""
    manifest: Manifest
    """Manifest of the checkpoint; for other software, as far as it could be read."""
    stats: CheckpointStats
    """Path, time and size."""
    source_summary: str = ""
    """Kind, writer and missing state of an incomplete checkpoint; otherwise empty."""
    rank_state: dict[str, Any] = field(default_factory=dict)
    """Your ``rank_state`` of this rank; empty on another number of ranks than at the save."""
    instead_of: str = ""
    """The damaged checkpoint that an older one replaced (``fallback``); usually empty."""
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


def manifest_to_save(manifest: Manifest, options: SaveOptions) -> Manifest:
    """Return an engine's manifest as it is saved: with stage, progress and excluded names.

    Only frozen weights and buffers can be excluded.
    """
    manifest = replace(
        manifest,
        # An engine without an optimizer has no stage: the files are ZeRO-1's.
        stage=manifest.stage or int(not manifest.groups),
        progress=replace(manifest.progress, **options.progress),
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


def state_to_save(state: RankState, manifest: Manifest, rank: int) -> RankState:
    """Return the part of a rank's state that it writes."""
    flats, writes = state.flats, writes_weights(manifest, rank)
    if manifest.weights_only:
        flats = tuple(replace(flat, elementwise={}) for flat in flats)
    frozen = {p.name for p in manifest.frozen if writes}
    return replace(
        state,
        flats=flats,
        frozen={name: piece for name, piece in state.frozen.items() if name in frozen},
        module_weights=state.module_weights if writes else {},
        module_buffers={name: state.module_buffers[name] for name in manifest.module_buffers},
    )


def warn_of_objects(path: AnyPath, objects: Objects, warned: set[str] | None) -> None:
    """Rank 0: warn once of each object that a load without ``allow_pickle`` refuses."""
    if warned is None:
        return
    new = [(at, value) for at, value in objects if format_tree_path(at) not in warned]
    warned.update(format_tree_path(at) for at, _ in new)
    for where, name in find_unknown(tuple(new)).items():
        log.warning(
            "%s: %s contains a Python object of %s, which is not plain data: loading this "
            "checkpoint needs allow_pickle=True. Save numbers, strings, lists, dicts or tensors "
            "instead.",
            path,
            where,
            name,
        )
