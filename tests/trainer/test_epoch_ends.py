"""Resumed at an epoch's end: the next epoch's samples, of data that count epochs by themselves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.engine._pool import Pools
from tests.trainer._steps import Run, fit, fits

pytestmark = pytest.mark.engine

POINTS = {"step-1.3": 8, "validated-10": 10, "epoch-1": 10}
"""In mid-epoch, at the end of an epoch's validation, and at its own end: with the next step."""

RUN = Run(
    length=60,
    batch_size=6,
    epochs=4,
    validate=True,
    save=tuple(point.replace("-", " ") for point in POINTS),
    trainer={"use_distributed_sampler": False},
)


@pytest.mark.parametrize("kind", ["counting", "counting, sized", "counting, batches"])
def test_data_that_resume_at_a_sample(kind: str, worlds: Pools, tmp_path: Path) -> None:
    """Each epoch once, in its own order, on any number of devices."""
    run = replace(RUN, kind=kind, root=str(tmp_path))
    whole = worlds.run(2, partial(fit, run))[0].steps
    assert len({tuple(whole[step]) for step in range(0, 20, 5)}) == 4  # epochs differ
    paths = [str(tmp_path / f"{point}.ckpt") for point in POINTS]
    for world in (1, 2, 3):
        of_world = replace(run, save=(), batch_size=12 // world)
        runs = [replace(of_world, ckpt_path=path) for path in paths]
        resumed = worlds.run(world, partial(fits, runs))[0]
        for seen, begin in zip(resumed, POINTS.values(), strict=True):
            assert seen.steps == {step: ids for step, ids in whole.items() if step >= begin}
