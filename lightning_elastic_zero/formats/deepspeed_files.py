"""DeepSpeed's checkpoint folders: tags, the files in them, and stand-ins for pickled classes.

The stand-ins keep the saved fields and do nothing else, so that files are read without importing
DeepSpeed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightning_elastic_zero.core.manifest import Plain
from lightning_elastic_zero.core.save_files import LATEST, tensor_rank_of
from lightning_elastic_zero.errors import CheckpointFormatError, UnsupportedError
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import AnyPath, read_file

_OPTIMIZER = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")

_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")

_MODEL_3 = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")

_PARALLEL = re.compile(r"(layer_\d+|expert_\d+|layer_\d+_expert_\d+)[-_].*\.pt")

LATEST_UNIVERSAL = "latest_universal"
"""Contains the last tag that ``ds_to_universal`` wrote."""

OPTIMIZER_STATE = "zero/optimizer_state.pt"
"""The file of a Universal Checkpoint with hyperparameters and other optimizer data."""

_MOST_TAG = 255
"""Characters of a tag, which is the name of a folder."""


class FragmentAddress:
    """The address of a fragment; not used, as it is wrong with round-robin gradients."""


class LossScaler:
    """A constant loss scale: the fields of the object, without its methods."""


class DynamicLossScaler(LossScaler):
    """A loss scale that follows overflows."""


CLASS_STUBS: Mapping[str, type] = {
    "deepspeed.utils.tensor_fragment.fragment_address": FragmentAddress,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": DynamicLossScaler,
}
"""Stand-ins by the names of DeepSpeed's classes; other classes are refused by name."""


def stub_fields(scaler: object) -> dict[str, Plain]:
    """Return the class and plain fields of a loss scaler; empty if there is none."""
    if not isinstance(scaler, LossScaler):
        return {}
    fields = {k: v for k, v in vars(scaler).items() if isinstance(v, (bool, int, float))}
    return {"class": type(scaler).__name__, **fields}


@dataclass(frozen=True, slots=True)
class TagFolder:
    """The folder of one tag, and the files in it by rank."""

    optimizer: Mapping[str, Mapping[int, str]]
    """Per prefix (``""``, ``"bf16_"``): the optimizer shard of each rank."""
    model: str = ""
    """The one model file of ZeRO-1/2; empty in ZeRO-3."""
    models: Mapping[int, str] = field(default_factory=dict)
    """ZeRO-3: each rank's model file."""
    last: str = ""
    """A file of the last tensor rank."""


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


def _latest_tags(path: Path) -> dict[Path, str]:
    """Return the tags that ``latest`` and ``latest_universal`` name, by those files."""
    files = [path / name for name in (LATEST, LATEST_UNIVERSAL) if (path / name).is_file()]
    return {file: read_file(file).decode(errors="replace").strip()[:_MOST_TAG] for file in files}


def find_tag_folder(path: Path) -> Path | None:
    """Return the tag's folder at or below a path; None if there are no files of DeepSpeed.

    It is the path itself, the tag that ``latest`` names, or the only tag.
    """
    if is_deepspeed(path):
        return path
    tags = tags_in(path)
    if named := _latest_tags(path):
        latest, tag = next(iter(named.items()))
        if tag in tags:
            return path / tag
        found = f"found {', '.join(tags)}" if tags else "found no folder of a tag"
        msg = (
            f"{latest} names the tag {tag!r}, which does not exist; {found}. Pass the folder of "
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


def read_tag_folder(path: Path, tensor_rank: int = 0) -> TagFolder:
    """Sort the files of a tensor rank in a tag's folder."""
    optimizer: dict[str, dict[int, str]] = {}
    model, models, last = "", {}, ""
    for name in sorted(entry.name for entry in path.iterdir()):
        if _PARALLEL.fullmatch(name):
            msg = (
                f"{path / name} was written with pipeline or expert parallelism, which this "
                "library does not support"
            )
            raise UnsupportedError(msg)
        last = max(last, name, key=tensor_rank_of)
        if found := _OPTIMIZER.fullmatch(name):
            if int(found[3]) == tensor_rank:
                optimizer.setdefault(found[1], {})[int(found[2])] = name
        elif found := _MODEL_3.fullmatch(name):
            if int(found[2]) == tensor_rank:
                models[int(found[1])] = name
        elif (found := _MODEL.fullmatch(name)) and int(found[1]) == tensor_rank:
            model = name
    # A Universal Checkpoint may have model files of both kinds.
    if model and models and not is_universal(path):
        msg = (
            f"{path} contains {model} of a ZeRO-1/2 run and {models[min(models)]} of a ZeRO-3 run: "
            "two runs were saved into one folder. Remove the files of one of them"
        )
        raise CheckpointFormatError(msg)
    return TagFolder(optimizer, model, models, last)


def describe_missing_latest(path: AnyPath) -> str:
    """Describe that DeepSpeed does not find the only tag of a checkpoint; empty if it does.

    This library uses the only tag of a folder even if no file names it.
    """
    folder = folder_at(path).local
    if folder is None or not folder.is_dir() or is_deepspeed(folder):
        return ""
    tags = tags_in(folder)
    if len(tags) != 1:
        return ""
    (tag,) = tags
    if tag in _latest_tags(folder).values():
        return ""
    name = LATEST_UNIVERSAL if is_universal(folder / tag) else LATEST
    return (
        f"no file {name} names the tag {tag!r}. This library uses the only tag, but DeepSpeed and "
        f"zero_to_fp32.py need the file: write {tag} into {path / name}"
    )
