"""Finds the tag, ranks and kinds of DeepSpeed's files in a folder by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightning_elastic_zero.errors import CheckpointFormatError, UnsupportedError
from lightning_elastic_zero.storage.ownership import LATEST
from lightning_elastic_zero.storage.stores import AnyPath, StorePath

_OPTIMIZER = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODEL_3 = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_PARALLEL = re.compile(r"(layer_\d+|expert_\d+|layer_\d+_expert_\d+)[-_].*\.pt")


LATEST_UNIVERSAL = "latest_universal"
"""Contains the last tag that ``ds_to_universal`` wrote."""

OPTIMIZER_STATE = "zero/optimizer_state.pt"
"""The file of a Universal Checkpoint with hyperparameters and other optimizer data."""


@dataclass(frozen=True, slots=True)
class TagFolder:
    """The folder of one tag, and the files in it by rank."""

    path: Path
    optimizer: Mapping[str, Mapping[int, str]]
    """Per prefix (``""``, ``"bf16_"``): the optimizer shard of each rank."""
    model: str = ""
    """The one model file of ZeRO-1/2; empty in ZeRO-3."""
    models: Mapping[int, str] = field(default_factory=dict)
    """ZeRO-3: each rank's model file."""


def check_saved_name(path: Path, saved_as: str) -> None:
    """Refuse a file that was saved under DeepSpeed's name of another rank or kind of file."""
    meant = _kind_and_ranks(f"{saved_as}.pt")
    if meant is not None and meant != _kind_and_ranks(path.name):
        msg = (
            f"{path} was saved as {saved_as}.pt and renamed. "
            "Copy the files of this tag again, each under its own name"
        )
        raise CheckpointFormatError(msg)


def _kind_and_ranks(name: str) -> tuple[str, ...] | None:
    """Return the kind of file and its ranks; None for other names."""
    for kind, pattern in (("shard", _OPTIMIZER), ("model", _MODEL), ("model of ZeRO-3", _MODEL_3)):
        if found := pattern.fullmatch(name):
            return kind, *(number for number in found.groups() if number.isdecimal())
    return None


def is_universal(folder: Path) -> bool:
    """Whether a tag's folder is a Universal Checkpoint, possibly an incomplete one."""
    return (folder / OPTIMIZER_STATE).is_file() or any(folder.glob("zero/*/fp32.pt"))


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder contains the files of one tag."""
    patterns = ("*_model_states.pt", "*_optim_states.pt")
    return any(any(folder.glob(pattern)) for pattern in patterns) or is_universal(folder)


def tags_in(folder: Path) -> list[str]:
    """Return the sorted names of the tags in a folder."""
    found = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    return [name for name in found if is_deepspeed(folder / name)]


def find_tag_folder(path: Path) -> Path | None:
    """Return the tag's folder at or below a path; None if there are no files of DeepSpeed.

    It is the path itself, the tag that ``latest`` names, or the only tag.
    """
    if is_deepspeed(path):
        return path
    tags = tags_in(path)
    latest = path / LATEST
    if not latest.is_file():
        latest = path / LATEST_UNIVERSAL
    if latest.is_file():
        named = latest.read_text(encoding="utf-8", errors="replace").strip()
        if named in tags:
            return path / named
        found = f"found {', '.join(tags)}" if tags else "found no folder of a tag"
        msg = (
            f"{latest} names the tag {named!r}, which does not exist; {found}. Pass the folder of "
            "a tag as the path"
        )
        raise CheckpointFormatError(msg)
    if len(tags) > 1:
        msg = (
            f"{path} has the tags {', '.join(tags)}, but no file `{LATEST}` that names one of "
            "them: pass the folder of a tag as the path"
        )
        raise CheckpointFormatError(msg)
    return path / tags[0] if tags else None


def read_tag_folder(path: Path) -> TagFolder:
    """Sort the files of a tag's folder."""
    optimizer: dict[str, dict[int, str]] = {}
    model, models = "", {}
    for name in sorted(entry.name for entry in path.iterdir()):
        parallel = _PARALLEL.fullmatch(name)
        if found := _OPTIMIZER.fullmatch(name):
            parallel = found if int(found[3]) else None
            optimizer.setdefault(found[1], {})[int(found[2])] = name
        elif found := _MODEL_3.fullmatch(name):
            parallel = found if int(found[2]) else None
            models[int(found[1])] = name
        elif found := _MODEL.fullmatch(name):
            parallel = found if int(found[1]) else None
            model = name
        if parallel:
            msg = (
                f"{path / name} was written with tensor, pipeline or expert parallelism: this "
                "library resumes data-parallel (ZeRO) runs only"
            )
            raise UnsupportedError(msg)
    # A Universal Checkpoint may have one for each kind of engine.
    if model and models and not is_universal(path):
        msg = (
            f"{path} contains {model} of a ZeRO-1/2 run and {models[min(models)]} of a ZeRO-3 run: "
            "two runs were saved into one folder. Remove the files of one of them"
        )
        raise CheckpointFormatError(msg)
    return TagFolder(path, optimizer, model, models)


def describe_missing_latest(path: AnyPath) -> str:
    """Describe that DeepSpeed does not find the only tag of a checkpoint; empty if it does.

    This library uses the only tag of a folder even if no file names it.
    """
    if isinstance(path, StorePath) or not path.is_dir() or is_deepspeed(path):
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
        f"{lack}. This library uses the only tag; DeepSpeed does not ({does}, unless it gets the "
        f"tag). For DeepSpeed, write {tag} into {path / name}"
    )


def _lack(path: Path, name: str, tag: str) -> str:
    """Describe that no file names the only tag; empty if one does."""
    files = [path / known for known in (LATEST, LATEST_UNIVERSAL) if (path / known).is_file()]
    if not files:
        return f"there is no {name} that names the tag {tag!r}"
    named = [file.read_text("utf-8", errors="replace").strip() for file in files]
    if tag in named:
        return ""
    return f"{files[0].name} names the tag {named[0][:80]!r}, which does not exist"
