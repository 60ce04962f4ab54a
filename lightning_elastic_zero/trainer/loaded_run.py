"""A loaded run, from the load of its checkpoint until training begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.core.manifest import Manifest
from lightning_elastic_zero.data_progress.counters import EPOCHS, infer_position
from lightning_elastic_zero.data_progress.position import DataPosition, LoaderRecord, Position
from lightning_elastic_zero.trainer.lightning import reload_interval
from lightning_elastic_zero.trainer.run_state import RunState
from lightning_elastic_zero.trainer.tensor_parallel import grid_of


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """The state of a saved run that is restored when training begins."""

    trainer: pl.Trainer
    where: str
    """Path of the checkpoint, for messages."""
    saved: DataPosition
    """The position at the save."""
    position: Position
    """The position at which this run continues, in steps of its global batch."""
    is_own_format: bool
    """Written by this library, so the data must be the same as in the saved run."""
    state: RunState
    """This rank's state at the save."""
    all_loader_states: tuple[Any, ...]
    """States of stateful loaders, for the same number of ranks."""
    validation: Mapping[str, Any]
    """Lightning's validation counters, as saved."""
    starts_over: bool = False
    """Its data start over, because they cannot resume inside the epoch."""

    @property
    def saved_grid(self) -> RankGrid:
        """The ranks of the saved run."""
        return self.saved.settings.grid

    @property
    def is_same_world(self) -> bool:
        """Whether the saved run had the same numbers of ranks."""
        return self.saved_grid == grid_of(self.trainer)

    @property
    def is_inside_epoch(self) -> bool:
        """Whether this run continues between two steps of an epoch."""
        return self.position.steps > 0 and not self.position.is_over

    @property
    def was_inside_epoch(self) -> bool:
        """Whether the run was saved between two steps of an epoch."""
        return self.saved.position.steps > 0 and not self.saved.position.is_over

    @property
    def makes_loaders(self) -> bool:
        """Whether the loaders are recreated for the epoch in which the run continues."""
        every, at = reload_interval(self.trainer), self.saved.position
        return bool(every and not at.steps and at.epoch % every == 0)

    @property
    def loader_states(self) -> list[Any]:
        """States to load into stateful loaders; none if they start over or are new ones."""
        fits = self.is_same_world and not self.starts_over and not self.makes_loaders
        return list(self.all_loader_states) if fits else []

    def loader(self, index: int) -> LoaderRecord:
        """Return the record of a training loader; an empty one if there is none."""
        loaders = self.saved.loaders
        return loaders[index] if index < len(loaders) else LoaderRecord()


def counted_loops(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fit loop's counters in Lightning's checkpoint; None: start at step 0."""
    loops: dict[str, Any] | None = state.get("loops", {}).get("fit_loop")
    return loops if loops is not None and EPOCHS in loops else None


def saved_position(state: Mapping[str, Any], manifest: Manifest, where: str) -> DataPosition:
    """Return a run's position at the save: as recorded, or inferred from Lightning's counters."""
    if manifest.progress.sampler:
        return DataPosition.of(manifest, f"{where}/manifest.json")
    steps, loops = int(state.get("global_step", 0)), state["loops"]["fit_loop"]
    return infer_position(loops, manifest.progress, manifest.grid, steps)
