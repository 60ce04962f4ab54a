"""A checkpoint whose layers have other names in the model: any format, under the model's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from lightning_elastic_zero.formats.full_state.single_file import WEIGHTS
from lightning_elastic_zero.formats.reader import CheckpointReader, Location, SharedState
from lightning_elastic_zero.key_mapping import KeyMapping
from lightning_elastic_zero.layout import Fragment, Layout, Transfer
from lightning_elastic_zero.manifest import Manifest
from lightning_elastic_zero.tensor_state import Scalar

Named = TypeVar("Named", Fragment, Transfer)


class RenamedReader(CheckpointReader):
    """An open checkpoint that speaks the model's names."""

    def __init__(self, source: CheckpointReader, renaming: KeyMapping, where: str) -> None:
        """Keep an open checkpoint.

        Raises:
            CheckpointMismatchError: two of its names would become one, or some name is not there.
        """
        self.files = source.files
        self._source = source
        self._renaming = renaming
        self._here = renaming.table(source.manifest.names(), where)
        self._saved = {here: saved for saved, here in self._here.items()}
        self._describe()

    @property
    def changes_names(self) -> bool:
        """Whether any name of the checkpoint is another one in the model."""
        return any(saved != here for saved, here in self._here.items())

    def _describe(self) -> None:
        self.info = self._source.info
        self.manifest = _with_names(self._source.manifest, self._name)

    def _name(self, saved: str) -> str:
        return self._here.get(saved) or self._renaming.here(saved)

    def _saved_name(self, here: str) -> str:
        """Return a name as it was saved; one that was not is none of the checkpoint's."""
        if here in self._saved:
            return self._saved[here]
        return f"{here} (here)" if here in self._here else here

    def _as_saved(self, at: Named) -> Named:
        return replace(at, name=self._saved_name(at.name))

    def check_files(self) -> None:
        """Check that every file is there."""
        self._source.check_files()

    def bind(self, live: Manifest) -> None:
        """Bind the checkpoint to the model, under the names that it knows."""
        self._source.bind(_with_names(live, self._saved_name))
        self._describe()

    def bind_alone(self) -> None:
        """Bind the checkpoint to what it says itself."""
        self._source.bind_alone()
        self._describe()

    def names(self) -> Sequence[str]:
        """Return the files that belong to it."""
        return self._source.names()

    def recorded_bytes(self, name: str) -> int | None:
        """Return the size that one of its files had when it was written; None: nothing says."""
        return self._source.recorded_bytes(name)

    def verify_whole(self, rank: int, world_size: int, on_bytes: Callable[[int], None]) -> None:
        """Verify this rank's share of all bytes."""
        self._source.verify_whole(rank, world_size, on_bytes)

    def recorded_fingerprint(self) -> str:
        """Return the fingerprint that was recorded, under the names of the save."""
        return self._source.recorded_fingerprint()

    def trainer_entry(self, name: str) -> object:
        """Return an entry at the top of the trainer's state."""
        return self._source.trainer_entry(name)

    def verify(self, rank: int, world_size: int, on_bytes: Callable[[int], None]) -> None:
        """Verify this rank's share."""
        self._source.verify(rank, world_size, on_bytes)

    def layout_of(self, manifest: Manifest) -> Layout:
        """Return which files hold which elements of masters and optimizer state."""
        return self._source.layout_of(manifest)

    def frozen_layout_of(self, manifest: Manifest) -> Layout:
        """Return which files hold which elements of the frozen weights."""
        return self._source.frozen_layout_of(manifest)

    def check(self, masters: Sequence[int], frozen: Sequence[int]) -> None:
        """Check the files that are going to be read."""
        self._source.check(masters, frozen)

    def locate(self, key: str, transfer: Transfer) -> Location:
        """Return where a run lies."""
        return self._source.locate(key, self._as_saved(transfer))

    def locate_rounded(self, transfer: Transfer) -> Location | None:
        """Return where the low-precision weights of a run lie."""
        return self._source.locate_rounded(self._as_saved(transfer))

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        """Return the scalar optimizer states of the held flat buffer that holds ``at``."""
        return self._source.scalars(self._as_saved(at))

    def module_state(self, rank: int, world_size: int) -> SharedState:
        """Return what is held once; of the trainer's state, weights that lie in it are renamed."""
        state = self._source.module_state(rank, world_size)
        client = dict(state.client_state)
        if isinstance(weights := client.get(WEIGHTS), dict):
            client[WEIGHTS] = self._renamed(weights)
        return replace(
            state,
            buffers=self._renamed(state.buffers),
            client_state=client,
            extra_states=self._renamed(state.extra_states),
        )

    def optimizer_state(self) -> Mapping[Any, Any] | None:
        """Return what the optimizer kept under keys that are not parameters."""
        return self._source.optimizer_state()

    def module_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the persistent module buffers."""
        return self._renamed(self._source.module_buffers())

    def _renamed(self, of: Mapping[str, Any]) -> dict[str, Any]:
        return {self._name(name): value for name, value in of.items()}


def _with_names(manifest: Manifest, named: Callable[[str], str]) -> Manifest:
    """Return a manifest whose parameters and buffers have other names."""

    def all_of(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(map(named, names))

    return replace(
        manifest,
        parameters=tuple(
            replace(p, name=named(p.name), aliases=all_of(p.aliases)) for p in manifest.parameters
        ),
        groups=tuple(replace(g, names=all_of(g.names)) for g in manifest.groups),
        buffers=tuple(replace(b, names=all_of(b.names)) for b in manifest.buffers),
        module_buffers=all_of(manifest.module_buffers),
        excluded=all_of(manifest.excluded),
    )
