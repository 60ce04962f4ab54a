"""Schedulers as configured, for the saved parameter groups and for new ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer, swa_utils
from torch.optim import lr_scheduler as lrs

from lightning_elastic_zero.core.manifest import Group
from lightning_elastic_zero.core.tensors import cast_like, plain
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.trainer.schedulers import (
    CONFIGURATION_KEYS,
    resume_as_configured,
    resume_as_saved,
    with_new_groups,
)

Make = Callable[[Optimizer], Any]

SAVED_RATE, RATE = 0.8, 0.05
STEPS, MORE = 9, 10
"""Steps before and after the checkpoint."""


def halves(step: int) -> float:
    return 0.5**step


class Warmup:
    """A stateful factor."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


def warmed(o: Optimizer, steps: int = 4, eta_min: float = 0.0) -> lrs.SequentialLR:
    cosine = lrs.CosineAnnealingLR(o, 30, eta_min=eta_min)
    return lrs.SequentialLR(o, [lrs.LinearLR(o, 0.01, total_iters=steps), cosine], [steps])


def nested(o: Optimizer, gamma: float) -> lrs.ChainedScheduler:
    """Nested schedules, in the only nesting that SequentialLR accepts."""
    parts: list[Any] = [lrs.ConstantLR(o, 0.5, total_iters=2), lrs.ExponentialLR(o, gamma)]
    return lrs.ChainedScheduler([lrs.SequentialLR(o, parts, [3]), lrs.StepLR(o, 4, gamma=0.5)], o)


def pair(kind: Any, saved: tuple[Any, ...], live: tuple[Any, ...]) -> tuple[Make, Make]:
    return lambda o: kind(o, *saved), lambda o: kind(o, *live)


def chained(o: Optimizer, factor: float, gamma: float) -> lrs.ChainedScheduler:
    return lrs.ChainedScheduler([lrs.ConstantLR(o, factor), lrs.ExponentialLR(o, gamma)], o)


PAIRS: dict[str, tuple[Make, Make]] = {
    "LambdaLR": pair(lrs.LambdaLR, (lambda _: 1.0,), (halves,)),
    "LambdaLR of an object": pair(lrs.LambdaLR, (Warmup(3),), (Warmup(15),)),
    "MultiplicativeLR": pair(
        lrs.MultiplicativeLR, (lambda _: 0.7,), (lambda step: 0.95 if step % 2 else 0.9,)
    ),
    "StepLR": pair(lrs.StepLR, (2,), (3, 0.5)),
    "MultiStepLR": pair(lrs.MultiStepLR, ([2, 4],), ([8, 12], 0.5)),
    "ConstantLR": pair(lrs.ConstantLR, (), (0.5, 12)),
    "LinearLR": pair(lrs.LinearLR, (0.01, 1.0, 4), (0.01, 1.0, 4)),
    "LinearLR, longer": pair(lrs.LinearLR, (1 / 3, 1.0, 10), (0.5, 1.0, 20)),
    "ExponentialLR": pair(lrs.ExponentialLR, (0.9,), (0.5,)),
    "PolynomialLR": pair(lrs.PolynomialLR, (10,), (30, 2.0)),
    "CosineAnnealingLR": pair(lrs.CosineAnnealingLR, (10,), (20, 0.001)),
    "CosineAnnealingWarmRestarts": pair(lrs.CosineAnnealingWarmRestarts, (4,), (3, 2, 0.001)),
    "OneCycleLR": pair(lrs.OneCycleLR, (SAVED_RATE, 10), (2 * RATE, 20)),
    "CyclicLR": (
        lambda o: lrs.CyclicLR(o, SAVED_RATE, 1.0, step_size_up=3),
        lambda o: lrs.CyclicLR(o, RATE, 0.1, step_size_up=7, mode="exp_range", gamma=0.9),
    ),
    "SequentialLR": pair(warmed, (), (4, 0.001)),
    "SequentialLR, still warming up": pair(warmed, (), (12,)),
    "ChainedScheduler": pair(chained, (1 / 3, 0.9), (0.5, 0.5)),
    "nested": pair(nested, (0.9,), (0.5,)),
    "another kind": (lambda o: lrs.StepLR(o, 2), warmed),
    "another kind, nested": (warmed, lambda o: nested(o, 0.5)),
}
"""A scheduler as saved, and as configured now."""

PLATEAU: tuple[Make, Make] = (
    lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    lambda o: lrs.ReduceLROnPlateau(o, patience=2, factor=0.5, min_lr=0.01),
)

OPTIMIZERS: dict[str, Callable[[float], Optimizer]] = {
    "one group": lambda rate: SGD([weight()], lr=rate, momentum=0.9),
    "betas": lambda rate: AdamW([weight()], lr=rate),
    "several groups": lambda rate: two_groups(2 * rate, rate),
    "a group at 0": lambda rate: two_groups(0.0, rate),
    "a tensor": lambda rate: AdamW([weight()], lr=torch.tensor(rate), foreach=False),
}


def two_groups(first: float, second: float) -> Optimizer:
    return AdamW([{"params": [weight()], "lr": rate} for rate in (first, second)], lr=second)


each = pytest.mark.parametrize(("saved", "live"), PAIRS.values(), ids=PAIRS)
of_each = pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(1))


def after(make: Make, optimizer: Optimizer, steps: int) -> Any:
    scheduler = make(optimizer)
    for _ in range(steps):
        advance(scheduler)
    return scheduler


def advance(scheduler: Any) -> None:
    scheduler.optimizer.step()
    if isinstance(scheduler, lrs.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def saved_groups(optimizer: Optimizer) -> tuple[Group, ...]:
    return tuple(
        Group(names=(), hyperparameters={k: plain(v, k) for k, v in group.items()}, state=())
        for group in groups_of(optimizer)
    )


def resume(saved: Any, live: Any) -> None:
    """Set a scheduler to the position of another one, as the strategy and Lightning do."""
    state = copy.deepcopy(saved.state_dict())
    before = copy.deepcopy(state)
    (kept,) = resume_as_configured([live], [state], saved_groups(saved.optimizer))
    assert repr(state) == repr(before)
    live.load_state_dict(kept)
    assert saved.state_dict().keys() <= before.keys()


@each
@of_each
def test_a_new_configuration_continues_as_if_used_from_the_start(
    saved: Make, live: Make, make_optimizer: Callable[[float], Optimizer]
) -> None:
    """Rates, momentum and betas, bit for bit."""
    uninterrupted = after(live, make_optimizer(RATE), STEPS)
    scheduler = live(make_optimizer(RATE))
    resume(after(saved, make_optimizer(SAVED_RATE), STEPS), scheduler)
    for _ in range(MORE):
        assert groups_of(scheduler.optimizer) == groups_of(uninterrupted.optimizer)
        assert scheduler.get_last_lr() == uninterrupted.get_last_lr()
        advance(scheduler)
        advance(uninterrupted)
    assert repr(comparable(scheduler)) == repr(comparable(uninterrupted))


def comparable(scheduler: Any) -> dict[str, Any]:
    state = scheduler.state_dict()
    return {key: value for key, value in state.items() if "anneal_func" not in key}


def test_every_torch_scheduler_is_tested() -> None:
    tested = {type(live(OPTIMIZERS["betas"](RATE))).__name__ for _, live in PAIRS.values()}
    assert tested | {"ReduceLROnPlateau", "LRScheduler"} == set(lrs.__all__)


def test_a_plateau_does_not_repeat_its_cuts() -> None:
    saved = after(PLATEAU[0], OPTIMIZERS["one group"](SAVED_RATE), STEPS)
    assert saved.get_last_lr()[0] < SAVED_RATE / 10
    scheduler = PLATEAU[1](OPTIMIZERS["one group"](RATE))
    resume(saved, scheduler)
    assert scheduler.get_last_lr() == [RATE]
    assert scheduler.optimizer.param_groups[0]["lr"] == RATE
    for key in ("best", "num_bad_epochs", "last_epoch", "cooldown_counter"):
        assert getattr(scheduler, key) == getattr(saved, key), key
    assert (scheduler.patience, scheduler.factor, scheduler.min_lrs) == (2, 0.5, [0.01])


def test_a_cycle_that_is_too_short_is_refused() -> None:
    saved = after(lambda o: lrs.OneCycleLR(o, 1.0, total_steps=20), SGD([weight()], 1.0, 0.9), 9)
    live = lrs.OneCycleLR(SGD([weight()], 1.0, 0.9), 1.0, total_steps=5)
    with pytest.raises(CheckpointMismatchError, match=r"OneCycleLR .* shorter than the 9 steps"):
        resume(saved, live)


class Own(lrs.LRScheduler):
    """A user's scheduler, which steps from the last rate."""

    warmup_done = False

    def get_lr(self) -> list[Any]:
        if self._is_initial:
            return [group["lr"] for group in self.optimizer.param_groups]
        return [group["lr"] * 0.5 for group in self.optimizer.param_groups]


def test_another_scheduler_than_the_users_saved_one_is_refused() -> None:
    saved = after(PAIRS["StepLR"][0], OPTIMIZERS["one group"](SAVED_RATE), 3)
    optimizer = OPTIMIZERS["one group"](RATE)
    live = lrs.SequentialLR(optimizer, [Own(optimizer), lrs.StepLR(optimizer, 2)], [2])
    with pytest.raises(CheckpointMismatchError, match="no other schedulers, and SequentialLR"):
        resume(saved, live)
    assert optimizer.param_groups[0]["lr"] == RATE


@of_each
def test_a_users_scheduler_keeps_state_and_scales_rates(
    make_optimizer: Callable[[float], Optimizer],
) -> None:
    saved = after(Own, make_optimizer(SAVED_RATE), STEPS)
    saved.warmup_done = True
    uninterrupted = after(Own, make_optimizer(RATE), STEPS)
    scheduler = Own(make_optimizer(RATE))
    tensors = [group["lr"] for group in scheduler.optimizer.param_groups]
    resume(saved, scheduler)
    assert scheduler.warmup_done
    assert scheduler.last_epoch == STEPS
    for ours, theirs, first in zip(
        scheduler.optimizer.param_groups, uninterrupted.optimizer.param_groups, tensors, strict=True
    ):
        assert math.isclose(ours["lr"], theirs["lr"], rel_tol=1e-6)
        assert type(ours["lr"]) is type(theirs["lr"])
        assert ours["lr"] is first or not isinstance(first, torch.Tensor)
    assert scheduler.get_last_lr() == [g["lr"] for g in scheduler.optimizer.param_groups]


def test_a_rate_that_began_at_0_is_the_configured_one() -> None:
    scheduler = Own(OPTIMIZERS["one group"](RATE))
    resume(after(Own, OPTIMIZERS["one group"](0.0), 3), scheduler)
    assert scheduler.optimizer.param_groups[0]["lr"] == RATE
    saved, same = after(Own, OPTIMIZERS["one group"](0.7), 3), Own(OPTIMIZERS["one group"](0.7))
    resume(saved, same)
    assert same.get_last_lr() == saved.get_last_lr()


@pytest.mark.parametrize("groups", [[{}], [], [{}, {}]], ids=len)
def test_without_saved_rates_the_configured_ones_stay(groups: list[dict[str, Any]]) -> None:
    scheduler = Own(OPTIMIZERS["one group"](RATE))
    held = [Group(names=(), hyperparameters=group, state=()) for group in groups]
    (kept,) = resume_as_configured(
        [scheduler], [after(Own, SGD([weight()], 1.0), 3).__dict__], held
    )
    assert scheduler.optimizer.param_groups[0]["lr"] == RATE
    assert kept["last_epoch"] == 3


def test_a_fractional_epoch_is_scaled() -> None:
    make: Make = lambda o: lrs.CosineAnnealingWarmRestarts(o, 4)  # noqa: E731
    schedulers = [make(SGD([weight()], rate)) for rate in (SAVED_RATE, RATE, RATE)]
    saved, scheduler, uninterrupted = schedulers
    for one in (saved, uninterrupted):
        one.step(5.25)
    resume(saved, scheduler)
    assert math.isclose(scheduler.get_last_lr()[0], uninterrupted.get_last_lr()[0])
    for one in (scheduler, uninterrupted):
        one.step(5.5)
    assert scheduler.get_last_lr() == uninterrupted.get_last_lr()


def test_swalr_is_scaled() -> None:
    make: Make = lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=4)  # noqa: E731
    saved, scheduler = after(make, SGD([weight()], 0.8), 2), make(SGD([weight()], 0.4))
    resume(saved, scheduler)
    assert math.isclose(scheduler.get_last_lr()[0], saved.get_last_lr()[0] / 2)


def test_deepspeeds_schedulers_keep_only_their_position() -> None:
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    makes: tuple[Make, ...] = (
        lambda o: schedules.WarmupLR(o, 0.0, o.defaults["lr"], 20),
        lambda o: schedules.WarmupDecayLR(o, 30, 0.0, o.defaults["lr"], 4),
        lambda o: schedules.WarmupCosineLR(o, 30, warmup_num_steps=4),
        lambda o: schedules.OneCycle(o, o.defaults["lr"], 1.0, cycle_first_step_size=12),
        lambda o: schedules.LRRangeTest(o, o.defaults["lr"]),
    )
    for make in makes:
        uninterrupted = after(make, AdamW([weight()], RATE), STEPS)
        scheduler = make(AdamW([weight()], RATE))
        resume(after(make, AdamW([weight()], SAVED_RATE), STEPS), scheduler)
        for _ in range(MORE):
            assert groups_of(scheduler.optimizer) == groups_of(uninterrupted.optimizer)
            advance(scheduler)
            advance(uninterrupted)
    fresh = schedules.WarmupLR(AdamW([weight()], RATE))
    resume(schedules.WarmupLR(AdamW([weight()], SAVED_RATE)), fresh)
    assert fresh.last_batch_iteration == -1


def test_an_unknown_scheduler_keeps_its_saved_state() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {}

    states: list[dict[str, Any]] = [{"warmup_done": True, "last_epoch": 3, "base_lrs": [0.8]}]
    states.append({"of": "no live one"})
    kept = resume_as_configured([Odd()], states, [])
    assert kept == [{"warmup_done": True, "last_epoch": 3}, {"of": "no live one"}]


def test_a_subclass_of_torchs_keeps_the_configured_shape() -> None:
    class Mine(lrs.StepLR):
        pass

    saved = after(lambda o: Mine(o, 2, gamma=0.5), SGD([weight()], SAVED_RATE), 4)
    scheduler = Mine(SGD([weight()], RATE), 3, gamma=0.1)
    resume(saved, scheduler)
    assert (scheduler.step_size, scheduler.gamma, scheduler.base_lrs) == (3, 0.1, [RATE])
    assert math.isclose(scheduler.get_last_lr()[0], RATE / 4)


def test_numbers_take_the_live_type_if_exact() -> None:
    saved = {"base_lrs": [0.5, 0.1], "betas": (0.5, 0.25), "n": 3, "on": True, "text": "a"}
    f32 = np.float32
    live = {"base_lrs": [f32(1), f32(1)], "betas": (f32(1), 1.0), "n": np.int64(1), "on": f32(1)}
    taken = cast_like(saved, live)
    assert taken == saved
    types = [type(number).__name__ for number in (*taken["base_lrs"], *taken["betas"])]
    assert types == ["float32", "float", "float32", "float"]
    assert (type(taken["n"]), type(taken["on"])) == (np.int64, bool)
    scheduler = lrs.LambdaLR(SGD([weight()], f32(0.1)), lambda _: f32(0.5))
    states: list[dict[str, Any]] = [{"base_lrs": [float(f32(0.1))]}, {"of": "no live one"}]
    (kept, rest) = resume_as_saved([scheduler], states)
    assert type(kept["base_lrs"][0]) is f32
    assert rest == states[1]


def test_every_field_of_torchs_is_configuration_or_position() -> None:
    places = {"last_epoch", "_step_count", "best", "num_bad_epochs", "cooldown_counter"}
    neither = {"_is_initial", "_get_lr_called_within_step", "lr_lambdas", "_scale_fn_custom"}
    neither |= {"T_cur", "T_i", "_schedulers"}
    for make in [make for pair in (*PAIRS.values(), PLATEAU) for make in pair]:
        states = [make(OPTIMIZERS["betas"](RATE)).state_dict()]
        for state in states:
            states += state.get("_schedulers", [])
            assert state.keys() <= CONFIGURATION_KEYS | places | neither


GROUP_STEPS, PLACE, LATER = 20, 7, 5

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lrs.StepLR(o, 3, gamma=0.5),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, GROUP_STEPS),
    "warm-up": lambda o: lrs.LambdaLR(o, lambda step: min(1.0, (step + 1) / 10)),
    "one cycle": lambda o: lrs.OneCycleLR(o, max_lr=0.4, total_steps=GROUP_STEPS),
    "sequence": lambda o: lrs.SequentialLR(
        o, [lrs.ConstantLR(o, 0.5, 4), lrs.ExponentialLR(o, 0.9)], [4]
    ),
}


def made(rates: list[float], kind: str) -> tuple[Optimizer, Any]:
    optimizer = AdamW([{"params": [weight()], "lr": rate} for rate in rates])
    return optimizer, SCHEDULES[kind](optimizer)


def rates_of(optimizer: Optimizer, scheduler: Any, steps: int) -> list[list[float]]:
    found = [[group["lr"] for group in optimizer.param_groups]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_new_group_starts_at_the_position_of_the_others(kind: str) -> None:
    uninterrupted, their = made([0.1, 0.2, 0.3], kind)
    expected = rates_of(uninterrupted, their, PLACE + LATER)[PLACE:]
    saved, saving = made([0.1, 0.2], kind)
    rates_of(saved, saving, PLACE)
    state = saving.state_dict()

    here, live = made([0.9, 0.3, 0.8], kind)
    origins = (1, None, 0)
    for group, origin in zip(here.param_groups, origins, strict=True):  # as a load does
        if origin is not None:
            values = saved.param_groups[origin]
            group.update({k: v for k, v in values.items() if k != "params"})
    (regrouped,) = with_new_groups([live], [state], origins, 2, as_saved=True)
    live.load_state_dict(resume_as_saved([live], [regrouped])[0])
    found = rates_of(here, live, LATER)
    assert found == [[b, c, a] for a, b, c in expected]


def test_new_groups_and_the_others_continue_as_configured() -> None:
    configured, theirs = made([0.9, 0.3, 0.8], "cosine")
    expected = rates_of(configured, theirs, PLACE + LATER)[PLACE:]
    saved, saving = made([0.1, 0.2], "step")
    rates_of(saved, saving, PLACE)
    here, live = made([0.9, 0.3, 0.8], "cosine")
    states, origins = [saving.state_dict()], (1, None, 0)
    regrouped = with_new_groups([live], states, origins, 2, as_saved=False)
    groups = [Group((), {}, ()), *saved_groups(saved)]
    kept = resume_as_configured([live], regrouped, [groups[2], groups[0], groups[1]])
    live.load_state_dict(kept[0])
    assert rates_of(here, live, LATER) == expected


def test_unchanged_groups_are_not_modified() -> None:
    optimizer, scheduler = made([0.1, 0.2], "cosine")
    state = {"base_lrs": [7, 8], "last_epoch": 3}
    assert with_new_groups([scheduler], [state], (0, 1), 2, as_saved=True) == [state]
    assert scheduler.last_epoch == 0
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
