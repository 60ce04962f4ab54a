"""The model files of all ranks of a DeepSpeed save: what is held beside masters and states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from lightning_elastic_zero.errors import CheckpointCorruptedError
from lightning_elastic_zero.formats.deepspeed.model_file import ModelFile
from lightning_elastic_zero.formats.deepspeed.tag_folder import TagFolder
from lightning_elastic_zero.formats.open_files import ForeignFiles
from lightning_elastic_zero.formats.reader import Location, SharedState
from lightning_elastic_zero.formats.torch_file import StoredRun
from lightning_elastic_zero.layout import Transfer
from lightning_elastic_zero.manifest import Parameter, Plain
from lightning_elastic_zero.partition import piece_numel
from lightning_elastic_zero.tensor_state import dtype_name


class ModelFileSet:
    """One ``mp_rank_00_model_states.pt`` in ZeRO-1/2, one file for each rank in ZeRO-3."""

    def __init__(self, files: ForeignFiles, folder: TagFolder) -> None:
        """Keep the files of a tag's folder, and understand rank 0's.

        Raises:
            CheckpointCorruptedError: it is missing.
        """
        self._files = files
        self._folder = folder
        self.partitioned = not folder.model
        """Whether the weights are partitioned (ZeRO-3)."""
        self.first = ModelFile(files, self.name(0))

    def name(self, rank: int) -> str:
        """Return the name of a rank's file.

        Raises:
            CheckpointCorruptedError: it is missing.
        """
        if self._folder.model:
            return self._folder.model
        if rank not in self._folder.models:
            self.refuse_missing([_model_name(rank)])
        return self._folder.models[rank]

    def names(self) -> list[str]:
        """Return the files of the ranks that wrote the checkpoint, missing ones too."""
        if self._folder.model:
            return [self._folder.model]
        return [_model_name(rank) for rank in range(self.first.world_size)]

    def missing(self) -> list[str]:
        """Return the names of files that should be there."""
        if self._folder.model:
            return []
        ranks = range(self.first.world_size)
        return [_model_name(rank) for rank in ranks if rank not in self._folder.models]

    def refuse_missing(self, names: Sequence[str]) -> NoReturn:
        """Refuse an incomplete folder.

        Raises:
            CheckpointCorruptedError: always.
        """
        msg = (
            f"{self._folder.path} is incomplete: {', '.join(names)} "
            f"{'are' if len(names) > 1 else 'is'} missing. Copy all files of this tag, or resume "
            "from another checkpoint"
        )
        raise CheckpointCorruptedError(msg)

    def check_same(self) -> None:
        """Compare the ranks' files.

        Raises:
            CheckpointFormatError: one is of another run, or of another step.
        """
        for name in self.names()[1:]:
            self.first.check_same(ModelFile(self._files, name))

    def parameters(self, group_of: Sequence[int]) -> tuple[Parameter, ...]:
        """Return the parameter table.

        Args:
            group_of: the parameter group of each flat buffer.
        """
        first = self.first
        owned = [
            (name, tuple(int(size) for size in shape), group_of[index])
            for index, shapes in enumerate(first.shapes)
            for name, shape in shapes.items()
        ]
        frozen = [(name, shape, None) for name, shape in first.frozen.items()]
        return tuple(
            Parameter(name, shape, dtype_name(first.dtype_of(name)), group, first.aliases(name))
            for name, shape, group in (*owned, *frozen)
        )

    def locate_frozen(self, transfer: Transfer) -> Location:
        """Return where a run of a weight that no optimizer owns lies."""
        rank, start = transfer.source_rank, transfer.start
        file = self._files.get(self.name(rank))
        tensor = self.first.frozen_tensor(file.tree, transfer.name)
        if self.partitioned:
            whole = math.prod(self.first.frozen[transfer.name])
            start -= rank * piece_numel(whole, self.first.world_size)
        return file, StoredRun(tensor.view(-1), start, start + transfer.stop - transfer.start)

    def locate_rounded(self, transfer: Transfer) -> Location | None:
        """Return where low-precision weights lie: ZeRO-1/2 writes them whole, ZeRO-3 does not."""
        if self.partitioned or transfer.name in self.first.frozen:
            return None
        file = self._files.get(self.first.name)
        tensor = file.tree["module"].get(transfer.name)
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            return None
        return file, StoredRun(tensor.view(-1), transfer.start, transfer.stop)

    def module_state(
        self, rank: int, world_size: int, loss_scaler: Mapping[str, Plain]
    ) -> SharedState:
        """Return buffers and the trainer's state; each rank its own where ranks match (ZeRO-3)."""
        same = self.partitioned and world_size == self.first.world_size
        model = ModelFile(self._files, self.name(rank)) if same else self.first
        return SharedState(
            buffers=model.load_buffers(),
            client_state=model.load_client_state(),
            loss_scaler=loss_scaler,
            lr_scheduler=model.load_scheduler(),
        )

    def lacks(self) -> tuple[str, ...]:
        """Describe what these files do not hold of a run."""
        buffers = () if self.partitioned or not self.first.buffers else (OTHERS_BUFFERS,)
        return ("RNG states", *buffers)


OTHERS_BUFFERS = "buffers of ranks other than 0"


def _model_name(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
