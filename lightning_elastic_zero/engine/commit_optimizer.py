"""Commit of the optimizer's received state: every flat buffer, and all that goes with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_elastic_zero.engine.flat_buffers import inner_optimizer, refresh_low_precision
from lightning_elastic_zero.engine.gradients import drop_gradients
from lightning_elastic_zero.engine.loss_scale import warn_of_momentum_scale
from lightning_elastic_zero.engine.muon import MOMENTUM_KEY, place_momentum
from lightning_elastic_zero.engine.partial_offload import (
    restore_backup_hyperparameters,
    stepping_optimizer,
)
from lightning_elastic_zero.engine.restore import (
    FlatTarget,
    commit_counters,
    commit_groups,
    commit_masters,
    commit_shared_state,
    commit_state,
)
from lightning_elastic_zero.engine.swapped_optimizer import forget_swapped_states, swapped_in
from lightning_elastic_zero.tensor_state import RestoreValues


def commit_optimizer(
    engine: Any,  # noqa: ANN401 (untyped library)
    wrapper: str,
    flats: Sequence[FlatTarget],
    values: RestoreValues,
) -> None:
    """Commit masters, states, groups and counters: collective, once all ranks agree.

    Args:
        engine: a live one, its parameters partitioned (ZeRO-3).
        wrapper: class name of its optimizer wrapper.
        flats: each flat buffer, with what was received for it.
        values: what comes beside it.
    """
    optimizer = engine.optimizer
    keep_fp32 = bool(engine.zero_load_from_fp32_weights())
    # Where a group begins without, DeepSpeed links parameters to states at the next step.
    has_state = all(f.states or s for f, s in zip(flats, values.scalars, strict=True))
    forget_swapped_states(optimizer)
    try:
        for flat, scalars in zip(flats, values.scalars, strict=True):
            with swapped_in(flat.buffer.swapped):
                commit_masters(flat, keep_fp32=keep_fp32)
                commit_state(stepping_optimizer(optimizer, flat.buffer.sub_group), flat, scalars)
                place_momentum(optimizer, wrapper, flat.buffer)
        commit_shared_state(inner_optimizer(optimizer), values, flats)
        commit_groups(inner_optimizer(optimizer), values)
        restore_backup_hyperparameters(optimizer, values.hyperparameters)
    finally:  # Other ranks wait in here for one that has failed.
        refresh_low_precision(optimizer, wrapper, has_state=has_state)
    commit_counters(engine, values)
    if any(MOMENTUM_KEY in flat.states for flat in flats):
        warn_of_momentum_scale(engine, values.loss_scaler)
    drop_gradients(engine)
