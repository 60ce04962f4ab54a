"""The cells of the release matrix, and the reasons for their selection."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Base:
    """An interpreter with a torch release. Slow to install, so cells share it."""

    python: str
    """Major and minor version."""
    torch: str

    def __str__(self) -> str:
        return f"py{self.python}-torch{self.torch}"


@dataclass(frozen=True, order=True)
class Cell:
    """Releases that are installed in one environment."""

    base: Base
    deepspeed: str
    lightning: str
    promised: bool = True
    """Whether this library's dependency ranges include the releases."""

    def __str__(self) -> str:
        return f"{self.base}-deepspeed{self.deepspeed}-lightning{self.lightning}"


OLDEST_TORCH = Base("3.10", "2.6.0")
MIDDLE_TORCH = Base("3.12", "2.9.1")
PINNED_TORCH = Base("3.11", "2.13.0")
NEWER_TORCH = Base("3.11", "2.14.1")
NEWEST_TORCH = Base("3.13", "2.15.0")

OLDEST = Cell(OLDEST_TORCH, "0.16.0", "2.5.0.post0")
PINNED = Cell(PINNED_TORCH, "0.19.8", "2.6.6")
NEWER = Cell(NEWER_TORCH, "0.19.8", "2.6.6")
NEWEST = Cell(NEWEST_TORCH, "0.19.8", "2.6.6")

CELLS = (
    NEWEST,
    NEWER,
    OLDEST,
    Cell(OLDEST_TORCH, "0.16.9", "2.6.6"),
    Cell(OLDEST_TORCH, "0.19.8", "2.5.6"),
    Cell(MIDDLE_TORCH, "0.17.5", "2.6.0"),
    Cell(MIDDLE_TORCH, "0.18.4", "2.5.0.post0"),
    Cell(Base("3.13", "2.9.1"), "0.19.0", "2.6.0"),
    Cell(PINNED_TORCH, "0.16.0", "2.6.6"),
    Cell(PINNED_TORCH, "0.17.0", "2.5.6"),
    Cell(PINNED_TORCH, "0.18.9", "2.6.6"),
    PINNED,
)
"""The first and last releases of DeepSpeed 0.16 to 0.19 and Lightning 2.5 and 2.6; each torch and
each Python.

Not the full product: failures occur in one release or in a pair of releases, and users have
releases of about the same age. 2.5.0.post0 differs from 2.5.0 only in its number. 0.17.5 and
0.18.4 are adjacent to the refused releases.
"""

COMPILED = (NEWER, NEWEST)
"""Cells that run with DeepSpeed's compiled operators, because their torch locks builds in another
way than the pinned one.
"""

EXCHANGES = ((OLDEST, NEWER), (OLDEST, NEWEST), (OLDEST, PINNED))
"""Pairs of cells that resume each other's checkpoints; all their releases are far apart."""

REFUSED = Cell(PINNED_TORCH, "0.18.3", "2.6.6", promised=False)
"""A release outside the library's dependency ranges."""

HUGGING_FACE = {
    "transformers4.57.3-accelerate1.15.0": (
        *("transformers==4.57.3", "accelerate==1.15.0"),
        *("huggingface_hub==0.36.2", "tokenizers==0.22.2"),
    ),
    "transformers5.24.0-accelerate1.15.0": ("transformers==5.24.0", "accelerate==1.15.0"),
}
"""The oldest and newest releases that ``elastic`` supports.

They are installed in a folder that precedes the packages of the pinned environment. The oldest
transformers also needs older dependencies.
"""
