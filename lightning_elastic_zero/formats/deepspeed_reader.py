"""Readers of the folder of one tag, as DeepSpeed writes it.

``ZeroReader`` reads stock checkpoints (ZeRO-1, 2, 3, BF16_Optimizer and elastic variants). Shapes
and order of the parameters are in the model files (``param_shapes``), with buffers, frozen weights,
counters and the trainer's state. Masters and optimizer state are flat buffers in the optimizer
shards (``deepspeed_shards``). ``param_slice_mappings`` is not used: its offsets are wrong with
``round_robin_gradients``.

``UniversalReader`` reads Universal Checkpoints, as ``ds_to_universal`` writes them::

    step3_universal/
    ├── zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt [, step.pt]    whole tensors
    ├── zero/optimizer_state.pt                                            hyperparameters, ...
    └── *_model_states.pt                            copied from the checkpoint that was converted

Conversions of runs with ``round_robin_gradients`` are corrupt, because ``ds_to_universal`` splits
them at wrong offsets. In ZeRO-1/2, their masters do not round to the weights in the model file.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import torch

from lightning_elastic_zero.core.autotp import autotp_cut
from lightning_elastic_zero.core.cuts import Cut
from lightning_elastic_zero.core.layout import Fragment, Layout, Transfer, spans
from lightning_elastic_zero.core.manifest import (
    STAGE_WEIGHTS,
    Group,
    Manifest,
    Parameter,
    Plain,
    StateKey,
    TrainingProgress,
    Writer,
)
from lightning_elastic_zero.core.partition import (
    FlatBuffer,
    PerParameterPartition,
    piece_start,
    zero_layout,
)
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.save_files import (
    FP32_STAGE_3,
    MODEL_NAME,
    OPTIMIZER,
    OURS,
    model_name,
    optimizer_name,
    partitioned_model_name,
    tensor_rank_of,
)
from lightning_elastic_zero.core.tensors import (
    Scalar,
    dtype_name,
    precision_of,
    same_bits,
    state_key,
)
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.deepspeed_files import (
    OPTIMIZER_STATE,
    read_tag_folder,
    stub_fields,
)
from lightning_elastic_zero.formats.deepspeed_shards import (
    RESUME_FROM_ANOTHER,
    ZeroShardSet,
    group_of_flats,
    is_vector,
)
from lightning_elastic_zero.formats.reader import (
    COMPARED_ELEMENTS,
    WEIGHT,
    CheckpointReader,
    Location,
    SharedState,
    SourceInfo,
    duplicate_names,
    file_list_digest,
    is_extra_state,
    plain_hyperparameters,
    read_run,
)
from lightning_elastic_zero.formats.sharded import ShardedReader, whole_manifest
from lightning_elastic_zero.formats.torch_read import ForeignFiles, StoredRun

ENGINE_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "num_experts",
        "ds_config",
        "ds_version",
        "ds_autoep_layers",
        "checkpoint_parallel_dimensions",
        "universal_checkpoint_info",
    }
)
"""The entries that DeepSpeed writes; all other entries are the user's."""

_MOST_MISSING = 10_000
"""Ranks whose files are missing that an error lists."""

MASTER, STEP = "fp32", "step"

ADAM_MOMENTS = {"exp_avg", "exp_avg_sq"}
"""``ds_to_universal`` writes both for a parameter, or neither."""


class ModelFile:
    """One rank's ``*_model_states.pt``."""

    def __init__(self, files: ForeignFiles, name: str) -> None:
        self.name = name
        self._files = files
        tree = files.tree(name)
        where = files.folder / name
        if isinstance(tree, Mapping) and OURS in tree:
            msg = (
                f"{where} was written by this library, but manifest.json is missing: the save did "
                "not finish, or the copy is incomplete. Copy the whole directory again, or resume "
                "from another checkpoint"
            )
            raise CheckpointFormatError(msg)
        if not isinstance(tree, Mapping) or not tree.get("param_shapes"):
            msg = (
                f"{where} has no `param_shapes`: it was saved without ZeRO or without an "
                "optimizer, and cannot be resumed"
            )
            raise CheckpointFormatError(msg)
        self.tensor_ranks = int(tree.get("mp_world_size") or 1)
        # Extra states may be tensors too.
        module = {n: value for n, value in _module_of(tree).items() if not is_extra_state(n)}
        self.world_size = int(tree["dp_world_size"])
        self.shapes: list[dict[str, tuple[int, ...]]] = [
            {name: tuple(map(int, shape)) for name, shape in group.items()}
            for group in tree["param_shapes"]
        ]
        """The parameters of each flat buffer, in flat order."""
        self.numels: list[dict[str, int]] = [
            {n: math.prod(s) for n, s in group.items()} for group in self.shapes
        ]
        self.buffers: tuple[str, ...] = tuple(n for n in tree["buffer_names"] if n in module)
        self.deepspeed = str(tree.get("ds_version") or "")
        self.lightning = str(tree.get("pytorch-lightning_version") or "")
        self.progress = _progress(tree)
        zero = (tree.get("ds_config") or {}).get("zero_optimization")
        self.round_robin = isinstance(zero, Mapping) and bool(zero.get("round_robin_gradients"))
        """Whether the run was configured with ``round_robin_gradients``."""
        pieces: Mapping[str, Any] = tree.get("frozen_param_fragments") or {}
        # ZeRO-3's pieces of frozen weights take precedence over the placeholders in the module.
        weights = {**module, **pieces}
        self.dtypes = {n: t.dtype for n, t in weights.items() if isinstance(t, torch.Tensor)}
        """Low-precision dtypes by name: ZeRO-3 keeps a placeholder of that dtype."""
        self.dtype = self.dtypes[next(name for shapes in self.shapes for name in shapes)]
        self._shared = {**duplicate_names(module), **(tree.get("shared_params") or {})}
        self.frozen = self._frozen_shapes(tree, module)
        known = {*self.frozen, *self.buffers, *self._shared}.union(*self.shapes)
        # Without a list of frozen weights, all other entries are taken for those.
        self.unread = tuple(name for name in module if name not in known)
        """Entries of the module that are neither parameters, buffers nor extra states."""

    def _frozen_shapes(
        self, tree: Mapping[str, Any], module: Mapping[str, Any]
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the frozen weights.

        ZeRO-1 does not list them, but in ZeRO-1/2 the module contains every weight whole.
        """
        owned = {name for shapes in self.shapes for name in shapes}
        if listed := tree.get("frozen_param_shapes"):
            # Weights that were frozen after the optimizer was created are listed too.
            return {n: tuple(map(int, shape)) for n, shape in listed.items() if n not in owned}
        sized = [name for numels in self.numels for name, numel in numels.items() if numel]
        if any(isinstance(t := module.get(n), torch.Tensor) and not t.numel() for n in sized):
            return {}  # empty placeholders of ZeRO-3
        known = owned | set(self.buffers)
        return {
            name: tuple(tensor.shape)
            for name, tensor in module.items()
            if isinstance(tensor, torch.Tensor)
            and name not in known
            # DeepSpeed lists empty parameters as tied, although they share no memory.
            and (name not in self._shared or not tensor.numel())
        }

    def aliases(self, name: str) -> tuple[str, ...]:
        return tuple(alias for alias, first in self._shared.items() if first == name)

    def check_same(self, other: ModelFile) -> None:
        for what, mine, theirs in (
            ("number of ranks", self.world_size, other.world_size),
            ("step counters", self.progress, other.progress),
            ("DeepSpeed version", self.deepspeed, other.deepspeed),
            ("parameters", *([[*g.items()] for g in each.shapes] for each in (self, other))),
        ):
            if mine != theirs:
                shown = "" if what == "parameters" else f" ({mine} and {theirs})"
                msg = (
                    f"{self._files.folder}: {self.name} and {other.name} differ in their "
                    f"{what}{shown}: they are not of one save. {RESUME_FROM_ANOTHER}"
                )
                raise CheckpointFormatError(msg)

    def cuts(self) -> dict[str, tuple[Cut, tuple[int, ...]]]:
        """Return the cuts of parameters over tensor ranks, with their whole shapes.

        Raises UnsupportedError if one has another layout, or the file describes none.
        """
        about = self._files.tree(self.name).get("universal_checkpoint_info") or {}
        layouts = (about.get("affine_map") or {}).get("params") or {}
        refused = about.get("autotp_unsupported_parameter_patterns") or {}
        found = {}
        owned = {name: shape for group in self.shapes for name, shape in group.items()}
        for name, shape in {**self.frozen, **owned}.items():
            pattern = rf"^{re.escape(name)}$"
            layout = layouts.get(pattern)
            try:
                described = {"affine_map": layout, "unsupported_reason": refused.get(pattern)}
                cut = autotp_cut(name, described, self.tensor_ranks)
                if cut is None and layout and tuple(layout["logical_shape"]) != shape:
                    msg = "zero.Init partitioned it over the tensor ranks too"
                    raise ValueError(msg)  # noqa: TRY301 (reported with the others)
                if cut and cut[0].shape_on(0, self.tensor_ranks, cut[1]) != shape:
                    msg = "its layer spec views it in other dimensions than it has"
                    raise ValueError(msg)  # noqa: TRY301
            except ValueError as error:
                msg = (
                    f"{self._files.folder / self.name} was written with tensor parallelism, and "
                    f"{name} cannot be read: {error}. AutoTP of DeepSpeed 0.19.8 writes "
                    "checkpoints that can"
                )
                raise UnsupportedError(msg) from error
            if cut:
                found[name] = cut
        return found

    def load_shared(self, loss_scaler: Mapping[str, Plain], *, trainer: bool = True) -> SharedState:
        """Return the shared state.

        ``trainer=False`` returns only the keys of what Lightning or the user saved.
        """
        tree = self._files.tree(self.name)
        others = {k: value for k, value in tree.items() if k not in ENGINE_KEYS}
        entries = {
            "buffers": {name: tree["module"][name] for name in self.buffers},
            "client_state": others if trainer else dict.fromkeys(others),
            # Only of a scheduler that the engine steps.
            "lr_scheduler": tree.get("lr_scheduler") or None,
            "extra_states": {n: s for n, s in _module_of(tree).items() if is_extra_state(n)},
        }
        return SharedState(loss_scaler=loss_scaler, **self._files.load(self.name, entries))


def _module_of(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    return tree.get("module") or {}


def _progress(tree: Mapping[str, Any]) -> TrainingProgress:
    """Return the counters; micro steps are computed, as DeepSpeed does not save them."""
    config: Mapping[str, Any] = tree.get("ds_config") or {}
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, micro, accumulation = (n if type(n := config.get(k)) is int else None for k in sizes)
    steps, samples = (int(tree.get(name) or 0) for name in ("global_steps", "global_samples"))
    # DeepSpeed takes tensor ranks for data ranks.
    overcount = int(tree.get("mp_world_size") or 1)
    batch, samples = batch and batch // overcount, samples // overcount
    world_size = int(tree["dp_world_size"])
    # The user gives two of the three sizes, or one, and DeepSpeed computes the others.
    if accumulation is None:
        accumulation = 1
        if batch and micro and world_size:  # They may contradict each other.
            accumulation = max(batch // (micro * world_size), 1)
    if batch is None and micro:
        batch = micro * accumulation * world_size
    elif batch is None and steps and not samples % steps:
        batch = samples // steps or None
    if micro == 1 and "pytorch-lightning_version" in tree:
        batch = None  # Lightning's value if it does not find the loader's batch size
    return TrainingProgress(
        global_steps=steps,
        global_samples=samples,
        skipped_steps=int(tree.get("skipped_steps") or 0),
        micro_steps=steps * accumulation,
        gradient_accumulation_steps=accumulation,
        global_batch_size=batch,
    )


class TagReader(CheckpointReader):
    """The model files of a tag's folder.

    There is one ``mp_rank_00_model_states.pt`` in ZeRO-1/2, and one file per rank in ZeRO-3.
    """

    def __init__(self, files: ForeignFiles, tensor_rank: int = 0) -> None:
        self.files = files
        self._tensor_rank = tensor_rank
        self._folder = read_tag_folder(files.folder, tensor_rank)
        self._partitioned = not self._folder.model
        """Whether the weights are partitioned (ZeRO-3)."""
        self._check_required_files()
        self._first = ModelFile(self.files, self._model_name(0))
        if tensor_rank_of(self._folder.last) >= self._first.tensor_ranks:
            msg = (
                f"{files.folder} contains {self._folder.last}, but {self._first.name} is of a run "
                f"with {self._first.tensor_ranks} tensor ranks: two runs were saved into one "
                "folder. Remove the files of one of them"
            )
            raise UnsupportedError(msg)
        if self._partitioned:
            self._check_number(len(self._folder.models))
        shared = self._first.buffers and not self._partitioned
        self._lacks = ("RNG states", *(["buffers of ranks other than 0"] if shared else []))
        """Parts of a run's state that these files do not contain."""

    # -- which files -----------------------------------------------------------------------------

    def _check_required_files(self) -> None:
        """Check the other files before a model file is opened."""

    def _model_name(self, rank: int) -> str:
        if self._folder.model:
            return self._folder.model
        if not self._folder.models:  # The stage is unknown.
            whole, part = model_name(self._tensor_rank), self._partitioned_name(rank)
            self._refuse_missing([f"{whole} (of ZeRO-1/2) or {part} (of ZeRO-3)"])
        if rank not in self._folder.models:
            self._refuse_missing([self._partitioned_name(rank)])
        return self._folder.models[rank]

    def _model_names(self) -> list[str]:
        """Return the names of all ranks' files, including missing ones."""
        if self._folder.model:
            return [self._folder.model]
        return [self._partitioned_name(rank) for rank in range(self._first.world_size)]

    def _partitioned_name(self, rank: int) -> str:
        return partitioned_model_name(rank, self._tensor_rank)

    def _check_number(self, file_count: int) -> None:
        """Refuse files that name so many ranks that their names would fill the memory."""
        if self._first.world_size > file_count + _MOST_MISSING:
            msg = (
                f"{self.files.folder} is incomplete: {self._first.name} is of "
                f"{self._first.world_size} ranks, and there are files of {file_count}. Copy all "
                "files of this tag, or resume from another checkpoint"
            )
            raise CheckpointCorruptedError(msg)

    def _refuse_missing(self, names: Sequence[str]) -> NoReturn:
        msg = (
            f"{self.files.folder} is incomplete: {', '.join(names)} "
            f"{'are' if len(names) > 1 else 'is'} missing. Copy all files of this tag, or resume "
            "from another checkpoint"
        )
        raise CheckpointCorruptedError(msg)

    def _check_model_files(self, others: Sequence[str] = ()) -> None:
        """Compare the ranks' files; report missing ones together with ``others``."""
        names = self._model_names()
        there = {self._folder.model, *self._folder.models.values()}
        if missing := [*(name for name in names if name not in there), *others]:
            self._refuse_missing(missing)
        for name in names[1:]:
            self._first.check_same(ModelFile(self.files, name))

    # -- content ---------------------------------------------------------------------------------

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
            (name, shape, buffers[index].group)
            for index, shapes in enumerate(first.shapes)
            for name, shape in shapes.items()
        ]
        frozen = [(name, shape, None) for name, shape in first.frozen.items()]
        return Manifest(
            save_id=file_list_digest(self.files.folder, self.names(), self.files.progress),
            stage=stage,
            world_size=first.world_size,
            precision=precision_of(first.dtype),
            master_dtype=dtype_name(master_dtype),
            parameters=tuple(
                Parameter(name, shape, dtype_name(first.dtypes[name]), group, first.aliases(name))
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
        rank, start = transfer.source_rank, transfer.start
        file = self.files.get(self._model_name(rank))
        pieces = file.tree.get("frozen_param_fragments") or {}
        whole_weights = file.tree["module"]
        tensor = (pieces if transfer.name in pieces else whole_weights)[transfer.name]
        if self._partitioned:
            whole = math.prod(self._first.frozen[transfer.name])
            start -= piece_start(whole, self._first.world_size, rank)
        return file, StoredRun(tensor, start, start + transfer.stop - transfer.start)

    def locate_rounded(self, transfer: Transfer) -> Location | None:
        if self._partitioned or transfer.name in self._first.frozen:
            return None
        file = self.files.get(self._first.name)
        tensor = file.tree["module"].get(transfer.name)
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            return None
        return file, StoredRun(tensor, transfer.start, transfer.stop)

    def engine_state(self) -> SharedState:
        return self._first.load_shared(self._loss_scaler(), trainer=False)

    def module_state(self, rank: int, world_size: int) -> SharedState:
        same = self._partitioned and world_size == self._first.world_size
        model = ModelFile(self.files, self._model_name(rank)) if same else self._first
        return model.load_shared(self._loss_scaler())

    def with_own_state(self, shared: SharedState, rank: int) -> SharedState:
        if not self._partitioned:
            return shared
        return ModelFile(self.files, self._model_name(rank)).load_shared(shared.loss_scaler)

    def module_buffers(self) -> Mapping[str, torch.Tensor]:
        name = self._first.name
        module = self.files.tree(name)["module"]
        return self.files.load(name, {n: module[n] for n in self._first.buffers})

    def trainer_entry(self, name: str) -> object:
        return self.files.tree(self._first.name).get(name)

    def _mixture(self, stage: int, steps: Sequence[int], shard: str) -> str:
        """Describe why shards and model files seem to be of two saves; else empty.

        Only for ZeRO-3: below, masters are compared with the weights in the model file.
        """
        difference = self._step_difference(steps, shard)
        if stage != STAGE_WEIGHTS or not difference:
            return ""
        return (
            f"{difference}. Resume from another checkpoint. If the optimizer was reset during the "
            "run, pass load_optimizer_state=False"
        )

    def _step_difference(self, steps: Sequence[int], shard: str) -> str:
        """Describe step counts in shards that differ from the model file's; else empty.

        The state of single sub-groups may have been reset, so one matching step counter is enough.
        """
        progress = self._first.progress
        counted = progress.global_steps - progress.skipped_steps
        if not steps or counted in steps:
            return ""
        return (
            f"its model files are of step {counted} ({self._first.name}: global_steps "
            f"{progress.global_steps}, of which {progress.skipped_steps} skipped), but Adam in its "
            f"optimizer shards has taken {max(steps)} steps ({shard}): the files are "
            "of two saves, for example because a save was killed while it overwrote a tag"
        )

    @abstractmethod
    def _loss_scaler(self) -> Mapping[str, Plain]:
        """Return the fields of the loss scaler."""


def open_tag(files: ForeignFiles) -> CheckpointReader:
    """Open the folder of one tag of stock DeepSpeed.

    Raises UnsupportedError for tensor parallelism other than AutoTP's, CheckpointCorruptedError if
    files are missing, CheckpointFormatError if the files of tensor ranks are not of one save.
    """
    first = ZeroReader(files)
    if first.model.tensor_ranks == 1:
        return first
    shards = [first, *(ZeroReader(files, rank) for rank in range(1, first.model.tensor_ranks))]
    for shard in shards:
        if _identity(shard) != _identity(first):
            msg = (
                f"{files.folder}: {first.model.name} and {shard.model.name} differ in their stage, "
                f"number of ranks, step counters or parameters: they are not of one save. "
                f"{RESUME_FROM_ANOTHER}"
            )
            raise CheckpointFormatError(msg)
    return ShardedReader(whole_manifest([s.manifest for s in shards], first.model.cuts()), shards)


def _identity(shard: ZeroReader) -> tuple[object, ...]:
    of = shard.manifest
    names = [buffer.names for buffer in of.buffers]
    return of.stage, of.world_size, of.progress, names, [p.name for p in of.parameters]


class ZeroReader(TagReader):
    """The files of one tensor rank in the folder of one tag of stock DeepSpeed."""

    def __init__(self, files: ForeignFiles, tensor_rank: int = 0) -> None:
        super().__init__(files, tensor_rank)
        first = self._first
        # The shards of the model file's precision.
        wanted = ("bf16_", "") if first.dtype == torch.bfloat16 else ("", "fp16_")
        prefixes = [prefix for prefix in wanted if prefix in self._folder.optimizer]
        if not prefixes:
            self._refuse_missing([optimizer_name(0, wanted[0], tensor_rank)])
        self._prefix = prefixes[0]
        self._shard_names = self._folder.optimizer[self._prefix]
        self._check_number(len(self._shard_names))
        self._shards = ZeroShardSet(
            files,
            self._shard_name,
            first.numels,
            first.world_size,
            OPTIMIZER,
            round_robin=first.round_robin,
        )
        if (self._shards.stage == STAGE_WEIGHTS) != self._partitioned:
            msg = (
                f"{files.folder}: {first.name} and {self._shard_name(0)} are not of one run: one "
                "is from ZeRO-3, the other from ZeRO-1/2. Remove the files of one run"
            )
            raise CheckpointFormatError(msg)
        self.manifest = self._manifest()
        hyperparameters = any(group.hyperparameters for group in self.manifest.groups)
        groups = (
            "parameter groups and their hyperparameters"
            if self._shards.stage == STAGE_WEIGHTS
            else "hyperparameters of the parameter groups"
        )
        lacks = () if hyperparameters else (groups,)
        elastic = "elastic " if self._shards.elastic else ""
        self.info = SourceInfo(
            f"stock DeepSpeed checkpoint of {elastic}{self._shards.engine}",
            (*self._lacks, *lacks),
            hyperparameters,
            mixed=self._mixture(self._shards.stage, self._shards.steps(), self._shard_name(0)),
            unmatched=self._shards.unmatched(),
            unread=first.unread,
        )

    # -- which files -----------------------------------------------------------------------------

    def _shard_name(self, rank: int) -> str:
        if rank not in self._shard_names:
            self._refuse_missing([self._full_name(rank)])
        return self._shard_names[rank]

    def _full_name(self, rank: int) -> str:
        return optimizer_name(rank, self._prefix, self._tensor_rank)

    def names(self) -> Sequence[str]:
        ranks = range(self._first.world_size)
        return [*self._model_names(), *map(self._full_name, ranks)]

    def check_files(self) -> None:
        ranks = range(self._first.world_size)
        missing = [self._full_name(rank) for rank in ranks if rank not in self._shard_names]
        self._check_model_files(missing)
        self._shards.check_all()

    # -- content ---------------------------------------------------------------------------------

    @cached_property
    def other_steps(self) -> str:
        return self._step_difference(self._shards.steps(), self._shard_name(0))

    @property
    def counts_steps(self) -> bool:
        return bool(self._shards.steps())

    @property
    def model(self) -> ModelFile:
        """The model file of data rank 0."""
        return self._first

    def _manifest(self) -> Manifest:
        shards = self._shards
        return self._describe(
            shards.stage, shards.master_dtype, shards.buffers, shards.groups, shards.engine
        )

    def bind(self, live: Manifest) -> None:
        unknown = self._shards.stage == STAGE_WEIGHTS and not self.info.hyperparameters
        if unknown and live.groups:
            self._shards.regroup({n: i for i, g in enumerate(live.groups) for n in g.names})
            self.manifest = self._manifest()

    def locate(self, key: str, transfer: Transfer) -> Location:
        if key == WEIGHT and transfer.name in self._first.frozen:
            return self._locate_frozen(transfer)
        file = self.files.get(self._shard_name(transfer.source_rank))
        return file, self._shards.locate(key, transfer)

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        return self._shards.scalars(at)

    def _loss_scaler(self) -> Mapping[str, Plain]:
        shard = self.files.tree(self._shard_name(0))[OPTIMIZER]
        return stub_fields(shard.get("loss_scaler"))


class UniversalReader(TagReader):
    """A Universal Checkpoint."""

    def __init__(self, files: ForeignFiles) -> None:
        super().__init__(files)
        if self._first.tensor_ranks > 1:
            msg = (
                f"{files.folder} is a Universal Checkpoint of a run with tensor parallelism: pass "
                "the checkpoint from which ds_to_universal made it"
            )
            raise UnsupportedError(msg)
        self._numels = self._first.numels
        self._numel_of = {name: n for numels in self._numels for name, n in numels.items()}
        self._stage = STAGE_WEIGHTS if self._partitioned else 1
        self._stage = int(self._optimizer.get("zero_stage", self._stage))
        self._group_of = group_of_flats(
            self._optimizer["param_groups"], self._stage, len(self._numels)
        )
        self._flat_of = {name: i for i, numels in enumerate(self._numels) for name in numels}
        buffers = [
            FlatBuffer(self._group_of[i], tuple(numels), tuple(numels.values()))
            for i, numels in enumerate(self._numels)
        ]
        self._keys = self._find_keys()
        master = self._tensor(self._first_held(range(len(self._numels))), WEIGHT)
        groups = self._groups(buffers)
        self.manifest = self._describe(self._stage, master.dtype, buffers, groups)
        lacks = (*self._lacks, "optimizer states that are not Adam's")
        self._rank_0 = self._shard_of_rank_0()
        steps = self._rank_0.steps() if self._rank_0 else ()
        self.info = SourceInfo(
            "Universal Checkpoint (ds_to_universal)",
            lacks,
            mixed=self._mixture(self._stage, steps, OPTIMIZER_STATE),
            unread=self._first.unread,
        )

    @property
    def _optimizer(self) -> Mapping[str, Any]:
        """Return the content of ``optimizer_state.pt``; files may be closed in between."""
        return self.files.tree(OPTIMIZER_STATE)

    @property
    def _listed(self) -> Sequence[str]:
        """Return the other files, if this library's ``convert`` listed them."""
        return self._optimizer.get(OURS, {}).get("files", ())

    def _shard_of_rank_0(self) -> ZeroShardSet | None:
        """Return the whole shard that ``ds_to_universal`` keeps in ZeRO-3; else None."""
        if FP32_STAGE_3 not in self._optimizer:
            return None
        return ZeroShardSet(
            self.files, lambda _: OPTIMIZER_STATE, self._numels, self._first.world_size
        )

    # -- contents --------------------------------------------------------------------------------

    def _check_required_files(self) -> None:
        if not (self.files.folder / OPTIMIZER_STATE).is_file():
            self._refuse_missing([OPTIMIZER_STATE])
        stage = int(self._optimizer.get("zero_stage", STAGE_WEIGHTS))
        if stage != STAGE_WEIGHTS and not self._folder.model:
            self._refuse_missing([MODEL_NAME])

    def _model_names(self) -> list[str]:
        return [name for name in self._listed if "/" not in name] or super()._model_names()

    def _find_keys(self) -> Mapping[str, tuple[str, ...]]:
        """Return the states of each parameter that have a file."""
        root = self.files.folder / "zero"
        stored = {}
        for name in self._flat_of:
            stored[name] = {path.stem for path in (root / name).glob("*.pt")}
            self.files.progress.check()
        wanted = self._wanted_keys(stored)
        missing = [self._file(n, k) for n in stored for k in sorted(wanted[n] - stored[n])]
        if missing:
            self._refuse_missing(missing)
        return {name: tuple(sorted(keys - {MASTER})) for name, keys in stored.items()}

    def _wanted_keys(self, stored: Mapping[str, set[str]]) -> Mapping[str, set[str]]:
        """Return the required states of each parameter: those listed, or those of its group.

        Empty parameters may lack steps. Groups with some of Adam's states have all of them.
        """
        if listed := [name.split("/") for name in self._listed if "/" in name]:
            wanted: dict[str, set[str]] = {name: {MASTER} for name in stored}
            for _, name, file in listed:
                wanted.setdefault(name, set()).add(file.removesuffix(".pt"))
            return wanted
        of_group: dict[int, set[str]] = {group: {MASTER} for group in self._group_of}
        for name, keys in stored.items():
            if self._numel_of[name]:
                of_group[self._group_of[self._flat_of[name]]] |= keys
        of_adam = {key for keys in of_group.values() for key in keys & {*ADAM_MOMENTS, STEP}}
        for keys in of_group.values():
            keys.update(of_adam if keys & ADAM_MOMENTS else ())
        return {
            name: of_group[self._group_of[flat]] - (set() if self._numel_of[name] else {STEP})
            for name, flat in self._flat_of.items()
        }

    def _file(self, name: str, key: str) -> str:
        return f"zero/{name}/{key or MASTER}.pt"

    def names(self) -> Sequence[str]:
        states = [self._file(n, key) for n, keys in self._keys.items() for key in (MASTER, *keys)]
        return [*self._model_names(), OPTIMIZER_STATE, *states]

    def _groups(self, buffers: Sequence[FlatBuffer]) -> tuple[Group, ...]:
        groups = self.files.load(OPTIMIZER_STATE, list(self._optimizer["param_groups"]))
        return tuple(
            Group(
                names=tuple(n for b in buffers if b.group == index for n in b.names),
                hyperparameters=fields,
                state=self._state_of(index),
            )
            for index, fields in enumerate(plain_hyperparameters(groups, ("params",)))
        )

    def _state_of(self, group: int) -> tuple[StateKey, ...]:
        """Return the table of a group's states, from its first parameter with elements."""
        flats = [i for i, g in enumerate(self._group_of) if g == group and self._numels[i]]
        if not flats:
            return ()
        name = self._first_held(flats)
        flat = self._flat_of[name]
        table = [
            state_key(key, self._tensor(name, key), elementwise=True)
            for key in self._keys[name]
            if key != STEP
        ]
        scalars = self._scalar_values(flat)
        table += [state_key(key, value, elementwise=False) for key, value in scalars.items()]
        return tuple(sorted(table, key=lambda key: key.name))

    def _scalar_values(self, flat: int) -> Mapping[str, Scalar]:
        """Return a flat buffer's scalar states, which have separate files below ZeRO-3."""
        if self._stage == STAGE_WEIGHTS:
            state = self._optimizer["optimizer_state_dict"]["state"].get(flat, {})
            scalars = {k: v for k, v in state.items() if not is_vector(v)}
            return self.files.load(OPTIMIZER_STATE, scalars)
        # Many conversions write no step for an empty parameter.
        first = self._first_held([flat]) if self._numels[flat] else ""
        name = next((n for n in (first, *self._numels[flat]) if STEP in self._keys.get(n, ())), "")
        return {STEP: self._step(name)} if name else {}

    def _step(self, name: str) -> Scalar:
        file = self._file(name, STEP)
        return self.files.load(file, self.files.tree(file))

    def _first_held(self, flats: Iterable[int]) -> str:
        """Return the first parameter of flat buffers, if possible one with elements."""
        names = [name for flat in flats for name in self._numels[flat]]
        return next((name for name in names if self._numel_of[name]), names[0])

    def _tensor(self, name: str, key: str) -> torch.Tensor:
        """Return a state or master of a parameter, whole and on the meta device."""
        file = self._file(name, key)
        tree = self.files.tree(file)
        tensor = tree["param"] if isinstance(tree, Mapping) else tree
        numel = self._numel_of[name]
        if not isinstance(tensor, torch.Tensor) or tensor.numel() != numel:
            what = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor)
            msg = (
                f"{self.files.folder / file} has {what}, but {name} has {numel} elements: it "
                "was converted from a run with tensor parallelism, or belongs to another run. "
                "Convert the checkpoint again"
            )
            raise CheckpointFormatError(msg)
        return tensor.view(-1)

    # -- CheckpointReader ------------------------------------------------------------------------

    def check_files(self) -> None:
        self._check_model_files()
        for name, keys in self._keys.items():
            for key in (WEIGHT, *(key for key in keys if key != STEP)):
                self._tensor(name, key)
        if self._stage != STAGE_WEIGHTS:
            self._check_steps()

    def _check_steps(self) -> None:
        """Refuse a flat buffer whose parameters have different step counts."""
        for numels in self._numels:
            counted: dict[str, str] = {}
            for name, numel in numels.items():
                if numel and STEP in self._keys[name]:
                    counted.setdefault(repr(float(self._step(name) or 0)), name)
            if len(counted) > 1:
                several = ", and ".join(f"{step} of {name}" for step, name in counted.items())
                msg = (
                    f"{self.files.folder}: the step files of one parameter group have {several}: "
                    "they are of different checkpoints. Convert again, or resume from another "
                    "checkpoint"
                )
                raise CheckpointCorruptedError(msg)

    def verify(self, rank: int, world_size: int, progress: Progress) -> list[str]:
        without = super().verify(rank, world_size, progress)
        if self._rank_0:
            layout = zero_layout(STAGE_WEIGHTS, self._rank_0.buffers, self._first.world_size)
            for fragment in list(layout.on_rank(0))[rank::world_size]:
                for key in (WEIGHT, *self._keys[fragment.name]):
                    self._compare_with_rank_0(self._rank_0, fragment, key, progress)
        return without

    def _compare_with_rank_0(
        self, shards: ZeroShardSet, at: Fragment, key: str, progress: Progress
    ) -> None:
        """Refuse a file of another conversion: its beginning is not in rank 0's shard.

        A second conversion that is killed in the folder of the first leaves such files. In ZeRO-3,
        they contain no steps, and the model files contain no weights to compare with.
        """
        tensor = self._tensor(at.name, key)
        for start, stop in spans(at.start, at.stop, COMPARED_ELEMENTS):
            offset = at.offset + start - at.start
            transfer = Transfer(at.name, start, stop, at.rank, at.buffer, offset, 0, 0)
            stored = shards.locate(key, transfer)
            shard = read_run((self.files.get(OPTIMIZER_STATE), stored))
            file = self._file(at.name, key)
            values = read_run((self.files.get(file), StoredRun(tensor, start, stop)))
            progress.check()
            if values.dtype != shard.dtype or not same_bits(values, shard):
                msg = (
                    f"{self.files.folder}: {file} does not begin with the values of rank 0's shard "
                    f"in {OPTIMIZER_STATE}: the files are of two conversions, for example because "
                    "one was killed while it overwrote the other. Convert again into a new folder, "
                    "or resume from another checkpoint"
                )
                raise CheckpointCorruptedError(msg)

    @cached_property
    def other_steps(self) -> str:
        if self._stage == STAGE_WEIGHTS:
            return ""  # There are no weights to compare with.
        return self._step_difference(self._steps, f"{STEP}.pt")

    @property
    def counts_steps(self) -> bool:
        return bool(self._steps)

    @cached_property
    def _steps(self) -> list[int]:
        steps = (self._scalar_values(i).get(STEP) for i in range(len(self._numels)))
        return [int(step) for step in steps if step is not None]

    def layout_of(self, manifest: Manifest) -> Layout:
        """Return the layout: each parameter whole, in a separate file."""
        return PerParameterPartition(manifest.buffers, 1)

    def locate(self, key: str, transfer: Transfer) -> Location:
        if key == WEIGHT and transfer.name in self._first.frozen:
            return self._locate_frozen(transfer)
        tensor = self._tensor(transfer.name, key)
        file = self.files.get(self._file(transfer.name, key))
        return file, StoredRun(tensor, transfer.start, transfer.stop)

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        return self._scalar_values(at.buffer)

    def _loss_scaler(self) -> Mapping[str, Plain]:
        return stub_fields(self._optimizer.get("loss_scaler"))
