"""The optimizer shards of stock DeepSpeed: the ``optimizer.state_dict()`` of each rank.

There are four kinds, detected by content (DeepSpeed 0.16 to 0.19,
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

The last is DeepSpeed pull request 8031. It strips the padding of its lean tensors on the last rank
only. If the padding of a parameter spans several ranks, some tensors are longer than the rank's
part, so the sizes of the parts are computed and not taken from the tensors.

The shards contain no names: the caller passes the order of the parameters. Offsets follow from the
recorded sizes and paddings, and are checked against them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, TypeGuard

import torch

from lightning_elastic_zero.core.layout import Fragment, Transfer
from lightning_elastic_zero.core.manifest import STAGE_WEIGHTS, Group, StateKey
from lightning_elastic_zero.core.partition import (
    FlatBuffer,
    piece_numel,
    piece_start,
    round_robin_order,
    zero_layout,
)
from lightning_elastic_zero.core.save_files import (
    FP32_STAGE_1_2,
    FP32_STAGE_3,
    GROUP_STEP,
    OPTIMIZER,
    STATES,
)
from lightning_elastic_zero.core.tensors import Scalar, canonical_repr, state_key
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.deepspeed_files import stub_fields
from lightning_elastic_zero.formats.reader import (
    FRESH_OPTIMIZER_HINT,
    WEIGHT,
    plain_hyperparameters,
)
from lightning_elastic_zero.formats.torch_read import ForeignFiles, StoredRun

Shard: TypeAlias = "Mapping[str, Any]"
"""The ``optimizer.state_dict()`` of one rank."""

ZERO_1_2 = "DeepSpeedZeroOptimizer"
"""DeepSpeed's wrapper for ZeRO-1/2."""

BF16 = "BF16_Optimizer"
"""DeepSpeed's wrapper for bf16 with fp32 gradients. Its files do not record a stage."""

MAX_SHOWN = 4
"""Hyperparameters listed in a message; the others are counted."""

log = logging.getLogger(__name__)

Numels: TypeAlias = "Sequence[Mapping[str, int]]"
"""Per flat buffer: the elements of each parameter, in flat order."""

RESUME_FROM_ANOTHER = (
    "Resume from another checkpoint, or restore the files of all ranks from one save"
)


def _flats_of(shard: Shard) -> Sequence[torch.Tensor]:
    return shard[FP32_STAGE_3 if FP32_STAGE_3 in shard else FP32_STAGE_1_2]


def _param_groups_of(shard: Shard) -> Sequence[Mapping[str, Any]]:
    for key in (OPTIMIZER, STATES):
        if isinstance(states := shard.get(key), Mapping) and "param_groups" in states:
            return states["param_groups"]
    return ()


def group_of_flats(groups: Sequence[Mapping[str, Any]], stage: int, count: int) -> tuple[int, ...]:
    """Return the parameter group of each of ``count`` flat buffers.

    Below ZeRO-3 each group has one. In ZeRO-3, torch's ``params`` are the sub-groups in order.
    """
    if stage != STAGE_WEIGHTS:
        return tuple(range(count))
    placed = tuple(index for index, group in enumerate(groups) for _ in group["params"])
    if len(placed) == count:
        return placed
    if len(groups) <= 1:
        return (0,) * count
    msg = (
        f"the shard has {len(groups)} parameter groups and {count} sub-groups, but does not record "
        "which sub-group belongs to which group"
    )
    raise CheckpointFormatError(msg)


def is_vector(value: object) -> bool:
    """Whether a state is more than one value."""
    return is_lean(value) or (isinstance(value, torch.Tensor) and value.ndim > 0)


def is_lean(value: object) -> TypeGuard[list[torch.Tensor]]:
    """Whether a state is a list of one tensor per parameter, as elastic ZeRO-3 writes it."""
    tensors = isinstance(value, list) and all(isinstance(v, torch.Tensor) for v in value)
    return tensors and bool(value)


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """The properties of a shard that do not depend on parameter names."""

    stage: int
    engine: str
    world_size: int
    flats: Sequence[torch.Tensor]
    """The flat buffers of the master weights."""
    groups: tuple[int, ...]
    """The parameter group of each flat buffer."""
    tail_paddings: tuple[int, ...]
    """ZeRO-1/2: elements of padding at the end of each of this rank's partitions; the stored
    masters may omit them."""
    paddings: tuple[tuple[int, ...], ...]
    """ZeRO-1/2: padding after each parameter of each flat buffer; empty if not recorded."""
    names: tuple[tuple[str, ...], ...]
    """ZeRO-1/2: the parameters of each group with elements in this rank's partition, from
    DeepSpeed's list of names and offsets. The offsets are wrong with ``round_robin_gradients``."""


def shard_metadata(shard: Shard, where: str) -> ShardMetadata:
    """Return the properties of a shard that do not depend on parameter names."""
    if not shard.keys() & {FP32_STAGE_3, FP32_STAGE_1_2}:
        msg = (
            f"{where}: the optimizer shard has no master weights, so it is not from ZeRO-1, 2 or 3"
        )
        raise UnsupportedError(msg)
    # BF16_Optimizer does not record a stage, and is ZeRO-1.
    stage = STAGE_WEIGHTS if FP32_STAGE_3 in shard else int(shard.get("zero_stage", 1))
    flats = _flats_of(shard)
    engine = ZERO_1_2 if "zero_stage" in shard else BF16
    # Elastic ZeRO-3 records one padding per parameter here, and does not strip the masters.
    recorded = () if stage == STAGE_WEIGHTS else shard.get("group_paddings")
    ranks = shard["partition_count"]
    return ShardMetadata(
        stage=stage,
        engine="DeepSpeedZeroOptimizer_Stage3" if stage == STAGE_WEIGHTS else engine,
        world_size=int(max(ranks) if isinstance(ranks, (list, tuple)) else ranks),
        flats=flats,
        groups=group_of_flats(_param_groups_of(shard), stage, len(flats)),
        tail_paddings=tuple(map(int, recorded or (0,) * len(flats))),
        paddings=tuple(map(tuple, shard.get("param_alignment_paddings") or ())),
        names=tuple(map(tuple, shard.get("param_slice_mappings") or ())),
    )


def _describe_differences(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Describe hyperparameters that differ from those of rank 0; empty if there are none."""
    differences = [
        f"{key} of parameter group {index} is {value} on rank 0, {group[key]} on rank {rank}"
        for rank, groups in enumerate(by_rank)
        for index, group in enumerate(groups)
        for key, value in sorted(by_rank[0][index].items())
        if group[key] != value
    ]
    more = [f"{len(differences) - MAX_SHOWN} more"] if len(differences) > MAX_SHOWN else []
    return "; ".join(differences[:MAX_SHOWN] + more)


class ZeroShardSet:
    """The shards of all ranks of one save.

    Rank 0's shard is parsed at once; ``check_all`` compares the others with it. ``name`` returns
    the name of a rank's file; the shard is its entry ``entry``, or the whole file if that is empty.
    ``round_robin``: whether the run had ``round_robin_gradients``, which only ZeRO-1/2 applies.
    """

    def __init__(
        self,
        files: ForeignFiles,
        name: Callable[[int], str],
        numels: Numels,
        world_size: int,
        entry: str = "",
        *,
        round_robin: bool = False,
    ) -> None:
        self._files = files
        self._name = name
        self._entry = entry
        self._where = where = str(files.folder)
        self.world_size = world_size
        first = self._shard(0)
        metadata = shard_metadata(first, where)
        self.stage, self.engine, flats = metadata.stage, metadata.engine, metadata.flats
        self._round_robin = round_robin and self.engine == ZERO_1_2
        self.elastic = isinstance(first.get(STATES), list)
        self._numels = numels
        self._places = {name: i for names in numels for i, name in enumerate(names)}
        if len(flats) != len(numels):
            self._refuse(
                f"rank 0's shard has {len(flats)} flat buffers, but the model file lists the "
                f"parameters of {len(numels)}: they are not of one save"
            )
        self.master_dtype = flats[0].dtype if flats else torch.float32
        self.group_of = self._groups_by_state(first) if self._is_by_parameter else metadata.groups
        self.buffers = tuple(self._buffer(first, index) for index in range(len(flats)))
        zero_layout(self.stage, self.buffers, world_size)  # raises if the sizes are inconsistent
        self.groups = self._groups(first)
        self._stateless = {
            i for i, b in enumerate(self.buffers) if b.names and not self._state(first, i)
        }

    def _shard(self, rank: int) -> Shard:
        """Return a rank's shard. Its tensors have no values: see ``_load``."""
        tree = self._files.tree(self._name(rank))
        return tree[self._entry] if self._entry else tree

    def _load(self, rank: int, part: Any) -> Any:
        return self._files.load(self._name(rank), part)

    # -- parsing rank 0's shard ------------------------------------------------------------------

    def _buffer(self, first: Shard, index: int) -> FlatBuffer:
        names, numels = tuple(self._numels[index]), tuple(self._numels[index].values())
        group = self.group_of[index]
        flat = _flats_of(first)[index].numel()
        if sum(numels) and not flat:
            msg = (
                f"{self._where}: rank 0's shard contains no master weights: they were offloaded to "
                "NVMe, which is not supported. Resume from a checkpoint without NVMe offload"
            )
            raise UnsupportedError(msg)
        if self.stage == STAGE_WEIGHTS:
            expected = sum(piece_numel(n, self.world_size) for n in numels)
            if flat != expected:
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
        hyperparameters = plain_hyperparameters(self._hyperparameters(0), members=())
        count = max(self.group_of, default=-1) + 1
        return tuple(
            Group(
                names=self._members(group),
                hyperparameters=hyperparameters[group] if hyperparameters else {},
                state=self._state_keys(first, group),
            )
            for group in range(max(count, len(hyperparameters)))
        )

    def _members(self, group: int) -> tuple[str, ...]:
        """Return the parameters of a group in the optimizer's order."""
        names = tuple(n for b in self.buffers if b.group == group for n in b.names)
        if not self._round_robin:
            return names
        places = round_robin_order(len(names), self.world_size)
        return tuple(name for _, name in sorted(zip(places, names, strict=True)))

    def _state_keys(self, shard: Shard, group: int) -> tuple[StateKey, ...]:
        for index, other in enumerate(self.group_of):
            if other == group and (state := self._state(shard, index)):
                return tuple(self._state_key(key, state[key], index) for key in sorted(state))
        return ()

    def _state_key(self, key: str, value: object, index: int) -> StateKey:
        if is_lean(value) and self._is_by_parameter:
            return state_key(key, value[0], elementwise=True)
        elementwise = isinstance(value, torch.Tensor) and value.ndim == 1
        if elementwise or not isinstance(value, torch.Tensor) or value.ndim == 0:
            return state_key(key, value, elementwise=elementwise)
        msg = (
            f"{self._where}: the optimizer state {key!r} of flat buffer {index} has the shape "
            f"{tuple(value.shape)}, expected one value per element or a scalar: it cannot be "
            "resharded. Pass load_optimizer_state=False to start with a fresh optimizer"
        )
        raise UnsupportedError(msg)

    def _state(self, shard: Shard, index: int) -> Mapping[str, Any]:
        """Return a flat buffer's states.

        A step counter of one element is a scalar: DeepSpeed's elastic loader for ZeRO-1/2 adds a
        dimension to torch's counter, and later saves of that run have it too.
        """
        if not self._numels[index]:
            return {}
        if self.elastic:
            step = (states := shard[STATES][index]).get("step")
            if isinstance(step, torch.Tensor) and step.shape == (1,):
                return {**states, "step": step.reshape(())}
            return states
        states = shard[OPTIMIZER] if self.stage == STAGE_WEIGHTS else shard[STATES]
        in_order = [i for group in states["param_groups"] for i in group["params"]]
        # One flat tensor per group in ZeRO-1/2; in ZeRO-3 the sub-groups in order.
        return states["state"].get(in_order[index] if in_order else index, {})

    @property
    def _is_by_parameter(self) -> bool:
        """Whether each state is a list of one tensor per parameter (elastic ZeRO-3)."""
        return self.elastic and self.stage == STAGE_WEIGHTS

    def _groups_by_state(self, first: Shard) -> tuple[int, ...]:
        """Return the group of each sub-group: sub-groups with the same state keys share one.

        Elastic ZeRO-3 shards do not record the parameter groups: ``regroup`` uses the live ones.
        """
        kept = [frozenset(self._state(first, index)) for index in range(len(self._numels))]
        return tuple(list(dict.fromkeys(kept)).index(states) for states in kept)

    def regroup(self, group_of: Mapping[str, int]) -> None:
        """Use the live model's groups, if the shards do not record them."""
        groups = [{group_of.get(n, 0) for n in names} or {0} for names in self._numels]
        if mixed := [i for i, of_names in enumerate(groups) if len(of_names) > 1]:
            msg = (
                f"{self._where}: sub-group {mixed[0]} has parameters of the groups "
                f"{sorted(groups[mixed[0]])} of this model: it was saved with other parameter "
                "groups. Configure the saved groups, or pass load_optimizer_state=False"
            )
            raise CheckpointMismatchError(msg)
        self.group_of = tuple(of_names.pop() for of_names in groups)
        first = self._shard(0)
        self._check_states_of_groups(first)
        self.buffers = tuple(self._buffer(first, i) for i in range(len(self._numels)))
        self.groups = self._groups(first)

    def _check_states_of_groups(self, first: Shard) -> None:
        """Check that the sub-groups of a live group have the same states, or none."""
        tables: dict[int, tuple[int, list[str]]] = {}
        for index, group in enumerate(self.group_of):
            if not (states := sorted(self._state(first, index))):
                continue
            other, kept = tables.setdefault(group, (index, states))
            if states != kept:
                msg = (
                    f"{self._where}: sub-groups {other} and {index} have parameters of group "
                    f"{group} of this model, but the states {kept} and {states}: it was saved "
                    "with other parameter groups. Configure the saved groups, or pass "
                    "load_optimizer_state=False"
                )
                raise CheckpointMismatchError(msg)

    # -- locating state --------------------------------------------------------------------------

    def locate(self, key: str, transfer: Transfer) -> StoredRun:
        shard = self._shard(transfer.source_rank)
        start = transfer.source_offset
        if key == WEIGHT:
            tensor = _flats_of(shard)[transfer.source_buffer]
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
        shard = self._shard(at.rank)
        state = self._state(shard, at.buffer)
        group = self.groups[self.group_of[at.buffer]]
        return self._load(at.rank, {key.name: state[key.name] for key in group.scalars})

    def unmatched(self) -> str:
        """Describe why the optimizer state cannot be restored; else empty."""
        first = self._shard(0)
        in_states = any(key.name == "step" for group in self.groups for key in group.state)
        if self.elastic and first.get(GROUP_STEP) and not in_states:
            return (
                "its optimizer counts steps in the parameter groups, which elastic shards do not "
                f"contain, so the step counters would restart at zero; {FRESH_OPTIMIZER_HINT}"
            )
        if self._keeps_whole_momenta(first):
            return (
                "ZeRO-1/2 keeps Muon's momentum of whole parameters, at offsets that the file does "
                f"not record; {FRESH_OPTIMIZER_HINT}"
            )
        states = first.get(OPTIMIZER if self.stage == STAGE_WEIGHTS else STATES)
        entries = states.get("state", {}) if isinstance(states, Mapping) else {}
        if surplus := [repr(key) for key in entries if not isinstance(key, int)]:
            return (
                f"its optimizer has state that belongs to no parameter (keys {', '.join(surplus)}),"
                " which is only restored from checkpoints of this library; "
                f"{FRESH_OPTIMIZER_HINT}"
            )
        lacking = [i for i in sorted(self._stateless) if self.groups[self.group_of[i]].state]
        if not lacking:
            return ""
        names = format_names(name for index in lacking for name in self.buffers[index].names)
        return (
            f"it has no optimizer state for {names}, but for other parameters of the same group: "
            "with partial offload (offload_optimizer's ratio), DeepSpeed does not save the state "
            f"on the GPU; {FRESH_OPTIMIZER_HINT}"
        )

    def _keeps_whole_momenta(self, first: Shard) -> bool:
        """Whether ZeRO-1/2 states have another layout than the masters: those of Muon.

        Elastic shards do not record Muon's groups, but the size of its state is not that of the
        partition.
        """
        if self.stage == STAGE_WEIGHTS:
            return False
        return any(group.hyperparameters.get("use_muon") for group in self.groups) or any(
            isinstance(value, torch.Tensor)
            and value.ndim == 1
            and value.numel() not in self._possible(0, index)
            for index in range(len(self.buffers))
            for value in self._state(first, index).values()
        )

    def steps(self) -> list[int]:
        """Return Adam's step counters in rank 0's shard: of flat buffers, or of groups.

        Other optimizers do not start at zero, or do not count.
        """
        states = [self._state(self._shard(0), i) for i, b in enumerate(self.buffers) if b.names]
        of_adam = [state for state in states if "exp_avg" in state]
        counts = [state["step"] for state in of_adam if "step" in state]
        if of_adam and not counts:
            counts = [group["step"] for group in self._hyperparameters(0) if "step" in group]
        return [int(step) for step in self._load(0, counts)]

    # -- consistency of the shards ---------------------------------------------------------------

    def check_all(self) -> None:
        """Compare the shards of all ranks with rank 0's; warn if hyperparameters differ."""
        hyperparameters = []
        for rank in range(self.world_size):
            what = f"{self._where}: a hyperparameter of rank {rank}"
            hyperparameters.append(
                [
                    {key: canonical_repr(value, what) for key, value in group.items()}
                    for group in self._hyperparameters(rank)
                ]
            )
            self._check(rank, *([sorted(g) for g in hyperparameters[at]] for at in (rank, 0)))
        if not (summary := _describe_differences(hyperparameters)):
            return
        counted = any(self._counters(0, index) for index in range(len(self.buffers)))
        # Below ZeRO-3 masters are compared with the weights of one file when they are read.
        if self.stage == STAGE_WEIGHTS and not counted:
            msg = (
                f"{self._where}: {summary}; the optimizer has no step counters, so the shards may "
                "be of different saves. Resume from another checkpoint"
            )
            raise CheckpointFormatError(msg)
        log.warning(
            "%s: the ranks trained with different hyperparameters: %s. Each rank updated its "
            "part of the weights with its own values. A resume uses rank 0's values on every "
            "rank. A scheduler that steps on a metric needs the same value on all ranks: "
            "self.log(..., sync_dist=True).",
            self._where,
            summary,
        )

    def _check(self, rank: int, names: list[list[str]], first_names: list[list[str]]) -> None:
        shard, first = self._shard(rank), self._shard(0)
        metadata, wanted = (shard_metadata(each, self._where) for each in (shard, first))
        for what, ours, theirs in (
            ("ZeRO stage", metadata.stage, wanted.stage),
            ("wrapper", metadata.engine, wanted.engine),
            ("DeepSpeed version", shard.get("ds_version"), first.get("ds_version")),
            ("number of ranks", metadata.world_size, wanted.world_size),
            ("number of flat buffers", len(metadata.flats), len(self.buffers)),
            ("parameter groups", names, first_names),
        ):
            self._check_same(rank, what, ours, theirs)
        for index, flat in enumerate(metadata.flats):
            if flat.numel() not in self._possible(rank, index):
                self._refuse_numel(rank, index, flat.numel())
            state = self._state(shard, index)
            table = () if index in self._stateless else self.groups[self.group_of[index]].state
            keys = {key.name for key in table}
            if set(state) != keys:
                self._refuse(
                    f"{self._name(rank)} has the states {sorted(state)}, {self._name(0)} has "
                    f"{sorted(keys)}: they are not of one save"
                )
            self._check_lean(rank, index, state)
            counted = keys - {key.name for key in table if key.may_differ}
            counters, wanted_counters = (
                {key: value for key, value in self._counters(r, index).items() if key in counted}
                for r in (rank, 0)
            )
            if canonical_repr(counters) != canonical_repr(wanted_counters):
                self._refuse(
                    f"{self._name(rank)} has {counters} for flat buffer {index}, {self._name(0)} "
                    f"has {wanted_counters}: they were saved at other steps"
                )
        # Ranks agree on overflows. Checked last: the other differences are more informative.
        scalers = [sorted(stub_fields(each.get("loss_scaler")).items()) for each in (shard, first)]
        self._check_same(rank, "loss scaler", *scalers)

    def _check_lean(self, rank: int, index: int, state: Mapping[str, Any]) -> None:
        """Check that each lean state has one tensor per parameter, none too short."""
        numels = self.buffers[index].numels
        for key, value in state.items() if self._is_by_parameter else ():
            if not is_lean(value):
                continue
            sizes = [tensor.numel() for tensor in value]
            starts = [(n, piece_start(n, self.world_size, rank)) for n in numels]
            parts = [max(0, min(piece_numel(n, self.world_size), n - at)) for n, at in starts]
            if len(sizes) != len(parts) or any(
                h < part for h, part in zip(sizes, parts, strict=True)
            ):
                self._refuse(
                    f"{self._name(rank)} has tensors of {sizes} elements for the state {key!r} of "
                    f"sub-group {index}, expected {parts}: the files are of different runs, or "
                    "damaged"
                )

    def _check_same(self, rank: int, what: str, mine: object, theirs: object) -> None:
        if mine != theirs:
            self._refuse(
                f"{self._name(rank)} has the {what} {mine}, {self._name(0)} has {theirs}: they are "
                "not of one save"
            )

    def _counters(self, rank: int, index: int) -> dict[str, Scalar]:
        state = self._state(self._shard(rank), index)
        return self._load(rank, {k: v for k, v in sorted(state.items()) if not is_vector(v)})

    def _hyperparameters(self, rank: int) -> list[dict[str, Any]]:
        groups = _param_groups_of(self._shard(rank))
        return self._load(rank, [{k: v for k, v in g.items() if k != "params"} for g in groups])

    def _possible(self, rank: int, index: int) -> tuple[int, ...]:
        """Return the possible sizes of a rank's flat buffer: with and without padding."""
        buffer = self.buffers[index]
        if self.stage == STAGE_WEIGHTS:
            return (sum(piece_numel(n, self.world_size) for n in buffer.numels),)
        start, stop = buffer.partition_range(rank)
        total = sum(buffer.numels) + sum(buffer.paddings)
        return stop - start, min(stop, max(start, total)) - start

    def _refuse_numel(self, rank: int, index: int, numel: int) -> None:
        whole = sum(self._numels[index].values())
        self._refuse(
            f"flat buffer {index} of rank {rank}'s shard has {numel} elements, expected rank "
            f"{rank}'s part of {whole} on {self.world_size} ranks: the files are of different "
            "runs, or damaged"
        )

    def _refuse(self, what: str) -> NoReturn:
        msg = f"{self._where}: {what}. {RESUME_FROM_ANOTHER}"
        raise CheckpointFormatError(msg)
