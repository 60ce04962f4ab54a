"""Parameters unfrozen, frozen, added, removed or regrouped between save and load."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.checkpoints import Loading, Saved, refusal
from tests.support.engines import EngineCase, engine_of, train
from tests.support.oracle import Dump, differences, expected_in
from tests.support.outcome import captured_log
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

RUNS = [
    (EngineCase(2, "2"), EngineCase(3, "3", sub_group=700)),
    (EngineCase(3, "3", "bf16", sub_group=700), EngineCase(2, "1", "bf16")),
    (EngineCase(2, "B", "bf16"), EngineCase(3, "2", "bf16")),
    (EngineCase(2, "1"), EngineCase(1, "3", sub_group=300)),
]
"""Source and target; the target trains another set of parameters."""

THAWED = ("frozen.weight", "frozen.bias")
FROZEN = ("a.weight", "a.bias")
NEW = ("c.weight", "c.bias")
GONE = ("b.weight", "b.bias")
STATES = ("exp_avg", "exp_avg_sq")


def loaded(setup: EngineCase, saved: Saved, steps_before: int) -> tuple[Any, ...] | None:
    """Load leniently; return the state before, after, and a step later, and the warnings."""
    from lightning_elastic_zero.api import load_checkpoint
    from tests.support.oracle import dump

    with engine_of(setup, 7, tilt=3.0) as engine:
        train(engine, setup, 100, 100 + steps_before)
        before = dump(engine, setup)
        with captured_log("lightning_elastic_zero", logging.WARNING) as listed:
            load_checkpoint(engine, saved.path, strict_optimizer=False)
        after = dump(engine, setup)
        train(engine, setup, 3, 4)
        later = dump(engine, setup)
    return None if before is None else (before, after, later, listed)


def without(found: Dump, *names: str) -> Dump:
    """Return a dump without these parameters, groups, and loss scalers, which not all have."""
    skipped = ("group/", "scaler/")
    return {
        key: value
        for key, value in found.items()
        if key.partition("/")[2].removeprefix("step/") not in names and not key.startswith(skipped)
    }


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("grouping", ["two", "new apart"])
@pytest.mark.parametrize(("source", "target"), RUNS, ids=str)
def test_known_parameters_are_restored_and_others_cause_a_warning(
    source: EngineCase,
    target: EngineCase,
    grouping: str,
    steps_before: int,
    pools: Pools,
    saved_by: Callable[..., Saved],
) -> None:
    """Unfrozen and new parameters start fresh."""
    saved = saved_by(source)
    here = replace(target, renamed=True, thawed=True, grouping=grouping)
    found = pools.run(here.world, partial(loaded, here, saved, steps_before))[0]
    assert found is not None
    before, after, later, texts = found
    wanted = expected_in(saved.dump(), source, here)
    others = (*THAWED, *FROZEN, *NEW, *GONE)
    assert not differences(without(wanted, *others), without(after, *others))
    _assert_unfrozen(wanted, after, here)
    for name in NEW:
        for kind in ("master", "weight"):
            assert torch.equal(after[f"{kind}/{name}"], before[f"{kind}/{name}"])
    _assert_fresh(after, wanted, apart=grouping == "new apart")
    counts = {key.rpartition("/")[2]: value for key, value in later.items() if "/step/" in key}
    assert counts["one"] == "tensor(4.)"
    assert {counts[name] for name in (*THAWED, *NEW)} == (
        {"tensor(1.)"} if grouping == "new apart" else {"tensor(4.)"}
    )
    _assert_warnings(texts, apart=grouping == "new apart")
    _assert_groups(wanted, before, after, apart=grouping == "new apart")


def _assert_unfrozen(wanted: Dump, after: Dump, here: EngineCase) -> None:
    for name in THAWED:
        assert torch.equal(after[f"master/{name}"], wanted[f"frozen/{name}"].float())
        assert torch.equal(after[f"weight/{name}"], wanted[f"frozen/{name}"])
    for name in FROZEN:
        assert torch.equal(after[f"frozen/{name}"], wanted[f"master/{name}"].to(here.dtype))
        assert f"exp_avg/{name}" not in after


def _assert_fresh(after: Dump, wanted: Dump, *, apart: bool) -> None:
    for name in (*THAWED, *NEW):
        for kind in STATES:
            if apart:
                assert f"{kind}/{name}" not in after
            else:
                assert not after[f"{kind}/{name}"].any()
        step = after.get(f"scalar/step/{name}")
        assert step == (None if apart else wanted["scalar/step/one"])


def _assert_warnings(texts: list[str], *, apart: bool) -> None:
    for name in (*THAWED, *FROZEN, *NEW, *GONE):
        assert sum(name in text for text in texts) == 1, (name, texts)
    shared = [text for text in texts if "step count" in text]
    assert bool(shared) != apart
    assert all("bias correction" in text and "group of their own" in text for text in shared)
    assert any("group 2 is new" in text for text in texts) == apart


def _assert_groups(wanted: Dump, before: Dump, after: Dump, *, apart: bool) -> None:
    for index in (0, 1):
        keys = [key for key in wanted if key.startswith(f"group/{index}/")]
        assert keys
        assert all(wanted[key] == after[key] for key in keys)
    if apart:
        keys = [key for key in before if key.startswith("group/2/")]
        assert keys
        assert all(before[key] == after[key] for key in keys)


def test_the_strict_error_lists_all_differences_and_names_the_option(
    pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    source, target = RUNS[0]
    here = replace(target, renamed=True, thawed=True, grouping="new apart")
    for refused in pools.run(here.world, partial(refusal, here, Loading(saved_by(source).path))):
        assert refused.error == "CheckpointMismatchError"
        assert refused.unchanged
        lines = [line for line in refused.message.splitlines() if "strict_optimizer=False" in line]
        assert len(lines) == 5, refused.message
        assert all(name in refused.message for name in (*THAWED, *FROZEN, *NEW, *GONE))
