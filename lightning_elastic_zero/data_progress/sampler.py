"""Samplers that resume an epoch at any optimizer step on any number of ranks, and random states.

Step ``k`` of an epoch consumes samples ``[k * G, (k + 1) * G)`` of the epoch's order; the number of
ranks only affects which rank takes which sample. The order is that of torch's
``DistributedSampler``, so runs that began with Lightning's sampler continue in the same order.
A user's sampler may draw from its own generators or count epochs. Its generators are seeded from
the run's seed and the epoch, and a digest of the order reveals remaining differences.
Ranks without saved random states start streams derived from seed, optimizer step and rank.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from itertools import islice
from os import fspath
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, Sampler
from typing_extensions import override

from lightning_elastic_zero.data_progress.batches import BatchPlan
from lightning_elastic_zero.errors import UnsupportedError

log = logging.getLogger(__name__)

_DEPTH = 4
"""Depth of the search for generators in nested samplers and containers."""

_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def collect_rng_states(device: torch.device | None = None) -> dict[str, Any]:
    """Return the states of the host's and the device's generators, as plain data."""
    name, keys, place, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.tensor(np.asarray(keys, np.int64)), place, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_rng_states(state: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Restore states from ``collect_rng_states``; generators missing in it are not changed."""
    if "python" in state:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in state:
        name, keys, place, has_gauss, gauss = state["numpy"]
        words = keys.numpy().astype(np.uint32)
        np.random.set_state((name, words, place, has_gauss, gauss))
    if "torch" in state:
        torch.set_rng_state(state["torch"].cpu())
    # By the device's type, not its index, which may differ from that of the save.
    if device is not None and device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type].cpu(), device)


def seed_host_rng(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.default_generator.manual_seed(seed)


def seed_rng_streams(seed: int, step: int, rank: int) -> None:
    """Seed all generators from the run's seed, the optimizer step and the rank."""
    number = derive_seed(seed, step, rank)
    seed_host_rng(number)
    torch.manual_seed(number)  # devices too


@contextmanager
def isolate_rng() -> Iterator[None]:
    """Restore the host's random states at the end of the context."""
    state = collect_rng_states()
    try:
        yield
    finally:
        set_rng_states(state)


def derive_seed(*numbers: int) -> int:
    """Hash numbers to a seed of 63 bits, so that similar numbers give unrelated seeds."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def epoch_order(sampler: Sampler[Any], seed: int, epoch: int, length: int) -> list[Any]:
    """Return a user's sampler's order of an epoch, the same on all ranks and after a restart."""
    if callable(set_epoch := getattr(sampler, "set_epoch", None)):
        set_epoch(epoch)
    with isolate_rng():
        # Inside the context, because a sampler's generator may be NumPy's or torch's global one.
        _seed_generators(sampler, seed, epoch)
        seed_host_rng(derive_seed(seed, epoch))
        order = list(sampler)
    if len(order) != length:
        msg = (
            f"{type(sampler).__name__} yielded {len(order)} samples, expected its length, "
            f"{length}. Make __len__ return the number of samples of every epoch"
        )
        raise UnsupportedError(msg)
    return order


def digest_of(order: Sequence[Any] | torch.Tensor) -> str:
    """Return a hexadecimal digest of an order; empty if some index cannot be compared.

    Numbers of Python, NumPy and torch give the same digest, and so do lists, tuples, arrays and
    tensors of them.
    """
    if isinstance(order, torch.Tensor):
        return xxhash.xxh3_128_hexdigest(order.contiguous().numpy().tobytes())
    if not all(isinstance(item, (int, np.integer)) for item in order):
        try:
            order = [_plain(item) for item in order]
        except (TypeError, RecursionError):
            return ""
    if all(isinstance(item, (int, np.integer)) for item in order):
        with suppress(OverflowError):
            return xxhash.xxh3_128_hexdigest(np.asarray(order, dtype=np.int64).tobytes())
    return xxhash.xxh3_128_hexdigest(repr(order).encode())


def _plain(item: Any) -> Any:
    """Convert an index to plain data with the same ``repr`` in every process."""
    if item is None or type(item) in (int, float, complex, str, bytes):
        return item
    for number in (int, float):
        if isinstance(item, number):
            return number(item)
    if isinstance(item, (torch.Tensor, np.ndarray, np.generic)):
        return _plain(item.tolist())
    if isinstance(item, (list, tuple)):
        return [_plain(part) for part in item]
    if isinstance(item, dict):
        return "dict", sorted((repr(_plain(key)), repr(_plain(item[key]))) for key in item)
    return fspath(item)


def _seed_generators(sampler: object, seed: int, epoch: int) -> None:
    for path, generator in _generators_in(sampler, "", _DEPTH):
        if path == ".generator":
            number = derive_seed(seed, epoch)  # the attribute of torch's own samplers
        else:
            number = derive_seed(seed, epoch, xxhash.xxh3_64_intdigest(path.encode()))
        if isinstance(generator, torch.Generator):
            generator.manual_seed(number)
        elif isinstance(generator, random.Random):
            generator.seed(number)
        elif isinstance(generator, np.random.RandomState):
            generator.seed(number % (1 << 32))
        else:
            bits: Any = generator.bit_generator
            bits.state = type(bits)(number).state


def torch_generators_in(sampler: object) -> list[torch.Generator]:
    """Return torch's generators in a sampler or batch sampler."""
    generators = (generator for _, generator in _generators_in(sampler, "", _DEPTH))
    return [generator for generator in generators if isinstance(generator, torch.Generator)]


def _generators_in(holder: object, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the generators in an object with their path of attributes and keys."""
    if isinstance(holder, _GENERATORS):
        yield path, holder
    elif depth:
        for name, value in _parts(holder):
            yield from _generators_in(value, f"{path}.{name}", depth - 1)


def _parts(holder: object) -> Iterator[tuple[str, object]]:
    """Yield the parts of a sampler or of a container in one, but not those of data sets."""
    if isinstance(holder, dict):  # other mappings may be data sets that read files
        yield from ((str(key), value) for key, value in holder.items())
    elif isinstance(holder, (list, tuple)):
        # A list of generators is short; a list of indices contains none.
        yield from ((str(i), v) for i, v in enumerate(holder[:64]) if not isinstance(v, int))
    elif isinstance(holder, Sampler):
        yield from vars(holder).items()


class ElasticSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` with the same optimizer steps on every number of ranks.

    An epoch is padded to a multiple of the global batch with its first samples, or truncated to
    one with ``drop_last``.

    Args:
        dataset: The data set, which has a length.
        plan: How a global batch is divided.
        rank: This rank.
        shuffle: Use a new order in each epoch, instead of the data set's order.
        seed: Seed of the order.
        drop_last: Omit an incomplete global batch at the end, instead of padding it.
        sampler: A user's sampler that determines the order instead. It is called with seeded
            generators, so that it yields the same order on all ranks.
        seed_workers: Seed the loader's workers for each micro-batch, so that their random
            numbers only depend on the position in the run.

    Raises:
        UnsupportedError: An epoch would have no optimizer step.
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
                "so an epoch has no step. Pass drop_last=False to the loader or use a smaller "
                "global batch"
            )
            raise UnsupportedError(msg)
        self.total_size = self.steps * plan.global_batch_size
        self.num_samples = self.steps * plan.samples_of(rank)
        self._start: tuple[int, int] | None = None
        self._latest: tuple[int, int, Sequence[Any] | torch.Tensor] | None = None
        self._latest_digest: str | None = None

    def start_at(self, epoch: int, step: int) -> None:
        """Set the epoch, and start its next iteration at an optimizer step, counted from 0.

        Iterations of other epochs start at their beginning.
        """
        self.epoch = epoch
        self._start = (epoch, step)

    def describe(self) -> dict[str, Any]:
        """Return a description; samplers with equal descriptions yield the same epochs."""
        return {
            "order": "sequential" if not self.shuffle else "torch.randperm",
            "sampler": "" if self.sampler is None else type(self.sampler).__name__,
            "seed": self.seed,
            "dataset_length": self.length,
            "last_batch": "dropped" if self.drop_last else "filled up",
        }

    @override
    def __len__(self) -> int:
        """Return this rank's samples in a complete epoch, regardless of ``start_at``."""
        return self.num_samples

    @override
    def __iter__(self) -> Iterator[Any]:
        for batch in self.micro_batches():
            yield from batch

    def micro_batches(self) -> Iterator[list[Any]]:
        """Yield this rank's micro-batches; the first time from the step set by ``start_at``."""
        start, self._start = self._start, None
        epoch = self.epoch
        first = start[1] if start is not None and start[0] == epoch else 0
        if start is not None and start[0] != epoch and start[1] < self.steps and not self.rank:
            log.warning(
                "ElasticSampler starts epoch %d at its first step, because set_epoch(%d) followed "
                "start_at(%d, %d). Loaders that fabric.setup_dataloaders has wrapped call it: "
                "iterate your own DataLoader",
                *(epoch, epoch, *start),
            )
        if first >= self.steps:
            return
        order = self._order(epoch)
        sizes = self.plan.micro_batches_of(self.rank)
        for step in range(first, self.steps):
            samples = iter(self._of_step(order, step))
            for micro_batch, size in enumerate(sizes):
                batch = list(islice(samples, size))
                if self.seed_workers:
                    place = (epoch, step, micro_batch, self.rank)
                    batch[0] = _seeding(batch[0], derive_seed(self.seed, *place))
                yield batch

    def _of_step(self, order: Sequence[Any] | torch.Tensor, step: int) -> list[Any]:
        begin = step * self.plan.global_batch_size
        places = range(begin + self.rank, begin + self.plan.global_batch_size, self.plan.world_size)
        if isinstance(order, torch.Tensor):
            chosen: list[Any] = order[torch.tensor(places) % self.length].tolist()
            return chosen
        return [order[place % self.length] for place in places]

    def order_digest(self, epoch: int) -> str:
        """Return a digest of an epoch's order; empty if it cannot be compared."""
        order = self._order(epoch)
        if self._latest_digest is None:  # cached, because every save records it
            self._latest_digest = digest_of(order)
        return self._latest_digest

    def latest_order(self) -> tuple[int, str] | None:
        """Return the epoch of the latest order and its digest; None if there is no order yet."""
        if self._latest is None:
            return None
        epoch, seed, _ = self._latest
        return (epoch, self.order_digest(epoch)) if seed == self.seed else None

    def _order(self, epoch: int) -> Sequence[Any] | torch.Tensor:
        """Return all samples of an epoch in order, shape ``(dataset length,)``.

        A user's sampler is iterated once per epoch, because it may count its iterations.
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
        """Return the description; the position is saved with the run."""
        return self.describe()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Ignore the state: see ``start_at``."""


class ElasticBatchSampler(BatchSampler):
    """Yields the micro-batches of an uneven plan, whose sizes differ by one sample."""

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
    """The first index of a micro-batch, which seeds the worker process that unpickles it.

    A loader sends pickled lists of indices to its workers. When this object is unpickled, it seeds
    the worker's generators and becomes the sampler's index. So random transforms are reproducible
    after a restart, with any number of workers, persistent or not.
    """

    item: Any
    seed: int

    def __reduce__(self) -> tuple[Callable[[Any, int], Any], tuple[Any, int]]:
        return _seed_on_unpickle, (self.item, self.seed)


class _SeedingIndex(_SeedingName, int):
    """The same for integer indices: it is also an integer in this process."""


def _seeding(item: Any, seed: int) -> _SeedingName:
    made = _SeedingIndex(item) if type(item) is int else _SeedingName()
    made.item, made.seed = item, seed
    return made


def _seed_on_unpickle(item: Any, seed: int) -> Any:
    """Seed the process that unpickles an index; return the index."""
    seed_host_rng(seed)
    return item
