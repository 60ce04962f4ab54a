"""The optimizer's state of a flat buffer, laid out as the masters, wherever it is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_elastic_zero.engine.flat_buffers import LiveFlatBuffer
from lightning_elastic_zero.engine.muon import keeps_whole_momenta, partitioned_momentum
from lightning_elastic_zero.engine.offloaded_states import without_copies
from lightning_elastic_zero.engine.partial_offload import is_stepped_on_device, stepping_optimizer
from lightning_elastic_zero.layout import Fragment
from lightning_elastic_zero.partition import FlatBuffer


def flat_buffer_state(
    optimizer: Any,  # noqa: ANN401 (untyped library)
    wrapper: str,
    placed: tuple[LiveFlatBuffer, FlatBuffer, Sequence[Fragment]],
    *,
    stepped: bool,
) -> Mapping[str, Any]:
    """Return the states of a flat buffer, by name; those in files are to be read only.

    Args:
        optimizer: DeepSpeed's wrapper.
        wrapper: its class name.
        placed: the flat buffer, the same as a table, and what this rank holds of it.
        stepped: whether the run has taken a step.
    """
    buffer, row, fragments = placed
    if keeps_whole_momenta(optimizer, wrapper, buffer.group):
        return partitioned_momentum(optimizer, buffer, row, fragments, stepped=stepped)
    state: Mapping[str, Any] = stepping_optimizer(optimizer, buffer.sub_group).state.get(
        buffer.key, {}
    )
    if buffer.swapped:
        return buffer.swapped.states(state)
    if state and is_stepped_on_device(optimizer, buffer.sub_group):
        return {**state, "step": int(state["step"])}  # As the offloaded optimizer counts.
    return without_copies(state)
