"""Schedules over other parameter groups than were saved: each rate is that of its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers

from lightning_elastic_zero.trainer.schedulers import resume_as_saved, with_new_groups

STEPS, PLACE, LATER = 20, 7, 5

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: torch_schedulers.StepLR(o, 3, gamma=0.5),
    "cosine": lambda o: torch_schedulers.CosineAnnealingLR(o, STEPS),
    "warm-up": lambda o: torch_schedulers.LambdaLR(o, lambda step: min(1.0, (step + 1) / 10)),
    "one cycle": lambda o: torch_schedulers.OneCycleLR(o, max_lr=0.4, total_steps=STEPS),
    "sequence": lambda o: torch_schedulers.SequentialLR(
        o,
        [torch_schedulers.ConstantLR(o, 0.5, 4), torch_schedulers.ExponentialLR(o, 0.9)],
        [4],
    ),
}


def made(rates: list[float], kind: str) -> tuple[torch.optim.Optimizer, Any]:
    """Make an optimizer with a group for each rate, and its scheduler."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    optimizer = torch.optim.AdamW(groups)
    return optimizer, SCHEDULES[kind](optimizer)


def rates_of(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[list[float]]:
    """Return the rates at a place and after each step from there."""
    found = [[group["lr"] for group in optimizer.param_groups]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_new_group_comes_to_the_place_of_the_others(kind: str) -> None:
    """Its rates are those that it has in a run that had it from its start; others' are as saved."""
    whole, their = made([0.1, 0.2, 0.3], kind)
    expected = rates_of(whole, their, PLACE + LATER)[PLACE:]
    saved, saving = made([0.1, 0.2], kind)
    rates_of(saved, saving, PLACE)
    state = saving.state_dict()

    here, live = made([0.9, 0.3, 0.8], kind)
    origins = (1, None, 0)
    for group, origin in zip(here.param_groups, origins, strict=True):  # as the load has done
        if origin is not None:
            values = saved.param_groups[origin]
            group.update({k: v for k, v in values.items() if k != "params"})
    (regrouped,) = with_new_groups([live], [state], origins, 2)
    live.load_state_dict(resume_as_saved([live], [regrouped])[0])
    found = rates_of(here, live, LATER)
    assert found == [[b, c, a] for a, b, c in expected]


def test_the_same_groups_are_left_alone() -> None:
    """Nothing is run through where nothing is new."""
    optimizer, scheduler = made([0.1, 0.2], "cosine")
    state = {"base_lrs": [7, 8], "last_epoch": 3}
    assert with_new_groups([scheduler], [state], (0, 1), 2) == [state]
    assert scheduler.last_epoch == 0
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
