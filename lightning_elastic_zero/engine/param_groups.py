"""The optimizer's parameter groups, described."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lightning_elastic_zero.engine.flat_buffers import group_parameters, inner_optimizer
from lightning_elastic_zero.engine.optimizer_state import check_states_alike, state_keys
from lightning_elastic_zero.manifest import Group, StateKey
from lightning_elastic_zero.tensor_state import Scalar, plain


def describe_groups(
    optimizer: Any,  # noqa: ANN401 (untyped library)
    wrapper: str,
    names: Mapping[torch.nn.Parameter, str],
    states: Iterable[tuple[int, tuple[dict[str, torch.Tensor], dict[str, Scalar]]]],
) -> tuple[Group, ...]:
    """Describe the parameter groups of an optimizer.

    Args:
        optimizer: DeepSpeed's wrapper, or what it left as it was.
        wrapper: its class name.
        names: of the parameters.
        states: of each flat buffer, its group and the states in it; those of a group are alike.

    Raises:
        UnsupportedError: those of a group are not, or a hyperparameter has no rule.
    """
    tables: dict[int, tuple[StateKey, ...]] = {}
    for index, held in states:
        keys = state_keys(*held)
        check_states_alike(index, keys, tables.setdefault(index, keys))
    members = group_parameters(optimizer, wrapper)
    return tuple(
        Group(
            names=tuple(names[p] for p in members[index]),
            hyperparameters={
                key: plain(value, f"{key!r} of parameter group {index}")
                for key, value in group.items()
                if key != "params"
            },
            state=tables.get(index, ()),
        )
        for index, group in enumerate(inner_optimizer(optimizer).param_groups)
    )
