"""Reads what stock DeepSpeed writes: ZeRO-1, 2, 3 and BF16_Optimizer, and its elastic variants.

The shapes and the order of the parameters are in the model file (``param_shapes``); masters and
optimizer state are flat buffers in the optimizer shards (``zero_shard_set``). Which files there are
is told by ``tag_folder``. ``param_slice_mappings`` is not used: it is wrong on disk where
``round_robin_gradients`` was on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lightning_elastic_zero.errors import CheckpointFormatError
from lightning_elastic_zero.formats.deepspeed.class_stubs import stub_fields
from lightning_elastic_zero.formats.deepspeed.constants import OPTIMIZER
from lightning_elastic_zero.formats.deepspeed.tag_folder import TagFolder
from lightning_elastic_zero.formats.deepspeed.tag_reader import TagReader
from lightning_elastic_zero.formats.deepspeed.zero_shard_set import ZeroShardSet
from lightning_elastic_zero.formats.open_files import ForeignFiles
from lightning_elastic_zero.formats.reader import (
    FRESH_OPTIMIZER_HINT,
    WEIGHT,
    Location,
    SourceInfo,
)
from lightning_elastic_zero.layout import Fragment, Transfer
from lightning_elastic_zero.manifest import STAGE_WEIGHTS, Manifest, Plain
from lightning_elastic_zero.tensor_state import Scalar
from lightning_elastic_zero.text import format_names


class ZeroReader(TagReader):
    """A tag's folder of stock DeepSpeed."""

    def __init__(self, folder: TagFolder, files: ForeignFiles) -> None:
        """Parse the folder from rank 0's files.

        Raises:
            CheckpointCorruptedError: files are missing.
            CheckpointFormatError: they are not of one save.
            UnsupportedError: the engine that wrote them cannot be resumed by this library.
        """
        super().__init__(folder, files)
        first = self._first
        self._shard_names = self._choose_shards()
        self._shards = ZeroShardSet(
            files, self._shard_name, first.shapes, first.world_size, OPTIMIZER
        )
        self._check_stage()
        self.manifest = self._manifest()
        hyperparameters = any(group.hyperparameters for group in self.manifest.groups)
        groups = (
            "parameter groups and their hyperparameters"
            if self._shards.stage == STAGE_WEIGHTS
            else "hyperparameters of the parameter groups"
        )
        lacks = () if hyperparameters else (groups,)
        self.info = SourceInfo(
            self._kind(),
            (*self._lacks, *lacks),
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
        bf16 = self._first.dtype == torch.bfloat16
        kinds = self._folder.optimizer
        prefixes = [p for p in (("bf16_", "") if bf16 else ("", "fp16_")) if p in kinds]
        if not prefixes:
            prefix = "bf16_" if bf16 else ""
            self._refuse_missing([f"{prefix}zero_pp_rank_0_mp_rank_00_optim_states.pt"])
        return kinds[prefixes[0]]

    def _shard_name(self, rank: int) -> str:
        if rank not in self._shard_names:
            self._refuse_missing([self._absent(rank)])
        return self._shard_names[rank]

    def _absent(self, rank: int) -> str:
        """Return the name that a rank's shard would have."""
        known, name = min(self._shard_names.items())
        return name.replace(f"rank_{known}_", f"rank_{rank}_", 1)

    def names(self) -> Sequence[str]:
        """Return the files of all ranks; those of a larger, older world are not among them."""
        ranks = range(self._first.world_size)
        shards = [self._shard_names.get(rank) or self._absent(rank) for rank in ranks]
        return [*self._model_names(), *shards]

    def check_files(self) -> None:
        """Check that every rank's files are there and of one save.

        Raises:
            CheckpointCorruptedError: some are missing; all of them are named.
            CheckpointFormatError: some are of another run.
        """
        ranks = range(self._first.world_size)
        missing = [self._absent(rank) for rank in ranks if rank not in self._shard_names]
        self._check_model_files(missing)
        self._shards.check_all()

    # -- what is in them -------------------------------------------------------------------------

    def _check_stage(self) -> None:
        if (self._shards.stage == STAGE_WEIGHTS) != self._partitioned:
            msg = (
                f"{self._folder.path}: {self._first.name} and {self._shard_name(0)} are not "
                "of one run: one is of ZeRO-3, the other of ZeRO-1/2. Remove the files of the run "
                "that you do not want"
            )
            raise CheckpointFormatError(msg)

    def _mixed(self) -> str:
        """Describe why shards and model files seem to be of two saves; nothing where they do not.

        Only in ZeRO-3, whose model files have no weights that masters would have to round to.
        Sub-groups may have been started anew one by one: one that fits is enough.
        """
        steps, progress = self._shards.steps(), self._first.progress
        counted = progress.global_steps - progress.skipped_steps
        if self._shards.stage != STAGE_WEIGHTS or not steps or counted in steps:
            return ""
        return (
            f"its model files are of step {counted} (global_steps {progress.global_steps}, of "
            f"which {progress.skipped_steps} skipped), as {self._first.name} says, and Adam "
            f"in its optimizer shards has taken {max(steps)} steps, as {self._shard_name(0)} says: "
            "the files are of two saves, as where a save was killed while it overwrote a tag. "
            "Resume from another checkpoint. Where the optimizer was started anew "
            "in the midst of the run, so that its steps lag behind, pass load_optimizer_state=False"
        )

    def _unmatched(self) -> str:
        """Describe whose optimizer state the shards lack; nothing where they lack none."""
        if self._shards.counts_in_groups():
            return (
                "its optimizer counts steps in the parameter groups and not in its states, and "
                "elastic shards hold no parameter groups, so that the steps would begin anew; "
                f"{FRESH_OPTIMIZER_HINT}"
            )
        if self._shards.keeps_whole_momenta():
            return (
                "ZeRO-1/2 keeps Muon's momentum of whole parameters, in places that the file does "
                f"not record: {FRESH_OPTIMIZER_HINT}"
            )
        if surplus := self._shards.of_no_parameter():
            return (
                f"its optimizer keeps state of no parameter, under the keys {', '.join(surplus)}, "
                f"which only checkpoints of this library restore; {FRESH_OPTIMIZER_HINT}"
            )
        if not (lacking := self._shards.without_state()):
            return ""
        return (
            f"it holds no optimizer state for {format_names(lacking)}, and some for others of the "
            "same parameter group: a stock checkpoint of partial offload (offload_optimizer's "
            f"ratio) lacks what was on the GPU; {FRESH_OPTIMIZER_HINT}"
        )

    def _kind(self) -> str:
        elastic = "elastic " if self._shards.elastic else ""
        return f"stock DeepSpeed checkpoint of {elastic}{self._shards.engine}"

    def _manifest(self) -> Manifest:
        shards = self._shards
        return self._describe(
            shards.stage, shards.master_dtype, shards.buffers, shards.groups, shards.engine
        )

    def bind(self, live: Manifest) -> None:
        """Use the live parameter groups, where the shards do not say which there were."""
        unknown = self._shards.stage == STAGE_WEIGHTS and not self.info.hyperparameters
        if unknown and live.groups:
            self._shards.regroup({n: i for i, g in enumerate(live.groups) for n in g.names})
            self.manifest = self._manifest()

    def locate(self, key: str, transfer: Transfer) -> Location:
        """Return where a run of masters, of a state or of a frozen weight lies."""
        if key == WEIGHT and transfer.name in self._first.frozen:
            return self._locate_frozen(transfer)
        file = self.files.get(self._shard_name(transfer.source_rank))
        return file, self._shards.locate(key, transfer)

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        """Return the scalar optimizer states of the flat buffer that holds ``at``."""
        return self._shards.scalars(at)

    def _loss_scaler(self) -> Mapping[str, Plain]:
        shard = self.files.tree(self._shard_name(0))[OPTIMIZER]
        return stub_fields(shard.get("loss_scaler"))
