"""Worlds of ranks in which Trainers run, one after another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine._worker_pool import Pools


@pytest.fixture(scope="session")
def worlds() -> Iterator[Pools]:
    """Give the worlds of ranks."""
    started = Pools()
    yield started
    started.close()
