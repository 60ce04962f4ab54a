"""A rank's state of a run that Lightning does not save: an entry of the checkpoint dictionary.

``RunRecorder`` records it, and ``ResumeSteps`` restores it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

STATE_KEY = "lightning_elastic_zero"
"""Entry of the checkpoint dictionary for this state."""


@dataclass(frozen=True, slots=True)
class RunState:
    """State of a moment. Without arguments, that of a run that other software saved.

    Each field is an entry of the saved dictionary, except those that are None.
    """

    results: Mapping[str, Any] | None = None
    """Metrics of the epoch (``EpochMetrics.state``); None: unknown, or saved outside a fit."""
    random_before_fetch: dict[str, Any] | None = None
    """Random states right before the next batch was fetched ahead; None if it was not."""
    validation_began: bool = False
    """A validation starts again after a resume."""
    validation_batches: int = 0
    """Of a validation on this rank; 0: unknown."""
    random: dict[str, Any] | None = None
    """Random states (``collect_rng_states``); None: unknown."""
    generators: Sequence[Mapping[str, Any]] = ()
    """``generator_states`` of each training loader."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The values that callbacks read."""
    plateau_epoch_pending: bool = False
    """The epoch had ended, but the hooks at its end had not all run."""
    axis: int | None = None
    """Number of the next batch for the loggers; None: unknown."""
    waits_to_stop: bool = False
    """A callback has requested a stop, which also ends a resumed run."""
    saves: Mapping[str, Any] = field(default_factory=dict)
    """The last save of each ``ModelCheckpoint`` (``saves_of``)."""
    hook: str = ""
    """The hook of callbacks in which the checkpoint is saved; empty in other places."""
    plateau_step_pending: bool | None = None
    """``ReduceLROnPlateau`` is not updated for the last step yet; None: unknown."""

    def to_plain(self) -> dict[str, Any]:
        """Return the entries to save."""
        entries = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in entries.items() if value is not None}

    @classmethod
    def from_plain(cls, entries: Mapping[str, Any]) -> RunState:
        """Read the result of ``to_plain``; entries of newer releases are ignored."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in entries.items() if name in known})
