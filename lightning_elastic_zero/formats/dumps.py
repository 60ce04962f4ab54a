"""Reads hand-made dumps: each rank's ``optimizer.state_dict()``, and the model's state dict.

::

    folder/
    ├── elastic_dumps.json                        written by ``describe_dumps``
    ├── model.pt                                  ``model.state_dict()``, or DeepSpeed's 16-bit one
    └── optimizer.00.pt, optimizer.01.pt, ...     ``optimizer.state_dict()`` of each rank

The dumps are what DeepSpeed's own optimizer shards hold (``zero_shard_set``), without the model
file that names the parameters: ``elastic_dumps.json`` does it in its place. Masters are compared
with the model file's weights whenever they are read, so that a wrong table cannot restore anything.

``elastic_dumps.json``: what hand-made dumps do not say of themselves, to and from JSON.

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

from lightning_elastic_zero.core.layout import Fragment, Layout, Transfer
from lightning_elastic_zero.core.manifest import Manifest, Parameter, Writer, from_json, load_json
from lightning_elastic_zero.core.partition import frozen_partition
from lightning_elastic_zero.core.tensors import Scalar, dtype_name, precision_of
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.deepspeed_files import stub_fields
from lightning_elastic_zero.formats.deepspeed_shards import ZeroShardSet
from lightning_elastic_zero.formats.open_files import ForeignFiles
from lightning_elastic_zero.formats.reader import (
    WEIGHT,
    CheckpointReader,
    Location,
    SharedState,
    SourceInfo,
    differing_sizes,
    file_list_digest,
)
from lightning_elastic_zero.formats.torch_read import StoredRun

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


NOT_DUMPED = ("step counters", "the trainer's state", "RNG states", "buffers of ranks other than 0")
"""What ``optimizer.state_dict()`` and ``model.state_dict()`` never hold."""


class DumpsReader(CheckpointReader):
    """A described folder of dumps."""

    def __init__(self, files: ForeignFiles, table: DumpsTable | None = None) -> None:
        """Parse the folder.

        Args:
            files: the folder's.
            table: what is known of it; read from the folder where it is not passed.

        Raises:
            CheckpointCorruptedError: files are missing, or are not those that were described.
            CheckpointFormatError: they are not of one save, or the table is not theirs.
        """
        self.files = files
        self._table = table or read_table(files.folder)
        self._table.check_sizes(files.folder)
        self._shards = ZeroShardSet(
            files,
            self._dump,
            [{row.name: row.shape for row in flat.parameters} for flat in self._table.flats],
            len(self._table.dumps),
        )
        self._check_groups()
        self._names = {row.name: (row.name, *row.aliases) for row in self._rows()}
        self._unowned = {row.name for row in self._table.frozen}
        self.manifest = self._manifest()
        hyperparameters = any(group.hyperparameters for group in self.manifest.groups)
        self.info = SourceInfo(
            f"set of hand-made dumps of optimizer.state_dict(), {self._shards.engine}",
            self._lacks(hyperparameters=hyperparameters),
            hyperparameters=hyperparameters,
            has_counters=False,
        )

    def _dump(self, rank: int) -> str:
        return self._table.dumps[rank].name

    def _rows(self) -> Sequence[ParameterRow]:
        return [
            *(row for flat in self._table.flats for row in flat.parameters),
            *self._table.frozen,
        ]

    def _check_groups(self) -> None:
        described = tuple(flat.group for flat in self._table.flats)
        if self._shards.group_of != described:
            msg = (
                f"{self.files.folder}: the flat buffers are of the parameter groups "
                f"{self._shards.group_of}, expected {described}: call describe_dumps again"
            )
            raise CheckpointFormatError(msg)

    def _lacks(self, *, hyperparameters: bool) -> tuple[str, ...]:
        more = () if hyperparameters else ("hyperparameters of the parameter groups",)
        absent = self._table.absent_buffers
        return (*NOT_DUMPED, *more, *([f"the buffers {', '.join(absent)}"] if absent else []))

    def _manifest(self) -> Manifest:
        owned = [(row, flat.group) for flat in self._table.flats for row in flat.parameters]
        weights = self._weights()
        parameters = tuple(
            Parameter(
                name=row.name,
                shape=row.shape,
                dtype=dtype_name(self._tensor(row.name, weights).dtype),
                group=group,
                aliases=row.aliases,
            )
            for row, group in (*owned, *((row, None) for row in self._table.frozen))
        )
        rows = [row for row, _ in owned] or list(self._table.frozen)
        return Manifest(
            save_id=file_list_digest(self.files.folder, self.names(), self.files.progress),
            stage=self._shards.stage,
            world_size=self._shards.world_size,
            precision=precision_of(self._tensor(rows[0].name, weights).dtype),
            master_dtype=dtype_name(self._shards.master_dtype),
            parameters=parameters,
            groups=self._shards.groups,
            buffers=self._shards.buffers,
            module_buffers=self._table.module_buffers,
            files=(),
            writer=Writer(
                deepspeed=str(self.files.tree(self._dump(0)).get("ds_version") or ""),
                engine=self._shards.engine,
            ),
        )

    # -- CheckpointReader ------------------------------------------------------------------------

    def names(self) -> Sequence[str]:
        """Return the files that belong to it, relative to its folder."""
        return [self._table.model.name, *(file.name for file in self._table.dumps)]

    def frozen_layout_of(self, manifest: Manifest) -> Layout:
        """Return where weights that no optimizer owns are: whole, in the model file."""
        return frozen_partition(((p.name, p.numel) for p in manifest.frozen), 1)

    def check_files(self) -> None:
        """Check on one rank that the dumps are of one run and of one step.

        Raises:
            CheckpointFormatError: they are not.
        """
        self._shards.check_all()

    def locate(self, key: str, transfer: Transfer) -> Location:
        """Return where a run of masters, of a state or of a frozen weight lies."""
        if key == WEIGHT and transfer.name in self._unowned:
            return self._low(transfer)
        file = self.files.get(self._dump(transfer.source_rank))
        return file, self._shards.locate(key, transfer)

    def locate_rounded(self, transfer: Transfer) -> Location | None:
        """Return where the weights of a run of masters lie in the model file."""
        return None if transfer.name in self._unowned else self._low(transfer)

    def _low(self, transfer: Transfer) -> Location:
        tensor = self._tensor(transfer.name, self._weights())
        file = self.files.get(self._table.model.name)
        return file, StoredRun(tensor.view(-1), transfer.start, transfer.stop)

    def _weights(self) -> Mapping[str, Any]:
        name = self._table.model.name
        return state_dict_in(self.files.tree(name), str(self.files.folder / name))

    def _tensor(self, name: str, weights: Mapping[str, Any]) -> torch.Tensor:
        return find_tensor(
            self._names[name], weights, str(self.files.folder / self._table.model.name)
        )

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        """Return the scalar optimizer states of the flat buffer that holds ``at``."""
        return self._shards.scalars(at)

    def module_state(self, rank: int, world_size: int) -> SharedState:  # noqa: ARG002 (all have one)
        """Return the buffers of the model file, and the loss scale; there is no trainer's state."""
        weights, model = self._weights(), self._table.model.name
        where = str(self.files.folder / model)
        shard: Mapping[str, Any] = self.files.tree(self._dump(0))
        buffers = {n: find_tensor((n,), weights, where) for n in self._table.module_buffers}
        return SharedState(
            buffers=self.files.load(model, buffers),
            client_state={},
            loss_scaler=stub_fields(shard.get("loss_scaler")),
            lr_scheduler=None,
        )
