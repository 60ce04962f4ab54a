"""Filters of warnings between libraries that users cannot change, during a run.

Of the 78 lines of a first run on two ranks, 54 said that two libraries are of different ages.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

FILTERED_WARNINGS: tuple[tuple[type[Warning], str, str], ...] = (
    # DeepSpeed (to 0.19) calls collectives by names that torch has newer ones for since 2.13.
    (
        FutureWarning,
        r"`torch\.distributed\.\w+` is deprecated",
        r"torch\.distributed\.c10d_logger",
    ),
    # Lightning (to 2.6) walks trees of loaders by an older name of torch's.
    (
        FutureWarning,
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        r"lightning\.pytorch\.utilities\._pytree",
    ),
    # Lightning knows loaders with a ``state_dict`` only. What cannot be resumed in the middle of
    # an epoch, this library refuses, or it says itself that the epoch starts over.
    (
        UserWarning,
        r"You're resuming from a checkpoint that ended before the epoch ended",
        r"lightning\.pytorch\.loops\.training_epoch_loop",
    ),
)
"""Class, text and module of each."""


class WarningFilters:
    """The known warnings, left out from ``begin`` to ``end`` where no filter says otherwise.

    They come last of all filters: who wants to see them (``python -W default``), does.
    """

    def __init__(self) -> None:
        self._added: list[Any] = []

    def begin(self) -> None:
        """Leave them out, in a run's every process."""
        before = [*warnings.filters]
        for category, message, module in FILTERED_WARNINGS:
            warnings.filterwarnings("ignore", message, category, module, append=True)
        self._added += [added for added in warnings.filters if added not in before]

    def end(self) -> None:
        """Leave the filters as they were."""
        filters = vars(warnings)["filters"]
        while self._added:
            with suppress(ValueError):  # gone with the filters of somebody's catch_warnings
                del filters[filters.index(self._added.pop())]
