"""A checkpoint under other parameter names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_elastic_zero.core.layout import Fragment, Transfer
from lightning_elastic_zero.core.manifest import Manifest
from lightning_elastic_zero.core.names import KeyMapping
from lightning_elastic_zero.core.tensors import Scalar
from lightning_elastic_zero.formats.full_state import WEIGHTS
from lightning_elastic_zero.formats.reader import CheckpointReader, Location, SharedState

_UNCHANGED = (
    "check",
    "check_files",
    "frozen_layout_of",
    "layout_of",
    "names",
    "optimizer_state",
    "recorded_bytes",
    "trainer_entry",
    "verify",
    "verify_whole",
)
"""Methods of a reader that neither take nor return names of parameters, or take a manifest."""


class RenamedReader(CheckpointReader):
    """An open checkpoint, presented under the model's parameter names.

    ``where`` identifies it in messages about names that would become equal or do not exist.
    """

    def __init__(self, source: CheckpointReader, renaming: KeyMapping, where: str) -> None:
        self.files = source.files
        self._source = source
        vars(self).update({name: getattr(source, name) for name in _UNCHANGED})
        self._renaming = renaming
        self._live = renaming.table(source.manifest.names(), where)
        self._saved = {here: saved for saved, here in self._live.items()}
        self._describe()

    def _describe(self) -> None:
        self.info = self._source.info
        self.manifest = _with_names(self._source.manifest, self._name)

    def _name(self, saved: str) -> str:
        return self._live.get(saved) or self._renaming.live_name(saved)

    def _saved_name(self, here: str) -> str:
        if here in self._saved:
            return self._saved[here]
        # Must not be mistaken for the saved parameter of that name, which is renamed.
        return f"{here} (here)" if here in self._live else here

    def _as_saved(self, transfer: Transfer) -> Transfer:
        return transfer._replace(name=self._saved_name(transfer.name))

    def bind(self, live: Manifest) -> None:
        self._source.bind(_with_names(live, self._saved_name))
        self._describe()

    def bind_without_model(self) -> None:
        self._source.bind_without_model()
        self._describe()

    def locate(self, key: str, transfer: Transfer) -> Location:
        return self._source.locate(key, self._as_saved(transfer))

    def locate_rounded(self, transfer: Transfer) -> Location | None:
        return self._source.locate_rounded(self._as_saved(transfer))

    def locate_module_weights(self, transfer: Transfer) -> Location | None:
        return self._source.locate_module_weights(self._as_saved(transfer))

    @property
    def weights_differ(self) -> bool:
        return self._source.weights_differ or super().weights_differ

    @property
    def other_steps(self) -> str:
        return self._source.other_steps

    @property
    def counts_steps(self) -> bool:
        return self._source.counts_steps

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        return self._source.scalars(replace(at, name=self._saved_name(at.name)))

    def engine_state(self) -> SharedState:
        return self._renamed_state(self._source.engine_state())

    def module_state(self, rank: int, world_size: int) -> SharedState:
        return self._renamed_state(self._source.module_state(rank, world_size))

    def _renamed_state(self, state: SharedState) -> SharedState:
        client = dict(state.client_state)
        if isinstance(weights := client.get(WEIGHTS), dict):
            client[WEIGHTS] = self._renamed(weights)
        own = dict(state.rank_state)
        if isinstance(weights := own.get(WEIGHTS), dict):  # a rank's averages of buffers
            own[WEIGHTS] = {self._live.get(name, name): value for name, value in weights.items()}
        return replace(
            state,
            buffers=self._renamed(state.buffers),
            client_state=client,
            extra_states=self._renamed(state.extra_states),
            rank_state=own,
        )

    def module_buffers(self) -> Mapping[str, torch.Tensor]:
        return self._renamed(self._source.module_buffers())

    def _renamed(self, of: Mapping[str, Any]) -> dict[str, Any]:
        return {self._name(name): value for name, value in of.items()}


def _with_names(manifest: Manifest, named: Callable[[str], str]) -> Manifest:

    def all_of(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(map(named, names))

    return replace(
        manifest,
        parameters=tuple(
            replace(p, name=named(p.name), aliases=all_of(p.aliases)) for p in manifest.parameters
        ),
        groups=tuple(replace(g, names=all_of(g.names)) for g in manifest.groups),
        buffers=tuple(b.with_names(named) for b in manifest.buffers),
        tensor_parallel=manifest.tensor_parallel.with_names(named),
        module_buffers=all_of(manifest.module_buffers),
        excluded=all_of(manifest.excluded),
    )
