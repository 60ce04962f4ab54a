"""Training data of all kinds; each sample contains its index."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from deepspeed import comm
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
    get_worker_info,
)
from typing_extensions import override

WIDTH = 5


def order_of(epoch: int, length: int) -> list[int]:
    """Return the samples of an epoch in order."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()


def rank_part(order: list[int]) -> list[int]:
    return order[comm.get_rank() :: comm.get_world_size()]


class EpochCounter:
    """Counts its own epochs, whenever an iterator is created."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch, self.first = length, 0, 0

    def next_part(self) -> list[int]:
        """Return this rank's samples of the next epoch, or of its remaining part."""
        mine = rank_part(order_of(self.epoch, self.length)[self.first :])
        self.epoch, self.first = self.epoch + 1, 0
        return mine

    def resume_at(self, epoch: int, samples: int) -> None:
        self.epoch, self.first = epoch, samples


class EpochCountingStream(EpochCounter, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        samples = IndexedSamples(self.length, 0.0)
        return (samples[index] for index in self.next_part())


class SizedEpochCountingStream(EpochCountingStream):
    def __len__(self) -> int:
        return int(self.length // comm.get_world_size())


class EpochCountingBatchSampler(EpochCounter, BatchSampler):
    def __init__(self, length: int, size: int) -> None:
        super().__init__(length)
        self.batch_size, self.drop_last, self.sampler = size, True, range(length)

    @override
    def __len__(self) -> int:
        return int(self.length // comm.get_world_size() // self.batch_size)

    @override
    def __iter__(self) -> Iterator[list[int]]:
        mine, size = self.next_part(), self.batch_size
        return iter([mine[i : i + size] for i in range(0, len(mine), size)])


class StatefulEpoch:
    """Has its own state: the epoch, and this rank's position in it."""

    def __init__(self, length: int, batch_size: int = 1) -> None:
        self.length, self.batch_size = length, batch_size
        self.epoch, self.at = 0, 0

    def mine(self) -> list[int]:
        return rank_part(order_of(self.epoch, self.length))

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch, self.at = state_dict["epoch"], state_dict["at"]


class StatefulEpochLoader(StatefulEpoch):
    """A loader whose state at the end of an epoch is the start of the next epoch."""

    def __iter__(self) -> Iterator[Any]:
        samples, mine = IndexedSamples(self.length, 0.0), self.mine()
        while self.at < len(mine):
            ids = mine[self.at : self.at + self.batch_size]
            self.at += len(ids)
            yield default_collate([samples[i] for i in ids])
        self.epoch, self.at = self.epoch + 1, 0


class FailingLoader(StatefulEpochLoader):
    """Fails while it fetches batch 4, after its state has changed."""

    @override
    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            if number == 4:
                raise OSError
            yield batch


class EndedEpochLoader(StatefulEpochLoader):
    """A loader whose state at the end of an epoch is that end, so that it yields no batch."""

    @override
    def state_dict(self) -> dict[str, int]:
        if self.at == 0 and self.epoch:
            return {"epoch": self.epoch - 1, "at": len(rank_part(list(range(self.length))))}
        return super().state_dict()


class StatefulStream(StatefulEpoch, IterableDataset[Any]):
    """A stateful dataset for torchdata's loader."""

    def __iter__(self) -> Iterator[Any]:
        samples = IndexedSamples(self.length, 0.0)
        if self.at >= len(self.mine()):
            self.epoch, self.at = self.epoch + 1, 0
        mine = self.mine()
        while self.at < len(mine):
            self.at += 1
            yield samples[mine[self.at - 1]]


def counting_loader(kind: str, length: int, size: int) -> Any:
    match kind:
        case "counting":
            return DataLoader(EpochCountingStream(length), batch_size=size)
        case "counting, sized":
            return DataLoader(SizedEpochCountingStream(length), batch_size=size)
        case "counting, batches":
            batches = EpochCountingBatchSampler(length, size)
            return DataLoader(IndexedSamples(length, 0.0), batch_sampler=batches)
        case "counting, kept":
            return StatefulEpochLoader(length, size)
        case "counting, kept, failing":
            return FailingLoader(length, size)
        case "counting, kept and ended":
            return EndedEpochLoader(length, size)
        case "counting, torchdata":
            from torchdata.stateful_dataloader import StatefulDataLoader

            return StatefulDataLoader(StatefulStream(length), batch_size=size)
    raise ValueError(kind)


class IndexedSamples(Dataset[Any]):
    """Samples that contain their index."""

    def __init__(self, length: int, noise: float) -> None:
        self.length, self.noise = length, noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        index = operator.index(index)
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(WIDTH, generator=generator)
        return x + self.noise * torch.randn(WIDTH), index


class Items(IndexedSamples):
    """A data set whose items are batches of four samples."""

    @override
    def __len__(self) -> int:
        return self.length // 4

    @override
    def __getitem__(self, index: int) -> Any:
        return default_collate([super(Items, self).__getitem__(4 * index + i) for i in range(4)])


class Lists(IndexedSamples):
    """A data set indexed by lists, which a batch sampler yields that is passed as sampler."""

    @override
    def __getitem__(self, index: Any) -> Any:
        return default_collate([super(Lists, self).__getitem__(i) for i in index])


class Backwards(Sampler[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length).tolist()[::-1])


class OwnGenerator(Sampler[int]):
    """A user's sampler that draws from its own generators."""

    def __init__(self, length: int, kind: str) -> None:
        self.length, self.kind = length, kind
        self.rng = np.random.default_rng(5)
        self.parts: dict[str, Any] = {
            "numbers": random.Random(5),
            "torch": torch.Generator().manual_seed(5),
        }
        self.epochs = 0
        self.begin = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        match self.kind:
            case "numpy":
                return iter(self.rng.permutation(self.length).tolist())
            case "random":
                return iter(self.parts["numbers"].sample(range(self.length), self.length))
            case "torch":
                return iter(torch.randperm(self.length, generator=self.parts["torch"]).tolist())
            case "counts":
                begin = 7 * self.epochs
            case "changed":
                begin = self.begin
            case "ranks, later":
                begin = comm.get_rank() * (self.epochs > 1)
            case _:
                begin = comm.get_rank()
        return iter([(begin + index) % self.length for index in range(self.length)])


class NumPyIndices(Sampler[Any]):
    """A sampler that yields NumPy integers, optionally from an unseeded generator."""

    def __init__(self, length: int, kind: str) -> None:
        self.length, self.kind = length, kind

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        if self.kind == "numpy indices, unseeded":
            return iter(np.random.default_rng().permutation(self.length))
        indices = np.random.permutation(self.length)
        return map(Anonymous, indices) if self.kind == "anonymous" else iter(indices)


class Anonymous:
    """An index that cannot be pickled, and thus not be compared with those of other processes."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __index__(self) -> int:
        return int(self.index)

    def __reduce__(self) -> str:
        raise TypeError


class Stream(IterableDataset[Any]):
    """Consecutive samples, split between ranks, equal in each epoch; workers alternate batches."""

    def __init__(self, length: int, size: int = 1, noise: float = 0.0) -> None:
        self.length, self.size, self.noise, self.first = length, size, noise, 0

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        own = range(first + comm.get_rank(), self.length, comm.get_world_size())
        worker = get_worker_info()
        for position, index in enumerate(own):
            if worker is None or position // self.size % worker.num_workers == worker.id:
                yield index + self.noise * torch.randn(WIDTH), index


class SeekableStream(Stream):
    def resume_at(self, epoch: int, samples: int) -> None:
        del epoch
        self.first = samples


class ContinuingStream(Stream):
    """A stream that does not restart in each epoch."""

    def __iter__(self) -> Iterator[Any]:
        while self.first < self.length:
            index = self.first + comm.get_rank()
            self.first += comm.get_world_size()
            yield torch.full((WIDTH,), float(index)), index


class StatefulLoader(DataLoader[Any]):
    """A loader whose state is the number of batches that its rank has consumed."""

    taken = 0
    skip = 0

    @override
    def __iter__(self) -> Any:
        skip, self.skip, self.taken = self.skip, 0, 0
        for batch in super().__iter__():
            self.taken += 1
            if self.taken > skip:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.skip = state_dict["taken"]


class SizedStatefulLoader(StatefulLoader):
    """The same, with a length, so that Lightning fetches no batch ahead."""

    dataset: Stream

    @override
    def __len__(self) -> int:
        assert self.batch_size is not None
        return self.dataset.length // comm.get_world_size() // self.batch_size


class Shard(IterableDataset[Any]):
    """A shard of a stream, here all samples in an order of its own."""

    def __init__(self, number: int, length: int) -> None:
        self.number, self.length = number, length

    def __iter__(self) -> Iterator[Any]:
        samples = IndexedSamples(self.length, 0.0)
        return (samples[index] for index in rank_part(order_of(self.number, self.length)))


class ShardLoader(StatefulLoader):
    """A loader whose state also names the shard."""

    dataset: Shard

    @override
    def state_dict(self) -> dict[str, int]:
        return {**super().state_dict(), "shard": self.dataset.number}

    @override
    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        super().load_state_dict(state_dict)
        self.dataset.number = state_dict["shard"]


class OwnBatchSampler(BatchSampler):
    """A user's batch sampler: each rank's samples in reverse order."""

    def __init__(self, length: int, size: int) -> None:
        self.length, self.batch_size, self.drop_last = length, size, True
        self.samples = 0
        self.sampler = range(length)

    def _own(self) -> list[list[int]]:
        own = list(range(self.length))[::-1][comm.get_rank() :: comm.get_world_size()]
        return [own[i : i + self.batch_size] for i in range(0, len(own), self.batch_size)]

    @override
    def __len__(self) -> int:
        return len(self._own())

    @override
    def __iter__(self) -> Iterator[list[int]]:
        begin = self.samples // comm.get_world_size() // self.batch_size
        self.samples = 0
        return iter(self._own()[begin:])

    def resume_at(self, epoch: int, samples: int) -> None:
        del epoch
        self.samples = samples


class UnseekableBatchSampler(OwnBatchSampler):
    """A batch sampler that cannot resume at a sample."""

    resume_at = None  # type: ignore[assignment]


class LoadersByEpoch(pl.LightningDataModule):
    """Creates a training loader that depends on the epoch."""

    def __init__(self, kind: str, length: int, size: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = (kind, length, size, options)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        kind, length, size, options = self.arguments
        epoch, data = self.trainer.current_epoch, IndexedSamples(length, 0.0)
        match kind:
            case "by epoch: size":
                return DataLoader(data, size * (1 + epoch), shuffle=True, **options)
            case "by epoch: size of a stream":
                return DataLoader(SeekableStream(length), size * (1 + epoch), **options)
            case "by epoch: shard":
                return ShardLoader(Shard(epoch, length), size, **options)
            case "by epoch: seed":
                shared: DistributedSampler[Any] = DistributedSampler(
                    data, comm.get_world_size(), comm.get_rank(), seed=3 + 4 * (epoch % 3 % 2)
                )
                return DataLoader(data, size, sampler=shared, **options)
        return DataLoader(data, size, shuffle=True, **options)


def _none_for_one(samples: list[Any]) -> Any:
    """Collate samples, but return None for the batch with sample 12."""
    return None if any(index == 12 for _, index in samples) else default_collate(samples)


def loaders_of(kind: str, length: int, size: int, noise: float, options: dict[str, Any]) -> Any:
    """Return training loaders of a kind.

    Args:
        kind: selects the loaders.
        length: number of samples.
        size: of batches.
        noise: scale of random numbers that are added to each sample when it is fetched.
        options: of the ``DataLoader``.
    """
    data = IndexedSamples(length, noise)
    made: Any = partial(DataLoader, batch_size=size, **options)
    match kind:
        case kind if kind.startswith("counting"):
            return counting_loader(kind, length, size)
        case kind if kind.startswith("by epoch"):
            return LoadersByEpoch(kind, length, size, options)
        case "plain" | "skips":
            return made(data, shuffle=True)
        case "sampler":
            return made(data, sampler=Backwards(length))
        case "own generator":
            return made(data, shuffle=True, generator=torch.Generator().manual_seed(5))
        case "replacement":
            return made(data, sampler=RandomSampler(data, replacement=True))
        case "None instead of a batch":
            return made(data, sampler=range(length), collate_fn=_none_for_one)
        case "in order":
            return made(data)
        case "range":
            return made(data, sampler=range(length))
        case "numpy" | "random" | "torch" | "counts" | "ranks" | "ranks, later" | "changed":
            return made(data, sampler=OwnGenerator(length, kind))
        case "numpy indices" | "numpy indices, unseeded" | "anonymous":
            return made(data, sampler=NumPyIndices(length, kind))
        case "user's loader":
            return DataLoader(data, batch_sampler=UnseekableBatchSampler(length, size))
        case "no length":
            return [torch.zeros(2, WIDTH)] * 4
        case "iterable":
            return DataLoader(Stream(length), batch_size=size)
        case "stateful":
            return StatefulLoader(Stream(length), batch_size=size)
        case "stateful, sized":
            return SizedStatefulLoader(Stream(length), batch_size=size)
        case "seeks":
            return made(SeekableStream(length, size, noise))
        case "batch sampler as sampler":
            batches = BatchSampler(RandomSampler(data), 4, drop_last=False)
            return DataLoader(Lists(length, noise), sampler=batches, batch_size=None, **options)
        case "items":
            return DataLoader(Items(length, noise), batch_size=None, **options)
        case "a stream first":
            longer = DataLoader(IndexedSamples(2 * length, noise), 2 * size, shuffle=True)
            return [made(SeekableStream(length, size)), longer]
        case "a stream and a shorter one":
            shorter = DataLoader(IndexedSamples(length // 2, noise), 2 * size, shuffle=True)
            return [made(SeekableStream(length, size)), shorter]
        case "a shorter batch sampler" | "a shorter batch sampler, once":
            data = IndexedSamples(length // 4, noise)
            shorter = DataLoader(data, batch_sampler=OwnBatchSampler(length // 4, size))
            mode: Any = "max_size" if "once" in kind else "max_size_cycle"
            return CombinedLoader([made(SeekableStream(length, size)), shorter], mode)
        case "a shorter stream":
            shorter = made(SeekableStream(length // 2, size))
            return [made(data, shuffle=True), shorter]
        case "a shorter stateful one":
            return [made(data, shuffle=True), StatefulLoader(Stream(5 * size), batch_size=size)]
        case "continuing":
            return DataLoader(ContinuingStream(length), batch_size=size)
        case "two, one uncut":
            return [made(data, shuffle=True), DataLoader(Stream(length), batch_size=3)]
        case "own distributed sampler":
            shared: DistributedSampler[Any] = DistributedSampler(
                data, comm.get_world_size(), comm.get_rank(), shuffle=False
            )
            return made(data, sampler=shared)
        case "two, as long as the longer":
            two = [made(data, shuffle=True), made(IndexedSamples(29, 0.0), shuffle=True)]
            return CombinedLoader(two, "max_size")
        case "two, as long as the shorter":
            two = [made(data, shuffle=True), made(IndexedSamples(24, 0.0), shuffle=True)]
            return CombinedLoader(two, "min_size")
        case "noisy batches":
            batches = BatchSampler(SequentialSampler(data), size, drop_last=False)
            return DataLoader(data, batch_sampler=batches, **options)
        case "own batches":
            return DataLoader(data, batch_sampler=OwnBatchSampler(length, size))
        case "torchdata":
            from torchdata.stateful_dataloader import StatefulDataLoader

            return StatefulDataLoader(data, batch_size=size, shuffle=True)
        case "torchdata and a shorter one" | "torchdata and a longer one":
            from torchdata.stateful_dataloader import StatefulDataLoader

            stream: Any = StatefulDataLoader(Stream(length, size), batch_size=size)
            is_shorter = "shorter" in kind
            others = made(IndexedSamples(length // 2 if is_shorter else 2 * length - 8, 0.0))
            return CombinedLoader([stream, others], "min_size" if is_shorter else "max_size_cycle")
        case "two":
            return {"a": made(data, shuffle=True), "b": made(IndexedSamples(29, 0.0), shuffle=True)}
    raise ValueError(kind)
