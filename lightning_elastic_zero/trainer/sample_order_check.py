"""Check that ranks have one order of the samples, where a user's own sampler makes it."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from lightning_elastic_zero.coordination import Ranks
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.trainer.dataloaders import elastic_sampler_of
from lightning_elastic_zero.trainer.lightning_internals import training_loaders

REPRODUCIBLE = (
    "Let the order follow from set_epoch(epoch), which is called before it is asked for, or from a "
    "torch.Generator, random.Random or NumPy generator that the sampler keeps in an attribute"
)
"""What makes a sampler's order that of every rank, and of a restart."""

NO_DIGEST = (
    "names samples by objects without content that could be compared between processes, so that "
    "another order would go unnoticed. Name them by numbers, texts, or tuples or objects of these"
)
"""Why the order of a sampler has no digest, and what helps."""


class SampleOrderCheck:
    """Compares the order of samples between ranks, once in each epoch.

    Not before its first batch: hooks of the epoch's start may change what a sampler draws. In each
    epoch: a sampler may differ between ranks from the second one on.
    """

    def __init__(self, get_ranks: Callable[[], Ranks]) -> None:
        """Begin a fit."""
        self._get_ranks = get_ranks
        self._is_done = False

    def before_batch(self, trainer: pl.Trainer, batch_idx: int) -> None:
        """Compare, before the first batch of an epoch that is trained on; collective.

        Raises:
            UnsupportedError: ranks would train on the same sample twice, and never on others; or
                it cannot be seen whether they would.
        """
        if batch_idx and self._is_done:
            return
        self._is_done = True
        elastic = [elastic_sampler_of(loader) for loader in training_loaders(trainer)]
        own = [s for s in elastic if s is not None and s.sampler is not None]
        if not own:
            return
        of_ranks = self._get_ranks().all_gather(
            "fit: compare the order of the samples",
            lambda: [sampler.order_digest(sampler.epoch) for sampler in own],
        )
        for sampler, *digests in zip(own, *of_ranks, strict=True):
            name = type(sampler.sampler).__name__
            if not all(digests):
                msg = f"{name} {NO_DIGEST}"
                if len(digests) > 1:
                    raise UnsupportedError(msg)
                rank_zero_warn(f"A checkpoint inside an epoch will be refused on resume: {msg}")
            elif len({*digests}) > 1:
                msg = (
                    f"{name} gives each rank another order of the "
                    f"samples: ranks would share out different epochs. {REPRODUCIBLE}"
                )
                raise UnsupportedError(msg)
