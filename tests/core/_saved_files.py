"""What a save has written, for one save to be compared with another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def differing_files(one: Path, other: Path) -> list[str]:
    """Return the places, in files or the manifest, in which two checkpoints differ."""
    return [*_differing(files_of(one), files_of(other), "")]


def files_of(checkpoint: Path) -> dict[str, Any]:
    """Read all that was written, but for what tells one save from another."""
    found: dict[str, Any] = {}
    for file in sorted(checkpoint.rglob("*.pt")):
        found[file.name] = _without_ids(torch.load(file, weights_only=True))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    return found | {
        "manifest": {k: v for k, v in manifest.items() if k not in ("save_id", "files", "digest")}
    }


def _without_ids(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return (
            str(tree.dtype),
            tuple(tree.shape),
            tree.contiguous().view(-1).view(torch.uint8).tolist(),
        )
    if isinstance(tree, dict):
        return {k: _without_ids(v) for k, v in tree.items() if k not in ("save_id", "pickle")}
    if isinstance(tree, (list, tuple)):
        return [_without_ids(v) for v in tree]
    return tree


def _differing(one: Any, other: Any, where: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from _differing(one.get(key), other.get(key), f"{where}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, pair in enumerate(zip(one, other, strict=True)):
            yield from _differing(*pair, f"{where}/{place}")
    elif one != other:
        yield where
