"""How Hypothesis runs here, where the examples are found, and a job on a clock turned by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.core._cluster import WORLD, Cluster

# What the benchmark of the planner prints is what its test holds.
sys.path.append(str(Path(__file__).parents[2] / "examples"))

# No deadline: other work may hold the processor.
settings.register_profile("house", deadline=None)
settings.load_profile("house")


@pytest.fixture
def job() -> Cluster:
    return Cluster(WORLD)
