"""Settings of Hypothesis, and the import path of the examples."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

# Tests of the planner import its benchmark.
sys.path.append(str(Path(__file__).parents[2] / "examples"))

# No deadline: other processes may use the CPU.
settings.register_profile("house", deadline=None)
settings.load_profile("house")
