"""The optimizer inside DeepSpeed's wrapper: its states are discovered, never listed.

An optimizer's state keys, found by a step of another optimizer of its class.

Inference of the optimizer's class, which other software's files do not name.

The names of the states and of the hyperparameters tell optimizers apart instead: those that are
alike in both compute the same.

Adam's two kinds of weight decay: in the gradient (Adam), or beside it (AdamW).

Partial offload (``offload_optimizer.ratio`` below 1): a second optimizer steps on the device.

ZeRO-3 leaves the first sub-groups on the device and has an AdamW of torch's step them, beside the
DeepSpeedCPUAdam of the others. The two are one algorithm with one state; only the form of the step
count differs. Stock checkpoints lack what the second one holds.

The optimizer's parameter groups, described.
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
from lightning_elastic_zero.engine.buffers import group_parameters, inner_optimizer
from lightning_elastic_zero.engine.muon import MOMENTUM_KEY
from lightning_elastic_zero.errors import CheckpointMismatchError, UnsupportedError

ADAM_FAMILY = frozenset({"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"})
"""One algorithm with one state: a run may change between them, as it does with CPU offload."""

INT_STEPS = frozenset(
    {"FusedAdam", "DeepSpeedCPUAdam", "DeepSpeedCPULion", "FusedLion", "DeepSpeedCPUAdagrad"}
)
"""DeepSpeed's own optimizers count steps in a Python int, torch's in a tensor."""

BITSANDBYTES = "bitsandbytes"
"""A package whose optimizers have the names of torch's, and other states: ``state1``, ``state2``
and steps in a Python int."""

_PACKAGES = {BITSANDBYTES, "torchao", "deepspeed", "torch"}

EXECUTION_KEYS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""How a step is computed, not what it computes: these stay as the live run has them."""

SCHEDULER_KEYS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
)
"""What schedulers keep in a group: restored also where the optimizer's class has changed."""


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Others, as of quantized states, hold more than the elements that they show."""


def split_state(
    optimizer: Any,
    flat: torch.Tensor,
    held: Mapping[str, Any],
) -> tuple[dict[str, torch.Tensor], dict[str, Scalar]]:
    """Split the states of one flat buffer into element-wise tensors, 1-D, and scalars.

    Args:
        optimizer: whose they are.
        flat: the masters: 1-D, or in stage 0 a weight in its shape.
        held: the states, by name.

    Raises:
        UnsupportedError: a state is neither: it has no rule by which it could be cut.
    """
    elementwise: dict[str, torch.Tensor] = {}
    scalars: dict[str, Scalar] = {}
    for key, found in held.items():
        value = without_dimension(key, numpy_to_python(found))
        if _is_elementwise(optimizer, flat, key, value):
            elementwise[key] = value if value.ndim == 1 else value.detach().reshape(-1)
        elif _is_scalar(value):
            scalars[key] = value
        else:
            plain = type(value) in _PLAIN_TENSORS
            what = tuple(value.shape) if plain else type(value).__name__
            msg = (
                f"{type(optimizer).__name__} keeps {key!r} as {what} for a flat buffer of "
                f"{flat.numel()} elements: neither one value per element nor one for all, so it "
                "cannot be cut for another number of devices; use an optimizer with element-wise "
                "state"
            )
            raise UnsupportedError(msg)
    return elementwise, scalars


def without_dimension(key: str, value: Any) -> Any:
    """Return a step counter as a scalar.

    DeepSpeed's elastic loader for ZeRO-1/2 gives torch's a dimension (stage_1_and_2.py, line 3603
    of release 0.19.8), with which training and its later saves go on.
    """
    is_vector = isinstance(value, torch.Tensor) and value.shape == (1,)
    return value.reshape(()) if key == "step" and is_vector else value


def _is_elementwise(optimizer: Any, flat: torch.Tensor, key: str, value: object) -> bool:
    """Whether a state is one value for each element.

    Of a weight without dimensions (stage 0), either kind is one value: the states of the others
    tell which one it is.

    Raises:
        UnsupportedError: there are no others.
    """
    if not isinstance(value, torch.Tensor) or value.shape != flat.shape:
        return False
    if type(value) not in _PLAIN_TENSORS:
        return False
    if value.ndim:
        return True
    kept = [(p, held) for p, held in optimizer.state.items() if isinstance(p, torch.Tensor)]
    others = [held[key] for p, held in kept if p.ndim and key in held]
    if not others:
        msg = (
            f"{type(optimizer).__name__} keeps {key!r} for a weight without dimensions, and has no "
            "other weight that would tell whether that is a value of its element: give the weight "
            "a dimension (torch.ones(1) in the place of torch.ones(()))"
        )
        raise UnsupportedError(msg)
    return isinstance(others[0], torch.Tensor) and others[0].ndim > 0


def _is_scalar(value: object) -> bool:
    """Whether a state is one value for the whole flat buffer."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and type(value) in _PLAIN_TENSORS
    return value is None or isinstance(value, (bool, int, float))


def shared_state(
    optimizer: Any,
    stepped: Collection[torch.Tensor],
    names: Mapping[Any, str],
) -> dict[Any, Any]:
    """Return what an optimizer keeps under keys that are not tensors: state of the whole run.

    Args:
        optimizer: whose state it is.
        stepped: the tensors that DeepSpeed lets it step, whose states are saved otherwise.
        names: of the module's parameters.

    Raises:
        UnsupportedError: an entry belongs to another tensor.
    """
    found, known = dict[Any, Any](), set(stepped)
    # Optimizers that create state in their constructor (Adagrad) leave that of the parameters that
    # DeepSpeed replaced. It has the names of what the replacements have, and nothing reads it.
    usual = {name for key in known for name in optimizer.state.get(key, ())}
    for key, value in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            found[key] = numpy_to_python(value)
        elif key not in known and usual and not usual.issuperset(value):
            name = names.get(key, f"a tensor of shape {tuple(key.shape)}")
            kept = f"{type(optimizer).__name__} keeps {sorted(map(str, value))}"
            msg = (
                f"{kept} for {name}, which it does not step: DeepSpeed replaced its parameters by "
                "others when the engine was built, and nothing can restore this state. Delete it "
                "(del optimizer.state[parameter]), or create it in step()"
            )
            raise UnsupportedError(msg)
    return found


def with_group_steps(
    optimizer: Any,
    states: Sequence[tuple[dict[str, torch.Tensor], dict[str, Scalar]]],
    groups: Sequence[int],
    trained: Sequence[bool],
) -> tuple[tuple[dict[str, torch.Tensor], dict[str, Scalar]], ...]:
    """Return the states of stage 0's parameters, their steps counted by group.

    DeepSpeed's FusedAdam steps a group at once, and counts on the last parameter of it that has a
    gradient (``deepspeed/ops/adam/fused_adam.py``): on the others stays what they began with.

    Args:
        optimizer: whose they are.
        states: of each parameter, element-wise ones and scalars.
        groups: of each parameter, the index of its group.
        trained: of each parameter, whether it requires a gradient: DeepSpeed gives one to all that
            do.
    """
    if type(optimizer).__name__ != "FusedAdam":
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
    "pass load_optimizer_state=False and load_hyperparameters=False to start with a fresh "
    "optimizer, as configured here, on the saved weights"
)
"""What helps where another optimizer saved."""


def package_of(optimizer: object) -> str:
    """Return the package of an optimizer's class, or of the nearest known one that it derives from.

    So a user's subclass of bitsandbytes' ``AdamW`` is bitsandbytes', and an optimizer that derives
    from torch's base class alone is of the package that defines it.
    """
    kinds = [kind for kind in type(optimizer).__mro__ if kind is not torch.optim.Optimizer]
    packages = [kind.__module__.partition(".")[0] for kind in kinds]
    return next((name for name in packages if name in _PACKAGES), packages[0])


def check_same_optimizer(
    saved: str,
    inner: Any,
    states: Collection[str],
) -> None:
    """Refuse to give one optimizer's state, or its learning rate and the like, to another.

    Args:
        saved: class name of the one that saved; empty where it is not known.
        inner: the live one.
        states: names of the states that are to be restored.

    Raises:
        CheckpointMismatchError: the classes differ, and are not both kinds of Adam; or only their
            names are alike.
    """
    live, package = type(inner).__name__, package_of(inner)
    if hasattr(torch.optim, live) and states and ("state1" in states) != (package == BITSANDBYTES):
        msg = (
            f"the optimizer's states were saved as {sorted(states)} by an {saved} of another "
            f"package than {package}.{live}, which this run has: configure the one that saved, or "
            f"{FRESH}"
        )
        raise CheckpointMismatchError(msg)
    if saved in ("", live) or {saved, live} <= ADAM_FAMILY:
        return
    msg = (
        f"the optimizer's state and hyperparameters were saved by {saved}, this run has {live}: "
        f"configure {saved}, or {FRESH}"
    )
    raise CheckpointMismatchError(msg)


def place_scalar(
    key: str,
    value: Scalar,
    inner: Any,
    group: Mapping[str, Any],
    device: torch.device,
) -> Scalar:
    """Return a scalar in the form, and on the device, in which the live optimizer keeps it.

    Args:
        key: name of the state.
        value: as saved.
        inner: the live optimizer.
        group: its parameter group.
        device: of the flat buffer.
    """
    if key == "step" and value is not None:
        live = type(inner).__name__
        if live in INT_STEPS or package_of(inner) == BITSANDBYTES:
            return int(value)
        if live in ADAM_FAMILY and not isinstance(value, torch.Tensor):
            # As torch counts, whatever the default type of tensors. Fused kernels take fp32 only.
            exact = torch.tensor(value, dtype=torch.float64)
            rounded = exact.float()
            value = rounded if rounded == exact or group.get("fused") else exact
    if not isinstance(value, torch.Tensor):
        return value
    # torch keeps `step` on the host, but for fused and capturable steps; each flat buffer needs
    # a tensor of its own, since the optimizer counts it up in place.
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    return value.detach().clone().to(device if on_device else "cpu")


def check_states_alike(group: int, keys: Sequence[StateKey], others: Sequence[StateKey]) -> None:
    """Refuse two flat buffers of one group that do not hold the same states.

    Raises:
        UnsupportedError: they differ, so that the group has no single table of states.
    """
    if keys != others:
        have, first = ([k.name for k in table] for table in (keys, others))
        msg = (
            f"parameter group {group}: one flat buffer holds the states {have}, another "
            f"{first}; save after a step that updates all of the group"
        )
        raise UnsupportedError(msg)


WEIGHTS = (0.0, 1.0)
"""The twin's parameter: what differs between its states depends on the weights."""


def probe_after_a_step(
    inner: Any,
    index: int,
    saved: Mapping[str, Plain],
) -> dict[str, Any]:
    """Return the states of a parameter of two elements after a step with gradients of zero.

    Whatever the optimizer's class raises where another one cannot be made, or steps otherwise.

    Args:
        inner: the live optimizer, which is left as it is.
        index: of its parameter group.
        saved: hyperparameters that were saved, some of which (amsgrad) decide what is kept.
    """
    group = inner.param_groups[index]
    settings = {k: unplain(saved[k], v) if k in saved else v for k, v in group.items()}
    settings.update({k: group[k] for k in EXECUTION_KEYS & group.keys()})
    flats = [*group["params"], *(key for key in inner.state if isinstance(key, torch.Tensor))]
    device = flats[0].device if flats else "cpu"
    parameter = torch.nn.Parameter(torch.tensor(WEIGHTS, dtype=torch.float32, device=device))
    parameter.grad = torch.zeros_like(parameter)
    # Some look at what their constructor is told, and not at the group (Adagrad's first sums).
    asked = inspect.signature(type(inner)).parameters
    told = {key: value for key, value in inner.defaults.items() if key in asked}
    twin = type(inner)([{**settings, "params": [parameter]}], **told)
    twin.step()
    return dict(twin.state[parameter])


log = logging.getLogger(__name__)

NEWER_KEYS = frozenset({"maximize", "decoupled_weight_decay"})
"""What releases of torch have added to the hyperparameters of optimizers that were there."""

ADAM_KEYS = (
    frozenset({"lr", "weight_decay", "betas", "eps", "amsgrad"}),
    frozenset({"lr", "weight_decay", "betas", "eps", "bias_correction"}),
)
"""What every kind of Adam has, torch's and DeepSpeed's."""


def check_unnamed_state(
    saved: Sequence[Group],
    inner: Any,
    *,
    stepped: bool,
) -> None:
    """Refuse another optimizer's state where the checkpoint does not name the class that saved it.

    Args:
        saved: the checkpoint's parameter groups.
        inner: the run's optimizer.
        stepped: whether the saved run may have taken a step; before the first one there is no
            state.

    Raises:
        CheckpointMismatchError: names of states are not those of the live one, or a group has no
            state and would have.
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
            _refuse_stateless(index, held, name)


def check_configured_state(
    saved: Sequence[Group],
    inner: Any,
    *,
    hyperparameters: bool,
) -> str:
    """Refuse saved state without which the optimizer, as it will be configured, cannot step.

    Optimizers make their states at a parameter's first step only: one with ``amsgrad=True``
    fails at the next step on states that were saved without.

    Args:
        saved: the checkpoint's parameter groups, in the order of the live ones.
        inner: the run's optimizer.
        hyperparameters: whether those that were saved are restored.

    Returns:
        Which restored states the optimizer will not use, as a warning; empty: it uses all.

    Raises:
        CheckpointMismatchError: states are missing.
    """
    unused = []
    for index, held in enumerate(saved[: len(inner.param_groups)]):
        states = {key.name for key in held.state}
        kept = _kept_states(inner, index, held.hyperparameters if hyperparameters else {})
        if not states or kept is None:
            continue
        # A state that the saved settings ask for too is not missing because of the settings.
        known = not hyperparameters and _own_names(inner.param_groups[index]) <= _own_keys(held)
        expected = _kept_states(inner, index, held.hyperparameters) if known else None
        if lacking := kept - states - (expected or set()):
            msg = (
                f"parameter group {index} was saved with the optimizer states {sorted(states)}, "
                f"and {type(inner).__name__} as configured here also needs {sorted(lacking)}"
                f"{_changed_numbers(held, inner.param_groups[index])}: configure what was saved, "
                "or pass load_optimizer_state=False to start with a fresh optimizer"
            )
            raise CheckpointMismatchError(msg)
        if beyond := states - kept - {"step"}:
            unused.append(f"parameter group {index}: {', '.join(sorted(beyond))}")
    if not unused:
        return ""
    return (
        f"{type(inner).__name__} as configured here does not use these restored states, which "
        f"stay as they were saved: {'; '.join(unused)}"
    )


def _changed_numbers(held: Group, here: Mapping[str, Any]) -> str:
    """Return the numbers and flags that differ from those of a saved group, in brackets."""
    changes = [
        f"{key} was {value!r} and is {here[key]!r}"
        for key, value in held.hyperparameters.items()
        if key in here and isinstance(value, (bool, int, float)) and value != here[key]
    ]
    return f" ({', '.join(changes)})" if changes else ""


def check_unnamed_hyperparameters(
    saved: Sequence[Group],
    live: Sequence[Group],
    inner: Any,
) -> None:
    """Refuse another optimizer's hyperparameters; see ``check_unnamed_state``.

    Raises:
        CheckpointMismatchError: their names are not those of the live one's.
    """
    name = type(inner).__name__
    for index, (held, here) in enumerate(zip(saved, live, strict=False)):
        theirs, ours = _own_keys(held), _own_keys(here)
        if held.hyperparameters and not _alike(held, theirs, ours, name):
            _refuse(index, f"had {sorted(theirs)}", f"{name} has {sorted(ours)}")


def _alike(held: Group, theirs: set[str], ours: set[str], name: str) -> bool:
    """Whether hyperparameters are those of one kind of optimizer."""
    if name not in ADAM_FAMILY:
        return theirs ^ ours <= NEWER_KEYS
    # What else is a number, and not the run's own, is of an algorithm that builds on Adam's.
    strange = theirs - ours - NEWER_KEYS - frozenset().union(*ADAM_KEYS)
    # DeepSpeed's FusedAdam once counted its steps there.
    strange -= {"step"}
    numbers = [key for key in strange if isinstance(held.hyperparameters[key], (int, float))]
    return any(keys <= theirs for keys in ADAM_KEYS) and not numbers


def _own_keys(group: Group) -> set[str]:
    """Return the hyperparameters that say what an optimizer computes."""
    return _own_names(group.hyperparameters)


def _own_names(hyperparameters: Iterable[str]) -> set[str]:
    return set(hyperparameters) - EXECUTION_KEYS - SCHEDULER_KEYS - MEMBER_KEYS


def _refuse(index: int, saved: str, live: str) -> None:
    msg = (
        f"the optimizer that saved parameter group {index} {saved}, this run's {live}: configure "
        f"the optimizer that was saved, or {FRESH}"
    )
    raise CheckpointMismatchError(msg)


def _refuse_stateless(index: int, held: Group, live: str) -> None:
    first = ", ".join(held.names[:3])
    more = f" and {len(held.names) - 3} more" if len(held.names) > 3 else ""  # noqa: PLR2004
    msg = (
        f"it holds no optimizer state for parameter group {index} ({first}{more}), and {live} "
        "keeps some: a stock checkpoint of partial offload (offload_optimizer's ratio) lacks what "
        "was on the GPU, and a group that was never trained has none. Pass "
        "load_optimizer_state=False to go on from the saved weights with a fresh optimizer"
    )
    raise CheckpointMismatchError(msg)


def _kept_states(inner: Any, index: int, saved: Mapping[str, Plain]) -> set[str] | None:
    """Return the names of the states that an optimizer keeps; None where they cannot be told.

    Muon's own step keeps none: DeepSpeed adds the momentum before it.
    """
    if inner.param_groups[index].get("use_muon"):
        return {MOMENTUM_KEY}
    try:
        return set(probe_after_a_step(inner, index, saved))
    except Exception as error:  # noqa: BLE001 (any optimizer, anybody's)
        log.debug("cannot tell which states %s keeps: %r", type(inner).__name__, error)
        return None


DECOUPLED_KEY = "decoupled_weight_decay"
"""Where newer releases of torch keep which kind it is; DeepSpeed's optimizers have an attribute."""

BY_CLASS = {"AdamW": True, "Adam": False}

NAMED = {True: "decoupled (AdamW's)", False: "in the gradient (Adam's)"}


def weight_decay_change(source: Manifest, inner: Any) -> str:
    """Return in sentences how weight decay is of another kind; empty where it is not.

    Args:
        source: the checkpoint, whose hyperparameters are restored.
        inner: the live optimizer, which one of Adam's kind saved.
    """
    name = type(inner).__name__
    if name not in ADAM_FAMILY:
        return ""
    for index, (held, group) in enumerate(zip(source.groups, inner.param_groups, strict=False)):
        if not held.hyperparameters.get("weight_decay"):
            continue
        own = BY_CLASS.get(source.writer.optimizer)
        was = held.hyperparameters.get(DECOUPLED_KEY, own)
        now = group.get(DECOUPLED_KEY, getattr(inner, "adam_w_mode", BY_CLASS.get(name)))
        if was is None or now is None or bool(was) == bool(now):
            continue
        saved, here = NAMED[bool(was)], NAMED[bool(now)]
        if DECOUPLED_KEY in held.hyperparameters and DECOUPLED_KEY in group:
            return (
                f"Weight decay of parameter group {index} goes on as it was saved, {saved}; {name} "
                f"is configured here with one that is {here}. load_hyperparameters=False takes "
                "what is configured."
            )
        return (
            f"Weight decay of parameter group {index} was {saved} when it was saved, and {name} "
            f"has one that is {here}: steps are other ones from now on. Configure the optimizer "
            "that was saved to go on as before."
        )
    return ""


BACKUP_KEY = "backup_optimizer"
"""Where a group's hyperparameters are saved that only the second optimizer has."""


def is_stepped_on_device(optimizer: Any, sub_group: int | None) -> bool:
    """Whether the second optimizer steps a sub-group."""
    if sub_group is None or not hasattr(optimizer, "backup_optimizer"):
        return False
    return bool(optimizer.subgroup_to_device[sub_group] != "cpu")


def stepping_optimizer(optimizer: Any, sub_group: int | None) -> Any:
    """Return which of a wrapper's optimizers steps a flat buffer, and keeps its states."""
    on_device = is_stepped_on_device(optimizer, sub_group)
    return optimizer.backup_optimizer if on_device else inner_optimizer(optimizer)


def backup_hyperparameters(optimizer: Any, group: int) -> dict[str, Any]:
    """Return what of a group's hyperparameters is another for the second optimizer.

    DeepSpeed gives it a dict of its own for the first group, which no scheduler changes.
    """
    main, other = _groups(optimizer, group)
    shared = sorted(main.keys() & other.keys() - EXECUTION_KEYS - MEMBER_KEYS)
    found = {key: other[key] for key in shared if other[key] != main[key]}
    return {BACKUP_KEY: found} if found else {}


def restore_backup_hyperparameters(
    optimizer: Any,
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


def _groups(optimizer: Any, group: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a parameter group of both optimizers: the same dict but for the first one."""
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
                for key, value in {
                    **group,
                    **backup_hyperparameters(optimizer, index),
                }.items()
                if key != "params"
            },
            state=tables.get(index, ()),
        )
        for index, group in enumerate(inner_optimizer(optimizer).param_groups)
    )
