"""What is said of the training data when a fit starts: once, and before it matters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DistributedSampler, SequentialSampler

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


def are_sequential(loaders: Any) -> list[bool]:
    """Tell of each loader, as the user made it, whether it gives samples as they come.

    Args:
        loaders: what a ``train_dataloader`` hook returns.
    """
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    return [isinstance(loader_sampler(loader), SequentialSampler) for loader in combined.flattened]


def shuffle_warnings(were_sequential: Sequence[bool], loaders: Sequence[object]) -> Iterator[str]:
    """Say which loaders are shuffled although they were not made so.

    Args:
        were_sequential: of each loader, as the user made it.
        loaders: as training uses them.
    """
    for was, loader in zip(were_sequential, loaders, strict=False):
        sampler = loader_sampler(loader)
        own = getattr(elastic_sampler_of(loader), "sampler", None)
        if was and own is None and isinstance(sampler, DistributedSampler) and sampler.shuffle:
            yield (
                f"The training {describe_loader(loader)} is shuffled, although it has no "
                f"shuffle=True: "
                "Lightning shuffles training data for every distributed strategy, this one on one "
                "device too. To keep the order, make it with sampler=range(len(dataset)), or with "
                "your own DistributedSampler(dataset, shuffle=False); if it may be shuffled, "
                "shuffle=True says so"
            )


def unresumable_warnings(
    loaders: Sequence[object], world_size: int, *, is_known: bool
) -> Iterator[str]:
    """Say which loaders cannot be taken up in the middle of an epoch.

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
