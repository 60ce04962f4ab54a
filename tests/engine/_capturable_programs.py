"""What ranks do with torch's AdamW whose count of steps is on the device (``capturable``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.support.checkpoints import STEPS, Saved
from tests.support.engines import Setup, engine_of, inner_of, train
from tests.support.oracle import flat_buffers

OPTIONS = ("capturable", "foreach", "fused")


@dataclass(frozen=True)
class LoadedSteps:
    """How a run that has loaded counts its steps, on one rank."""

    counts: list[object]
    """Of each flat buffer: the value, its type and dimensions, whether it is beside the masters."""
    shared: bool
    """Two flat buffers count in one tensor: each step would count twice."""
    options: list[tuple[object, ...]]
    """Of each parameter group, ``OPTIONS``."""


def steps_after_load(setup: Setup, saved: Saved) -> LoadedSteps:
    """Load, and look at the counts of steps and at what the parameter groups say of them."""
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 7, tilt=3.0) as engine:
        load_checkpoint(engine, saved.path)
        inner = inner_of(engine)
        steps = [(flat, inner.state[flat]["step"]) for flat in flat_buffers(engine, setup)]
        return LoadedSteps(
            [(float(s), s.dtype, s.ndim, s.device == flat.device) for flat, s in steps],
            len({s.data_ptr() for _, s in steps}) != len(steps),
            [tuple(group[option] for option in OPTIONS) for group in inner.param_groups],
        )


def first_step(setup: Setup) -> str:
    """Train a step, and return what it raises."""
    with engine_of(setup, 0) as engine:
        try:
            train(engine, setup, 0, 1)
        except AssertionError as error:
            return str(error)
    return ""


EXPECTED_COUNT = (float(STEPS), torch.float32, 0, True)
"""Of a run that was saved after its first steps; on a CPU all tensors are on one device."""
