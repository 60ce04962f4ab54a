"""Where a value is in a tree of dictionaries and lists."""

from __future__ import annotations

from typing import TypeAlias

TreePath: TypeAlias = "tuple[str | int, ...]"
"""Keys and indices that lead to a value in the tree."""


def format_tree_path(path: TreePath) -> str:
    """Return a path as a person writes it: ``callbacks.EarlyStopping.best``."""
    return ".".join(map(str, path)) or "the top level"
