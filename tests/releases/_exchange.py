"""Save checkpoints with the releases of one cell, and resume them with those of another.

A program, run by a cell's Python: ``python -m tests.releases._exchange save FOLDER`` (``resume``).
"""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.releases._exchange_ranks import load_of_another_release
from tests.support.checkpoints import Saved, StateComparison, fresh, train_and_save
from tests.support.engines import EngineCase
from tests.support.fits import FitCase, fit
from tests.support.ranks import Pools

PAIRS = (
    (EngineCase(2, "2", "bf16", round_robin=True), EngineCase(3, "3", "bf16", sub_group=700)),
    (EngineCase(3, "3", sub_group=700), EngineCase(2, "1")),
    (EngineCase(2, "0"), EngineCase(2, "2")),
)
"""Saving and loading plain engines, with other numbers of ranks, stages and wrappers."""

STAGES = ((2, 2, 3, 3), (3, 3, 2, 2))
"""Trainers: stage and number of ranks of the save, and of the resume."""

FITTED = "fitted.json"


def save(pools: Pools, folder: Path) -> None:
    """Train and save with this cell's releases."""
    for number, (source, _) in enumerate(PAIRS):
        saved = Saved(source, str(folder / f"engine-{number}.ckpt"))
        pools.run(source.world, partial(train_and_save, saved))
    fitted = {}
    for stage, world, _, _ in STAGES:
        plan = FitCase(str(folder / f"trainer-{stage}"), stage, epochs=2)
        fitted[str(stage)] = pools.run(world, partial(fit, plan))[0]
    (folder / FITTED).write_text(json.dumps(fitted), encoding="utf-8")


def resume(pools: Pools, folder: Path) -> None:
    """Load the checkpoints of another cell, and compare the loaded state with the saved one.

    Raises:
        AssertionError: a value differs, or the negative control does not differ.
    """
    compared = 0
    for number, (source, target) in enumerate(PAIRS):
        saved = Saved(source, str(folder / f"engine-{number}.ckpt"))
        call = partial(load_of_another_release, target, saved)
        found = comparison_of(pools, target.world, call)
        assert not found.differing, f"{source} in {target}: {found.differing}"
        assert not found.unrounded, f"{source} in {target}: {found.unrounded}"
        compared += found.tensors
    control = comparison_of(pools, target.world, partial(fresh, target, saved, steps=3))
    assert len(control.differing) > control.tensors // 2, "the negative control does not differ"
    fitted = json.loads((folder / FITTED).read_text(encoding="utf-8"))
    for stage, _, target_stage, world in STAGES:
        # The resumed fit saves to the folder of the checkpoint that it resumes.
        root = shutil.copytree(folder / f"trainer-{stage}", folder / f"on-{stage}", symlinks=True)
        plan = FitCase(str(root), target_stage, epochs=3, ckpt_path="last", rate=0.9, seed=9)
        for seen in pools.run(world, partial(fit, plan)):
            assert_continued(fitted[str(stage)], seen)
        compared += len(fitted[str(stage)]["end"])
        shutil.rmtree(root)
    print(json.dumps({"tensors": compared}))


def comparison_of(pools: Pools, world: int, call: Any) -> StateComparison:
    found: StateComparison | None = pools.run(world, call)[0]
    assert found is not None
    return found


def assert_continued(saved: dict[str, Any], seen: dict[str, Any]) -> None:
    """Fail unless a Trainer started with the saved weights, learning rates and user states."""
    assert seen["start"] == saved["end"]
    assert seen["end"] != seen["start"]
    assert seen["lrs"] == saved["lrs at end"]
    assert (seen["step"], seen["epoch"]) == (saved["step"] * 3 // 2, saved["epoch"] + 1)
    assert seen["module"] == {"epoch": 1, "tensor": [0, 1, 2]}
    assert seen["data"] == {"seen": 7}
    assert seen["callback"]["common"] == [1, 2.5, "three"]


def main(verb: str, folder: str) -> None:
    pools = Pools()
    try:
        {"save": save, "resume": resume}[verb](pools, Path(folder))
    finally:
        pools.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
