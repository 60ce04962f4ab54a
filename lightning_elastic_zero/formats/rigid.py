"""Reads what stock DeepSpeed writes: ZeRO-1, 2, 3 and BF16_Optimizer, and its elastic variants.

The shapes and the order of the parameters are in the model file (``param_shapes``); masters and
optimizer state are flat buffers in the optimizer shards (``zero_shards``). Which files there are
is told by ``deepspeed_folder``. ``param_slice_mappings`` is not used: it is wrong on disk where
``round_robin_gradients`` was on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from lightning_elastic_zero.errors import CheckpointCorruptedError, CheckpointFormatError
from lightning_elastic_zero.formats.deepspeed_folder import DeepSpeedFolder
from lightning_elastic_zero.formats.deepspeed_model import ModelFile
from lightning_elastic_zero.formats.foreign import ForeignFiles, Held, identity_of
from lightning_elastic_zero.formats.names import OPTIMIZER
from lightning_elastic_zero.formats.reader import WEIGHT, Found, ModuleState
from lightning_elastic_zero.formats.stand_ins import loss_scaler_fields
from lightning_elastic_zero.formats.zero_shards import ZeroShards
from lightning_elastic_zero.layout import Fragment, Layout, Transfer
from lightning_elastic_zero.manifest import STAGE_WEIGHTS, Manifest, Parameter, Writer
from lightning_elastic_zero.partition import piece_numel, unpartitioned
from lightning_elastic_zero.state import Scalar, dtype_name

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}


class RigidSource:
    """A tag's folder of stock DeepSpeed (``Source``)."""

    def __init__(self, folder: DeepSpeedFolder, *, allow_pickle: bool = False) -> None:
        """Understand the folder from rank 0's files.

        Raises:
            CheckpointCorruptedError: files are missing.
            CheckpointFormatError: they are not of one save.
            UnsupportedError: the engine that wrote them cannot be resumed by this library.
        """
        self.files = ForeignFiles(folder.path, allow_pickle=allow_pickle)
        self._folder = folder
        self._model = ModelFile(self.files, self._model_name(0))
        self._shard_names = self._choose_shards()
        self._shards = ZeroShards(
            lambda rank: self.files.tree(self._shard_name(rank))[OPTIMIZER],
            lambda rank, part: self.files.load(self._shard_name(rank), part),
            self._model.shapes,
            self._model.world_size,
            str(folder.path),
        )
        self._check_stage()
        self.manifest = self._manifest()
        self.found = Found(self._kind(), self._lacks(), bool(self._hyperparameters()))
        self._frozen = unpartitioned(
            ((p.name, p.numel) for p in self.manifest.frozen),
            self._model.world_size if self._shards.stage == STAGE_WEIGHTS else 1,
        )

    # -- which files -----------------------------------------------------------------------------

    def _model_name(self, rank: int) -> str:
        """Give the name of a rank's model file.

        Raises:
            CheckpointCorruptedError: it is missing.
        """
        if self._folder.model:
            return self._folder.model
        if rank not in self._folder.models:
            self._refuse_missing([f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"])
        return self._folder.models[rank]

    def _choose_shards(self) -> Mapping[int, str]:
        """Give the optimizer shards by rank: of the precision that the model file has.

        Raises:
            CheckpointCorruptedError: there are none.
        """
        bf16 = self._model.dtype == torch.bfloat16
        kinds = self._folder.optimizer
        prefixes = [p for p in (("bf16_", "") if bf16 else ("", "fp16_")) if p in kinds]
        if not prefixes:
            self._refuse_missing(
                [f"{'bf16_' if bf16 else ''}zero_pp_rank_0_mp_rank_00_optim_states.pt"]
            )
        return kinds[prefixes[0]]

    def _shard_name(self, rank: int) -> str:
        if rank not in self._shard_names:
            self._refuse_missing([self._shard_names[0].replace("rank_0_", f"rank_{rank}_", 1)])
        return self._shard_names[rank]

    def _refuse_missing(self, names: Sequence[str]) -> NoReturn:
        msg = (
            f"{self._folder.path} is incomplete: {', '.join(names)} of {self._model_world()} "
            "is missing. Copy all files of this tag, or resume from another checkpoint"
        )
        raise CheckpointCorruptedError(msg)

    def _model_world(self) -> str:
        model = getattr(self, "_model", None)
        return f"{model.world_size} ranks" if model else "the ranks that wrote it"

    def names(self) -> Sequence[str]:
        """Give the files of all ranks; those of a larger, older world are not among them."""
        ranks = range(self._model.world_size)
        shards = [self._shard_name(rank) for rank in ranks]
        if self._folder.model:
            return [self._folder.model, *shards]
        return [*(self._model_name(rank) for rank in ranks), *shards]

    # -- what is in them -------------------------------------------------------------------------

    def _check_stage(self) -> None:
        zero_3 = self._shards.stage == STAGE_WEIGHTS
        if zero_3 == bool(self._folder.model):
            msg = (
                f"{self._folder.path}: {self._model.name} and {self._shard_names[0]} are not of "
                "one run: one is of ZeRO-3, the other of ZeRO-1/2. Remove the files of the run "
                "that you do not want"
            )
            raise CheckpointFormatError(msg)

    def _hyperparameters(self) -> bool:
        return any(group.hyperparameters for group in self.manifest.groups)

    def _kind(self) -> str:
        elastic = "elastic " if self._shards.elastic else ""
        return f"stock DeepSpeed checkpoint, {elastic}{self._shards.engine}"

    def _lacks(self) -> tuple[str, ...]:
        lacks = ["RNG states"]
        if not self._hyperparameters():
            lacks.append("hyperparameters of the parameter groups")
        if self._shards.stage != STAGE_WEIGHTS and self._model.buffers:
            lacks.append("buffers of ranks other than 0")
        return tuple(lacks)

    def _manifest(self) -> Manifest:
        shards, model = self._shards, self._model
        owned = [
            Parameter(
                name,
                tuple(int(size) for size in shape),
                dtype_name(model.dtype_of(name)),
                shards.group_of[index],
                model.aliases(name),
            )
            for index, shapes in enumerate(model.shapes)
            for name, shape in shapes.items()
        ]
        frozen = [
            Parameter(name, shape, dtype_name(model.dtype_of(name)), None, model.aliases(name))
            for name, shape in model.frozen.items()
        ]
        dtype = dtype_name(model.dtype)
        return Manifest(
            save_id=identity_of(self._folder.path, self.names()),
            stage=shards.stage,
            world_size=model.world_size,
            precision=PRECISIONS.get(dtype, "fp32"),
            master_dtype=dtype_name(shards.master_dtype),
            parameters=(*owned, *frozen),
            groups=shards.groups,
            buffers=shards.buffers,
            module_buffers=model.buffers,
            files=(),
            progress=model.progress,
            writer=Writer(
                deepspeed=model.deepspeed, lightning=model.lightning, engine=shards.engine
            ),
        )

    def layout(self) -> Layout:
        """Which rank's shard holds which elements of masters and optimizer state."""
        return self._shards.layout()

    def frozen_layout(self) -> Layout:
        """Which rank's model file holds which elements of the weights that no optimizer owns."""
        return self._frozen

    def meet(self, live: Manifest) -> None:
        """Learn nothing: the files name their parameters."""

    def check_all(self) -> None:
        """Check that every rank's files are there and of one save.

        Raises:
            CheckpointCorruptedError: some are missing; all of them are named.
            CheckpointFormatError: some are of another run.
        """
        ranks = range(self._model.world_size)
        first = self._shard_names[0] if 0 in self._shard_names else min(self._shard_names.values())
        missing = [
            first.replace("rank_0_", f"rank_{rank}_", 1)
            for rank in ranks
            if rank not in self._shard_names
        ]
        if not self._folder.model:
            missing += [
                f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
                for rank in ranks
                if rank not in self._folder.models
            ]
        if missing:
            self._refuse_missing(missing)
        for rank in ranks:
            self._shards.check(rank)
            if not self._folder.model:
                self._model.check_same(ModelFile(self.files, self._model_name(rank)))

    # -- where runs lie --------------------------------------------------------------------------

    def held(self, key: str, transfer: Transfer) -> Held:
        """Say where a run of masters, of a state or of a frozen weight lies."""
        rank = transfer.source_rank
        if key == WEIGHT and transfer.name in self._model.frozen:
            tensor = self.files.tree(self._model_name(rank))
            tensor = self._model.frozen_tensor(tensor, transfer.name)
            start = transfer.start
            if self._shards.stage == STAGE_WEIGHTS:
                start -= rank * piece_numel(self._numel(transfer.name), self._model.world_size)
            return Held(self._model_name(rank), tensor.view(-1), start)
        return Held(self._shard_name(rank), *self._shards.held(key, transfer))

    def _numel(self, name: str) -> int:
        numel = 1
        for size in self._model.frozen[name]:
            numel *= size
        return numel

    def rounded(self, transfer: Transfer) -> Held | None:
        """Say where low-precision weights lie: ZeRO-1/2 writes them whole, ZeRO-3 does not."""
        if self._shards.stage == STAGE_WEIGHTS or transfer.name in self._model.frozen:
            return None
        tensor = self.files.tree(self._model.name)["module"].get(transfer.name)
        return Held(self._model.name, tensor.view(-1), transfer.start) if _is(tensor) else None

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        """Give the scalar optimizer states of the flat buffer that holds ``at``."""
        return self._shards.scalars(at)

    def module_state(self, rank: int, world_size: int) -> ModuleState:
        """Give buffers and the trainer's state; each rank its own where ranks match (ZeRO-3)."""
        same = world_size == self._model.world_size and not self._folder.model
        name = self._model_name(rank if same else 0)
        model = ModelFile(self.files, name)
        shard = self.files.tree(self._shard_name(0))[OPTIMIZER]
        return ModuleState(
            buffers=model.load_buffers(),
            client_state=model.load_client_state(),
            loss_scaler=loss_scaler_fields(shard.get("loss_scaler")),
            lr_scheduler=model.load_scheduler(),
        )


def _is(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.numel() > 0
