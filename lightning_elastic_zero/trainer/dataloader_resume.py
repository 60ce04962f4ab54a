"""Where every training loader begins, when a run is taken up; or why one cannot begin there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_elastic_zero.coordination import Ranks
from lightning_elastic_zero.data_progress import DataProgress, ElasticSampler, Position
from lightning_elastic_zero.errors import CheckpointMismatchError, UnsupportedError
from lightning_elastic_zero.trainer import resume_warnings
from lightning_elastic_zero.trainer.dataloaders import (
    Stateful,
    describe_loader,
    elastic_sampler_of,
    resumable_part_of,
)
from lightning_elastic_zero.trainer.lightning_internals import (
    repeats_shorter_loaders,
    training_loaders,
)
from lightning_elastic_zero.trainer.stateful_loaders import (
    ends_before_data,
    load_state_at_epoch_end,
    warn_state_not_restored,
)

UnresumableDataPolicy: TypeAlias = Literal["refuse", "restart_epoch"]
"""What to do where the data cannot be taken up where it was left."""


@dataclass(frozen=True, slots=True)
class PendingResume:
    """What was loaded, and waits for training to begin."""

    where: str
    record: DataProgress
    position: Position
    """In steps of this run's global batch."""
    is_own_format: bool
    """Written by this library, so that the data must be that of then."""
    state: Mapping[str, Any]
    """What ``state`` gave when it was saved."""
    loader_states: list[Any]
    """Of loaders that keep their own state; applied on the same number of ranks only."""
    validation: Mapping[str, Any]
    """Lightning's counters of validation, as saved."""


def position_dataloaders(
    pending: PendingResume,
    combined: CombinedLoader | None,
    world_size: int,
    on_unresumable_data: UnresumableDataPolicy,
) -> Position:
    """Set every loader to the position, or to the epoch's start where that is allowed.

    Args:
        pending: what was loaded.
        combined: the training loaders.
        world_size: data-parallel ranks.
        on_unresumable_data: what to do where a loader cannot begin there.

    Returns:
        Where the run goes on.

    Raises:
        CheckpointMismatchError: a loader cannot begin there, and the epoch is not to start over.
    """
    if combined is None:
        return pending.position
    position, loaders = pending.position, combined.flattened
    if pending.is_own_format and (position.is_over or not position.steps):
        _warn_of_other_order(pending, loaders)
    lost = _unresumable_reason(pending, loaders, world_size) if position.steps else ""
    if lost and on_unresumable_data == "refuse":
        raise CheckpointMismatchError(_refusal(pending, lost))
    if not lost:
        _position_all(pending, combined, position, world_size)
        return position
    rank_zero_warn(
        f"Epoch {position.epoch} starts over, {position.steps} optimizer steps of it were "
        f"taken before: {lost}"
    )
    beginning = Position(position.epoch, 0)
    _position_all(pending, combined, beginning, world_size)
    return beginning


def loader_states_at(pending: PendingResume, position: Position, world_size: int) -> list[Any]:
    """Return the states of loaders that keep their own, which they are given at a position."""
    starts_over = position.steps != pending.position.steps
    is_of_others = pending.record.world_size != world_size
    return [] if starts_over or is_of_others else pending.loader_states


def _position_all(
    pending: PendingResume, combined: CombinedLoader, position: Position, world_size: int
) -> None:
    """Set every loader to a position."""
    states = iter(loader_states_at(pending, position, world_size))
    for index, loader in enumerate(combined.flattened):
        # Lightning keeps the states of those that have one, in order.
        state = next(states, None) if isinstance(loader, Stateful) else None
        elastic, resumer = elastic_sampler_of(loader), resumable_part_of(loader)
        if elastic is not None:
            _restore_seed(elastic, pending, index)
            elastic.start_at(position.epoch, _step_of(elastic, combined, position))
        elif resumer is not None and position.is_over:
            # How many samples it had is not known where its last step had fewer than the others.
            resumer.resume_at(position.epoch + 1, 0)
        elif resumer is not None:
            samples = (pending.record.samples or 0) if position.steps else 0
            resumer.resume_at(position.epoch, samples)
        elif isinstance(loader, Stateful) and (position.is_over or not position.steps):
            _position_at_epoch_end(
                loader, state, pending, position, (world_size, ends_before_data(combined, index))
            )
        elif isinstance(loader, Stateful) and state is not None:
            # Again where Lightning has done it: the iterator that it made then took the state, and
            # the next one, which comes in its place, would begin at the beginning.
            loader.load_state_dict(state)


def _position_at_epoch_end(
    loader: Stateful,
    state: Any,
    pending: PendingResume,
    position: Position,
    of_run: tuple[int, bool],
) -> None:
    """Set a loader with a state of its own to the epoch after the one that ended."""
    world_size, cut = of_run
    if state is not None:
        load_state_at_epoch_end(loader, state, ends_before_data=cut)
    elif position == pending.position and (position.epoch or position.is_over):
        warn_state_not_restored(loader, pending.record.world_size, world_size)


def _restore_seed(elastic: ElasticSampler, pending: PendingResume, index: int) -> None:
    """Restore the order of the run that saved."""
    if pending.is_own_format and index < len(pending.record.loaders):
        seed = pending.record.loaders[index].get("seed")
        elastic.seed = seed if type(seed) is int else elastic.seed


def _step_of(elastic: ElasticSampler, combined: CombinedLoader, position: Position) -> int:
    """Return the step of its own order that a sampler begins at.

    Of several loaders the shorter ones begin again within an epoch, or are exhausted.
    """
    if position.is_over:
        return elastic.steps
    if repeats_shorter_loaders(combined):
        return position.steps % max(elastic.steps, 1)
    return min(position.steps, elastic.steps)


def _unresumable_reason(pending: PendingResume, loaders: Sequence[Any], world_size: int) -> str:
    """Return why the data cannot be resumed inside an epoch; empty where it can."""
    if pending.position.is_over:
        return ""
    uncut = [loader for loader in loaders if elastic_sampler_of(loader) is None]
    for lost in filter(
        None, (_loader_unresumable_reason(loader, pending, world_size) for loader in uncut)
    ):
        if pending.is_own_format:
            return lost
        rank_zero_warn(f"Data begins with its first batch: {lost}")
    if not pending.is_own_format:
        return ""
    if changed := _changed(pending, loaders):
        return f"the data is not that of the save ({changed})"
    return _changed_order_reason(pending, loaders)


def _changed(pending: PendingResume, loaders: Sequence[Any]) -> str:
    """Return in what the data differ from those of the save."""
    here = [
        s.describe() if (s := elastic_sampler_of(loader)) is not None else {} for loader in loaders
    ]
    known: list[Mapping[str, Any]] = [
        {key: value for key, value in was.items() if key != "seed"}
        for was in pending.record.loaders
    ]
    return resume_warnings.changed_data(known, here)


def _changed_order_reason(pending: PendingResume, loaders: Sequence[Any]) -> str:
    """Return whose samplers put the epoch in another order than when it was saved."""
    names = _samplers_with_other_order(pending, loaders, pending.position.epoch)
    return _changed_order_message(names, pending.position.epoch) if names else ""


def _warn_of_other_order(pending: PendingResume, loaders: Sequence[Any]) -> None:
    """Warn of users' samplers that would not give the epoch that has ended as it was.

    The next one is then not that of the run that was not stopped. It is no reason to refuse: at the
    end of an epoch data may change.
    """
    epochs = {was[0] for was in pending.record.orders if was is not None}
    if len(epochs) != 1 or _changed(pending, loaders):
        return
    (epoch,) = epochs
    own = [
        loader if (s := elastic_sampler_of(loader)) is not None and s.sampler is not None else None
        for loader in loaders
    ]
    if names := _samplers_with_other_order(pending, own, epoch):
        rank_zero_warn(
            "The next epoch may have another order than in a run that was not stopped: "
            + _changed_order_message(names, epoch)
        )


def _samplers_with_other_order(
    pending: PendingResume, loaders: Sequence[Any], epoch: int
) -> list[str]:
    names = []
    for index, (loader, was) in enumerate(zip(loaders, pending.record.orders, strict=False)):
        elastic = elastic_sampler_of(loader)
        if elastic is None or was is None or was[0] != epoch or not was[1]:
            continue
        _restore_seed(elastic, pending, index)
        if elastic.order_digest(epoch) != was[1]:
            names.append(type(elastic.sampler or elastic).__name__)
    return names


def _changed_order_message(names: Sequence[str], epoch: int) -> str:
    return (
        f"{' and '.join(names)} put epoch {epoch} in another order than when it was saved (it may "
        "count its epochs by itself, draw from a source that cannot be seeded, or depend on what "
        f"was trained). {_REPRODUCIBLE}"
    )


def _loader_unresumable_reason(loader: object, pending: PendingResume, world_size: int) -> str:
    """Return why a loader whose order is its own cannot begin inside an epoch."""
    if resumable_part_of(loader) is not None:
        known = pending.record.samples is not None
        return (
            ""
            if known
            else (
                "it is not known how many samples a step had: pass global_batch_size, and "
                "logging_batch_size_per_gpu where the loader does not tell its batch_size"
            )
        )
    kind = describe_loader(loader)
    if not pending.loader_states or not isinstance(loader, Stateful):
        return f"the {kind} cannot be told where to begin"
    saved = pending.record.world_size
    if saved != world_size:
        return f"the {kind} has one state per rank of {saved}; there are {world_size} now"
    return ""


class SampleOrderCheck:
    """Compares the order of samples between ranks, once in each epoch.

    Not before its first batch: hooks of the epoch's start may change what a sampler draws. In each
    epoch: a sampler may differ between ranks from the second one on.
    """

    def __init__(self) -> None:
        self._is_done = False

    def begin(self) -> None:
        """Begin a fit."""
        self._is_done = False

    def before_batch(
        self, trainer: pl.Trainer, batch_idx: int, get_ranks: Callable[[], Ranks]
    ) -> None:
        """Compare, before the first batch of an epoch that is trained on; collective."""
        if batch_idx == 0 or not self._is_done:
            check_same_order_on_ranks(trainer, get_ranks())
            self._is_done = True


def check_same_order_on_ranks(trainer: pl.Trainer, ranks: Ranks) -> None:
    """Refuse a user's sampler that gives ranks different orders of the epoch. Collective.

    Raises:
        UnsupportedError: ranks would train on the same sample twice, and never on others.
    """
    elastic = [elastic_sampler_of(loader) for loader in training_loaders(trainer)]
    own = [sampler for sampler in elastic if sampler is not None and sampler.sampler is not None]
    if not own:
        return

    def digests() -> list[str]:
        return [sampler.order_digest(sampler.epoch) for sampler in own]

    of_ranks = ranks.all_gather("fit: compare the order of the samples", digests)
    for index, sampler in enumerate(own):
        if len({of_rank[index] for of_rank in of_ranks}) > 1:
            msg = (
                f"{type(sampler.sampler).__name__} gives each rank another order of the samples: "
                f"ranks would share out different epochs. {_REPRODUCIBLE}"
            )
            raise UnsupportedError(msg)


_REPRODUCIBLE = (
    "Let the order follow from set_epoch(epoch), which is called before it is asked for, or from a "
    "torch.Generator, random.Random or NumPy generator that the sampler keeps in an attribute"
)


def _refusal(pending: PendingResume, lost: str) -> str:
    position = pending.record.position
    return (
        f"{pending.where} was saved in epoch {position.epoch}, after {position.steps} optimizer "
        f"steps of it, and {lost}. Resume from a checkpoint at the end of an epoch; or give the "
        "data set, sampler or loader a method resume_at(epoch, samples); or pass "
        'ElasticDeepSpeedStrategy(on_unresumable_data="restart_epoch"), and the epoch starts over'
    )
