"""A DeepSpeed release without a required name is refused by that name; others are accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from lightning_elastic_zero.core.requirements import DEEPSPEED, version_of
from lightning_elastic_zero.engine.buffers import optimizer_wrapper
from lightning_elastic_zero.engine.deepspeed import NAMES, check_names, live_objects
from tests.engine._name_tables import CHECKED, CHECKED_WITHOUT_OPTIMIZER, checked_in
from tests.support.engines import DEEPSPEEDS, Engine, EngineCase, engine_of, train
from tests.support.ranks import Pools, skip_without


@dataclass(frozen=True)
class Refusals:
    release: str
    """The installed release of DeepSpeed."""
    checked: set[str]
    """Titles of the objects that are checked at setup."""
    missed: list[str]
    """Messages of the checks with the installed release."""
    unreported: dict[str, str]
    """Names whose absence is not reported by name, with the message instead."""


def refusals(setup: EngineCase) -> Refusals:
    """Check an engine, and again with each name replaced by one that no release has."""
    with engine_of(setup, 0) as engine:
        return _refusals(engine)


def refusals_without_optimizer(setup: EngineCase) -> Refusals:
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
                message = "\n".join(check_names(engine, wrapper, release))
                if f"has no {name}_gone in {title}, which" not in message:
                    unreported[f"{title}: {name}"] = message
            NAMES[title][since] = names
    return Refusals(release, checked, missed, unreported)


def missed_later(setup: EngineCase, states: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the names that are missing in a window, between steps, and while offloaded."""
    model = setup.model(0)
    if states and setup.zero == "3":  # DeepSpeed's ``offload_states`` fails with frozen weights.
        model.frozen = torch.nn.Identity()
    with engine_of(setup, 0, model=model) as engine:
        found = {}
        for moment, act in _moments(engine, setup, states).items():
            act()
            found[moment] = [*check_names(engine, optimizer_wrapper(engine), "9.9")]
    return found


def _moments(
    engine: Engine, setup: EngineCase, states: tuple[str, ...]
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


pytestmark = pytest.mark.engine

WEIGHTS = ("lp_params", "lp_grads")
MOMENTS = [
    (EngineCase(1, "0", accumulation=2), ()),
    (EngineCase(1, "0", "fp16", accumulation=2), ()),
    (EngineCase(1, "1", accumulation=2, round_robin=True), ()),
    (EngineCase(1, "1", "bf16", accumulation=2), ("hp_params", *WEIGHTS, "optim_states")),
    (EngineCase(1, "2", accumulation=2), ("hp_params", *WEIGHTS, "optim_states")),
    (EngineCase(1, "2", accumulation=2, offload=True), ()),
    (EngineCase(1, "B", "bf16", accumulation=2), ()),
    (EngineCase(1, "3", "bf16", accumulation=2, grouping="one"), WEIGHTS),
    (EngineCase(1, "3", accumulation=2, offload=True, offloaded_weights=True), ()),
]
"""Engines with windows of two micro-batches, and the states that they offload to the host."""


@pytest.mark.parametrize("setup", CHECKED, ids=str)
def test_each_missing_deepspeed_name_is_reported(setup: EngineCase, pools: Pools) -> None:
    if setup.optimizer in DEEPSPEEDS:
        skip_without(DEEPSPEEDS[setup.optimizer][2], pools)
    if setup.nvme:
        skip_without("AsyncIOBuilder", pools)
    found = pools.run(1, partial(refusals, setup))[0]
    assert not found.missed
    assert found.checked == checked_in(setup, found.release)
    assert not found.unreported


needs_newest = pytest.mark.skipif(
    not DEEPSPEED.is_at_least(version_of("deepspeed"), DEEPSPEED.newest_tested),
    reason="needs the names of the newest release",
)


@pytest.mark.long
@needs_newest
@pytest.mark.parametrize(("setup", "states"), MOMENTS, ids=str)
def test_no_name_is_missing_within_a_window_or_while_offloaded(
    setup: EngineCase, states: tuple[str, ...], pools: Pools
) -> None:
    missed = pools.run(1, partial(missed_later, setup, states))[0]
    assert len(missed) == (6 if states else 4)
    assert not {moment: names for moment, names in missed.items() if names}


@pytest.mark.long
@needs_newest
@pytest.mark.parametrize("setup", CHECKED_WITHOUT_OPTIMIZER, ids=str)
def test_engines_without_an_optimizer_need_fewer_names(setup: EngineCase, pools: Pools) -> None:
    found = pools.run(1, partial(refusals_without_optimizer, setup))[0]
    assert not found.missed
    assert found.checked == CHECKED_WITHOUT_OPTIMIZER[setup]
    assert not found.unreported
