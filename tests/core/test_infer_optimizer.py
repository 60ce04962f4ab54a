"""Hyperparameters that another optimizer saved: told by their names, said, or taken over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch

from lightning_elastic_zero.core.manifest import (
    Group,
    Manifest,
    Plain,
    StateKey,
    TrainingProgress,
    Writer,
)
from lightning_elastic_zero.core.tensors import RestoreValues, state_key
from lightning_elastic_zero.engine.optimizer import (
    check_configured_state,
    check_unnamed_hyperparameters,
    check_unnamed_state,
    weight_decay_change,
)
from lightning_elastic_zero.engine.restore import commit_groups
from lightning_elastic_zero.errors import CheckpointMismatchError

Kind: TypeAlias = "type[torch.optim.Optimizer]"

FUSED_LAMB: dict[str, Plain] = {
    "lr": 0.1,
    "bias_correction": True,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
}
"""DeepSpeed's; its states are called as Adam's are."""

FUSED_ADAM = {k: FUSED_LAMB[k] for k in ("lr", "bias_correction", "betas", "eps", "weight_decay")}


def optimizer(kind: Kind, **options: Any) -> torch.optim.Optimizer:
    """Make an optimizer of one parameter, of torch's."""
    return kind([torch.nn.Parameter(torch.zeros(2))], **options)


def own(inner: torch.optim.Optimizer, **changes: Any) -> Group:
    """Describe an optimizer's group, with states as Adam's."""
    fields = {k: v for k, v in inner.param_groups[0].items() if k != "params"}
    return Group(("a",), {**fields, **changes}, ())


def manifest(group: Group, saved_by: str = "") -> Manifest:
    """Describe a checkpoint."""
    return Manifest(
        save_id="",
        stage=2,
        world_size=2,
        precision="fp32",
        master_dtype="float32",
        parameters=(),
        groups=(group,),
        buffers=(),
        module_buffers=(),
        files=(),
        writer=Writer(optimizer=saved_by),
    )


@pytest.mark.parametrize(
    ("held", "kind", "said"),
    [
        (FUSED_LAMB, torch.optim.AdamW, "max_coeff"),
        (own(optimizer(torch.optim.SGD, lr=0.7)).hyperparameters, torch.optim.AdamW, "momentum"),
        (own(optimizer(torch.optim.NAdam)).hyperparameters, torch.optim.AdamW, "momentum_decay"),
        (own(optimizer(torch.optim.AdamW)).hyperparameters, torch.optim.SGD, "amsgrad"),
    ],
)
def test_another_optimizers_are_refused(held: Mapping[str, Plain], kind: Kind, said: str) -> None:
    """Whether it kept state or not, and with what helps."""
    inner = optimizer(kind)
    with pytest.raises(CheckpointMismatchError, match=said) as raised:
        check_unnamed_hyperparameters([Group(("a",), held, ())], [own(inner)], inner)
    assert "load_hyperparameters=False" in str(raised.value)


@pytest.mark.parametrize(
    ("held", "kind"),
    [
        ({**FUSED_ADAM, "step": 3, "initial_lr": 0.1}, torch.optim.AdamW),
        ({**FUSED_ADAM, "amsgrad": False, "name": "decay"}, torch.optim.Adam),
        (own(optimizer(torch.optim.Adam)).hyperparameters, torch.optim.AdamW),
        (
            own(optimizer(torch.optim.SGD), param_names=["a"]).hyperparameters,
            torch.optim.SGD,
        ),
        ({}, torch.optim.SGD),
    ],
)
def test_its_own_are_taken(held: Mapping[str, Plain], kind: Kind) -> None:
    """Kinds of Adam are one; names of members, and labels, say nothing of an algorithm."""
    inner = optimizer(kind)
    check_unnamed_hyperparameters([Group(("a",), held, ())], [own(inner)], inner)


@pytest.mark.parametrize(
    ("momentum", "stepped", "refused"), [(0.9, True, True), (0.9, False, False), (0.0, True, False)]
)
def test_a_group_without_state(momentum: float, stepped: bool, refused: bool) -> None:
    """It is refused where the optimizer keeps some, as its saved hyperparameters have it."""
    inner = optimizer(torch.optim.SGD, momentum=0.9)
    groups = [own(inner, momentum=momentum)]
    if not refused:
        check_unnamed_state(groups, inner, stepped=stepped)
        return
    with pytest.raises(CheckpointMismatchError, match=r"group 0 .a., but SGD keeps some"):
        check_unnamed_state(groups, inner, stepped=stepped)
    other = replace(groups[0], state=(StateKey("momentum_buffer", "elementwise", "float32"),))
    inner.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    with pytest.raises(CheckpointMismatchError, match=r"group 1 .a., but SGD keeps some"):
        check_unnamed_state([other, groups[0]], inner, stepped=False)


class DeepSpeedCPUAdam(torch.optim.Adam):
    """Stands for DeepSpeed's: its kind of weight decay is an attribute."""

    adam_w_mode = True


@pytest.mark.parametrize(
    ("saved", "here", "said"),
    [
        (torch.optim.Adam, torch.optim.AdamW, "stays in the gradient"),
        (torch.optim.AdamW, torch.optim.Adam, "stays decoupled"),
        (torch.optim.Adam, torch.optim.Adam, ""),
        (torch.optim.AdamW, torch.optim.AdamW, ""),
        (torch.optim.SGD, torch.optim.SGD, ""),
    ],
)
def test_another_kind_of_weight_decay_is_said(saved: Kind, here: Kind, said: str) -> None:
    """Adam's and AdamW's states are alike, and their weight decay is not."""
    group = own(optimizer(saved, weight_decay=0.1))
    for name in ("", saved.__name__):
        found = weight_decay_change(manifest(group, name), optimizer(here, weight_decay=0.1))
        assert (said in found) if said else not found
        assert not said or found.startswith("Weight decay of parameter group 0 ")
        assert not said or found.endswith("load_hyperparameters=False to use the configured one.")
    none = own(optimizer(saved, weight_decay=0.0))
    assert not weight_decay_change(manifest(none), optimizer(here, weight_decay=0.1))


def test_deepspeeds_kind_of_weight_decay() -> None:
    """It is no hyperparameter, so that it stays as configured: steps are other ones."""
    inner = DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(2))])
    del inner.param_groups[0]["decoupled_weight_decay"]
    saved = own(optimizer(torch.optim.Adam, weight_decay=0.1))
    found = weight_decay_change(manifest(saved), inner)
    assert "was in the gradient (Adam's) in the checkpoint" in found
    assert "so steps will differ" in found
    assert found[0] + found[-1] == "W."
    assert not weight_decay_change(
        manifest(own(optimizer(torch.optim.AdamW, weight_decay=0.1))), inner
    )


@pytest.mark.parametrize(("saved_by", "mine"), [("Adam", 3), ("AdamW", None)])
def test_what_a_group_takes_over(saved_by: str, mine: int | None) -> None:
    """What only another class has is left out; how a step is computed, and of whom, is this run's.

    What a scheduler keeps is taken from each class, though a live group has it not yet.
    """
    inner = optimizer(torch.optim.Adam, lr=1.0, foreach=False)
    (group,) = inner.param_groups
    before = dict(group)
    theirs: dict[str, Plain] = {"foreach": True, "fused": True, "param_names": ["a"], "params": [0]}
    saved: dict[str, Plain] = {**theirs, "lr": 0.5, "initial_lr": 0.25, "mine": 3}
    commit_groups(inner, RestoreValues((), (saved,), {}, TrainingProgress(), optimizer=saved_by))
    assert inner.param_groups == [group]
    assert inner.param_groups[0] is group
    taken = {"lr": 0.5, "initial_lr": 0.25} | ({} if mine is None else {"mine": mine})
    assert group == before | taken


SETTINGS: list[tuple[Kind, dict[str, Any], dict[str, Any], str]] = [
    (torch.optim.Adam, {}, {"amsgrad": True}, "max_exp_avg_sq"),
    (torch.optim.AdamW, {}, {"amsgrad": True}, "max_exp_avg_sq"),
    (torch.optim.SGD, {}, {"momentum": 0.9}, ""),
    (torch.optim.RMSprop, {}, {"momentum": 0.9}, "momentum_buffer"),
    (torch.optim.RMSprop, {}, {"centered": True}, "grad_avg"),
    (torch.optim.RMSprop, {"centered": True}, {"momentum": 0.9}, "momentum_buffer"),
    (torch.optim.NAdam, {}, {"momentum_decay": 0.1}, ""),
    (torch.optim.Adagrad, {}, {"lr_decay": 0.1}, ""),
    (torch.optim.Rprop, {}, {"etas": (0.4, 1.1)}, ""),
    (torch.optim.ASGD, {}, {"alpha": 0.5}, ""),
]


@pytest.mark.parametrize(("kind", "saved", "here", "lacking"), SETTINGS)
@pytest.mark.parametrize("restored", [False, True])
def test_state_fits_the_settings(
    kind: Kind, saved: dict[str, Any], here: dict[str, Any], lacking: str, restored: bool
) -> None:
    """Refused is exactly what torch itself could not step with; state that is unused is told."""
    for settings, other in ((saved, here), (here, saved)):
        trained, live = (optimizer(kind, **{"lr": 0.1, **o}) for o in (settings, other))
        state = stepped(trained)
        live.state[live.param_groups[0]["params"][0]].update(state)
        keys = [state_key(k, v, elementwise=v.ndim > 0) for k, v in state.items()]
        held = replace(own(trained), state=tuple(keys))
        if restored:  # The live settings become the saved ones: nothing is missing.
            assert not check_configured_state([held], live, hyperparameters=True)
            continue
        try:
            stepped(live)
        except KeyError:
            with pytest.raises(CheckpointMismatchError, match=lacking) as refused:
                check_configured_state([held], live, hyperparameters=False)
            assert lacking
            assert " was " in str(refused.value)
        else:
            told = check_configured_state([held], live, hyperparameters=False)
            unused = state.keys() - stepped(optimizer(kind, **{"lr": 0.1, **other})).keys()
            assert all(name in told for name in unused)
            assert bool(told) == bool(unused)


def stepped(inner: torch.optim.Optimizer) -> dict[str, Any]:
    """Step an optimizer once; return the states of its parameter."""
    (parameter,) = inner.param_groups[0]["params"]
    parameter.grad = torch.ones_like(parameter)
    inner.step()
    return dict(inner.state[parameter])


def test_state_of_an_adam_without_a_setting() -> None:
    """DeepSpeed's kinds of Adam have no ``amsgrad``, which torch's then has as configured."""
    inner = optimizer(torch.optim.AdamW, amsgrad=True)
    keys = [StateKey(name, "elementwise", "float32") for name in ("exp_avg", "exp_avg_sq")]
    step = StateKey("step", "scalar", "int")
    held = Group(("a",), FUSED_ADAM, (*keys, step))
    for restored in (True, False):
        with pytest.raises(CheckpointMismatchError, match="max_exp_avg_sq"):
            check_configured_state([held], inner, hyperparameters=restored)
        plain = optimizer(torch.optim.AdamW)
        assert not check_configured_state([held], plain, hyperparameters=restored)
