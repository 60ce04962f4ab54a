"""Samplers that resume an epoch at any optimizer step, on any number of ranks.

Step ``k`` of an epoch consumes samples ``[k * G, (k + 1) * G)`` of the epoch's order, whatever the
number of ranks: only who takes which of them depends on it. The order is that of torch's
``DistributedSampler``, ``randperm`` seeded by seed plus epoch, so that runs which began with
Lightning's own sampler go on in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, Sampler
from typing_extensions import override

from lightning_elastic_zero.data_progress.batch_plan import BatchPlan
from lightning_elastic_zero.data_progress.rng import derive_seed, seed_host_rng
from lightning_elastic_zero.data_progress.sample_order import digest_of, epoch_order
from lightning_elastic_zero.errors import UnsupportedError


class ElasticSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` whose steps are the same on every number of ranks.

    An epoch is padded to a multiple of the global batch, from its own beginning, or, with
    ``drop_last``, cut to one.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sized,
        plan: BatchPlan,
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        sampler: Sampler[Any] | None = None,
        seed_workers: bool = False,
    ) -> None:
        """Plan the epochs.

        Args:
            dataset: what is sampled from; it has a length.
            plan: how a global batch is cut.
            rank: this rank.
            shuffle: a new order in each epoch; else as they come.
            seed: of the order.
            drop_last: leave out what does not fill a global batch; else fill it up.
            sampler: gives the order instead, if there is one; called under a seed of the epoch, so
                that it gives all ranks the same.
            seed_workers: seed the loader's workers anew for each micro-batch. Then what they draw
                depends on the place in the run, and on nothing that a restart would change.

        Raises:
            UnsupportedError: an epoch would have no step.
        """
        super().__init__(
            dataset,  # type: ignore[arg-type]
            num_replicas=plan.world_size,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        self.plan = plan
        self.sampler = sampler
        self.seed_workers = seed_workers
        self.length = len(dataset if sampler is None else sampler)  # type: ignore[arg-type]
        whole, rest = divmod(self.length, plan.global_batch_size)
        self.steps = whole + (rest > 0 and not drop_last)
        """Optimizer steps of an epoch."""
        if not self.steps and self.length:
            msg = (
                f"{self.length} samples do not fill one global batch of {plan.global_batch_size}, "
                "and the loader has drop_last=True: there is nothing to train on"
            )
            raise UnsupportedError(msg)
        self.total_size = self.steps * plan.global_batch_size
        self.num_samples = self.steps * plan.samples_of(rank)
        self._start: tuple[int, int] | None = None
        self._latest: tuple[int, int, Sequence[Any] | torch.Tensor] | None = None
        self._latest_digest: str | None = None

    def start_at(self, epoch: int, step: int) -> None:
        """Begin the next iteration, if it is of that epoch, at that optimizer step of it."""
        self.epoch = epoch
        self._start = (epoch, step)

    def describe(self) -> dict[str, Any]:
        """Return the fingerprint: two samplers with the same one give the same epochs."""
        return {
            "order": "sequential" if not self.shuffle else "torch.randperm",
            "sampler": "" if self.sampler is None else type(self.sampler).__name__,
            "seed": self.seed,
            "dataset_length": self.length,
            "last_batch": "dropped" if self.drop_last else "filled up",
        }

    @override
    def __len__(self) -> int:
        """Return this rank's samples in a whole epoch, wherever the next one begins."""
        return self.num_samples

    @override
    def __iter__(self) -> Iterator[Any]:
        for batch in self.micro_batches():
            yield from batch

    def micro_batches(self) -> Iterator[list[Any]]:
        """Yield this rank's micro-batches, from the step on that was asked for; once only."""
        start, self._start = self._start, None
        epoch = self.epoch
        first = start[1] if start is not None and start[0] == epoch else 0
        if first >= self.steps:
            return
        order = self._order(epoch)
        sizes = self.plan.micro_batches_of(self.rank)
        for step in range(first, self.steps):
            samples = self._of_step(order, step)
            begin = 0
            for micro_batch, size in enumerate(sizes):
                batch = samples[begin : begin + size]
                begin += size
                if self.seed_workers:
                    place = (epoch, step, micro_batch, self.rank)
                    batch[0] = _seeding(batch[0], derive_seed(self.seed, *place))
                yield batch

    def _of_step(self, order: Sequence[Any] | torch.Tensor, step: int) -> list[Any]:
        """Return this rank's samples of an optimizer step."""
        begin = step * self.plan.global_batch_size
        places = range(begin + self.rank, begin + self.plan.global_batch_size, self.plan.world_size)
        if isinstance(order, torch.Tensor):
            chosen: list[Any] = order[torch.tensor(places) % self.length].tolist()
            return chosen
        return [order[place % self.length] for place in places]

    def order_digest(self, epoch: int) -> str:
        """Return a digest of an epoch's order; empty where it has none."""
        order = self._order(epoch)
        if self._latest_digest is None:  # once for each order: every save records it
            self._latest_digest = digest_of(order)
        return self._latest_digest

    def latest_order(self) -> tuple[int, str] | None:
        """Return the epoch whose order was asked for last, and its digest; asks for none itself."""
        if self._latest is None:
            return None
        epoch, seed, _ = self._latest
        return (epoch, self.order_digest(epoch)) if seed == self.seed else None

    def _order(self, epoch: int) -> Sequence[Any] | torch.Tensor:
        """Return all samples of an epoch in order, shape ``(dataset length,)``.

        A user's sampler is asked once per epoch: one that counts its own epochs goes on by one.
        """
        if self._latest is None or self._latest[:2] != (epoch, self.seed):
            self._latest = (epoch, self.seed, self._make_order(epoch))
            self._latest_digest = None
        return self._latest[2]

    def _make_order(self, epoch: int) -> Sequence[Any] | torch.Tensor:
        if self.sampler is not None:
            return epoch_order(self.sampler, self.seed, epoch, self.length)
        if not self.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator()
        generator.manual_seed(self.seed + epoch)
        return torch.randperm(self.length, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        """Return no position: that is the run's, and is saved with it."""
        return self.describe()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Ignore the state: see ``start_at``."""


class ElasticBatchSampler(BatchSampler):
    """Micro-batches that differ by a sample, so that their sum is the global batch."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler, sampler.plan.largest_micro_batch, drop_last=False)
        self.elastic = sampler

    @override
    def __len__(self) -> int:
        return self.elastic.steps * self.elastic.plan.accumulate

    @override
    def __iter__(self) -> Iterator[list[Any]]:
        return self.elastic.micro_batches()


class _SeedingName:
    """The first sample's name in a micro-batch, which seeds the worker process that it arrives in.

    A loader sends its workers pickled lists of names. This one, when it is unpickled, seeds the
    worker's random numbers and becomes what the sampler gave: the samples that are fetched next are
    drawn alike after any restart, with any number of workers, persistent or not.
    """

    item: Any
    seed: int

    def __reduce__(self) -> tuple[Callable[[Any, int], Any], tuple[Any, int]]:
        return _seed_on_unpickle, (self.item, self.seed)


class _SeedingIndex(_SeedingName, int):
    """One that is an index in this process too, for loaders that look at it."""


def _seeding(item: Any, seed: int) -> _SeedingName:  # noqa: ANN401 - a sample's name
    made = _SeedingIndex(item) if type(item) is int else _SeedingName()
    made.item, made.seed = item, seed
    return made


def _seed_on_unpickle(item: Any, seed: int) -> Any:  # noqa: ANN401 - a sample's name
    """Seed the process that unpickles a sample's name; return the name."""
    seed_host_rng(seed)
    return item
