"""Files of ``torch.save`` from before it wrote zips: read whole, because they have no index."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    ElasticZeroError,
)
from lightning_elastic_zero.formats.safe_pickle.array_builders import LEGACY_MARK
from lightning_elastic_zero.formats.safe_pickle.policy import PicklePolicy
from lightning_elastic_zero.formats.safe_pickle.torch_unpickler import load_stream
from lightning_elastic_zero.formats.torch_file.reading import StoredRun
from lightning_elastic_zero.storage import (
    bounded_stream,
    ignore_bytes,
    ignore_progress,
    open_file,
)

ZIP_MARK = b"PK\x03\x04"


def is_legacy(path: Path) -> bool:
    """Whether a file is no zip, so that it cannot be read by ranges.

    Raises:
        CheckpointCorruptedError: it is missing, or cannot be read.
    """
    try:
        with os.fdopen(open_file(path)[0], "rb") as file:
            return file.read(len(ZIP_MARK)) != ZIP_MARK
    except OSError as error:
        msg = f"{path} cannot be read ({error.strerror}): resume from another checkpoint"
        raise CheckpointCorruptedError(msg) from error


def _check_beginning(first: bytes, path: Path) -> None:
    """Refuse what does not begin as such a file does.

    Raises:
        CheckpointFormatError: it is empty, or something else.
    """
    if first == LEGACY_MARK:
        return
    what = f"is no file of torch.save (it begins with {first!r})"
    if not first:
        what = "is empty: what wrote it was interrupted, or had no room on the disk"
    msg = f"{path} {what}. Resume from another checkpoint"
    raise CheckpointFormatError(msg)


class LegacyFile:
    """A file that is held in memory whole (``TorchFile``'s interface).

    Attributes:
        path: where the file is.
        tree: what was saved, with its tensors' values.
        bytes_read: the file's size.
        saved_as: nothing: these files do not say what they were called.
    """

    saved_as = ""

    def __init__(
        self, path: Path, policy: PicklePolicy, on_progress: Callable[[], None] = ignore_progress
    ) -> None:
        """Load a file.

        Args:
            path: where it is.
            policy: what its pickle may ask for.
            on_progress: called after every read.

        Raises:
            CheckpointFormatError: it is not of ``torch.save``, or damaged.
            UnsupportedError: it needs a class that the policy does not allow.
        """
        self.path = path
        self.bytes_read = path.stat().st_size
        try:
            with bounded_stream(path, on_progress) as stream:
                _check_beginning(stream.peek()[: len(LEGACY_MARK)], path)
                self.tree: Any = load_stream(stream, policy, path)
        except ElasticZeroError:
            raise  # a class that is refused, or another rank's failure meanwhile
        except Exception as error:
            # torch's own advice, to trust the file, is none here.
            why = f"{type(error).__name__}: {str(error).partition('Weights only load')[0]}"
            msg = (
                f"{path} cannot be read ({why}): it is no file of torch.save, or damaged. Resume "
                "from another checkpoint"
            )
            raise CheckpointFormatError(msg) from error

    def read_into(
        self,
        wanted: Iterable[tuple[torch.Tensor, StoredRun]],
        on_bytes: Callable[[int], None] = ignore_bytes,
    ) -> int:
        """Fill tensors with runs of the tree's ones; nothing more is read from disk."""
        for target, run in wanted:
            run.check_fills(target, self.path)
            found = run.tensor.detach().reshape(-1)[run.start : run.stop]
            target.detach().copy_(found)
            on_bytes(found.numel() * found.element_size())
        return 0

    def load_tree(self, subtree: Any) -> Any:  # noqa: ANN401 - whatever was saved
        """Return a part of the tree."""
        return subtree

    def verify(self, on_bytes: Callable[[int], None] = ignore_bytes) -> None:
        """Do nothing: such files keep no checksums."""

    def close(self) -> None:
        """Discard the tree."""
        self.tree = None
