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
    """Return a digest of an order, in hexadecimal; empty if a sample's name has no content.

    Python's, NumPy's and torch's numbers give the same digest, and so do lists, tuples, arrays and
    tensors of them. Objects are described by what a pickle of them holds.
    """
    if isinstance(order, torch.Tensor):
        return xxhash.xxh3_128_hexdigest(order.contiguous().numpy().tobytes())
    if not all(isinstance(item, (int, np.integer)) for item in order):
        try:
            order = [_plain(item) for item in order]
        except (_NoContentError, RecursionError):
            return ""
    if all(isinstance(item, (int, np.integer)) for item in order):
        try:
            return xxhash.xxh3_128_hexdigest(np.asarray(order, dtype=np.int64).tobytes())
        except OverflowError:
            pass
    return xxhash.xxh3_128_hexdigest(repr(order).encode())


class _NoContentError(Exception):
    """A sample is named by an object that is the same in no other process."""


def _plain(item: Any) -> Any:  # noqa: ANN401 - the name of a sample, of any kind
    """Describe the name of a sample so that its ``repr`` is the same in every process."""
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
        return "dict", sorted((repr(_plain(key)), _plain_repr(item[key])) for key in item)
    if isinstance(item, (set, frozenset)):
        return "set", sorted(map(_plain_repr, item))
    return _pickled_parts(item)


def _plain_repr(item: object) -> str:
    return repr(_plain(item))


def _pickled_parts(item: object) -> object:
    """Describe an object by its class, and by what it is made of when it is unpickled."""
    if isinstance(item, type) or hasattr(item, "__qualname__"):
        return f"{item.__module__}.{item.__qualname__}"
    try:
        reduced = item.__reduce_ex__(4)
    except Exception as error:  # users' objects may raise anything
        raise _NoContentError from error
    if isinstance(reduced, str):
        return reduced
    make, args, *state = reduced
    parts = [list(part) if isinstance(part, Iterator) else part for part in state]
    if list(args) == [type(item)] and not any(part for part in parts):
        raise _NoContentError
    return [_plain(make), _plain(args), _plain(parts)]


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


def torch_generators_in(sampler: object) -> list[torch.Generator]:
    """Return torch's generators that a sampler, or a batch sampler, draws from."""
    found = (generator for _, generator in _generators_in(sampler, "", _DEPTH))
    return [generator for generator in found if isinstance(generator, torch.Generator)]


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
