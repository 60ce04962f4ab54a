"""One module per on-disk format; ``open_checkpoint`` recognises them by content."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from lightning_elastic_zero.errors import CheckpointFormatError, CheckpointNotFoundError
from lightning_elastic_zero.formats.dcp.detection import is_dcp
from lightning_elastic_zero.formats.deepspeed.tag_folder import (
    check_saved_name,
    find_tag_folder,
    is_deepspeed,
    is_universal,
    read_tag_folder,
)
from lightning_elastic_zero.formats.deepspeed.universal_reader import UniversalReader
from lightning_elastic_zero.formats.deepspeed.zero_reader import ZeroReader
from lightning_elastic_zero.formats.dumps.reader import DumpsReader
from lightning_elastic_zero.formats.dumps.table import TABLE_NAME
from lightning_elastic_zero.formats.elastic.reader import ElasticReader
from lightning_elastic_zero.formats.full_state.single_file import SingleFileReader
from lightning_elastic_zero.formats.open_files import closed_on_error, foreign_files
from lightning_elastic_zero.formats.path_suggestions import (
    describe_checkpoints_in,
    describe_content,
    describe_similar_paths,
)
from lightning_elastic_zero.formats.reader import (
    EXTRA_STATES,
    OPTIMIZER_STATE,
    WEIGHT,
    CheckpointReader,
    SharedState,
    SourceInfo,
    Targets,
    as_format_error,
)
from lightning_elastic_zero.formats.renamed_reader import RenamedReader
from lightning_elastic_zero.formats.safe_pickle.policy import FOREIGN_TREE, PicklePolicy
from lightning_elastic_zero.manifest import MANIFEST_NAME, Manifest, manifest_from_json
from lightning_elastic_zero.storage import ignore_progress, read_file
from lightning_elastic_zero.storage.file_ownership import LATEST, TAG
from lightning_elastic_zero.storage.paths import NO_ENTRY

__all__ = [
    "EXTRA_STATES",
    "OPTIMIZER_STATE",
    "WEIGHT",
    "CheckpointReader",
    "RenamedReader",
    "SharedState",
    "SourceInfo",
    "Targets",
    "open_checkpoint",
]


def open_checkpoint(
    path: Path, *, allow_pickle: bool = False, on_progress: Callable[[], None] = ignore_progress
) -> CheckpointReader:
    """Open the checkpoint at a path, whatever kind it is: recognised by what is in it.

    Args:
        path: a checkpoint's directory, or file.
        allow_pickle: read objects of any class from it; that can run code.
        on_progress: called after every read, now and later: thousands of files take minutes.

    Raises:
        CheckpointNotFoundError: nothing is there, or the system does not let it be looked into.
        CheckpointFormatError: something is there, but no checkpoint that can be read.
        CheckpointCorruptedError: a checkpoint is there that is not whole.
        UnsupportedError: a checkpoint is there of a run that cannot be resumed.
    """
    try:
        return _opened(path, allow_pickle=allow_pickle, on_progress=on_progress)
    except OSError as error:
        if error.errno not in NO_ENTRY:
            raise  # It may pass: no older checkpoint is to take the place of this one.
        msg = (
            f"{path} cannot be read: the system says {error.strerror or error} of "
            f"{error.filename or path}. See the permissions of it and of the folders above it, and "
            "whether its disk is there"
        )
        raise CheckpointNotFoundError(msg) from error


def _opened(path: Path, *, allow_pickle: bool, on_progress: Callable[[], None]) -> CheckpointReader:
    if not path.exists():
        dangling = (
            f" (a link to {path.readlink()}, which leads nowhere)" if path.is_symlink() else ""
        )
        msg = f"there is no checkpoint at {path}{dangling or describe_similar_paths(path)}"
        raise CheckpointNotFoundError(msg)
    manifest = _own_manifest(path)
    on_progress()
    if manifest is not None:
        return ElasticReader(path, manifest, allow_pickle=allow_pickle, on_progress=on_progress)
    return _foreign(path, FOREIGN_TREE.with_any_class(allow_pickle), on_progress)


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


def _foreign(path: Path, policy: PicklePolicy, on_progress: Callable[[], None]) -> CheckpointReader:
    """Open a checkpoint that other software wrote.

    Raises:
        CheckpointFormatError: it is of no kind that is known.
    """
    files = partial(foreign_files, policy=policy, on_progress=on_progress)
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
            from lightning_elastic_zero.formats.dcp.reader import DcpReader  # noqa: PLC0415

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
