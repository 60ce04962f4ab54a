"""What is said of the training data when a fit starts: once, and before it matters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from lightning_elastic_zero.trainer.dataloaders import (
    Stateful,
    describe_loader,
    elastic_sampler_of,
    loader_sampler,
    resumable_part_of,
)

REMEDIES = (
    "Give the data set, sampler or loader a method resume_at(epoch, samples); or pass "
    'ElasticDeepSpeedStrategy(on_unresumable_data="restart_epoch"), and the epoch starts over; '
    "or save at "
    "the end of epochs only"
)


class OrderAsMade(Enum):
    """What the user's own loader says of the order of its samples, where Lightning overrules it."""

    KEPT = "another sampler's, which is kept"
    IN_ORDER = "as they come"
    SHUFFLED = "shuffled"
    OWN_GENERATOR = "shuffled, drawn from a generator"
    OTHER_SAMPLES = "drawn with replacement, or another number of them than there are"


def orders_as_made(loaders: Any) -> list[OrderAsMade]:
    """Return the order of each loader, as the user made it.

    Args:
        loaders: what a ``train_dataloader`` hook returns.
    """
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    return [_order_of(loader_sampler(loader)) for loader in combined.flattened]


def _order_of(sampler: object) -> OrderAsMade:
    if isinstance(sampler, SequentialSampler):
        return OrderAsMade.IN_ORDER
    if not isinstance(sampler, RandomSampler):
        return OrderAsMade.KEPT
    if type(sampler) is not RandomSampler:  # a user's own need not have the parent's attributes
        return OrderAsMade.SHUFFLED
    if sampler.replacement or sampler.num_samples != len(sampler.data_source):
        return OrderAsMade.OTHER_SAMPLES
    return OrderAsMade.SHUFFLED if sampler.generator is None else OrderAsMade.OWN_GENERATOR


_SHUFFLED_ANYWAY = (
    "is shuffled, although it has no shuffle=True: Lightning shuffles training data for every "
    "distributed strategy, this one on one device too, and cannot tell sampler=SequentialSampler("
    "dataset) from a loader without a sampler. To keep the order, make it with "
    "sampler=range(len(dataset)), or with your own DistributedSampler(dataset, shuffle=False); if "
    "it may be shuffled, shuffle=True says so"
)
_OWN_GENERATOR = (
    "is shuffled by the run's seed (seed_everything) and the epoch, so that every rank has one "
    "order: Lightning does not draw from the generator of the loader or of its RandomSampler. An "
    "order of your own is taken from a sampler of a class of your own, which may draw from a "
    "generator in an attribute"
)
_OTHER_SAMPLES = (
    "gives every sample once in an epoch: Lightning replaces a RandomSampler, and replacement=True "
    "and num_samples with it. A sampler of a class of your own, or WeightedRandomSampler, is kept"
)
_OVERRULED = {
    OrderAsMade.IN_ORDER: _SHUFFLED_ANYWAY,
    OrderAsMade.OWN_GENERATOR: _OWN_GENERATOR,
    OrderAsMade.OTHER_SAMPLES: _OTHER_SAMPLES,
}


def shuffle_warnings(made: Sequence[OrderAsMade], loaders: Sequence[object]) -> Iterator[str]:
    """Yield which loaders are shuffled otherwise than they were made.

    Args:
        made: the order of each loader, as the user made it.
        loaders: as training uses them.
    """
    for order, loader in zip(made, loaders, strict=False):
        sampler = loader_sampler(loader)
        own = getattr(elastic_sampler_of(loader), "sampler", None)
        is_replaced = own is None and isinstance(sampler, DistributedSampler) and sampler.shuffle
        if is_replaced and order in _OVERRULED:
            yield f"The training {describe_loader(loader)} {_OVERRULED[order]}"


def unresumable_warnings(
    loaders: Sequence[object], world_size: int, *, is_known: bool
) -> Iterator[str]:
    """Yield which loaders cannot be resumed in the middle of an epoch.

    Args:
        loaders: as training uses them.
        world_size: data-parallel ranks.
        is_known: how many samples a step has.
    """
    for loader in loaders:
        name = describe_loader(loader)
        if elastic_sampler_of(loader) is not None:
            continue
        if resumable_part_of(loader) is not None:
            if not is_known:
                yield (
                    f"A checkpoint inside an epoch will be refused on resume: the {name} does not "
                    "tell its batch_size, so it is not known how many samples a step has. Pass "
                    "global_batch_size and logging_batch_size_per_gpu to the strategy"
                )
        elif isinstance(loader, Stateful):
            yield (
                f"A checkpoint inside an epoch will be refused on another number of devices than "
                f"{world_size}: the {name} has a state for each rank. {REMEDIES}"
            )
        else:
            yield (
                f"A checkpoint inside an epoch will be refused on resume: the {name} cannot be "
                f"told where to begin. {REMEDIES}"
            )
