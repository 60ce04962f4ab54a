"""Options of saves and loads that leave out state, and runs without optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import (
    Loading,
    Saved,
    assert_refused,
    assert_restored,
    comparable,
    evaluated_weights,
    found_after_load,
    group_origins_of,
)
from tests.support.engines import EngineCase
from tests.support.oracle import Dump, differences, expected_in
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

ELSEWHERE = [
    (EngineCase(2, "2", "bf16"), EngineCase(3, "3", "bf16", sub_group=700)),
    (EngineCase(3, "3"), EngineCase(2, "1")),
    (EngineCase(2, "B", "bf16"), EngineCase(4, "B", "bf16")),
    (EngineCase(3, "0"), EngineCase(2, "2")),
    (EngineCase(2, "1"), EngineCase(3, "0")),
]
STATES = ("exp_avg", "exp_avg_sq", "scalar")


def of_kinds(found: Dump, *kinds: str) -> Dump:
    """Return a part of a dump."""
    return {key: value for key, value in found.items() if key.split("/")[0] in kinds}


def before_and_after(
    pools: Pools, setup: EngineCase, saved: Saved, *, steps_after: int = 0, **options: Any
) -> tuple[Dump, Dump]:
    program = partial(found_after_load, setup, saved, options, steps_after=steps_after)
    found = pools.run(setup.world, program)[0]
    assert found is not None
    return found


def bytes_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


@pytest.mark.long
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(("source", "target"), ELSEWHERE, ids=str)
def test_a_run_saved_before_its_first_step_removes_states(
    source: EngineCase,
    target: EngineCase,
    steps_before: int,
    pools: Pools,
    saved_by: Callable[..., Saved],
) -> None:
    saved = saved_by(source, steps=0)
    assert not of_kinds(saved.dump(), *STATES)
    assert_restored(pools.run, target, saved, steps_before=steps_before)


@pytest.mark.long
@pytest.mark.parametrize(("source", "target"), ELSEWHERE, ids=str)
def test_a_load_replaces_all_state_of_a_run_that_has_stepped(
    source: EngineCase, target: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    assert_restored(pools.run, target, saved_by(source), steps_before=2)


@pytest.mark.parametrize(("source", "target"), ELSEWHERE, ids=str)
def test_without_optimizer_state_the_optimizer_starts_fresh(
    source: EngineCase, target: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    saved = saved_by(source)
    _, after = before_and_after(pools, target, saved, load_optimizer_state=False)
    wanted = expected_in(saved.dump(), source, target)
    kinds = ("master", "weight", "frozen", "buffer", "group", "counter")
    assert not differences(of_kinds(wanted, *kinds), of_kinds(after, *kinds))
    assert not of_kinds(after, *STATES)
    _, later = before_and_after(pools, target, saved, load_optimizer_state=False, steps_after=1)
    assert set(of_kinds(later, "scalar").values()) == {"tensor(1.)"}


@pytest.mark.parametrize(("source", "target"), ELSEWHERE, ids=str)
def test_load_hyperparameters_false_restores_moments_only(
    source: EngineCase, target: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    saved = saved_by(source)
    before, after = before_and_after(pools, target, saved, load_hyperparameters=False)
    wanted = expected_in(saved.dump(), source, target)
    assert of_kinds(after, "group") == of_kinds(before, "group") != of_kinds(wanted, "group")
    kinds = ("master", "weight", "frozen", "buffer", "counter", *STATES)
    assert not differences(of_kinds(wanted, *kinds), of_kinds(after, *kinds))


class ScheduleFree(torch.optim.Optimizer):
    """Counts in its groups, like the optimizers of the package ``schedulefree``."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0, "train_mode": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["train_mode"] = True
            group["weight_sum"] += group["lr"] ** 2
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                z.sub_(p.grad.to(z), alpha=group["lr"])
                p.lerp_(z.to(p), group["lr"] ** 2 / group["weight_sum"])


@pytest.mark.cases(2)
@pytest.mark.parametrize("zero", ["3", "2", "0"])
@pytest.mark.parametrize("fresh", [False, True])
def test_counters_of_groups_belong_to_the_state(
    zero: str, fresh: bool, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    name = f"{ScheduleFree.__module__}.{ScheduleFree.__name__}"
    source, target = EngineCase(2, "2", optimizer=name), EngineCase(1, zero, optimizer=name)
    saved = saved_by(source)
    off = "load_optimizer_state" if fresh else "load_hyperparameters"
    before, after = before_and_after(pools, target, saved, **{off: False})
    wanted = expected_in(saved.dump(), source, target)
    restored = before if fresh else wanted
    for index in (0, 1):
        rates = wanted if fresh else before
        assert after[f"group/{index}/lr"] == rates[f"group/{index}/lr"]
        for key in ("k", "weight_sum", "train_mode"):
            assert wanted[f"group/{index}/{key}"] != before[f"group/{index}/{key}"]
            assert after[f"group/{index}/{key}"] == restored[f"group/{index}/{key}"]


def test_groups_with_other_counters_are_not_merged(
    pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """Each would continue with the first one's. Their rates, and so ``weight_sum``, differ."""
    name = f"{ScheduleFree.__module__}.{ScheduleFree.__name__}"
    path = saved_by(EngineCase(2, "2", optimizer=name)).path
    load = Loading(path, {"strict_optimizer": False, "load_hyperparameters": False})
    target = EngineCase(1, "2", optimizer=name, grouping="one")
    assert_refused(pools.run, target, load, "whose counters differ (weight_sum: ")


@pytest.mark.parametrize(("source", "target"), ELSEWHERE, ids=str)
def test_weights_only_saves_no_optimizer_state_and_loads_say_so(
    source: EngineCase, target: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """A new run keeps its own rates and counters."""
    saved, complete = saved_by(source, weights_only=True), saved_by(source)
    folder = Path(saved.path) / "checkpoint"
    for path in folder.glob("*_optim_states.pt"):
        state = torch.load(path, weights_only=True)["optimizer_state_dict"]
        assert not _tensors(state.get("base_optimizer_state"))
    moments = of_kinds(complete.dump(), "exp_avg", "exp_avg_sq").values()
    saving = bytes_of(Path(complete.path).rglob("*.pt")) - bytes_of(folder.glob("*.pt"))
    assert saving >= sum(tensor.nbytes for tensor in moments)
    assert_refused(pools.run, target, Loading(saved.path), "load_optimizer_state=False")
    before, after = before_and_after(pools, target, saved, load_optimizer_state=False)
    wanted = expected_in(saved.dump(), source, target)
    kinds = ("master", "weight", "frozen", "buffer")
    assert not differences(of_kinds(wanted, *kinds), of_kinds(after, *kinds))
    assert not of_kinds(after, *STATES)
    assert of_kinds(after, "group", "counter") == of_kinds(before, "group", "counter")


@pytest.mark.long
@pytest.mark.parametrize(("saved_as", "resumed_as"), [("one", "two"), ("two", "one")])
def test_groups_load_by_their_names_or_from_weights_alone(
    saved_as: str, resumed_as: str, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    saved = saved_by(EngineCase(2, "2", grouping=saved_as))
    options = {"load_optimizer_state": False, "load_hyperparameters": False}
    call = partial(group_origins_of, EngineCase(2, "3", grouping=resumed_as), saved.path, options)
    wanted = (0, 0) if resumed_as == "two" else (0,)
    assert pools.run(2, call) == [wanted] * 2


def _tensors(state: object) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        return [t for value in state.values() for t in _tensors(value)]
    return [t for value in state for t in _tensors(value)] if isinstance(state, list) else []


@pytest.mark.long
@pytest.mark.parametrize(("source", "target"), ELSEWHERE, ids=str)
def test_excluded_frozen_parameters_keep_the_models_values(
    source: EngineCase, target: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    saved = saved_by(source, exclude_frozen_parameters=True)
    sizes = [bytes_of(Path(s.path).rglob("*.pt")) for s in (saved_by(source), saved)]
    frozen = of_kinds(saved.dump(), "frozen").values()
    assert sizes[0] - sizes[1] >= sum(tensor.nbytes for tensor in frozen)
    before, after = before_and_after(pools, target, saved)
    wanted = {
        **expected_in(saved.dump(), source, target),
        **of_kinds(before, "frozen"),
    }
    assert not differences(comparable(wanted, after), comparable(after, wanted))


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (EngineCase(2, "1", empty=True), EngineCase(3, "2", empty=True, alignment=True)),
        (EngineCase(3, "2", "bf16", empty=True), EngineCase(1, "B", "bf16", empty=True)),
        (EngineCase(2, "2", empty=True, round_robin=True), EngineCase(2, "2", empty=True)),
    ],
    ids=str,
)
def test_an_empty_parameter_is_saved_and_loaded(
    source: EngineCase, target: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """Not in ZeRO-3, whose own forward fails with one."""
    saved = saved_by(source)
    assert "frozen/empty" in saved.dump() or "weight/empty" in saved.dump()
    assert_restored(pools.run, target, saved)


@pytest.mark.parametrize("source", [pair[0] for pair in ELSEWHERE], ids=str)
@pytest.mark.parametrize(("zero", "world"), [("3", 4), ("0", 1), ("0", 2)])
def test_an_evaluating_engine_gets_rounded_masters_and_rank_0s_buffers(
    zero: str, world: int, source: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    saved = saved_by(source)
    setup = EngineCase(world, zero, source.precision)
    wanted = expected_in(saved.dump(), source, setup)
    for found in pools.run(world, partial(evaluated_weights, setup, saved)):
        own = {k.replace("frozen/", "weight/"): v for k, v in wanted.items()}
        keys = [k for k in own if k.startswith(("weight/", "buffer/0/"))]
        assert found == {k.replace("/0/", "/"): own[k].tolist() for k in keys}
