"""Objects in the trainer's state that are not plain data: read only when harmless, or allowed."""

from __future__ import annotations

import io
import pickle

from lightning_elastic_zero.errors import CheckpointFormatError, UnsupportedError

HARMLESS = frozenset(
    {
        *(f"builtins.{n}" for n in ("bytearray", "complex", "frozenset", "range", "set", "slice")),
        *(f"collections.{n}" for n in ("Counter", "OrderedDict", "defaultdict", "deque")),
        *(f"datetime.{n}" for n in ("date", "datetime", "time", "timedelta", "timezone")),
        *(f"pathlib.{n}" for n in ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")),
        "argparse.Namespace",
        "decimal.Decimal",
        "fractions.Fraction",
        "types.SimpleNamespace",
        "uuid.UUID",
        "numpy.dtype",
        "numpy.ndarray",
        *(
            f"numpy.{core}.multiarray.{n}"
            for core in ("core", "_core")
            for n in ("_reconstruct", "scalar")
        ),
    }
)
"""Globals that rebuild a value and run no code of anyone else's. Exact names, never modules."""


def load_objects(data: bytes, where: str, *, allow_pickle: bool) -> object:
    """Unpickle the objects of a client state.

    Args:
        data: the pickle.
        where: the file and the places in the client state, for messages.
        allow_pickle: build whatever class it holds; that can run code from the checkpoint.

    Raises:
        UnsupportedError: it needs a class that is not known to be harmless and was not allowed.
        CheckpointFormatError: it needs a class that cannot be imported here.
    """
    try:
        return _Unpickler(data, where, allow_pickle=allow_pickle).load()
    except (ImportError, AttributeError) as error:
        msg = f"{where}: an object cannot be built here ({error}): make its class importable"
        raise CheckpointFormatError(msg) from error


class _Unpickler(pickle.Unpickler):
    """Builds the listed classes only, unless all are allowed."""

    def __init__(self, data: bytes, where: str, *, allow_pickle: bool) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where
        self._allow_pickle = allow_pickle

    def find_class(self, module: str, name: str) -> object:
        """Give a global that the pickle asks for.

        Raises:
            UnsupportedError: it is not listed, and not everything is allowed.
        """
        if self._allow_pickle or f"{module}.{name}" in HARMLESS:
            return super().find_class(module, name)
        msg = (
            f"{self._where}: the trainer's state holds a Python object of {module}.{name}. "
            "Building it can run code. If you trust this checkpoint, pass allow_pickle=True (to "
            "ElasticDeepSpeedStrategy, or to load_checkpoint)"
        )
        raise UnsupportedError(msg)
