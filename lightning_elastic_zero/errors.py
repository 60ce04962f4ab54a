"""The exceptions of this library, as one tree.

::

    ElasticZeroError
    ├── UnsupportedError            this engine, model or option cannot be saved or resumed
    ├── CheckpointNotFoundError     no published checkpoint at that path;
    │                               also a FileNotFoundError
    ├── CheckpointFormatError       the path is not a readable checkpoint
    ├── CheckpointMismatchError     an intact checkpoint of another model, or an incomplete one
    ├── CheckpointCorruptedError    bytes differ from those that were written
    ├── SaveError                   a checkpoint could not be written; the last one is intact
    └── RanksError                  ranks failed, died, stalled, or are not in the same step

Every message gives the found value, the expected value and the remedy. An error of one rank is
raised on all ranks, as the same class, and names the failed ranks.
"""

from __future__ import annotations


class ElasticZeroError(Exception):
    """Base class of all exceptions of this library."""

    rank: int | None = None
    """This rank, if all ranks raise the same error at the same step; None: others may not."""


class UnsupportedError(ElasticZeroError):
    """The engine, model or option cannot be saved or resumed."""


class CheckpointNotFoundError(ElasticZeroError, FileNotFoundError):
    """There is no published checkpoint at the path. Also a ``FileNotFoundError``."""


class CheckpointFormatError(ElasticZeroError):
    """The path is not a readable checkpoint."""


class CheckpointMismatchError(ElasticZeroError):
    """The checkpoint is intact but belongs to another model, or lacks requested state."""


class CheckpointCorruptedError(ElasticZeroError):
    """The bytes on disk differ from those that were written."""


class SaveError(ElasticZeroError):
    """A checkpoint could not be written. The last published one is intact."""


class RanksError(ElasticZeroError):
    """Ranks failed, died, stalled, or are not in the same step."""


DAMAGE_ERRORS = (CheckpointCorruptedError, CheckpointFormatError, CheckpointNotFoundError)
"""Errors of a damaged checkpoint. If ranks raise different ones, all raise the first."""

_BY_NAME = {cls.__name__: cls for cls in ElasticZeroError.__subclasses__()}  # the ones above


def error_class(name: str) -> type[ElasticZeroError]:
    """Return the class of that name, ``RanksError`` for others, raised for another rank."""
    return _BY_NAME.get(name, RanksError)


def common_error(names: set[str]) -> str:
    """Return the class that all ranks raise when some raised these."""
    if len(names) > 1 and names <= {cls.__name__ for cls in DAMAGE_ERRORS}:
        return DAMAGE_ERRORS[0].__name__
    return names.pop() if len(names) == 1 else RanksError.__name__
