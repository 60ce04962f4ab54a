"""Costs of saves and loads of a run, kept until a callback has logged them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lightning.pytorch.utilities import rank_zero_info

from lightning_elastic_zero.checkpoint import CheckpointStats

KEPT = 1000
"""Events that are kept where nobody takes them: more than ever come between two batches."""


@dataclass(frozen=True, slots=True)
class CheckpointEvent:
    """One save that was published, or one load."""

    kind: Literal["save", "load"]
    stats: CheckpointStats


class CheckpointEvents:
    """The saves and loads of a trainer since somebody asked; saves may end in any thread."""

    def __init__(self) -> None:
        """Begin with none."""
        self._events: deque[CheckpointEvent] = deque(maxlen=KEPT)
        self._listeners: list[Callable[[CheckpointStats], None]] = []

    def subscribe(self, listener: Callable[[CheckpointStats], None]) -> Callable[[], None]:
        """Call a function with each save that is published from now on; on rank 0, in any thread.

        Returns:
            What ends that.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def on_published(self, stats: CheckpointStats) -> None:
        """Note a save that can be loaded now; on rank 0."""
        self._events.append(CheckpointEvent("save", stats))
        for listener in list(self._listeners):
            listener(stats)
        if stats.fingerprint:
            rank_zero_info(f"Saved {stats.path}: fingerprint {stats.fingerprint}")

    def on_loaded(self, stats: CheckpointStats) -> None:
        """Note a load."""
        self._events.append(CheckpointEvent("load", stats))

    def take(self) -> list[CheckpointEvent]:
        """Return what has ended since this was called last, in order, and forget it."""
        return [self._events.popleft() for _ in range(len(self._events))]
