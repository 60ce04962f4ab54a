"""What a flat buffer's masters and states are received in: fresh states, padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_elastic_zero.core.layout import Fragment
from lightning_elastic_zero.core.manifest import Group, Manifest
from lightning_elastic_zero.core.tensors import dtype_name, state_key
from lightning_elastic_zero.engine import restore as initial_state
from lightning_elastic_zero.engine.buffers import LiveFlatBuffer
from lightning_elastic_zero.engine.optimizer import place_scalar, split_state
from lightning_elastic_zero.engine.restore import (
    FlatTarget,
    allocate_states,
    commit_masters,
    commit_state,
)

FRAGMENTS = (
    Fragment("known", 0, 4, rank=0, buffer=0, offset=1),
    Fragment("new", 2, 5, rank=0, buffer=0, offset=5),
    Fragment("also known", 0, 3, rank=0, buffer=0, offset=9),
)
"""With an element of padding before the first and the third one, and two behind."""
NUMEL = 14
PADDING = [0, 8, 12, 13]
RATE = 0.25


def buffer_of(master: torch.Tensor) -> LiveFlatBuffer:
    """Return a flat buffer of one rank."""
    return LiveFlatBuffer(0, (), (), nn.Parameter(master), master.bfloat16())


def stepped(buffer: LiveFlatBuffer) -> tuple[torch.optim.Optimizer, Manifest]:
    """Return an optimizer whose states do not begin with zeros, and what it saved without "new"."""
    inner = torch.optim.Rprop([buffer.master], lr=RATE)
    buffer.master.grad = torch.ones(NUMEL)
    inner.step()
    elementwise = split_state(inner, buffer.key, inner.state[buffer.key])[0]
    keys = tuple(state_key(name, value, elementwise=True) for name, value in elementwise.items())
    names = tuple(f.name for f in FRAGMENTS if f.name != "new")
    fields = {k: v for k, v in inner.param_groups[0].items() if k != "params"}
    group = Group(names, fields, keys)
    return inner, Manifest("", 0, 1, "fp32", "float32", (), (group,), (), (), ())


def test_what_is_new_begins_as_a_fresh_state_does() -> None:
    """In its own elements; all others, which are read or are padding, begin with zeros."""
    buffer = buffer_of(torch.randn(NUMEL))
    inner, saved = stepped(buffer)
    states = allocate_states(inner, buffer, FRAGMENTS, saved)
    assert {*states} == {key.name for key in saved.groups[0].state}
    wanted = torch.zeros(NUMEL)
    wanted[5:8] = RATE
    assert torch.equal(states["step_size"], wanted)
    assert torch.equal(states["prev"], torch.zeros(NUMEL))


def test_nothing_is_asked_of_an_optimizer_where_nothing_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be found out refuses only those who need it."""
    buffer = buffer_of(torch.randn(NUMEL))
    inner, saved = stepped(buffer)
    everything = replace(saved.groups[0], names=tuple(f.name for f in FRAGMENTS))
    monkeypatch.setattr(initial_state, "probe_after_a_step", None)
    states = allocate_states(inner, buffer, FRAGMENTS, replace(saved, groups=(everything,)))
    assert not any(state.any() for state in states.values())
    without = replace(saved, groups=(replace(saved.groups[0], state=()),))
    assert allocate_states(inner, buffer, FRAGMENTS, without) == {}


@pytest.mark.parametrize(
    ("says_fp32", "masters_then", "expected"),
    [
        (True, torch.float32, torch.float32),
        (False, torch.bfloat16, torch.bfloat16),
        (None, torch.float32, torch.bfloat16),
        (None, torch.bfloat16, torch.float32),
    ],
)
def test_states_have_the_type_that_the_optimizer_keeps(
    says_fp32: bool | None, masters_then: torch.dtype, expected: torch.dtype
) -> None:
    """DeepSpeed's for the host say it; else states that had the masters' type follow the masters.

    Here the masters are bf16, and the states were saved in fp32.
    """
    inner, saved = stepped(buffer_of(torch.randn(NUMEL)))
    if says_fp32 is not None:
        inner.fp32_optimizer_states = says_fp32  # type: ignore[attr-defined]
    saved = replace(saved, master_dtype=dtype_name(masters_then))
    buffer = buffer_of(torch.randn(NUMEL).bfloat16())
    states = allocate_states(inner, buffer, FRAGMENTS[:1], saved)
    assert {state.dtype for state in states.values()} == {expected}


def test_states_of_adam_have_the_type_of_the_masters() -> None:
    """Whatever saved them: torch's makes them like the weights that it steps."""
    saved = replace(stepped(buffer_of(torch.randn(NUMEL)))[1], master_dtype="bfloat16")
    buffer = buffer_of(torch.randn(NUMEL).bfloat16())
    states = allocate_states(torch.optim.AdamW([buffer.master]), buffer, FRAGMENTS[:1], saved)
    assert {state.dtype for state in states.values()} == {torch.bfloat16}


@pytest.mark.parametrize("in_place", [True, False])
def test_padding_becomes_zero(in_place: bool) -> None:
    """Before, between and behind the fragments, whatever uninitialised memory held."""
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


def _own(values: torch.Tensor) -> torch.Tensor:
    return values.clone()


def _view(values: torch.Tensor) -> torch.Tensor:
    return torch.cat((values, values))[: values.numel()]


def _shared(values: torch.Tensor) -> torch.Tensor:
    shared = values.clone()
    shared.share_memory_()  # type: ignore[no-untyped-call]
    return shared


@pytest.mark.parametrize(
    ("live_of", "copied"),
    [(_own, False), (_view, True), (_shared, True)],
    ids=["own", "view", "shared"],
)
def test_a_live_state_takes_what_was_received(
    live_of: Callable[[torch.Tensor], torch.Tensor], copied: bool
) -> None:
    """It stays the tensor that it is, and has the memory that was filled: nothing is copied.

    But where others have its memory too: a larger tensor, or another process.
    """
    buffer = buffer_of(torch.randn(NUMEL))
    inner, _ = stepped(buffer)
    held = inner.state[buffer.key]
    live = held["prev"] = live_of(held["prev"])
    there = live.data_ptr()
    received = {"prev": torch.randn(NUMEL), "step_size": torch.randn(NUMEL)}
    wanted = {key: value.clone() for key, value in received.items()}
    target = FlatTarget(buffer, FRAGMENTS, buffer.master.data, in_place=True, states=received)
    commit_state(inner, target, {"step": 3})
    committed = inner.state[buffer.key]
    assert committed["prev"] is live
    assert all(torch.equal(committed[key], value) for key, value in wanted.items())
    assert live.data_ptr() == (there if copied else received["prev"].data_ptr())


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("value", [1003, 1003.0, 2**24 + 1, 246913578], ids=str)
def test_a_step_does_not_take_the_default_type(value: float, default: torch.dtype) -> None:
    """A Python step that torch's Adam takes over is the same number, fp32 where that holds it."""
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
