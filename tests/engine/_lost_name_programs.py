"""What a rank does to see that each name of DeepSpeed's is missed, on a real engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_elastic_zero.core.requirements import version_of
from lightning_elastic_zero.engine.deepspeed import asked_names, check_names
from lightning_elastic_zero.engine.support import optimizer_wrapper
from tests.engine._name_tables import TABLES
from tests.support.engines import Engine, Setup, engine_of, train


@dataclass(frozen=True)
class Refusals:
    """What an engine is asked for, and what is said where it lacks it."""

    release: str
    """Of DeepSpeed: the installed one."""
    asked: set[str]
    """The titles of the tables that it is asked for, when it has just been made."""
    missed: list[str]
    """What is missed of the installed release as it is."""
    untold: dict[str, str]
    """What is said, by owner and name, where that one alone is gone and is not named."""


def refusals(setup: Setup) -> Refusals:
    """Ask an engine for its names, then for each under a name that no release has."""
    with engine_of(setup, 0) as engine:
        return _refusals(engine)


def refusals_without_optimizer(setup: Setup) -> Refusals:
    """Ask an engine that evaluates."""
    import deepspeed

    config = setup.config()
    if setup.zero != "3":
        del config["zero_optimization"]
    engine, *_ = deepspeed.initialize(model=setup.model(0), config=config, dist_init_required=False)
    found = _refusals(engine)
    engine.destroy()
    return found


def _refusals(engine: Engine) -> Refusals:
    """Ask an engine for its names, then for each under a name that no release has."""
    release, wrapper, untold = version_of("deepspeed"), optimizer_wrapper(engine), {}
    missed = [*check_names(engine, wrapper, release)]
    titles = {id(names): title for title, names in TABLES.items()}
    asked = set()
    for owner, _, names in [*asked_names(engine, wrapper, release)]:
        assert isinstance(names, dict)
        asked.add(titles[id(names)])
        for name in [*names]:
            if said := _untold(engine, owner, name, names):
                untold[f"{owner}: {name}"] = said
    return Refusals(release, asked, missed, untold)


def _untold(engine: Engine, owner: str, name: str, names: dict[str, str]) -> str:
    """Return what is said where one name is gone; nothing where it is told with its purpose."""
    gone, purpose = f"{name}_gone", names.pop(name)
    names[gone] = purpose
    try:
        sentences = check_names(engine, optimizer_wrapper(engine), version_of("deepspeed"))
        said = "\n".join(sentences)
    finally:
        del names[gone]
        names[name] = purpose
    told = f"{gone} (to {purpose})" in said and f" in {owner}, which" in said
    return "" if told else said or "not missed"


def missed_later(setup: Setup, states: tuple[str, ...]) -> dict[str, list[str]]:
    """Return what is missed at later moments: within a window, between steps, while offloaded.

    Args:
        setup: of the run, whose windows have two micro-batches.
        states: what is put on the host; none: nothing is.
    """
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
    """Return what is done one after the other to an engine that has just been made."""
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
