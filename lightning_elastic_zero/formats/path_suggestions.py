"""Checkpoints near a path that is none, as suggestions in an error."""

from __future__ import annotations

import difflib
import itertools
import os
from pathlib import Path

from lightning_elastic_zero.formats.dcp.detection import METADATA_NAME
from lightning_elastic_zero.formats.deepspeed.tag_folder import LATEST_UNIVERSAL, is_deepspeed
from lightning_elastic_zero.formats.dumps.table import TABLE_NAME
from lightning_elastic_zero.manifest import MANIFEST_NAME
from lightning_elastic_zero.storage.file_ownership import LATEST
from lightning_elastic_zero.text import format_names

MARKS = (MANIFEST_NAME, LATEST, LATEST_UNIVERSAL, METADATA_NAME, TABLE_NAME)
"""Files by which a directory shows what it is."""

SUFFIX = ".ckpt"
"""Of Lightning's single files."""

MAX_ENTRIES = 1000
MAX_NAMES = 5


def describe_checkpoints_in(folder: Path) -> str:
    """Describe which checkpoints a folder holds; nothing where it holds none."""
    if not (names := _checkpoints(folder)):
        return ""
    return f"it holds the checkpoints {format_names(names, MAX_NAMES)}. Pass one of them"


def describe_content(folder: Path) -> str:
    """Describe what lies in a folder that is no checkpoint."""
    try:
        entries = list(itertools.islice(folder.iterdir(), MAX_ENTRIES))
    except OSError as error:
        return f"it cannot be listed ({error.strerror})"
    if not entries:
        return "it is empty"
    names = sorted(entry.name for entry in entries)
    return f"there are {format_names(names, MAX_NAMES)} in it"


def describe_similar_paths(path: Path) -> str:
    """Describe what there is of a path that leads nowhere: its folder, and names like its own."""
    folder = path.parent
    if not folder.is_dir():
        return f", nor is there a folder {folder}"
    names = _checkpoints(folder)
    # By what is before the suffix, which all of Lightning's files share.
    stems = {name: name.removesuffix(SUFFIX) for name in names}
    close = difflib.get_close_matches(path.name.removesuffix(SUFFIX), stems.values(), n=MAX_NAMES)
    if like := [name for stem in dict.fromkeys(close) for name in names if stems[name] == stem]:
        return f". Of a like name there is {', '.join(like)}"
    if names:
        return f". {folder} holds {', '.join(names[-MAX_NAMES:])}"
    return f". {folder} holds none"


def _checkpoints(folder: Path) -> list[str]:
    try:
        entries = list(itertools.islice(folder.iterdir(), MAX_ENTRIES))
        return sorted(e.name for e in entries if e.name[0] != "." and looks_like_checkpoint(e))
    except OSError:
        return []  # A folder that cannot be read has nothing to offer.


def looks_like_checkpoint(entry: Path) -> bool:
    """Whether a directory has a mark of some kind, or a file the suffix of Lightning's."""
    if not os.path.isdir(entry):  # noqa: PTH112 (no error where it cannot be looked into)
        return entry.suffix == SUFFIX
    marks = (entry / mark for mark in MARKS)
    return any(map(os.path.isfile, marks)) or is_deepspeed(entry)
