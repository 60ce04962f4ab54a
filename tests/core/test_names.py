"""Renaming of parameters and matching of parameter groups by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_elastic_zero.core.group_matching import (
    group_conflicts,
    largest_uncorrected_update,
    regrouped,
    with_live_groups,
)
from lightning_elastic_zero.core.manifest import Group, Manifest, Parameter
from lightning_elastic_zero.core.names import (
    MOST_SUGGESTED,
    KeyMapping,
    guess_key_mapping,
    mapping_to,
)
from lightning_elastic_zero.core.options import check_rename
from lightning_elastic_zero.engine.optimizer import split_state, state_keys
from lightning_elastic_zero.engine.restore import initial_values
from lightning_elastic_zero.errors import CheckpointMismatchError


@pytest.mark.parametrize(
    ("of", "saved", "here"),
    [
        ({"enc": "back.enc"}, "enc.0.weight", "back.enc.0.weight"),
        ({"enc.": "back.enc."}, "enc.0.weight", "back.enc.0.weight"),
        ({"enc": "back.enc"}, "encoder.weight", "encoder.weight"),
        ({"": "model"}, "a.weight", "model.a.weight"),
        ({"model": ""}, "model.a.weight", "a.weight"),
        ({"": "model", "a": "b"}, "a.weight", "b.weight"),
        ({"a": "b", "a.q": "c"}, "a.q.weight", "c.weight"),
        ({"a": "b", "b": "a"}, "b.weight", "a.weight"),
        ({"one": "two"}, "one", "two"),
        ({"model.*": "*"}, "model.a.weight", "a.weight"),
        ({"*.gamma": "*.weight"}, "a.norm.gamma", "a.norm.weight"),
        ({"l.*.attn.*": "b.*.attention.*"}, "l.3.attn.q.w", "b.3.attention.q.w"),
        ({"layers.*": "blocks.*"}, "my.layers.3", "my.layers.3"),
        ({"*.0.*": "*-*"}, "a.0.b.0.c", "a-b.0.c"),
        ({"a*": "b*", "a": "c"}, "ab.w", "bb.w"),
        ({"a.*": "c.*", "a.q": "d"}, "a.q.w", "d.w"),
        ({"a.q": "d", "a.*.w": "c.*.w"}, "a.q.w", "c.q.w"),
        ({"a[0].*": "a.*"}, "a[0].w", "a.w"),
        ({}, "one", "one"),
    ],
)
def test_prefixes_and_patterns_rename_whole_names(
    of: dict[str, str], saved: str, here: str
) -> None:
    assert KeyMapping(of).live_name(saved) == here


@pytest.mark.parametrize(
    ("of", "live", "saved", "here"),
    [
        ({}, "net.a.w", "_orig_mod.net.a.w", "net.a.w"),
        ({}, "_orig_mod.net.a.w", "net.a.w", "_orig_mod.net.a.w"),
        ({}, "net._orig_mod.a.w", "net.a._checkpoint_wrapped_module.w", "net._orig_mod.a.w"),
        ({}, "net.a.w", "net.b.w", "net.b.w"),
        ({"enc": "back"}, "back._orig_mod.w", "enc._orig_mod.w", "back._orig_mod.w"),
        ({"net.enc": "back"}, "back.w", "net._orig_mod.enc.w", "back.w"),
        ({"net._orig_mod": "net"}, "net.w", "net._orig_mod.w", "net.w"),
    ],
)
def test_prefixes_of_wrappers_are_ignored(
    of: dict[str, str], live: str, saved: str, here: str
) -> None:
    assert mapping_to([live, "other"], of).live_name(saved) == here
    assert mapping_to([live, "other"], of).table([saved], "a.ckpt") == {saved: here}


def test_a_layer_and_its_compiled_copy_keep_their_names() -> None:
    both = ("net.w", "net._orig_mod.w")
    assert mapping_to(both, {}).table(both, "a.ckpt") == dict(zip(both, both, strict=True))


@pytest.mark.parametrize(
    ("of", "error"),
    [
        ({"c": "d"}, r"rename='c' matches no name in the checkpoint"),
        ({"a": "b"}, "maps both 'a.x' and 'b.x' to 'b.x'"),
        ({"*.y": "*.z"}, r"rename='\*\.y' matches no name"),
        ({"*.x": "y*"}, None),
        ({"*.*": "*"}, "both sides need the same number of"),
        ({"a.x": ""}, "turns 'a.x' into an empty name"),
        ({"?*": "*"}, "matches no name"),
        ({"b*": "a*"}, "maps both 'a.x' and 'b.x' to 'a.x'"),
    ],
)
def test_impossible_renamings_are_refused(of: dict[str, str], error: str | None) -> None:
    if error is None:
        assert KeyMapping(of).table(["a.x", "b.x"], "") == {"a.x": "ya", "b.x": "yb"}
        return
    with pytest.raises(CheckpointMismatchError, match=error):
        KeyMapping(of).table(["a.x", "b.x"], "last.ckpt")


@pytest.mark.parametrize("value", [["a"], "a", {"a": 1}, {1: "a"}, True])
def test_an_invalid_renaming_is_refused_where_it_is_passed(value: object) -> None:
    with pytest.raises(ValueError, match=r"^rename=.*: expected a dictionary of names"):
        check_rename(value)
    assert check_rename(None) == {}


@pytest.mark.parametrize(
    ("unexpected", "missing", "expected"),
    [
        ({"m.a.w": 1, "m.b": 2}, {"a.w": 1, "b": 2}, {"m": ""}),
        ({"a.w": 1, "b": 2}, {"m.a.w": 1, "m.b": 2}, {"": "m"}),
        ({"q.w": 1}, {"q.base.w": 1, "q.lora.w": 2}, {"q": "q.base"}),
        ({"b.w": 1, "b.bias": 2}, {"c.w": 1, "c.bias": 2}, {"b": "c"}),
        ({"head.w": 1}, {"top.w": 2}, {}),
        ({"old.w": 1}, {}, {}),
    ],
)
def test_likely_renamings(
    unexpected: dict[str, int], missing: dict[str, int], expected: dict[str, str]
) -> None:
    assert guess_key_mapping(unexpected, missing) == expected


def test_names_that_match_are_not_renamed() -> None:
    assert guess_key_mapping(
        {"enc.w": 1, "enc.b": 2}, {"m.enc.w": 1, "m.enc.b": 2}, ["head.w", "head.b"]
    ) == {"enc": "m.enc"}
    assert guess_key_mapping({"a.w": 1}, {"b.w": 1}, ["a.v"]) == {"a.w": "b.w"}


def test_only_the_first_of_many_renamings_are_suggested() -> None:
    saved, live = ({f"{letter}{i}.w": 1 for i in range(999)} for letter in "lk")
    assert guess_key_mapping(saved, live) == {f"l{i}": f"k{i}" for i in range(MOST_SUGGESTED)}


def described(*groups: list[str], rate: float) -> Manifest:
    """Describe a model whose groups have rates that follow from their positions."""
    owners = [(name, index) for index, names in enumerate(groups) for name in names]
    parameters = tuple(Parameter(name, (4,), "float32", index) for name, index in owners)
    rates = [{"lr": rate * (index + 1)} for index in range(len(groups))]
    tables = tuple(Group(tuple(n), held, ()) for n, held in zip(groups, rates, strict=True))
    return Manifest("", 3, 2, "fp32", "float32", parameters, tables, (), (), ())


def test_a_group_gets_the_values_of_its_members() -> None:
    saved = described(["a", "b"], ["c"], rate=0.1)
    live = described(["new"], ["c", "other"], ["b", "a"], ["a2"], rate=5.0)
    groups = with_live_groups(saved, live).groups
    assert [group.names for group in groups] == [(), ("c",), ("b", "a"), ()]
    assert [group.hyperparameters["lr"] for group in groups] == [5.0, 0.2, 0.1, 20.0]
    assert with_live_groups(saved, replace(saved, groups=saved.groups)) == saved


def test_a_schedulers_values_move_with_their_groups() -> None:
    saved = {"base_lrs": [1, 2], "_milestones": [10, 20], "last_epoch": 7}
    saved["_schedulers"] = [{"base_lrs": [3, 4], "odd": [1, 2]}]
    live = {"base_lrs": [100, 200], "_milestones": [1, 2], "last_epoch": 0}
    live["_schedulers"] = [{"base_lrs": [300, 400], "odd": [5, 6]}]
    assert regrouped(saved, live, (0, 1), 2) == saved
    moved = {"base_lrs": [2, 200], "_schedulers": [{"base_lrs": [4, 400], "odd": [1, 2]}]}
    assert regrouped(saved, live, (1, None), 2) == {**saved, **moved}
    three = {"base_lrs": [100, 200, 300], "own": [7, 8, 9]}
    found = regrouped({"base_lrs": [1, 2], "own": [1, 2]}, three, (None, 1, 0), 2)
    assert found == {"base_lrs": [100, 2, 1], "own": [7, 2, 1]}


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.5, 0.99)])
def test_the_size_of_uncorrected_updates_is_that_of_adam(betas: tuple[float, float]) -> None:
    late, new = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    optimizers = [torch.optim.Adam([p], lr=1.0, betas=betas, eps=0.0) for p in (late, new)]
    zeros = {key: torch.zeros_like(late.data) for key in ("exp_avg", "exp_avg_sq")}
    optimizers[0].state[late] = {**zeros, "step": torch.tensor(1e6)}
    largest = 0.0
    for _ in range(200):
        was = [float(p.detach()) for p in (late, new)]
        for parameter, optimizer in zip((late, new), optimizers, strict=True):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        steps = [float(p.detach()) - w for p, w in zip((late, new), was, strict=True)]
        largest = max(largest, steps[0] / steps[1])
    assert largest == pytest.approx(largest_uncorrected_update(*betas), rel=1e-3)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0.1}),
    "NAdam": (torch.optim.NAdam, {"weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.25}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.125}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
}
BEGINS = {"Adagrad": {"sum": 0.25}, "Rprop": {"prev": 0.0, "step_size": 0.125}}
"""Initial values of states that do not start with zeros."""


def held_by(inner: torch.optim.Optimizer) -> Group:
    (flat,) = inner.param_groups[0]["params"]
    fields = {k: v for k, v in inner.param_groups[0].items() if k != "params"}
    return Group(("a",), fields, state_keys(*split_state(inner, flat, inner.state[flat])))


def stepped(kind: Callable[..., Any], options: dict[str, Any]) -> torch.optim.Optimizer:
    flat = nn.Parameter(torch.ones(3))
    inner: torch.optim.Optimizer = kind([flat], **options)
    flat.grad = torch.ones(3)
    inner.step()
    return inner


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fresh_state_is_that_of_zero_gradients(name: str) -> None:
    inner = stepped(*OPTIMIZERS[name])
    held = held_by(inner)
    found = initial_values(inner, 0, held)
    states = {key.name for key in held.state if key.kind == "elementwise"}
    # Adamax adds its epsilon to the absolute gradient, which has no effect on the next step.
    assert {k: v if v > 1e-6 else 0.0 for k, v in found.items()} == {
        **dict.fromkeys(states, 0.0),
        **BEGINS.get(name, {}),
    }
    assert states


class KeepsWeights(torch.optim.SGD):
    """Like schedule-free optimizers: a state starts as a copy of the weights."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("z", p.detach().clone())
        super().step(closure)


class AsksForMore(torch.optim.SGD):
    def __init__(self, params: list[Any], mine: str) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.mine = mine


@pytest.mark.parametrize(
    ("kind", "options", "error"),
    [
        (KeepsWeights, {"lr": 0.1}, "'z' starts with a value that depends on the weights"),
        (AsksForMore, {"mine": "?"}, "a trial step of another AsksForMore failed"),
    ],
)
def test_states_without_a_known_initial_value_are_refused_by_name(
    kind: Callable[..., Any], options: dict[str, Any], error: str
) -> None:
    inner = stepped(kind, options)
    with pytest.raises(CheckpointMismatchError) as refused:
        initial_values(inner, 0, held_by(inner))
    assert error in str(refused.value)
    assert "put new parameters into a parameter group of their own" in str(refused.value)


@pytest.mark.parametrize("hyperparameters", [True, False])
def test_members_stay_with_their_algorithm(hyperparameters: bool) -> None:
    saved, live = described(["a", "b"], ["c"], rate=0.1), described(["a"], ["b", "c"], rate=0.1)
    kinds = [{"use_muon": True}, {"use_muon": False}]
    saved, live = (
        replace(
            m,
            groups=tuple(
                replace(g, hyperparameters=k) for g, k in zip(m.groups, kinds, strict=True)
            ),
        )
        for m in (saved, live)
    )
    wanted: dict[str, Any] = {"state": True, "hyperparameters": hyperparameters, "counter_keys": ()}
    (found,) = [t for t in group_conflicts(saved, live, **wanted) if "trained" in t]
    assert "parameter group 1 here" in found
    assert "trained with Muon in the checkpoint and with Adam here" in found
    assert not [t for t in group_conflicts(saved, saved, **wanted) if "trained" in t]
