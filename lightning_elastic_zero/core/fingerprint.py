"""A checksum of a state that does not depend on the sharding: parts of it are added.

An element counts by its bits and its position in the flattened tensor. Think of all tensors as one
message of 2**64 bytes, otherwise zero: the digest of a tensor's name, state key, dtype and shape
determines how many bytes follow its last one. The number of a part of the state (weights;
optimizer) is

    F = CRC(message) + sum over tensors of N + sum over scalar states of N'         in GF(2)**64

CRC is CRC-64/NVME (the 64b CRC of NVM Express's NVM Command Set Specification; polynomial
0xAD93D23594C93659) without its initial value and its final inversion, so that it is linear: a run
of bytes ``r`` with ``n`` bytes behind it adds ``r * x**(8 * n)``, on any rank, in any order, and
zeros add nothing. Sums are XOR. ``N`` is the xxh3_128 of the tensor's name, key, type and shape,
folded to 64 bits, ``N'`` that of a scalar's name, key and value.

Two states with the same tensors have the same number only if the CRC of their difference is zero.
It never is zero if all differing bits are within 64 bits, or if one or two bits of a tensor differ
(``x`` has the order 2**64 - 1 modulo the polynomial); of other differences one in 2**64 is missed.
It detects accidents: damage, exchanged elements, runs of zeros. It is not a cryptographic digest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import xxhash
from awscrt.checksums import combine_crc64nvme, crc64nvme

from lightning_elastic_zero.core.tensors import Scalar, dtype_name, in_order

STEP = "step"
"""The scalar state that some optimizers keep in their groups."""

NO_OPTIMIZER = "none"
"""The text of the second number without optimizer state."""

_ONES = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class FingerprintPart:
    """The sum over some runs of a state; parts of disjoint runs are added."""

    weights: int = 0
    optimizer: int = 0

    def __add__(self, other: FingerprintPart) -> FingerprintPart:
        return FingerprintPart(self.weights ^ other.weights, self.optimizer ^ other.optimizer)

    def total(self) -> Fingerprint:
        """Return the fingerprint of a whole state from the sum of all parts."""
        return Fingerprint(
            f"{self.weights:016x}", f"{self.optimizer:016x}" if self.optimizer else ""
        )


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Checksums of a state that do not depend on the sharding.

    Equal states have equal fingerprints at every device count, stage and format. Names, shapes and
    dtypes count; hyperparameters, random state and counters do not. A fingerprint detects
    accidents, not attacks; the docstring of the module has the formula and the error rates.
    """

    weights: str
    """Checksum of masters, frozen weights and buffers: 16 hexadecimal digits."""
    optimizer: str
    """Checksum of the optimizer state, including step counters; empty if there is none."""

    def __str__(self) -> str:
        return f"{self.weights}-{self.optimizer or NO_OPTIMIZER}"


@dataclass(frozen=True, slots=True)
class TensorId:
    """The properties of a tensor that count in addition to its elements."""

    part: Literal["weights", "optimizer"]
    name: str
    key: str
    """Name of the optimizer state; empty for weights."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    def _digest(self, purpose: str) -> int:
        shape = "x".join(map(str, self.shape))
        return _digest(purpose, self.part, self.name, self.key, dtype_name(self.dtype), shape)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def bytes_behind(self) -> int:
        """Return the number of bytes of the message after its last one."""
        return self._digest("tensor") >> 1

    def presence(self) -> FingerprintPart:
        """Return the part of its existence, added once with its first element."""
        return _part(self.part, self._digest("there"))


def run_part(tensor: TensorId, start: int, values: torch.Tensor) -> FingerprintPart:
    """Return the part of consecutive elements of a tensor from ``start`` on; 0 adds its existence.

    ``values`` are 1-D on the host in the tensor's type. This releases the GIL and takes 0.03 ms per
    megabyte.
    """
    if values.dtype != tensor.dtype or values.dim() != 1:
        msg = f"elements of {tensor.name}: expected 1-D {tensor.dtype}, found {values.dtype}"
        raise ValueError(msg)
    data = in_order(values).view(torch.uint8).numpy().data
    behind = tensor.size_bytes - start * values.dtype.itemsize - data.nbytes
    if behind < 0:
        msg = f"{tensor.name} of shape {tensor.shape} has no {len(values)} elements from {start} on"
        raise ValueError(msg)
    # The function inverts the initial value and the result.
    remainder = ~crc64nvme(data, _ONES) & _ONES
    own = combine_crc64nvme(remainder, 0, behind + tensor.bytes_behind())
    part = _part(tensor.part, own)
    return part if start else part + tensor.presence()


def scalars_part(name: str, scalars: Iterable[tuple[str, Scalar]]) -> FingerprintPart:
    """Return the part of the scalar states of a parameter, by value: 3 equals 3.0."""
    part = FingerprintPart()
    for key, value in scalars:
        part += _part("optimizer", _digest("scalar", name, key, _number(value)))
    return part


def _number(value: Scalar) -> str:
    found = value.item() if isinstance(value, torch.Tensor) else value
    if isinstance(found, int) or (isinstance(found, float) and found.is_integer()):
        return str(int(found))
    return repr(found)


def _part(which: str, number: int) -> FingerprintPart:
    return FingerprintPart(number) if which == "weights" else FingerprintPart(0, number)


def _digest(*texts: str) -> int:
    both: int = xxhash.xxh3_128_intdigest("\0".join(texts).encode())
    return (both >> 64) ^ (both & _ONES)
