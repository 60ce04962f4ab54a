"""DeepSpeed's own reading of a checkpoint in which no file names the tag."""

from __future__ import annotations

from pathlib import Path

from lightning_elastic_zero.formats.deepspeed.tag_folder import (
    LATEST_UNIVERSAL,
    is_deepspeed,
    is_universal,
    tags_in,
)
from lightning_elastic_zero.storage.file_ownership import LATEST


def describe_missing_latest(path: Path) -> str:
    """Describe what DeepSpeed does with a checkpoint whose one tag no file names.

    This library takes a tag that is the only one, and of its own checkpoints it needs none;
    DeepSpeed looks for no tag but the named one.

    Args:
        path: what was passed as the checkpoint's path: a file, a tag's folder, or what holds it.

    Returns:
        A sentence; empty where a file names the tag, or where the path is a tag's folder or no
        folder of DeepSpeed's.
    """
    if not path.is_dir() or is_deepspeed(path):
        return ""
    tags = tags_in(path)
    if len(tags) != 1:
        return ""
    (tag,) = tags
    universal = is_universal(path / tag)
    name = LATEST_UNIVERSAL if universal else LATEST
    lack = _lack(path, name, tag)
    if not lack:
        return ""
    does = (
        "engine.load_checkpoint raises"
        if universal
        else "engine.load_checkpoint loads nothing and only warns, zero_to_fp32.py raises"
    )
    return (
        f"{lack}. This library takes the one tag that is "
        f"there; DeepSpeed does not ({does}, unless told the tag). For DeepSpeed, write {tag} into "
        f"{path / name}"
    )


def _lack(path: Path, name: str, tag: str) -> str:
    """Return how no file names the one tag; empty where one does."""
    files = [path / known for known in (LATEST, LATEST_UNIVERSAL) if (path / known).is_file()]
    if not files:
        return f"there is no {name} that names the tag {tag!r}"
    told = [file.read_text("utf-8", errors="replace").strip() for file in files]
    if tag in told:
        return ""
    return f"{files[0].name} names the tag {told[0][:80]!r}, which is not there"
