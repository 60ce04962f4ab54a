"""Loading: all that can be wrong is found before the first live byte is changed."""

from __future__ import annotations

import heapq
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.checkpoint.fallback import DAMAGE_ERRORS, find_fallback
from lightning_elastic_zero.checkpoint.types import (
    CheckpointStats,
    LiveState,
    LoadOptions,
    LoadResult,
    report_bytes,
)
from lightning_elastic_zero.compatibility import (
    BufferPair,
    RestoreScope,
    check_compatible,
    describe,
    describe_unrestored,
    rounded_buffers,
)
from lightning_elastic_zero.coordination import Ranks
from lightning_elastic_zero.errors import CheckpointFormatError, CheckpointMismatchError
from lightning_elastic_zero.formats import (
    WEIGHT,
    CheckpointReader,
    ReadRequest,
    RenamedReader,
    SharedState,
    open_checkpoint,
)
from lightning_elastic_zero.key_mapping import KeyMapping
from lightning_elastic_zero.layout import Fragment, Layout, Transfer, TransferPlan
from lightning_elastic_zero.manifest import Manifest, Progress
from lightning_elastic_zero.storage import check_local_path, repair_target
from lightning_elastic_zero.tensor_state import (
    OptimizerScope,
    RestoreTargets,
    RestoreValues,
    Scalar,
    canonical_repr,
    dtype_name,
    has_internal_overlap,
    is_lossy_cast,
)

log = logging.getLogger(__name__)


def load(
    path: str | os.PathLike[str], live: LiveState, ranks: Ranks, *, options: LoadOptions
) -> LoadResult:
    """Restore a checkpoint into a live engine, whole or not at all. Collective.

    Where it is damaged, the error names an older one that is sound; it is taken if the options
    allow it, and never without a warning.

    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointFormatError: something is there, but no checkpoint that can be read.
        CheckpointMismatchError: it does not fit this model, or lacks what is asked of it.
        CheckpointCorruptedError: it is damaged.
        RanksError: a rank failed, died, or did not call this.
    """
    try:
        return _load(path, live, ranks, options=options)
    except DAMAGE_ERRORS as error:
        older = find_fallback(path, ranks, partial(_has_same_shapes, live, options))
        if older is None:
            raise
        if not options.fallback:
            msg = (
                f"{error}\nThe newest older checkpoint beside it that is sound, every byte of it "
                f"verified, is {older.path} (step {older.step}). It has the same parameters, and "
                "may be of another run all the same. Load that one, or allow it by fallback=True."
            )
            raise type(error)(msg) from error
        if ranks.rank == 0:
            log.warning(
                "%s was asked for, and is not sound: %s\nInstead, %s (step %d) is loaded, as "
                "fallback=True allows: what was trained since then is trained anew.",
                path,
                error,
                older.path,
                older.step,
            )
    return replace(_load(older.path, live, ranks, options=options), instead_of=str(path))


def _has_same_shapes(live: LiveState, options: LoadOptions, saved: Manifest) -> bool:
    """Return whether a checkpoint and the model share parameters, all of the same shapes."""
    renaming = KeyMapping(options.renamed)
    here = {p.name: p.shape for p in live.describe().parameters}
    pairs = [(renaming.here(p.name), p.shape) for p in saved.parameters]
    shared = [here[name] == shape for name, shape in pairs if name in here]
    return bool(shared) and all(shared)


def _load(
    path: str | os.PathLike[str], live: LiveState, ranks: Ranks, *, options: LoadOptions
) -> LoadResult:
    """Restore one checkpoint, or leave the engine as it was."""
    began = time.monotonic()
    first = ranks.broadcast(
        "load: find the checkpoint", lambda: _find(path, options, ranks.progress)
    )
    directory = Path(first["path"])
    source = ranks.run_all(
        f"load {directory}: open", lambda: _open(path, first, options, ranks.progress)
    )
    try:
        once = ranks.run_all(
            f"load {directory}: check", lambda: _check(source, live, options, str(path), ranks)
        )
        try:
            filled = ranks.run_all(
                f"load {directory}: read", lambda: _read(source, live, options, ranks, once)
            )
        except BaseException:
            live.rollback()
            raise
        live.commit(filled.restore_targets, filled.restore_values)
    finally:
        source.close()
    of_ranks = ranks.gather(f"load {directory}: done", lambda: filled.bytes_read) or []
    seconds = time.monotonic() - began
    stats = CheckpointStats(str(directory), seconds, sum(of_ranks), waited_s=seconds)
    found = _source_summary(source).rstrip(",") if source.found.lacks else ""
    return LoadResult(filled.client_state, source.manifest, stats, found, filled.of_ranks)


@dataclass(frozen=True, slots=True)
class _Filled:
    """What one rank has read, ready to be committed."""

    restore_targets: RestoreTargets
    restore_values: RestoreValues
    client_state: dict[str, Any]
    of_ranks: Mapping[int, Any]
    bytes_read: int


def _find(
    path: str | os.PathLike[str], options: LoadOptions, on_progress: Callable[[], None]
) -> dict[str, str]:
    """Rank 0: find the checkpoint, behind links, so that all ranks open the same one."""
    found = check_local_path(path)
    repair_target(found)
    directory = Path(os.path.realpath(found)) if found.exists() else found
    opened = open_checkpoint(directory, allow_pickle=options.allow_pickle, on_progress=on_progress)
    with closing(opened) as source:
        source.check_all()
        return {"path": str(directory), "save_id": source.manifest.save_id}


def _open(
    path: str | os.PathLike[str],
    first: Mapping[str, str],
    options: LoadOptions,
    on_progress: Callable[[], None],
) -> CheckpointReader:
    """Open the checkpoint that rank 0 found."""
    directory = Path(first["path"])
    mine = os.path.realpath(check_local_path(path))
    if mine != first["path"]:
        log.warning("this rank was asked for %s; all ranks load rank 0's %s", mine, directory)
    source = open_checkpoint(directory, allow_pickle=options.allow_pickle, on_progress=on_progress)
    if source.manifest.save_id != first["save_id"]:
        msg = (
            f"{directory} is save {source.manifest.save_id} on this rank and {first['save_id']} on "
            "rank 0: the ranks do not share the directory, or a save replaced it just now"
        )
        raise CheckpointFormatError(msg)
    if not options.renamed:
        return source
    return RenamedReader(source, KeyMapping(options.renamed), str(directory))


def _check(
    source: CheckpointReader, live: LiveState, options: LoadOptions, where: str, ranks: Ranks
) -> SharedState:
    """Find all that can be wrong before anything is changed; give what is held once."""
    here = live.describe()
    source.bind(here)
    training = bool(here.groups)
    # Where ranks had buffers of their own, an evaluation takes rank 0's everywhere: its result must
    # not depend on the number of devices. Training goes on with each rank's own.
    once = source.module_state(ranks.rank if training else 0, ranks.world_size)
    buffers = list(_pairs(once.buffers, live.module_buffers()))
    wanted = RestoreScope(
        optimizer_state=training and options.optimizer_state,
        hyperparameters=training and _with_hyperparameters(source, options),
        strict=options.strict,
    )
    check_compatible(source.manifest, here, wanted, where, buffers)
    _check_optimizer(source, live, wanted, where)
    if once.lr_scheduler is not None and _restores_run(source, here) and options.hyperparameters:
        live.check_scheduler(once.lr_scheduler)
    if ranks.rank == 0:
        log.info("loading %s: %s into %s", where, _source_summary(source), describe(here))
        if source.found.mixed:
            log.warning("%s may not be of one save: %s", where, source.found.mixed)
        if rounded := rounded_buffers(buffers, here):
            log.warning("%s: buffers rounded to %s: %s", where, here.precision, ", ".join(rounded))
        for text in describe_unrestored(source.manifest, here, wanted):
            log.warning("%s: %s", where, text)
    source.verify(ranks.rank, ranks.world_size, report_bytes("verifying", ranks))
    return once


def _check_optimizer(
    source: CheckpointReader, live: LiveState, wanted: RestoreScope, where: str
) -> None:
    """Refuse what is not this run's optimizer's, or not of one step with the rest.

    Raises:
        CheckpointMismatchError: it is another optimizer's, or lacks the state of a group.
        CheckpointFormatError: it was saved at another step.
    """
    if wanted.optimizer_state and source.found.unmatched:
        msg = f"{where} does not fit this model: {source.found.unmatched}"
        raise CheckpointMismatchError(msg)
    if wanted.optimizer_state and source.found.mixed:
        msg = f"{where} is not of one save: {source.found.mixed}"
        raise CheckpointFormatError(msg)
    if wanted.optimizer_state or wanted.hyperparameters:
        of_optimizer = OptimizerScope(
            state=wanted.optimizer_state,
            hyperparameters=wanted.hyperparameters,
            stepped=not source.found.progress or _has_stepped(source.manifest.progress),
        )
        live.check_optimizer(source.manifest, of_optimizer)


def _pairs(
    saved: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]
) -> Iterator[BufferPair]:
    """Yield the module buffers that both have, as they are there and here."""
    for name in filter(saved.__contains__, live):
        held, wanted = saved[name], live[name]
        yield BufferPair(
            name,
            saved_shape=tuple(held.shape),
            shape=tuple(wanted.shape),
            saved_dtype=dtype_name(held.dtype),
            dtype=dtype_name(wanted.dtype),
            loses=is_lossy_cast(held, wanted.dtype),
            writable=not has_internal_overlap(wanted),
        )


def _has_stepped(progress: Progress) -> bool:
    return progress.global_steps > progress.skipped_steps


def _restores_run(source: CheckpointReader, here: Manifest) -> bool:
    """Return whether a run goes on, if need be with a fresh optimizer; weights start a new one."""
    return bool(here.groups) and not source.manifest.weights_only


def _with_hyperparameters(source: CheckpointReader, options: LoadOptions) -> bool:
    """Return whether the groups' hyperparameters are restored."""
    held = source.found.hyperparameters and not source.manifest.weights_only
    return options.hyperparameters and held


def _source_summary(source: CheckpointReader) -> str:
    """Return in one line what was found, and what it does not hold."""
    manifest, found = source.manifest, source.found
    writer = manifest.writer
    names = {"DeepSpeed": writer.deepspeed, "Lightning": writer.lightning, "torch": writer.torch}
    by = " and ".join(f"{name} {version}" for name, version in names.items() if version)
    text = f"a {found.kind}{f' written by {by}' if by else ''} ({describe(manifest)})"
    return f"{text} without {', '.join(found.lacks)}," if found.lacks else text


def _read(
    source: CheckpointReader, live: LiveState, options: LoadOptions, ranks: Ranks, once: SharedState
) -> _Filled:
    """Fill this rank's buffers from the checkpoint."""
    manifest = source.manifest
    here = live.describe()
    with_optimizer = options.optimizer_state and bool(here.groups) and not manifest.weights_only
    restore_targets = live.allocate_targets(manifest, with_optimizer=with_optimizer)
    plans = _plan(source, restore_targets)
    source.check(plans.masters.ranks, plans.frozen.ranks)
    restores_run = _restores_run(source, here)
    layout = source.layout()
    restore_values = RestoreValues(
        scalars=tuple(
            _scalars_of(source, layout, buffer.names) if with_optimizer else {}
            for buffer in here.buffers
        ),
        hyperparameters=tuple(group.hyperparameters for group in manifest.groups)
        if restores_run and _with_hyperparameters(source, options)
        else None,
        module_buffers=once.buffers,
        progress=manifest.progress if restores_run and source.found.progress else here.progress,
        loss_scaler=once.loss_scaler if restores_run else {},
        lr_scheduler=once.lr_scheduler if restores_run and options.hyperparameters else None,
        optimizer=manifest.writer.optimizer,
    )
    on_bytes = report_bytes("reading", ranks)
    bytes_read = sum(
        source.read(_requests(transfers, restore_targets), on_bytes)
        for transfers in plans.by_rank()
    )
    of_ranks = _of_ranks(manifest, options, ranks, once)
    return _Filled(restore_targets, restore_values, dict(once.client_state), of_ranks, bytes_read)


def _of_ranks(
    manifest: Manifest, options: LoadOptions, ranks: Ranks, once: SharedState
) -> dict[int, Any]:
    """Return the entry that is wanted of the ranks whose part this one takes over, if others saved.

    Of more ranks each has every so many; of fewer, several ranks share what one had.
    """
    saved, here = manifest.world_size, ranks.world_size
    if not options.of_ranks or once.read_client_entry is None or saved == here:
        return {}
    entries = {
        rank: once.read_client_entry(rank, options.of_ranks)
        for rank in (range(ranks.rank, saved, here) or [ranks.rank % saved])
    }
    return {rank: entry for rank, entry in entries.items() if entry is not None}


@dataclass(frozen=True, slots=True)
class _Plans:
    """Which runs this rank reads."""

    masters: TransferPlan
    """Of masters, and of the states beside them."""
    frozen: TransferPlan

    def by_rank(self) -> Iterator[list[Transfer]]:
        """Yield the runs from one source rank after the other; never all of them at once."""
        in_order = heapq.merge(self.masters.by_rank(), self.frozen.by_rank(), key=itemgetter(0))
        return (transfers for _, transfers in in_order)


def _plan(source: CheckpointReader, restore_targets: RestoreTargets) -> _Plans:
    """Plan every run to be read: weights from masters or frozen weights, then states."""
    owned = {p.name for p in source.manifest.optimized}
    mine = [f for f in restore_targets.fragments if f.name in owned]
    frozen = [f for f in restore_targets.fragments if f.name not in owned]
    return _Plans(TransferPlan(mine, source.layout()), TransferPlan(frozen, source.frozen_layout()))


def _requests(transfers: Sequence[Transfer], restore_targets: RestoreTargets) -> list[ReadRequest]:
    """Return what is to be read by runs: weights, then states."""
    requests = [ReadRequest(WEIGHT, t, restore_targets.weights[t.target_buffer]) for t in transfers]
    return requests + [
        ReadRequest(key, transfer, target)
        for transfer in transfers
        for key, target in _states_of(transfer, restore_targets).items()
    ]


def _states_of(transfer: Transfer, restore_targets: RestoreTargets) -> Mapping[str, Any]:
    """Return the state targets that share a transfer's place; frozen weights have none."""
    states = restore_targets.states
    return states[transfer.target_buffer] if transfer.target_buffer < len(states) else {}


def _scalars_of(
    source: CheckpointReader, layout: Layout, names: tuple[str, ...]
) -> Mapping[str, Scalar]:
    """Return the scalars of a live flat buffer, whose parameters may have lain in several.

    Raises:
        CheckpointMismatchError: those differ, and the live buffer can have one value only.
    """
    held: dict[int, Fragment] = {}
    for name in names:
        at = next(iter(layout.covering(name, 0, 1)))
        held.setdefault(at.buffer, at)
    scalars = [source.scalars(at) for at in held.values()]
    for other in scalars[1:]:
        if canonical_repr(dict(other)) != canonical_repr(dict(scalars[0])):
            msg = (
                f"parameters that share a flat buffer here were saved with the states "
                f"{dict(scalars[0])} and {dict(other)}: resume with the sub_group_size of the save"
            )
            raise CheckpointMismatchError(msg)
    return scalars[0]
