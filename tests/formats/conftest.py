from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import ForkServer, Pools


@pytest.fixture(scope="session")
def pr_8031(pytestconfig: pytest.Config) -> Iterator[Pools]:
    """Yield worlds of ranks that run the code of DeepSpeed pull request 8031."""
    folder = pytestconfig.getoption("--pr-8031")
    if folder is None:
        pytest.skip("needs --pr-8031, the code of DeepSpeed pull request 8031")
    started = Pools(server := ForkServer(Path(folder).resolve()))
    yield started
    started.close()
    server.close()
