"""Requests, options, results and progress of saves and loads."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.manifest import Manifest
from lightning_elastic_zero.core.progress import Progress, ShowBytes, show_nothing
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.storage.paths import AnyPath

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
    """Options of one save. A user's are in ``api.ElasticOptions`` and ``api.save_checkpoint``."""

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
    node_copies: int | None = None
    """Number of nodes that have each file of a checkpoint on nodes; None: as before."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """One save on this rank: its target and its contents."""

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
    """Options of one load. A user's are in ``api.ElasticOptions`` and ``api.load_checkpoint``."""

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
    """Your ``rank_state`` of this rank; empty on other numbers of data or tensor ranks."""
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
