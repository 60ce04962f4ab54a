"""What ranks do with ZeRO-3 that quantizes what travels between ranks."""

from __future__ import annotations

from tests.support.engines import Setup, engine_of, train


def refused_by_deepspeed(setup: Setup) -> tuple[bool, str]:
    """Make an engine and train a step; return whether there was an engine, and what was raised."""
    made = False
    try:
        with engine_of(setup, 0) as engine:
            made = True
            train(engine, setup, 0, 1)
    except ValueError as error:
        return made, str(error)
    return made, ""
