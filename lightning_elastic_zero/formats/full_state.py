"""The reader of checkpoints of whole tensors: single files and directories of chunks.

One holder has all parameters, each in its own flat buffer. Only the live model determines which
tensors are weights or buffers, which names are tied, and which group a parameter belongs to. So the
manifest is built when the checkpoint is opened for a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from lightning_elastic_zero.core.layout import Fragment, Transfer, spans
from lightning_elastic_zero.core.manifest import (
    Group,
    Manifest,
    Parameter,
    TrainingProgress,
    Writer,
)
from lightning_elastic_zero.core.partition import FlatBuffer
from lightning_elastic_zero.core.tensors import Scalar, dtype_name, precision_of
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats.open_files import ForeignFiles
from lightning_elastic_zero.formats.reader import (
    COMPARED_ELEMENTS,
    FRESH_OPTIMIZER_HINT,
    WEIGHT,
    CheckpointReader,
    Location,
    SharedState,
    SourceInfo,
    StoredTensors,
    duplicate_names,
    storage_location,
)
from lightning_elastic_zero.formats.torch_optimizer import (
    Members,
    NamedOptimizerState,
    by_position,
    describe_alone,
    is_optimizer,
    name_states,
    plain_hyperparameters,
)
from lightning_elastic_zero.formats.torch_read import StoredRun

CURRENT, AVERAGING = "current_model_state", "averaging_state"
"""Where Lightning's ``WeightAveraging`` puts the weights that are trained: ``state_dict`` has their
average then."""


@dataclass(frozen=True, slots=True)
class FullState:
    """What was found in a checkpoint."""

    weights: Mapping[str, torch.Tensor]
    """Parameters and buffers by name, in the model's order (``ordered``); they need no values."""
    optimizers: Sequence[Mapping[str, Any]]
    """State dicts of torch optimizers; their tensors need no values, but for hyperparameters."""
    save_id: str
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """What the trainer saved beside them; its tensors need no values."""
    ordered: bool = True
    """False: nothing says in which order the model's parameters were."""
    kind: str = ""
    """As in ``SourceInfo``."""
    lacks: tuple[str, ...] = ()
    """What is not held, beside what no checkpoint of these kinds holds."""
    unmatched: str = ""
    """Why the optimizers' state was left out; empty where it was not."""
    incomplete: str = ""
    """As in ``SourceInfo``."""


@dataclass(frozen=True, slots=True)
class BoundState:
    """What was found, in the words of the live model."""

    manifest: Manifest
    weight_of: Mapping[str, str] = field(default_factory=dict)
    """The checkpoint's name of each parameter."""
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the optimizer keeps for each parameter that it owns."""
    ties: tuple[tuple[str, str], ...] = ()
    """Two names of the checkpoint that mean one tied weight: their values must be the same."""
    unmatched: str = ""
    """Why the optimizer's state cannot be told apart by parameter; empty where it can."""


def unbound(full_state: FullState) -> BoundState:
    """Describe what was found before it is known what it is to be loaded into."""
    names = {name: name for name in full_state.weights}
    return BoundState(_manifest(full_state, names, (), ()), names)


def bind(full_state: FullState, live: Manifest) -> BoundState:
    """Match what was found with a live model; what does not fit is left for ``check_compatible``.

    Raises:
        UnsupportedError: a hyperparameter is no plain data.
    """
    weight_of: dict[str, str] = {}
    ties = []
    canonical = {n: p.name for p in live.parameters for n in (p.name, *p.aliases)}
    unknown = _second_names(full_state, live, canonical)
    for name in (name for name in full_state.weights if name not in unknown):
        first = weight_of.setdefault(canonical.get(name, name), name)
        if first != name:
            ties.append((first, name))
    buffers = tuple(n for n in live.module_buffers if weight_of.get(n) == n)
    for name in buffers:
        del weight_of[name]
    # Where a tied weight has lost its first name, its place among the others is lost too.
    order = [name for name in weight_of if name in full_state.weights]
    if not full_state.ordered:
        order = [p.name for p in live.parameters if p.name in order]
    named = _named_states(full_state, live, canonical, order)
    held = full_state.weights.keys() - set(buffers)
    aliases = {p.name: tuple(n for n in p.aliases if n in held) for p in live.parameters}
    manifest = _manifest(full_state, weight_of, buffers, named.groups, aliases)
    unmatched = full_state.unmatched or named.unmatched
    return BoundState(manifest, weight_of, named.states, tuple(ties), unmatched)


def _second_names(full_state: FullState, live: Manifest, canonical: Mapping[str, str]) -> set[str]:
    """Return the names of buffers of modules that have another one, by which the model has them."""
    known = {*canonical, *live.module_buffers}
    again = duplicate_names(full_state.weights)
    return {n for n, first in again.items() if first in live.module_buffers and n not in known}


def _named_states(
    full_state: FullState, live: Manifest, canonical: Mapping[str, str], order: Sequence[str]
) -> NamedOptimizerState:
    """Return the groups and the states of their members, or why there are no states."""
    saved: Mapping[str, Any] = {}
    why = ""
    if live.groups and len(full_state.optimizers) > 1:
        why = (
            f"it holds the states of {len(full_state.optimizers)} optimizers, here is one; "
            f"{FRESH_OPTIMIZER_HINT}"
        )
    elif live.groups and is_optimizer(next(iter(full_state.optimizers), None)):
        saved = full_state.optimizers[0]
        if not full_state.ordered and (alike := _alike(saved, live)):
            why = (
                "the optimizer's state is kept by position, and nothing says in which order the "
                f"parameters were saved: {alike[0]} and {alike[1]} have one shape, so that their "
                f"states cannot be told apart; {FRESH_OPTIMIZER_HINT}"
            )
        else:
            try:
                return name_states(saved, live, order, canonical)
            except CheckpointMismatchError as error:
                why = str(error)
    return NamedOptimizerState(_without_state(live, saved), {}, why)


def _alike(saved: Mapping[str, Any], live: Manifest) -> tuple[str, str] | None:
    """Return two trained parameters that positions alone would not tell apart, if there are any."""
    if not by_position(saved):
        return None
    first: dict[tuple[int, ...], str] = {}
    for parameter in live.optimized:
        if first.setdefault(parameter.shape, parameter.name) != parameter.name:
            return first[parameter.shape], parameter.name
    return None


def _without_state(live: Manifest, saved: Mapping[str, Any]) -> tuple[Group, ...]:
    """Return the live groups, with what was saved of as many groups but their members."""
    groups = plain_hyperparameters(saved.get("param_groups", ()))
    names = [group.names for group in live.groups]
    if not groups:
        return tuple(Group(members, {}, ()) for members in names)
    names += [()] * len(groups)
    return tuple(Group(names[i], fields, ()) for i, fields in enumerate(groups))


def _manifest(
    full_state: FullState,
    weight_of: Mapping[str, str],
    buffers: tuple[str, ...],
    groups: tuple[Group, ...],
    aliases: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> Manifest:
    """Describe what is held.

    Args:
        full_state: what was found.
        weight_of: the checkpoint's name of each parameter.
        buffers: the names of module buffers.
        groups: of the optimizer.
        aliases: the other names of tied weights that the checkpoint has too.
    """
    group_of = {name: index for index, group in enumerate(groups) for name in group.names}
    parameters = tuple(
        Parameter(
            name,
            tuple(full_state.weights[saved].shape),
            dtype_name(full_state.weights[saved].dtype),
            group_of.get(name),
            aliases.get(name, ()),
        )
        for name, saved in weight_of.items()
    )
    held = {p.name for p in parameters}
    groups = tuple(replace(g, names=tuple(n for n in g.names if n in held)) for g in groups)
    step = full_state.trainer.get("global_step")
    version = full_state.trainer.get("pytorch-lightning_version")
    dtype = _dtype_of([p for p in parameters if p.group is not None] or parameters)
    return Manifest(
        save_id=full_state.save_id,
        stage=0,
        world_size=1,
        precision=precision_of(dtype),
        master_dtype=dtype_name(dtype),
        parameters=parameters,
        groups=groups,
        # One holder, and a buffer for each parameter: their scalar states may differ.
        buffers=tuple(
            FlatBuffer(p.group, (p.name,), (p.numel,), partition_numel=p.numel)
            for p in parameters
            if p.group is not None
        ),
        module_buffers=buffers,
        files=(),
        # Samples and passes are DeepSpeed's own counts.
        progress=TrainingProgress(global_steps=step if type(step) is int else 0),
        writer=Writer(lightning=str(version or "")),
        weights_only=not full_state.optimizers,
    )


def _dtype_of(parameters: Sequence[Parameter]) -> torch.dtype:
    """Return the floating-point dtype that most elements have."""
    numels: dict[torch.dtype, int] = {}
    for parameter in parameters:
        dtype: torch.dtype = getattr(torch, parameter.dtype)
        if dtype.is_floating_point:
            numels[dtype] = numels.get(dtype, 0) + parameter.numel
    return max(numels, key=lambda dtype: numels[dtype], default=torch.float32)


NO_STATE = "optimizer state"
"""What ``SourceInfo.lacks`` says of weights alone."""


class FullStateReader(CheckpointReader):
    """A checkpoint of whole tensors by name, read by ranges: no rank reads the others' parts."""

    def __init__(self, path: Path, files: ForeignFiles, tensors: StoredTensors) -> None:
        """Keep the files.

        Args:
            path: the checkpoint's, for messages.
            files: of ``torch.save``.
            tensors: what has the tensors of ``FullState``.
        """
        self.files = files
        self._path = path
        self._tensors = tensors

    def _take(self, full_state: FullState, live: Manifest | None = None) -> None:
        """Describe what was found, in the words of a live model where there is one.

        Raises:
            CheckpointMismatchError: a weight that is tied here has two values.
            UnsupportedError: a hyperparameter is no plain data.
        """
        bound = unbound(full_state) if live is None else bind(full_state, live)
        for first, other in bound.ties:
            if not self._is_same(full_state.weights[first], full_state.weights[other]):
                msg = (
                    f"{self._path}: {first} and {other} are one tied weight here, and have "
                    "different values in the checkpoint: untie them, or resume from a checkpoint "
                    "of this model"
                )
                raise CheckpointMismatchError(msg)
        self._weights = full_state.weights
        self._bound = bound
        self._scalars: Mapping[str, dict[str, Scalar]] | None = None
        self.manifest = bound.manifest
        without_state = (NO_STATE,) if bound.manifest.weights_only else ()
        self.info = SourceInfo(
            kind=full_state.kind,
            lacks=("RNG states", *without_state, *full_state.lacks),
            hyperparameters=any(g.hyperparameters for g in bound.manifest.groups),
            has_counters="global_step" in full_state.trainer,
            unmatched=bound.unmatched,
            incomplete=full_state.incomplete,
        )

    def bind_alone(self) -> None:
        """Match the checkpoint with its own weights; positions where their shapes tell."""
        members, why = self._members_alone()
        self.bind(describe_alone(self._weights, members))
        if why:
            self.info = replace(self.info, unmatched=why)

    def _members_alone(self) -> tuple[Members, str]:
        """Return the members of the optimizer's groups, or none, and why."""
        raise NotImplementedError

    def _is_same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether two tensors hold the same bits, compared a bounded part at a time."""
        if storage_location(one) == storage_location(other):
            return True
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return all(
            torch.equal(self._bits(one, start, stop), self._bits(other, start, stop))
            for start, stop in spans(0, one.numel(), COMPARED_ELEMENTS)
        )

    def _bits(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        found = torch.empty(stop - start, dtype=tensor.dtype)
        self._tensors.read_into([(found, StoredRun(tensor, start, stop))])
        return found.view(torch.uint8)

    def locate(self, key: str, transfer: Transfer) -> Location:
        """Return where a run of a weight or of a state lies."""
        if key == WEIGHT:
            tensor = self._weights[self._bound.weight_of[transfer.name]]
        else:
            tensor = self._bound.states[transfer.name][key]
        return self._tensors, StoredRun(tensor, transfer.start, transfer.stop)

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        """Return the scalar optimizer states of a parameter."""
        if self._scalars is None:
            # All at once: each by itself would read a chunk of the file for a few bytes.
            kinds = {k.name: k.kind for g in self.manifest.groups for k in g.state}
            self._scalars = self._tensors.load_tree(
                {
                    name: {k: v for k, v in state.items() if kinds.get(k) == "scalar"}
                    for name, state in self._bound.states.items()
                }
            )
            for group in self.manifest.groups:
                held = group.hyperparameters.keys()
                if held >= FUSED_ADAM_KEYS and "amsgrad" not in held:
                    share_last_step([self._scalars[n] for n in group.names if n in self._scalars])
        return self._scalars.get(at.name, {})

    def module_state(self, rank: int, world_size: int) -> SharedState:
        """Return buffers, and all that is neither weights nor optimizer state."""
        del rank, world_size
        return SharedState(
            buffers=self.module_buffers(),
            client_state=self.load_client_state(),
            loss_scaler={},
            lr_scheduler=None,
            extra_states=self.load_extra_states(),
        )

    def load_extra_states(self) -> dict[str, Any]:
        """Return what modules had beside weights and buffers, where the format is known to."""
        return {}

    def module_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the buffers."""
        held = {name: self._weights[name] for name in self.manifest.module_buffers}
        return self._tensors.load_tree(held)  # type: ignore[no-any-return]

    def load_client_state(self) -> dict[str, Any]:
        """Return all that is neither weights nor optimizer state."""
        raise NotImplementedError


FUSED_ADAM_KEYS = frozenset({"betas", "bias_correction", "step"})
"""What a parameter group of DeepSpeed's FusedAdam has. Others that have all of these (its
DeepSpeedCPUAdam) have ``amsgrad`` too."""


def share_last_step(scalars: Sequence[dict[str, Scalar]]) -> None:
    """Set one step count for the parameters of a group, where only the last one has counted.

    So does DeepSpeed's FusedAdam without ZeRO, which goes by that one for all of them
    (``deepspeed/ops/adam/fused_adam.py``). Its counts are Python's, torch's are tensors.

    Args:
        scalars: of each parameter in the optimizer's order; changed in place.
    """
    counted = [state for state in scalars if type(state.get("step")) is int]
    if len(counted) < len(scalars) or not counted:
        return
    *others, last = [int(state["step"] or 0) for state in counted]
    if len(set(others)) == 1 and others[0] < last:
        for state in counted:
            state["step"] = last
