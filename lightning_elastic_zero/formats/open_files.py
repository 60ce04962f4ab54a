"""The files of a checkpoint, opened when they are needed; a few are kept open."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.formats.pickles import FOREIGN_TREE, PicklePolicy
from lightning_elastic_zero.formats.torch_read import LegacyFile, TorchFile, is_legacy
from lightning_elastic_zero.storage.files import RangeFile
from lightning_elastic_zero.storage.stores import AnyPath

MAX_OPEN = 4
"""Files kept open at once: a rank's runs of most parameters lie in the same two or three."""

MAX_WHOLE = 2
"""The same where one is held in memory whole: those must not pile up."""

F = TypeVar("F", TorchFile, "TorchFile | LegacyFile")
P = TypeVar("P", bound=AnyPath)


class OpenFiles(Generic[F, P]):
    """Files by their names; the one that was used longest ago is closed.

    Attributes:
        folder: what names are relative to.
        progress: checked after every read: a first look at thousands of files takes minutes.
    """

    def __init__(
        self,
        folder: P,
        open_file: Callable[[str], F],
        *,
        limit: int = MAX_OPEN,
        progress: Progress = NO_PROGRESS,
    ) -> None:
        self.folder: P = folder
        self.progress = progress
        self._open_file: Callable[[str], F] = open_file
        self._limit = limit
        self._open: OrderedDict[str, F] = OrderedDict()

    def keep_open(self, limit: int) -> None:
        """Keep so many files open, for whoever goes to and fro between those of many ranks."""
        self._limit = limit

    def get(self, name: str) -> F:
        """Return a file, opened where it is not open."""
        if name not in self._open:
            file = self._open[name] = self._open_file(name)
            limit = MAX_WHOLE if isinstance(file, LegacyFile) else self._limit
            while len(self._open) > limit:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(name)
        return self._open[name]

    def tree(self, name: str) -> Any:
        """Return what a file holds; its tensors are on the meta device."""
        return self.get(name).tree

    def load(self, name: str, subtree: Any) -> Any:
        """Return a part of a file's tree with its values."""
        return self.get(name).load_tree(subtree)

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()


ForeignFiles = OpenFiles["TorchFile | LegacyFile", Path]
"""Files of ``torch.save`` that other software wrote."""


def _any_name(path: Path, saved_as: str) -> None:
    """Accept a file whatever it was called when it was saved."""


def foreign_files(
    folder: Path,
    policy: PicklePolicy = FOREIGN_TREE,
    *,
    limit: int = MAX_OPEN,
    progress: Progress = NO_PROGRESS,
    check_saved_name: Callable[[Path, str], None] = _any_name,
) -> ForeignFiles:
    """Return the files of ``torch.save`` in a folder.

    Args:
        folder: the checkpoint's own.
        policy: what their pickles may ask for.
        limit: how many are kept open at once.
        progress: checked after every read.
        check_saved_name: called with each file that is opened, and the name under which it was
            saved.
    """

    def open_file(name: str) -> TorchFile | LegacyFile:
        path = folder / name
        legacy = is_legacy(path)
        progress.check()
        file: TorchFile | LegacyFile = (
            LegacyFile(path, policy, progress)
            if legacy
            else TorchFile(RangeFile(path, progress), policy)
        )
        try:
            check_saved_name(path, file.saved_as)
        except BaseException:
            file.close()
            raise
        return file

    return OpenFiles(folder, open_file, limit=limit, progress=progress)


@contextmanager
def closed_on_error(files: ForeignFiles) -> Iterator[ForeignFiles]:
    """Close files where a reader that is made of them fails: nobody else has them then."""
    try:
        yield files
    except BaseException:
        files.close()
        raise
