"""Formatting of ranks, names and paths in messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TypeAlias

_MOST_LINES = 16

TreePath: TypeAlias = "tuple[str | int, ...]"
"""Keys and indices of a value in a tree of dictionaries and lists."""


def format_by_rank(texts: dict[int, str], world_size: int) -> str:
    """List ranks with their texts; ranks with the same text are grouped."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(text, []).append(rank)
    all_of_them = len(texts) == world_size
    where = f"all {world_size} ranks" if all_of_them else f"{format_ranks(texts)} of {world_size}"
    if len(groups) == 1:
        return f"{where}: {next(iter(groups))}"
    lines = [f"  {format_ranks(ranks)}: {text}" for text, ranks in groups.items()]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"  and {len(lines) - _MOST_LINES} more"]
    return "\n".join([f"{where}:", *lines])


def format_names(names: Iterable[str], limit: int = 10) -> str:
    """List the first ``limit`` names and count the others."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks: ``rank 2``, ``ranks 1, 3``, ``ranks 0-5, 9``."""
    runs: list[str] = []
    for _, pairs in itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in pairs]
        runs += [f"{run[0]}-{run[-1]}"] if run[0] + 1 < run[-1] else map(str, run)
    return ("ranks " if len(runs) > 1 or "-" in runs[0] else "rank ") + ", ".join(runs)


def format_tree_path(path: TreePath) -> str:
    """Format a path: ``callbacks.EarlyStopping.best``."""
    return ".".join(map(str, path)) or "the top level"
