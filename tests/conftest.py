"""Worlds of ranks, shared by all tests that need real engines: made once per session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine._pool import Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Give the worlds of ranks."""
    started = Pools()
    yield started
    started.close()
