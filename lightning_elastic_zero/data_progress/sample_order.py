"""The order that a user's own sampler puts an epoch in: asked for reproducibly, and fingerprinted.

A sampler may draw from generators of its own, or count its epochs by itself. Then a new process, or
another rank, would be given another order without a word. So generators that can be seeded are,
from the run's seed and the epoch; and a digest of the order shows where that was not enough.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Sampler

from lightning_elastic_zero.data_progress.rng import derive_seed, isolate_rng, seed_host_rng
from lightning_elastic_zero.errors import UnsupportedError

_DEPTH = 4
"""How far into samplers that wrap samplers, and into containers, generators are looked for."""


def epoch_order(sampler: Sampler[Any], seed: int, epoch: int, length: int) -> list[Any]:
    """Return a sampler's order of an epoch: the same on all ranks and after a restart.

    Args:
        sampler: the user's; its ``set_epoch`` is called if it has one.
        seed: of the run's data order.
        epoch: index of the epoch.
        length: the number of samples that the sampler has said it gives.

    Raises:
        UnsupportedError: it gives another number of samples.
    """
    if callable(set_epoch := getattr(sampler, "set_epoch", None)):
        set_epoch(epoch)
    with isolate_rng():
        # In here: a generator that a sampler holds may be NumPy's or torch's global one.
        _seed_generators(sampler, seed, epoch)
        seed_host_rng(derive_seed(seed, epoch))
        order = list(sampler)
    if len(order) != length:
        msg = (
            f"{type(sampler).__name__} gave {len(order)} samples, and its length is "
            f"{length}: the steps of an epoch cannot be counted"
        )
        raise UnsupportedError(msg)
    return order


def digest_of(order: Sequence[Any] | torch.Tensor) -> str:
    """Return a digest of an order, in hexadecimal; empty if samples are not named by plain data."""
    if isinstance(order, torch.Tensor):
        return xxhash.xxh3_128_hexdigest(order.contiguous().numpy().tobytes())
    if all(type(item) is int for item in order):
        try:
            return xxhash.xxh3_128_hexdigest(np.asarray(order, dtype=np.int64).tobytes())
        except OverflowError:
            pass
    return xxhash.xxh3_128_hexdigest(repr(order).encode()) if _is_plain(order) else ""


def _is_plain(item: object) -> bool:
    """Whether a value's ``repr`` is the same in every process."""
    if isinstance(item, (list, tuple)):
        return all(_is_plain(part) for part in item)
    return isinstance(item, (str, bytes, bool, int, float, type(None)))


def _seed_generators(sampler: object, seed: int, epoch: int) -> None:
    """Seed every generator that a sampler holds, each in its own way."""
    for path, generator in _generators_in(sampler, "", _DEPTH):
        if path == ".generator":
            number = derive_seed(seed, epoch)  # as torch's own samplers have it
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


_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _generators_in(holder: object, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the generators in an object, by the path of attributes and keys that leads to each."""
    if isinstance(holder, _GENERATORS):
        yield path, holder
    elif depth:
        for name, value in _parts(holder):
            yield from _generators_in(value, f"{path}.{name}", depth - 1)


def _parts(holder: object) -> Iterator[tuple[str, object]]:
    """Yield what a sampler, or a container in one, is made of; data sets are left alone."""
    if isinstance(holder, dict):  # another mapping may be a data set, read with every look
        yield from ((str(key), value) for key, value in holder.items())
    elif isinstance(holder, (list, tuple)):
        # A list of generators is short; a list of indices holds none.
        yield from ((str(i), v) for i, v in enumerate(holder[:64]) if not isinstance(v, int))
    elif isinstance(holder, Sampler):
        yield from vars(holder).items()
