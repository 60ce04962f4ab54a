"""How far a run has come, counted in samples: what does not depend on the number of devices.

``batches`` cuts a global batch over ranks and micro-batches; ``sampler`` gives every rank its
samples, from any step of an epoch on, and ``sample_order`` asks users' samplers; ``position`` is
where a run stands, as a checkpoint records it; ``counters`` writes Lightning's loop counters for
it; ``randomness`` keeps the streams of random numbers. Nothing in here imports Lightning or
DeepSpeed.
"""

from __future__ import annotations

from lightning_elastic_zero.progress.batches import BatchPlan, plan_batches
from lightning_elastic_zero.progress.counters import (
    LOADER_STATES,
    VALIDATION,
    accumulation_of,
    loops_at,
    position_of,
    validation_at,
    with_loader_states,
)
from lightning_elastic_zero.progress.position import Position, Record
from lightning_elastic_zero.progress.randomness import (
    derive_random_state,
    random_state,
    seed_of,
    set_random_state,
)
from lightning_elastic_zero.progress.sampler import ElasticBatchSampler, ElasticSampler

__all__ = [
    "LOADER_STATES",
    "VALIDATION",
    "BatchPlan",
    "ElasticBatchSampler",
    "ElasticSampler",
    "Position",
    "Record",
    "accumulation_of",
    "derive_random_state",
    "loops_at",
    "plan_batches",
    "position_of",
    "random_state",
    "seed_of",
    "set_random_state",
    "validation_at",
    "with_loader_states",
]
