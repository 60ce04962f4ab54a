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

    This library takes a tag that is the only one; DeepSpeed looks for no tag but the named one.

    Args:
        path: what was passed as the checkpoint's path: a file, a tag's folder, or what holds it.

    Returns:
        A sentence; empty where a file names a tag, or where the path is a tag's folder or no
        folder of DeepSpeed's.
    """
    if not path.is_dir() or is_deepspeed(path):
        return ""
    tags = tags_in(path)
    if len(tags) != 1 or any((path / name).is_file() for name in (LATEST, LATEST_UNIVERSAL)):
        return ""
    (tag,) = tags
    universal = is_universal(path / tag)
    name = LATEST_UNIVERSAL if universal else LATEST
    does = (
        "engine.load_checkpoint raises"
        if universal
        else "engine.load_checkpoint loads nothing and only warns, zero_to_fp32.py raises"
    )
    return (
        f"there is no {name} that names the tag {tag!r}. This library takes the one tag that is "
        f"there; DeepSpeed does not ({does}, unless told the tag). For DeepSpeed, write {tag} into "
        f"{path / name}"
    )
