"""Training data whose order depends on the epoch, which they count by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed import comm
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset
from typing_extensions import override

WIDTH = 5


def order_of(epoch: int, length: int) -> list[int]:
    """Return the samples of an epoch, in its order."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()


def rank_part(order: list[int]) -> list[int]:
    """Return this rank's part."""
    return order[comm.get_rank() :: comm.get_world_size()]


def sample(index: int) -> tuple[torch.Tensor, int]:
    """Return a sample."""
    return torch.full((WIDTH,), index / 10), index


class Samples(Dataset[Any]):
    """Samples by index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return sample(index)


class EpochCountingStream(IterableDataset[Any]):
    """Data without a length that count their epochs as soon as an iterator is made."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch, self.first = length, 0, 0

    def __iter__(self) -> Iterator[Any]:
        order = order_of(self.epoch, self.length)[self.first :]
        self.epoch, self.first = self.epoch + 1, 0
        return map(sample, rank_part(order))

    def resume_at(self, epoch: int, samples: int) -> None:
        """Begin after so many samples of an epoch."""
        self.epoch, self.first = epoch, samples


class SizedEpochCountingStream(EpochCountingStream):
    """The same, with a length."""

    def __len__(self) -> int:
        return int(self.length // comm.get_world_size())


class EpochCountingBatchSampler(BatchSampler):
    """A batch sampler that counts its epochs."""

    def __init__(self, length: int, size: int) -> None:
        self.length, self.batch_size, self.drop_last = length, size, True
        self.sampler = range(length)
        self.epoch, self.first = 0, 0

    @override
    def __len__(self) -> int:
        return int(self.length // comm.get_world_size() // self.batch_size)

    @override
    def __iter__(self) -> Iterator[list[int]]:
        mine = rank_part(order_of(self.epoch, self.length)[self.first :])
        self.epoch, self.first = self.epoch + 1, 0
        return iter([mine[i : i + self.batch_size] for i in range(0, len(mine), self.batch_size)])

    def resume_at(self, epoch: int, samples: int) -> None:
        """Begin after so many samples of an epoch."""
        self.epoch, self.first = epoch, samples


class StatefulEpochLoader:
    """A loader with a state of its own; where its epoch has ended, that is the next one's."""

    def __init__(self, length: int, batch_size: int) -> None:
        self.length, self.batch_size = length, batch_size
        self.epoch, self.at = 0, 0

    def __iter__(self) -> Iterator[Any]:
        mine = rank_part(order_of(self.epoch, self.length))
        while self.at < len(mine):
            ids = mine[self.at : self.at + self.batch_size]
            self.at += len(ids)
            yield torch.stack([sample(i)[0] for i in ids]), torch.tensor(ids)
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the place."""
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on there."""
        self.epoch, self.at = state_dict["epoch"], state_dict["at"]


class KeptEnded(StatefulEpochLoader):
    """One whose state at an epoch's end is that end: its next iteration would give nothing more."""

    @override
    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()

    @override
    def state_dict(self) -> dict[str, int]:
        if self.at == 0 and self.epoch:
            return {"epoch": self.epoch - 1, "at": len(rank_part(list(range(self.length))))}
        return super().state_dict()


class StatefulStream(IterableDataset[Any]):
    """Data with a state, for torchdata's loader."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch, self.at = length, 0, 0

    def __iter__(self) -> Iterator[Any]:
        mine = rank_part(order_of(self.epoch, self.length))
        if self.at >= len(mine):
            self.epoch, self.at = self.epoch + 1, 0
            mine = rank_part(order_of(self.epoch, self.length))
        while self.at < len(mine):
            self.at += 1
            yield sample(mine[self.at - 1])

    def state_dict(self) -> dict[str, int]:
        """Return the place."""
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on there."""
        self.epoch, self.at = state_dict["epoch"], state_dict["at"]


def counting_loader(kind: str, length: int, size: int) -> Any:
    """Return the training loader of a kind that begins with ``counting``."""
    match kind:
        case "counting":
            return DataLoader(EpochCountingStream(length), batch_size=size)
        case "counting, sized":
            return DataLoader(SizedEpochCountingStream(length), batch_size=size)
        case "counting, batches":
            return DataLoader(
                Samples(length), batch_sampler=EpochCountingBatchSampler(length, size)
            )
        case "counting, kept":
            return StatefulEpochLoader(length, size)
        case "counting, kept and ended":
            return KeptEnded(length, size)
        case "counting, torchdata":
            from torchdata.stateful_dataloader import StatefulDataLoader

            return StatefulDataLoader(StatefulStream(length), batch_size=size)
    raise ValueError(kind)
