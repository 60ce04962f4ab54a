"""The ranks on the device that ``--device`` names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar

import pytest

from tests.support.devices import DEVICE, DeviceRanks, skip_without_devices
from tests.support.ranks import Pools

T = TypeVar("T")
OnDevice: TypeAlias = Callable[[int, Callable[[], T]], list[T]]


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Return ``"cpu"`` or ``"cuda"``."""
    return pytestconfig.stash[DEVICE]


@pytest.fixture(scope="session")
def pools(device: str, request: pytest.FixtureRequest) -> Iterator[Pools]:
    """Yield worlds of CPU ranks.

    On a machine with a GPU, the imports started a thread, after which no rank can be forked.
    """
    new = DeviceRanks("cpu") if device == "cuda" else None
    started = Pools(new or request.getfixturevalue("fork_server"))
    yield started
    started.close()
    if new:
        new.close()


@pytest.fixture(scope="session")
def device_pools(device: str, request: pytest.FixtureRequest) -> Iterator[Pools]:
    """Yield the worlds of ranks on that device; without the option, ``pools`` on CPUs."""
    if device == "cpu" and not request.config.getoption("--device"):
        yield request.getfixturevalue("pools")
        return
    ranks = DeviceRanks(device)
    started = Pools(ranks)
    yield started
    started.close()
    ranks.close()


@pytest.fixture
def on_device(device: str, device_pools: Pools) -> OnDevice[T]:
    """Return a function that runs a call on all ranks of a world, and skips without devices."""

    def run(world: int, call: Callable[[], T]) -> list[T]:
        skip_without_devices(device, world)
        return device_pools.run(world, call)

    return run
