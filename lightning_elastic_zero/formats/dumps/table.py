"""``elastic_dumps.json``: what hand-made dumps do not say of themselves, to and from JSON.

``describe_dumps`` writes it beside the dumps once it has found out, and checked, which parameter
lies where. It holds names, shapes and sizes of files, and no values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.reader import differing_sizes
from lightning_elastic_zero.json_records import from_json, load_json

TABLE_NAME = "elastic_dumps.json"
FORMAT = "lightning_elastic_zero.dumps"
FORMAT_VERSION = 1

WEIGHTS_UNDER = ("module", "model", "state_dict", "model_state_dict")
"""Where a model file may keep the module's state dict, if it is not the whole file."""


@dataclass(frozen=True, slots=True)
class SizedFile:
    """A file of the folder, as it was when the folder was described."""

    name: str
    """Relative to the folder, with forward slashes."""
    size_bytes: int

    def __post_init__(self) -> None:
        """Refuse a name that leads out of the folder.

        Raises:
            CheckpointFormatError: it does.
        """
        path = PurePosixPath(self.name)
        if path.is_absolute() or ".." in path.parts or not path.name or self.size_bytes < 0:
            msg = f"a folder of dumps cannot hold a file named {self.name!r}"
            raise CheckpointFormatError(msg)


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """A parameter."""

    name: str
    """As in ``named_parameters()``; the first name of a tied weight."""
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    """The other names of a tied weight."""

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class BufferRow:
    """A flat buffer of the dumps."""

    group: int
    """The optimizer's parameter group."""
    parameters: tuple[ParameterRow, ...]
    """In flat order."""


@dataclass(frozen=True, slots=True)
class DumpsTable:
    """What was found out about a folder of dumps."""

    dumps: tuple[SizedFile, ...]
    """``optimizer.state_dict()`` of each rank, by rank."""
    model: SizedFile
    """The model's state dict."""
    flats: tuple[BufferRow, ...]
    frozen: tuple[ParameterRow, ...]
    """What the optimizer does not own: frozen parameters, and those without elements."""
    module_buffers: tuple[str, ...]
    """Persistent buffers that the model file holds."""
    absent_buffers: tuple[str, ...]
    """Persistent buffers of the model that it does not hold."""
    library: str = ""
    torch: str = ""

    def to_json(self) -> str:
        """Return the text of the file, the same for the same content."""
        content = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    def check_sizes(self, folder: Path) -> None:
        """Refuse a folder in which files are missing, or are others than those described.

        Raises:
            CheckpointCorruptedError: with all that are.
        """
        files = (self.model, *self.dumps)
        if wrong := differing_sizes(folder, ((file.name, file.size_bytes) for file in files)):
            msg = (
                f"{folder} is not what {TABLE_NAME} describes: {', '.join(wrong)}. Put the "
                "files of one save back, or call describe_dumps again for those that are there"
            )
            raise CheckpointCorruptedError(msg)


def read_table(folder: Path) -> DumpsTable:
    """Read a folder's description.

    Raises:
        CheckpointFormatError: it is no JSON, of another format, newer than this reader, or lacks
            a field.
    """
    path = folder / TABLE_NAME
    try:
        content = load_json(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["format_version"] < 1:
            msg = f"the format {content['format']!r}, version {content['format_version']!r}"
            raise ValueError(msg)  # noqa: TRY301 (what else is wrong is told in the same words)
        newer = content["format_version"] > FORMAT_VERSION
        table = None if newer else from_json(DumpsTable, content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        msg = f"{path} cannot be read ({error!r}): call describe_dumps again"
        raise CheckpointFormatError(msg) from error
    if table is None:
        msg = (
            f"{path} has format version {content['format_version']}; this library reads up to "
            f"{FORMAT_VERSION}: install a newer lightning_elastic_zero"
        )
        raise CheckpointFormatError(msg)
    return table


def state_dict_in(tree: object, where: str) -> Mapping[str, Any]:
    """Return the state dict that a model file holds: some of its values are tensors.

    Raises:
        CheckpointFormatError: there is none in it.
    """
    if isinstance(tree, Mapping):
        inside = (tree.get(key) for key in WEIGHTS_UNDER)
        found = next((part for part in inside if isinstance(part, Mapping)), tree)
        if any(isinstance(value, torch.Tensor) for value in found.values()):
            return found
    msg = (
        f"{where} holds no state dict, neither as a whole nor under one of "
        f"{', '.join(WEIGHTS_UNDER)}: pass the file with model.state_dict()"
    )
    raise CheckpointFormatError(msg)


def find_tensor(names: Sequence[str], weights: Mapping[str, Any], where: str) -> torch.Tensor:
    """Return a model file's tensor: under the first of a tied weight's names that is there.

    Raises:
        CheckpointFormatError: it is not there.
        UnsupportedError: its elements do not lie one after the other.
    """
    found = next((weights[name] for name in names if name in weights), None)
    if not isinstance(found, torch.Tensor):
        msg = f"{where} does not hold {names[0]}: it is not the file that was described"
        raise CheckpointFormatError(msg)
    if not found.is_contiguous():
        msg = f"{where}: {names[0]} has the strides {found.stride()}: save it contiguous"
        raise UnsupportedError(msg)
    return found
