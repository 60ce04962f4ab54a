"""Partial offload (``offload_optimizer.ratio`` below 1): a second optimizer steps on the device.

ZeRO-3 leaves the first sub-groups on the device and has an AdamW of torch's step them, beside the
DeepSpeedCPUAdam of the others. The two are one algorithm with one state; only the form of the step
count differs. Stock checkpoints lack what the second one holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_elastic_zero.engine.flat_buffers import inner_optimizer
from lightning_elastic_zero.engine.optimizer_state import EXECUTION_KEYS
from lightning_elastic_zero.group_matching import MEMBER_KEYS

BACKUP_KEY = "backup_optimizer"
"""Where a group's hyperparameters are saved that only the second optimizer has."""


def is_stepped_on_device(optimizer: Any, sub_group: int | None) -> bool:  # noqa: ANN401 (untyped)
    """Whether the second optimizer steps a sub-group."""
    if sub_group is None or not hasattr(optimizer, "backup_optimizer"):
        return False
    return bool(optimizer.subgroup_to_device[sub_group] != "cpu")


def stepping_optimizer(optimizer: Any, sub_group: int | None) -> Any:  # noqa: ANN401 (untyped)
    """Return which of a wrapper's optimizers steps a flat buffer, and keeps its states."""
    on_device = is_stepped_on_device(optimizer, sub_group)
    return optimizer.backup_optimizer if on_device else inner_optimizer(optimizer)


def backup_hyperparameters(optimizer: Any, group: int) -> dict[str, Any]:  # noqa: ANN401 (untyped)
    """Return what of a group's hyperparameters is another for the second optimizer.

    DeepSpeed gives it a dict of its own for the first group, which no scheduler changes.
    """
    main, other = _groups(optimizer, group)
    shared = sorted(main.keys() & other.keys() - EXECUTION_KEYS - MEMBER_KEYS)
    found = {key: other[key] for key in shared if other[key] != main[key]}
    return {BACKUP_KEY: found} if found else {}


def restore_backup_hyperparameters(
    optimizer: Any,  # noqa: ANN401 (untyped library)
    saved: Sequence[Mapping[str, Any]] | None,
) -> None:
    """Copy the first optimizer's restored hyperparameters to the second, then its own saved ones.

    Args:
        optimizer: DeepSpeed's wrapper.
        saved: the hyperparameters of each group; None: the live ones stay.
    """
    for group, held in enumerate(saved or ()):
        main, other = _groups(optimizer, group)
        if other is main:  # No second optimizer steps here, or with the same dict.
            continue
        shared = main.keys() & other.keys() - EXECUTION_KEYS - MEMBER_KEYS
        other.update({key: main[key] for key in shared})
        other.update({k: v for k, v in held.get(BACKUP_KEY, {}).items() if k in shared})


def _groups(optimizer: Any, group: int) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ANN401
    """Return a parameter group of both optimizers: the same dict but for the first one."""
    main: dict[str, Any] = inner_optimizer(optimizer).param_groups[group]
    if not hasattr(optimizer, "backup_optimizer"):
        return main, main
    return main, optimizer.backup_optimizer.param_groups[group]
