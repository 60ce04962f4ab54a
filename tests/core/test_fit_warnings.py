"""Warnings about a user's settings accept any settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lightning_elastic_zero.core.manifest import Group
from lightning_elastic_zero.trainer.batches import overruled_orders
from lightning_elastic_zero.trainer.checks import (
    configured_rates,
    warn_of_other_schedulers,
    warn_of_replaced_rates,
)
from tests.support.outcome import captured_warnings

NO_RATES = [None, "relative", [0.1, 0.2], {"dtype": "float32"}, torch.ones(2)]
"""Values under ``lr`` of optimizers that compute their own rate, or in their checkpoints."""


class Optimizer:
    def __init__(self, rate: object) -> None:
        self.param_groups = [{"lr": rate}]


def warned(configured: object, saved: object) -> list[str]:
    hyperparameters: dict[str, Any] = {"lr": saved}
    group = Group(names=("weight",), hyperparameters=hyperparameters, state=())
    rates = configured_rates([Optimizer(configured)])
    with captured_warnings() as heard:
        warn_of_replaced_rates(rates, [group], scheduled=False)
    return heard


@pytest.mark.parametrize("value", NO_RATES, ids=str)
def test_values_that_are_not_rates_are_not_compared(value: object) -> None:
    assert warned(value, 0.1) == warned(0.1, value) == warned(value, value) == []


@pytest.mark.parametrize("rate", [0.3, torch.tensor(0.3), torch.tensor([0.3])], ids=repr)
def test_rates_are_compared_as_numbers_and_tensors(rate: float | torch.Tensor) -> None:
    saved = {"tensor": 0.1} if isinstance(rate, torch.Tensor) else 0.1
    assert len(warned(rate, saved)) == 1
    assert warned(rate, {"tensor": float(rate)}) == []


class Halving:
    """A scheduler that has a last rate from its first step on."""

    def __init__(self, *, steps: int) -> None:
        self.gamma, self.steps = 0.5, steps

    def state_dict(self) -> dict[str, Any]:
        last = {"_last_lr": [self.gamma**self.steps]} if self.steps else {}
        return {"gamma": self.gamma, "steps": self.steps, **last}


def test_schedulers_of_one_class_are_not_called_others() -> None:
    for state, count in ((Halving(steps=3).state_dict(), 0), ({"last_epoch": 3, "T_max": 5}, 1)):
        with captured_warnings("is not of the configured class") as heard:
            warn_of_other_schedulers([Halving(steps=0)], [state], as_saved=True)
        assert len(heard) == count


class Own(RandomSampler):
    def __init__(self) -> None:
        """Skip the initialization of the parent."""


def test_a_sampler_of_a_users_class_is_not_inspected() -> None:
    data = TensorDataset(torch.zeros(4, 1))
    assert overruled_orders(DataLoader(data, sampler=Own())) == [""]
    assert overruled_orders(DataLoader(data, shuffle=True)) == [""]
