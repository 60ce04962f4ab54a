"""The streams of random numbers: kept, put back, and derived where there is none to put back.

What is drawn in this process is kept as the generators' states. A rank that was not there when a
checkpoint was saved has none; it starts a stream that depends on the seed, the optimizer step and
the rank, so that the same resume draws the same numbers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def collect_rng_states(device: torch.device | None = None) -> dict[str, Any]:
    """Return the states of Python's, NumPy's, torch's and the device's generators, as plain data.

    Args:
        device: this rank's; its generator is kept too if it has one of its own.
    """
    name, keys, place, has_gauss, gauss = np.random.get_state()  # noqa: NPY002 (the global one)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (
            name,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            place,
            has_gauss,
            gauss,
        ),
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_rng_states(state: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Restore what ``collect_rng_states`` returned; what is missing in it stays as it is."""
    if "python" in state:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in state:
        name, keys, place, has_gauss, gauss = state["numpy"]
        words = keys.numpy().astype(np.uint32)
        np.random.set_state((name, words, place, has_gauss, gauss))  # noqa: NPY002 (see above)
    if "torch" in state:
        torch.set_rng_state(state["torch"].cpu())
    # By the device's type, not its index: a rank may have another one than when it saved.
    if device is not None and device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type].cpu(), device)


def seed_host_rng(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU random numbers."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002 (the global one is what users draw from)
    torch.default_generator.manual_seed(seed)


def seed_rng_streams(seed: int, step: int, rank: int) -> None:
    """Start streams that depend on the run's seed, the optimizer step and the rank alone."""
    number = derive_seed(seed, step, rank)
    seed_host_rng(number)
    torch.manual_seed(number)  # devices too


@contextmanager
def isolate_rng() -> Iterator[None]:
    """Leave the host's streams as they were, whatever is drawn inside."""
    state = collect_rng_states()
    try:
        yield
    finally:
        set_rng_states(state)


def derive_seed(*numbers: int) -> int:
    """Mix numbers into a seed of 63 bits: near numbers give seeds that have nothing in common."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
