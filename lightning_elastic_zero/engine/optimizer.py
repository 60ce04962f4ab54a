"""The optimizer inside DeepSpeed's wrapper: its states, scalars, class and parameter groups.

State keys are discovered, never listed: another optimizer of the same class takes one step
(``probe_after_a_step``). Files of other software do not name the optimizer's class, so it is
compared by the names of its states and hyperparameters (``optimizer_checks``).

In ZeRO, the optimizer steps flat buffers, which have no rows: one that needs the shapes of weights
works in stage 0 only, or through a wrapper that knows them (``muon``). State that is neither per
element nor a scalar, such as one value per row, is refused by ``split_state``.

With partial offload (``offload_optimizer.ratio`` below 1), torch's AdamW steps ZeRO-3's first
sub-groups on the device, and DeepSpeedCPUAdam steps the others. Only the type of the step count
differs. Stock checkpoints lack the state of the second optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from lightning_elastic_zero.core.group_matching import MEMBER_KEYS
from lightning_elastic_zero.core.manifest import Group, Plain, StateKey
from lightning_elastic_zero.core.tensors import Scalar, numpy_to_python, plain, state_key, unplain
from lightning_elastic_zero.engine.buffers import group_parameters, inner_optimizer
from lightning_elastic_zero.errors import UnsupportedError

ADAM_FAMILY = frozenset({"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"})
"""They have the same state: a run may change between them, as with CPU offload. Other packages use
these names too (``converts_adam_states``)."""

INT_STEPS = frozenset(
    {
        *("FusedAdam", "DeepSpeedCPUAdam", "DeepSpeedCPULion", "FusedLion", "DeepSpeedCPUAdagrad"),
        "MuonWithAuxAdam",
    }
)
"""DeepSpeed's optimizers that count steps in a Python int; torch's use a tensor."""

BITSANDBYTES = "bitsandbytes"
"""Its optimizers are named like torch's, with the states ``state1``, ``state2`` and an int step."""

_PACKAGES = {BITSANDBYTES, "torchao", "deepspeed", "torch"}

EXECUTION_KEYS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Keys that affect how a step is computed, not its result. The live run's values are kept."""

SCHEDULER_KEYS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
)
"""Keys that schedulers add to a group. They are restored even if the optimizer's class changed."""

MODE_KEY = "train_mode"
"""Key of a schedule-free optimizer: whether the weights are those to train, or their average."""

COUNTER_KEYS = frozenset(
    {
        *("k", "step", "weight_sum", "lr_max", "scheduled_lr", "gamma", "update_counter"),
        *("d", "d_max", "d_numerator", "numerator_weighted"),
        *("gsq_weighted", "sksq_weighted", "sk_sq_weighted", "skl1", "sk_l1"),
    }
)
"""Keys of groups in which optimizers count: schedule-free, Prodigy, D-Adaptation and those of
``pytorch_optimizer``. A constructor that takes one, as Lookahead's ``k``, does not count in it."""


BACKUP_KEY = "backup_optimizer"
"""Key of a group's saved hyperparameters that differ in the second optimizer."""

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Subclasses, such as quantized states, contain more than their elements."""


def split_state(
    optimizer: Any, like: torch.Tensor, states: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Scalar]]:
    """Split the states of one flat buffer into 1-D element-wise tensors and scalars.

    ``like`` has the shape of element-wise states: 1-D, or in stage 0 that of a weight. Raises
    UnsupportedError for another state.
    """
    elementwise: dict[str, torch.Tensor] = {}
    scalars: dict[str, Scalar] = {}
    for key, raw in states.items():
        value = numpy_to_python(raw)
        if key == "step" and isinstance(value, torch.Tensor) and value.shape == (1,):
            # DeepSpeed's elastic loader for ZeRO-1/2 adds this dimension to torch's step count
            # (stage_1_and_2.py, line 3603 of 0.19.8). It remains in training and later saves.
            value = value.reshape(())
        if _is_elementwise(optimizer, like, key, value):
            elementwise[key] = value if value.ndim == 1 else value.detach().reshape(-1)
            continue
        is_plain = type(value) in _PLAIN_TENSORS
        if value is None or isinstance(value, (bool, int, float)) or (is_plain and not value.ndim):
            scalars[key] = value
        else:
            what = tuple(value.shape) if is_plain else type(value).__name__
            msg = (
                f"{type(optimizer).__name__} keeps {key!r} as {what} for a flat buffer of "
                f"{like.numel()} elements, which is neither element-wise nor a scalar and cannot "
                "be partitioned for another number of devices. Use an optimizer with element-wise "
                "state"
            )
            raise UnsupportedError(msg)
    return elementwise, scalars


def _is_elementwise(optimizer: Any, like: torch.Tensor, key: str, value: object) -> bool:
    """Whether a state has one value per element.

    The state of a 0-dimensional weight (stage 0) is one value in either case, so the other weights'
    states decide. Raises UnsupportedError if there are none.
    """
    if not isinstance(value, torch.Tensor) or type(value) not in _PLAIN_TENSORS:
        return False
    if value.shape != like.shape:
        return False
    if value.ndim:
        return True
    by_tensor = [
        (p, states) for p, states in optimizer.state.items() if isinstance(p, torch.Tensor)
    ]
    others = [states[key] for p, states in by_tensor if p.ndim and key in states]
    if not others:
        msg = (
            f"{type(optimizer).__name__}: cannot determine whether {key!r} is element-wise: all "
            "weights with this state are 0-dimensional. Give the weight a dimension: "
            "torch.ones(1) instead of torch.ones(())"
        )
        raise UnsupportedError(msg)
    return isinstance(others[0], torch.Tensor) and others[0].ndim > 0


def shared_state(
    optimizer: Any, stepped: Collection[torch.Tensor], names: Mapping[Any, str]
) -> dict[Any, Any]:
    """Return the optimizer state under keys that are not tensors, which all ranks share.

    ``stepped``: the tensors that it steps, whose states are saved separately. Raises
    UnsupportedError for the state of another tensor.
    """
    shared, known = dict[Any, Any](), set(stepped)
    # Optimizers that create state in their constructor (Adagrad) still have unused states of the
    # parameters that DeepSpeed replaced, with the same names as those of the new parameters.
    usual = {name for key in known for name in optimizer.state.get(key, ())}
    for key, value in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            shared[key] = numpy_to_python(value)
        elif key not in known and usual and not usual.issuperset(value):
            name = names.get(key, f"a tensor of shape {tuple(key.shape)}")
            kept = f"{type(optimizer).__name__} keeps {sorted(map(str, value))}"
            msg = (
                f"{kept} for {name}, which it does not step: DeepSpeed replaced its parameters "
                "when the engine was built, so this state cannot be restored. Delete it"
            )
            raise UnsupportedError(msg)
    return shared


def with_group_steps(
    optimizer: Any,
    states: Sequence[tuple[dict[str, torch.Tensor], dict[str, Scalar]]],
    groups: Sequence[int],
    trained: Sequence[bool],
) -> tuple[tuple[dict[str, torch.Tensor], dict[str, Scalar]], ...]:
    """Return the states of stage 0's parameters with one step count per group.

    DeepSpeed's FusedAdam steps a whole group but counts only on its last parameter with a gradient
    (``deepspeed/ops/adam/fused_adam.py``). ``trained``: whether each parameter requires a gradient;
    DeepSpeed gives one to all that do.
    """
    if type(adam_of_muon(optimizer, {})).__name__ != "FusedAdam":
        return tuple(states)
    counted: dict[int, Scalar] = {}
    for group, (_, scalars), steps in zip(groups, states, trained, strict=True):
        if "step" in scalars and (steps or group not in counted):
            counted[group] = scalars["step"]
    return tuple(
        (tensors, {k: counted[group] if k == "step" else v for k, v in scalars.items()})
        for group, (tensors, scalars) in zip(groups, states, strict=True)
    )


def state_keys(
    elementwise: Mapping[str, torch.Tensor], scalars: Mapping[str, Scalar]
) -> tuple[StateKey, ...]:
    """Return the table of a flat buffer's states, sorted by name."""
    keys = [state_key(k, v, elementwise=True) for k, v in elementwise.items()]
    keys += [state_key(k, v, elementwise=False) for k, v in scalars.items()]
    return tuple(sorted(keys, key=lambda key: key.name))


def package_of(optimizer: object) -> str:
    """Return the package of an optimizer's class or of its nearest known base class.

    torch's base class does not count.
    """
    kinds = [kind for kind in type(optimizer).__mro__ if kind is not torch.optim.Optimizer]
    packages = [kind.__module__.partition(".")[0] for kind in kinds]
    return next((name for name in packages if name in _PACKAGES), packages[0])


def converts_adam_states(inner: object) -> bool:
    """Whether an optimizer may take the states of another of Adam's family, in its own types.

    A class of another package with such a name may count in a number or keep bf16 states.
    """
    return type(inner).__name__ in ADAM_FAMILY and package_of(inner) in {"deepspeed", "torch"}


def adam_of_muon(inner: Any, group: Mapping[str, Any]) -> Any:
    """Return the optimizer that steps a group and counts its steps.

    DeepSpeed's Muon of a config has another one, with the same states, for groups that Adam trains.
    """
    other = None if group.get("use_muon") else getattr(inner, "aux_optimizer", None)
    return inner if other is None else other


def place_scalar(
    key: str, value: Scalar, inner: Any, group: Mapping[str, Any], device: torch.device
) -> Scalar:
    """Return a scalar in the form and on the device that the live optimizer uses."""
    inner = adam_of_muon(inner, group)
    if key == "step" and value is not None:
        if type(inner).__name__ in INT_STEPS or package_of(inner) == BITSANDBYTES:
            return int(value)
        if converts_adam_states(inner) and not isinstance(value, torch.Tensor):
            # In torch's type, independent of the default dtype. Fused kernels accept fp32 only.
            exact = torch.tensor(value, dtype=torch.float64)
            rounded = exact.float()
            value = rounded if rounded == exact or group.get("fused") else exact
    if not isinstance(value, torch.Tensor):
        return value
    # torch keeps `step` on the host except for fused and capturable steps. Each flat buffer needs
    # a separate tensor, since the optimizer increments it in place.
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    return value.detach().clone().to(device if on_device else "cpu")


def probe_after_a_step(inner: Any, index: int, saved: Mapping[str, Plain]) -> dict[str, Any]:
    """Return the states of a new parameter after a step with gradients of zero.

    Its two elements differ, to detect states that depend on the weights. Some saved hyperparameters
    (amsgrad) determine the states. Raises whatever the optimizer's constructor or step raises.
    """
    group = inner.param_groups[index]
    settings = {k: unplain(saved[k], v) if k in saved else v for k, v in group.items()}
    settings.update({k: group[k] for k in EXECUTION_KEYS & group.keys()})
    flats = [*group["params"], *(key for key in inner.state if isinstance(key, torch.Tensor))]
    device = flats[0].device if flats else "cpu"
    parameter = torch.nn.Parameter(torch.tensor([0.0, 1.0], dtype=torch.float32, device=device))
    parameter.grad = torch.zeros_like(parameter)
    # Some use their constructor's arguments instead of the group (Adagrad's initial sums).
    accepted = inspect.signature(type(inner)).parameters
    defaults = {key: value for key, value in inner.defaults.items() if key in accepted}
    twin = type(inner)([{**settings, "params": [parameter]}], **defaults)
    twin.step()
    return dict(twin.state[parameter])


def is_stepped_on_device(optimizer: Any, sub_group: int | None) -> bool:
    """Whether the second optimizer steps a sub-group."""
    if sub_group is None or not hasattr(optimizer, "backup_optimizer"):
        return False
    return bool(optimizer.subgroup_to_device[sub_group] != "cpu")


def stepping_optimizer(optimizer: Any, sub_group: int | None) -> Any:
    """Return the wrapper's optimizer that steps a flat buffer and keeps its states."""
    on_device = is_stepped_on_device(optimizer, sub_group)
    return optimizer.backup_optimizer if on_device else inner_optimizer(optimizer)


def keys_of_state(inner: torch.optim.Optimizer) -> frozenset[str]:
    """Return the keys of groups that belong to the optimizer's state."""
    return group_counters(inner) | {MODE_KEY}


def group_counters(inner: torch.optim.Optimizer) -> frozenset[str]:
    """Return the keys of groups in which the optimizer counts."""
    try:
        configured = inspect.signature(type(inner)).parameters.keys()
    except (TypeError, ValueError):  # a constructor that is not written in Python
        return COUNTER_KEYS
    return COUNTER_KEYS - configured


def backup_hyperparameters(optimizer: Any, group: int) -> dict[str, Any]:
    """Return a group's hyperparameters that differ in the second optimizer."""
    main, other = _groups(optimizer, group)
    shared = sorted(main.keys() & other.keys() - EXECUTION_KEYS - MEMBER_KEYS)
    differing = {key: other[key] for key in shared if other[key] != main[key]}
    return {BACKUP_KEY: differing} if differing else {}


def restore_backup_hyperparameters(optimizer: Any, saved: Sequence[Mapping[str, Any]]) -> None:
    """Copy the first optimizer's hyperparameters to the second, then its saved differences."""
    for group, hyperparameters in enumerate(saved):
        main, other = _groups(optimizer, group)
        if other is main:  # No second optimizer here, or it shares the dict.
            continue
        shared = main.keys() & other.keys() - EXECUTION_KEYS - MEMBER_KEYS
        other.update({key: main[key] for key in shared})
        other.update({k: v for k, v in hyperparameters.get(BACKUP_KEY, {}).items() if k in shared})


def _groups(optimizer: Any, group: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a group's dict of both optimizers.

    DeepSpeed gives the second one a separate dict for the first group, which no scheduler changes.
    """
    main: dict[str, Any] = inner_optimizer(optimizer).param_groups[group]
    if not hasattr(optimizer, "backup_optimizer"):
        return main, main
    return main, optimizer.backup_optimizer.param_groups[group]


def describe_groups(
    optimizer: Any,
    wrapper: str,
    names: Mapping[torch.nn.Parameter, str],
    states: Iterable[tuple[int, tuple[dict[str, torch.Tensor], dict[str, Scalar]]]],
) -> tuple[Group, ...]:
    """Describe an optimizer's parameter groups.

    Raises UnsupportedError if states within a group differ, or a hyperparameter is not plain data.
    """
    tables: dict[int, tuple[StateKey, ...]] = {}
    for index, of_buffer in states:
        keys = state_keys(*of_buffer)
        if keys != (others := tables.setdefault(index, keys)):
            have, first = ([key.name for key in table] for table in (keys, others))
            if have == first:
                have, first = ([f"{k.name} ({k.dtype})" for k in t] for t in (keys, others))
            msg = (
                f"parameter group {index}: one flat buffer has the states {have}, another {first}. "
                "Save after a step that updates the whole group"
            )
            raise UnsupportedError(msg)
    members = group_parameters(optimizer, wrapper)
    return tuple(
        Group(
            names=tuple(names[p] for p in members[index]),
            hyperparameters={
                key: plain(value, f"{key!r} of parameter group {index}")
                for key, value in {**group, **backup_hyperparameters(optimizer, index)}.items()
                if key != "params"
            },
            state=tables.get(index, ()),
        )
        for index, group in enumerate(inner_optimizer(optimizer).param_groups)
    )
