"""Checkpoints that contain whole tensors by name: single files and directories."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elastic_zero.core.compatibility import RestoreScope, check_compatible, describe
from lightning_elastic_zero.core.group_matching import with_live_groups
from lightning_elastic_zero.core.manifest import (
    Group,
    Manifest,
    Parameter,
    TrainingProgress,
    Writer,
)
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats.full_state import BoundState, FullState, bind, members_of
from lightning_elastic_zero.formats.open import open_checkpoint
from tests.support.plain_checkpoints import write_dcp

DTYPES = [
    (torch.float32, "fp32"),
    (torch.bfloat16, "bf16"),
    (torch.float16, "fp16"),
    (torch.float64, "float64"),
]


def live_of(tree: dict[str, torch.Tensor], owned: set[str]) -> Manifest:
    return Manifest(
        save_id="",
        stage=1,
        world_size=1,
        precision="fp32",
        master_dtype="float32",
        parameters=tuple(
            Parameter(name, tuple(t.shape), "float32", 0 if name in owned else None)
            for name, t in tree.items()
            if t.is_floating_point()
        ),
        groups=(Group(tuple(n for n in tree if n in owned), {}, ()),),
        buffers=(),
        module_buffers=tuple(n for n, t in tree.items() if not t.is_floating_point()),
        files=(),
        progress=TrainingProgress(),
        writer=Writer(),
    )


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("dtype", "precision"), DTYPES, ids=str)
def test_the_precision_is_that_of_the_weights(
    dtype: torch.dtype, precision: str, sharded: bool, tmp_path: Path
) -> None:
    tree = {
        # A buffer may come first; it does not determine the precision.
        "positions": torch.arange(3),
        "frozen.scale": torch.ones(2),
        "layer.weight": torch.ones(4, 3, dtype=dtype),
        "layer.bias": torch.ones(4, dtype=dtype),
    }
    path = tmp_path / "model"
    if sharded:
        write_dcp(path, {"model": tree})
    else:
        torch.save({"state_dict": tree}, path)
    reader = open_checkpoint(path)
    assert reader.manifest.precision == precision
    assert f", {precision}, " in describe(reader.manifest)
    reader.bind(live_of(tree, {"layer.weight", "layer.bias"}))
    found = reader.manifest
    assert (found.precision, found.master_dtype) == (precision, str(dtype).removeprefix("torch."))
    reader.close()


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("alike", [True, False])
def test_states_of_one_shape_in_an_unknown_order_are_refused(ordered: bool, alike: bool) -> None:
    shapes = {"a": (4, 3), "b": (4, 3) if alike else (3, 4)}
    tree = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    state = {index: {"step": 1.0, "exp_avg": tree[name]} for index, name in enumerate(("a", "b"))}
    optimizer = {"state": state, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
    full = FullState(tree, [optimizer], "", ordered=ordered)
    bound = bind(full, live_of(tree, {"a", "b"}))
    if alike and not ordered:
        assert "is unknown: the states of a and b, which have the same shape" in bound.unmatched
        assert not bound.states
    else:
        assert not bound.unmatched
        assert list(bound.states) == ["a", "b"]


@pytest.mark.parametrize("ordered", [True, False])
def test_positions_that_contradict_the_names_of_the_optimizer_are_refused(ordered: bool) -> None:
    """The names lack the one of a submodule, so that none is known."""
    tree = {name: torch.empty(4, 3, device="meta") for name in ("net.a", "net.b")}
    live = live_of(tree, {*tree})
    for names in (["a", "b"], ["b", "a"], ["weight", "weight"]):
        groups = [{"params": [0, 1], "param_names": names}]
        optimizer = {"state": adam_of((4, 3), (4, 3)), "param_groups": groups}
        bound = bind(FullState(tree, [optimizer], "", ordered=ordered), live)
        if names == ["a", "b"] and ordered:
            assert list(bound.states) == ["net.a", "net.b"]
            assert members_of(optimizer, tree) == (("net.a", "net.b"),)
            continue
        assert not bound.states
        assert bound.unmatched
        if names != ["a", "b"]:
            with pytest.raises(CheckpointMismatchError, match=f"{names[0]} at the place of net.a"):
                members_of(optimizer, tree)


def test_the_steps_of_fused_adam_are_those_of_the_last_parameter(tmp_path: Path) -> None:
    """DeepSpeed's FusedAdam without ZeRO counts so; other optimizers count per parameter."""
    weights = {name: torch.ones(2, 2) for name in "abc"}
    fused = {"lr": 0.1, "betas": (0.9, 0.999), "bias_correction": True, "step": 0}
    for group, expected in ((fused, [7, 7, 7]), ({"lr": 0.1}, [0, 3, 7])):
        state = {i: {"step": s, "exp_avg": torch.zeros(2, 2)} for i, s in enumerate((0, 3, 7))}
        optimizer = {"state": state, "param_groups": [{**group, "params": [0, 1, 2]}]}
        path = tmp_path / "model.ckpt"
        torch.save({"state_dict": weights, "optimizer_states": [optimizer]}, path)
        with closing(open_checkpoint(path)) as source:
            source.bind(live_of(weights, {*weights}))
            found = [source.scalars(next(iter(source.layout().covering(n, 0, 1)))) for n in "abc"]
        assert [scalars["step"] for scalars in found] == expected


def adam_of(*shapes: tuple[int, ...]) -> dict[int, dict[str, torch.Tensor]]:
    return {
        index: {
            "step": torch.tensor(2.0),
            "exp_avg": torch.zeros(shape),
            "exp_avg_sq": torch.zeros(shape),
        }
        for index, shape in enumerate(shapes)
    }


def test_the_state_of_a_scalar_weight_matches_no_other_weight() -> None:
    weights = {
        "scale": torch.tensor(1.5),
        "first": torch.zeros(2, 3),
        "second": torch.zeros(1),
        "third": torch.zeros(1),
    }
    groups = [{"params": [0]}, {"params": [1, 2]}]
    in_another_order = {"state": adam_of((2, 3), (), (1,)), "param_groups": groups}
    with pytest.raises(CheckpointMismatchError, match="match several orders of the 4 weights"):
        members_of(in_another_order, weights)
    in_order = {"state": adam_of((), (2, 3), (1,)), "param_groups": groups}
    del weights["third"]
    assert members_of(in_order, weights) == (("scale",), ("first", "second"))
    # A state without dimensions does not identify the shape of its parameter.
    counted = {"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"params": [0]}]}
    with pytest.raises(CheckpointMismatchError, match="several orders of the 3 weights"):
        members_of(counted, weights)


def in_groups(live: Manifest, *members: tuple[str, ...]) -> Manifest:
    group_of = {name: index for index, names in enumerate(members) for name in names}
    return replace(
        live,
        parameters=tuple(replace(p, group=group_of.get(p.name)) for p in live.parameters),
        groups=tuple(Group(names, {"weight_decay": 0.5}, ()) for names in members),
    )


SHAPES = {"a.weight": (4, 3), "a.bias": (3,), "norm.weight": (5,), "b.weight": (2, 4)}
DECAY, NO_DECAY = ("a.weight", "b.weight"), ("a.bias", "norm.weight")
WEIGHTS_ALONE = RestoreScope(optimizer_state=False)


def without_optimizer_state(*keyed: tuple[Any, ...], live: Manifest) -> BoundState:
    """Bind a file with the groups ``decay 0.1, no decay``, whose first parameter has no state.

    ``keyed``: names or positions of the members of the groups.
    """
    tree = {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
    groups = [{"params": [*keyed[i]], "weight_decay": decay} for i, decay in enumerate((0.1, 0.0))]
    keys = [key for of_group in keyed for key in of_group]
    of_shape = adam_of(*(SHAPES[name] for name in (*DECAY, *NO_DECAY)))
    state = {key: of_shape[place] for place, key in enumerate(keys) if place}
    bound = bind(FullState(tree, [{"state": state, "param_groups": groups}], ""), live)
    assert "load_optimizer_state=False" in bound.unmatched
    assert [dict(g.hyperparameters) for g in bound.manifest.groups] == [
        {"weight_decay": 0.1},
        {"weight_decay": 0.0},
    ]
    assert not any(group.state for group in bound.manifest.groups)
    return bound


def test_groups_that_name_their_members_keep_them_without_optimizer_state() -> None:
    """Groups in another order are reported, and get the hyperparameters of their members."""
    live = live_of({n: torch.empty(s, device="meta") for n, s in SHAPES.items()}, {*SHAPES})
    same, swapped = in_groups(live, DECAY, NO_DECAY), in_groups(live, NO_DECAY, DECAY)
    bound = without_optimizer_state(DECAY, NO_DECAY, live=same)
    assert bound.are_members_known
    check_compatible(bound.manifest, same, WEIGHTS_ALONE, "a.ckpt")
    found = without_optimizer_state(DECAY, NO_DECAY, live=swapped).manifest
    with pytest.raises(CheckpointMismatchError, match="in parameter group 0 here, in 1 when saved"):
        check_compatible(found, swapped, WEIGHTS_ALONE, "a.ckpt")
    decays = [g.hyperparameters["weight_decay"] for g in with_live_groups(found, swapped).groups]
    assert decays == [0.0, 0.1]


def test_positions_identify_members_only_if_the_shapes_of_states_fit() -> None:
    live = live_of({n: torch.empty(s, device="meta") for n, s in SHAPES.items()}, {*SHAPES})
    known = without_optimizer_state((0, 1), (2, 3), live=in_groups(live, DECAY, NO_DECAY))
    assert known.are_members_known
    for other in ((NO_DECAY, DECAY), (NO_DECAY, DECAY[1:]), ((*DECAY, *NO_DECAY),)):
        bound = without_optimizer_state((0, 1), (2, 3), live=in_groups(live, *other))
        assert not bound.are_members_known
