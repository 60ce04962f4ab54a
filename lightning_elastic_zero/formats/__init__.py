"""One module per on-disk format; ``open_checkpoint`` recognises them by content."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from lightning_elastic_zero.errors import CheckpointFormatError, CheckpointNotFoundError
from lightning_elastic_zero.formats.deepspeed_folder import is_deepspeed, read_folder, tag_folder
from lightning_elastic_zero.formats.dumps import DumpsSource
from lightning_elastic_zero.formats.dumps_table import TABLE_NAME
from lightning_elastic_zero.formats.elastic_read import ElasticReader
from lightning_elastic_zero.formats.foreign import ForeignReader, understanding
from lightning_elastic_zero.formats.names import LATEST, TAG
from lightning_elastic_zero.formats.nearby import those_in, those_like
from lightning_elastic_zero.formats.reader import (
    WEIGHT,
    CheckpointReader,
    Found,
    ModuleState,
    ReadRequest,
)
from lightning_elastic_zero.formats.renamed import RenamedCheckpoint
from lightning_elastic_zero.formats.rigid import RigidSource
from lightning_elastic_zero.formats.single_file import SingleFileSource
from lightning_elastic_zero.formats.torch_folder import is_sharded
from lightning_elastic_zero.formats.universal import UniversalSource, is_universal
from lightning_elastic_zero.manifest import MANIFEST_NAME, manifest_from_json
from lightning_elastic_zero.storage import no_work, read_file

__all__ = [
    "WEIGHT",
    "CheckpointReader",
    "Found",
    "ModuleState",
    "ReadRequest",
    "RenamedCheckpoint",
    "open_checkpoint",
]


def open_checkpoint(
    path: Path, *, allow_pickle: bool = False, on_work: Callable[[], None] = no_work
) -> CheckpointReader:
    """Open the checkpoint at a path, whatever kind it is: recognised by what is in it.

    Args:
        path: a checkpoint's directory, or file.
        allow_pickle: read objects of any class from it; that can run code.
        on_work: called after every read, now and later: thousands of files take minutes.

    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointFormatError: something is there, but no checkpoint that can be read.
        CheckpointCorruptedError: a checkpoint is there that is not whole.
        UnsupportedError: a checkpoint is there of a run that cannot be resumed.
    """
    if not path.exists():
        dangling = f" (a link to {path.readlink()}, which is gone)" if path.is_symlink() else ""
        msg = f"there is no checkpoint at {path}{dangling or those_like(path)}"
        raise CheckpointNotFoundError(msg)
    options: _Options = {"allow_pickle": allow_pickle, "on_work": on_work}
    own = _own(path, options)
    on_work()
    return own or _foreign(path, options)


class _Options(TypedDict):
    allow_pickle: bool
    on_work: Callable[[], None]


def _own(path: Path, options: _Options) -> ElasticReader | None:
    """Open a checkpoint of this library's, or give None where there is no manifest."""
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
    return ElasticReader(path, manifest_from_json(text, str(manifest)), **options)


def _check_latest(path: Path) -> None:
    """Refuse a checkpoint of ours into which DeepSpeed has saved a tag since.

    Raises:
        CheckpointFormatError: ``latest`` names that tag, so that it is unclear which one is meant.
    """
    try:
        named = (path / LATEST).read_text(encoding="utf-8", errors="replace").strip()
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


def _foreign(path: Path, options: _Options) -> CheckpointReader:
    """Open a checkpoint that other software wrote.

    Raises:
        CheckpointFormatError: it is of no kind that is known.
    """
    if path.is_dir():
        # DeepSpeed may have saved another tag into a checkpoint of ours: that is one by itself.
        if path.name == TAG and (path.parent / MANIFEST_NAME).is_file():
            msg = f"{path} is the inside of a checkpoint: pass {path.parent}"
            raise CheckpointFormatError(msg)
        if (path / TABLE_NAME).is_file():
            with understanding(path):
                return ForeignReader(DumpsSource(path, **options))
        if folder := tag_folder(path):
            kind = UniversalSource if is_universal(folder) else RigidSource
            with understanding(folder):
                return ForeignReader(kind(read_folder(folder), **options))
        if is_sharded(path):
            with understanding(path):
                return _sharded(path, options)
    else:
        with understanding(path):
            return ForeignReader(SingleFileSource(path, **options))
    why = (
        "it is no checkpoint, or one that was never finished. A folder with dumps of "
        "optimizer.state_dict() becomes one by describe_dumps"
    )
    msg = (
        f"{path} has no {MANIFEST_NAME}, and is no checkpoint of another kind that is known: "
        f"{those_in(path) or why}"
    )
    raise CheckpointFormatError(msg)


def _sharded(path: Path, options: _Options) -> CheckpointReader:
    """Open a directory of ``torch.distributed.checkpoint``, which takes a second to import."""
    from lightning_elastic_zero.formats.sharded import ShardedReader  # noqa: PLC0415 (see above)

    return ShardedReader(path, **options)
