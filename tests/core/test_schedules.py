from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as lrs

from lightning_elastic_zero.schedules import CONFIGURED, keep_configured_rates

Make = Callable[[Optimizer], Any]

SAVED_RATE = 0.8
RATE = 0.05


def halves(epoch: int) -> float:
    """Give a factor that halves with each epoch."""
    return 0.5**epoch


PAIRS: dict[str, tuple[Make, Make]] = {
    "StepLR": (lambda o: lrs.StepLR(o, 2), lambda o: lrs.StepLR(o, 3, gamma=0.5)),
    "MultiStepLR": (
        lambda o: lrs.MultiStepLR(o, [2, 4]),
        lambda o: lrs.MultiStepLR(o, [8], gamma=0.5),
    ),
    "CosineAnnealingLR": (
        lambda o: lrs.CosineAnnealingLR(o, 10),
        lambda o: lrs.CosineAnnealingLR(o, 20, eta_min=0.001),
    ),
    "LinearLR": (
        lambda o: lrs.LinearLR(o, total_iters=10),
        lambda o: lrs.LinearLR(o, start_factor=0.5, total_iters=20),
    ),
    "ExponentialLR": (lambda o: lrs.ExponentialLR(o, 0.9), lambda o: lrs.ExponentialLR(o, 0.5)),
    "LambdaLR": (lambda o: lrs.LambdaLR(o, lambda _: 1.0), lambda o: lrs.LambdaLR(o, halves)),
    "OneCycleLR": (
        lambda o: lrs.OneCycleLR(o, SAVED_RATE, total_steps=10),
        lambda o: lrs.OneCycleLR(o, RATE, total_steps=20, cycle_momentum=False),
    ),
    "CyclicLR": (
        lambda o: lrs.CyclicLR(o, SAVED_RATE, 1.0, step_size_up=3, cycle_momentum=False),
        lambda o: lrs.CyclicLR(o, RATE, 0.1, step_size_up=7, cycle_momentum=False),
    ),
    "ReduceLROnPlateau": (
        lambda o: lrs.ReduceLROnPlateau(o, patience=1),
        lambda o: lrs.ReduceLROnPlateau(o, patience=30, factor=0.5, min_lr=0.01),
    ),
    "SequentialLR": (
        lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o), lrs.StepLR(o, 2)], [2]),
        lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.5), lrs.StepLR(o, 9)], [4]),
    ),
    "ChainedScheduler": (
        lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)], o),
        lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.5), lrs.ExponentialLR(o, 0.5)], o),
    ),
}
"""A scheduler as it was saved, and as it is configured now."""

POSITION = {"last_epoch", "_step_count", "best", "num_bad_epochs", "cooldown_counter"}

each = pytest.mark.parametrize(("saved", "live"), PAIRS.values(), ids=PAIRS)


def optimizer(rate: float) -> Optimizer:
    """Make an optimizer."""
    return SGD([torch.nn.Parameter(torch.ones(1))], lr=rate, momentum=0.9)


def after(make: Make, rate: float, epochs: int) -> Any:  # noqa: ANN401 (a scheduler)
    """Make a scheduler, and take it some epochs on."""
    scheduler = make(optimizer(rate))
    for _ in range(epochs):
        advance(scheduler)
    return scheduler


def advance(scheduler: Any) -> None:  # noqa: ANN401 (a scheduler)
    """Take a scheduler one epoch on; what it may watch gets no better."""
    scheduler.optimizer.step()
    if isinstance(scheduler, lrs.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """Give a state's fields, those of schedulers inside it among them."""
    fields = {key: value for key, value in state.items() if key != "_schedulers"}
    for index, inner in enumerate(state.get("_schedulers", [])):
        fields.update({f"{index}.{key}": value for key, value in flat(inner).items()})
    return fields


def resumed(saved: Make, live: Make, epochs: int = 5) -> tuple[Any, dict[str, Any]]:
    """Resume a scheduler as it is configured now; give the saved state too."""
    state = after(saved, SAVED_RATE, epochs).state_dict()
    scheduler = live(optimizer(RATE))
    (kept,) = keep_configured_rates([state])
    scheduler.load_state_dict(kept)
    return scheduler, flat(state)


@each
def test_the_position_is_the_saved_one(saved: Make, live: Make) -> None:
    """How far a schedule has come, and what it has seen, goes on where it was."""
    scheduler, state = resumed(saved, live)
    now = flat(scheduler.state_dict())
    position = {key for key in state if key.rpartition(".")[2] in POSITION}
    assert position or isinstance(scheduler, lrs.ChainedScheduler)
    assert {key: now[key] for key in position} == {key: state[key] for key in position}


@each
def test_what_is_configured_is_as_configured_now(saved: Make, live: Make) -> None:
    """Rates, and the shape of the schedule, are those of the live configuration."""
    scheduler, _ = resumed(saved, live)
    fresh = flat(live(optimizer(RATE)).state_dict())
    now = flat(scheduler.state_dict())
    configured = {key for key in fresh if key.rpartition(".")[2] in CONFIGURED}
    assert {key: now[key] for key in configured} == {key: fresh[key] for key in configured}
    assert [group["lr"] for group in scheduler.optimizer.param_groups] == scheduler.get_last_lr()


@each
def test_every_field_is_one_or_the_other(saved: Make, live: Make) -> None:
    """Torch's schedulers hold nothing that would be restored by mistake: a new field shows here."""
    neither = POSITION | {"_is_initial", "_get_lr_called_within_step", "lr_lambdas"}
    neither |= {"_scale_fn_custom"}
    for make in (saved, live):
        fields = {key.rpartition(".")[2] for key in flat(make(optimizer(RATE)).state_dict())}
        assert fields <= CONFIGURED | neither


@each
def test_the_schedule_goes_on(saved: Make, live: Make) -> None:
    """A resumed schedule runs on, to rates that are numbers within the configured range."""
    scheduler, _ = resumed(saved, live)
    for _ in range(10):
        advance(scheduler)
        (rate,) = scheduler.get_last_lr()
        assert 0 <= rate <= 0.1 + 1e-9


@each
def test_the_saved_state_is_not_changed(saved: Make, live: Make) -> None:
    """What was read from the checkpoint is left as it is."""
    state = after(saved, SAVED_RATE, 3).state_dict()
    before = copy.deepcopy(state)
    kept = keep_configured_rates([state])
    assert state == before
    assert kept[0] is not state


def test_a_lambda_goes_on_at_its_place_from_the_new_rate() -> None:
    """After five epochs at another rate, the sixth is the new rate times the sixth factor."""
    scheduler, _ = resumed(*PAIRS["LambdaLR"])
    advance(scheduler)
    assert scheduler.get_last_lr() == [RATE * halves(6)]


def test_one_cycle_ends_where_the_new_cycle_ends() -> None:
    """With twice as many steps in all, the cycle goes on in the new shape, to its very end."""
    make = PAIRS["OneCycleLR"][1]
    scheduler, _ = resumed(*PAIRS["OneCycleLR"])
    expected = after(make, RATE, 5)
    for _ in range(14):
        advance(scheduler)
        advance(expected)
        assert scheduler.get_last_lr() == expected.get_last_lr()
    assert math.isclose(scheduler.get_last_lr()[0], RATE / 25 / 1e4)


def test_a_scheduler_of_ones_own_keeps_what_only_it_knows() -> None:
    """Fields under other names are restored as they were saved: they may be its position."""
    state = {"warmup_done": True, "last_epoch": 3, "base_lrs": [0.8]}
    assert keep_configured_rates([state]) == [{"warmup_done": True, "last_epoch": 3}]
