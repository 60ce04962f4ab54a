"""What ranks do to compare a resumed run with one that was never stopped."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.engine._oracle import Dump, differences, dump, expected_in
from tests.engine._reference_run import ReferenceComparison, compare_with_reference
from tests.engine._save_load_programs import STEPS, Saved, save
from tests.engine._setup import Setup, engine_of, train

LAST = 2 * STEPS + 1
"""Where all runs end."""


@dataclass(frozen=True)
class Continued:
    """A resumed run beside one that was never stopped, on one rank."""

    losses: tuple[list[float], list[float]]
    differing: dict[str, int]


def same_world(setup: Setup, saved: Saved) -> Continued:
    """Train on after a save, and train on after a load, from the same step."""
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, STEPS)
        save(engine, saved)
        uninterrupted = train(engine, setup, STEPS, LAST)
        wanted = dump(engine, setup)
    with engine_of(setup, 7, tilt=3.0) as engine:
        load_checkpoint(engine, saved.path)
        resumed = train(engine, setup, STEPS, LAST)
        found = dump(engine, setup)
    differing = differences(wanted, found) if wanted and found else {}
    return Continued((uninterrupted, resumed), differing)


def uninterrupted_masters(setup: Setup, path: str) -> None:
    """Train a run that is never stopped, and leave its masters there."""
    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, LAST)
        _leave_masters(dump(engine, setup), path)


def resumed_masters(setup: Setup, saved: Saved, path: str) -> ReferenceComparison | None:
    """Resume a run on another world, leave its masters there, and train another beside it.

    The other one is made to hold the saved state by hand.
    """
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 7, tilt=3.0) as engine:
        load_checkpoint(engine, saved.path)
        losses = train(engine, setup, STEPS, LAST)
        found = dump(engine, setup)
    _leave_masters(found, path)
    wanted = expected_in(saved.dump(), saved.setup, setup) if found is not None else None
    return compare_with_reference(setup, STEPS, wanted, (losses, found), steps=LAST - STEPS)


def _leave_masters(found: Dump | None, path: str) -> None:
    if found is not None:
        torch.save({k: v for k, v in found.items() if k.startswith("master/")}, path)
