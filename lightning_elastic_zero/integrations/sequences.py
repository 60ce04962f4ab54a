"""The data of runs in which ranks share each sequence (Ulysses, ``sp_size``).

A data rank is a group of ``sp_size`` neighbouring ranks. In each round of ``sp_size`` micro-steps,
every rank reads one batch, DeepSpeed's ``UlyssesSPDataLoaderAdapter`` gathers those of the group,
and each micro-step trains on one of them, cut along the sequence. As an iterator, the adapter has
no epochs, cannot skip batches, and loses the first step of each later epoch under a Trainer.

``shared_loader`` makes an ordinary loader of accelerate from it, in which a batch is a rank's part
of a micro-step. Data rank ``d`` of ``D`` trains on batch ``n * D + d`` in micro-step ``n``, as on
``D`` ranks without sequence parallelism: the samples of a step do not depend on ``sp_size``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any

from accelerate import skip_first_batches
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import Dataset, IterableDataset, Sampler

from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.integrations.engines import is_a

Read = Callable[[], Any]
"""Returns a rank's part of a micro-step; collective among the ranks of a sequence."""


def sequence_ranks(accelerator: Any) -> int:
    """Return how many ranks share a sequence under an Accelerator."""
    plan = accelerator.parallelism_config
    return int(plan.sp_size) if plan else 1


def is_adapter(loader: object) -> bool:
    """Whether a loader is DeepSpeed's, which cuts sequences."""
    return is_a(loader, "deepspeed", "UlyssesSPDataLoaderAdapter")


def shared_loader(adapter: Any, rank: int) -> Any:
    """Return a loader of accelerate with the batches of DeepSpeed's adapter.

    Args:
        adapter: a new adapter of a loader that accelerate has prepared.
        rank: this process, of all.

    Raises:
        UnsupportedError: ranks might get unequal numbers of batches, or the order of the batches
            depends on ``sp_size``.
    """
    loader = adapter.dl
    if isinstance(loader.batch_sampler, _MicroSteps):
        return loader  # prepared again
    if reason := _unsupported(loader):
        msg = (
            f"sequence parallelism (sp_size={adapter.sp_world_size}) with {reason}: elastic() "
            "shares the batches of a dataset with __len__ and __getitem__ that accelerate "
            "distributes to the ranks"
        )
        raise UnsupportedError(msg)
    batches = batch_sampler_of(loader)
    data_ranks = batches.num_processes // adapter.sp_world_size
    data_rank, turn = divmod(rank, adapter.sp_world_size)
    batches.process_index = turn * data_ranks + data_rank
    shared = DataLoaderShard(
        _Reads(loader.dataset),
        device=loader.device,
        rng_types=loader.rng_types,
        synchronized_generator=loader.synchronized_generator,
        batch_sampler=_MicroSteps(adapter, batches),
        collate_fn=itemgetter(0),
        iteration=loader.iteration,
    )
    shared._is_accelerate_prepared = True
    return shared


def _unsupported(loader: Any) -> str:
    """Return why a loader cannot be shared, and the remedy; empty if it can."""
    batches = batch_sampler_of(loader)
    if isinstance(loader, DataLoaderDispatcher) or isinstance(loader.dataset, IterableDataset):
        return "an iterable dataset or dispatch_batches=True"
    if not (isinstance(loader, DataLoaderShard) and isinstance(batches, BatchSamplerShard)):
        return "a DataLoader that accelerate has not prepared"
    if loader.use_stateful_dataloader:
        return "use_stateful_dataloader=True"
    if batches.split_batches:
        return "split_batches=True"
    if not (batches.even_batches or batches.drop_last):
        return "even_batches=False, so that ranks would wait for each other at the end of an epoch"
    return ""


def batch_sampler_of(loader: Any) -> Any:
    """Return what gives a loader the indices of each batch."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


class _Reads(Dataset[Any]):
    """Stands for the user's dataset; an index is a function that reads a part."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, reads: list[Read]) -> list[Any]:
        return [read() for read in reads]


class _MicroSteps(Sampler[list[Read]]):
    """The micro-steps of an epoch, as functions that read them one after another.

    ``SkipBatchSampler`` of accelerate leaves out the first ones, which are then never read.
    """

    def __init__(self, adapter: Any, batches: BatchSamplerShard) -> None:
        self._adapter = adapter
        self._batches = batches
        # accelerate sets the epoch of these.
        self.batch_sampler = batches.batch_sampler
        self.sampler = getattr(self.batch_sampler, "sampler", None)

    def __len__(self) -> int:
        return len(self._batches) * int(self._adapter.sp_world_size)

    def __iter__(self) -> Iterator[list[Read]]:
        begun: list[Iterator[Any]] = []

        def read(micro_step: int) -> Any:
            if not begun:
                begun.append(self._read_from(micro_step))
            return next(begun[0])

        for micro_step in range(len(self)):
            yield [partial(read, micro_step)]

    def _read_from(self, micro_step: int) -> Iterator[Any]:
        """Read the parts of this rank, beginning in the middle of an epoch."""
        was = self._adapter
        rounds, parts = divmod(micro_step, was.sp_world_size)
        loader = skip_first_batches(was.dl, rounds) if rounds else was.dl
        # Its base, because accelerate takes the loader that was begun last for the loop's.
        adapter = type(was)(
            loader.base_dataloader, was.sp_rank, was.sp_group, was.sp_world_size, was.device
        )
        return islice(adapter, parts, None)
