"""Warnings about a user's settings accept any settings."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lightning_elastic_zero.core.manifest import Group
from lightning_elastic_zero.data_progress.batches import BatchPlan
from lightning_elastic_zero.data_progress.position import Position
from lightning_elastic_zero.data_progress.sampler import ElasticSampler
from lightning_elastic_zero.trainer.batches import overruled_orders
from lightning_elastic_zero.trainer.fit_warnings import (
    configured_rates,
    warn_of_other_schedulers,
    warn_of_replaced_rates,
    warn_of_workers,
)
from lightning_elastic_zero.trainer.loaders import keep_workers_from_signals
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


@pytest.mark.parametrize(
    ("position", "persistent", "why"),
    [
        (Position(1, 2), False, "they start inside the epoch"),
        (Position(1, 0), False, ""),
        (Position(0, 2, is_over=True), True, "their generators continue across epochs"),
    ],
)
def test_generators_of_workers_that_restart_are_named(
    position: Position, persistent: bool, why: str
) -> None:
    """Those that ``worker_init_fn`` creates; Lightning's own only seeds the global ones."""
    data = TensorDataset(torch.zeros(4, 1))
    sampler = ElasticSampler(data, BatchPlan(2, 1, 1), 0)
    lightnings = partial(pl_worker_init_function, rank=0)
    loaders = [
        DataLoader(
            data,
            sampler=sampler,
            num_workers=1,
            worker_init_fn=init,
            persistent_workers=persistent,
        )
        for init in (None, lightnings, print)
    ]
    for loader in loaders:
        keep_workers_from_signals(loader)  # as a fit does
    with captured_warnings() as heard:
        warn_of_workers(loaders, position)
    assert len(heard) == bool(why)
    for text in heard:
        assert "draw other numbers from generators that worker_init_fn creates" in text
        assert why in text


class Own(RandomSampler):
    def __init__(self) -> None:
        """Skip the initialization of the parent."""


def test_a_sampler_of_a_users_class_is_not_inspected() -> None:
    data = TensorDataset(torch.zeros(4, 1))
    assert overruled_orders(DataLoader(data, sampler=Own())) == [""]
    assert overruled_orders(DataLoader(data, shuffle=True)) == [""]
