"""Fixtures that tests of several folders use: ranks, checkpoints of real engines, object stores."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any, TypeAlias, TypeVar

import pytest
import torch

from tests.support.checkpoints import Saved, train_and_save
from tests.support.devices import DEVICE, SHARED, DeviceRanks, skip_without_devices
from tests.support.engines import EngineCase
from tests.support.fault_proxy import FaultProxy
from tests.support.fork_server import CPUS, Placement
from tests.support.late_saves import train_and_save_late
from tests.support.processes import remove_shared_memory
from tests.support.ranks import ForkServer, Pools
from tests.support.store_servers import (
    azurite_command,
    azurite_server,
    make_bucket,
    moto_server,
    s3_environment,
)

T = TypeVar("T")
OnDevice: TypeAlias = Callable[[int, Callable[[], T]], list[T]]


SERVER = pytest.StashKey[ForkServer]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the process that ranks are forked from: it imports while tests without ranks run."""
    # Shells start background commands with SIGINT ignored, and child processes inherit this. Some
    # tests send SIGINT to their own processes.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    server = ForkServer(shared=Path(gettempdir(), f"ez-ranks-{run}") if run else None)
    session.config.stash[SERVER] = server
    used = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if used & {"fork_server", "pools"} and not session.config.option.collectonly:
        server.begin()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the session with it."""
    if server := session.config.stash.get(SERVER, None):
        server.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the random generators, so that tests do not depend on their order; skip GPU tests."""
    seed = int(item.config.getoption("--hypothesis-seed") or 0)
    torch.manual_seed(seed)
    random.seed(seed)
    if item.config.stash[DEVICE] == "cpu" and item.get_closest_marker("gpu"):
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """Return the seed of random choices."""
    return int(pytestconfig.getoption("--hypothesis-seed") or 0)


@pytest.fixture(scope="session")
def fork_server(pytestconfig: pytest.Config) -> ForkServer:
    """Return the process that all ranks are forked from, also those of pytest-xdist's workers."""
    return pytestconfig.stash[SERVER]


@pytest.fixture(scope="session")
def pools(device: str, request: pytest.FixtureRequest) -> Iterator[Pools]:
    """Yield worlds of CPU ranks for plain engines.

    On a machine with a GPU, the imports started a thread, after which no rank can be forked.
    """
    new = DeviceRanks(CPUS) if device == "cuda" else None
    started = Pools(new or request.getfixturevalue("fork_server"))
    yield started
    started.close()
    if new:
        new.close()


@pytest.fixture
def own_pools(fork_server: ForkServer) -> Iterator[Pools]:
    """Yield worlds of ranks for one test: they have no connection to a store yet."""
    pools = Pools(fork_server)
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def worlds(fork_server: ForkServer) -> Iterator[Pools]:
    """Yield worlds of ranks for Trainers."""
    started = Pools(fork_server)
    yield started
    started.close()


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Return the device of ``--device``: ``"cpu"`` or ``"cuda"``."""
    return pytestconfig.stash[DEVICE]


@pytest.fixture(scope="session")
def device_pools(device: str, request: pytest.FixtureRequest) -> Iterator[Pools]:
    """Yield worlds of ranks on that device; without the option, ``pools`` on CPUs."""
    if device == "cpu" and not request.config.getoption("--device"):
        yield request.getfixturevalue("pools")
        return
    ranks = DeviceRanks(Placement(device, shared=request.config.stash[SHARED]))
    started = Pools(ranks)
    yield started
    started.close()
    ranks.close()


@pytest.fixture
def on_device(device: str, device_pools: Pools, pytestconfig: pytest.Config) -> OnDevice[T]:
    """Return a function that runs a call on all ranks of a world, and skips without devices."""
    placement = Placement(device, shared=pytestconfig.stash[SHARED])

    def run(world: int, call: Callable[[], T]) -> list[T]:
        skip_without_devices(placement, world)
        return device_pools.run(world, call)

    return run


@pytest.fixture(scope="session")
def saved_by(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    """Return a function that saves a run once per session.

    With ``late``, it saves through the adversarial copy engine.
    """
    folder: Path = tmp_path_factory.mktemp("saved")
    made: dict[str, Saved] = {}

    def get(setup: EngineCase, *, steps: int = 3, late: bool = False, **options: Any) -> Saved:
        name = f"{setup!r}-{steps}-{late}-{sorted(options.items())}"
        if name not in made:
            saved = Saved(setup, str(folder / f"{len(made)}.ckpt"), options)
            run = partial(train_and_save, saved, steps=steps)
            pools.run(setup.world, partial(train_and_save_late, saved) if late else run)
            made[name] = saved
        return made[name]

    return get


@pytest.fixture(scope="session")
def moto_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Yield the port of an S3 server for this session; skip without its packages."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    with moto_server(tmp_path_factory.mktemp("moto") / "log") as port:
        yield port


@pytest.fixture(scope="session")
def azurite_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Yield the port of an Azure blob server for this session; skip without it."""
    pytest.importorskip("obstore")
    program = azurite_command()
    if program is None:
        pytest.skip("azurite is not installed: npm install --prefix .cache/azurite azurite@3.37")
    with azurite_server(program, tmp_path_factory.mktemp("azurite") / "log") as port:
        yield port


@pytest.fixture
def proxy(moto_port: int) -> Iterator[FaultProxy]:
    """Yield a proxy in front of the S3 server."""
    with FaultProxy(moto_port) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def s3(moto_port: int) -> tuple[str, Mapping[str, str]]:
    """Return the URL of a bucket and the environment of its clients."""
    make_bucket(moto_port, "engines")
    return "s3://engines", s3_environment(f"http://127.0.0.1:{moto_port}")


@pytest.fixture(scope="module", autouse=True)
def tidy_up() -> Iterator[None]:
    """After each file, end idle ranks and remove the memory of killed ones, which would fill it."""
    yield
    for pools in Pools.all:
        pools.end_unused()
    remove_shared_memory()
