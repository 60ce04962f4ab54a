"""Programs of ranks that load a checkpoint by other software, and the expected results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tests.support.checkpoints import Scheduler, StateComparison, compare_states
from tests.support.engines import BUFFERS, Engine, EngineCase, engine_of, train
from tests.support.foreign_checkpoints import Fixture
from tests.support.oracle import (
    MORE,
    Dump,
    ReferenceComparison,
    compare_with_reference,
    dump,
    expected_in,
)


@dataclass(frozen=True)
class Case:
    fixture: Fixture
    target: EngineCase
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    groups: bool = True
    """Whether the checkpoint contains hyperparameters, which must then be restored."""
    counters: bool = True
    """Whether it contains DeepSpeed's step counters."""
    client_state: Mapping[str, Any] = field(default_factory=lambda: {"epoch": 3})
    continues: bool = False
    """Whether the run continues, next to a reference run that was given the writer's state."""
    other_order: bool = False
    """Whether matrices are multiplied with another order of sums, as on another processor."""


@dataclass(frozen=True)
class Outcome:
    verdict: StateComparison
    """The comparison after the load."""
    compare_with_reference: ReferenceComparison | None = None
    """The comparison after further training, if the run continues."""


def restore(case: Case) -> Outcome | None:
    """Load into a run with another seed and other hyperparameters; rank 0 compares. Collective."""
    with summing_in_lanes() if case.other_order else nullcontext():
        return _restore(case)


@contextmanager
def summing_in_lanes() -> Iterator[None]:
    """Multiply matrices in two parts of their inner dimension, as wider registers do."""
    functional, linear = nn.functional, nn.functional.linear

    def of_lanes(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        even = linear(x[..., ::2], weight[:, ::2])
        return even + linear(x[..., 1::2], weight[:, 1::2], bias)

    functional.linear = of_lanes  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.linear = linear


def _restore(case: Case) -> Outcome | None:
    from lightning_elastic_zero.api import load_checkpoint

    fixture, target = case.fixture, case.target
    with engine_of(target, 7, tilt=3.0) as engine:
        before = dump(engine, target)
        loaded = load_checkpoint(engine, case.path, **case.options)
        assert loaded.client_state == case.client_state, loaded.client_state
        found = dump(engine, target)
        first, losses = fixture.setup_steps, list[float]()
        after: Dump | None = None
        if case.continues:
            losses = train(engine, target, first, first + MORE)
            after = dump(engine, target)
    wanted = _wanted(case, before) if before is not None else None
    other = (
        compare_with_reference(target, first, wanted, (losses, after)) if case.continues else None
    )
    if found is None or wanted is None:
        return None
    return Outcome(compare_states(wanted, found), other)


def _wanted(case: Case, before: Dump) -> Dump:
    """Return the expected state after the load."""
    wanted = wanted_of(case.fixture, case.target, before)
    kept = [kind for kind, held in (("group", case.groups), ("counter", case.counters)) if not held]
    for kind in kept:
        wanted = {k: v for k, v in wanted.items() if not k.startswith(f"{kind}/")}
        wanted.update({k: v for k, v in before.items() if k.startswith(f"{kind}/")})
    return wanted


def wanted_of(fixture: Fixture, target: EngineCase, live: Dump) -> Dump:
    """Return the state that a run must have after loading a checkpoint of DeepSpeed.

    Args:
        fixture: the checkpoint; only ZeRO-3 saves the buffers of each rank, unless saved by hand.
        target: the run.
        live: any dump of the run, for the dtypes of its buffers.
    """
    truth = fixture.truth()
    wanted = expected_in(truth, fixture.setup, target)
    own = fixture.setup.zero == "3" and fixture.about["kind"] != "dumps"
    for rank in range(target.world):
        for name in BUFFERS:
            key = f"buffer/{rank}/{name}"
            held = wanted[key] if own else truth[f"buffer/0/{name}"]
            # Releases before 0.19 cast buffers to bf16, like weights.
            wanted[key] = held.to(live[key].dtype)
    return wanted


def another(setup: EngineCase, turn: int) -> EngineCase:
    """Return another run of the same model, with another world and stage for each turn."""
    worlds = [n for n in (1, 2, 3, 4) if n != setup.world]
    stages = [z for z in ("3", "1", "2", "B") if z != setup.zero]
    if setup.precision != "bf16":
        stages.remove("B")
    if setup.empty and "3" in stages:  # DeepSpeed's own forward fails on them
        stages.remove("3")
    return replace(
        setup,
        world=worlds[turn % len(worlds)],
        zero=stages[turn % len(stages)],
        round_robin=False,
        alignment=False,
        offload=False,
        sub_group=1_000_000_000,
    )


def saved_with_scheduler(setup: EngineCase, folder: str, steps: int) -> list[float]:
    """Train stock DeepSpeed with a scheduler, and save; return the rates from the first step on."""
    with engine_of(setup, 1) as engine:
        Scheduler("warm-up")(engine)
        rates = [_rate_after_step(engine, setup, step) for step in range(steps)]
        engine.save_checkpoint(folder, tag="stock")
        return rates + [_rate_after_step(engine, setup, steps + more) for more in range(2)]


def resumed_with_scheduler(setup: EngineCase, folder: str, steps: int) -> list[float]:
    """Load into a run with another seed; return the rates of the next two steps."""
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 7) as engine:
        Scheduler("warm-up")(engine)
        load_checkpoint(engine, f"{folder}/stock")
        return [_rate_after_step(engine, setup, steps + more) for more in range(2)]


def _rate_after_step(engine: Engine, setup: EngineCase, step: int) -> float:
    train(engine, setup, step, step + 1)
    return float(engine.optimizer.param_groups[0]["lr"])
