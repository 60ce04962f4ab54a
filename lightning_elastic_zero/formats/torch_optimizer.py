"""torch's optimizer state dict, matched to the parameters of a live model.

``{"state": {id: {...}}, "param_groups": [{"params": [ids], ...}]}``. The meaning of an id depends
on the software that wrote it:

- ``torch.optim`` numbers the parameters that it was given, by group, with frozen ones;
- Lightning's FSDP and ModelParallel strategies number ``model.parameters()`` in a full file;
- ``param_names`` and state dicts keyed by name contain the names.

Each meaning is compared with the live model: members of groups and shapes of states. Exactly one
must fit. Without a live model (for tools), positions are used if only one order fits the shapes;
weights that no optimizer owns may be frozen weights or buffers and are reported as weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn, TypeAlias

import torch

from lightning_elastic_zero.core.manifest import Group, Manifest, Plain, StateKey
from lightning_elastic_zero.core.tensors import plain, state_key
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats.reader import FRESH_OPTIMIZER_HINT, duplicate_names

MEMBERS = ("params", "param_names")
"""Keys of a parameter group that list its members."""

Key: TypeAlias = "int | str"
Table: TypeAlias = "tuple[tuple[str, ...], ...]"
"""The names of each group's members, in the order of the ids; empty for an unknown id."""


@dataclass(frozen=True, slots=True)
class NamedOptimizerState:
    """The groups and states of an optimizer by the live model's names."""

    groups: tuple[Group, ...]
    states: Mapping[str, Mapping[str, Any]]
    """The states of each parameter, by key; their tensors need no values."""


def _refuse(why: str) -> NoReturn:
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


def plain_hyperparameters(
    groups: Sequence[Mapping[str, Any]], members: Sequence[str] = MEMBERS
) -> list[dict[str, Plain]]:
    """Return the hyperparameters of parameter groups as plain data."""
    return [
        {k: plain(v, f"{k!r} of parameter group {i}") for k, v in group.items() if k not in members}
        for i, group in enumerate(groups)
    ]


def by_position(saved: Mapping[str, Any]) -> bool:
    """Whether a state dict identifies parameters only by numbers."""
    groups = saved["param_groups"]
    named = all("param_names" in group for group in groups)
    return not named and not all(isinstance(k, str) for g in groups for k in g["params"])


def name_states(
    saved: Mapping[str, Any], live: Manifest, order: Sequence[str], canonical: Mapping[str, str]
) -> NamedOptimizerState:
    """Find the parameter of each state."""
    saved_groups: Sequence[Mapping[str, Any]] = saved["param_groups"]
    shapes = {p.name: p.shape for p in live.parameters}
    table = _IdInterpretations(
        saved_groups, saved["state"], live, order, canonical, shapes
    ).unambiguous()
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
        if all("param_names" in group for group in self.groups):
            return self._named(self._full([list(group["param_names"]) for group in self.groups]))
        if all(isinstance(key, str) for key in ids):
            return self._named([list(group["params"]) for group in self.groups])
        fitting = {table for table in self._positions() if self._fits(table)}
        if len(fitting) == 1 or (fitting and not self.states):
            return fitting.pop()
        if fitting:
            first, second = sorted(fitting)
            differ = [n for n, m in zip(chain(*first), chain(*second), strict=True) if n != m]
            _refuse(
                "the optimizer state is stored by position, and positions in the order of the "
                "optimizer and of the model both fit, but differ in "
                f"{format_names(differ)}"
            )
        saved = ", ".join(str(len(group["params"])) for group in self.groups)
        here = ", ".join(str(len(group.names)) for group in self.live.groups)
        stateless = sum(key not in self.states for key in ids)
        msg = (
            f"the optimizer state is stored by position, in groups of {saved} parameters "
            f"({stateless} of them without state). This run has groups of {here} trained "
            f"parameters and {len(self.live.frozen)} frozen ones, and no order matches the shapes: "
            f"configure the groups of the saved run, or {FRESH_OPTIMIZER_HINT}"
        )
        raise CheckpointMismatchError(msg)

    def _full(self, names: list[list[str]]) -> list[list[str]]:
        """Return the model's names for names that were passed to the optimizer.

        ``named_parameters()`` of a submodule lacks the submodule's name, and that of a wrapper adds
        the wrapper's.
        """
        given = [name for group in names for name in group]
        if not given or any(name in self.canonical for name in given):
            return names
        added = [n.removesuffix(given[0]) for n in self.canonical if n.endswith(f".{given[0]}")]
        cut = [given[0].removesuffix(n) for n in self.canonical if given[0].endswith(f".{n}")]
        meant = [
            *([[prefix + name for name in group] for group in names] for prefix in added),
            *([[name.removeprefix(prefix) for name in group] for group in names] for prefix in cut),
        ]
        fitting = [table for table in meant if self._fits(self._known(table))]
        return fitting[0] if len(fitting) == 1 else names

    def _known(self, names: Sequence[Sequence[str]]) -> Table:
        return tuple(tuple(self.canonical.get(n, n) for n in group) for group in names)

    def _named(self, names: Sequence[Sequence[str]]) -> Table:
        """Return the live names; unknown names are kept and reported."""
        table = self._known(names)
        if misfit := next(self._misfits(table), None):
            _refuse(f"the optimizer's state of {misfit}")
        return table

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
        here = [p.name for p in self.live.parameters]
        in_file = [name for name in self.order if name in self.shapes]
        known = set(in_file)
        return ids == list(range(len(ids))) and in_file == [name for name in here if name in known]

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
        _refuse("all trained parameters are scalars, so element-wise states cannot be recognised")
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
        _refuse(
            f"the optimizer has no state for {format_names(lacking)}, which had not been trained "
            f"when it was saved, but for others of the group"
        )
    tables = {name: _keys(states[name], elementwise) for name in names}
    first = tables[names[0]] if names else ()
    if others := [name for name in names if tables[name] != first]:
        _refuse(
            f"the optimizer has the states {[k.name for k in first]} for {names[0]}, but "
            f"{[k.name for k in tables[others[0]]]} for {others[0]} of the same group, or of other "
            f"types"
        )
    return first


def _keys(state: Mapping[str, Any], elementwise: frozenset[str]) -> tuple[StateKey, ...]:
    keys = [state_key(key, value, elementwise=key in elementwise) for key, value in state.items()]
    return tuple(sorted(keys, key=lambda key: key.name))


Members: TypeAlias = "tuple[tuple[str, ...], ...]"
"""The names of each parameter group's members."""

_Shaped: TypeAlias = "Sequence[tuple[str, tuple[int, ...]]]"


def members_of(saved: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Members:
    """Return the names of the members of a state dict's groups."""
    groups: Sequence[Mapping[str, Any]] = saved["param_groups"]
    ids = [tuple(group["params"]) for group in groups]
    if all("param_names" in group for group in groups):
        return _known([tuple(group["param_names"]) for group in groups], weights)
    if all(isinstance(key, str) for group in ids for key in group):
        return _known(ids, weights)
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
    names = iter(first)
    return tuple(tuple(next(names) for _ in group) for group in ids)


def _known(members: Sequence[tuple[str, ...]], weights: Mapping[str, torch.Tensor]) -> Members:
    """Return the names of the weights, which may have the name of a submodule as prefix."""
    given = [name for group in members for name in group]
    if not given or all(name in weights for name in given):
        return tuple(members)
    prefixes = [n.removesuffix(given[0]) for n in weights if n.endswith(f".{given[0]}")]
    fitting = [p for p in prefixes if all(p + name in weights for name in given)]
    if len(fitting) != 1:
        strange = next(name for name in given if name not in weights)
        msg = f"the optimizer has state for {strange}, but no weight has that name"
        raise CheckpointMismatchError(msg)
    return tuple(tuple(fitting[0] + name for name in group) for group in members)


def _shape_of(state: object, elementwise: frozenset[str]) -> tuple[int, ...] | None:
    """Return the shape of a parameter with this state; None if it is unknown."""
    items = state.items() if isinstance(state, Mapping) else ()
    shapes = [
        tuple(value.shape)
        for key, value in items
        if key in elementwise and isinstance(value, torch.Tensor)
    ]
    return next((shape for shape in shapes if shape), shapes[0] if shapes else None)


def _in_order(wanted: Sequence[tuple[int, ...] | None], candidates: _Shaped) -> list[str]:
    """Return the first candidates, in order, that have the shapes; possibly too few."""
    found: list[str] = []
    for name, shape in candidates:
        if len(found) < len(wanted) and wanted[len(found)] in (None, shape):
            found.append(name)
    return found
