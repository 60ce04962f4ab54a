"""One module per on-disk format; ``open_checkpoint`` recognises them by content.

Checkpoints near a path that is none, as suggestions in an error.

A checkpoint whose layers have other names in the model: any format, under the model's names.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from lightning_elastic_zero.core.layout import Fragment, Layout, Transfer
from lightning_elastic_zero.core.manifest import MANIFEST_NAME, Manifest, manifest_from_json
from lightning_elastic_zero.core.names import KeyMapping
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import Scalar
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import CheckpointFormatError, CheckpointNotFoundError
from lightning_elastic_zero.formats.dcp_detect import METADATA_NAME, is_dcp
from lightning_elastic_zero.formats.deepspeed_reader import ZeroReader
from lightning_elastic_zero.formats.deepspeed_tags import (
    LATEST_UNIVERSAL,
    check_saved_name,
    find_tag_folder,
    is_deepspeed,
    is_universal,
    read_tag_folder,
)
from lightning_elastic_zero.formats.dumps import TABLE_NAME, DumpsReader
from lightning_elastic_zero.formats.elastic import ElasticReader
from lightning_elastic_zero.formats.open_files import closed_on_error, foreign_files
from lightning_elastic_zero.formats.pickles import FOREIGN_TREE, PicklePolicy
from lightning_elastic_zero.formats.reader import (
    CheckpointReader,
    Location,
    SharedState,
    as_format_error,
)
from lightning_elastic_zero.formats.single_file import WEIGHTS, SingleFileReader
from lightning_elastic_zero.formats.universal import UniversalReader
from lightning_elastic_zero.storage.ownership import LATEST, TAG
from lightning_elastic_zero.storage.paths import NO_ENTRY, read_file

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


Named = TypeVar("Named", Fragment, Transfer)


class RenamedReader(CheckpointReader):
    """An open checkpoint that speaks the model's names."""

    def __init__(self, source: CheckpointReader, renaming: KeyMapping, where: str) -> None:
        """Keep an open checkpoint.

        Raises:
            CheckpointMismatchError: two of its names would become one, or some name is not there.
        """
        self.files = source.files
        self._source = source
        self._renaming = renaming
        self._here = renaming.table(source.manifest.names(), where)
        self._saved = {here: saved for saved, here in self._here.items()}
        self._describe()

    @property
    def changes_names(self) -> bool:
        """Whether any name of the checkpoint is another one in the model."""
        return any(saved != here for saved, here in self._here.items())

    def _describe(self) -> None:
        self.info = self._source.info
        self.manifest = _with_names(self._source.manifest, self._name)

    def _name(self, saved: str) -> str:
        return self._here.get(saved) or self._renaming.here(saved)

    def _saved_name(self, here: str) -> str:
        """Return a name as it was saved; one that was not is none of the checkpoint's."""
        if here in self._saved:
            return self._saved[here]
        return f"{here} (here)" if here in self._here else here

    def _as_saved(self, at: Named) -> Named:
        return replace(at, name=self._saved_name(at.name))

    def check_files(self) -> None:
        """Check that every file is there."""
        self._source.check_files()

    def bind(self, live: Manifest) -> None:
        """Bind the checkpoint to the model, under the names that it knows."""
        self._source.bind(_with_names(live, self._saved_name))
        self._describe()

    def bind_alone(self) -> None:
        """Bind the checkpoint to what it says itself."""
        self._source.bind_alone()
        self._describe()

    def names(self) -> Sequence[str]:
        """Return the files that belong to it."""
        return self._source.names()

    def recorded_bytes(self, name: str) -> int | None:
        """Return the size that one of its files had when it was written; None: nothing says."""
        return self._source.recorded_bytes(name)

    def verify_whole(self, rank: int, world_size: int, progress: Progress) -> None:
        """Verify this rank's share of all bytes."""
        self._source.verify_whole(rank, world_size, progress)

    def recorded_fingerprint(self) -> str:
        """Return the fingerprint that was recorded, under the names of the save."""
        return self._source.recorded_fingerprint()

    def trainer_entry(self, name: str) -> object:
        """Return an entry at the top of the trainer's state."""
        return self._source.trainer_entry(name)

    def verify(self, rank: int, world_size: int, progress: Progress) -> None:
        """Verify this rank's share."""
        self._source.verify(rank, world_size, progress)

    def layout_of(self, manifest: Manifest) -> Layout:
        """Return which files hold which elements of masters and optimizer state."""
        return self._source.layout_of(manifest)

    def frozen_layout_of(self, manifest: Manifest) -> Layout:
        """Return which files hold which elements of the frozen weights."""
        return self._source.frozen_layout_of(manifest)

    def check(self, masters: Sequence[int], frozen: Sequence[int]) -> None:
        """Check the files that are going to be read."""
        self._source.check(masters, frozen)

    def locate(self, key: str, transfer: Transfer) -> Location:
        """Return where a run lies."""
        return self._source.locate(key, self._as_saved(transfer))

    def locate_rounded(self, transfer: Transfer) -> Location | None:
        """Return where the low-precision weights of a run lie."""
        return self._source.locate_rounded(self._as_saved(transfer))

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        """Return the scalar optimizer states of the held flat buffer that holds ``at``."""
        return self._source.scalars(self._as_saved(at))

    def module_state(self, rank: int, world_size: int) -> SharedState:
        """Return what is held once; of the trainer's state, weights that lie in it are renamed."""
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

    def optimizer_state(self) -> Mapping[Any, Any] | None:
        """Return what the optimizer kept under keys that are not parameters."""
        return self._source.optimizer_state()

    def module_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the persistent module buffers."""
        return self._renamed(self._source.module_buffers())

    def _renamed(self, of: Mapping[str, Any]) -> dict[str, Any]:
        return {self._name(name): value for name, value in of.items()}


def _with_names(manifest: Manifest, named: Callable[[str], str]) -> Manifest:
    """Return a manifest whose parameters and buffers have other names."""

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


def open_checkpoint(
    path: Path, *, allow_pickle: bool = False, progress: Progress = NO_PROGRESS
) -> CheckpointReader:
    """Open the checkpoint at a path, whatever kind it is: recognised by what is in it.

    Args:
        path: a checkpoint's directory, or file.
        allow_pickle: read objects of any class from it; that can run code.
        progress: checked after every read, also of later calls: thousands of files take minutes.

    Raises:
        CheckpointNotFoundError: nothing is there, or the system does not let it be looked into.
        CheckpointFormatError: something is there, but no checkpoint that can be read.
        CheckpointCorruptedError: a checkpoint is there that is not whole.
        UnsupportedError: a checkpoint is there of a run that cannot be resumed.
    """
    try:
        return _opened(path, allow_pickle=allow_pickle, progress=progress)
    except OSError as error:
        if error.errno not in NO_ENTRY:
            raise  # It may pass: no older checkpoint is to take the place of this one.
        msg = (
            f"{path} cannot be read: the system says {error.strerror or error} of "
            f"{error.filename or path}. See the permissions of it and of the folders above it, and "
            "whether its disk is there"
        )
        raise CheckpointNotFoundError(msg) from error


def _opened(path: Path, *, allow_pickle: bool, progress: Progress) -> CheckpointReader:
    if not path.exists():
        dangling = (
            f" (a link to {path.readlink()}, which leads nowhere)" if path.is_symlink() else ""
        )
        msg = f"there is no checkpoint at {path}{dangling or describe_similar_paths(path)}"
        raise CheckpointNotFoundError(msg)
    manifest = _own_manifest(path)
    progress.check()
    if manifest is not None:
        return ElasticReader(path, manifest, allow_pickle=allow_pickle, progress=progress)
    return _foreign(path, FOREIGN_TREE.with_any_class(allow_pickle), progress)


def _own_manifest(path: Path) -> Manifest | None:
    """Return the manifest of a checkpoint of this library's; None where there is none."""
    manifest = path / MANIFEST_NAME
    try:
        # Bytes, and line ends left as they are: the digest is of all of them.
        text = read_file(manifest).decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{manifest} cannot be read ({error}): resume from another checkpoint"
        raise CheckpointFormatError(msg) from error
    _check_latest(path)
    return manifest_from_json(text, str(manifest))


def _check_latest(path: Path) -> None:
    """Refuse a checkpoint of ours into which DeepSpeed has saved a tag since.

    Raises:
        CheckpointFormatError: ``latest`` names that tag, so that it is unclear which one is meant.
    """
    try:
        named = read_file(path / LATEST).decode(errors="replace").strip()
    except OSError:
        return  # It stands for nothing else: the manifest says what is here.
    if named == TAG or not is_deepspeed(path / named):
        return
    msg = (
        f"{path} holds a checkpoint of this library, and one that DeepSpeed saved there later: "
        f"`{LATEST}` names the tag {named!r}. Pass {path / named} for that one; to load the other, "
        f"move {named} elsewhere and write {TAG} into {path / LATEST}"
    )
    raise CheckpointFormatError(msg)


def _foreign(path: Path, policy: PicklePolicy, progress: Progress) -> CheckpointReader:
    """Open a checkpoint that other software wrote.

    Raises:
        CheckpointFormatError: it is of no kind that is known.
    """
    files = partial(foreign_files, policy=policy, progress=progress)
    if path.is_dir():
        # DeepSpeed may have saved another tag into a checkpoint of ours: that is one by itself.
        if path.name == TAG and (path.parent / MANIFEST_NAME).is_file():
            msg = f"{path} is the inside of a checkpoint: pass {path.parent}"
            raise CheckpointFormatError(msg)
        if (path / TABLE_NAME).is_file():
            with as_format_error(path), closed_on_error(files(path)) as opened:
                return DumpsReader(opened)
        if folder := find_tag_folder(path):
            kind = UniversalReader if is_universal(folder) else ZeroReader
            with as_format_error(folder):
                tag = read_tag_folder(folder)
                with closed_on_error(files(folder, check_saved_name=check_saved_name)) as opened:
                    return kind(tag, opened)
        if is_dcp(path):
            # Imported here, as that takes a second.
            from lightning_elastic_zero.formats.dcp_read import DcpReader  # noqa: PLC0415

            with as_format_error(path), closed_on_error(files(path)) as opened:
                return DcpReader(opened, policy)
    else:
        with as_format_error(path), closed_on_error(files(path.parent)) as opened:
            return SingleFileReader(path, opened)
    why = (
        f"{describe_content(path)}. It is no checkpoint, or one that was never finished. A folder "
        "with dumps of optimizer.state_dict() becomes one by describe_dumps"
    )
    msg = (
        f"{path} has no {MANIFEST_NAME}, and is no checkpoint of another kind that is known: "
        f"{describe_checkpoints_in(path) or why}"
    )
    raise CheckpointFormatError(msg)
