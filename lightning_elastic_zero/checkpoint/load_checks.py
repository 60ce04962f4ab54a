"""Checks of a load, before live state changes, and its warnings.

``check_load`` compares names, shapes, types, groups and optimizers; nothing of the state has been
read. ``check_masters`` and ``check_infinite_weights`` check the values that were read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from lightning_elastic_zero.checkpoint.types import LoadOptions, io_progress
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.compatibility import (
    BufferPair,
    RestoreScope,
    check_compatible,
    describe,
    describe_unrestored,
    list_names,
    rounded_buffers,
)
from lightning_elastic_zero.core.group_matching import with_live_groups
from lightning_elastic_zero.core.layout import spans
from lightning_elastic_zero.core.manifest import MODULE_WEIGHTS, SCALARS, Manifest
from lightning_elastic_zero.core.tensors import (
    RestoreTargets,
    can_overflow,
    dtype_name,
    is_lossy_cast,
    is_writable,
    overflowed,
    overflows,
)
from lightning_elastic_zero.engine.addresses import adapt_buffers
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointMismatchError,
)
from lightning_elastic_zero.formats.reader import (
    FRESH_OPTIMIZER_HINT,
    CheckpointReader,
    SharedState,
)

_CHECKED_ELEMENTS = 1 << 20
"""Elements that are cast at a time."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checked:
    """What a load restores, on one rank: the checkpoint fits the engine."""

    scope: RestoreScope
    here: Manifest
    """The engine."""
    saved: Manifest
    """The checkpoint, with the engine's parameter groups."""
    shared: SharedState
    """The state that is not per parameter."""
    unverified: int
    """Number of files without checksums, of this rank's share."""

    @property
    def resumes(self) -> bool:
        """Whether the run continues from the masters and their optimizer states."""
        return self.scope.optimizer_state and not self.saved.weights_only


def check_load(
    source: CheckpointReader,
    live: LiveEngine,
    here: Manifest,
    options: LoadOptions,
    where: str,
    ranks: Ranks,
    undo: ExitStack,
) -> Checked:
    """Check everything that can be checked before the state is read, on this rank.

    ``here`` describes the engine. Modules may adapt the shapes of their buffers first; ``undo``
    gets the rollback.
    """
    source.bind(here)
    training = bool(here.groups)
    same_ranks = ranks.world_size if source.manifest.grid == here.grid else 0
    shared = source.module_state(ranks.rank, same_ranks)
    if not training:
        # If the ranks' buffers differed, all ranks of an evaluation use rank 0's: its result must
        # not depend on the number of devices.
        shared = replace(source.module_state(0, same_ranks), rank_state=shared.rank_state)
    adapt_buffers(live.module(), shared.buffers, undo)
    here = replace(here, module_buffers=tuple(live.module_buffers()))
    # Weights alone begin a new run, with the schedule that is configured here.
    resumes = training and not source.manifest.weights_only and options.hyperparameters
    scope = RestoreScope(
        optimizer_state=training and options.optimizer_state,
        hyperparameters=resumes and source.info.hyperparameters,
        counter_keys=live.counter_keys() if training else frozenset(),
        lr_scheduler=resumes and options.lr_scheduler,
        strict=options.strict,
        strict_optimizer=options.strict_optimizer or not training,
    )
    buffers = list(_buffer_pairs(shared.buffers, live.module_buffers()))
    check_compatible(source.manifest, here, scope, where, buffers)
    options.check(source.manifest)
    saved = source.manifest if scope.strict_optimizer else with_live_groups(source.manifest, here)
    _check_optimizer(source, saved, live, scope, where)
    warning = live.check_scheduler(shared.lr_scheduler) if scope.lr_scheduler else ""
    if ranks.rank == 0:
        _log_differences(source, here, scope, buffers, where)
        if warning:
            log.warning("%s %s", where, warning)
    progress = io_progress("verifying", ranks, options.show)
    unverified = source.verify(ranks.rank, ranks.world_size, progress)
    return Checked(scope, here, saved, shared, len(unverified))


def _buffer_pairs(
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


def _check_optimizer(
    source: CheckpointReader, saved: Manifest, live: LiveEngine, scope: RestoreScope, where: str
) -> None:
    """Refuse the state of another optimizer or step, or without what belongs to it."""
    info, progress = source.info, saved.progress
    if scope.optimizer_state and info.unmatched:
        msg = f"{where} does not fit this model: {info.unmatched}"
        raise CheckpointMismatchError(msg)
    if info.mixed and (scope.optimizer_state or info.is_torn):
        msg = f"{where} mixes files of several saves: {info.mixed}"
        raise CheckpointFormatError(msg)
    if scope.optimizer_state and info.incomplete:
        msg = f"{info.incomplete}, or {FRESH_OPTIMIZER_HINT}"
        raise CheckpointCorruptedError(msg)
    if scope.hyperparameters and not info.are_members_known:
        msg = (
            f"{where} has {len(saved.groups)} parameter groups that identify their members by "
            "positions, which do not fit this run's groups, so their hyperparameters and rates "
            "cannot be matched: configure the groups of the saved run, or pass "
            "load_hyperparameters=False too, to use the configured ones"
        )
        raise CheckpointMismatchError(msg)
    if scope.optimizer_state or scope.hyperparameters:
        steps = progress.global_steps - progress.skipped_steps
        live.check_optimizer(
            saved,
            state=scope.optimizer_state,
            hyperparameters=scope.hyperparameters,
            stepped=not info.has_counters or steps > 0,
        )


def _log_differences(
    source: CheckpointReader,
    here: Manifest,
    scope: RestoreScope,
    buffers: Sequence[BufferPair],
    where: str,
) -> None:
    """Log the source and its differences from this run."""
    manifest, info = source.manifest, source.info
    log.info("loading %s: %s into %s", where, source_summary(source), describe(here))
    if info.mixed:
        log.warning("%s may contain files of several saves: %s", where, info.mixed)
    if info.doubt:
        log.warning("%s: %s", where, info.doubt)
    if info.incomplete:
        log.warning("%s", info.incomplete)
    if info.unread:
        log.warning(
            "%s: not restored: %s; these entries of state_dict are neither parameters nor buffers. "
            "Create them as in the saved run before a load",
            where,
            list_names(info.unread),
        )
    if scope.lr_scheduler and not info.hyperparameters:
        log.warning(
            "%s contains no hyperparameters of the parameter groups: this run's configured "
            "learning rate, weight decay, ... are used",
            where,
        )
    differing = {key.name for group in manifest.groups for key in group.state if key.may_differ}
    moved = not manifest.has_same_partition(here)
    if SCALARS in manifest.rank_state and moved and scope.optimizer_state:
        log.warning(
            "%s: each part of the weights had its own value of the optimizer state %s. Here, "
            "each rank continues with that of the first part that it takes over. Steps of such "
            "an optimizer depend on the partition of the weights.",
            where,
            list_names(sorted(differing)),
        )
    if rounded := rounded_buffers(buffers, here):
        log.warning("%s: buffers rounded to %s: %s", where, here.precision, ", ".join(rounded))
    for text in describe_unrestored(manifest, here, scope):
        log.warning("%s: %s", where, text)


def source_summary(source: CheckpointReader) -> str:
    """Describe a checkpoint in one line: kind, writer, missing state."""
    manifest, info = source.manifest, source.info
    writer = manifest.writer
    names = {"DeepSpeed": writer.deepspeed, "Lightning": writer.lightning, "torch": writer.torch}
    by = " and ".join(f"{name} {version}" for name, version in names.items() if version)
    text = f"a {info.kind}{f' written by {by}' if by else ''} ({describe(manifest)})"
    return f"{text} without {', '.join(info.lacks)}," if info.lacks else text


# -- values that were read -----------------------------------------------------------------------


def check_masters(source: CheckpointReader, where: str) -> None:
    """Refuse to resume from masters that may be of another step than the module's weights."""
    if source.comparison.changed and not source.counts_steps:
        msg = (
            f"{where}: the master weights do not round to the weights in the model file: "
            f"{list_names([*source.comparison.changed])}. User code had changed them in place, "
            "or the files are of two saves: the optimizer counts no steps, so that this cannot "
            "be determined. Resume from another checkpoint, or pass "
            "load_optimizer_state=False to load the weights of the model file"
        )
        raise CheckpointFormatError(msg)


def check_infinite_weights(
    where: str,
    targets: RestoreTargets,
    saved: Manifest,
    here: Manifest,
    *,
    keeps_masters: bool,
) -> None:
    """Warn of finite masters whose weights become infinite, on the ranks that have the masters.

    Raises CheckpointMismatchError if the masters would become infinite too.
    """
    found = infinite_weights(targets, saved, here, rounds_masters=not keeps_masters)
    if found and not keeps_masters:
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


def report_changed_weights(
    where: str, checked: Checked, names: Sequence[str], *, both: bool
) -> None:
    """Log on rank 0 that the module's weights were not the rounded masters.

    ``both``: whether some rank has restored both.
    """
    found = (
        f"{where}: the saved weights of the module are not its masters, rounded: "
        f"{list_names(names)}. User code had changed them in place, for example by an average "
        "that was swapped in, a clamp, or eval() of a schedule-free optimizer"
    )
    is_own = MODULE_WEIGHTS in checked.saved.rank_state
    if not is_own:
        found += ", or the model file is of another save"
    if not checked.resumes:
        (log.info if is_own else log.warning)("%s. The module's weights are loaded.", found)
    elif not both:
        log.warning("%s. This run has no separate masters: it starts from the saved ones.", found)
    else:
        log.warning(
            "%s. Both are restored: the next forward uses the module's weights, and the next "
            "step replaces them by the masters.",
            found,
        )
