"""Loaders that keep their own state, taken up where an epoch of theirs ended.

The state at an epoch's end is that end with some loaders, from which the next iteration gives
nothing more, and the next epoch's beginning with others. Lightning makes one iterator from here on:
the next epoch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_elastic_zero.trainer.dataloaders import Stateful, describe_loader
from lightning_elastic_zero.trainer.epoch_length import length_of


def load_state_at_epoch_end(
    loader: Stateful, state: Mapping[str, Any], *, ends_before_data: bool
) -> None:
    """Move a loader's next iteration to the epoch after the one that its state ends.

    Args:
        loader: one that keeps its own state.
        state: as saved at an epoch's end.
        ends_before_data: a limit ended the epoch, before the loader's data did.
    """
    loader.load_state_dict(dict(state))
    iterator = iter(loader)  # type: ignore[call-overload]
    if ends_before_data:
        # As in the run that was not stopped: an iterator was under way, and another one is made.
        if not type(loader).__module__.startswith("torchdata."):
            rank_zero_warn(
                f"A limit ended the epoch before the data of the {describe_loader(loader)} did. "
                f"Its next "
                "epoch is what its second iterator after load_state_dict gives, which may differ "
                "from that of a run that was not stopped"
            )
        return
    try:
        next(iterator)
    except StopIteration:
        return  # the old epoch's end: the next iterator is the next epoch's
    loader.load_state_dict(dict(state))


def ends_before_data(combined: CombinedLoader, index: int) -> bool:
    """Whether a limit ends an epoch before the data of a loader do."""
    limit = (combined.limits or [])[index : index + 1]
    length = length_of(combined.flattened[index])
    return bool(limit) and limit[0] < (float("inf") if length is None else length)


def warn_state_not_restored(loader: object, saved: int, world_size: int) -> None:
    """Warn of a loader that begins as a new one, though it may count its epochs."""
    why = (
        f"it has one state per rank of {saved}, and there are {world_size} now"
        if saved != world_size
        else "the checkpoint holds no state of it"
    )
    rank_zero_warn(
        f"The {describe_loader(loader)} begins as a new one, and the next epoch may be another "
        f"than in a "
        f"run that was not stopped: {why}"
    )
