"""The reader of checkpoints of whole tensors: single files and directories of chunks.

One holder has all parameters, each in its own flat buffer. Only the live model determines which
tensors are weights or buffers, which names are tied, and which group a parameter belongs to. So the
manifest is built when the checkpoint is opened for a model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch

from lightning_elastic_zero.core.layout import Fragment, Transfer, spans
from lightning_elastic_zero.core.manifest import (
    Group,
    Manifest,
    Parameter,
    StateKey,
    TrainingProgress,
    Writer,
)
from lightning_elastic_zero.core.partition import FlatBuffer
from lightning_elastic_zero.core.save_files import FP32_STAGE_3, OPTIMIZER, OURS
from lightning_elastic_zero.core.tensors import Scalar, dtype_name, precision_of, state_key
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.deepspeed_reader import ENGINE_KEYS
from lightning_elastic_zero.formats.reader import (
    COMPARED_ELEMENTS,
    FRESH_OPTIMIZER_HINT,
    WEIGHT,
    CheckpointReader,
    Location,
    SharedState,
    SourceInfo,
    StoredTensors,
    duplicate_names,
    file_list_digest,
    is_extra_state,
    plain_hyperparameters,
    read_run,
    storage_location,
)
from lightning_elastic_zero.formats.torch_read import ForeignFiles, StoredRun

# -- the state of torch's optimizers --------------------------------------------------------------
#
# ``{"state": {id: {...}}, "param_groups": [{"params": [ids], ...}]}``. The meaning of an id depends
# on the software that wrote it:
#
# - ``torch.optim`` numbers the parameters that it was given, by group, with frozen ones;
# - Lightning's FSDP and ModelParallel strategies number ``model.parameters()`` in a full file;
# - ``param_names`` and state dicts keyed by name contain the names.
#
# Each meaning is compared with the live model: members of groups and shapes of states. Exactly one
# must fit. Without a live model (for tools), positions are used if only one order fits the shapes;
# weights that no optimizer owns may be frozen weights or buffers and are reported as weights.

Key: TypeAlias = "int | str"
Table: TypeAlias = "tuple[tuple[str, ...], ...]"
"""The names of each group's members, in the order of the ids; empty for an unknown id."""

CURRENT, AVERAGING = "current_model_state", "averaging_state"
"""Entries of Lightning's ``WeightAveraging``: the trained weights, and its own state. The weights
in ``state_dict`` are then their average."""

_FUSED_ADAM = {"betas", "bias_correction", "step"}
"""Keys of a group of DeepSpeed's FusedAdam; DeepSpeedCPUAdam has ``amsgrad`` too. Without ZeRO, it
steps a whole group, but counts on the last parameter only (``deepspeed/ops/adam/fused_adam.py``)"""

KIND = "single file of torch.save"

WEIGHTS, OPTIMIZERS = "state_dict", "optimizer_states"

# Files of other software may also have an entry ``optimizer_state_dict``.
_OF_A_SHARD = {"ds_version", "ds_config", FP32_STAGE_3, OURS}


@dataclass(frozen=True, slots=True)
class NamedOptimizerState:
    """The groups and states of an optimizer by the live model's names."""

    groups: tuple[Group, ...]
    states: Mapping[str, Mapping[str, Any]]
    """The states of each parameter, by key; their tensors need no values."""
    are_members_known: bool = True
    """False: the members of the groups are those of the live groups, which may be wrong."""


def _refuse_state(why: str) -> NoReturn:
    msg = f"{why}; {FRESH_OPTIMIZER_HINT}"
    raise CheckpointMismatchError(msg)


def is_optimizer(tree: object) -> bool:
    """Whether a tree is a state dict of a torch optimizer."""
    return (
        isinstance(tree, Mapping)
        and isinstance(tree.get("state"), Mapping)
        and isinstance(tree.get("param_groups"), (list, tuple))
        and all(isinstance(g, Mapping) and "params" in g for g in tree["param_groups"])
    )


def names_in(groups: Sequence[Mapping[str, Any]], known: Container[str]) -> Table:
    """Return the names of the groups' members, if the groups list them; else empty.

    ``named_parameters()`` of a submodule lacks the submodule's name, and that of a wrapper adds the
    wrapper's. If no name is known, positions identify the parameters.
    """
    if all("param_names" in group for group in groups):
        table = tuple(tuple(group["param_names"]) for group in groups)
        if any(name in known for names in table for name in names):
            return table
    table = tuple(tuple(group["params"]) for group in groups)
    return table if all(isinstance(n, str) for names in table for n in names) else ()


def _live_names_in(groups: Sequence[Mapping[str, Any]], canonical: Mapping[str, str]) -> Table:
    """Return the live names of the groups' members, if the groups list names; else empty."""
    return tuple(tuple(canonical.get(n, n) for n in names) for names in names_in(groups, canonical))


def _check_names(
    groups: Sequence[Mapping[str, Any]], table: Table, known_as: Mapping[str, Sequence[str]]
) -> None:
    """Refuse positions if the names that the groups list are those of other parameters.

    ``known_as``: all names of each parameter. One of two names may have a prefix.
    """
    for group, names in zip(groups, table, strict=True):
        for given, name in zip(group.get("param_names", ()), names, strict=False):
            pairs = [(f".{given}", f".{known}") for known in known_as.get(name, (name,))]
            if not any(one.endswith(other) or other.endswith(one) for one, other in pairs):
                _refuse_state(
                    f"the optimizer state is stored by position and by name, and has the name "
                    f"{given} at the place of {name}"
                )


def by_position(saved: Mapping[str, Any]) -> bool:
    """Whether a state dict identifies parameters only by numbers."""
    groups = saved["param_groups"]
    named = all("param_names" in group for group in groups)
    return not named and not all(isinstance(k, str) for g in groups for k in g["params"])


def find_members(
    saved: Mapping[str, Any], live: Manifest, order: Sequence[str], canonical: Mapping[str, str]
) -> Table:
    """Return the live names of the groups' members; raise an error if they are not certain."""
    shapes = {p.name: p.shape for p in live.parameters}
    return _IdInterpretations(
        saved["param_groups"], saved["state"], live, order, canonical, shapes
    ).unambiguous()


def name_states(saved: Mapping[str, Any], live: Manifest, table: Table) -> NamedOptimizerState:
    """Find the parameter of each state, given the members of the groups."""
    saved_groups: Sequence[Mapping[str, Any]] = saved["param_groups"]
    shapes = {p.name: p.shape for p in live.parameters}
    states = {
        name: saved["state"][key]
        for names, group in zip(table, saved_groups, strict=True)
        for name, key in zip(names, group["params"], strict=True)
        if key in saved["state"]
    }
    owned = {p.name for p in live.optimized}
    # An optimizer may have frozen parameters, without state. They are not members here.
    trained = owned | (states.keys() - {p.name for p in live.parameters if not p.numel})
    members = tuple(tuple(name for name in names if name in trained) for names in table)
    elementwise = _elementwise(states, shapes)
    return NamedOptimizerState(
        tuple(
            Group(names, fields, _table_of(names, states, elementwise))
            for names, fields in zip(members, plain_hyperparameters(saved_groups), strict=True)
        ),
        states,
    )


@dataclass(frozen=True, slots=True)
class _IdInterpretations:
    """The possible meanings of the ids of a state dict in a live model."""

    groups: Sequence[Mapping[str, Any]]
    states: Mapping[Key, Mapping[str, Any]]
    live: Manifest
    order: Sequence[str]
    canonical: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    def unambiguous(self) -> Table:
        """Return the only meaning that fits."""
        ids = [key for group in self.groups for key in group["params"]]
        if table := _live_names_in(self.groups, self.canonical):
            if misfit := next(self._misfits(table), None):  # Unknown names are reported later.
                _refuse_state(f"the optimizer's state of {misfit}")
            return table
        fitting = {table for table in self._positions() if self._fits(table)}
        if len(fitting) == 1 or (fitting and not self.states):
            table = fitting.pop()
            known_as = {p.name: (p.name, *p.aliases) for p in self.live.parameters}
            _check_names(self.groups, table, known_as)
            return table
        if fitting:
            first, second = sorted(fitting)
            differ = [n for n, m in zip(chain(*first), chain(*second), strict=True) if n != m]
            _refuse_state(
                "the optimizer state is stored by position, and positions in the order of the "
                "optimizer and of the model both fit, but differ in "
                f"{format_names(differ)}"
            )
        saved = ", ".join(str(len(group["params"])) for group in self.groups)
        live_counts = ", ".join(str(len(group.names)) for group in self.live.groups)
        stateless = sum(key not in self.states for key in ids)
        msg = (
            f"the optimizer state is stored by position, in groups of {saved} parameters "
            f"({stateless} of them without state). This run has groups of {live_counts} trained "
            f"parameters and {len(self.live.frozen)} frozen ones, and no order matches the shapes: "
            f"configure the groups of the saved run, or {FRESH_OPTIMIZER_HINT}"
        )
        raise CheckpointMismatchError(msg)

    def _positions(self) -> Iterator[Table]:
        """Yield the possible meanings: positions in the optimizer's order, or in the model's."""
        ids = [tuple(group["params"]) for group in self.groups]
        live = self.live.groups
        if [len(group) for group in ids] == [len(g.names) for g in live] and self._in_sequence():
            yield tuple(group.names for group in live)
        if not {p.name for p in self.live.parameters} <= set(self.order):
            return
        everyone = [key for group in ids for key in group]
        ascending = all(list(group) == sorted(set(group)) for group in ids)
        in_range = all(isinstance(k, int) and 0 <= k < len(self.order) for k in everyone)
        if ascending and in_range and len(set(everyone)) == len(everyone):
            yield tuple(tuple(self.order[key] for key in group) for group in ids)

    def _in_sequence(self) -> bool:
        """Whether ids are consecutive, and the model's parameters have the saved order.

        If the order of the model has changed, the optimizer's may have as well.
        """
        ids = [key for group in self.groups for key in group["params"]]
        live_names = [p.name for p in self.live.parameters]
        in_file = [name for name in self.order if name in self.shapes]
        known = set(in_file)
        return ids == list(range(len(ids))) and in_file == [
            name for name in live_names if name in known
        ]

    def _fits(self, table: Table) -> bool:
        """Whether a meaning matches the live groups and the shapes of their members."""
        live = self.live.groups
        owned = {name for group in live for name in group.names}
        members = [{name for name in names if name in owned} for names in table]
        return members == [set(group.names) for group in live] and not any(self._misfits(table))

    def _misfits(self, table: Table) -> Iterator[str]:
        """Yield each parameter whose state has another shape, or that is frozen."""
        frozen = {p.name for p in self.live.parameters if p.group is None and p.numel}
        elementwise = with_dimensions(self.states.values())
        for names, group in zip(table, self.groups, strict=True):
            for name, key in zip(names, group["params"], strict=True):
                shape, state = self.shapes.get(name), self.states.get(key)
                if shape is None or not state:
                    continue
                if name in frozen and isinstance(key, int):
                    yield f"{name}, which is frozen"
                for what, value in state.items():
                    fitting = (shape,) if what in elementwise else ((), shape)
                    if isinstance(value, torch.Tensor) and tuple(value.shape) not in fitting:
                        yield (
                            f"{name} has {what!r} of shape {tuple(value.shape)}, the parameter has "
                            f"{shape}: state that is not element-wise cannot be cut"
                        )


def with_dimensions(states: Iterable[object]) -> frozenset[str]:
    """Return the states that are more than one number for some parameter."""
    return frozenset(
        key
        for state in states
        if isinstance(state, Mapping)
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.ndim
    )


def _elementwise(
    states: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]
) -> frozenset[str]:
    """Return the states with one value per element, as parameters with dimensions show."""
    shaped = [state for name, state in states.items() if shapes.get(name, (1,))]
    if states and not shaped:
        _refuse_state(
            "all trained parameters are scalars, so element-wise states cannot be recognised"
        )
    return with_dimensions(shaped)


def _table_of(
    names: Sequence[str], states: Mapping[str, Mapping[str, Any]], elementwise: frozenset[str]
) -> tuple[StateKey, ...]:
    """Return the states of a group's members."""
    if not states:
        return ()
    if lacking := [name for name in names if not states.get(name)]:
        if len(lacking) == len(names):
            return ()
        _refuse_state(
            f"the optimizer has no state for {format_names(lacking)}, which had not been trained "
            f"when it was saved, but for others of the group"
        )
    tables = {name: _keys(states[name], elementwise) for name in names}
    first = tables[names[0]] if names else ()
    if others := [name for name in names if tables[name] != first]:
        _refuse_state(
            f"the optimizer has the states {[k.name for k in first]} for {names[0]}, but "
            f"{[k.name for k in tables[others[0]]]} for {others[0]} of the same group, or of other "
            f"types"
        )
    return first


def _keys(state: Mapping[str, Any], elementwise: frozenset[str]) -> tuple[StateKey, ...]:
    keys = [state_key(key, value, elementwise=key in elementwise) for key, value in state.items()]
    return tuple(sorted(keys, key=lambda key: key.name))


def members_of(saved: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Table:
    """Return the names of the members of a state dict's groups."""
    groups: Sequence[Mapping[str, Any]] = saved["param_groups"]
    ids = [tuple(group["params"]) for group in groups]
    if names := names_in(groups, weights):
        if strange := [n for group in names for n in group if n not in weights]:
            msg = f"the optimizer has state for {strange[0]}, but no weight has that name"
            raise CheckpointMismatchError(msg)
        return names
    again = duplicate_names(weights)
    candidates = [
        (name, tuple(t.shape))
        for name, t in weights.items()
        if name not in again and (t.is_floating_point() or t.is_complex())
    ]
    elementwise = with_dimensions(saved["state"].values())
    wanted = [_shape_of(saved["state"].get(key), elementwise) for group in ids for key in group]
    first = _in_order(wanted, candidates)
    last = _in_order(wanted[::-1], candidates[::-1])[::-1]
    if len(first) < len(wanted) or first != last:
        msg = (
            f"the optimizer state is stored by position, and the {len(wanted)} positions match "
            f"{'several orders' if first else 'no order'} of the {len(candidates)} weights: the "
            "model's code is needed"
        )
        raise CheckpointMismatchError(msg)
    in_order = iter(first)
    table = tuple(tuple(next(in_order) for _ in group) for group in ids)
    _check_names(groups, table, {n: [n, *(o for o in again if again[o] == n)] for n in first})
    return table


def _shape_of(state: object, elementwise: frozenset[str]) -> tuple[int, ...] | None:
    """Return the shape of a parameter with this state; None if it is unknown."""
    items = state.items() if isinstance(state, Mapping) else ()
    shapes = [
        tuple(value.shape)
        for key, value in items
        if key in elementwise and isinstance(value, torch.Tensor)
    ]
    return next((shape for shape in shapes if shape), shapes[0] if shapes else None)


def _in_order(
    wanted: Sequence[tuple[int, ...] | None], candidates: Sequence[tuple[str, tuple[int, ...]]]
) -> list[str]:
    """Return the first candidates, in order, that have the shapes; possibly too few."""
    found: list[str] = []
    for name, shape in candidates:
        if len(found) < len(wanted) and wanted[len(found)] in (None, shape):
            found.append(name)
    return found


# -- a checkpoint and a live model -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FullState:
    """The content of a checkpoint."""

    weights: Mapping[str, torch.Tensor]
    """Parameters and buffers by name, in the model's order (``ordered``); they need no values."""
    optimizers: Sequence[Mapping[str, Any]]
    """State dicts of torch optimizers; only the hyperparameters need values."""
    save_id: str
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's state; its tensors need no values."""
    ordered: bool = True
    """Whether ``weights`` has the order of the saved model."""
    info: SourceInfo = field(default_factory=partial(SourceInfo, ""))
    """Without what no checkpoint of these kinds contains, and what follows from the live model."""


@dataclass(frozen=True, slots=True)
class BoundState:
    """The content of a checkpoint, matched with a live model."""

    manifest: Manifest
    weight_of: Mapping[str, str] = field(default_factory=dict)
    """The checkpoint's name of each parameter."""
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The optimizer states of each trained parameter."""
    ties: tuple[tuple[str, str], ...] = ()
    """Pairs of names in the checkpoint that are one tied weight: their values must be equal."""
    unmatched: str = ""
    are_members_known: bool = True
    """Both as in ``SourceInfo``."""


def bind(full_state: FullState, live: Manifest) -> BoundState:
    """Match a checkpoint with a live model; ``check_compatible`` reports what does not fit."""
    weight_of: dict[str, str] = {}
    ties = []
    canonical = {n: p.name for p in live.parameters for n in (p.name, *p.aliases)}
    unknown = _second_names(full_state, live, canonical)
    for name in (name for name in full_state.weights if name not in unknown):
        first = weight_of.setdefault(canonical.get(name, name), name)
        if first != name:
            ties.append((first, name))
    buffers = tuple(n for n in live.module_buffers if weight_of.get(n) == n)
    for name in buffers:
        del weight_of[name]
    # If a tied weight lacks its first name, its place in the order is unknown.
    order = [name for name in weight_of if name in full_state.weights]
    if not full_state.ordered:
        order = [p.name for p in live.parameters if p.name in order]
    named, why = _named_states(full_state, live, canonical, order)
    weight_names = full_state.weights.keys() - set(buffers)
    aliases = {p.name: tuple(n for n in p.aliases if n in weight_names) for p in live.parameters}
    manifest = _manifest(full_state, weight_of, buffers, named.groups, aliases)
    return BoundState(
        manifest,
        weight_of,
        named.states,
        tuple(ties),
        full_state.info.unmatched or why,
        named.are_members_known,
    )


def _second_names(full_state: FullState, live: Manifest, canonical: Mapping[str, str]) -> set[str]:
    """Return names of buffers that the model knows by another name."""
    known = {*canonical, *live.module_buffers}
    again = duplicate_names(full_state.weights)
    return {n for n, first in again.items() if first in live.module_buffers and n not in known}


def _named_states(
    full_state: FullState, live: Manifest, canonical: Mapping[str, str], order: Sequence[str]
) -> tuple[NamedOptimizerState, str]:
    """Return the optimizer state by name, or none and the reason."""
    saved: Mapping[str, Any] = {}
    why = ""
    members: Table = ()
    if live.groups and len(full_state.optimizers) > 1:
        why = (
            f"it contains the states of {len(full_state.optimizers)} optimizers, this run has one; "
            f"{FRESH_OPTIMIZER_HINT}"
        )
    elif live.groups and is_optimizer(next(iter(full_state.optimizers), None)):
        saved = full_state.optimizers[0]
        members = _live_names_in(saved["param_groups"], canonical)
        try:
            if not full_state.ordered and not members:
                _check_distinct_shapes(live)
            members = find_members(saved, live, order, canonical)
            return name_states(saved, live, members), ""
        except CheckpointMismatchError as error:
            why = str(error)
    return _without_state(live, saved, members), why


def _check_distinct_shapes(live: Manifest) -> None:
    """Refuse parameters that only their position distinguishes."""
    first: dict[tuple[int, ...], str] = {}
    for parameter in live.optimized:
        if (other := first.setdefault(parameter.shape, parameter.name)) != parameter.name:
            msg = (
                "the optimizer state is stored by position, but the order of the saved parameters "
                f"is unknown: the states of {other} and {parameter.name}, which have the same "
                f"shape, are ambiguous; {FRESH_OPTIMIZER_HINT}"
            )
            raise CheckpointMismatchError(msg)


def _without_state(live: Manifest, saved: Mapping[str, Any], members: Table) -> NamedOptimizerState:
    """Return the saved groups without states; ``members`` is empty if they are not certain."""
    fields = plain_hyperparameters(saved.get("param_groups", ()))
    owned = {p.name for p in live.optimized}
    names = [tuple(name for name in of_group if name in owned) for of_group in members]
    names = names or [group.names for group in live.groups]
    names += [()] * (len(fields) - len(names))
    groups = tuple(Group(names[i], each, ()) for i, each in enumerate(fields))
    is_one = len(fields) == len(live.groups) == 1
    return NamedOptimizerState(
        groups or tuple(Group(of_group, {}, ()) for of_group in names),
        {},
        are_members_known=bool(members) or is_one or not fields,
    )


def _manifest(
    full_state: FullState,
    weight_of: Mapping[str, str],
    buffers: tuple[str, ...],
    groups: tuple[Group, ...],
    aliases: Mapping[str, tuple[str, ...]],
) -> Manifest:
    group_of = {name: index for index, group in enumerate(groups) for name in group.names}
    parameters = tuple(
        Parameter(
            name,
            tuple(full_state.weights[saved].shape),
            dtype_name(full_state.weights[saved].dtype),
            group_of.get(name),
            aliases.get(name, ()),
        )
        for name, saved in weight_of.items()
    )
    names = {p.name for p in parameters}
    groups = tuple(replace(g, names=tuple(n for n in g.names if n in names)) for g in groups)
    step = full_state.trainer.get("global_step")
    version = full_state.trainer.get("pytorch-lightning_version")
    dtype = _dtype_of([p for p in parameters if p.group is not None] or parameters)
    return Manifest(
        save_id=full_state.save_id,
        stage=0,
        world_size=1,
        precision=precision_of(dtype),
        master_dtype=dtype_name(dtype),
        parameters=parameters,
        groups=groups,
        # One holder, and a buffer for each parameter: their scalar states may differ.
        buffers=tuple(
            FlatBuffer(p.group, (p.name,), (p.numel,), partition_numel=p.numel)
            for p in parameters
            if p.group is not None
        ),
        module_buffers=buffers,
        files=(),
        # Only DeepSpeed counts samples and micro steps.
        progress=TrainingProgress(global_steps=step if type(step) is int else 0),
        writer=Writer(lightning=str(version or "")),
        weights_only=not full_state.optimizers,
    )


def _dtype_of(parameters: Sequence[Parameter]) -> torch.dtype:
    """Return the floating-point dtype that most elements have."""
    numels: dict[torch.dtype, int] = {}
    for parameter in parameters:
        dtype: torch.dtype = getattr(torch, parameter.dtype)
        if dtype.is_floating_point:
            numels[dtype] = numels.get(dtype, 0) + parameter.numel
    return max(numels, key=lambda dtype: numels[dtype], default=torch.float32)


def refuse_several(optimizers: int) -> None:
    """Raise ``CheckpointMismatchError`` if there is more than one optimizer."""
    if optimizers > 1:
        msg = f"it contains the states of {optimizers} optimizers"
        raise CheckpointMismatchError(msg)


class FullStateReader(CheckpointReader):
    """A checkpoint of whole tensors by name, read by ranges: no rank reads the others' parts."""

    _full_state: FullState

    def __init__(self, path: Path, files: ForeignFiles, tensors: StoredTensors) -> None:
        self.files = files
        self.path = path
        self._tensors = tensors
        self._extra_states: Mapping[str, Any] = {}
        self._own: Manifest | None = None
        """The model that ``bind_without_model`` binds to instead of a live one."""

    def _set_content(self, full_state: FullState, live: Manifest | None = None) -> None:
        """Match the content with a live model, if given, and set ``manifest`` and ``info``."""
        if live is None:
            names = {name: name for name in full_state.weights}
            bound = BoundState(_manifest(full_state, names, (), (), {}), names)
        else:
            bound = bind(full_state, live)
        self._full_state = full_state
        for first, other in bound.ties:
            if not self._is_same(full_state.weights[first], full_state.weights[other]):
                msg = (
                    f"{self.path}: {first} and {other} are one tied weight here, and have "
                    "different values in the checkpoint: untie them, or resume from a checkpoint "
                    "of this model"
                )
                raise CheckpointMismatchError(msg)
        self._bound = bound
        self._scalars: Mapping[str, dict[str, Scalar]] | None = None
        self.manifest = bound.manifest
        without_state = ("optimizer state",) if bound.manifest.weights_only else ()
        self.info = replace(
            full_state.info,
            lacks=("RNG states", *without_state, *full_state.info.lacks),
            hyperparameters=any(g.hyperparameters for g in bound.manifest.groups),
            has_counters="global_step" in full_state.trainer,
            unmatched=bound.unmatched,
            are_members_known=bound.are_members_known,
        )

    def bind_without_model(self) -> None:
        members: Table = ()
        why = ""
        try:
            members = self._members_without_model()
        except CheckpointMismatchError as error:
            why = str(error)
        weights = self._full_state.weights
        again = duplicate_names(weights)
        aliases: dict[str, tuple[str, ...]] = {}
        for other, first in again.items():
            aliases[first] = (*aliases.get(first, ()), other)
        names = {name: name for name in weights if name not in again}
        groups = tuple(Group(of_group, {}, ()) for of_group in members)
        self._own = _manifest(self._full_state, names, (), groups, aliases)
        self.bind(self._own)
        if why:
            self.info = replace(self.info, unmatched=why)

    def _members_without_model(self) -> Table:
        """Return the members of the optimizer's groups; raise an error if they are unclear."""
        optimizers = self._full_state.optimizers
        refuse_several(len(optimizers))
        return members_of(optimizers[0], self._full_state.weights) if optimizers else ()

    def trainer_entry(self, name: str) -> object:
        return self._full_state.trainer.get(name)

    def _is_same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        if storage_location(one) == storage_location(other):
            return True
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        for start, stop in spans(0, one.numel(), COMPARED_ELEMENTS):
            runs = (StoredRun(tensor, start, stop) for tensor in (one, other))
            bits = (read_run((self._tensors, run)).view(torch.uint8) for run in runs)
            if not torch.equal(*bits):
                return False
        return True

    def locate(self, key: str, transfer: Transfer) -> Location:
        if key == WEIGHT:
            tensor = self._full_state.weights[self._bound.weight_of[transfer.name]]
        else:
            tensor = self._bound.states[transfer.name][key]
        return self._tensors, StoredRun(tensor, transfer.start, transfer.stop)

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        if self._scalars is None:
            # All at once: each one would read a chunk of the file for a few bytes.
            names = {key.name for group in self.manifest.groups for key in group.scalars}
            self._scalars = self._tensors.load_tree(
                {
                    name: {k: v for k, v in state.items() if k in names}
                    for name, state in self._bound.states.items()
                }
            )
            for group in self.manifest.groups:
                held = group.hyperparameters.keys()
                if held >= _FUSED_ADAM and "amsgrad" not in held:
                    of_group = [self._scalars[n] for n in group.names if n in self._scalars]
                    for scalars in of_group:
                        scalars.update({k: v for k, v in of_group[-1].items() if k == "step"})
        return self._scalars.get(at.name, {})

    def module_state(self, rank: int, world_size: int) -> SharedState:
        del rank, world_size
        return replace(self.engine_state(), client_state=self.load_client_state())

    def engine_state(self) -> SharedState:
        return SharedState(
            buffers=self.module_buffers(),
            client_state=dict.fromkeys(self._full_state.trainer),
            loss_scaler={},
            lr_scheduler=None,
            extra_states=self._tensors.load_tree(self._extra_states),
        )

    def module_buffers(self) -> Mapping[str, torch.Tensor]:
        buffers = {name: self._full_state.weights[name] for name in self.manifest.module_buffers}
        return self._tensors.load_tree(buffers)

    @abstractmethod
    def load_client_state(self) -> dict[str, Any]:
        """Return the trainer's state."""


class SingleFileReader(FullStateReader):
    """A file of ``torch.save`` with a whole model."""

    def __init__(self, path: Path, files: ForeignFiles) -> None:
        self._file = files.get(path.name)
        super().__init__(path, files, self._file)
        tree = self._file.tree
        weights, trainer = _parts(tree, path)
        self._extra_states = {n: state for n, state in weights.items() if is_extra_state(str(n))}
        weights = _checked(weights, path)
        self._average = _checked(tree[WEIGHTS], path) if CURRENT in trainer else None
        averaged = " with averaged weights (taken: the trained weights)"
        optimizers = [
            {**saved, "param_groups": self._file.load_tree(list(saved["param_groups"]))}
            for saved in (tree.get(OPTIMIZERS) if WEIGHTS in tree else None) or ()
            if is_optimizer(saved)
        ]
        self._set_content(
            FullState(
                weights,
                optimizers,
                save_id=file_list_digest(path.parent, [path.name]),
                trainer=trainer,
                info=SourceInfo(KIND if self._average is None else KIND + averaged),
            )
        )

    def names(self) -> Sequence[str]:
        return [self.path.name]

    def bind(self, live: Manifest) -> None:
        """Match the file with a live model.

        An evaluation uses averaged weights if the file has them, as with Lightning's strategies.
        """
        if self._average is not None and not live.groups:
            info = SourceInfo(f"{KIND} with averaged weights (taken: the average)")
            self._full_state = replace(self._full_state, weights=self._average, info=info)
        self._set_content(self._full_state, live)

    def load_client_state(self) -> dict[str, Any]:
        return self._file.load_tree(self._full_state.trainer)

    def optimizer_state(self) -> Mapping[Any, Any] | None:
        optimizers = self._full_state.optimizers
        if len(optimizers) != 1 or not by_position(optimizers[0]):
            return None
        state = optimizers[0]["state"]
        entries = {key: value for key, value in state.items() if not isinstance(key, int)}
        return self._file.load_tree(entries)


def is_unpartitioned(tree: object) -> bool:
    """Whether a tree is a model file of DeepSpeed without ZeRO: its weights can be evaluated."""
    entries = ("module", "dp_world_size", "mp_world_size")
    return (
        isinstance(tree, Mapping)
        and all(name in tree for name in entries)
        and isinstance(tree["module"], Mapping)
        and tree["mp_world_size"] == 1
        and not tree.get("param_shapes")
        and OURS not in tree
    )


def _parts(tree: object, path: Path) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Split a tree into the weights and the trainer's state."""
    if not isinstance(tree, Mapping):
        _refuse(path, f"contains a {type(tree).__name__}, expected a dict with a `{WEIGHTS}`")
    weights = tree.get(WEIGHTS)
    if isinstance(weights, Mapping):
        if not weights:
            _refuse(path, f"has an empty `{WEIGHTS}`: its weights are elsewhere, or were not saved")
        if isinstance(current := tree.get(CURRENT), Mapping) and AVERAGING in tree:
            # The optimizer state belongs to the trained weights. The callback reads the average
            # and looks for all three entries.
            rest = {k: v for k, v in tree.items() if k not in (CURRENT, OPTIMIZERS)}
            return current, {**rest, CURRENT: {}}
        return weights, {k: v for k, v in tree.items() if k not in (WEIGHTS, OPTIMIZERS)}
    if is_unpartitioned(tree):
        # Of the state, only the client state is of use without the optimizer.
        return tree["module"], {k: v for k, v in tree.items() if k not in ENGINE_KEYS}
    if "param_shapes" in tree or (OPTIMIZER in tree and _OF_A_SHARD & tree.keys()):
        _refuse(path, "is one file of DeepSpeed's: pass the checkpoint's directory")
    if tree and all(isinstance(tensor, torch.Tensor) for tensor in tree.values()):
        return tree, {}
    entries = ", ".join(sorted(map(repr, tree))[:10]) or "none"
    what = f"has no `{WEIGHTS}` with the model's weights; its entries are {entries}"
    inside = [(n, v.values()) for n, v in tree.items() if isinstance(v, Mapping) and v]
    if names := [n for n, vs in inside if all(isinstance(v, torch.Tensor) for v in vs)]:
        what += (
            f", of which {names[0]!r} contains names and tensors: "
            f"torch.save(torch.load({path.name!r})[{names[0]!r}], 'weights.pt') writes them as a "
            "file that can be loaded"
        )
    return _refuse(path, what)


def _refuse(path: Path, what: str) -> NoReturn:
    msg = (
        f"{path} {what}. A single file has to be Lightning's, or a dict of names and tensors: "
        "resume from another checkpoint"
    )
    raise CheckpointFormatError(msg)


def _checked(weights: Mapping[Any, Any], path: Path) -> dict[str, torch.Tensor]:
    """Return weights and buffers."""
    weights = {name: tensor for name, tensor in weights.items() if not is_extra_state(str(name))}
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            what = f"a {type(tensor).__name__}"
        elif tensor.layout != torch.strided:
            what = f"a tensor of layout {tensor.layout}"
        elif not isinstance(name, str):
            what = "a tensor whose name is not a string"
        else:
            continue
        msg = (
            f"{path}: {name!r} is {what}. Only dense tensors with names can be read: save the "
            "model again without it"
        )
        raise UnsupportedError(msg)
    return {name: tensor.detach() for name, tensor in weights.items()}
