"""The exceptions of this library, as one tree.

::

    ElasticZeroError
    ├── UnsupportedError            this engine, model or option cannot be saved or resumed
    ├── CheckpointNotFoundError     there is no published checkpoint at that path;
    │                               also a FileNotFoundError
    ├── CheckpointFormatError       something is there, but it is no checkpoint that can be read
    ├── CheckpointMismatchError     a sound checkpoint of another model, or one that lacks something
    ├── CheckpointCorruptedError    bytes are not those that were written
    ├── SaveError                   a checkpoint could not be written; the last one is intact
    └── RanksError                  ranks failed, died, stalled, or are not in the same step

Every message says what was found, what was wanted and what helps. An error that one rank meets
is raised on all ranks, as the same class, with the failing ranks named.
"""

from __future__ import annotations


class ElasticZeroError(Exception):
    """The root: everything that this library raises on purpose."""


class UnsupportedError(ElasticZeroError):
    """This engine, model or option cannot be saved or resumed by the library."""


class CheckpointNotFoundError(ElasticZeroError, FileNotFoundError):
    """There is no published checkpoint at the path; Lightning raises a ``FileNotFoundError``."""


class CheckpointFormatError(ElasticZeroError):
    """Something is at the path, but it is no checkpoint that can be read."""


class CheckpointMismatchError(ElasticZeroError):
    """The checkpoint is sound but belongs to another model, or lacks what is asked of it."""


class CheckpointCorruptedError(ElasticZeroError):
    """The bytes on disk are not those that were written."""


class SaveError(ElasticZeroError):
    """A checkpoint could not be written; the last published one is intact."""


class RanksError(ElasticZeroError):
    """Ranks failed, died, stalled, or are not in the same step."""


_BY_NAME = {cls.__name__: cls for cls in ElasticZeroError.__subclasses__()}  # the ones above


def error_class(name: str) -> type[ElasticZeroError]:
    """Return the class of that name, ``RanksError`` for others, raised for another rank."""
    return _BY_NAME.get(name, RanksError)
