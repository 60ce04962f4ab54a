"""Checks of DeepSpeed's names on real engines: programs for ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_elastic_zero.core.requirements import DEEPSPEED, version_of
from lightning_elastic_zero.engine.deepspeed import NAMES, check_names, live_objects
from lightning_elastic_zero.engine.support import optimizer_wrapper
from tests.support.engines import Engine, Setup, engine_of, train


@dataclass(frozen=True)
class Refusals:
    release: str
    """The installed release of DeepSpeed."""
    checked: set[str]
    """Titles of the objects that are checked at setup."""
    missed: list[str]
    """Messages of the checks with the installed release."""
    unreported: dict[str, str]
    """Names whose absence is not reported by name, and the message instead."""


def refusals(setup: Setup) -> Refusals:
    """Check an engine, then again with each name replaced by one that no release has."""
    with engine_of(setup, 0) as engine:
        return _refusals(engine)


def refusals_without_optimizer(setup: Setup) -> Refusals:
    import deepspeed

    config = setup.config()
    if setup.zero != "3":
        del config["zero_optimization"]
    engine, *_ = deepspeed.initialize(model=setup.model(0), config=config, dist_init_required=False)
    found = _refusals(engine)
    engine.destroy()
    return found


def _refusals(engine: Engine) -> Refusals:
    release, wrapper = version_of("deepspeed"), optimizer_wrapper(engine)
    missed = [*check_names(engine, wrapper, release)]
    checked = {title for title, _ in live_objects(engine, wrapper)}
    unreported = {}
    for title in checked:
        for since, names in [*NAMES[title].items()]:
            for name in names.split() if DEEPSPEED.is_at_least(release, since or "0") else ():
                NAMES[title][since] = f"{name}_gone"
                said = "\n".join(check_names(engine, wrapper, release))
                if f"has no {name}_gone in {title}, which" not in said:
                    unreported[f"{title}: {name}"] = said
            NAMES[title][since] = names
    return Refusals(release, checked, missed, unreported)


def missed_later(setup: Setup, states: tuple[str, ...]) -> dict[str, list[str]]:
    """Return names that are missing within a window, between steps, and while offloaded."""
    model = setup.model(0)
    if states and setup.zero == "3":  # DeepSpeed's ``offload_states`` fails with frozen weights.
        model.frozen = torch.nn.Identity()  # type: ignore[assignment]
    with engine_of(setup, 0, model=model) as engine:
        found = {}
        for moment, act in _moments(engine, setup, states).items():
            act()
            found[moment] = [*check_names(engine, optimizer_wrapper(engine), "9.9")]
    return found


def _moments(
    engine: Engine, setup: Setup, states: tuple[str, ...]
) -> dict[str, Callable[[], object]]:
    """Return actions that bring a fresh engine to each moment in turn."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    include = [OffloadStateTypeEnum(state) for state in states]
    moments: dict[str, Callable[[], object]] = {
        "within its first window": lambda: train(engine, setup, 0, 1),
        "after its first step": lambda: train(engine, setup, 1, 2),
        "within a window": lambda: train(engine, setup, 2, 3),
        "after another": lambda: train(engine, setup, 3, 4),
    }
    if states:
        moments["offloaded"] = lambda: engine.offload_states(include=include)
        moments["reloaded"] = engine.reload_states
    return moments
