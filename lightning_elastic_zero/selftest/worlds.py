"""The worlds of workers, and which process starts which of their ranks; pure."""

from __future__ import annotations

from dataclasses import dataclass

MOST_RANKS_ALONE = 8
"""GPUs of this machine that are used, where no launcher says how many are wanted."""

_MEASURED_BYTES, _MEASURED_BYTES_IN_ALL = 64 << 20, 2 << 30


@dataclass(frozen=True, slots=True)
class Worlds:
    """The numbers of ranks that save, load, and load once more what the second have saved."""

    saves: int
    loads: int
    returns: int

    @property
    def changes(self) -> bool:
        """Whether a checkpoint of one number of ranks is loaded on another one."""
        return self.saves != self.loads


def plan_worlds(launched: int, gpus: int) -> Worlds:
    """Decide on the worlds.

    Args:
        launched: ranks that a launcher started, each with a device; 0: this process is alone.
        gpus: those of this machine; 0: on processors.
    """
    if not launched and not gpus:
        return Worlds(2, 3, 1)
    most = launched or min(gpus, MOST_RANKS_ALONE)
    return Worlds(most, max(most - 1, 1), most)


def ranks_started_by(starter: int, starters: int, world_size: int) -> range:
    """Return the ranks of a world that one starter starts: its own, or all where it is alone."""
    if starters == 1:
        return range(world_size)
    return range(starter, min(starter + 1, world_size))


def measured_bytes(ranks: int) -> int:
    """Return how many bytes of state each rank has, and writes, where things are timed."""
    return min(_MEASURED_BYTES, _MEASURED_BYTES_IN_ALL // ranks)
