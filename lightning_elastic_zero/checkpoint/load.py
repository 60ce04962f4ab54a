"""Loading a checkpoint into a live engine. All checks run before live state changes.

Also: planning the transfers, and checking for overflow in casts.
"""

from __future__ import annotations

import heapq
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from lightning_elastic_zero.checkpoint.extra_state import restore_extra_states
from lightning_elastic_zero.checkpoint.fallback import find_fallback, is_there
from lightning_elastic_zero.checkpoint.streams import finish_device_work
from lightning_elastic_zero.checkpoint.types import (
    CheckpointStats,
    LoadOptions,
    LoadResult,
    io_progress,
)
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.compatibility import (
    LISTED,
    BufferPair,
    RestoreScope,
    check_compatible,
    describe,
    describe_unrestored,
    list_names,
    rounded_buffers,
)
from lightning_elastic_zero.core.layout import Fragment, Layout, TransferPlan, spans
from lightning_elastic_zero.core.manifest import (
    MODULE_WEIGHTS,
    SCALARS,
    Group,
    Manifest,
    TrainingProgress,
)
from lightning_elastic_zero.core.names import (
    mapping_to,
    match_groups,
    origins_of,
    with_live_groups,
)
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.tensors import (
    RestoreTargets,
    RestoreValues,
    Scalar,
    can_overflow,
    canonical_repr,
    dtype_name,
    is_lossy_cast,
    is_writable,
    overflowed,
    overflows,
)
from lightning_elastic_zero.engine.addresses import adapt_buffers
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.errors import (
    DAMAGE_ERRORS,
    CheckpointFormatError,
    CheckpointMismatchError,
    RanksError,
)
from lightning_elastic_zero.formats.newest import manifest_of
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.formats.reader import WEIGHT, CheckpointReader, SharedState, Targets
from lightning_elastic_zero.formats.renamed import RenamedReader
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import parse_path


def plans(
    source: CheckpointReader, targets: RestoreTargets, with_state: Collection[str]
) -> tuple[TransferPlan, TransferPlan]:
    """Return the plans of reads into ``read_targets``: masters with states, and frozen weights.

    ``with_state`` are the parameters whose optimizer states are wanted; others keep fresh ones.
    """
    alone = len(targets.weights)
    wanted = [
        f if f.name in with_state else replace(f, buffer=alone + f.buffer)
        for f in targets.fragments
    ]
    owned = {p.name for p in source.manifest.optimized}
    masters = [f for f in wanted if f.name in owned]
    frozen = [f for f in wanted if f.name not in owned]
    return (
        TransferPlan(masters, source.layout()),
        TransferPlan(frozen, source.frozen_layout()),
    )


def read_targets(targets: RestoreTargets) -> Targets:
    """Return the targets: ``n`` weights with their states, then the same weights without."""
    weights = [{WEIGHT: tensor} for tensor in targets.weights]
    return [{**w, **s} for w, s in zip(weights, targets.states, strict=True)] + weights


def scalars_by_buffer(
    source: CheckpointReader,
    live: Manifest,
    groups: Sequence[Group],
    wanted: Iterable[Fragment] = (),
) -> tuple[Mapping[str, Scalar], ...]:
    """Return the scalar states of each live flat buffer.

    ``wanted`` are this rank's fragments: states that may differ between ranks are those of the
    first saved rank that held any of them. Parameters without saved ones take those of their
    parameter group, so that the result does not depend on which parameters share a buffer.
    ``groups`` are the saved ones in live groups.
    """
    layout, found = source.layout(), []
    starts = {fragment.name: fragment.start for fragment in wanted}
    for buffer in live.buffers:
        members = groups[buffer.group].names
        known = set(members)
        shared = [name for name in buffer.names if name in known] or members
        may_differ = {key.name for key in groups[buffer.group].state if key.may_differ}
        in_order = sorted(shared, key=lambda name: name not in starts)
        firsts = [(name, starts.get(name, 0)) for name in in_order]
        found.append(_scalars_of(source, layout, firsts, may_differ))
    return tuple(found)


def _scalars_of(
    source: CheckpointReader,
    layout: Layout,
    elements: Iterable[tuple[str, int]],
    may_differ: Collection[str],
) -> Mapping[str, Scalar]:
    """Return the scalars of a live flat buffer.

    Raises CheckpointMismatchError if the saved buffers of its parameters had different ones.
    """
    held: dict[int, Fragment] = {}
    for name, element in elements:
        at = next(iter(layout.covering(name, element, element + 1)))
        held.setdefault(at.buffer, at)
    scalars = [source.scalars(at) for at in held.values()]
    counts = [{k: v for k, v in each.items() if k not in may_differ} for each in scalars]
    for other in counts[1:]:
        if canonical_repr(other) != canonical_repr(counts[0]):
            msg = (
                "parameters in one flat buffer were saved with different scalar states "
                f"{counts[0]} and {other}. Resume with the stage and sub_group_size "
                "of the save."
            )
            raise CheckpointMismatchError(msg)
    return scalars[0] if scalars else {}


log = logging.getLogger(__name__)

_CHECKED_ELEMENTS = 1 << 20
"""Elements that are cast at a time."""


def buffer_pairs(
    saved: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]
) -> Iterator[BufferPair]:
    """Yield the module buffers that both sides have."""
    for name, held, wanted in ((n, saved[n], live[n]) for n in live if n in saved):
        yield BufferPair(
            name,
            saved_shape=tuple(held.shape),
            shape=tuple(wanted.shape),
            saved_dtype=dtype_name(held.dtype),
            dtype=dtype_name(wanted.dtype),
            loses=is_lossy_cast(held, wanted.dtype),
            overflows=overflows(held, wanted.dtype),
            writable=is_writable(wanted),
        )


def check_infinite_weights(
    where: str, targets: RestoreTargets, saved: Manifest, live: LiveEngine
) -> None:
    """Warn of finite masters whose weights become infinite, on the ranks that have the masters.

    Raises CheckpointMismatchError if the masters would become infinite too.
    """
    here, keeps = live.describe(), live.keeps_masters()
    found = infinite_weights(targets, saved, here, rounds_masters=not keeps)
    if found and not keeps:
        msg = (
            f"{where}: values too large for {here.precision}. With "
            "zero_optimization.load_from_fp32_weights=false these masters would become infinite: "
            f"{list_names(found)}. Set it to true or train in a precision with a larger range."
        )
        raise CheckpointMismatchError(msg)
    if found:
        log.warning(
            "%s: values too large for %s. These weights become infinite (their masters do not): "
            "%s. Train in a precision with a larger range.",
            where,
            here.precision,
            list_names(found),
        )


def infinite_weights(
    targets: RestoreTargets, saved: Manifest, here: Manifest, *, rounds_masters: bool = False
) -> list[str]:
    """Return the parameters with masters on this rank that are too large for their weights.

    Weights that were saved in the same dtype were infinite then too, and are not reported unless
    ``rounds_masters``: then the masters are rounded to the weights.
    """
    was = {p.name: getattr(torch, p.dtype) for p in saved.parameters}
    types = {
        p.name: getattr(torch, p.dtype)
        for p in here.optimized
        if p.name in was and (rounds_masters or can_overflow(was[p.name], getattr(torch, p.dtype)))
    }
    found: dict[str, None] = {}
    for fragment in targets.fragments:
        if fragment.name in types and fragment.name not in found:
            end = fragment.offset + fragment.stop - fragment.start
            masters = targets.weights[fragment.buffer].detach()[fragment.offset : end]
            if _become_infinite(masters, types[fragment.name]):
                found[fragment.name] = None
    return [*found]


def _become_infinite(masters: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a finite master is infinite in a dtype; compares bounded parts."""
    if not can_overflow(masters.dtype, dtype):
        return False
    for start, stop in spans(0, masters.numel(), _CHECKED_ELEMENTS):
        part = masters[start:stop].cpu()
        cast = part.to(dtype)
        if not cast.isfinite().all() and overflowed(part, cast).any():
            return True
    return False


_MOST_REPLACED = 5
"""How often a load starts again because its checkpoint was replaced."""

_NOTHING_TO_TAKE = (
    "fallback=True found no older intact checkpoint of this model in the same folder."
)


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
    try:
        return _load(path, live, ranks, options=options)
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
            msg = (
                f"{error}\nThe newest older intact checkpoint in the same folder is {older} (step "
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
    return replace(_load(older, live, ranks, options=options), instead_of=str(path))


def _has_same_shapes(live: LiveEngine, options: LoadOptions, saved: Manifest) -> bool:
    """Whether a checkpoint and the model share parameters, all of the same shapes."""
    described = live.describe()
    renaming = mapping_to(described.names(), options.renamed)
    shapes = {p.name: p.shape for p in described.parameters}
    pairs = [(renaming.here(p.name), p.shape) for p in saved.parameters]
    shared = [shapes[name] == shape for name, shape in pairs if name in shapes]
    return bool(shared) and all(shared)


def _load(
    path: str | os.PathLike[str], live: LiveEngine, ranks: Ranks, *, options: LoadOptions
) -> LoadResult:
    """Restore one checkpoint, or leave the engine as it was.

    A checkpoint that is replaced meanwhile loses its files. The new one is loaded instead.
    """
    found: list[str] = []
    for _ in range(_MOST_REPLACED):
        try:
            return _load_once(path, live, ranks, found, options=options)
        except DAMAGE_ERRORS:
            step = "load: look whether the checkpoint was replaced"
            if not ranks.broadcast(step, lambda: _is_replaced(path, found)):
                raise
            log.info("%s was replaced during the load; the new checkpoint is loaded", path)
    return _load_once(path, live, ranks, found, options=options)


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
    found: list[str],
    *,
    options: LoadOptions,
) -> LoadResult:
    """Make one attempt; on rank 0, ``found`` gets the save id."""
    began, asked = time.monotonic(), folder_at(path)
    requests = asked.requests

    def find() -> dict[str, Any]:
        live.check()
        return asdict(_find(path, ranks, found, options))

    located = ranks.broadcast("load: find the checkpoint", find, live.check)
    first = _Found(**located)
    step = f"load {first.path}"
    with ExitStack() as files, ExitStack() as undo:

        def open_and_check() -> tuple[_Load, RestoreScope, SharedState, int]:
            source = files.enter_context(closing(_open(path, first, live, options, ranks.progress)))
            load = _Load(source, live, options, str(path), ranks)
            return load, *load.check(undo)

        load, scope, shared, unverified = ranks.run_all(f"{step}: open and check", open_and_check)
        source = load.source
        filled = ranks.run_all(f"{step}: read", lambda: load.read(scope, shared, undo))
        undo.pop_all()
        failure = _commit(filled)

    def finish() -> list[Any]:
        _raise(failure)
        # After all that must not fail: this calls the module's own code.
        extra, warns = shared.extra_states, ranks.rank == 0
        restore_extra_states(live.module(), extra, str(path), warns=warns)
        changed = filled.changed_weights[:LISTED], filled.values.has_other_weights
        return [filled.bytes_read, asked.requests - requests, unverified, changed]

    costs = ranks.gather(f"{step}: done", finish) or []
    if count := sum(of_rank for _, _, of_rank, _ in costs):
        log.warning(
            "%s: %d of its files have no checksums, so a damaged byte in them goes unnoticed "
            "(`verify` lists them)",
            path,
            count,
        )
    if changed := list(dict.fromkeys(name for *_, (names, _) in costs for name in names)):
        load.report_changed_weights(changed, scope, both=any(both for *_, (_, both) in costs))
    seconds = time.monotonic() - began
    stats = CheckpointStats(
        first.path,
        seconds,
        sum(bytes_read for bytes_read, *_ in costs),
        waited_s=seconds,
        step=_step_of(source.manifest.progress),
        requests=sum(count for _, count, *_ in costs),
    )
    summary = _source_summary(source).rstrip(",") if source.info.lacks else ""
    return LoadResult(
        dict(shared.client_state),
        source.manifest,
        stats,
        summary,
        dict(shared.rank_state),
        group_origins=filled.values.group_origins,
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


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


@dataclass(frozen=True, slots=True)
class _Found:
    """Rank 0's message to all ranks: the checkpoint to load."""

    path: str
    save_id: str


def _find(
    path: str | os.PathLike[str], ranks: Ranks, found: list[str], options: LoadOptions
) -> _Found:
    """Rank 0: find the checkpoint, behind links, so that all ranks open the same one."""
    asked, progress = folder_at(path), ranks.progress
    asked.check_shareable(ranks.world_size)
    asked.repair()
    directory = asked.follow_links_if_exists().path
    opened = open_checkpoint(directory, allow_pickle=options.allow_pickle, progress=progress)
    with closing(opened) as source:
        found.append(source.manifest.save_id)
        source.check_all()
        return _Found(str(directory), source.manifest.save_id)


def _open(
    path: str | os.PathLike[str],
    first: _Found,
    live: LiveEngine,
    options: LoadOptions,
    progress: Progress,
) -> CheckpointReader:
    """Open the checkpoint that rank 0 found."""
    directory = parse_path(first.path)
    mine = folder_at(path).follow_links().path
    if mine != directory:
        log.warning("this rank requested %s; all ranks load rank 0's path %s", mine, directory)
    source = open_checkpoint(directory, allow_pickle=options.allow_pickle, progress=progress)
    if source.manifest.save_id != first.save_id:
        msg = (
            f"{directory} contains save {source.manifest.save_id} on this rank and "
            f"{first.save_id} on rank 0. Load from a directory that all ranks share; if a save "
            "has just replaced it, load again"
        )
        raise CheckpointFormatError(msg)
    renaming = mapping_to(live.describe().names(), options.renamed)
    if not options.renamed and all(renaming.here(n) == n for n in source.manifest.names()):
        return source
    return RenamedReader(source, renaming, str(directory))


@dataclass(frozen=True, slots=True)
class _Filled:
    """Values that one rank has read, ready to be committed."""

    targets: RestoreTargets
    values: RestoreValues
    bytes_read: int
    changed_weights: tuple[str, ...]
    """Parameters of which this rank's module weights were not the rounded masters."""


@dataclass(frozen=True, slots=True)
class _Load:
    """An open checkpoint and the engine that it is loaded into, on one rank."""

    source: CheckpointReader
    live: LiveEngine
    options: LoadOptions
    where: str
    ranks: Ranks

    def check(self, undo: ExitStack) -> tuple[RestoreScope, SharedState, int]:
        """Check everything that can be checked before live state changes, on this rank.

        Modules may adapt the shapes of their buffers first; ``undo`` gets the rollback.

        Returns:
            The scope of the load, the state that is not per parameter, and how many files of this
            rank's share have no checksums.
        """
        source, here = self.source, self.live.describe()
        source.bind(here)
        training = bool(here.groups)
        # If the ranks' buffers differed, all ranks of an evaluation use rank 0's: its result must
        # not depend on the number of devices. In training, each rank gets its own.
        own = self.ranks.rank if training else 0
        shared = source.module_state(own, self.ranks.world_size)
        adapt_buffers(self.live.module(), shared.buffers, undo)
        here = self.live.describe()
        # Weights alone begin a new run, with the schedule that is configured here.
        resumes = training and not source.manifest.weights_only and self.options.hyperparameters
        scope = RestoreScope(
            optimizer_state=training and self.options.optimizer_state,
            hyperparameters=resumes and source.info.hyperparameters,
            lr_scheduler=resumes and self.options.lr_scheduler,
            strict=self.options.strict,
            strict_optimizer=self.options.strict_optimizer or not training,
        )
        buffers = list(buffer_pairs(shared.buffers, self.live.module_buffers()))
        check_compatible(source.manifest, here, scope, self.where, buffers)
        self.options.check(source.manifest)
        self._check_optimizer(scope)
        if shared.lr_scheduler is not None and scope.lr_scheduler:
            self.live.check_scheduler(shared.lr_scheduler)
        if self.ranks.rank == 0:
            self._log(here, scope, buffers)
        progress = io_progress("verifying", self.ranks, self.options.show)
        unverified = source.verify(self.ranks.rank, self.ranks.world_size, progress)
        return scope, shared, len(unverified)

    def _check_optimizer(self, scope: RestoreScope) -> None:
        """Refuse the state of another optimizer, or of another step than the weights."""
        manifest, info = self.source.manifest, self.source.info
        if scope.optimizer_state and info.unmatched:
            msg = f"{self.where} does not fit this model: {info.unmatched}"
            raise CheckpointMismatchError(msg)
        if scope.optimizer_state and info.mixed:
            msg = f"{self.where} mixes files of several saves: {info.mixed}"
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
        """Return the saved manifest with the engine's parameter groups."""
        saved = self.source.manifest
        return saved if scope.strict_optimizer else with_live_groups(saved, self.live.describe())

    def _log(self, here: Manifest, scope: RestoreScope, buffers: Sequence[BufferPair]) -> None:
        """Log the source and its differences from this run."""
        where, source = self.where, self.source
        log.info("loading %s: %s into %s", where, _source_summary(source), describe(here))
        if source.info.mixed:
            log.warning("%s may contain files of several saves: %s", where, source.info.mixed)
        if scope.lr_scheduler and not source.info.hyperparameters:
            log.warning(
                "%s contains no hyperparameters of the parameter groups: this run's configured "
                "learning rate, weight decay, ... are used",
                where,
            )
        differing = {k.name for g in source.manifest.groups for k in g.state if k.may_differ}
        moved = not source.manifest.has_same_partition(here)
        if SCALARS in source.manifest.rank_state and moved and scope.optimizer_state:
            log.warning(
                "%s: each part of the weights had its own value of the optimizer state %s. Here, "
                "each rank continues with that of the first part that it takes over. Steps of such "
                "an optimizer depend on the partition of the weights.",
                where,
                list_names(sorted(differing)),
            )
        if rounded := rounded_buffers(buffers, here):
            log.warning("%s: buffers rounded to %s: %s", where, here.precision, ", ".join(rounded))
        for text in describe_unrestored(source.manifest, here, scope):
            log.warning("%s: %s", where, text)

    def read(self, scope: RestoreScope, shared: SharedState, undo: ExitStack) -> _Filled:
        """Fill this rank's buffers from the checkpoint; ``undo`` gets their rollback."""
        source, saved = self.source, self._regrouped(scope)
        targets = self.live.allocate_targets(saved, with_optimizer=scope.optimizer_state)
        undo.callback(targets.rollback)
        with_state = {name for group in saved.groups for name in group.names}
        planned = plans(source, targets, with_state)
        source.check(*(plan.ranks for plan in planned))
        values = self._values(scope, shared, saved, targets.fragments)
        # From one source rank after the other; never all transfers at once.
        in_order = heapq.merge(*(plan.by_rank() for plan in planned), key=itemgetter(0))
        tensors = (*targets.weights, *(t for of_flat in targets.states for t in of_flat.values()))
        size = sum(tensor.nbytes for tensor in tensors)
        progress = io_progress("reading", self.ranks, self.options.show, size)
        filled = read_targets(targets)
        bytes_read = sum(source.read(runs, filled, progress) for _, runs in in_order)
        resumes = self._resumes(scope)
        if resumes and source.comparison.changed and not source.counts_steps:
            msg = (
                f"{self.where}: the master weights do not round to the weights in the model file: "
                f"{list_names([*source.comparison.changed])}. User code had changed them in place, "
                "or the files are of two saves: the optimizer counts no steps, so that this cannot "
                "be determined. Resume from another checkpoint, or pass "
                "load_optimizer_state=False to load the weights of the model file"
            )
            raise CheckpointFormatError(msg)
        if source.weights_differ:
            # A resume restores both. Otherwise, the module's weights are the result of training.
            weights = targets.round_masters() if resumes else ()
            values = replace(values, module_weights=weights)
            weights = (*weights, *targets.weights[len(weights) :])
            for _, runs in planned[0].by_rank():
                twice = (targets.weights * 2, weights * 2)  # As in ``read_targets``.
                bytes_read += source.read_module_weights(runs, *twice, progress)
        check_infinite_weights(self.where, targets, source.manifest, self.live)
        return _Filled(targets, values, bytes_read, tuple(source.comparison.changed))

    def _resumes(self, scope: RestoreScope) -> bool:
        """Whether the run continues from the masters and their optimizer states."""
        return scope.optimizer_state and not self.source.manifest.weights_only

    def report_changed_weights(
        self, names: Sequence[str], scope: RestoreScope, *, both: bool
    ) -> None:
        """Log on rank 0 that the module's weights were not the rounded masters.

        ``both``: whether some rank has restored both.
        """
        found = (
            f"{self.where}: the saved weights of the module are not its masters, rounded: "
            f"{list_names(names)}. User code had changed them in place, for example by an average "
            "that was swapped in, a clamp, or eval() of a schedule-free optimizer"
        )
        is_own = MODULE_WEIGHTS in self.source.manifest.rank_state
        if not is_own:
            found += ", or the model file is of another save"
        if not self._resumes(scope):
            (log.info if is_own else log.warning)("%s. The module's weights are loaded.", found)
        elif not both:
            log.warning(
                "%s. This run has no separate masters: it starts from the saved ones.", found
            )
        else:
            log.warning(
                "%s. Both are restored: the next forward uses the module's weights, and the next "
                "step replaces them by the masters.",
                found,
            )

    def _values(
        self,
        scope: RestoreScope,
        shared: SharedState,
        saved: Manifest,
        wanted: Iterable[Fragment],
    ) -> RestoreValues:
        """Return the values to commit with the buffers; weights alone begin a new run."""
        source, here = self.source, self.live.describe()
        resumes = bool(here.groups) and not saved.weights_only and self.options.counters
        return RestoreValues(
            scalars=scalars_by_buffer(source, here, saved.groups, wanted)
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
            if scope.strict_optimizer and len(here.groups) == len(source.manifest.groups)
            else origins_of(match_groups(source.manifest, here)),
            saved_groups=len(source.manifest.groups),
            restores_state=scope.optimizer_state,
            restores_hyperparameters=scope.hyperparameters,
        )


def _step_of(progress: TrainingProgress) -> int:
    """Return the step at which a checkpoint was saved, as its trainer counted."""
    step = progress.sampler.get("global_step")
    return step if isinstance(step, int) else progress.global_steps


def _source_summary(source: CheckpointReader) -> str:
    """Describe a checkpoint in one line: kind, writer, missing state."""
    manifest, info = source.manifest, source.info
    writer = manifest.writer
    names = {"DeepSpeed": writer.deepspeed, "Lightning": writer.lightning, "torch": writer.torch}
    by = " and ".join(f"{name} {version}" for name, version in names.items() if version)
    text = f"a {info.kind}{f' written by {by}' if by else ''} ({describe(manifest)})"
    return f"{text} without {', '.join(info.lacks)}," if info.lacks else text
