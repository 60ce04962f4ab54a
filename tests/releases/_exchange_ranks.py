"""Loads a checkpoint of another release on a rank."""

from __future__ import annotations

import torch

from tests.support.checkpoints import Saved, StateComparison, compare_states
from tests.support.engines import EngineCase, engine_of
from tests.support.oracle import Dump, dump, expected_in


def load_of_another_release(setup: EngineCase, saved: Saved) -> StateComparison | None:
    """Load into a run with another seed and hyperparameters; rank 0 compares."""
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 7, tilt=3.0) as engine:
        before = dump(engine, setup)
        load_checkpoint(engine, saved.path)
        found = dump(engine, setup)
    if found is None or before is None:
        return None
    wanted = expected_in(saved.dump(), saved.setup, setup)
    return compare_states(held_by(wanted, found, before), found)


def held_by(wanted: Dump, found: Dump, before: Dump) -> Dump:
    """Return the saved state as this release can hold it.

    Args:
        wanted: the saved state.
        found: the state after the load.
        before: the state before the load.

    Returns:
        ``wanted`` with each buffer in the type that this release of DeepSpeed uses, and with the
        previous values of hyperparameters that the saving release of torch does not have.
    """
    held = {
        key: value.to(found[key].dtype)
        if key.startswith("buffer/") and isinstance(value, torch.Tensor)
        else value
        for key, value in wanted.items()
    }
    new = {key for key in found.keys() - wanted.keys() if key.startswith("group/")}
    return held | {key: before[key] for key in new}
