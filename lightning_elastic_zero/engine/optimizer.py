"""The optimizer inside DeepSpeed's wrapper: its states, scalars, class and parameter groups.

State keys are discovered, never listed: another optimizer of the same class takes one step
(``probe_after_a_step``). Files of other software do not name the optimizer's class, so it is
compared by the names of its states and hyperparameters (``check_unnamed_state``).

With partial offload (``offload_optimizer.ratio`` below 1), torch's AdamW steps ZeRO-3's first
sub-groups on the device, and DeepSpeedCPUAdam steps the others. Only the type of the step count
differs. Stock checkpoints lack the state of the second optimizer.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from lightning_elastic_zero.core.manifest import Group, Manifest, Plain, StateKey
from lightning_elastic_zero.core.names import MEMBER_KEYS
from lightning_elastic_zero.core.tensors import Scalar, numpy_to_python, plain, state_key, unplain
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.engine.buffers import group_parameters, inner_optimizer
from lightning_elastic_zero.engine.muon import MOMENTUM_KEY
from lightning_elastic_zero.errors import CheckpointMismatchError, UnsupportedError

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


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Subclasses, such as quantized states, contain more than their elements."""


def split_state(
    optimizer: Any, like: torch.Tensor, held: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Scalar]]:
    """Split the states of one flat buffer into 1-D element-wise tensors and scalars.

    ``like`` has the shape of element-wise states: 1-D, or in stage 0 that of a weight. Raises
    UnsupportedError for another state.
    """
    elementwise: dict[str, torch.Tensor] = {}
    scalars: dict[str, Scalar] = {}
    for key, found in held.items():
        value = numpy_to_python(found)
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
    kept = [(p, held) for p, held in optimizer.state.items() if isinstance(p, torch.Tensor)]
    others = [held[key] for p, held in kept if p.ndim and key in held]
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
    found, known = dict[Any, Any](), set(stepped)
    # Optimizers that create state in their constructor (Adagrad) still have unused states of the
    # parameters that DeepSpeed replaced, with the same names as those of the new parameters.
    usual = {name for key in known for name in optimizer.state.get(key, ())}
    for key, value in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            found[key] = numpy_to_python(value)
        elif key not in known and usual and not usual.issuperset(value):
            name = names.get(key, f"a tensor of shape {tuple(key.shape)}")
            kept = f"{type(optimizer).__name__} keeps {sorted(map(str, value))}"
            msg = (
                f"{kept} for {name}, which it does not step: DeepSpeed replaced its parameters "
                "when the engine was built, so this state cannot be restored. Delete it"
            )
            raise UnsupportedError(msg)
    return found


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


FRESH = (
    "pass load_optimizer_state=False and load_hyperparameters=False to start the configured "
    "optimizer fresh on the saved weights"
)
"""The remedy if another optimizer was saved."""


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


def check_same_optimizer(saved: str, inner: Any, states: Collection[str]) -> None:
    """Refuse to restore one optimizer's state or hyperparameters into another.

    Raises CheckpointMismatchError if the classes differ and are not both of Adam's family, or if
    only the class names are equal.
    """
    live, package = type(inner).__name__, package_of(inner)
    if hasattr(torch.optim, live) and states and ("state1" in states) != (package == BITSANDBYTES):
        msg = (
            f"the optimizer states {sorted(states)} were saved by {saved} of another package than "
            f"this run's {package}.{live}: configure the saved optimizer, or {FRESH}"
        )
        raise CheckpointMismatchError(msg)
    if saved == live or {saved, live} <= ADAM_FAMILY:
        return
    msg = (
        f"the optimizer's state and hyperparameters were saved by {saved}, this run has {live}: "
        f"configure {saved}, or {FRESH}"
    )
    raise CheckpointMismatchError(msg)


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


log = logging.getLogger(__name__)

NEWER_KEYS = frozenset({"maximize", "decoupled_weight_decay"})
"""Hyperparameters that newer releases of torch added to existing optimizers."""

ADAM_KEYS = (
    frozenset({"lr", "weight_decay", "betas", "eps", "amsgrad"}),
    frozenset({"lr", "weight_decay", "betas", "eps", "bias_correction"}),
)
"""Hyperparameters of every optimizer of Adam's family, torch's and DeepSpeed's."""


def check_unnamed_state(saved: Sequence[Group], inner: Any, *, stepped: bool) -> None:
    """Refuse another optimizer's state if the checkpoint does not name the optimizer's class.

    ``stepped``: whether the saved run may have taken a step. Raises CheckpointMismatchError if the
    names of the states differ, or a group lacks its state.
    """
    name = type(inner).__name__
    others = any(group.state for group in saved)
    for index, held in enumerate(saved[: len(inner.param_groups)]):
        states = {key.name for key in held.state}
        if not held.names or not (states or stepped or others):
            continue
        kept = _kept_states(inner, index, held.hyperparameters)
        if states and kept is not None and kept != states:
            _refuse(index, f"kept the states {sorted(states)}", f"{name} keeps {sorted(kept)}")
        if not states and (kept or (kept is None and others)):
            msg = (
                f"no optimizer state for parameter group {index} ({format_names(held.names, 3)}), "
                f"but {name} keeps some. A stock checkpoint of partial offload "
                "(offload_optimizer's ratio) lacks the state on the GPU, and a group that was "
                "never trained has none. Pass load_optimizer_state=False to start a fresh "
                "optimizer on the saved weights"
            )
            raise CheckpointMismatchError(msg)


def check_configured_state(saved: Sequence[Group], inner: Any, *, hyperparameters: bool) -> str:
    """Refuse saved state that the optimizer, as it will be configured, cannot step with.

    Optimizers create states only at a parameter's first step: with ``amsgrad=True``, the next step
    fails on states that were saved without it. Returns a warning that lists the restored states
    that the optimizer will not use, or "". Raises CheckpointMismatchError if states are missing.
    """
    unused = []
    for index, held in enumerate(saved[: len(inner.param_groups)]):
        states = {key.name for key in held.state}
        kept = _kept_states(inner, index, held.hyperparameters if hyperparameters else {})
        if not states or kept is None:
            continue
        # The configuration is not the reason if the saved settings require the state too.
        here, saved_keys = inner.param_groups[index], _own_keys(held.hyperparameters)
        known = not hyperparameters and _own_keys(here) <= saved_keys
        expected = _kept_states(inner, index, held.hyperparameters) if known else None
        if lacking := kept - states - (expected or set()):
            msg = (
                f"parameter group {index}: saved optimizer states {sorted(states)}; "
                f"{type(inner).__name__} as configured here also needs {sorted(lacking)}"
                f"{_changed_numbers(held, here)}. Configure the saved "
                "optimizer, or pass load_optimizer_state=False to start with a fresh one"
            )
            raise CheckpointMismatchError(msg)
        if beyond := states - kept - {"step"}:
            unused.append(f"parameter group {index}: {', '.join(sorted(beyond))}")
    if not unused:
        return ""
    return (
        f"{type(inner).__name__} as configured here does not use these restored states, which "
        f"keep their saved values: {'; '.join(unused)}"
    )


def _changed_numbers(held: Group, here: Mapping[str, Any]) -> str:
    changes = [
        f"{key} was {value!r} and is {here[key]!r}"
        for key, value in held.hyperparameters.items()
        if key in here and isinstance(value, (bool, int, float)) and value != here[key]
    ]
    return f" ({', '.join(changes)})" if changes else ""


def check_unnamed_hyperparameters(
    saved: Sequence[Group], live: Sequence[Group], inner: Any
) -> None:
    """Refuse another optimizer's hyperparameters; see ``check_unnamed_state``."""
    name = type(inner).__name__
    for index, (held, here) in enumerate(zip(saved, live, strict=False)):
        theirs, ours = _own_keys(held.hyperparameters), _own_keys(here.hyperparameters)
        if held.hyperparameters and not _alike(held, theirs, ours, name):
            _refuse(index, f"had {sorted(theirs)}", f"{name} has {sorted(ours)}")


def _alike(held: Group, theirs: set[str], ours: set[str], name: str) -> bool:
    if name not in ADAM_FAMILY:
        return theirs ^ ours <= NEWER_KEYS
    # Any other number belongs to an algorithm that extends Adam. Older releases of DeepSpeed's
    # FusedAdam counted steps here.
    strange = theirs - ours - NEWER_KEYS - frozenset({"step"}).union(*ADAM_KEYS)
    numbers = [key for key in strange if isinstance(held.hyperparameters[key], (int, float))]
    return any(keys <= theirs for keys in ADAM_KEYS) and not numbers


def _own_keys(hyperparameters: Iterable[str]) -> set[str]:
    """Return the hyperparameters that affect the result of a step."""
    return set(hyperparameters) - EXECUTION_KEYS - SCHEDULER_KEYS - MEMBER_KEYS


def _refuse(index: int, saved: str, live: str) -> None:
    msg = (
        f"the saved optimizer {saved} in parameter group {index}, this run's {live}: configure the "
        f"saved optimizer, or {FRESH}"
    )
    raise CheckpointMismatchError(msg)


def _kept_states(inner: Any, index: int, saved: Mapping[str, Plain]) -> set[str] | None:
    """Return the names of the states that an optimizer keeps; None if unknown."""
    if inner.param_groups[index].get("use_muon"):
        return {MOMENTUM_KEY}  # DeepSpeed adds it before the optimizer's own step.
    try:
        return set(probe_after_a_step(inner, index, saved))
    except Exception as error:  # noqa: BLE001 (any optimizer, anybody's)
        log.debug("cannot determine the states of %s: %r", type(inner).__name__, error)
        return None


DECOUPLED_KEY = "decoupled_weight_decay"
"""Where newer releases of torch store the kind. DeepSpeed's optimizers have an attribute."""
BY_CLASS = {"AdamW": True, "Adam": False}
NAMED = {True: "decoupled (AdamW's)", False: "in the gradient (Adam's)"}


def weight_decay_change(source: Manifest, inner: Any) -> str:
    """Return a warning if the kind of weight decay changes, else ""."""
    name = type(inner).__name__
    if name not in ADAM_FAMILY:
        return ""
    for index, (held, group) in enumerate(zip(source.groups, inner.param_groups, strict=False)):
        known = held.hyperparameters
        was = known.get(DECOUPLED_KEY, BY_CLASS.get(source.writer.optimizer))
        now = group.get(DECOUPLED_KEY, getattr(inner, "adam_w_mode", BY_CLASS.get(name)))
        if not known.get("weight_decay") or None in (was, now) or bool(was) == bool(now):
            continue
        saved, here = NAMED[bool(was)], NAMED[bool(now)]
        if DECOUPLED_KEY in known and DECOUPLED_KEY in group:
            return (
                f"Weight decay of parameter group {index} stays {saved}, as in the checkpoint; "
                f"{name} is configured with {here} weight decay. Pass load_hyperparameters=False "
                "to use the configured one."
            )
        return (
            f"Weight decay of parameter group {index} was {saved} in the checkpoint and is {here} "
            f"with {name}, so steps will differ. Configure the saved optimizer to continue as "
            "before."
        )
    return ""


BACKUP_KEY = "backup_optimizer"
"""Key of a group's saved hyperparameters that differ in the second optimizer."""


def is_stepped_on_device(optimizer: Any, sub_group: int | None) -> bool:
    """Whether the second optimizer steps a sub-group."""
    if sub_group is None or not hasattr(optimizer, "backup_optimizer"):
        return False
    return bool(optimizer.subgroup_to_device[sub_group] != "cpu")


def stepping_optimizer(optimizer: Any, sub_group: int | None) -> Any:
    """Return the wrapper's optimizer that steps a flat buffer and keeps its states."""
    on_device = is_stepped_on_device(optimizer, sub_group)
    return optimizer.backup_optimizer if on_device else inner_optimizer(optimizer)


def group_counters(inner: torch.optim.Optimizer) -> frozenset[str]:
    """Return the keys of groups that belong to the optimizer's state."""
    try:
        configured = inspect.signature(type(inner)).parameters.keys()
    except (TypeError, ValueError):  # a constructor that is not written in Python
        return COUNTER_KEYS
    return COUNTER_KEYS - configured


def backup_hyperparameters(optimizer: Any, group: int) -> dict[str, Any]:
    """Return a group's hyperparameters that differ in the second optimizer."""
    main, other = _groups(optimizer, group)
    shared = sorted(main.keys() & other.keys() - EXECUTION_KEYS - MEMBER_KEYS)
    found = {key: other[key] for key in shared if other[key] != main[key]}
    return {BACKUP_KEY: found} if found else {}


def restore_backup_hyperparameters(optimizer: Any, saved: Sequence[Mapping[str, Any]]) -> None:
    """Copy the first optimizer's hyperparameters to the second, then its saved differences."""
    for group, held in enumerate(saved):
        main, other = _groups(optimizer, group)
        if other is main:  # No second optimizer here, or it shares the dict.
            continue
        shared = main.keys() & other.keys() - EXECUTION_KEYS - MEMBER_KEYS
        other.update({key: main[key] for key in shared})
        other.update({k: v for k, v in held.get(BACKUP_KEY, {}).items() if k in shared})


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
    for index, held in states:
        keys = state_keys(*held)
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
