"""Inside the optimizer shards of stock DeepSpeed: ``optimizer.state_dict()`` of each rank.

Four kinds of them are known, and told apart by what is in them (DeepSpeed 0.16 to 0.19,
``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``, ``runtime/bf16_optimizer.py``):

==============  ===================================  =========================================
kind            masters                              optimizer state
==============  ===================================  =========================================
ZeRO-1/2        ``single_partition_of_fp32_groups``  a torch state dict, padded
ZeRO-1/2        ``single_partition_of_fp32_groups``  a dictionary per group, lean, no
elastic                                              hyperparameters
ZeRO-3          ``fp32_flat_groups``                 a torch state dict, one entry a sub-group
ZeRO-3 elastic  ``fp32_flat_groups``, padded         a dictionary per sub-group, each state a list
                                                     of one lean tensor per parameter, no
                                                     hyperparameters
==============  ===================================  =========================================

The last is DeepSpeed pull request 8031. Its lean tensors have no padding on the last rank only: if
the padding of a parameter reaches further, some are longer than the rank's part of it, so that the
sizes of the parts are computed and not taken from the tensors.

The shards hold no names, so the order of the parameters comes from elsewhere; everything about
places is taken from the sizes and paddings that were recorded, and checked against them.

Inside one rank's optimizer shard of stock DeepSpeed: what ``optimizer.state_dict()`` gives.

Hyperparameters that differ between the shards of one save: ranks that drifted apart.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import torch

from lightning_elastic_zero.core.layout import Fragment, Transfer
from lightning_elastic_zero.core.manifest import STAGE_WEIGHTS, Group, StateKey
from lightning_elastic_zero.core.partition import FlatBuffer, piece_numel, piece_start, zero_layout
from lightning_elastic_zero.core.tensors import Scalar, canonical_repr, state_key
from lightning_elastic_zero.core.text import format_ranks
from lightning_elastic_zero.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.deepspeed_files import (
    FP32_STAGE_1_2,
    FP32_STAGE_3,
    GROUP_STEP,
    STATES,
    stub_fields,
)
from lightning_elastic_zero.formats.open_files import ForeignFiles
from lightning_elastic_zero.formats.reader import WEIGHT
from lightning_elastic_zero.formats.torch_optimizer import plain_hyperparameters
from lightning_elastic_zero.formats.torch_read import StoredRun

Shard: TypeAlias = "Mapping[str, Any]"
"""What one rank's ``optimizer.state_dict()`` gave."""

BASE = "optimizer_state_dict"

BF16 = "BF16_Optimizer"
"""DeepSpeed's wrapper for bf16 with fp32 gradients; its files do not say a stage."""


def stage_of(shard: Shard, where: str) -> int:
    """Return the ZeRO stage; 1 for BF16_Optimizer, whose shards do not say one.

    Raises:
        UnsupportedError: it is no shard of ZeRO-1, 2 or 3.
    """
    if FP32_STAGE_3 in shard:
        return STAGE_WEIGHTS
    if FP32_STAGE_1_2 in shard:
        return int(shard.get("zero_stage", 1))
    msg = f"{where}: an optimizer shard without ZeRO's master weights: it is not of ZeRO-1, 2 or 3"
    raise UnsupportedError(msg)


def engine_of(shard: Shard, stage: int) -> str:
    """Return the name of DeepSpeed's wrapper that wrote it."""
    if stage == STAGE_WEIGHTS:
        return "DeepSpeedZeroOptimizer_Stage3"
    return "DeepSpeedZeroOptimizer" if "zero_stage" in shard else BF16


def flats_of(shard: Shard) -> Sequence[torch.Tensor]:
    """Return the masters' flat buffers."""
    found: Sequence[torch.Tensor] = (
        shard[FP32_STAGE_3] if FP32_STAGE_3 in shard else shard[FP32_STAGE_1_2]
    )
    return found


def param_groups_of(shard: Shard) -> Sequence[Mapping[str, Any]]:
    """Return the torch parameter groups of a shard; none where it does not hold them."""
    for key in (BASE, STATES):
        if isinstance(states := shard.get(key), Mapping) and "param_groups" in states:
            found: Sequence[Mapping[str, Any]] = states["param_groups"]
            return found
    return ()


def hyperparameters_of(shard: Shard) -> list[dict[str, Any]]:
    """Return each parameter group's hyperparameters; none where the shard does not hold them."""
    return [{k: v for k, v in g.items() if k != "params"} for g in param_groups_of(shard)]


def ranks_of(shard: Shard) -> int:
    """Return the number of ranks that a shard says it was written on."""
    count = shard["partition_count"]
    return int(max(count) if isinstance(count, (list, tuple)) else count)


def group_of_flats(groups: Sequence[Mapping[str, Any]], stage: int, count: int) -> tuple[int, ...]:
    """Return each flat buffer's parameter group.

    Args:
        groups: torch's parameter groups; in ZeRO-3 their ``params`` are the sub-groups in order.
        stage: the ZeRO stage; below 3 each group has one flat buffer.
        count: how many flat buffers there are.

    Raises:
        CheckpointFormatError: several groups share the sub-groups, and nothing says which.
    """
    if stage != STAGE_WEIGHTS:
        return tuple(range(count))
    placed = tuple(index for index, group in enumerate(groups) for _ in group["params"])
    if len(placed) == count:
        return placed
    if len(groups) <= 1:
        return (0,) * count
    msg = (
        f"the shard has {len(groups)} parameter groups and {count} sub-groups, and does not say "
        "which sub-group belongs to which group"
    )
    raise CheckpointFormatError(msg)


def is_vector(value: object) -> bool:
    """Whether a state is more than one value."""
    return is_lean(value) or (isinstance(value, torch.Tensor) and value.ndim > 0)


def is_lean(value: object) -> TypeGuard[list[torch.Tensor]]:
    """Whether a state is a list with one tensor per parameter, as elastic ZeRO-3 writes it."""
    tensors = isinstance(value, list) and all(isinstance(v, torch.Tensor) for v in value)
    return tensors and bool(value)


def numel_of(shape: Sequence[int]) -> int:
    """Return the elements of a shape."""
    return math.prod(map(int, shape))


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """What a shard says by itself, before anybody has named its parameters."""

    stage: int
    engine: str
    world_size: int
    flats: Sequence[torch.Tensor]
    """The masters' flat buffers."""
    groups: tuple[int, ...]
    """Each flat buffer's parameter group."""
    tail_paddings: tuple[int, ...]
    """ZeRO-1/2: elements of padding at the end of each of this rank's partitions; the masters may
    lie there without them."""
    paddings: tuple[tuple[int, ...], ...]
    """ZeRO-1/2: recorded padding after each parameter of each flat buffer; empty where none is."""
    names: tuple[tuple[str, ...], ...]
    """ZeRO-1/2: the parameters of each group that reach into this rank's partition, as DeepSpeed
    lists them with their places. The places are wrong where ``round_robin_gradients`` was on."""


def shard_metadata(shard: Shard, where: str) -> ShardMetadata:
    """Return what a shard says by itself.

    Raises:
        CheckpointFormatError: it does not say which sub-group is of which parameter group.
        UnsupportedError: it is no shard of ZeRO-1, 2 or 3.
    """
    stage, flats = stage_of(shard, where), flats_of(shard)
    # Elastic ZeRO-3 records one padding per parameter here, and does not cut the masters.
    recorded = () if stage == STAGE_WEIGHTS else shard.get("group_paddings")
    tail_paddings = recorded or (0,) * len(flats)
    return ShardMetadata(
        stage=stage,
        engine=engine_of(shard, stage),
        world_size=ranks_of(shard),
        flats=flats,
        groups=group_of_flats(param_groups_of(shard), stage, len(flats)),
        tail_paddings=tuple(map(int, tail_paddings)),
        paddings=tuple(map(tuple, shard.get("param_alignment_paddings") or ())),
        names=tuple(map(tuple, shard.get("param_slice_mappings") or ())),
    )


MAX_SHOWN = 4
"""Hyperparameters in a message; the rest is counted."""

log = logging.getLogger(__name__)

Groups = Sequence[Mapping[str, Any]]


class HyperparameterDifferences:
    """Each rank's hyperparameters beside the first one's."""

    def __init__(self, first: Groups, where: str) -> None:
        """Keep the first rank's; ``where`` is for messages."""
        self._where = where
        self._first = self._texts(0, first)
        self._values: dict[tuple[int, str], dict[str, list[int]]] = {}

    def compare(self, rank: int, groups: Groups) -> tuple[str, str]:
        """Note which values differ; give the names of both sides' hyperparameters, which may not.

        Args:
            rank: whose they are.
            groups: the hyperparameters of each of its parameter groups.
        """
        mine = self._texts(rank, groups)
        names = [repr([sorted(group) for group in held]) for held in (mine, self._first)]
        if names[0] == names[1]:
            for index, group in enumerate(mine):
                for key, value in group.items():
                    if value != self._first[index][key]:
                        of_value = self._values.setdefault((index, key), {})
                        of_value.setdefault(value, []).append(rank)
        return names[0], names[1]

    def summary(self) -> str:
        """Describe group, name and values of what differs; nothing where all is alike."""
        differences = []
        for (group, key), of_value in sorted(self._values.items()):
            values = [f"{value} on {format_ranks(ranks)}" for value, ranks in of_value.items()]
            others = ", ".join(values)
            differences.append(
                f"{key} of parameter group {group} is {self._first[group][key]} on rank 0, {others}"
            )
        more = [f"{len(differences) - MAX_SHOWN} more"] if len(differences) > MAX_SHOWN else []
        return "; ".join(differences[:MAX_SHOWN] + more)

    def warn(self) -> None:
        """Warn of which values differ, and what a resume makes of it."""
        if summary := self.summary():
            log.warning(
                "%s: the ranks did not train with the same hyperparameters when this was saved: "
                "%s. Each stepped its part of the weights with its own. A resume gives rank 0's "
                "to every rank. A scheduler that steps on a metric needs the same value on all "
                "ranks: self.log(..., sync_dist=True).",
                self._where,
                summary,
            )

    def _texts(self, rank: int, groups: Groups) -> list[dict[str, str]]:
        what = f"{self._where}: a hyperparameter of rank {rank}"
        return [{key: canonical_repr(value, what) for key, value in g.items()} for g in groups]


Shapes = Sequence[Mapping[str, Sequence[int]]]
"""Per flat buffer: each parameter's shape, in flat order."""


def _scaler(shard: Shard) -> str:
    """Return the loss scale and what it follows, to compare."""
    return repr(sorted(stub_fields(shard.get("loss_scaler")).items()))


RESUME_FROM_ANOTHER = (
    "Resume from another checkpoint, or put the files of one save back, those of all ranks"
)


class ZeroShardSet:
    """The shards of all ranks of one save, understood from the first one."""

    def __init__(
        self,
        files: ForeignFiles,
        name: Callable[[int], str],
        shapes: Shapes,
        world_size: int,
        entry: str = "",
    ) -> None:
        """Parse the shards from the first one.

        Args:
            files: the folder's.
            name: returns the name of a rank's file.
            shapes: the parameters of each flat buffer.
            world_size: how many ranks wrote one.
            entry: the file's entry that is the shard; empty where the file is.

        Raises:
            CheckpointFormatError: the first shard is none, or does not fit the shapes.
            UnsupportedError: it holds state that has no rule, or none at all (NVMe offload).
        """
        self._files = files
        self._name = name
        self._entry = entry
        self._where = where = str(files.folder)
        self.world_size = world_size
        first = self._shard(0)
        self.stage = stage_of(first, where)
        self.engine = engine_of(first, self.stage)
        self.elastic = isinstance(first.get(STATES), list)
        self._shapes = shapes
        self._places = {name: i for shapes_ in shapes for i, name in enumerate(shapes_)}
        flats = flats_of(first)
        if len(flats) != len(shapes):
            msg = (
                f"{where}: rank 0's shard has {len(flats)} flat buffers, the model file names the "
                f"parameters of {len(shapes)}: they are not of one save"
            )
            raise CheckpointFormatError(msg)
        self.master_dtype = flats[0].dtype if flats else torch.float32
        self.group_of = (
            self._groups_by_state(first)
            if self._is_by_parameter
            else group_of_flats(param_groups_of(first), self.stage, len(flats))
        )
        self.buffers = tuple(self._buffer(first, index) for index in range(len(flats)))
        zero_layout(self.stage, self.buffers, world_size)  # refuses what cannot lie there
        self.groups = self._groups(first)
        self._stateless = {
            i for i, b in enumerate(self.buffers) if b.names and not self._state(first, i)
        }
        self._hyperparameter_differences = HyperparameterDifferences(
            self._hyperparameters(0), where
        )

    def _shard(self, rank: int) -> Shard:
        """Return a rank's shard; its tensors have no values."""
        tree: Shard = self._files.tree(self._name(rank))
        return tree[self._entry] if self._entry else tree

    def _load(self, rank: int, part: Any) -> Any:
        """Return a part of a rank's shard with the tensors' values."""
        return self._files.load(self._name(rank), part)

    # -- what the first shard says ---------------------------------------------------------------

    def _buffer(self, first: Shard, index: int) -> FlatBuffer:
        names = tuple(self._shapes[index])
        numels = tuple(numel_of(shape) for shape in self._shapes[index].values())
        group = self.group_of[index]
        flat = flats_of(first)[index].numel()
        if sum(numels) and not flat:
            msg = (
                f"{self._where}: rank 0's shard has no master weights in it: they were offloaded "
                "to NVMe, whose files are not read. Resume from a checkpoint without NVMe offload"
            )
            raise UnsupportedError(msg)
        if self.stage == STAGE_WEIGHTS:
            held = sum(piece_numel(n, self.world_size) for n in numels)
            if flat != held:
                self._refuse_numel(0, index, flat)
            return FlatBuffer(group, names, numels)
        recorded = first.get("param_alignment_paddings") or ()
        paddings = tuple(recorded[index]) if recorded else ()
        cut = 0 if self.engine == BF16 else int(first["group_paddings"][index])
        buffer = FlatBuffer(group, names, numels, paddings, flat + cut)
        if not flat + cut:
            return buffer
        total = sum(numels) + sum(paddings)
        if not (self.world_size - 1) * (flat + cut) < total + 2 * self.world_size:
            self._refuse_numel(0, index, flat)
        return buffer

    def _groups(self, first: Shard) -> tuple[Group, ...]:
        """Return the parameter groups: members, hyperparameters, and the table of states."""
        hyperparameters = plain_hyperparameters(
            self._load(0, hyperparameters_of(first)), ("params",)
        )
        count = max(self.group_of, default=-1) + 1
        return tuple(
            Group(
                names=tuple(n for b in self.buffers if b.group == group for n in b.names),
                hyperparameters=hyperparameters[group] if hyperparameters else {},
                state=self._state_keys(first, group),
            )
            for group in range(max(count, len(hyperparameters)))
        )

    def _state_keys(self, shard: Shard, group: int) -> tuple[StateKey, ...]:
        for index, buffer in enumerate(self.buffers):
            if buffer.group == group and buffer.names and (state := self._state(shard, index)):
                return tuple(
                    sorted(
                        (self._state_key(key, value, index) for key, value in state.items()),
                        key=lambda k: k.name,
                    )
                )
        return ()

    def _state_key(self, key: str, value: object, index: int) -> StateKey:
        if is_lean(value) and self._is_by_parameter:
            return state_key(key, value[0], elementwise=True)
        elementwise = isinstance(value, torch.Tensor) and value.ndim == 1
        if elementwise or not isinstance(value, torch.Tensor) or value.ndim == 0:
            return state_key(key, value, elementwise=elementwise)
        msg = (
            f"{self._where}: the optimizer's state {key!r} of flat buffer {index} has the shape "
            f"{tuple(value.shape)}, neither one value per element nor one for all: it cannot be "
            "cut for another number of devices. Pass load_optimizer_state=False to resume with a "
            "fresh optimizer"
        )
        raise UnsupportedError(msg)

    def _state(self, shard: Shard, index: int) -> Mapping[str, Any]:
        """Return a flat buffer's states.

        A step counter of one element is a scalar: DeepSpeed's elastic loader for ZeRO-1/2 gives
        torch's a dimension, with which the run's later saves have it.
        """
        if self.elastic:
            step = (states := shard[STATES][index]).get("step")
            if isinstance(step, torch.Tensor) and step.shape == (1,):
                return {**states, "step": step.reshape(())}
            return states  # type: ignore[no-any-return]
        states = shard[BASE] if self.stage == STAGE_WEIGHTS else shard[STATES]
        in_order = [i for group in states["param_groups"] for i in group["params"]]
        # One flat tensor a group in ZeRO-1/2; in ZeRO-3 the sub-groups in order.
        return states["state"].get(in_order[index] if in_order else index, {})  # type: ignore[no-any-return]

    @property
    def _is_by_parameter(self) -> bool:
        """Whether each state is a list of one tensor per parameter (elastic ZeRO-3)."""
        return self.elastic and self.stage == STAGE_WEIGHTS

    def _groups_by_state(self, first: Shard) -> tuple[int, ...]:
        """Return a group for each sub-group, one for each set of states.

        Elastic ZeRO-3 shards do not record the parameter groups: ``regroup`` uses the live ones.
        """
        kept = [frozenset(self._state(first, index)) for index in range(len(self._shapes))]
        return tuple(list(dict.fromkeys(kept)).index(states) for states in kept)

    def regroup(self, group_of: Mapping[str, int]) -> None:
        """Use the live model's groups, where the shards do not say which there were.

        Raises:
            CheckpointMismatchError: parameters that share a flat buffer are in two groups.
        """
        groups = [{group_of.get(n, 0) for n in shapes} or {0} for shapes in self._shapes]
        if mixed := [i for i, found in enumerate(groups) if len(found) > 1]:
            msg = (
                f"{self._where}: sub-group {mixed[0]} has parameters of the groups "
                f"{sorted(groups[mixed[0]])} of this model: it was saved with other parameter "
                "groups. Configure those, or pass load_optimizer_state=False"
            )
            raise CheckpointMismatchError(msg)
        self.group_of = tuple(found.pop() for found in groups)
        first = self._shard(0)
        self._check_states_of_groups(first)
        self.buffers = tuple(self._buffer(first, i) for i in range(len(self._shapes)))
        self.groups = self._groups(first)

    def _check_states_of_groups(self, first: Shard) -> None:
        """Check that the sub-groups of a live group have the same states, or none.

        Raises:
            CheckpointMismatchError: they differ.
        """
        tables: dict[int, tuple[int, list[str]]] = {}
        for index, group in enumerate(self.group_of):
            if not (states := sorted(self._state(first, index))):
                continue
            other, kept = tables.setdefault(group, (index, states))
            if states != kept:
                msg = (
                    f"{self._where}: sub-groups {other} and {index} have parameters of group "
                    f"{group} of this model, and keep the states {kept} and {states}: it was saved "
                    "with other parameter groups. Configure those, or pass "
                    "load_optimizer_state=False"
                )
                raise CheckpointMismatchError(msg)

    # -- where things lie ------------------------------------------------------------------------

    def locate(self, key: str, transfer: Transfer) -> StoredRun:
        """Return where a run lies in the source rank's shard.

        Raises:
            CheckpointFormatError: the shard holds fewer elements than the first one makes believe.
        """
        shard = self._shard(transfer.source_rank)
        start = transfer.source_offset
        if key == WEIGHT:
            tensor = flats_of(shard)[transfer.source_buffer]
        elif self._is_by_parameter:
            place = self._places[transfer.name]
            tensor = self._state(shard, transfer.source_buffer)[key][place]
            numel = self.buffers[transfer.source_buffer].numels[place]
            start = transfer.start - piece_start(numel, self.world_size, transfer.source_rank)
        else:
            tensor = self._state(shard, transfer.source_buffer)[key]
        stop = start + transfer.stop - transfer.start
        if stop > tensor.numel():
            self._refuse_numel(transfer.source_rank, transfer.source_buffer, tensor.numel())
        return StoredRun(tensor, start, stop)

    def scalars(self, at: Fragment) -> dict[str, Scalar]:
        """Return the scalar states of the flat buffer that holds ``at``, as the shard has them."""
        shard = self._shard(at.rank)
        state = self._state(shard, at.buffer)
        keys = [k.name for k in self.groups[self.group_of[at.buffer]].state if k.kind == "scalar"]
        found: dict[str, Scalar] = self._load(at.rank, {key: state[key] for key in keys})
        return found

    def without_state(self) -> list[str]:
        """Return the parameters without optimizer state in groups that have some."""
        lacking = [i for i in sorted(self._stateless) if self.groups[self.group_of[i]].state]
        return [name for index in lacking for name in self.buffers[index].names]

    def counts_in_groups(self) -> bool:
        """Whether an elastic shard's optimizer counts its steps in the parameter groups alone."""
        counted = self._shard(0).get(GROUP_STEP)
        in_states = any(key.name == "step" for group in self.groups for key in group.state)
        return self.elastic and bool(counted) and not in_states

    def keeps_whole_momenta(self) -> bool:
        """Whether states of ZeRO-1/2 do not lie as the masters do: those of Muon.

        Elastic shards do not name Muon's groups, but its state is not of the partition's size.
        """
        if self.stage == STAGE_WEIGHTS:
            return False
        muon = any(group.hyperparameters.get("use_muon") for group in self.groups)
        first = self._shard(0)
        return muon or any(
            isinstance(value, torch.Tensor)
            and value.ndim == 1
            and value.numel() not in self._possible(0, index)
            for index, buffer in enumerate(self.buffers)
            for value in (self._state(first, index) if buffer.names else {}).values()
        )

    def of_no_parameter(self) -> list[str]:
        """Return the keys of optimizer states that belong to no parameter."""
        states = self._shard(0).get(BASE if self.stage == STAGE_WEIGHTS else STATES)
        held = states.get("state", {}) if isinstance(states, Mapping) else {}
        return [repr(key) for key in held if not isinstance(key, int)]

    def steps(self) -> list[int]:
        """Return how many steps Adam has taken, by the first shard: for each of its flat buffers.

        Other optimizers begin to count elsewhere, or do not count.
        """
        states = [self._state(self._shard(0), i) for i, b in enumerate(self.buffers) if b.names]
        held = [state["step"] for state in states if {"step", "exp_avg"} <= state.keys()]
        return [int(step) for step in self._load(0, held)]

    # -- do the shards belong together -----------------------------------------------------------

    def check_all(self) -> None:
        """Compare the shards of all ranks with the first one; say what drifted apart.

        Raises:
            CheckpointFormatError: one is of another run, step, stage or world size, or is cut; or
                hyperparameters differ, and nothing says that the shards are of one step.
        """
        for rank in range(self.world_size):
            self.check(rank)
        counted = any(self._counters(0, index) for index in range(len(self.buffers)))
        # Below ZeRO-3 masters are compared with the weights of one file when they are read.
        if (
            (summary := self._hyperparameter_differences.summary())
            and self.stage == STAGE_WEIGHTS
            and not counted
        ):
            msg = (
                f"{self._where}: {summary}; and the optimizer counts no steps, so that nothing "
                "tells ranks that drifted apart from shards of different saves. Resume from "
                "another checkpoint"
            )
            raise CheckpointFormatError(msg)
        self._hyperparameter_differences.warn()

    def check(self, rank: int) -> None:
        """Compare a rank's shard with the first one.

        Raises:
            CheckpointFormatError: it is of another run, stage or world size, or is cut.
        """
        shard, first = self._shard(rank), self._shard(0)
        for what, mine, theirs in (
            ("ZeRO stage", stage_of(shard, self._where), self.stage),
            ("wrapper", engine_of(shard, self.stage), self.engine),
            ("DeepSpeed version", shard.get("ds_version"), first.get("ds_version")),
            ("number of ranks", ranks_of(shard), ranks_of(first)),
            ("number of flat buffers", len(flats_of(shard)), len(self.buffers)),
            (
                "parameter groups",
                *self._hyperparameter_differences.compare(rank, self._hyperparameters(rank)),
            ),
        ):
            self._check_same(rank, what, mine, theirs)
        for index, flat in enumerate(flats_of(shard)):
            if flat.numel() not in self._possible(rank, index):
                self._refuse_numel(rank, index, flat.numel())
            state = self._state(shard, index) if self.buffers[index].names else {}
            table = () if index in self._stateless else self.groups[self.group_of[index]].state
            wanted = {key.name for key in table}
            if set(state) != wanted:
                msg = (
                    f"{self._where}: {self._name(rank)} keeps the states {sorted(state)}, "
                    f"{self._name(0)} {sorted(wanted)}: they are not of one save. "
                    f"{RESUME_FROM_ANOTHER}"
                )
                raise CheckpointFormatError(msg)
            self._check_lean(rank, index, state)
            self._check_scalars(rank, index)
        # Ranks agree on overflows; told last, as what differs beside it says more.
        self._check_same(rank, "loss scaler", _scaler(shard), _scaler(first))

    def _check_lean(self, rank: int, index: int, state: Mapping[str, Any]) -> None:
        """Compare the lists of lean tensors with the parameters and the rank's parts of them.

        Raises:
            CheckpointFormatError: one has not a tensor per parameter, or a tensor is too short.
        """
        numels = self.buffers[index].numels
        for key, value in state.items() if self._is_by_parameter else ():
            if not is_lean(value):
                continue
            held = [tensor.numel() for tensor in value]
            parts = [
                max(
                    0,
                    min(piece_numel(n, self.world_size), n - piece_start(n, self.world_size, rank)),
                )
                for n in numels
            ]
            if len(held) != len(parts) or any(
                h < part for h, part in zip(held, parts, strict=True)
            ):
                msg = (
                    f"{self._where}: {self._name(rank)} holds tensors of {held} elements for the "
                    f"state {key!r} of sub-group {index}, expected {parts}: the files are of two "
                    "runs, or one is damaged"
                )
                raise CheckpointFormatError(msg)

    def _check_same(self, rank: int, what: str, mine: object, theirs: object) -> None:
        if mine != theirs:
            msg = (
                f"{self._where}: {self._name(rank)} has the {what} {mine}, {self._name(0)} "
                f"{theirs}: they are not of one save. {RESUME_FROM_ANOTHER}"
            )
            raise CheckpointFormatError(msg)

    def _check_scalars(self, rank: int, index: int) -> None:
        """Compare a rank's step counters with the first one's: a save has all at one step.

        Raises:
            CheckpointFormatError: they differ.
        """
        mine, theirs = self._counters(rank, index), self._counters(0, index)
        if canonical_repr(mine) != canonical_repr(theirs):
            msg = (
                f"{self._where}: {self._name(rank)} has {mine} for flat buffer {index}, "
                f"{self._name(0)} {theirs}: they were saved at other steps. {RESUME_FROM_ANOTHER}"
            )
            raise CheckpointFormatError(msg)

    def _counters(self, rank: int, index: int) -> dict[str, Scalar]:
        shard = self._shard(rank)
        state = self._state(shard, index) if self.buffers[index].names else {}
        scalars = {k: v for k, v in sorted(state.items()) if not is_vector(v)}
        found: dict[str, Scalar] = self._load(rank, scalars)
        return found

    def _hyperparameters(self, rank: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._load(rank, hyperparameters_of(self._shard(rank)))
        return found

    def _possible(self, rank: int, index: int) -> tuple[int, ...]:
        """Return the sizes that a rank's flat buffer may have: with and without its padding."""
        buffer = self.buffers[index]
        if self.stage == STAGE_WEIGHTS:
            return (sum(piece_numel(n, self.world_size) for n in buffer.numels),)
        start, stop = buffer.partition_range(rank)
        total = sum(buffer.numels) + sum(buffer.paddings)
        return stop - start, min(stop, max(start, total)) - start

    def _refuse_numel(self, rank: int, index: int, numel: int) -> None:
        whole = sum(map(numel_of, self._shapes[index].values()))
        msg = (
            f"{self._where}: flat buffer {index} of rank {rank}'s shard has {numel} elements, "
            f"which is not rank {rank}'s part of {whole} on {self.world_size} ranks: the files "
            "are of two runs, or one is damaged"
        )
        raise CheckpointFormatError(msg)
