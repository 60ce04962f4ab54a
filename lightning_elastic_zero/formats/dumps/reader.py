"""Reads hand-made dumps: each rank's ``optimizer.state_dict()``, and the model's state dict.

::

    folder/
    ├── elastic_dumps.json                        written by ``describe_dumps``
    ├── model.pt                                  ``model.state_dict()``, or DeepSpeed's 16-bit one
    └── optimizer.00.pt, optimizer.01.pt, ...     ``optimizer.state_dict()`` of each rank

The dumps are what DeepSpeed's own optimizer shards hold (``zero_shard_set``), without the model
file that names the parameters: ``elastic_dumps.json`` does it in its place. Masters are compared
with the model file's weights whenever they are read, so that a wrong table cannot restore anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_elastic_zero.errors import CheckpointFormatError
from lightning_elastic_zero.formats.deepspeed.class_stubs import stub_fields
from lightning_elastic_zero.formats.deepspeed.zero_shard_set import ZeroShardSet
from lightning_elastic_zero.formats.dumps.table import (
    DumpsTable,
    ParameterRow,
    find_tensor,
    read_table,
    state_dict_in,
)
from lightning_elastic_zero.formats.open_files import ForeignFiles
from lightning_elastic_zero.formats.reader import (
    WEIGHT,
    CheckpointReader,
    Location,
    SharedState,
    SourceInfo,
    file_list_digest,
)
from lightning_elastic_zero.formats.torch_file import StoredRun
from lightning_elastic_zero.layout import Fragment, Layout, Transfer
from lightning_elastic_zero.manifest import Manifest, Parameter, Writer
from lightning_elastic_zero.partition import frozen_partition
from lightning_elastic_zero.tensor_state import Scalar, dtype_name, precision_of

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
            save_id=file_list_digest(self.files.folder, self.names(), self.files.on_progress),
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
