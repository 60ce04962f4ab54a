"""What lies near a path that is no checkpoint: the ones that may have been meant."""

from __future__ import annotations

import difflib
import itertools
from pathlib import Path

from lightning_elastic_zero.formats.deepspeed_folder import LATEST_UNIVERSAL, is_deepspeed
from lightning_elastic_zero.formats.dumps_table import TABLE_NAME
from lightning_elastic_zero.formats.names import LATEST
from lightning_elastic_zero.formats.torch_folder import METADATA_NAME
from lightning_elastic_zero.manifest import MANIFEST_NAME

MARKS = (MANIFEST_NAME, LATEST, LATEST_UNIVERSAL, METADATA_NAME, TABLE_NAME)
"""Files by which a directory shows what it is."""

SUFFIX = ".ckpt"
"""Of Lightning's single files."""

MOST_LOOKED_AT = 1000
MOST_NAMED = 5


def those_in(folder: Path) -> str:
    """Say which checkpoints a folder holds; nothing where it holds none."""
    if not (names := _checkpoints(folder)):
        return ""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"It holds checkpoints: {', '.join(names[:MOST_NAMED])}{more}. Pass one of them"


def those_like(path: Path) -> str:
    """Say what there is of a path that leads nowhere: its folder, and names like its own."""
    folder = path.parent
    if not folder.is_dir():
        return f", nor is there a folder {folder}"
    names = _checkpoints(folder)
    if like := difflib.get_close_matches(path.name, names, n=MOST_NAMED):
        return f". Of a like name there is {', '.join(like)}"
    if names:
        return f". {folder} holds {', '.join(names[-MOST_NAMED:])}"
    return f". {folder} holds none"


def _checkpoints(folder: Path) -> list[str]:
    try:
        entries = list(itertools.islice(folder.iterdir(), MOST_LOOKED_AT))
        return sorted(e.name for e in entries if e.name[0] != "." and _is_checkpoint(e))
    except OSError:
        return []  # A folder that cannot be read has nothing to offer.


def _is_checkpoint(entry: Path) -> bool:
    if not entry.is_dir():
        return entry.suffix == SUFFIX
    return any((entry / mark).is_file() for mark in MARKS) or is_deepspeed(entry)
