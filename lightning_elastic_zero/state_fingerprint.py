"""A number for a state that does not depend on how it is cut: each rank adds up its own part.

An element counts by its bits and its place in the flattened tensor, wherever it lies. With ``u[k]``
the k-th word of a tensor (an element of 1, 2 or 4 bytes is one word, one of 8 or 16 bytes is two or
four of 4 bytes, in little-endian order; each word is a signed number), a tensor's sum is

    S = sum over k of u[k] * W[k mod 65536] * G[k div 65536]        modulo 2**64

and that of a part of the state (weights; optimizer)

    F = sum over tensors of K * S + N, plus the sum of N' over scalar states        modulo 2**64

twice, with two sets of ``W``, ``G`` and ``K``: 128 bits. ``W`` and ``G`` are odd numbers that
splitmix64 (Steele, Lea and Flood 2014) makes of a counter; ``K`` (odd) and ``N`` are the xxh3_128
of the tensor's name, state key, type and shape, ``N'`` that of a scalar's name, key and value.

Sums modulo 2**64 are associative and commutative, so that disjoint runs, on any ranks, add up to
the same number in any order. The inner sum is the multilinear hash (Carter and Wegman 1979; Lemire
and Kaser 2014, "Strongly universal string hashing is fast"), all 64 bits of which are kept: two
tensors that differ have the same sum only if ``sum d[k] * m[k] = 0 mod 2**64`` for the differences
``d``. As ``abs(d[k]) < 2**32`` and multipliers are odd, one changed element always shows. Several
cancel with a chance of 2**-27 at most, where each changes only the highest bit (the signs of fp32),
and of 2**-58 where the lowest bits change too, in one of the two sums, and with the square of it in
both. It is made for accidents: damage, elements that changed places, runs of zeros. It is no
cryptographic digest: who wants to can make two states with one fingerprint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np
import torch
import xxhash

from lightning_elastic_zero.tensor_state import Scalar, dtype_name

STEP = "step"
"""The scalar state that some optimizers keep in their groups."""

NO_OPTIMIZER = "none"
"""What is written in the place of the number of an optimizer that has no state."""

_NUMBER = re.compile("[0-9a-f]{32}")
_NUMBER_OR_NONE = re.compile(f"[0-9a-f]{{32}}|{NO_OPTIMIZER}")

BLOCK = 1 << 16
"""Words for which there is a multiplier each."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_STREAMS = (0x01, 0x02)
"""Where the counters of the two sums begin, in units of 2**56."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}

_DEVICE_BLOCKS = 64
"""Blocks that are multiplied at once on a device: 32 MiB of products."""


@dataclass(frozen=True, slots=True)
class FingerprintPart:
    """What some runs of a state add up to; parts of disjoint runs are added."""

    weights_0: int = 0
    weights_1: int = 0
    optimizer_0: int = 0
    optimizer_1: int = 0

    def __add__(self, other: FingerprintPart) -> FingerprintPart:
        """Return the part of both."""
        pairs = zip(self.to_plain(), other.to_plain(), strict=True)
        return FingerprintPart(*((mine + its) & _MASK for mine, its in pairs))

    def to_plain(self) -> list[int]:
        """Return it as ranks hand it around."""
        return [getattr(self, field.name) for field in fields(self)]

    def total(self) -> Fingerprint:
        """Return the fingerprint of a whole state, whose parts are all added."""
        w0, w1, o0, o1 = self.to_plain()
        return Fingerprint(f"{w0:016x}{w1:016x}", f"{o0:016x}{o1:016x}" if o0 or o1 else "")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A state's number, for weights (and buffers) and the optimizer's state apart."""

    weights: str
    """Masters, frozen weights and buffers: 32 hexadecimal digits."""
    optimizer: str
    """Element-wise and scalar optimizer states; empty where there are none."""

    def __str__(self) -> str:
        return f"{self.weights}-{self.optimizer or NO_OPTIMIZER}"

    @classmethod
    def from_text(cls, text: str) -> Fingerprint:
        """Return the one that a text names, as ``str`` wrote it.

        Raises:
            ValueError: it names none.
        """
        weights, _, optimizer = text.partition("-")
        if not _NUMBER.fullmatch(weights) or not _NUMBER_OR_NONE.fullmatch(optimizer):
            msg = f"{text!r} is no fingerprint: two numbers of 32 hexadecimal digits"
            raise ValueError(msg)
        return cls(weights, optimizer if optimizer != NO_OPTIMIZER else "")


@dataclass(frozen=True, slots=True)
class TensorId:
    """What of a tensor counts beside its elements."""

    part: Literal["weights", "optimizer"]
    name: str
    key: str
    """The optimizer state's; empty for weights."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    def _digest(self, purpose: str) -> tuple[int, int]:
        shape = "x".join(map(str, self.shape))
        return _digest(purpose, self.part, self.name, self.key, dtype_name(self.dtype), shape)

    def multipliers(self) -> tuple[int, int]:
        """Return what its sums are multiplied with."""
        first, second = self._digest("tensor")
        return first | 1, second | 1

    def presence(self) -> FingerprintPart:
        """Return what its being there adds, once: whoever holds its first element adds it."""
        return _part(self.part, *self._digest("there"))


def run_part(tensor: TensorId, start: int, values: torch.Tensor) -> FingerprintPart:
    """Return what a run of a tensor's elements adds.

    Args:
        tensor: whose they are.
        start: the first one, counted in the flattened tensor; 0 adds that the tensor is there.
        values: 1-D and contiguous, in the tensor's type, on any device.
    """
    if values.dtype != tensor.dtype or values.dim() != 1:
        msg = f"elements of {tensor.name} are {tensor.dtype}, 1-D, not {values.dtype}"
        raise ValueError(msg)
    itemsize = values.dtype.itemsize
    words = values.detach().contiguous().view(_WORDS[itemsize])
    first = start * (words.numel() // max(values.numel(), 1))
    sums = word_sums(words, first) if words.device.type == "cpu" else device_sums(words, first)
    own = (k * s for k, s in zip(tensor.multipliers(), sums, strict=True))
    part = _part(tensor.part, *own)
    return part if start else part + tensor.presence()


def scalars_part(name: str, scalars: Iterable[tuple[str, Scalar]]) -> FingerprintPart:
    """Return what the scalar states of a parameter add, by their values: 3 is 3.0."""
    part = FingerprintPart()
    for key, value in scalars:
        part += _part("optimizer", *_digest("scalar", name, key, _number(value)))
    return part


def _number(value: Scalar) -> str:
    found = value.item() if isinstance(value, torch.Tensor) else value
    if isinstance(found, int) or (isinstance(found, float) and found.is_integer()):
        return str(int(found))
    return repr(found)


def _part(which: str, first: int, second: int) -> FingerprintPart:
    first, second = first & _MASK, second & _MASK
    if which == "weights":
        return FingerprintPart(first, second)
    return FingerprintPart(0, 0, first, second)


def _digest(*texts: str) -> tuple[int, int]:
    both = xxhash.xxh3_128_intdigest("\0".join(texts).encode())
    return both >> 64, both & _MASK


# -- multipliers -----------------------------------------------------------------------------------


_U64: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]"
_I64: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int64]]"


def _splitmix64(counter: _U64) -> _U64:
    """Return the numbers of splitmix64 at some counts."""
    with np.errstate(over="ignore"):
        z: _U64 = counter * np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return z


def _numbers(stream: int, start: int, stop: int) -> _I64:
    """Return odd numbers of a stream."""
    counter = np.arange(start, stop, dtype=np.uint64) + np.uint64((stream << 56) + 1)
    odd: _I64 = (_splitmix64(counter) | np.uint64(1)).view(np.int64)
    return odd


@lru_cache(maxsize=1)
def _within_block() -> _I64:
    """Return ``W`` of both sums."""
    return np.stack([_numbers(stream, 0, BLOCK) for stream in _STREAMS])


def _of_blocks(first: int, stop: int) -> _I64:
    """Return ``G`` of some blocks, of both sums."""
    return np.stack([_numbers(stream | 0x10, first, stop) for stream in _STREAMS])


@lru_cache(maxsize=8)
def _within_block_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_within_block()).to(device)


# -- sums ------------------------------------------------------------------------------------------


def _blocks(first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield the blocks of a run of words: the block, its first word in the run, and the last."""
    at = 0
    while at < count:
        block, inside = divmod(first + at, BLOCK)
        stop = min(at + BLOCK - inside, count)
        yield block, at, stop
        at = stop


def word_sums(words: torch.Tensor, first: int) -> tuple[int, int]:
    """Return both sums of a run of words on the host.

    Args:
        words: 1-D, of a signed integer type.
        first: the place of the first one in its tensor.
    """
    # Of what numpy and torch have this is the fastest: einsum keeps up with the cache, and a third
    # of the time is the widening. Smaller pieces cost calls, and dot, matmul and mul with sum are
    # slower for int64.
    found = words.numpy()
    table = _within_block()
    wide = np.empty(min(BLOCK, len(found)), dtype=np.int64)
    totals = [0, 0]
    steps = _of_blocks(first // BLOCK, (first + len(found)) // BLOCK + 1)
    for number, (block, start, stop) in enumerate(_blocks(first, len(found))):
        inside = first + start - block * BLOCK
        part = wide[: stop - start]
        np.copyto(part, found[start:stop])
        for lane, total in enumerate(totals):
            product = np.einsum("i,i->", part, table[lane, inside : inside + stop - start])
            totals[lane] = total + int(product) * int(steps[lane, number])
    return totals[0] & _MASK, totals[1] & _MASK


def device_sums(words: torch.Tensor, first: int) -> tuple[int, int]:
    """Return both sums of a run of words on a device: whole blocks many at a time.

    Args:
        words: as for ``word_sums``.
        first: likewise.
    """
    head = min(-first % BLOCK, words.numel())
    whole = (words.numel() - head) // BLOCK
    pieces = [(0, head), (head + whole * BLOCK, words.numel())]
    totals = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start, stop in pieces:
        if start < stop:
            block, inside = divmod(first + start, BLOCK)
            totals += _block_sums(words[start:stop].view(1, -1), block, inside)
    for start in range(0, whole, _DEVICE_BLOCKS):
        count = min(_DEVICE_BLOCKS, whole - start)
        at = head + start * BLOCK
        some = words[at : at + count * BLOCK].view(count, BLOCK)
        totals += _block_sums(some, (first + at) // BLOCK, 0)
    one, other = totals.tolist()
    return one & _MASK, other & _MASK


def _block_sums(words: torch.Tensor, block: int, inside: int) -> torch.Tensor:
    """Return both sums of rows of words, each of a block; ``inside`` is where the rows begin."""
    table = _within_block_on(words.device)[:, inside : inside + words.shape[1]]
    steps = torch.from_numpy(_of_blocks(block, block + words.shape[0])).to(words.device)
    wide = words.to(torch.int64)
    return torch.stack([((wide * table[i]).sum(1) * steps[i]).sum() for i in range(len(table))])


def add_up(parts: Iterable[Sequence[int]]) -> FingerprintPart:
    """Return the part of all parts that ranks handed around."""
    whole = FingerprintPart()
    for part in parts:
        whole += FingerprintPart(*part)
    return whole
