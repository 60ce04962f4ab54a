"""Open a checkpoint of any supported format.

``open_checkpoint`` detects the format from the files. Its errors suggest checkpoints near the given
path. ``RenamedReader`` presents a checkpoint under other parameter names.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from lightning_elastic_zero.core.layout import Fragment, Transfer
from lightning_elastic_zero.core.manifest import MANIFEST_NAME, Manifest, manifest_from_json
from lightning_elastic_zero.core.names import KeyMapping
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import Scalar
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import CheckpointFormatError, CheckpointNotFoundError
from lightning_elastic_zero.formats.dcp_read import METADATA_NAME, DcpReader, is_dcp
from lightning_elastic_zero.formats.deepspeed_files import (
    LATEST_UNIVERSAL,
    find_tag_folder,
    is_deepspeed,
    is_universal,
    read_tag_folder,
)
from lightning_elastic_zero.formats.deepspeed_reader import UniversalReader, ZeroReader
from lightning_elastic_zero.formats.dumps import TABLE_NAME, DumpsReader
from lightning_elastic_zero.formats.elastic import ElasticReader
from lightning_elastic_zero.formats.full_state import (
    WEIGHTS,
    SingleFileReader,
    is_unpartitioned,
)
from lightning_elastic_zero.formats.reader import (
    CheckpointReader,
    Location,
    SharedState,
    as_format_error,
)
from lightning_elastic_zero.formats.torch_read import ForeignFiles, foreign_files
from lightning_elastic_zero.storage.folder import Folder
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.object_store import AnyPath
from lightning_elastic_zero.storage.own_files import LATEST, TAG, is_checkpoint, latest_in
from lightning_elastic_zero.storage.paths import NO_ENTRY, raise_unless_damage

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


def looks_like_checkpoint(entry: Path) -> bool:
    """Whether a directory has a file that marks a format, or a file has Lightning's suffix."""
    if not os.path.isdir(entry):  # noqa: PTH112 (returns False if access is denied)
        return entry.suffix == SUFFIX
    marks = (entry / mark for mark in MARKS)
    with suppress(PermissionError):
        return any(map(os.path.isfile, marks)) or is_deepspeed(entry)
    return False


Named = TypeVar("Named", Fragment, Transfer)


_UNCHANGED = (
    "check",
    "check_files",
    "frozen_layout_of",
    "layout_of",
    "names",
    "optimizer_state",
    "recorded_bytes",
    "trainer_entry",
    "verify",
    "verify_whole",
)
"""Methods of a reader that neither take nor return names of parameters, or take a manifest."""


class RenamedReader(CheckpointReader):
    """An open checkpoint, presented under the model's parameter names.

    ``where`` identifies it in messages about names that would become equal or do not exist.
    """

    def __init__(self, source: CheckpointReader, renaming: KeyMapping, where: str) -> None:
        self.files = source.files
        self._source = source
        vars(self).update({name: getattr(source, name) for name in _UNCHANGED})
        self._renaming = renaming
        self._here = renaming.table(source.manifest.names(), where)
        self._saved = {here: saved for saved, here in self._here.items()}
        self._describe()

    @property
    def changes_names(self) -> bool:
        """Whether the mapping changes any name of the checkpoint."""
        return any(saved != here for saved, here in self._here.items())

    def _describe(self) -> None:
        self.info = self._source.info
        self.manifest = _with_names(self._source.manifest, self._name)

    def _name(self, saved: str) -> str:
        return self._here.get(saved) or self._renaming.here(saved)

    def _saved_name(self, here: str) -> str:
        if here in self._saved:
            return self._saved[here]
        # Must not be mistaken for the saved parameter of that name, which is renamed.
        return f"{here} (here)" if here in self._here else here

    def _as_saved(self, at: Named) -> Named:
        return replace(at, name=self._saved_name(at.name))

    def bind(self, live: Manifest) -> None:
        self._source.bind(_with_names(live, self._saved_name))
        self._describe()

    def bind_without_model(self) -> None:
        self._source.bind_without_model()
        self._describe()

    def locate(self, key: str, transfer: Transfer) -> Location:
        return self._source.locate(key, self._as_saved(transfer))

    def locate_rounded(self, transfer: Transfer) -> Location | None:
        return self._source.locate_rounded(self._as_saved(transfer))

    def locate_module_weights(self, transfer: Transfer) -> Location | None:
        return self._source.locate_module_weights(self._as_saved(transfer))

    @property
    def weights_differ(self) -> bool:
        return self._source.weights_differ or super().weights_differ

    @property
    def other_steps(self) -> str:
        return self._source.other_steps

    @property
    def counts_steps(self) -> bool:
        return self._source.counts_steps

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        return self._source.scalars(self._as_saved(at))

    def module_state(self, rank: int, world_size: int) -> SharedState:
        state = self._source.module_state(rank, world_size)
        client = dict(state.client_state)
        if isinstance(weights := client.get(WEIGHTS), dict):
            client[WEIGHTS] = self._renamed(weights)
        return replace(
            state,
            buffers=self._renamed(state.buffers),
            client_state=client,
            extra_states=self._renamed(state.extra_states),
        )

    def module_buffers(self) -> Mapping[str, torch.Tensor]:
        return self._renamed(self._source.module_buffers())

    def _renamed(self, of: Mapping[str, Any]) -> dict[str, Any]:
        return {self._name(name): value for name, value in of.items()}


def _with_names(manifest: Manifest, named: Callable[[str], str]) -> Manifest:

    def all_of(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(map(named, names))

    return replace(
        manifest,
        parameters=tuple(
            replace(p, name=named(p.name), aliases=all_of(p.aliases)) for p in manifest.parameters
        ),
        groups=tuple(replace(g, names=all_of(g.names)) for g in manifest.groups),
        buffers=tuple(replace(b, names=all_of(b.names)) for b in manifest.buffers),
        module_buffers=all_of(manifest.module_buffers),
        excluded=all_of(manifest.excluded),
    )


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
            else f". {local.parent} contains {_list_checkpoints(checkpoint_names(local.parent))}"
        )
        msg = f"there is no checkpoint at {path}{hint}"
        raise CheckpointNotFoundError(msg)
    manifest = _own_manifest(folder)
    progress.check()
    if manifest is not None:
        return ElasticReader(path, manifest, allow_pickle=allow_pickle, progress=progress)
    if local is None:
        _refuse_without_manifest(folder)
    return _foreign(local, allow_pickle=allow_pickle, progress=progress)


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


def _tag_reader(files: ForeignFiles) -> CheckpointReader:
    """Return the reader of a tag's folder. Without ZeRO, DeepSpeed writes one file."""
    held = read_tag_folder(files.folder)
    if held.model and not held.optimizer and is_unpartitioned(files.tree(held.model)):
        return SingleFileReader(files.folder / held.model, files)
    return ZeroReader(files)


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
