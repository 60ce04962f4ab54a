"""Loading a checkpoint into a live engine, completely or not at all.

One attempt has four steps on all ranks: rank 0 finds the checkpoint; each rank opens and checks it
(``load_checks``); reads its part; changes the engine.
"""

from __future__ import annotations

import heapq
import logging
import os
import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from lightning_elastic_zero.checkpoint.extra_state import restore_extra_states
from lightning_elastic_zero.checkpoint.fallback import find_fallback, is_there
from lightning_elastic_zero.checkpoint.load_checks import (
    Checked,
    check_infinite_weights,
    check_load,
    check_masters,
    report_changed_weights,
    source_summary,
)
from lightning_elastic_zero.checkpoint.nodes import join_folder_of
from lightning_elastic_zero.checkpoint.shards import describe_drifted
from lightning_elastic_zero.checkpoint.streams import finish_device_work
from lightning_elastic_zero.checkpoint.types import (
    CheckpointStats,
    LoadOptions,
    LoadResult,
    io_progress,
)
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.compatibility import LISTED
from lightning_elastic_zero.core.group_matching import match_groups, origins_of
from lightning_elastic_zero.core.layout import Fragment, Resharding, TransferPlan
from lightning_elastic_zero.core.manifest import Manifest, TrainingProgress
from lightning_elastic_zero.core.names import mapping_to
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.tensors import RestoreTargets, RestoreValues
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.errors import DAMAGE_ERRORS, CheckpointFormatError, RanksError
from lightning_elastic_zero.formats.copies import drifted_copies
from lightning_elastic_zero.formats.newest import manifest_of
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.formats.reader import WEIGHT, CheckpointReader, scalars_by_buffer
from lightning_elastic_zero.formats.renamed import RenamedReader
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import AnyPath, parse_path

_MOST_REPLACED = 5
"""How often a load starts again because its checkpoint was replaced."""

_NOTHING_TO_TAKE = (
    "fallback=True found no older intact checkpoint of this model in the same folder."
)

log = logging.getLogger(__name__)


@torch.inference_mode(mode=False)
def load_engine(
    live: LiveEngine, path: str | os.PathLike[str], ranks: Ranks, options: LoadOptions
) -> LoadResult:
    """Restore a checkpoint into a live engine, completely or not at all. Collective.

    Creates normal tensors even under ``torch.inference_mode``, since inference tensors cannot be
    trained.

    If the checkpoint is damaged, the error names an older intact one. With ``fallback`` it is
    loaded instead, with a warning. An ``OSError`` of the disk is not damage: it may be temporary.

    Raises:
        CheckpointNotFoundError: the path has no checkpoint.
        CheckpointFormatError: the path is not a readable checkpoint.
        CheckpointMismatchError: the checkpoint does not fit this model or lacks requested state.
        CheckpointCorruptedError: the checkpoint is damaged.
        RanksError: a rank failed, died, or did not call this function.
    """
    finish_device_work()  # A background save may still copy state that the load replaces.
    join_folder_of(path, ranks)
    try:
        return _load(path, live, ranks, options)
    except DAMAGE_ERRORS as error:
        fits_model = partial(_has_same_shapes, live, options)
        fallback = find_fallback(path, ranks, fits_model, options)
        if fallback is None:
            if not options.fallback or not is_there(parse_path(path)):
                raise
            msg = f"{error}\n{_NOTHING_TO_TAKE}"
            raise type(error)(msg) from error
        older, step = fallback
        if not options.fallback:
            where = (
                " in the same folder" if parse_path(older).parent == parse_path(path).parent else ""
            )
            msg = (
                f"{error}\nThe newest older intact checkpoint{where} is {older} (step "
                f"{step}). It has the same parameters, but may belong to another run. Load that "
                "one, or pass fallback=True."
            )
            raise type(error)(msg) from error
        if ranks.rank == 0:
            log.warning(
                "%s is damaged: %s\nWith fallback=True, %s (step %d) is loaded instead; later "
                "steps are trained again.",
                path,
                error,
                older,
                step,
            )
    return replace(_load(older, live, ranks, options), instead_of=str(path))


def _has_same_shapes(live: LiveEngine, options: LoadOptions, saved: Manifest) -> bool:
    """Whether a checkpoint and the model share parameters, all of the same shapes."""
    described = live.describe()
    renaming = mapping_to(described.names(), options.renamed)
    shapes = {p.name: p.shape for p in described.parameters}
    pairs = [(renaming.live_name(p.name), p.shape) for p in saved.parameters]
    shared = [shapes[name] == shape for name, shape in pairs if name in shapes]
    return bool(shared) and all(shared)


def _load(
    path: str | os.PathLike[str], live: LiveEngine, ranks: Ranks, options: LoadOptions
) -> LoadResult:
    """Restore one checkpoint, or leave the engine as it was.

    A checkpoint that is replaced meanwhile loses its files. The new one is loaded instead.
    """
    found: list[str] = []
    for _ in range(_MOST_REPLACED):
        try:
            return _load_once(path, live, ranks, options, found)
        except DAMAGE_ERRORS:
            step = "load: look whether the checkpoint was replaced"
            if not ranks.broadcast(step, lambda: _is_replaced(path, found)):
                raise
            log.info("%s was replaced during the load; the new checkpoint is loaded", path)
    return _load_once(path, live, ranks, options, found)


def _is_replaced(path: str | os.PathLike[str], found: Collection[str]) -> bool:
    """Rank 0: whether a checkpoint is at the path that was not found there before."""
    with suppress(OSError):
        manifest = manifest_of(folder_at(path).follow_links().path)
        return manifest is not None and manifest.save_id not in found
    return False


def _load_once(
    path: str | os.PathLike[str],
    live: LiveEngine,
    ranks: Ranks,
    options: LoadOptions,
    found: list[str],
) -> LoadResult:
    """Make one attempt; on rank 0, ``found`` gets the save id."""
    began, asked, where = time.monotonic(), folder_at(path), str(path)
    requests = asked.requests
    with ExitStack() as files, ExitStack() as undo:
        opened: list[CheckpointReader] = []

        def find() -> dict[str, Any]:
            live.check()
            directory = _find(path, ranks)
            opened.append(_open(directory, options, ranks.progress, files))
            found.append(opened[0].manifest.save_id)
            opened[0].check_all()
            _warn_of_copies(where, opened[0], ranks.progress)
            return asdict(_Found(str(directory), found[-1]))

        first = _Found(**ranks.broadcast("load: find the checkpoint", find, live.check))
        step = f"load {first.path}"

        def open_and_check() -> tuple[CheckpointReader, Checked]:
            if not opened:
                opened.append(_open_same(path, first, options, ranks.progress, files))
            here = live.describe()
            source = _under_names_of(here, opened[0], options, first.path)
            return source, check_load(source, live, here, options, where, ranks, undo)

        source, checked = ranks.run_all(f"{step}: open and check", open_and_check)
        read = partial(_read, source, live, checked, options, where, ranks, undo)
        filled = ranks.run_all(f"{step}: read", read)
        undo.pop_all()
        failure = _commit(filled)

    def finish() -> dict[str, Any]:
        if failure is not None:
            raise failure
        # After all that must not fail: this calls the module's own code.
        extra, warns = checked.shared.extra_states, ranks.rank == 0
        restore_extra_states(live.module(), extra, where, warns=warns)
        return asdict(
            _Costs(
                filled.bytes_read,
                asked.requests - requests,
                checked.unverified,
                filled.changed_weights[:LISTED],
                restores_both=filled.values.has_other_weights,
            )
        )

    costs = [_Costs(**of_rank) for of_rank in ranks.gather(f"{step}: done", finish) or []]
    _warn(where, checked, costs)
    seconds = time.monotonic() - began
    return LoadResult(
        client_state=dict(checked.shared.client_state),
        manifest=source.manifest,
        stats=CheckpointStats(
            first.path,
            seconds,
            bytes=sum(of_rank.bytes_read for of_rank in costs),
            waited_s=seconds,
            step=_step_of(source.manifest.progress),
            requests=sum(of_rank.requests for of_rank in costs),
        ),
        source_summary=source_summary(source).rstrip(",") if source.info.lacks else "",
        rank_state=dict(checked.shared.rank_state),
        group_origins=filled.values.group_origins,
    )


# -- steps of an attempt -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    """Rank 0's message to all ranks: the checkpoint to load."""

    path: str
    save_id: str


def _find(path: str | os.PathLike[str], ranks: Ranks) -> AnyPath:
    """Rank 0: find the checkpoint, behind links, so that all ranks open the same one."""
    asked = folder_at(path)
    asked.check_shareable(ranks.world_size)
    asked.repair()
    return asked.follow_links_if_exists().path


def _warn_of_copies(where: str, source: CheckpointReader, progress: Progress) -> None:
    """Rank 0: warn of weights that tensor ranks trained apart; a save of this library has."""
    if not source.manifest.files and (drifted := drifted_copies(source, progress)):
        log.warning(
            "%s: %s. On the same number of tensor ranks, each gets its own copy back; on another "
            "number, some are dropped.",
            where,
            describe_drifted(drifted),
        )


def _open(
    directory: AnyPath, options: LoadOptions, progress: Progress, files: ExitStack
) -> CheckpointReader:
    source = open_checkpoint(directory, allow_pickle=options.allow_pickle, progress=progress)
    return files.enter_context(closing(source))


def _open_same(
    path: str | os.PathLike[str],
    first: _Found,
    options: LoadOptions,
    progress: Progress,
    files: ExitStack,
) -> CheckpointReader:
    """Open the checkpoint that rank 0 found."""
    directory = parse_path(first.path)
    mine = folder_at(path).follow_links().path
    if mine != directory:
        log.warning("this rank requested %s; all ranks load rank 0's path %s", mine, directory)
    source = _open(directory, options, progress, files)
    if source.manifest.save_id != first.save_id:
        msg = (
            f"{directory} contains save {source.manifest.save_id} on this rank and "
            f"{first.save_id} on rank 0. Load from a directory that all ranks share; if a save "
            "has just replaced it, load again"
        )
        raise CheckpointFormatError(msg)
    return source


def _under_names_of(
    here: Manifest, source: CheckpointReader, options: LoadOptions, where: str
) -> CheckpointReader:
    """Return a checkpoint under the model's names."""
    renaming = mapping_to(here.names(), options.renamed)
    if not options.renamed and all(renaming.live_name(n) == n for n in source.manifest.names()):
        return source
    return RenamedReader(source, renaming, where)


@dataclass(frozen=True, slots=True)
class _Filled:
    """Values that one rank has read, ready to be committed."""

    targets: RestoreTargets
    values: RestoreValues
    bytes_read: int
    changed_weights: tuple[str, ...]
    """Parameters of which this rank's module weights were not the rounded masters."""


def _read(
    source: CheckpointReader,
    live: LiveEngine,
    checked: Checked,
    options: LoadOptions,
    where: str,
    ranks: Ranks,
    undo: ExitStack,
) -> _Filled:
    """Fill this rank's buffers from the checkpoint; ``undo`` gets their rollback."""
    with_optimizer = checked.scope.optimizer_state
    targets = live.allocate_targets(checked.saved, with_optimizer=with_optimizer)
    undo.callback(targets.rollback)
    owned = {parameter.name for parameter in source.manifest.optimized}
    resharding = source.manifest.resharding(checked.here, live.tensor_rank)
    trained = [f for f in targets.fragments if f.name in owned]
    masters = TransferPlan(trained, source.layout(), resharding)
    others = [f for f in targets.fragments if f.name not in owned]
    frozen = TransferPlan(others, source.frozen_layout(), resharding)
    source.check(masters.ranks, frozen.ranks)
    values = _values(source, checked, options, trained, resharding)
    states = [tensor for of_flat in targets.states for tensor in of_flat.values()]
    size_bytes = sum(tensor.nbytes for tensor in (*targets.weights, *states))
    progress = io_progress("reading", ranks, options.show, size_bytes)
    stateful = {name for group in checked.saved.groups for name in group.names}
    fresh = {fragment.name for fragment in targets.fragments if fragment.name not in stateful}
    tensors = zip(targets.weights, targets.states, strict=True)
    filled = [{WEIGHT: weight, **of_flat} for weight, of_flat in tensors]
    bytes_read = 0
    # From one source rank after the other; never all transfers at once.
    for _, transfers in heapq.merge(masters.by_rank(), frozen.by_rank(), key=itemgetter(0)):
        bytes_read += source.read(transfers, filled, progress, weights_only=fresh)
    if checked.resumes:
        check_masters(source, where)
    if source.weights_differ:
        # A resume restores both. Otherwise, the module's weights are the result of training.
        weights = targets.round_masters() if checked.resumes else ()
        values = replace(values, module_weights=weights)
        written = (*weights, *targets.weights[len(weights) :])
        for _, transfers in masters.by_rank():
            bytes_read += source.read_module_weights(transfers, targets.weights, written, progress)
    check_infinite_weights(
        where, targets, source.manifest, checked.here, keeps_masters=live.keeps_masters()
    )
    return _Filled(targets, values, bytes_read, tuple(source.comparison.changed))


def _values(
    source: CheckpointReader,
    checked: Checked,
    options: LoadOptions,
    wanted: Iterable[Fragment],
    resharding: Resharding,
) -> RestoreValues:
    """Return the values to commit with the buffers; weights alone begin a new run."""
    scope, saved, here, shared = checked.scope, checked.saved, checked.here, checked.shared
    resumes = bool(here.groups) and not saved.weights_only and options.counters
    same_groups = scope.strict_optimizer and len(here.groups) == len(source.manifest.groups)
    return RestoreValues(
        scalars=scalars_by_buffer(source, here, saved.groups, wanted, resharding)
        if scope.optimizer_state
        else tuple({} for _ in here.buffers),
        groups=tuple(group.hyperparameters for group in saved.groups),
        module_buffers=shared.buffers,
        progress=saved.progress if resumes and source.info.has_counters else here.progress,
        loss_scaler=shared.loss_scaler if resumes else {},
        lr_scheduler=shared.lr_scheduler if scope.lr_scheduler else None,
        optimizer_state=source.optimizer_state() if scope.optimizer_state else None,
        optimizer=saved.writer.optimizer,
        group_origins=tuple(range(len(here.groups)))
        if same_groups
        else origins_of(match_groups(source.manifest, here)),
        saved_groups=len(source.manifest.groups),
        restores_state=scope.optimizer_state,
        restores_hyperparameters=scope.hyperparameters,
    )


def _commit(filled: _Filled) -> RanksError | None:
    """Change the engine; return a failure instead of raising it, so that all ranks raise."""
    try:
        filled.targets.commit(filled.values)
    except Exception as error:  # noqa: BLE001 (raised on all ranks)
        failure = RanksError(
            "the load failed while changing the engine, which now has a mixture of states: "
            f"{type(error).__name__}: {error}. Do not continue training: restart the run."
        )
        failure.__cause__ = error
        return failure
    return None


@dataclass(frozen=True, slots=True)
class _Costs:
    """A rank's message to rank 0 after a load."""

    bytes_read: int
    requests: int
    unverified: int
    changed_weights: Collection[str]
    restores_both: bool
    """Whether the module got weights that are not the rounded masters."""


def _warn(where: str, checked: Checked, costs: Collection[_Costs]) -> None:
    """Rank 0: warn of files without checksums, and of changed weights."""
    if count := sum(of_rank.unverified for of_rank in costs):
        log.warning(
            "%s: %d of its files have no checksums, so a damaged byte in them goes unnoticed "
            "(`verify` lists them)",
            where,
            count,
        )
    if changed := list(dict.fromkeys(n for of_rank in costs for n in of_rank.changed_weights)):
        both = any(of_rank.restores_both for of_rank in costs)
        report_changed_weights(where, checked, changed, both=both)


def _step_of(progress: TrainingProgress) -> int:
    """Return the step at which a checkpoint was saved, as its trainer counted."""
    step = progress.sampler.get("global_step")
    return step if isinstance(step, int) else progress.global_steps
