"""The names of the checks that workers make, and of the checkpoints that they make them with."""

from __future__ import annotations

MODES = ("blocking", "background")
"""Ways to save."""

NEXT_STAGE = {0: 0, 1: 2, 2: 3, 3: 1}
"""The stage into which the last world loads: stage 0 trains in another precision than the rest."""

GOOD, TORN = "good", "torn"
"""The checkpoint that a kill must leave whole, and the one that the kill interrupts."""

TOLD, NEXT_SAVE = "a kill is told", "saving after a kill"

DYING = "about to die"
"""What the victim tells last: its save is under way, and its end is meant."""

MEASURED = "speed"
"""The check that measuring itself did not fail."""

UNMEASURED = "why nothing was measured"
"""What is no failure: a stall, or a disk that takes too long."""

RAW, COPY, PUBLICATION, STALL = "raw write", "copy", "publication", "stall"
"""Figures of each rank, in seconds."""


def saved_name(stage: int, mode: str) -> str:
    """Return the name of what the first world saves."""
    return f"stage-{stage}-{mode}"


def returned_name(stage: int) -> str:
    """Return the name of what the second world saves."""
    return f"stage-{stage}-again"


def checkpoint_file(name: str) -> str:
    """Return the file name of a checkpoint."""
    return f"{name}.ckpt"
