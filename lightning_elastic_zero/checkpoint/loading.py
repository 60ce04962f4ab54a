"""Loading: all checks run before the first live byte is changed."""

from __future__ import annotations

import heapq
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.checkpoint.engine_handle import EngineHandle
from lightning_elastic_zero.checkpoint.extra_states import restore_extra_states
from lightning_elastic_zero.checkpoint.fallback import DAMAGE_ERRORS, find_fallback
from lightning_elastic_zero.checkpoint.fingerprint_check import (
    SavedState,
    Verdict,
    check_loaded,
)
from lightning_elastic_zero.checkpoint.lossy_casts import buffer_pairs, check_infinite_weights
from lightning_elastic_zero.checkpoint.transfers import plans, read_targets, scalars_by_buffer
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
    rounded_buffers,
)
from lightning_elastic_zero.coordination import Ranks
from lightning_elastic_zero.errors import CheckpointFormatError, CheckpointMismatchError, RanksError
from lightning_elastic_zero.formats import (
    CheckpointReader,
    RenamedReader,
    SharedState,
    open_checkpoint,
)
from lightning_elastic_zero.group_matching import match_groups, origins_of, with_live_groups
from lightning_elastic_zero.key_mapping import KeyMapping, mapping_to
from lightning_elastic_zero.manifest import Manifest, Progress
from lightning_elastic_zero.storage import check_local_path, existing_path, real_path, repair_target
from lightning_elastic_zero.tensor_state import RestoreTargets, RestoreValues
from lightning_elastic_zero.unrestored import describe_unrestored

log = logging.getLogger(__name__)

_NOTHING_TO_TAKE = (
    "fallback=True has nothing to take: it found no sound older one of this model beside it."
)


@torch.inference_mode(mode=False)
def load(
    path: str | os.PathLike[str], live: LiveState, ranks: Ranks, *, options: LoadOptions
) -> LoadResult:
    """Restore a checkpoint into a live engine, whole or not at all. Collective.

    Called under ``torch.inference_mode``, as within a validation, it makes normal tensors all the
    same: others could not be trained.

    With ``LoadOptions.fingerprint`` the state that is live then is compared with the saved one:
    what fails of that has changed the engine already.

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
        fallback = find_fallback(path, ranks, partial(_has_same_shapes, live, options))
        if fallback is None:
            if not options.fallback or not os.path.lexists(check_local_path(path)):
                raise
            msg = f"{error}\n{_NOTHING_TO_TAKE}"
            raise type(error)(msg) from error
        older, step = fallback
        if not options.fallback:
            msg = (
                f"{error}\nThe newest older checkpoint beside it that is sound, every byte of it "
                f"verified, is {older} (step {step}). It has the same parameters, and "
                "may be of another run all the same. Load that one, or allow it by fallback=True."
            )
            raise type(error)(msg) from error
        if ranks.rank == 0:
            log.warning(
                "%s was asked for, and is not sound: %s\nInstead, %s (step %d) is loaded, as "
                "fallback=True allows: what was trained since then is trained anew.",
                path,
                error,
                older,
                step,
            )
    return replace(_load(older, live, ranks, options=options), instead_of=str(path))


def _has_same_shapes(live: LiveState, options: LoadOptions, saved: Manifest) -> bool:
    """Whether a checkpoint and the model share parameters, all of the same shapes."""
    described = live.describe()
    renaming = _renaming(described, options)
    here = {p.name: p.shape for p in described.parameters}
    pairs = [(renaming.here(p.name), p.shape) for p in saved.parameters]
    shared = [here[name] == shape for name, shape in pairs if name in here]
    return bool(shared) and all(shared)


def _load(
    path: str | os.PathLike[str], live: LiveState, ranks: Ranks, *, options: LoadOptions
) -> LoadResult:
    """Restore one checkpoint, or leave the engine as it was."""
    began = time.monotonic()
    first = ranks.broadcast(
        "load: find the checkpoint", lambda: _find(path, options, ranks.report_progress)
    )
    step = f"load {first['path']}"
    with ExitStack() as files, ExitStack() as undo:

        def open_and_check() -> tuple[_Load, RestoreScope, SharedState]:
            source = files.enter_context(
                closing(_open(path, first, live, options, ranks.report_progress))
            )
            load = _Load(source, live, options, str(path), ranks)
            return load, *load.check()

        load, scope, shared = ranks.run_all(f"{step}: open and check", open_and_check)
        source = load.source
        filled = ranks.run_all(f"{step}: read", lambda: load.read(scope, shared, undo))
        undo.pop_all()
        failure, verdict = _commit(filled), Verdict("", "")
        if options.fingerprint:
            ranks.run_all(f"{step}: commit", partial(_raise, failure))
            verdict = load.compare(step, scope, shared)

    def finish() -> int:
        _raise(failure)
        # After all that must not fail: this calls the module's own code.
        extra, warns = shared.extra_states, ranks.rank == 0
        restore_extra_states(live.module(), extra, str(path), warns=warns)
        return filled.bytes_read

    bytes_read = ranks.gather(f"{step}: done", finish) or []
    seconds = time.monotonic() - began
    stats = CheckpointStats(
        first["path"],
        seconds,
        sum(bytes_read),
        waited_s=seconds,
        step=_step_of(source.manifest.progress),
        fingerprint=verdict.fingerprint,
    )
    found = _source_summary(source).rstrip(",") if source.info.lacks else ""
    return LoadResult(
        dict(shared.client_state),
        source.manifest,
        stats,
        found,
        filled.rank_entries,
        group_origins=filled.values.group_origins,
        fingerprint_result=verdict.text,
    )


def _commit(filled: _Filled) -> RanksError | None:
    """Change the engine; return a failure instead of raising it, so that all ranks raise."""
    try:
        filled.targets.commit(filled.values)
    except Exception as error:  # noqa: BLE001 (raised on all ranks)
        failure = RanksError(
            "the load failed while it changed the engine, which now holds a mixture: "
            f"{type(error).__name__}: {error}. Do not train it further: start the run again"
        )
        failure.__cause__ = error
        return failure
    return None


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _find(
    path: str | os.PathLike[str], options: LoadOptions, on_progress: Callable[[], None]
) -> dict[str, str]:
    """Rank 0: find the checkpoint, behind links, so that all ranks open the same one."""
    found = check_local_path(path)
    repair_target(found)
    directory = existing_path(found)
    opened = open_checkpoint(directory, allow_pickle=options.allow_pickle, on_progress=on_progress)
    with closing(opened) as source:
        source.check_all()
        return {"path": str(directory), "save_id": source.manifest.save_id}


def _open(
    path: str | os.PathLike[str],
    first: Mapping[str, str],
    live: LiveState,
    options: LoadOptions,
    on_progress: Callable[[], None],
) -> CheckpointReader:
    """Open the checkpoint that rank 0 found."""
    directory = Path(first["path"])
    mine = real_path(check_local_path(path))
    if mine != directory:
        log.warning("this rank was asked for %s; all ranks load rank 0's %s", mine, directory)
    source = open_checkpoint(directory, allow_pickle=options.allow_pickle, on_progress=on_progress)
    if source.manifest.save_id != first["save_id"]:
        msg = (
            f"{directory} is save {source.manifest.save_id} on this rank and {first['save_id']} on "
            "rank 0: the ranks do not share the directory, or a save replaced it just now"
        )
        raise CheckpointFormatError(msg)
    renaming = _renaming(live.describe(), options)
    if not options.renamed and all(renaming.here(n) == n for n in source.manifest.names()):
        return source
    return RenamedReader(source, renaming, str(directory))


def _renaming(here: Manifest, options: LoadOptions) -> KeyMapping:
    """Return how the checkpoint's names become the model's."""
    return mapping_to(here.names(), options.renamed)


@dataclass(frozen=True, slots=True)
class _Filled:
    """What one rank has read, ready to be committed."""

    targets: RestoreTargets
    values: RestoreValues
    rank_entries: Mapping[int, Any]
    bytes_read: int


@dataclass(frozen=True, slots=True)
class _Load:
    """An open checkpoint and the engine that it is loaded into, on one rank."""

    source: CheckpointReader
    live: LiveState
    options: LoadOptions
    where: str
    ranks: Ranks

    def check(self) -> tuple[RestoreScope, SharedState]:
        """Find all that can be wrong before anything is changed; each rank by itself.

        Returns:
            What is restored, and what the checkpoint holds once.
        """
        source, here = self.source, self.live.describe()
        source.bind(here)
        training = bool(here.groups)
        # Where ranks had buffers of their own, an evaluation takes rank 0's everywhere: its result
        # must not depend on the number of devices. Training goes on with each rank's own.
        own = self.ranks.rank if training else 0
        shared = source.module_state(own, self.ranks.world_size)
        # Weights alone begin a new run, with the schedule that is configured here.
        resumes = training and not source.manifest.weights_only and self.options.hyperparameters
        scope = RestoreScope(
            optimizer_state=training and self.options.optimizer_state,
            hyperparameters=resumes and source.info.hyperparameters,
            lr_scheduler=resumes,
            strict=self.options.strict,
            strict_optimizer=self.options.strict_optimizer or not training,
        )
        buffers = list(buffer_pairs(shared.buffers, self.live.module_buffers()))
        check_compatible(source.manifest, here, scope, self.where, buffers)
        self._check_optimizer(scope)
        if shared.lr_scheduler is not None and scope.lr_scheduler:
            self.live.check_scheduler(shared.lr_scheduler)
        if self.ranks.rank == 0:
            self._log(here, scope, buffers)
        on_bytes = report_bytes("verifying", self.ranks, self.options.show)
        source.verify(self.ranks.rank, self.ranks.world_size, on_bytes)
        return scope, shared

    def _check_optimizer(self, scope: RestoreScope) -> None:
        """Refuse what is not this run's optimizer's, or not of one step with the rest.

        Raises:
            CheckpointMismatchError: it is another optimizer's, or lacks the state of a group.
            CheckpointFormatError: it was saved at another step.
        """
        manifest, info = self.source.manifest, self.source.info
        if scope.optimizer_state and info.unmatched:
            msg = f"{self.where} does not fit this model: {info.unmatched}"
            raise CheckpointMismatchError(msg)
        if scope.optimizer_state and info.mixed:
            msg = f"{self.where} is not of one save: {info.mixed}"
            raise CheckpointFormatError(msg)
        if scope.optimizer_state or scope.hyperparameters:
            steps = manifest.progress.global_steps - manifest.progress.skipped_steps
            self.live.check_optimizer(
                self._regrouped(scope),
                state=scope.optimizer_state,
                hyperparameters=scope.hyperparameters,
                stepped=not info.has_counters or steps > 0,
            )

    def _regrouped(self, scope: RestoreScope) -> Manifest:
        """Return what was saved, in the groups that the engine has."""
        saved = self.source.manifest
        return saved if scope.strict_optimizer else with_live_groups(saved, self.live.describe())

    def _log(self, here: Manifest, scope: RestoreScope, buffers: Sequence[BufferPair]) -> None:
        """Report what is loaded, and what of it is not as it was."""
        where, source = self.where, self.source
        log.info("loading %s: %s into %s", where, _source_summary(source), describe(here))
        if source.info.mixed:
            log.warning("%s may not be of one save: %s", where, source.info.mixed)
        if scope.lr_scheduler and not source.info.hyperparameters:
            log.warning(
                "%s holds no hyperparameters of the parameter groups: learning rate, weight decay, "
                "... stay as they are configured in this run",
                where,
            )
        if rounded := rounded_buffers(buffers, here):
            log.warning("%s: buffers rounded to %s: %s", where, here.precision, ", ".join(rounded))
        for text in describe_unrestored(source.manifest, here, scope):
            log.warning("%s: %s", where, text)

    def read(self, scope: RestoreScope, shared: SharedState, undo: ExitStack) -> _Filled:
        """Fill this rank's buffers from the checkpoint; ``undo`` is told how to give them up."""
        source, saved = self.source, self._regrouped(scope)
        targets = self.live.allocate_targets(saved, with_optimizer=scope.optimizer_state)
        undo.callback(targets.rollback)
        with_state = {name for group in saved.groups for name in group.names}
        planned = plans(source, targets, with_state)
        source.check(*(plan.ranks for plan in planned))
        values = self._values(scope, shared, saved)
        # From one source rank after the other; never all transfers at once.
        in_order = heapq.merge(*(plan.by_rank() for plan in planned), key=itemgetter(0))
        tensors = (*targets.weights, *(t for of_flat in targets.states for t in of_flat.values()))
        size = sum(tensor.nbytes for tensor in tensors)
        on_bytes = report_bytes("reading", self.ranks, self.options.show, size)
        filled = read_targets(targets)
        bytes_read = sum(source.read(runs, filled, on_bytes) for _, runs in in_order)
        check_infinite_weights(self.where, targets, source.manifest, self.live)
        return _Filled(targets, values, self._rank_entries(shared), bytes_read)

    def compare(self, step: str, scope: RestoreScope, shared: SharedState) -> Verdict:
        """Compare what is live now with the fingerprint that the save recorded, if it did."""
        source = self.source
        renamed = isinstance(source, RenamedReader) and source.changes_names
        recorded = source.recorded_fingerprint
        number = self.ranks.broadcast(f"{step}: look for a fingerprint", recorded)
        saved = SavedState(self.where, number, source.manifest, shared.buffers, renamed)
        return check_loaded(saved, self.live, scope, self.ranks, step)

    def _values(self, scope: RestoreScope, shared: SharedState, saved: Manifest) -> RestoreValues:
        """Return what is restored beside the buffers; weights alone begin a new run."""
        source, here = self.source, self.live.describe()
        resumes = bool(here.groups) and not saved.weights_only
        return RestoreValues(
            scalars=scalars_by_buffer(source, here, saved.groups)
            if scope.optimizer_state
            else tuple({} for _ in here.buffers),
            hyperparameters=tuple(group.hyperparameters for group in saved.groups)
            if scope.hyperparameters
            else None,
            module_buffers=shared.buffers,
            progress=saved.progress if resumes and source.info.has_counters else here.progress,
            loss_scaler=shared.loss_scaler if resumes else {},
            lr_scheduler=shared.lr_scheduler if scope.lr_scheduler else None,
            optimizer_state=source.optimizer_state() if scope.optimizer_state else None,
            optimizer=saved.writer.optimizer,
            group_origins=tuple(range(len(here.groups)))
            if scope.strict_optimizer and len(here.groups) == len(source.manifest.groups)
            else origins_of(match_groups(source.manifest, here)),
            saved_groups=len(source.manifest.groups),
        )

    def _rank_entries(self, shared: SharedState) -> dict[int, Any]:
        """Return the entry that is wanted of the ranks whose part this one takes over, if any.

        Of more ranks each has every so many; of fewer, several ranks share what one had.
        """
        wanted, rank = self.options.rank_entry_path, self.ranks.rank
        saved, here = self.source.manifest.world_size, self.ranks.world_size
        if not wanted or shared.read_client_entry is None or saved == here:
            return {}
        taken_over = range(rank, saved, here) or [rank % saved]
        entries = {other: shared.read_client_entry(other, wanted) for other in taken_over}
        return {other: entry for other, entry in entries.items() if entry is not None}


def _step_of(progress: Progress) -> int:
    """Return the step at which a checkpoint was saved, as its trainer counted."""
    step = progress.sampler.get("global_step")
    return step if isinstance(step, int) else progress.global_steps


def _source_summary(source: CheckpointReader) -> str:
    """Return in one line what was found, and what it does not hold."""
    manifest, info = source.manifest, source.info
    writer = manifest.writer
    names = {"DeepSpeed": writer.deepspeed, "Lightning": writer.lightning, "torch": writer.torch}
    by = " and ".join(f"{name} {version}" for name, version in names.items() if version)
    text = f"a {info.kind}{f' written by {by}' if by else ''} ({describe(manifest)})"
    return f"{text} without {', '.join(info.lacks)}," if info.lacks else text


def load_engine(
    engine: EngineHandle, path: str | os.PathLike[str], ranks: Ranks, options: LoadOptions
) -> LoadResult:
    """Restore a checkpoint into an engine; collective. See ``lightning_elastic_zero.api``."""
    engine.before_change()
    live = ranks.run_all(f"load: look at the engine {engine.at_step()}", engine.open)
    return load(path, live, ranks, options=options)
