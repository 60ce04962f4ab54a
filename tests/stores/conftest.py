"""Servers and proxies for tests of object stores; tests are skipped without their packages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from tests.stores._fault_proxy import FaultProxy
from tests.stores._servers import (
    azurite_command,
    azurite_server,
    make_bucket,
    moto_server,
    s3_environment,
)
from tests.support.ranks import ForkServer, Pools


@pytest.fixture(scope="session")
def moto_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Yield the port of an S3 server for this session."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    with moto_server(tmp_path_factory.mktemp("moto") / "log") as port:
        yield port


@pytest.fixture(scope="session")
def azurite_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Yield the port of an Azure blob server for this session."""
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


@pytest.fixture
def own_pools(fork_server: ForkServer) -> Iterator[Pools]:
    """Yield ranks that have no connection to a store yet."""
    pools = Pools(fork_server)
    yield pools
    pools.close()
