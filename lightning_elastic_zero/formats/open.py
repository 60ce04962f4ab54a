"""Open a checkpoint of any supported format, which is detected from the files.

Errors suggest checkpoints near the given path.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from lightning_elastic_zero.core.manifest import MANIFEST_NAME, Manifest, manifest_from_json
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.save_files import LATEST, OURS, TAG
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    ElasticZeroError,
)
from lightning_elastic_zero.formats.dcp_read import METADATA_NAME, DcpReader, is_dcp
from lightning_elastic_zero.formats.deepspeed_files import (
    LATEST_UNIVERSAL,
    find_tag_folder,
    is_deepspeed,
    is_universal,
    read_tag_folder,
)
from lightning_elastic_zero.formats.deepspeed_reader import UniversalReader, open_tag
from lightning_elastic_zero.formats.dumps import TABLE_NAME, DumpsReader
from lightning_elastic_zero.formats.elastic import open_elastic
from lightning_elastic_zero.formats.full_state import SingleFileReader, is_unpartitioned
from lightning_elastic_zero.formats.reader import CheckpointReader, as_format_error
from lightning_elastic_zero.formats.torch_read import ForeignFiles, TorchFile, foreign_files
from lightning_elastic_zero.storage.file_read import RangeFile
from lightning_elastic_zero.storage.folder import Folder
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.own_files import is_checkpoint, latest_in
from lightning_elastic_zero.storage.paths import NO_ENTRY, AnyPath, raise_unless_damage

MARKS = (MANIFEST_NAME, LATEST, LATEST_UNIVERSAL, METADATA_NAME, TABLE_NAME)
"""Files that identify the format of a directory."""

SUFFIX = ".ckpt"
"""The suffix of Lightning's single-file checkpoints."""

SAFETENSORS = ".safetensors"

_ONLY_WEIGHTS = (
    "weights for from_pretrained or safetensors.torch.load_file, without the state of a run: pass "
    "the checkpoint from which it was made"
)

MAX_ENTRIES = 1000
"""Directory entries that are searched for suggestions."""

MAX_NAMES = 5
"""Names in an error message."""


def open_checkpoint(
    path: AnyPath, *, allow_pickle: bool = False, progress: Progress = NO_PROGRESS
) -> CheckpointReader:
    """Open the checkpoint at a path. The format is detected from the files.

    Args:
        path: the checkpoint's directory or file, or the folder that a loop saved it into.
        allow_pickle: unpickle objects of any class; this can run code.
        progress: checked after every read, also in later calls: thousands of files take minutes.

    Raises:
        CheckpointNotFoundError: the path does not exist, or access is denied.
        CheckpointFormatError: the path is not a checkpoint that can be read.
        CheckpointCorruptedError: the checkpoint is incomplete or damaged.
        UnsupportedError: the checkpoint is of a run that cannot be resumed.
    """
    try:
        return _opened(resolve_latest(path), allow_pickle=allow_pickle, progress=progress)
    except OSError as error:
        if error.errno not in NO_ENTRY:
            raise  # It may be temporary: do not fall back to an older checkpoint.
        msg = (
            f"{path} cannot be read: {error.filename or path}: {error.strerror or error}. Check "
            f"{folder_at(path).access_advice}"
        )
        raise CheckpointNotFoundError(msg) from error


def _opened(path: AnyPath, *, allow_pickle: bool, progress: Progress) -> CheckpointReader:
    folder = folder_at(path)
    local = folder.local
    if local is not None and not local.exists():
        hint = (
            f": it links to {local.readlink()}, which does not exist"
            if local.is_symlink()
            else f". {local.parent} {_content(local.parent)}"
        )
        msg = f"there is no checkpoint at {path}{hint}"
        raise CheckpointNotFoundError(msg)
    manifest = _own_manifest(folder)
    progress.check()
    if manifest is not None:
        return open_elastic(path, manifest, allow_pickle=allow_pickle, progress=progress)
    if local is None:
        _refuse_without_manifest(folder)
    return _foreign(local, allow_pickle=allow_pickle, progress=progress)


def _own_manifest(folder: Folder) -> Manifest | None:
    """Return the manifest of a checkpoint of this library; None if there is none."""
    manifest = folder.path / MANIFEST_NAME
    try:
        # As bytes, so that line ends stay unchanged: the digest covers them.
        text = folder.read_manifest().decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        folder.raise_if_denied(error)
        if isinstance(error, OSError):
            raise_unless_damage(error, manifest)
        msg = f"{manifest} cannot be read ({error}). Resume from another checkpoint"
        raise CheckpointFormatError(msg) from error
    if folder.local is not None:
        _check_latest(folder.local)
    return manifest_from_json(text, str(manifest))


def _check_latest(path: Path) -> None:
    """Refuse a checkpoint of this library into which DeepSpeed saved a tag later."""
    named = latest_in(path)
    if named in {"", TAG} or not is_deepspeed(path / named):
        return
    msg = (
        f"{path} contains a checkpoint of this library and one that DeepSpeed saved there later: "
        f"`{LATEST}` names the tag {named!r}. Pass {path / named} to load the latter. To load the "
        f"former, move {named} elsewhere and write {TAG} into {path / LATEST}"
    )
    raise CheckpointFormatError(msg)


def _foreign(path: Path, *, allow_pickle: bool, progress: Progress) -> CheckpointReader:
    """Open a checkpoint that other software wrote."""
    folder, where = path, path
    reader: Callable[[ForeignFiles], CheckpointReader]
    if path.suffix == SAFETENSORS:
        msg = f"{path} contains {_ONLY_WEIGHTS}"
        raise CheckpointFormatError(msg)
    if not path.is_dir():
        folder, reader = path.parent, partial(SingleFileReader, path)
    elif path.name == TAG and (path.parent / MANIFEST_NAME).is_file():
        # Another tag there, which DeepSpeed saved, is a checkpoint itself.
        msg = f"{path} is inside a checkpoint. Pass {path.parent}"
        raise CheckpointFormatError(msg)
    elif (path / TABLE_NAME).is_file():
        reader = DumpsReader
    elif tag := find_tag_folder(path):
        folder = where = tag
        reader = UniversalReader if is_universal(tag) else _tag_reader
    elif is_dcp(path):
        reader = partial(DcpReader, allow_pickle=allow_pickle)
    else:
        content = sorted(entry.name for entry in itertools.islice(path.iterdir(), MAX_ENTRIES))
        found = f"contains {format_names(content, MAX_NAMES)}" if content else "is empty"
        why = (
            f"it {found}. It is not a checkpoint, or its save did not finish. For a folder with "
            "dumps of optimizer.state_dict(), call describe_dumps first"
        )
        if weights := [name for name in content if name.endswith(SAFETENSORS)]:
            trainers = "If this is the folder of a Trainer's checkpoint, its save did not finish"
            why = f"{weights[0]} contains {_ONLY_WEIGHTS}. {trainers}"
        if names := checkpoint_names(path):
            why = f"it contains {_list_checkpoints(names)}. Pass one of them"
        msg = (
            f"{path} has no {MANIFEST_NAME} and is not a checkpoint of another supported format: "
            f"{why}"
        )
        raise CheckpointFormatError(msg)
    of_tag = reader in (UniversalReader, _tag_reader)
    files = foreign_files(folder, allow_pickle=allow_pickle, progress=progress, check_names=of_tag)
    try:
        with as_format_error(where):
            return reader(files)
    except BaseException:
        files.close()
        raise


def _tag_reader(files: ForeignFiles) -> CheckpointReader:
    """Return the reader of a tag's folder. Without ZeRO, DeepSpeed writes one file."""
    held = read_tag_folder(files.folder)
    if held.model and not held.optimizer and is_unpartitioned(files.tree(held.model)):
        return SingleFileReader(files.folder / held.model, files)
    return open_tag(files)


# -- folders and suggestions ---------------------------------------------------------------------


def resolve_latest(path: AnyPath) -> AnyPath:
    """Return the checkpoint of this library that ``latest`` in a folder names, else the path.

    Hugging Face's ``checkpoint-10`` is such a folder: ``latest`` in it names
    ``global_step10/checkpoint``, the files in the checkpoint ``global_step10``.
    """
    folder = folder_at(path).local
    if folder is None or os.path.exists(folder / MANIFEST_NAME):  # noqa: PTH110 (never raises)
        return path
    name = latest_in(folder)
    tag = name.removesuffix(f"/{TAG}")
    return folder / tag if tag != name and is_checkpoint(folder / tag) else path


def check_unmixed(path: AnyPath, progress: Progress = NO_PROGRESS) -> None:
    """Refuse a checkpoint of this library into whose folder DeepSpeed has saved.

    In ZeRO-3, this opens a file of each rank, and checks ``progress`` after each.

    Raises:
        CheckpointFormatError: it has; either of the two may be meant.
    """
    folder = folder_at(path).local
    if folder is None or not is_checkpoint(folder):
        return
    files = sorted(file.name for file in folder.glob("*.pt"))
    models = sorted(folder.glob(f"{TAG}/*_model_states.pt"))
    over = []
    for file in models:
        if _is_stock(file):
            over.append(file.name)
        progress.check()
    if not (files or over):
        return
    msg = (
        f"{path} has a checkpoint of this library and files that DeepSpeed saved there "
        f"({[*files, *over][0]}): a script without elastic() has saved into the same folder. "
    )
    if over:
        msg += f"DeepSpeed's have replaced this library's: to load them, move {MANIFEST_NAME}"
    else:
        msg += (
            f"To load DeepSpeed's, move {MANIFEST_NAME} and {TAG} away; to load this "
            "library's, move *.pt"
        )
    raise CheckpointFormatError(msg)


def _is_stock(file: Path) -> bool:
    """Whether DeepSpeed wrote a file; False if it cannot be read, which the load reports."""
    with suppress(ElasticZeroError), closing(TorchFile(RangeFile(file))) as shard:
        return isinstance(shard.tree, dict) and OURS not in shard.tree
    return False


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder, for suggestions."""
    try:
        entries = list(itertools.islice(folder.iterdir(), MAX_ENTRIES))
        return sorted(e.name for e in entries if e.name[0] != "." and looks_like_checkpoint(e))
    except OSError:
        return []  # These are only suggestions.


def _list_checkpoints(names: Sequence[str]) -> str:
    """List the last names, which are often the newest, and count the others."""
    last_first = [*names[-MAX_NAMES:], *names[:-MAX_NAMES]]
    return f"the checkpoints {format_names(last_first, MAX_NAMES)}" if names else "no checkpoints"


def _content(folder: Path) -> str:
    if not folder.exists():
        return "does not exist either"
    return f"contains {_list_checkpoints(checkpoint_names(folder))}"


def looks_like_checkpoint(entry: Path) -> bool:
    """Whether a directory has a file that marks a format, or a file has Lightning's suffix."""
    if not os.path.isdir(entry):  # noqa: PTH112 (returns False if access is denied)
        return entry.suffix == SUFFIX
    marks = (entry / mark for mark in MARKS)
    with suppress(PermissionError):
        return any(map(os.path.isfile, marks)) or is_deepspeed(entry)
    return False


def _refuse_without_manifest(folder: Folder) -> NoReturn:
    """Raise the error for an address where only this library's checkpoints are read."""
    path, existing = folder.path, folder.inspect()
    if inside := [each.path.name for each in folder.entries() if each.is_checkpoint()]:
        msg = f"{path} is a folder: it contains {_list_checkpoints(inside)}. Pass one of them"
        raise CheckpointFormatError(msg)
    if existing.kind == "other":
        msg = (
            f"{path} {existing.refusal_reason}. Checkpoints of other software are not read from "
            "an object store: copy it to a local disk first"
        )
        raise CheckpointFormatError(msg)
    names = [each.path.name for each in folder.siblings() if each.is_checkpoint()]
    msg = f"there is no checkpoint at {path}. {path.parent} contains {_list_checkpoints(names)}"
    raise CheckpointNotFoundError(msg)
