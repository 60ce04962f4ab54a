"""The optimizer inside DeepSpeed's wrapper: its states are discovered, never listed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from lightning_elastic_zero.errors import CheckpointMismatchError, UnsupportedError
from lightning_elastic_zero.manifest import StateKey
from lightning_elastic_zero.tensor_state import Scalar, numpy_to_python, state_key

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
    optimizer: Any,  # noqa: ANN401 (a torch optimizer, or one of DeepSpeed's)
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


def without_dimension(key: str, value: Any) -> Any:  # noqa: ANN401 (any state)
    """Return a step counter as a scalar.

    DeepSpeed's elastic loader for ZeRO-1/2 gives torch's a dimension (stage_1_and_2.py, line 3603
    of release 0.19.8), with which training and its later saves go on.
    """
    is_vector = isinstance(value, torch.Tensor) and value.shape == (1,)
    return value.reshape(()) if key == "step" and is_vector else value


def _is_elementwise(optimizer: Any, flat: torch.Tensor, key: str, value: object) -> bool:  # noqa: ANN401
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
    optimizer: Any,  # noqa: ANN401 (a torch optimizer, or one of DeepSpeed's)
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
    optimizer: Any,  # noqa: ANN401 (a torch optimizer, or one of DeepSpeed's)
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
    inner: Any,  # noqa: ANN401 (a torch optimizer, or one of DeepSpeed's)
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
    inner: Any,  # noqa: ANN401 (a torch optimizer, or one of DeepSpeed's)
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
