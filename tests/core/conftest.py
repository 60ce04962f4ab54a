"""How Hypothesis runs here, and where the examples are found."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

# What the benchmark of the planner prints is what its test holds.
sys.path.append(str(Path(__file__).parents[2] / "examples"))

# No deadline: other work may hold the processor.
settings.register_profile("house", deadline=None)
settings.load_profile("house")
