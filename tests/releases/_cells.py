"""The cells of the matrix of releases: which are run with one another, and why those."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Base:
    """What takes long to install, shared by cells: an interpreter with a torch."""

    python: str
    """Major and minor version."""
    torch: str

    def __str__(self) -> str:
        return f"py{self.python}-torch{self.torch}"


@dataclass(frozen=True, order=True)
class Cell:
    """Releases that an environment of its own has."""

    base: Base
    deepspeed: str
    lightning: str
    promised: bool = True
    """Whether this library's ranges allow it, so that pip installs it with the library."""

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
"""Each end of DeepSpeed 0.16 to 0.19 and of Lightning 2.5 and 2.6, each torch, each Python.

Not the product: what fails does so in one release, or in a pair, and pairs of neighbours in time
are what people have. 2.5.0.post0 is 2.5.0: its only change is its number. 0.17.5 and 0.18.4 stand
beside the releases that are refused.
"""

EXCHANGES = ((OLDEST, NEWER), (OLDEST, NEWEST), (OLDEST, PINNED))
"""Cells whose checkpoints are resumed in one another, both ways: far apart in every respect."""

REFUSED = Cell(PINNED_TORCH, "0.18.3", "2.6.6", promised=False)
"""A release that pip installs against the library's word only."""

HUGGING_FACE = {
    "transformers4.57.3-accelerate1.15.0": (
        *("transformers==4.57.3", "accelerate==1.15.0"),
        *("huggingface_hub==0.36.2", "tokenizers==0.22.2"),
    ),
    "transformers5.24.0-accelerate1.15.0": ("transformers==5.24.0", "accelerate==1.15.0"),
}
"""Both ends of what ``elastic`` supports. These packages precede those of the pinned environment,
which has all others; the oldest transformers also needs older ones."""
