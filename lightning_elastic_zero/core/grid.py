"""The ranks of a job: data ranks, and with tensor parallelism the tensor ranks of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankGrid:
    """Numbers of ranks. Rank ``r`` is tensor rank ``r % tensor`` of data rank ``r // tensor``."""

    data: int
    """Data ranks: each trains on its own samples."""
    tensor: int = 1
    """Tensor ranks of each data rank, which train on the same samples."""

    @property
    def ranks(self) -> int:
        """All ranks: one for each device."""
        return self.data * self.tensor

    def data_rank(self, rank: int) -> int:
        """Return the data rank to which a rank belongs."""
        return rank // self.tensor

    def counterpart(self, rank: int, other: RankGrid) -> int:
        """Return the rank from which a rank of another grid takes what each rank has for itself.

        Tensor ranks of one data rank take the same, unless the grids are equal.
        """
        return rank if self == other else other.data_rank(rank) % self.data * self.tensor

    @property
    def shares(self) -> str:
        """The number of ranks that share a global batch, for messages."""
        unit = "device" if self.tensor == 1 else "data rank"
        return f"{self.data} {unit}{'s' if self.data > 1 else ''}"

    def __str__(self) -> str:
        """Return the number of devices, for messages."""
        devices = f"{self.ranks} device{'s' if self.ranks > 1 else ''}"
        return devices if self.tensor == 1 else f"{devices} ({self.tensor} tensor ranks)"
