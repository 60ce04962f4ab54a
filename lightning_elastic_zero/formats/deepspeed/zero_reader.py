"""Reads what stock DeepSpeed writes: ZeRO-1, 2, 3 and BF16_Optimizer, and its elastic variants.

The shapes and the order of the parameters are in the model file (``param_shapes``); masters and
optimizer state are flat buffers in the optimizer shards (``zero_shards``). Which files there are
is told by ``deepspeed_folder``. ``param_slice_mappings`` is not used: it is wrong on disk where
``round_robin_gradients`` was on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from lightning_elastic_zero.errors import CheckpointFormatError
from lightning_elastic_zero.formats.deepspeed.class_stubs import loss_scaler_fields
from lightning_elastic_zero.formats.deepspeed.constants import OPTIMIZER
from lightning_elastic_zero.formats.deepspeed.model_file_set import ModelFileSet
from lightning_elastic_zero.formats.deepspeed.tag_folder import TagFolder, check_saved_name
from lightning_elastic_zero.formats.deepspeed.zero_shard_set import ZeroShardSet
from lightning_elastic_zero.formats.full_state.torch_optimizer import (
    FRESH_OPTIMIZER_HINT,
    format_names,
)
from lightning_elastic_zero.formats.open_files import foreign_files
from lightning_elastic_zero.formats.reader import (
    WEIGHT,
    CheckpointReader,
    Location,
    SharedState,
    SourceInfo,
    file_list_digest,
)
from lightning_elastic_zero.layout import Fragment, Transfer
from lightning_elastic_zero.manifest import STAGE_WEIGHTS, Manifest, Writer
from lightning_elastic_zero.storage import ignore_progress
from lightning_elastic_zero.tensor_state import Scalar, dtype_name, precision_of


class ZeroReader(CheckpointReader):
    """A tag's folder of stock DeepSpeed."""

    def __init__(
        self,
        folder: TagFolder,
        *,
        allow_pickle: bool = False,
        on_progress: Callable[[], None] = ignore_progress,
    ) -> None:
        """Understand the folder from rank 0's files.

        Raises:
            CheckpointCorruptedError: files are missing.
            CheckpointFormatError: they are not of one save.
            UnsupportedError: the engine that wrote them cannot be resumed by this library.
        """
        self.files = foreign_files(
            folder.path,
            allow_pickle=allow_pickle,
            on_progress=on_progress,
            check_saved_name=check_saved_name,
        )
        self._folder = folder
        self._models = ModelFileSet(self.files, folder)
        first = self._models.first
        self._shard_names = self._choose_shards()
        self._shards = ZeroShardSet(
            lambda rank: self.files.tree(self._shard_name(rank))[OPTIMIZER],
            lambda rank, part: self.files.load(self._shard_name(rank), part),
            first.shapes,
            first.world_size,
            str(folder.path),
            self._shard_name,
        )
        self._check_stage()
        self.manifest = self._manifest()
        hyperparameters = any(group.hyperparameters for group in self.manifest.groups)
        lacks = () if hyperparameters else ("hyperparameters of the parameter groups",)
        self.found = SourceInfo(
            self._kind(),
            (*self._models.lacks(), *lacks),
            hyperparameters,
            mixed=self._mixed(),
            unmatched=self._unmatched(),
        )

    # -- which files -----------------------------------------------------------------------------

    def _choose_shards(self) -> Mapping[int, str]:
        """Return the optimizer shards by rank: of the precision that the model file has.

        Raises:
            CheckpointCorruptedError: there are none.
        """
        bf16 = self._models.first.dtype == torch.bfloat16
        kinds = self._folder.optimizer
        prefixes = [p for p in (("bf16_", "") if bf16 else ("", "fp16_")) if p in kinds]
        if not prefixes:
            prefix = "bf16_" if bf16 else ""
            self._models.refuse_missing([f"{prefix}zero_pp_rank_0_mp_rank_00_optim_states.pt"])
        return kinds[prefixes[0]]

    def _shard_name(self, rank: int) -> str:
        if rank not in self._shard_names:
            self._models.refuse_missing([self._absent(rank)])
        return self._shard_names[rank]

    def _absent(self, rank: int) -> str:
        """Return the name that a rank's shard would have."""
        known, name = min(self._shard_names.items())
        return name.replace(f"rank_{known}_", f"rank_{rank}_", 1)

    def names(self) -> Sequence[str]:
        """Return the files of all ranks; those of a larger, older world are not among them."""
        ranks = range(self._models.first.world_size)
        shards = [self._shard_names.get(rank) or self._absent(rank) for rank in ranks]
        return [*self._models.names(), *shards]

    def check_files(self) -> None:
        """Check that every rank's files are there and of one save.

        Raises:
            CheckpointCorruptedError: some are missing; all of them are named.
            CheckpointFormatError: some are of another run.
        """
        ranks = range(self._models.first.world_size)
        missing = [self._absent(rank) for rank in ranks if rank not in self._shard_names]
        if missing := [*self._models.missing(), *missing]:
            self._models.refuse_missing(missing)
        self._models.check_same()
        self._shards.check_all()

    # -- what is in them -------------------------------------------------------------------------

    def _check_stage(self) -> None:
        if (self._shards.stage == STAGE_WEIGHTS) != self._models.partitioned:
            msg = (
                f"{self._folder.path}: {self._models.first.name} and {self._shard_name(0)} are not "
                "of one run: one is of ZeRO-3, the other of ZeRO-1/2. Remove the files of the run "
                "that you do not want"
            )
            raise CheckpointFormatError(msg)

    def _mixed(self) -> str:
        """Describe why shards and model files seem to be of two saves; nothing where they do not.

        Only in ZeRO-3, whose model files have no weights that masters would have to round to.
        Sub-groups may have been started anew one by one: one that fits is enough.
        """
        steps, progress = self._shards.steps(), self._models.first.progress
        counted = progress.global_steps - progress.skipped_steps
        if self._shards.stage != STAGE_WEIGHTS or not steps or counted in steps:
            return ""
        return (
            f"its model files are of step {counted} (global_steps {progress.global_steps}, of "
            f"which {progress.skipped_steps} skipped), as {self._models.first.name} says, and Adam "
            f"in its optimizer shards has taken {max(steps)} steps, as {self._shard_name(0)} says: "
            "the files are of two saves, as where a save was killed while it overwrote a tag. "
            "Resume from another checkpoint. Where the optimizer was started anew "
            "in the midst of the run, so that its steps lag behind, pass load_optimizer_state=False"
        )

    def _unmatched(self) -> str:
        """Describe whose optimizer state the shards lack; nothing where they lack none."""
        if not (lacking := self._shards.without_state()):
            return ""
        return (
            f"it holds no optimizer state for {format_names(lacking)}, and some for others of "
            f"the same "
            "parameter group: a stock checkpoint of partial offload (offload_optimizer's ratio) "
            f"lacks what was on the GPU; {FRESH_OPTIMIZER_HINT}"
        )

    def _kind(self) -> str:
        elastic = "elastic " if self._shards.elastic else ""
        return f"stock DeepSpeed checkpoint of {elastic}{self._shards.engine}"

    def _manifest(self) -> Manifest:
        shards, first = self._shards, self._models.first
        return Manifest(
            save_id=file_list_digest(self._folder.path, self.names(), self.files.on_progress),
            stage=shards.stage,
            world_size=first.world_size,
            precision=precision_of(first.dtype),
            master_dtype=dtype_name(shards.master_dtype),
            parameters=self._models.parameters(shards.group_of),
            groups=shards.groups,
            buffers=shards.buffers,
            module_buffers=first.buffers,
            files=(),
            progress=first.progress,
            writer=Writer(
                deepspeed=first.deepspeed, lightning=first.lightning, engine=shards.engine
            ),
        )

    def bind(self, live: Manifest) -> None:
        """Use the live parameter groups, where the shards do not say which there were."""
        unknown = self._shards.stage == STAGE_WEIGHTS and not self.found.hyperparameters
        if unknown and live.groups:
            self._shards.regroup({n: i for i, g in enumerate(live.groups) for n in g.names})
            self.manifest = self._manifest()

    def locate(self, key: str, transfer: Transfer) -> Location:
        """Return where a run of masters, of a state or of a frozen weight lies."""
        if key == WEIGHT and transfer.name in self._models.first.frozen:
            return self._models.locate_frozen(transfer)
        file = self.files.get(self._shard_name(transfer.source_rank))
        return file, self._shards.locate(key, transfer)

    def locate_rounded(self, transfer: Transfer) -> Location | None:
        """Return where the low-precision weights of a run of masters lie."""
        return self._models.locate_rounded(transfer)

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        """Return the scalar optimizer states of the flat buffer that holds ``at``."""
        return self._shards.scalars(at)

    def module_state(self, rank: int, world_size: int) -> SharedState:
        """Return buffers and the trainer's state."""
        shard = self.files.tree(self._shard_name(0))[OPTIMIZER]
        scaler = loss_scaler_fields(shard.get("loss_scaler"))
        return self._models.module_state(rank, world_size, scaler)
