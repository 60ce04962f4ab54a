"""Worlds of ranks, shared by all tests that need real engines: made once per session."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.engine._worker_pool import Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Give the worlds of ranks."""
    started = Pools()
    yield started
    started.close()


@pytest.fixture(scope="session", autouse=True)
def interrupts_are_heard() -> None:
    """Let SIGINT interrupt: what runs in the background of a shell, as CI may, ignores it.

    So would all processes that tests start, where they send it to themselves.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
