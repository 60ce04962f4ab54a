"""Positions in the state dict of a torch optimizer are assigned to parameters, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_elastic_zero.core.manifest import Group, Manifest, Parameter
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats.full_state import (
    NamedOptimizerState,
    find_members,
    is_optimizer,
    name_states,
)

SHAPES = {"a": (2, 3), "b": (3,), "c": (2, 3), "d": (3,), "f": (4,)}
FROZEN = ("f",)


def live(groups: Sequence[Sequence[str]], order: Sequence[str] = tuple(SHAPES)) -> Manifest:
    """Describe a live run; parameters outside all groups are frozen."""
    of = {name: index for index, names in enumerate(groups) for name in names}
    parameters = tuple(Parameter(n, SHAPES[n], "float32", of.get(n)) for n in order)
    tables = tuple(Group(tuple(names), {"lr": 0.1}, ()) for names in groups)
    return Manifest("", 2, 2, "fp32", "float32", parameters, tables, (), (), ())


def saved(
    groups: Sequence[Sequence[int | str]], names: dict[Any, str], *, without: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a state dict of these groups; frozen names and ``without`` have no state."""
    states = {
        key: {"exp_avg": torch.empty(SHAPES[name], device="meta"), "step": torch.tensor(3.0)}
        for key, name in names.items()
        if name not in (*FROZEN, *without)
    }
    return {"state": states, "param_groups": [{"params": list(g), "lr": 0.5} for g in groups]}


def meaning(
    tree: dict[str, Any], manifest: Manifest, order: Sequence[str] = ""
) -> NamedOptimizerState:
    names = order or [p.name for p in manifest.parameters]
    members = find_members(tree, manifest, names, {n: n for n in SHAPES})
    return name_states(tree, manifest, members)


def test_positions_in_the_order_of_the_optimizer() -> None:
    tree = saved([[0, 1], [2, 3]], {0: "c", 1: "a", 2: "d", 3: "b"})
    found = meaning(tree, live([["c", "a"], ["d", "b"]]))
    assert [g.names for g in found.groups] == [("c", "a"), ("d", "b")]
    assert found.states["c"] is tree["state"][0]
    kinds = {key.name: key.kind for key in found.groups[0].state}
    assert kinds == {"exp_avg": "elementwise", "step": "scalar"}
    assert found.groups[1].hyperparameters == {"lr": 0.5}


def test_positions_in_the_order_of_the_model() -> None:
    """Lightning's FSDP counts the model's parameters, frozen ones too."""
    tree = saved([[0, 2], [1, 3]], {0: "a", 1: "b", 2: "c", 3: "d"})
    found = meaning(tree, live([["c", "a"], ["d", "b"]]))
    assert [g.names for g in found.groups] == [("a", "c"), ("b", "d")]
    assert found.states["c"] is tree["state"][2]


def test_frozen_parameters_in_the_only_group_are_counted() -> None:
    order = ("f", "a", "b", "c", "d")
    tree = saved([[0, 1, 2, 3, 4]], dict(enumerate(order)))
    found = meaning(tree, live([["a", "b", "c", "d"]], order))
    assert found.groups[0].names == ("a", "b", "c", "d")
    assert found.states["a"] is tree["state"][1]


def test_names_may_replace_or_accompany_positions() -> None:
    by_name = saved([["a", "c"], ["b", "d", "f"]], {n: n for n in SHAPES})
    manifest = live([["c", "a"], ["d", "b"]])
    found = meaning(by_name, manifest)
    assert [g.names for g in found.groups] == [("a", "c"), ("b", "d")]
    with_names = saved([[0, 1], [2, 3]], {0: "a", 1: "c", 2: "b", 3: "d"})
    for group, names in zip(with_names["param_groups"], (["a", "c"], ["b", "d"]), strict=True):
        group["param_names"] = names
    found = meaning(with_names, manifest)
    assert found.states["c"] is with_names["state"][1]
    assert found.groups[0].hyperparameters == {"lr": 0.5}


@pytest.mark.parametrize(
    ("given", "live_names"),
    [("model.{}", "{}"), ("{}", "model.{}"), ("_forward_module.net.{}", "net.{}")],
)
def test_names_of_a_submodule_or_of_a_wrapper(given: str, live_names: str) -> None:
    """``AdamW(self.model.named_parameters())``: names lack a prefix or have one more."""
    order = ("c", "a", "d", "b")
    tree = saved([[0, 1], [2, 3]], dict(enumerate(order)))
    for group in tree["param_groups"]:
        group["param_names"] = [given.format(order[key]) for key in group["params"]]
    manifest = live([["c", "a"], ["d", "b"]])
    here = {name: live_names.format(name) for name in SHAPES}
    manifest = replace(
        manifest,
        parameters=tuple(replace(p, name=here[p.name]) for p in manifest.parameters),
        groups=tuple(replace(g, names=tuple(here[n] for n in g.names)) for g in manifest.groups),
    )
    names = list(here.values())
    members = find_members(tree, manifest, names, {n: n for n in names})
    found = name_states(tree, manifest, members)
    assert found.states[here["a"]] is tree["state"][1]
    assert found.groups[1].names == (here["d"], here["b"])


REFUSED: dict[str, tuple[dict[str, Any], Manifest, str]] = {
    "two meanings": (
        saved([[0, 1, 2, 3]], {0: "a", 1: "b", 2: "c", 3: "d"}),
        live([["c", "b", "a", "d"]]),
        "both fit, but differ in",
    ),
    "other counts": (
        saved([[0, 1, 2], [3]], {0: "a", 1: "b", 2: "c", 3: "d"}),
        live([["a", "c"], ["b", "d"]]),
        "groups of 3, 1 parameters .0 of them without state.. This run has groups of 2, 2 trained",
    ),
    "other shapes": (
        saved([[0, 1], [2, 3]], {0: "a", 1: "b", 2: "c", 3: "d"}),
        live([["a", "c"], ["b", "d"]]),
        "no order matches the shapes",
    ),
    "frozen among two groups": (
        saved([[0, 1, 2], [3, 4]], {0: "f", 1: "c", 2: "a", 3: "b", 4: "d"}),
        live([["c", "a"], ["b", "d"]]),
        "groups of 3, 2 parameters .1 of them without state.. This run has groups of 2, 2 trained",
    ),
    "never trained": (
        saved([[0, 1], [2, 3]], {0: "a", 1: "c", 2: "b", 3: "d"}, without=("c",)),
        live([["a", "c"], ["b", "d"]]),
        "no state for c, which had not been trained",
    ),
    "a name's other shape": (
        {
            "state": {"a": {"factor": torch.empty(2, device="meta")}},
            "param_groups": [{"params": ["a"]}],
        },
        live([["a"]]),
        "a has 'factor' of shape .2,., the parameter has .2, 3.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_numbers_and_names_that_do_not_fit_are_refused(case: str) -> None:
    tree, manifest, message = REFUSED[case]
    with pytest.raises(CheckpointMismatchError, match=message) as raised:
        meaning(tree, manifest)
    assert "load_optimizer_state=False" in str(raised.value)


def test_positions_of_a_reordered_model_are_refused() -> None:
    manifest = live([["a", "c"], ["b", "d"]])
    tree = saved([[0, 1], [2, 3]], {0: "a", 1: "c", 2: "b", 3: "d"})
    assert meaning(tree, manifest, "abcdf").states
    with pytest.raises(CheckpointMismatchError, match="stored by position"):
        meaning(tree, manifest, "cbadf")


def test_groups_without_state_are_matched() -> None:
    tree = saved([[0, 1], [2, 3]], {})
    found = meaning(tree, live([["a", "c"], ["b", "d"]]))
    assert [g.names for g in found.groups] == [("a", "c"), ("b", "d")]
    assert not found.groups[0].state


@pytest.mark.parametrize("tree", [{}, {"state": {}}, {"state": {}, "param_groups": [1]}, None, []])
def test_trees_without_states_or_groups_are_refused(tree: object) -> None:
    assert not is_optimizer(tree)
