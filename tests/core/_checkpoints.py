"""Small directories that are checkpoints, for what only looks at files and never into them."""

from __future__ import annotations

import json
from pathlib import Path

SHARD = "checkpoint/mp_rank_00_model_states.pt"
"""A file that every checkpoint of ZeRO-1 and 2 has."""


def manifest_of(files: dict[str, str], mark: str = "") -> str:
    """Return a manifest that names files, with their sizes in bytes."""
    rows = [{"name": name, "size_bytes": len(text)} for name, text in files.items()]
    return json.dumps({"format": "lightning_elastic_zero", "mark": mark, "files": rows})


def fill(path: Path, text: str, *, published: bool = True) -> Path:
    """Write a checkpoint whose every file holds one text, into a directory that may be there."""
    shard = path / SHARD
    shard.parent.mkdir(parents=True, exist_ok=True)
    shard.write_text(text)
    if published:
        (path / "manifest.json").write_text(manifest_of({SHARD: text}, text))
    return path


def whole(text: str) -> dict[str, str]:
    """Return what ``fill`` leaves, as ``contents`` finds it."""
    return {SHARD: text, "manifest.json": manifest_of({SHARD: text}, text)}


def contents(directory: Path) -> dict[str, str]:
    """Return the text of each file in a tree."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_text() for path in files}


def names_in(directory: Path) -> list[str]:
    """List a directory, hidden names too."""
    return sorted(path.name for path in directory.iterdir())
