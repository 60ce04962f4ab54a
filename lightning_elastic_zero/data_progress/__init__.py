"""A run's position in its data, counted in samples, which no number of devices changes.

Nothing in here imports Lightning or DeepSpeed: its loop counters are dicts, and an engine's numbers
are given.
"""

from __future__ import annotations

from lightning_elastic_zero.data_progress.batch_plan import BatchPlan, ceil_div, plan_batches
from lightning_elastic_zero.data_progress.loop_counters import (
    EPOCHS,
    LOADER_STATES,
    VALIDATION,
    fit_loop_at,
    infer_progress,
    read_position,
    validation_counters_at,
    with_loader_states,
)
from lightning_elastic_zero.data_progress.position import Consumed, DataProgress, Position
from lightning_elastic_zero.data_progress.rng import (
    collect_rng_states,
    derive_seed,
    seed_rng_streams,
    set_rng_states,
)
from lightning_elastic_zero.data_progress.sample_order import torch_generators_in
from lightning_elastic_zero.data_progress.sampler import ElasticBatchSampler, ElasticSampler

__all__ = [
    "EPOCHS",
    "LOADER_STATES",
    "VALIDATION",
    "BatchPlan",
    "Consumed",
    "DataProgress",
    "ElasticBatchSampler",
    "ElasticSampler",
    "Position",
    "ceil_div",
    "collect_rng_states",
    "derive_seed",
    "fit_loop_at",
    "infer_progress",
    "plan_batches",
    "read_position",
    "seed_rng_streams",
    "set_rng_states",
    "torch_generators_in",
    "validation_counters_at",
    "with_loader_states",
]
