"""The last batch of data that has a limit and no length, known when it is trained on.

Lightning takes ``limit_train_batches`` for the length then, and learns of data that end before it
when it asks for one batch more: too late to take a step of the window that is open, or to validate.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_elastic_zero.trainer.epoch_length import length_of
from lightning_elastic_zero.trainer.lightning_internals import (
    data_fetcher,
    fetch,
    prefetches,
    training_loaders,
)


def prefetch_next_batch(trainer: pl.Trainer) -> bool:
    """Fetch the next batch before this one is trained on, as of data without a limit.

    No batch beyond the limit is fetched: it would be lost to a stream that goes on.

    Returns:
        Whether a batch was fetched, or tried to be, just now: the first time in an epoch.
    """
    fit: Any = trainer.fit_loop
    fetcher, limit = data_fetcher(trainer), fit.max_batches
    progress = fit.epoch_loop.batch_progress
    at = progress.current.ready
    if limit == float("inf") or at >= limit or not prefetches(fetcher):
        return False
    if all(length_of(loader) is not None for loader in training_loaders(trainer)):
        return False
    is_first = fetcher.length is not None
    if is_first:
        fetcher.length = None
        try:
            fetcher.batches.append(fetch(fetcher))
        except StopIteration:
            progress.is_last_batch = True
    if at + 1 == limit:
        fetcher.iterator = iter(())
    return is_first
