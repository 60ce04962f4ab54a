"""The reader of checkpoints of whole tensors: single files and directories of chunks.

One holder has all parameters, each in its own flat buffer. Only the live model determines which
tensors are weights or buffers, which names are tied, and which group a parameter belongs to. So the
manifest is built when the checkpoint is opened for a model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

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
from lightning_elastic_zero.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.deepspeed_files import FP32_STAGE_3, OPTIMIZER, OURS
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
    file_list_digest,
    is_extra_state,
    read_run,
    storage_location,
)
from lightning_elastic_zero.formats.torch_optimizer import (
    Members,
    NamedOptimizerState,
    by_position,
    is_optimizer,
    members_of,
    name_states,
    plain_hyperparameters,
)
from lightning_elastic_zero.formats.torch_read import ForeignFiles, StoredRun, is_dense

CURRENT, AVERAGING = "current_model_state", "averaging_state"
"""Entries of Lightning's ``WeightAveraging``: the trained weights, and its own state. The weights
in ``state_dict`` are then their average."""


@dataclass(frozen=True, slots=True)
class FullState:
    """The content of a checkpoint."""

    weights: Mapping[str, torch.Tensor]
    """Parameters and buffers by name, in the model's order (``ordered``); they need no values."""
    optimizers: Sequence[Mapping[str, Any]]
    """State dicts of torch optimizers; only the hyperparameters need values."""
    save_id: str
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's state; its tensors need no values."""
    ordered: bool = True
    """Whether ``weights`` has the order of the saved model."""
    info: SourceInfo = field(default_factory=partial(SourceInfo, ""))
    """Without what no checkpoint of these kinds contains, and what follows from the live model."""


@dataclass(frozen=True, slots=True)
class BoundState:
    """The content of a checkpoint, matched with a live model."""

    manifest: Manifest
    weight_of: Mapping[str, str] = field(default_factory=dict)
    """The checkpoint's name of each parameter."""
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The optimizer states of each trained parameter."""
    ties: tuple[tuple[str, str], ...] = ()
    """Pairs of names in the checkpoint that are one tied weight: their values must be equal."""
    unmatched: str = ""
    """As in ``SourceInfo``."""


def bind(full_state: FullState, live: Manifest) -> BoundState:
    """Match a checkpoint with a live model; ``check_compatible`` reports what does not fit."""
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
    # If a tied weight lacks its first name, its place in the order is unknown.
    order = [name for name in weight_of if name in full_state.weights]
    if not full_state.ordered:
        order = [p.name for p in live.parameters if p.name in order]
    named, why = _named_states(full_state, live, canonical, order)
    held = full_state.weights.keys() - set(buffers)
    aliases = {p.name: tuple(n for n in p.aliases if n in held) for p in live.parameters}
    manifest = _manifest(full_state, weight_of, buffers, named.groups, aliases)
    return BoundState(
        manifest, weight_of, named.states, tuple(ties), full_state.info.unmatched or why
    )


def _second_names(full_state: FullState, live: Manifest, canonical: Mapping[str, str]) -> set[str]:
    """Return names of buffers that the model knows by another name."""
    known = {*canonical, *live.module_buffers}
    again = duplicate_names(full_state.weights)
    return {n for n, first in again.items() if first in live.module_buffers and n not in known}


def _named_states(
    full_state: FullState, live: Manifest, canonical: Mapping[str, str], order: Sequence[str]
) -> tuple[NamedOptimizerState, str]:
    """Return the optimizer state by name, or none and the reason."""
    saved: Mapping[str, Any] = {}
    why = ""
    if live.groups and len(full_state.optimizers) > 1:
        why = (
            f"it contains the states of {len(full_state.optimizers)} optimizers, this run has one; "
            f"{FRESH_OPTIMIZER_HINT}"
        )
    elif live.groups and is_optimizer(next(iter(full_state.optimizers), None)):
        saved = full_state.optimizers[0]
        try:
            if not full_state.ordered and by_position(saved):
                _check_distinct_shapes(live)
            return name_states(saved, live, order, canonical), ""
        except CheckpointMismatchError as error:
            why = str(error)
    return NamedOptimizerState(_without_state(live, saved), {}), why


def _check_distinct_shapes(live: Manifest) -> None:
    """Refuse parameters that only their position distinguishes."""
    first: dict[tuple[int, ...], str] = {}
    for parameter in live.optimized:
        if (other := first.setdefault(parameter.shape, parameter.name)) != parameter.name:
            msg = (
                "the optimizer state is stored by position, but the order of the saved parameters "
                f"is unknown: the states of {other} and {parameter.name}, which have the same "
                f"shape, are ambiguous; {FRESH_OPTIMIZER_HINT}"
            )
            raise CheckpointMismatchError(msg)


def _without_state(live: Manifest, saved: Mapping[str, Any]) -> tuple[Group, ...]:
    """Return the live groups with the saved hyperparameters and without states."""
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
    aliases: Mapping[str, tuple[str, ...]],
) -> Manifest:
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
        # Only DeepSpeed counts samples and micro steps.
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


def refuse_several(optimizers: int) -> None:
    """Raise ``CheckpointMismatchError`` if there is more than one optimizer."""
    if optimizers > 1:
        msg = f"it contains the states of {optimizers} optimizers"
        raise CheckpointMismatchError(msg)


class FullStateReader(CheckpointReader):
    """A checkpoint of whole tensors by name, read by ranges: no rank reads the others' parts."""

    _full_state: FullState

    def __init__(self, path: Path, files: ForeignFiles, tensors: StoredTensors) -> None:
        self.files = files
        self._path = path
        self._tensors = tensors
        self._extra_states: Mapping[str, Any] = {}

    def _set_content(self, full_state: FullState, live: Manifest | None = None) -> None:
        """Match the content with a live model, if given, and set ``manifest`` and ``info``."""
        if live is None:
            names = {name: name for name in full_state.weights}
            bound = BoundState(_manifest(full_state, names, (), (), {}), names)
        else:
            bound = bind(full_state, live)
        self._full_state = full_state
        for first, other in bound.ties:
            if not self._is_same(full_state.weights[first], full_state.weights[other]):
                msg = (
                    f"{self._path}: {first} and {other} are one tied weight here, and have "
                    "different values in the checkpoint: untie them, or resume from a checkpoint "
                    "of this model"
                )
                raise CheckpointMismatchError(msg)
        self._bound = bound
        self._scalars: Mapping[str, dict[str, Scalar]] | None = None
        self.manifest = bound.manifest
        without_state = ("optimizer state",) if bound.manifest.weights_only else ()
        self.info = replace(
            full_state.info,
            lacks=("RNG states", *without_state, *full_state.info.lacks),
            hyperparameters=any(g.hyperparameters for g in bound.manifest.groups),
            has_counters="global_step" in full_state.trainer,
            unmatched=bound.unmatched,
        )

    def bind_without_model(self) -> None:
        members: Members = ()
        why = ""
        try:
            members = self._members_without_model()
        except CheckpointMismatchError as error:
            why = str(error)
        weights = self._full_state.weights
        again = duplicate_names(weights)
        aliases: dict[str, tuple[str, ...]] = {}
        for other, first in again.items():
            aliases[first] = (*aliases.get(first, ()), other)
        names = {name: name for name in weights if name not in again}
        groups = tuple(Group(of_group, {}, ()) for of_group in members)
        self._bind_to_itself(_manifest(self._full_state, names, (), groups, aliases))
        if why:
            self.info = replace(self.info, unmatched=why)

    def _bind_to_itself(self, own: Manifest) -> None:
        self.bind(own)

    def _members_without_model(self) -> Members:
        """Return the members of the optimizer's groups; raise an error if they are unclear."""
        optimizers = self._full_state.optimizers
        refuse_several(len(optimizers))
        return members_of(optimizers[0], self._full_state.weights) if optimizers else ()

    def trainer_entry(self, name: str) -> object:
        return self._full_state.trainer.get(name)

    def _is_same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        if storage_location(one) == storage_location(other):
            return True
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        for start, stop in spans(0, one.numel(), COMPARED_ELEMENTS):
            runs = (StoredRun(tensor, start, stop) for tensor in (one, other))
            bits = (read_run((self._tensors, run)).view(torch.uint8) for run in runs)
            if not torch.equal(*bits):
                return False
        return True

    def locate(self, key: str, transfer: Transfer) -> Location:
        if key == WEIGHT:
            tensor = self._full_state.weights[self._bound.weight_of[transfer.name]]
        else:
            tensor = self._bound.states[transfer.name][key]
        return self._tensors, StoredRun(tensor, transfer.start, transfer.stop)

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        if self._scalars is None:
            # All at once: each one would read a chunk of the file for a few bytes.
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
        del rank, world_size
        return SharedState(
            buffers=self.module_buffers(),
            client_state=self.load_client_state(),
            loss_scaler={},
            lr_scheduler=None,
            extra_states=self._tensors.load_tree(self._extra_states),
        )

    def module_buffers(self) -> Mapping[str, torch.Tensor]:
        held = {name: self._full_state.weights[name] for name in self.manifest.module_buffers}
        return self._tensors.load_tree(held)

    @abstractmethod
    def load_client_state(self) -> dict[str, Any]:
        """Return the trainer's state."""


FUSED_ADAM_KEYS = frozenset({"betas", "bias_correction", "step"})
"""Keys of a parameter group of DeepSpeed's FusedAdam. DeepSpeedCPUAdam has ``amsgrad`` too."""


def share_last_step(scalars: Sequence[dict[str, Scalar]]) -> None:
    """Give all parameters of a group the step count of the last one, if only that one counts.

    DeepSpeed's FusedAdam without ZeRO counts so (``deepspeed/ops/adam/fused_adam.py``), in Python's
    numbers, whereas torch's counts are tensors. ``scalars`` is in the optimizer's order, and is
    changed in place.
    """
    counted = [state for state in scalars if type(state.get("step")) is int]
    if len(counted) < len(scalars) or not counted:
        return
    *others, last = [int(state["step"] or 0) for state in counted]
    if len(set(others)) == 1 and others[0] < last:
        for state in counted:
            state["step"] = last


KIND = "single file of torch.save"

WEIGHTS, OPTIMIZERS = "state_dict", "optimizer_states"

# Files of other software may also have an entry ``optimizer_state_dict``.
_OF_A_SHARD = {"ds_version", "ds_config", FP32_STAGE_3, OURS}


class SingleFileReader(FullStateReader):
    """A file of ``torch.save`` with a whole model."""

    def __init__(self, path: Path, files: ForeignFiles) -> None:
        self._file = files.get(path.name)
        super().__init__(path, files, self._file)
        tree = self._file.tree
        weights, trainer = _parts(tree, path)
        self._extra_states = {n: state for n, state in weights.items() if is_extra_state(str(n))}
        weights = _checked(weights, path)
        self._average = _checked(tree[WEIGHTS], path) if CURRENT in trainer else None
        averaged = " with averaged weights (taken: the trained weights)"
        optimizers = [
            {**saved, "param_groups": self._file.load_tree(list(saved["param_groups"]))}
            for saved in (tree.get(OPTIMIZERS) if WEIGHTS in tree else None) or ()
            if is_optimizer(saved)
        ]
        self._set_content(
            FullState(
                weights,
                optimizers,
                save_id=file_list_digest(path.parent, [path.name]),
                trainer=trainer,
                info=SourceInfo(KIND if self._average is None else KIND + averaged),
            )
        )

    def names(self) -> Sequence[str]:
        return [self._path.name]

    def bind(self, live: Manifest) -> None:
        """Match the file with a live model.

        An evaluation uses averaged weights if the file has them, as with Lightning's strategies.
        """
        if self._average is not None and not live.groups:
            info = SourceInfo(f"{KIND} with averaged weights (taken: the average)")
            self._full_state = replace(self._full_state, weights=self._average, info=info)
        self._set_content(self._full_state, live)

    def load_client_state(self) -> dict[str, Any]:
        return self._file.load_tree(self._full_state.trainer)

    def optimizer_state(self) -> Mapping[Any, Any] | None:
        optimizers = self._full_state.optimizers
        if len(optimizers) != 1 or not by_position(optimizers[0]):
            return None
        state = optimizers[0]["state"]
        held = {key: value for key, value in state.items() if not isinstance(key, int)}
        return self._file.load_tree(held)


def _parts(tree: object, path: Path) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Split a tree into the weights and the trainer's state."""
    if not isinstance(tree, Mapping):
        _refuse(path, f"contains a {type(tree).__name__}, expected a dict with a `{WEIGHTS}`")
    weights = tree.get(WEIGHTS)
    if isinstance(weights, Mapping):
        if not weights:
            _refuse(path, f"has an empty `{WEIGHTS}`: its weights are elsewhere, or were not saved")
        if isinstance(current := tree.get(CURRENT), Mapping) and AVERAGING in tree:
            # The optimizer state belongs to the trained weights. The callback reads the average
            # and looks for all three entries.
            rest = {k: v for k, v in tree.items() if k not in (CURRENT, OPTIMIZERS)}
            return current, {**rest, CURRENT: {}}
        return weights, {k: v for k, v in tree.items() if k not in (WEIGHTS, OPTIMIZERS)}
    if "param_shapes" in tree or (OPTIMIZER in tree and _OF_A_SHARD & tree.keys()):
        _refuse(path, "is one file of DeepSpeed's: pass the checkpoint's directory")
    if tree and all(isinstance(tensor, torch.Tensor) for tensor in tree.values()):
        return tree, {}
    entries = ", ".join(sorted(map(repr, tree))[:10]) or "none"
    what = f"has no `{WEIGHTS}` with the model's weights; its entries are {entries}"
    inside = [(n, v.values()) for n, v in tree.items() if isinstance(v, Mapping) and v]
    if names := [n for n, vs in inside if all(isinstance(v, torch.Tensor) for v in vs)]:
        what += (
            f", of which {names[0]!r} contains names and tensors: "
            f"torch.save(torch.load({path.name!r})[{names[0]!r}], 'weights.pt') writes them as a "
            "file that can be loaded"
        )
    return _refuse(path, what)


def _refuse(path: Path, what: str) -> NoReturn:
    msg = (
        f"{path} {what}. A single file has to be Lightning's, or a dict of names and tensors: "
        "resume from another checkpoint"
    )
    raise CheckpointFormatError(msg)


def _checked(weights: Mapping[Any, Any], path: Path) -> dict[str, torch.Tensor]:
    """Return weights and buffers."""
    weights = {name: tensor for name, tensor in weights.items() if not is_extra_state(str(name))}
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            what = f"a {type(tensor).__name__}"
        elif not is_dense(tensor):
            what = f"a tensor of layout {tensor.layout} with gaps or overlapping elements"
        elif not isinstance(name, str):
            what = "a tensor whose name is not a string"
        else:
            continue
        msg = (
            f"{path}: {name!r} is {what}. Only tensors without gaps can be read: save the model "
            "again without it, or call .contiguous() on it before"
        )
        raise UnsupportedError(msg)
    return {name: tensor.detach() for name, tensor in weights.items()}
