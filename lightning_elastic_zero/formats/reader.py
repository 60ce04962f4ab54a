"""What every on-disk format offers to a load: its manifest, its layout, and runs of elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lightning_elastic_zero.layout import Fragment, Layout, Transfer
from lightning_elastic_zero.manifest import Manifest, Plain
from lightning_elastic_zero.tensor_state import Scalar

WEIGHT = ""
"""The key of the weights themselves in a ``ReadRequest``: masters, or frozen weights."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One run to be read, and the 1-D tensor that it goes into."""

    key: str
    """An element-wise optimizer state's name, or ``WEIGHT``."""
    transfer: Transfer
    """From where to where; ``target_offset`` counts in ``target``."""
    target: torch.Tensor

    @property
    def slot(self) -> torch.Tensor:
        """The part of ``target`` that the run fills."""
        first, transfer = self.transfer.target_offset, self.transfer
        return self.target.detach()[first : first + transfer.stop - transfer.start]


@dataclass(frozen=True, slots=True)
class SharedState:
    """What a checkpoint holds once, for all ranks, and what it kept for this one."""

    buffers: Mapping[str, torch.Tensor]
    """Persistent module buffers, with their shapes."""
    client_state: Mapping[str, Any]
    """What the trainer, module, datamodule and callbacks saved."""
    loss_scaler: Mapping[str, Plain]
    lr_scheduler: Mapping[str, Any] | None
    read_client_entry: Callable[[int, tuple[str, ...]], Any] | None = None
    """Gives an entry of the client state, by its path, as a rank of the save had it; None where it
    had none. Only formats that keep what ranks have of their own have it."""


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """What a checkpoint turned out to be: for the log, and for what a load can ask of it."""

    kind: str
    """Such as ``"stock DeepSpeed checkpoint"``."""
    lacks: tuple[str, ...] = ()
    """What a run has and this checkpoint does not hold, in words."""
    hyperparameters: bool = True
    """False: it holds no hyperparameters of the parameter groups; those configured now stay."""
    progress: bool = True
    """False: it holds no step counters of DeepSpeed's."""
    mixed: str = ""
    """Why its optimizer state seems to be of another step than the rest, and what helps; told where
    the state is wanted, and else a warning. Empty where it does not."""
    unmatched: str = ""
    """Why its optimizer state does not belong to the live model's parameters, and what helps; told
    where the state is wanted. Empty where it does, or before the two have met."""


class CheckpointReader(Protocol):
    """An open checkpoint of some format, read by one rank.

    Used in this order: the manifest and the layouts are there at once, from small files;
    ``check_all`` on one rank; ``bind`` and ``verify`` on all; ``check`` touches the files that this
    rank will read, without reading data; ``read`` is called for the runs of one source rank after
    the other; ``close`` at the end.
    """

    @property
    def found(self) -> SourceInfo:
        """What kind of checkpoint it is, and what it does not hold."""
        ...

    @property
    def manifest(self) -> Manifest:
        """What the checkpoint says of itself; foreign formats build one from what they find."""
        ...

    def check_all(self) -> None:
        """Check, on one rank, that every file is there and belongs to the others.

        Raises:
            CheckpointCorruptedError: one is missing, cut short, or of another save.
        """
        ...

    def bind(self, live: Manifest) -> None:
        """Match the checkpoint with a live model: some formats tell positions, not names.

        Raises:
            CheckpointMismatchError: the positions cannot be those of this model.
        """
        ...

    def verify(self, rank: int, world_size: int, on_bytes: Callable[[int], None]) -> None:
        """Verify this rank's share of what is not verified while it is read.

        Raises:
            CheckpointCorruptedError: bytes are not those that were written.
        """
        ...

    def layout(self) -> Layout:
        """Which files hold which elements of masters and optimizer state."""
        ...

    def frozen_layout(self) -> Layout:
        """Which files hold which elements of the frozen weights."""
        ...

    def check(self, masters: Sequence[int], frozen: Sequence[int]) -> None:
        """Check size and identity of every file that is going to be read.

        Args:
            masters: the source ranks whose masters and optimizer states are wanted.
            frozen: the source ranks whose frozen weights are wanted.

        Raises:
            CheckpointCorruptedError: one is missing, cut short, or of another save.
        """
        ...

    def read(self, requests: Sequence[ReadRequest], on_bytes: Callable[[int], None]) -> int:
        """Fill all targets; return the bytes read from disk.

        Raises:
            CheckpointCorruptedError: what is on disk is not what was written.
        """
        ...

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        """Return the scalar optimizer states of the held flat buffer that holds ``at``."""
        ...

    def module_state(self, rank: int, world_size: int) -> SharedState:
        """Return what is held once, and what was kept for this rank where ranks match."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...
