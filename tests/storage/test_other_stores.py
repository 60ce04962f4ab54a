"""Saves, overwrites, loads and deletions in azurite and in memory, bit for bit."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
from torch import distributed

from lightning_elastic_zero.storage.object_store import ObjectStore
from tests.storage._store_ranks import NEW, OLD, Settings, delete, load_state, save_state
from tests.support.engines import EngineCase
from tests.support.launch import output_of_forked
from tests.support.ranks import ForkServer, Pools
from tests.support.store_servers import azure_environment, make_container

pytest.importorskip("obstore")
pytestmark = pytest.mark.engine


def _delete_on_first(settings: Settings, url: str) -> list[str]:
    return [] if distributed.get_rank() else delete(settings, url)


def save_overwrite_load(
    server: ForkServer, world: int, url: str, environment: Mapping[str, str]
) -> None:
    """Save one state, overwrite it with another, and load into other engines."""
    settings, pools = Settings(environment, EngineCase(world, "3")), Pools(server)
    try:
        for state in (OLD, NEW):
            outcomes = pools.run(world, partial(save_state, settings, url, state))
            assert not any(outcome.error for outcome in outcomes), outcomes
        outcome = pools.run(world, partial(load_state, settings, url))[0]
        assert (outcome.error, outcome.held) == ("", f"state {NEW}")
        assert not any(pools.run(world, partial(_delete_on_first, settings, url)))
    finally:
        pools.close()


def _request_at_exit() -> None:
    atexit.register(lambda: print(bytes(store.get("key")[0])))
    store = ObjectStore("memory://box")
    store.put("key", b"data")


def test_an_exit_hook_makes_requests(fork_server: ForkServer, tmp_path: Path) -> None:
    """One waits for a save in flight. It may be registered before the first request."""
    assert "b'data'" in output_of_forked(fork_server, tmp_path, _request_at_exit)


@pytest.mark.long
def test_azure(azurite_port: int, fork_server: ForkServer) -> None:
    """Two ranks, with Azure's protocol."""
    make_container(azurite_port, "box")
    environment = azure_environment(f"http://127.0.0.1:{azurite_port}")
    save_overwrite_load(fork_server, 2, "az://box/run/state.ckpt", environment)


def test_memory(fork_server: ForkServer) -> None:
    """One rank, since the objects are in its memory."""
    save_overwrite_load(fork_server, 1, "memory://box/run/state.ckpt", {})
