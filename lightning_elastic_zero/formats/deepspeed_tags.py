"""Finds DeepSpeed's files in a folder: which tag, which ranks, which kind; from names alone.

DeepSpeed's own reading of a checkpoint in which no file names the tag.
"""

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
"""Names the tag that ``ds_to_universal`` has written last."""

OPTIMIZER_STATE = "zero/optimizer_state.pt"
"""What a Universal Checkpoint holds of the optimizer beside its states."""


@dataclass(frozen=True, slots=True)
class TagFolder:
    """The folder of one tag, and the files in it by rank."""

    path: Path
    """The tag's folder."""
    optimizer: Mapping[str, Mapping[int, str]]
    """Per prefix (``""``, ``"bf16_"``): the file of each rank's optimizer shard."""
    model: str = ""
    """The one model file of ZeRO-1/2; empty in ZeRO-3."""
    models: Mapping[int, str] = field(default_factory=dict)
    """ZeRO-3: each rank's model file."""


def check_saved_name(path: Path, saved_as: str) -> None:
    """Refuse a file that was saved as another rank's, or as another kind of file.

    Args:
        path: of the file.
        saved_as: what ``torch.save`` called it, without suffix; what is no name of DeepSpeed's says
            nothing.

    Raises:
        CheckpointFormatError: it was renamed, or two ranks' files were swapped.
    """
    meant = _kind_and_ranks(f"{saved_as}.pt")
    if meant is not None and meant != _kind_and_ranks(path.name):
        msg = (
            f"{path} was saved as {saved_as}.pt: it was renamed, and is not what its name says. "
            "Copy the files of this tag again, each under its own name"
        )
        raise CheckpointFormatError(msg)


def _kind_and_ranks(name: str) -> tuple[str, ...] | None:
    """Return what a name says but for the precision: the kind of file, and the ranks."""
    for kind, pattern in (("shard", _OPTIMIZER), ("model", _MODEL), ("model of ZeRO-3", _MODEL_3)):
        if found := pattern.fullmatch(name):
            return kind, *(number for number in found.groups() if number.isdecimal())
    return None


def is_universal(folder: Path) -> bool:
    """Whether a tag's folder is a Universal Checkpoint, one that lacks files too."""
    return (folder / OPTIMIZER_STATE).is_file() or any(folder.glob("zero/*/fp32.pt"))


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder holds the files of one tag."""
    patterns = ("*_model_states.pt", "*_optim_states.pt")
    return any(any(folder.glob(pattern)) for pattern in patterns) or is_universal(folder)


def tags_in(folder: Path) -> list[str]:
    """Return the names of the tags whose folders lie in a folder, sorted."""
    found = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    return [name for name in found if is_deepspeed(folder / name)]


def find_tag_folder(path: Path) -> Path | None:
    """Return the tag's folder that a path means, or None where there are no files of DeepSpeed's.

    A path that is a tag's folder means that tag. Else the tag is the one that ``latest`` names, or
    the only one that there is.

    Raises:
        CheckpointFormatError: ``latest`` names a tag that is not there, or there are several tags
            and nothing says which one is meant.
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
        found = f"there are {', '.join(tags)}" if tags else "there is no tag's folder at all"
        msg = (
            f"{latest} names the tag {named!r}, which is not there; {found}. Pass the folder of "
            "the tag that you want as the checkpoint's path"
        )
        raise CheckpointFormatError(msg)
    if len(tags) > 1:
        msg = (
            f"{path} has the tags {', '.join(tags)} and no file `{LATEST}` that names one of them: "
            "pass the folder of the tag that you want as the checkpoint's path"
        )
        raise CheckpointFormatError(msg)
    return path / tags[0] if tags else None


def read_tag_folder(path: Path) -> TagFolder:
    """Sort the files of a tag's folder.

    Raises:
        UnsupportedError: it was written with tensor, pipeline or expert parallelism.
        CheckpointFormatError: it holds the files of more than one run.
    """
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
    # A Universal Checkpoint may have one for engines of each kind.
    if model and models and not is_universal(path):
        msg = (
            f"{path} holds {model} of a ZeRO-1/2 run and {models[min(models)]} of a ZeRO-3 run: "
            "two runs were saved into one folder. Remove the files of the one that you do not want"
        )
        raise CheckpointFormatError(msg)
    return TagFolder(path, optimizer, model, models)


def describe_missing_latest(path: AnyPath) -> str:
    """Describe what DeepSpeed does with a checkpoint whose one tag no file names.

    This library takes a tag that is the only one, and of its own checkpoints it needs none;
    DeepSpeed looks for no tag but the named one.

    Args:
        path: what was passed as the checkpoint's path: a file, a tag's folder, or what holds it.

    Returns:
        A sentence; empty where a file names the tag, or where the path is a tag's folder or no
        folder of DeepSpeed's.
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
