"""A ``setup`` hook that asks how many steps there are gets the truth, and changes nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.support.ranks import Pools
from tests.trainer._recorded_runs import RunRecord, from_step
from tests.trainer._setup_hooks import EPOCHS, GLOBAL_BATCH, LENGTH, fit_asking

pytestmark = pytest.mark.engine

STEPS = EPOCHS * -(-LENGTH // GLOBAL_BATCH)
"""Optimizer steps of a whole fit: the last batch of an epoch is filled up."""

ASKERS = [
    ("fit", "datamodule"),
    ("fit", "callback"),
    ("fit", "module"),
    ("datamodule", "datamodule"),
    ("datamodule", "callback"),
    ("datamodule", "module"),
    ("module", "module"),
]


def fitted(worlds: Pools, source: str, asker: str, **options: str) -> RunRecord:
    """Fit on two ranks, where one hook asks; check what it was told, and return what was seen."""
    asked = worlds.run(2, partial(fit_asking, source, asker, **options))[0]
    assert all(steps == STEPS for steps in asked.steps.values())
    # The hooks that come before the loaders can be made are not told; a data module's own, as yet.
    early = {("module", "callback"), ("datamodule", "datamodule")}
    told = {who: n for who, n in asked.accumulation.items() if (source, who) not in early}
    if source == "module" and asker != "module":
        told.pop("module")
    assert set(told.values()) <= {3}
    assert asked.own_callbacks == ["AskingCallback", "EventRecorder"]
    return asked.seen


@pytest.mark.parametrize(("source", "asker"), ASKERS)
def test_who_asks_in_setup_gets_the_truth(
    source: str, asker: str, worlds: Pools, tmp_path: Path
) -> None:
    """Steps and accumulation are known, the fit takes the steps that it would, and resumes."""
    silent = fitted(worlds, source, "")
    seen = fitted(worlds, source, asker, save=str(tmp_path))
    assert (seen.steps, seen.losses) == (silent.steps, silent.losses)
    assert all(len(ids) == GLOBAL_BATCH for ids in seen.steps.values())
    assert seen.global_step == STEPS
    path = str(tmp_path / "step-1.2.ckpt")
    resumed = fitted(worlds, source, asker, ckpt_path=path)
    assert resumed.steps == from_step(silent.steps, STEPS - 3)
