"""Optimizer state restored into flat buffers, replicated state, unnamed and unknown state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

from lightning_elastic_zero.core.layout import Fragment
from lightning_elastic_zero.core.manifest import (
    Group,
    Manifest,
    Plain,
    StateKey,
    TrainingProgress,
    Writer,
)
from lightning_elastic_zero.core.tensors import (
    FlatState,
    RestoreValues,
    bit_sums,
    dtype_name,
    state_key,
)
from lightning_elastic_zero.engine import restore as initial_state
from lightning_elastic_zero.engine.addresses import flat_buffer_row, own_slices, rank_fragments
from lightning_elastic_zero.engine.buffers import LiveFlatBuffer, live_flat_buffers
from lightning_elastic_zero.engine.deepspeed import PLAIN
from lightning_elastic_zero.engine.optimizer import (
    describe_groups,
    package_of,
    place_scalar,
    split_state,
)
from lightning_elastic_zero.engine.optimizer_checks import (
    check_configured_state,
    check_lacking_hyperparameters,
    check_same_optimizer,
    check_unnamed_hyperparameters,
    check_unnamed_state,
    weight_decay_change,
)
from lightning_elastic_zero.engine.restore import (
    FlatTarget,
    allocate_states,
    check_scheduler,
    commit_groups,
    commit_masters,
    commit_state,
    flat_target,
)
from lightning_elastic_zero.errors import CheckpointMismatchError, UnsupportedError

FRAGMENTS = (
    Fragment("known", 0, 4, rank=0, buffer=0, offset=1),
    Fragment("new", 2, 5, rank=0, buffer=0, offset=5),
    Fragment("also known", 0, 3, rank=0, buffer=0, offset=9),
)
"""One element of padding precedes the first and the third fragment, and two follow the last."""
NUMEL = 14
PADDING = [0, 8, 12, 13]
RATE = 0.25


def buffer_of(master: torch.Tensor) -> LiveFlatBuffer:
    return LiveFlatBuffer(0, (), (), nn.Parameter(master), master.bfloat16())


def stepped_engine(buffer: LiveFlatBuffer) -> tuple[torch.optim.Optimizer, Manifest]:
    """Return an optimizer with non-zero states, and its manifest without "new"."""
    inner = torch.optim.Rprop([buffer.master], lr=RATE)
    buffer.master.grad = torch.ones(NUMEL)
    inner.step()
    elementwise = split_state(inner, buffer.state_key, inner.state[buffer.state_key])[0]
    keys = tuple(state_key(name, value, elementwise=True) for name, value in elementwise.items())
    names = tuple(f.name for f in FRAGMENTS if f.name != "new")
    fields = {k: v for k, v in inner.param_groups[0].items() if k != "params"}
    group = Group(names, fields, keys)
    return inner, Manifest("", 0, 1, "fp32", "float32", (), (group,), (), (), ())


def test_new_parameters_begin_with_a_fresh_state() -> None:
    buffer = buffer_of(torch.randn(NUMEL))
    inner, saved = stepped_engine(buffer)
    states = allocate_states(inner, buffer, FRAGMENTS, saved)
    assert {*states} == {key.name for key in saved.groups[0].state}
    wanted = torch.zeros(NUMEL)
    wanted[5:8] = RATE
    assert torch.equal(states["step_size"], wanted)
    assert torch.equal(states["prev"], torch.zeros(NUMEL))


def test_without_new_parameters_the_fresh_state_is_not_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer = buffer_of(torch.randn(NUMEL))
    inner, saved = stepped_engine(buffer)
    everything = replace(saved.groups[0], names=tuple(f.name for f in FRAGMENTS))
    monkeypatch.setattr(initial_state, "probe_after_a_step", None)
    states = allocate_states(inner, buffer, FRAGMENTS, replace(saved, groups=(everything,)))
    assert not any(state.any() for state in states.values())
    without = replace(saved, groups=(replace(saved.groups[0], state=()),))
    assert allocate_states(inner, buffer, FRAGMENTS, without) == {}


@pytest.mark.parametrize(
    ("keeps_fp32", "saved_masters", "expected"),
    [
        (True, torch.float32, torch.float32),
        (False, torch.bfloat16, torch.bfloat16),
        (None, torch.float32, torch.bfloat16),
        (None, torch.bfloat16, torch.float32),
    ],
)
def test_states_have_the_type_that_the_optimizer_keeps(
    keeps_fp32: bool | None, saved_masters: torch.dtype, expected: torch.dtype
) -> None:
    """Here the masters are bf16, and the states were saved in fp32."""
    inner, saved = stepped_engine(buffer_of(torch.randn(NUMEL)))
    if keeps_fp32 is not None:
        inner.fp32_optimizer_states = keeps_fp32  # type: ignore[attr-defined]
    saved = replace(saved, master_dtype=dtype_name(saved_masters))
    buffer = buffer_of(torch.randn(NUMEL).bfloat16())
    states = allocate_states(inner, buffer, FRAGMENTS[:1], saved)
    assert {state.dtype for state in states.values()} == {expected}


def test_states_of_adam_have_the_type_of_the_masters() -> None:
    saved = replace(stepped_engine(buffer_of(torch.randn(NUMEL)))[1], master_dtype="bfloat16")
    buffer = buffer_of(torch.randn(NUMEL).bfloat16())
    states = allocate_states(torch.optim.AdamW([buffer.master]), buffer, FRAGMENTS[:1], saved)
    assert {state.dtype for state in states.values()} == {torch.bfloat16}


@pytest.mark.parametrize("in_place", [True, False])
def test_padding_becomes_zero(in_place: bool) -> None:
    buffer = buffer_of(torch.full((NUMEL,), float("nan")))
    received = torch.arange(1.0, NUMEL + 1)
    if in_place:
        buffer.master.data.copy_(received)
        received = buffer.master.data
    wanted = received.clone()
    wanted[PADDING] = 0.0
    target = FlatTarget(buffer, FRAGMENTS, received, in_place, {})
    commit_masters(target, keep_fp32=True)
    assert torch.equal(buffer.master.data, wanted)


def _shared(values: torch.Tensor) -> torch.Tensor:
    shared = values.clone()
    shared.share_memory_()
    return shared


@pytest.mark.parametrize(
    ("live_of", "copied"),
    [
        (torch.clone, False),
        (lambda values: torch.cat((values, values))[: values.numel()], True),
        (_shared, True),
    ],
    ids=["own", "view", "shared"],
)
def test_a_live_state_keeps_its_tensor_and_takes_the_memory(
    live_of: Callable[[torch.Tensor], torch.Tensor], copied: bool
) -> None:
    """Memory that a larger tensor or another process shares is kept, and the values are copied."""
    buffer = buffer_of(torch.randn(NUMEL))
    inner, _ = stepped_engine(buffer)
    held = inner.state[buffer.state_key]
    live = held["prev"] = live_of(held["prev"])
    address = live.data_ptr()
    received = {"prev": torch.randn(NUMEL), "step_size": torch.randn(NUMEL)}
    wanted = {key: value.clone() for key, value in received.items()}
    target = FlatTarget(buffer, FRAGMENTS, buffer.master.data, in_place=True, states=received)
    commit_state(inner, target, {"step": 3})
    committed = inner.state[buffer.state_key]
    assert committed["prev"] is live
    assert all(torch.equal(committed[key], value) for key, value in wanted.items())
    assert live.data_ptr() == (address if copied else received["prev"].data_ptr())


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("value", [1003, 1003.0, 2**24 + 1, 246913578], ids=str)
def test_a_python_step_becomes_fp32_whatever_the_default_type(
    value: float, default: torch.dtype
) -> None:
    inner = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        placed = place_scalar("step", value, inner, inner.param_groups[0], torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    assert isinstance(placed, torch.Tensor)
    assert placed.item() == value
    assert placed.dtype == (torch.float32 if value < 2**24 else torch.float64)


class Odd(nn.Module):
    """Weights whose memory order is not their element order, and one without dimensions."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale = nn.Parameter(torch.randn(()))
        self.unused = nn.Parameter(torch.empty(0))

    def step(self, optimizer: torch.optim.Optimizer, count: int) -> None:
        for index in range(count):
            torch.manual_seed(index)
            loss = self.conv(torch.randn(2, 3, 4, 4)).mul(self.scale).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def held_by(
    module: Odd, optimizer: torch.optim.Optimizer, world_size: int
) -> tuple[Manifest, list[tuple[FlatState, ...]]]:
    buffers = live_flat_buffers(optimizer, PLAIN)
    names = {p: name for name, p in module.named_parameters()}
    rows = [flat_buffer_row(b, names, 0, world_size) for b in buffers]
    states = [
        split_state(optimizer, b.state_key, optimizer.state.get(b.state_key, {})) for b in buffers
    ]
    wholes = rank_fragments(0, rows, world_size, 0)
    flats = [
        FlatState(fragments, buffer.master, *held, in_module=True)
        for buffer, fragments, held in zip(buffers, wholes, states, strict=True)
    ]
    keys = tuple(state_key(k, v, elementwise=True) for k, v in states[0][0].items())
    manifest = Manifest(
        "", 0, world_size, "fp32", "float32", (), (Group((), {}, keys),), tuple(rows), (), ()
    )
    return manifest, [own_slices(flats, rows, world_size, r) for r in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 7, 64])
def test_slices_of_all_ranks_restore_the_whole_state(world_size: int) -> None:
    module, other = Odd(0), Odd(1)
    optimizer, fresh = (torch.optim.NAdam(m.parameters(), lr=0.1) for m in (module, other))
    module.step(optimizer, 3)
    manifest, slices = held_by(module, optimizer, world_size)
    buffers = live_flat_buffers(fresh, PLAIN)
    rows = manifest.buffers
    for index, buffer in enumerate(buffers):
        whole = rank_fragments(0, rows, world_size, 0)[index]
        targets = allocate_states(fresh, buffer, whole, manifest)
        target = flat_target(buffer, whole, targets, whole=True)
        assert not target.in_place  # Weights of the module have no other copy.
        filled = 0
        for of_rank in slices:
            for fragment in of_rank[index].fragments:
                part = slice(fragment.offset, fragment.offset + fragment.stop - fragment.start)
                target.master[fragment.start : fragment.stop] = of_rank[index].master[part]
                for key, values in of_rank[index].elementwise.items():
                    targets[key][fragment.start : fragment.stop] = values[part]
                filled += fragment.stop - fragment.start
        assert filled == buffer.master.numel()
        commit_masters(target, keep_fp32=True)
        commit_state(fresh, target, slices[0][index].scalars)
    assert {len(state) for state in fresh.state.values()} == {4}
    for m, o in ((module, optimizer), (other, fresh)):
        m.step(o, 2)
    for name, weight in module.named_parameters():
        assert torch.equal(other.get_parameter(name), weight), name
    assert other.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_the_states_of_a_lone_scalar_weight_are_ambiguous() -> None:
    scale = nn.Parameter(torch.randn(()))
    optimizer = torch.optim.AdamW([scale])
    scale.grad = torch.ones(())
    optimizer.step()
    with pytest.raises(UnsupportedError, match="0-dimensional"):
        split_state(optimizer, scale, optimizer.state[scale])


def test_states_of_other_types_in_one_group_are_refused_with_the_types() -> None:
    states: list[Any] = [
        (0, ({"exp_avg": torch.zeros(2, dtype=t)}, {})) for t in (torch.float32, torch.half)
    ]
    found = r"has the states \['exp_avg \(float16\)'\], another \['exp_avg \(float32\)'\]"
    with pytest.raises(UnsupportedError, match=f"parameter group 0: one flat buffer {found}"):
        describe_groups(None, "", {}, states)


def test_bit_sums_differ_for_one_bit_in_every_type() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        one = torch.randn(100).to(dtype)
        other = one.clone()
        assert bit_sums([one, one[:0]]) == bit_sums([other, one[:0]])
        other[7] = torch.nextafter(other[7], torch.tensor(9, dtype=dtype))
        assert bit_sums([one]) != bit_sums([other])


Kind: TypeAlias = "type[torch.optim.Optimizer]"

FUSED_ADAM: dict[str, Plain] = {"lr": 0.1, "bias_correction": True, "betas": (0.9, 0.999)}
FUSED_ADAM |= {"eps": 1e-8, "weight_decay": 0.0}
FUSED_LAMB = {**FUSED_ADAM, "max_grad_norm": 0.0, "max_coeff": 10.0, "min_coeff": 0.01}
"""DeepSpeed's optimizers. The states of Lamb have the names of Adam's."""


def optimizer(kind: Kind, **options: Any) -> torch.optim.Optimizer:
    return kind([torch.nn.Parameter(torch.zeros(2))], **options)


def own(inner: torch.optim.Optimizer, **changes: Any) -> Group:
    fields = {k: v for k, v in inner.param_groups[0].items() if k != "params"}
    return Group(("a",), {**fields, **changes}, ())


def manifest(group: Group, saved_by: str = "") -> Manifest:
    writer = Writer(optimizer=saved_by)
    return Manifest("", 2, 2, "fp32", "float32", (), (group,), (), (), (), writer=writer)


@pytest.mark.parametrize(
    ("held", "kind", "message"),
    [
        (FUSED_LAMB, torch.optim.AdamW, "max_coeff"),
        (own(optimizer(torch.optim.SGD, lr=0.7)).hyperparameters, torch.optim.AdamW, "momentum"),
        (own(optimizer(torch.optim.NAdam)).hyperparameters, torch.optim.AdamW, "momentum_decay"),
        (own(optimizer(torch.optim.AdamW)).hyperparameters, torch.optim.SGD, "amsgrad"),
    ],
)
def test_states_of_another_optimizer_are_refused(
    held: Mapping[str, Plain], kind: Kind, message: str
) -> None:
    inner = optimizer(kind)
    with pytest.raises(CheckpointMismatchError, match=message) as raised:
        check_unnamed_hyperparameters([Group(("a",), held, ())], [own(inner)], inner)
    assert "load_hyperparameters=False" in str(raised.value)


@pytest.mark.parametrize(
    ("held", "kind"),
    [
        ({**FUSED_ADAM, "step": 3, "initial_lr": 0.1}, torch.optim.AdamW),
        ({**FUSED_ADAM, "amsgrad": False, "name": "decay"}, torch.optim.Adam),
        (own(optimizer(torch.optim.Adam)).hyperparameters, torch.optim.AdamW),
        (own(optimizer(torch.optim.SGD), param_names=["a"]).hyperparameters, torch.optim.SGD),
        ({}, torch.optim.SGD),
    ],
)
def test_states_of_the_same_kind_are_accepted(held: Mapping[str, Plain], kind: Kind) -> None:
    inner = optimizer(kind)
    check_unnamed_hyperparameters([Group(("a",), held, ())], [own(inner)], inner)


@pytest.mark.parametrize(
    ("momentum", "stepped", "refused"), [(0.9, True, True), (0.9, False, False), (0.0, True, False)]
)
def test_a_group_without_state_is_refused_if_the_optimizer_needs_one(
    momentum: float, stepped: bool, refused: bool
) -> None:
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
    adam_w_mode = True


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        (torch.optim.Adam, torch.optim.AdamW, "stays in the gradient"),
        (torch.optim.AdamW, torch.optim.Adam, "stays decoupled"),
        (torch.optim.Adam, torch.optim.Adam, ""),
        (torch.optim.AdamW, torch.optim.AdamW, ""),
        (torch.optim.SGD, torch.optim.SGD, ""),
    ],
)
def test_another_kind_of_weight_decay_is_a_warning(saved: Kind, here: Kind, message: str) -> None:
    group = own(optimizer(saved, weight_decay=0.1))
    for name in ("", saved.__name__):
        found = weight_decay_change(manifest(group, name), optimizer(here, weight_decay=0.1))
        assert (message in found) if message else not found
        assert not message or found.startswith("Weight decay of parameter group 0 ")
        assert not message or found.endswith(
            "load_hyperparameters=False to use the configured one."
        )
    none = own(optimizer(saved, weight_decay=0.0))
    assert not weight_decay_change(manifest(none), optimizer(here, weight_decay=0.1))


def test_deepspeeds_kind_of_weight_decay_is_compared() -> None:
    inner = DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(2))])
    del inner.param_groups[0]["decoupled_weight_decay"]
    saved = own(optimizer(torch.optim.Adam, weight_decay=0.1))
    found = weight_decay_change(manifest(saved), inner)
    assert "was in the gradient (Adam's) in the checkpoint" in found
    assert "so steps will differ" in found
    assert found[0] + found[-1] == "W."
    same = own(optimizer(torch.optim.AdamW, weight_decay=0.1))
    assert not weight_decay_change(manifest(same), inner)


@pytest.mark.parametrize("saved_by", ["", "FusedAdam", "DeepSpeedCPUAdam"])
def test_decay_that_deepspeed_decouples_by_default_is_compared(saved_by: str) -> None:
    """Its groups do not name the kind."""
    saved = manifest(Group(("a",), {**FUSED_ADAM, "weight_decay": 0.1}, ()), saved_by)
    found = weight_decay_change(saved, optimizer(torch.optim.Adam, weight_decay=0.1))
    assert "was decoupled (unless DeepSpeed's Adam had adam_w_mode=False)" in found
    assert "is in the gradient (Adam's) with Adam" in found
    assert not weight_decay_change(saved, optimizer(torch.optim.AdamW, weight_decay=0.1))
    coupled = optimizer(DeepSpeedCPUAdam, weight_decay=0.1)
    del coupled.param_groups[0]["decoupled_weight_decay"]
    coupled.__dict__["adam_w_mode"] = False
    assert not weight_decay_change(saved, coupled)  # nothing tells that the saved one was not


class FusedAdam(torch.optim.Optimizer):
    """Counts its steps in its groups, as apex's does; its groups have DeepSpeed's keys."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, dict(FUSED_ADAM))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                self.state[p] |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": p.clone()}


@pytest.mark.parametrize("saved_by", ["AdamW", "FusedAdam", "DeepSpeedCPUAdam"])
def test_a_step_count_that_the_optimizer_does_not_read_is_refused(saved_by: str) -> None:
    """Bias correction would restart on old moments."""
    inner, moments = optimizer(FusedAdam), {"exp_avg", "exp_avg_sq"}
    with pytest.raises(CheckpointMismatchError, match="another package than this run's tests"):
        check_same_optimizer(saved_by, inner, {*moments, "step"})
    check_same_optimizer("FusedAdam", inner, moments)
    check_same_optimizer(saved_by, inner, ())  # hyperparameters only
    with pytest.raises(CheckpointMismatchError, match="configure SGD"):
        check_same_optimizer("SGD", optimizer(torch.optim.AdamW), {"momentum_buffer"})


LACKING: list[tuple[Kind, dict[str, Any], str]] = [
    (torch.optim.AdamW, {"amsgrad": True}, "group 0 had amsgrad=True"),
    (torch.optim.AdamW, {"fused": True, "initial_lr": 0.1, "name": "decay", "step": 3}, ""),
    (torch.optim.Adam, {"lr_scale": 0.5}, "group 0 had lr_scale=0.5"),
]


@pytest.mark.parametrize(("saved", "options", "message"), LACKING)
def test_hyperparameters_that_another_adam_lacks_are_a_warning(
    saved: Kind, options: dict[str, Any], message: str
) -> None:
    trained, inner = optimizer(saved), optimizer(FusedAdam)
    found = check_lacking_hyperparameters(manifest(own(trained, **options), saved.__name__), inner)
    assert (message in found) if message else not found
    assert not message or "FusedAdam ignores them" in found
    same = manifest(own(trained, **options), "FusedAdam")
    assert not check_lacking_hyperparameters(same, inner)


def test_deepspeeds_adam_ignores_amsgrad_and_torchs_corrects_the_bias() -> None:
    """DeepSpeed's CPU Adam has the key, and refuses it in its constructor only."""
    held = manifest(own(optimizer(torch.optim.AdamW, amsgrad=True)), "AdamW")
    assert "amsgrad=True" in check_lacking_hyperparameters(held, optimizer(DeepSpeedCPUAdam))
    for corrects in (True, False):
        group = Group(("a",), {**FUSED_ADAM, "bias_correction": corrects}, ())
        inner = optimizer(torch.optim.AdamW)
        found = check_lacking_hyperparameters(manifest(group, "FusedAdam"), inner)
        assert ("bias_correction=False" in found) == (not corrects)


@pytest.mark.parametrize("saved_by", ["", "AdamW"])
def test_a_run_that_maximized_does_not_resume_minimizing(saved_by: str) -> None:
    held = manifest(own(optimizer(torch.optim.AdamW, maximize=True)), saved_by)
    with pytest.raises(CheckpointMismatchError, match=r"maximize=True.*FusedAdam") as refused:
        check_lacking_hyperparameters(held, optimizer(FusedAdam))
    assert "load_hyperparameters=False" in str(refused.value)
    assert not check_lacking_hyperparameters(held, optimizer(torch.optim.Adam))


@pytest.mark.parametrize(("saved_by", "mine"), [("Adam", 3), ("AdamW", None)])
def test_hyperparameters_that_a_group_takes_over(saved_by: str, mine: int | None) -> None:
    """Not those of the other class only, nor those that select how to compute a step."""
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
def test_states_that_the_settings_need_are_required(
    kind: Kind, saved: dict[str, Any], here: dict[str, Any], lacking: str, restored: bool
) -> None:
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
            warning = check_configured_state([held], live, hyperparameters=False)
            unused = state.keys() - stepped(optimizer(kind, **{"lr": 0.1, **other})).keys()
            assert all(name in warning for name in unused)
            assert bool(warning) == bool(unused)


def stepped(inner: torch.optim.Optimizer) -> dict[str, Any]:
    (parameter,) = inner.param_groups[0]["params"]
    parameter.grad = torch.ones_like(parameter)
    inner.step()
    return dict(inner.state[parameter])


def test_amsgrad_stays_as_configured_for_states_of_deepspeeds_adam() -> None:
    inner = optimizer(torch.optim.AdamW, amsgrad=True)
    keys = [StateKey(name, "elementwise", "float32") for name in ("exp_avg", "exp_avg_sq")]
    step = StateKey("step", "scalar", "int")
    held = Group(("a",), FUSED_ADAM, (*keys, step))
    for restored in (True, False):
        with pytest.raises(CheckpointMismatchError, match="max_exp_avg_sq"):
            check_configured_state([held], inner, hyperparameters=restored)
        plain = optimizer(torch.optim.AdamW)
        assert not check_configured_state([held], plain, hyperparameters=restored)


def instance_of(name: str, module: str, base: type) -> Any:
    kind: Any = type(name, (base,), {"__module__": module})
    return kind.__new__(kind)


def test_a_subclass_belongs_to_the_package_of_its_base() -> None:
    theirs = instance_of("AdamW", "bitsandbytes.optim.adamw", torch.optim.Optimizer)
    assert package_of(theirs) == "bitsandbytes"
    assert package_of(instance_of("AdamW", "project.optim", type(theirs))) == "bitsandbytes"
    assert package_of(instance_of("AdamW", "project.optim", torch.optim.AdamW)) == "torch"
    assert package_of(instance_of("Muon", "project.optim", torch.optim.Optimizer)) == "project"
    assert package_of(torch.optim.SGD([torch.zeros(1)])) == "torch"


def test_a_scheduler_that_keeps_less_than_the_saved_one_is_another() -> None:
    rates = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    saved = {**rates.StepLR(optimizer, 1).state_dict(), "verbose": False}
    assert not check_scheduler(rates.StepLR(optimizer, 5), saved)
    with pytest.raises(CheckpointMismatchError, match=r"step_size.*this run's ExponentialLR keeps"):
        check_scheduler(rates.ExponentialLR(optimizer, 0.999), saved)
