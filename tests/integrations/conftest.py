"""Ranks with transformers and accelerate imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import ForkServer, Pools


@pytest.fixture(scope="session")
def hf_ranks(fork_server: ForkServer) -> Iterator[Pools]:
    """Yield worlds of ranks in which Hugging Face's loops run, one after another."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    fork_server.import_modules("tests.integrations._hf_programs")
    started = Pools(fork_server)
    yield started
    started.close()
