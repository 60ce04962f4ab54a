"""What is said of the training data when a fit starts: once, and before it matters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DistributedSampler, SequentialSampler

from lightning_elastic_zero.continuation.loaders import (
    KeepsState,
    elastic_of,
    name_of,
    resumer_of,
    sampler_in,
)

WHAT_HELPS = (
    "Give the data set, sampler or loader a method resume_at(epoch, samples); or pass "
    'ElasticDeepSpeedStrategy(lost_data="restart_epoch"), and the epoch starts over; or save at '
    "the end of epochs only"
)


def are_in_order(loaders: Any) -> list[bool]:  # noqa: ANN401 (a loader, or any nesting of them)
    """Tell of each loader, as the user made it, whether it gives samples as they come.

    Args:
        loaders: what a ``train_dataloader`` hook returns.
    """
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    return [isinstance(sampler_in(loader), SequentialSampler) for loader in combined.flattened]


def of_shuffled(were_in_order: Sequence[bool], loaders: Sequence[object]) -> Iterator[str]:
    """Say which loaders are shuffled although they were not made so.

    Args:
        were_in_order: of each loader, as the user made it.
        loaders: as training uses them.
    """
    for was, loader in zip(were_in_order, loaders, strict=False):
        sampler = sampler_in(loader)
        own = getattr(elastic_of(loader), "sampler", None)
        if was and own is None and isinstance(sampler, DistributedSampler) and sampler.shuffle:
            yield (
                f"The training {name_of(loader)} is shuffled, although it has no shuffle=True: "
                "Lightning shuffles training data for every distributed strategy, this one on one "
                "device too. To keep the order, make it with sampler=range(len(dataset)), or with "
                "your own DistributedSampler(dataset, shuffle=False); if it may be shuffled, "
                "shuffle=True says so"
            )


def of_unplaceable(loaders: Sequence[object], world_size: int, *, is_known: bool) -> Iterator[str]:
    """Say which loaders cannot be taken up in the middle of an epoch.

    Args:
        loaders: as training uses them.
        world_size: data-parallel ranks.
        is_known: how many samples a step has.
    """
    for loader in loaders:
        name = name_of(loader)
        if elastic_of(loader) is not None:
            continue
        if resumer_of(loader) is not None:
            if not is_known:
                yield (
                    f"A checkpoint inside an epoch will be refused on resume: the {name} does not "
                    "tell its batch_size, so it is not known how many samples a step has. Pass "
                    "global_batch_size and logging_batch_size_per_gpu to the strategy"
                )
        elif isinstance(loader, KeepsState):
            yield (
                f"A checkpoint inside an epoch will be refused on another number of devices than "
                f"{world_size}: the {name} has a state for each rank. {WHAT_HELPS}"
            )
        else:
            yield (
                f"A checkpoint inside an epoch will be refused on resume: the {name} cannot be "
                f"told where to begin. {WHAT_HELPS}"
            )
