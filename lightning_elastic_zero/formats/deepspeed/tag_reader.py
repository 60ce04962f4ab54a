"""Shared parts of the readers of a tag's folder: the model files of all ranks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from lightning_elastic_zero.errors import CheckpointCorruptedError
from lightning_elastic_zero.formats.deepspeed.model_file import ModelFile
from lightning_elastic_zero.formats.deepspeed.tag_folder import TagFolder
from lightning_elastic_zero.formats.open_files import ForeignFiles
from lightning_elastic_zero.formats.reader import (
    CheckpointReader,
    Location,
    SharedState,
    file_list_digest,
)
from lightning_elastic_zero.formats.torch_file import StoredRun
from lightning_elastic_zero.layout import Transfer
from lightning_elastic_zero.manifest import Group, Manifest, Parameter, Plain, Writer
from lightning_elastic_zero.partition import FlatBuffer, piece_start
from lightning_elastic_zero.tensor_state import dtype_name, precision_of

OTHERS_BUFFERS = "buffers of ranks other than 0"

NAME_IN_ZERO_1_2 = "mp_rank_00_model_states.pt"
"""The one model file below ZeRO-3."""


class TagReader(CheckpointReader):
    """A tag's folder: what of it is held beside masters and states.

    There is one ``mp_rank_00_model_states.pt`` in ZeRO-1/2, and one file for each rank in ZeRO-3.
    """

    def __init__(self, folder: TagFolder, files: ForeignFiles) -> None:
        """Parse rank 0's model file.

        Raises:
            CheckpointCorruptedError: it is missing.
        """
        self.files = files
        self._folder = folder
        self._partitioned = not folder.model
        """Whether the weights are partitioned (ZeRO-3)."""
        self._check_beginning()
        self._first = ModelFile(self.files, self._model_name(0))
        buffers = () if self._partitioned or not self._first.buffers else (OTHERS_BUFFERS,)
        self._lacks = ("RNG states", *buffers)
        """What these files do not hold of a run."""

    # -- which files -----------------------------------------------------------------------------

    def _check_beginning(self) -> None:
        """Check, before a model file is opened, what other files tell of them.

        Raises:
            CheckpointCorruptedError: some are missing.
        """

    def _model_name(self, rank: int) -> str:
        """Return the name of a rank's file.

        Raises:
            CheckpointCorruptedError: it is missing.
        """
        if self._folder.model:
            return self._folder.model
        if not self._folder.models:  # Nothing here tells of which stage it was.
            either = f"{NAME_IN_ZERO_1_2} (of ZeRO-1/2) or {_name_in_zero_3(rank)} (of ZeRO-3)"
            self._refuse_missing([either])
        if rank not in self._folder.models:
            self._refuse_missing([_name_in_zero_3(rank)])
        return self._folder.models[rank]

    def _model_names(self) -> list[str]:
        """Return the files of the ranks that wrote the checkpoint, missing ones too."""
        if self._folder.model:
            return [self._folder.model]
        return [_name_in_zero_3(rank) for rank in range(self._first.world_size)]

    def _refuse_missing(self, names: Sequence[str]) -> NoReturn:
        msg = (
            f"{self._folder.path} is incomplete: {', '.join(names)} "
            f"{'are' if len(names) > 1 else 'is'} missing. Copy all files of this tag, or resume "
            "from another checkpoint"
        )
        raise CheckpointCorruptedError(msg)

    def _check_model_files(self, others: Sequence[str] = ()) -> None:
        """Compare the ranks' files; refuse where one is missing, or ``others`` are.

        Raises:
            CheckpointCorruptedError: some are missing; all of them are named.
            CheckpointFormatError: one is of another run, or of another step.
        """
        names = self._model_names()
        there = {self._folder.model, *self._folder.models.values()}
        if missing := [*(name for name in names if name not in there), *others]:
            self._refuse_missing(missing)
        for name in names[1:]:
            self._first.check_same(ModelFile(self.files, name))

    # -- what is in them -------------------------------------------------------------------------

    def _describe(
        self,
        stage: int,
        master_dtype: torch.dtype,
        buffers: Sequence[FlatBuffer],
        groups: tuple[Group, ...],
        engine: str = "",
    ) -> Manifest:
        first = self._first
        owned = [
            (name, tuple(int(size) for size in shape), buffers[index].group)
            for index, shapes in enumerate(first.shapes)
            for name, shape in shapes.items()
        ]
        frozen = [(name, shape, None) for name, shape in first.frozen.items()]
        return Manifest(
            save_id=file_list_digest(self._folder.path, self.names(), self.files.on_progress),
            stage=stage,
            world_size=first.world_size,
            precision=precision_of(first.dtype),
            master_dtype=dtype_name(master_dtype),
            parameters=tuple(
                Parameter(name, shape, dtype_name(first.dtype_of(name)), group, first.aliases(name))
                for name, shape, group in (*owned, *frozen)
            ),
            groups=groups,
            buffers=tuple(buffers),
            module_buffers=first.buffers,
            files=(),
            progress=first.progress,
            writer=Writer(deepspeed=first.deepspeed, lightning=first.lightning, engine=engine),
        )

    def _locate_frozen(self, transfer: Transfer) -> Location:
        """Return where a run of a weight that no optimizer owns lies."""
        rank, start = transfer.source_rank, transfer.start
        file = self.files.get(self._model_name(rank))
        tensor = self._first.frozen_tensor(file.tree, transfer.name)
        if self._partitioned:
            whole = math.prod(self._first.frozen[transfer.name])
            start -= piece_start(whole, self._first.world_size, rank)
        return file, StoredRun(tensor, start, start + transfer.stop - transfer.start)

    def locate_rounded(self, transfer: Transfer) -> Location | None:
        """Return where low-precision weights lie: ZeRO-1/2 writes them whole, ZeRO-3 does not."""
        if self._partitioned or transfer.name in self._first.frozen:
            return None
        file = self.files.get(self._first.name)
        tensor = file.tree["module"].get(transfer.name)
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            return None
        return file, StoredRun(tensor, transfer.start, transfer.stop)

    def module_state(self, rank: int, world_size: int) -> SharedState:
        """Return buffers and the trainer's state; each rank its own where ranks match (ZeRO-3)."""
        same = self._partitioned and world_size == self._first.world_size
        model = ModelFile(self.files, self._model_name(rank)) if same else self._first
        return model.load_shared(self._loss_scaler())

    def module_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return rank 0's buffers."""
        name = self._first.name
        module = self.files.tree(name)["module"]
        return self.files.load(name, {n: module[n] for n in self._first.buffers})  # type: ignore[no-any-return]

    def trainer_entry(self, name: str) -> object:
        """Return an entry beside DeepSpeed's own, as Lightning has its epoch there."""
        found: object = self.files.tree(self._first.name).get(name)
        return found

    @abstractmethod
    def _loss_scaler(self) -> Mapping[str, Plain]:
        """Return the loss scale and what it follows."""


def _name_in_zero_3(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
