"""The interface through which saves and loads use a live engine, without importing DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_elastic_zero.checkpoint.types import LiveState


@dataclass(frozen=True, slots=True)
class EngineHandle:
    """An engine's state and its steps, as callables; ``api.engine_handle`` makes one."""

    open: Callable[[], LiveState]
    """Returns the engine's state; raises for an engine that is not supported."""
    global_step: Callable[[], int]
    """Returns the number of optimizer steps, by which ranks tell one call from another."""
    add_step_pre_hook: Callable[[Callable[[], None]], Callable[[], None]]
    """Registers what is called right before an optimizer step; returns what removes it."""
    updates_state_before_step: Callable[[], bool]
    """Whether optimizer states change before the optimizer steps, as with Muon."""
    recovery_script: Callable[[], Path | None]
    """Returns the script that is laid beside the files of a checkpoint."""
    before_change: Callable[[], None] = lambda: None
    """Waits until no save in the background reads the engine's own tensors any more."""

    def at_step(self) -> str:
        """Return where the run stands, for the name of a step that all ranks take."""
        return f"at step {self.global_step()}"
