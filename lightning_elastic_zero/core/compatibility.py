"""Comparison of a checkpoint with a model.

``check_compatible`` lists every difference by name in one error. ``describe_unrestored`` lists the
state that a compatible load does not restore.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_elastic_zero.core.group_matching import (
    OWN_GROUP,
    group_conflicts,
    match_groups,
    other_algorithm,
    shared_step_counters,
)
from lightning_elastic_zero.core.manifest import Manifest, Parameter
from lightning_elastic_zero.core.names import guess_key_mapping
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import CheckpointMismatchError

_INTEGRAL = ("int", "uint", "bool", "qint", "quint", "bits")
"""Prefixes of the names of integer and bit types, including those of quantized weights."""

LISTED = 20
"""Names listed per kind of difference; the rest is counted."""

list_names = partial(format_names, limit=LISTED)

LOW_PRECISION = {"bf16": "bfloat16", "fp16": "float16"}
"""The type to which a run of each precision rounds its weights."""

FLOATING = {"float64": (11, 52), "float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10)}
"""Bits of exponent and mantissa. A type with at least as many of both represents every value."""

LENIENT_OPTIMIZER = "strict_optimizer=False"
"""The option that tolerates missing and unexpected trained parameters."""

LENIENT = "strict=False (strict_loading = False in a LightningModule)"
"""The option that tolerates missing and unexpected frozen parameters and buffers."""

_OTHER_OWNERS = (
    "set requires_grad as in the saved run before the optimizer is created; or pass "
    f"{LENIENT_OPTIMIZER} to start these with fresh optimizer state or without one; or "
    "load_optimizer_state=False to start a fresh optimizer on the saved weights"
)
_OTHER_GROUPS = (
    f"configure the saved groups; or pass {LENIENT_OPTIMIZER} to restore each parameter with its "
    "saved state; or load_optimizer_state=False and load_hyperparameters=False to start a fresh "
    "optimizer with the configured groups"
)


@dataclass(frozen=True, slots=True)
class BufferPair:
    """A saved module buffer and the model's buffer of the same name."""

    name: str
    saved_shape: tuple[int, ...]
    shape: tuple[int, ...]
    saved_dtype: str
    dtype: str
    loses: bool
    """Whether the model's type cannot represent the saved values."""
    overflows: bool = False
    """Whether finite saved values would become infinite."""
    writable: bool = True
    """False if the model's buffer is an expanded view, sparse, or on the meta device."""


@dataclass(frozen=True, slots=True)
class RestoreScope:
    """Which parts of a checkpoint a load restores."""

    optimizer_state: bool
    """Restore the optimizer's state. Requires parameter groups with the same members."""
    hyperparameters: bool = True
    """Restore each group's hyperparameters. Requires the same number of groups."""
    counter_keys: frozenset[str] = frozenset()
    """Hyperparameters in which the optimizer counts. They are part of its state."""
    lr_scheduler: bool = True
    """Restore the scheduler that the engine steps, even without hyperparameters."""
    strict: bool = True
    """False (Lightning's ``strict_loading``): frozen parameters and buffers that the checkpoint
    lacks keep their values, and those that the model lacks are not restored. Without optimizer
    state, this applies to trained parameters too."""
    strict_optimizer: bool = True
    """False: the trained parameters and their groups may differ. Parameters that the checkpoint
    lacks keep their values, those without saved state start with fresh state, and those that the
    model lacks are not restored."""


def check_compatible(
    saved: Manifest,
    live: Manifest,
    wanted: RestoreScope,
    where: str,
    buffers: Sequence[BufferPair] = (),
) -> None:
    """Compare a checkpoint with a live engine before any state changes.

    ``buffers`` are the module buffers that both have. Raises CheckpointMismatchError with all
    differences by name.
    """
    differences = [
        *_differences(saved, live, wanted),
        *_incompatible_buffers(buffers, _rounds_to(live)),
    ]
    if not differences:
        return
    listed = "\n".join(f"  - {difference}" for difference in differences)
    msg = (
        f"{where} does not match this model.\n"
        f"Saved: {describe(saved)}\nHere: {describe(live)}\n{listed}"
    )
    raise CheckpointMismatchError(msg)


def describe(manifest: Manifest) -> str:
    """Return a one-line summary of a checkpoint or a live engine."""
    numel = sum(p.numel for p in manifest.parameters)
    has_run = bool(manifest.writer.engine)
    parts = [
        # In an evaluation or a checkpoint of whole tensors, the device count is unknown.
        f"ZeRO-{manifest.stage} on {manifest.grid}" if manifest.stage or has_run else "no ZeRO",
        manifest.precision,
        f"{len(manifest.parameters)} parameters with {numel:,} elements",
    ]
    if manifest.groups:
        parts.append(
            f"{len(manifest.groups)} parameter group{'s' if len(manifest.groups) > 1 else ''}"
        )
    if manifest.writer.optimizer:
        parts.append(manifest.writer.optimizer)
    if manifest.weights_only:
        parts.append("weights only")
    return ", ".join(parts)


def _differences(saved: Manifest, live: Manifest, wanted: RestoreScope) -> Iterator[str]:
    if wanted.optimizer_state and saved.weights_only:
        yield (
            "it has no optimizer state that can be resumed (saved with save_weights_only=True, a "
            "file of weights, or a checkpoint of DeepSpeed without ZeRO): "
            "test or predict with it, or pass load_optimizer_state=False to start a new run on its "
            "weights"
        )
    have, want = _by_name(saved.parameters), _by_name(live.parameters)
    both = [(have[name], parameter) for name, parameter in want.items() if name in have]
    yield from _absent(have, want, wanted)
    yield from _reshaped(both)
    yield from _retyped(both, saved.excluded, _rounds_to(live))
    if wanted.optimizer_state and wanted.strict_optimizer and live.groups:
        yield from _ownership(both)
    lost = left_out_but_trained(saved, live)
    if lost and not _may_lack(want[lost[0]], wanted):
        yield (
            "excluded from the save (exclude_frozen_parameters), but trained here: "
            f"{list_names(lost)}; freeze them, load a checkpoint that contains them, or pass "
            f"{LENIENT_OPTIMIZER} to train them from their current values"
        )
    if wanted.strict:
        yield from _absent_buffers(saved, live)
    if not live.groups or not (wanted.optimizer_state or wanted.hyperparameters):
        return
    if wanted.strict_optimizer:
        yield from _groups(saved, live)
    else:
        yield from group_conflicts(
            saved,
            live,
            state=wanted.optimizer_state,
            hyperparameters=wanted.hyperparameters,
            counter_keys=wanted.counter_keys,
        )


def _absent(
    have: Mapping[str, Parameter], want: Mapping[str, Parameter], wanted: RestoreScope
) -> Iterator[str]:
    """Yield missing and unexpected parameters, and a guess at renamed ones."""
    missing = {n: p for n, p in want.items() if n not in have and not _may_lack(p, wanted)}
    beyond = {n: p for n, p in have.items() if n not in want and not _may_lack(p, wanted)}
    # In an evaluation there is no optimizer, so strict_optimizer does not apply.
    training = any(map(_owned, want.values()))
    for owned, option in ((True, LENIENT_OPTIMIZER), (False, LENIENT)):
        absent, unused = (
            [n for n, p in side.items() if (_owned(p) and training) == owned]
            for side in (missing, beyond)
        )
        if absent:
            yield (
                f"missing from the checkpoint: {list_names(absent)}; pass {option} to "
                f"{'train' if owned else 'leave'} them {'from' if owned else 'at'} their current "
                "values"
            )
        if unused:
            text = f"in the checkpoint, but not in the model: {list_names(unused)}"
            yield f"{text}; pass {option} to ignore them"
    away, new = ({n: p.shape for n, p in side.items()} for side in (beyond, missing))
    yield from perhaps_renamed(away, new, have.keys() & want.keys())


def perhaps_renamed(
    beyond: Mapping[str, object], missing: Mapping[str, object], common: Iterable[str]
) -> Iterator[str]:
    """Yield a suggested ``rename`` if names with equal shapes differ only in a prefix."""
    if renamed := guess_key_mapping(beyond, missing, common):
        yield f"possibly renamed since the save; if so, load with rename={renamed!r}"


def _reshaped(both: Sequence[tuple[Parameter, Parameter]]) -> Iterator[str]:
    changes = [(p.name, was.shape, p.shape) for was, p in both if was.shape != p.shape]
    if changes:
        yield (
            f"different shapes: {_changes(changes)}; configure the saved model. To start resized "
            f"layers from their current values, rename the saved ones, as in "
            f"{_renamed_away(changes[0][0])}, with {LENIENT_OPTIMIZER}; if they are frozen or for "
            f"an evaluation, with {LENIENT}"
        )


def _retyped(
    both: Sequence[tuple[Parameter, Parameter]], left_out: Iterable[str], rounded: Collection[str]
) -> Iterator[str]:
    """Yield parameters whose types cannot be cast, and frozen ones that would lose values."""
    integral, lossy = [], []
    kept = set(left_out)
    for was, p in both:
        change = p.name, was.dtype, p.dtype
        if was.dtype.startswith(_INTEGRAL) != p.dtype.startswith(_INTEGRAL):
            integral.append(change)
        elif p.name not in kept and not _owned(p) and _loses(was.dtype, p.dtype, rounded):
            lossy.append(change)
    if integral:
        yield (
            f"different types, and integers are not cast: {_changes(integral)}; quantized weights "
            "need their scales: save them dequantized"
        )
    if lossy:
        yield f"frozen, and the type cannot represent the saved values: {_changes(lossy)}"


def _ownership(both: Sequence[tuple[Parameter, Parameter]]) -> Iterator[str]:
    frozen = [p.name for was, p in both if _owned(was) and not _owned(p)]
    thawed = [p.name for was, p in both if _owned(p) and not _owned(was)]
    if frozen:
        yield f"trained when saved, frozen here: {list_names(frozen)}; {_OTHER_OWNERS}"
    if thawed:
        yield f"frozen when saved, trained here: {list_names(thawed)}; {_OTHER_OWNERS}"


def _absent_buffers(saved: Manifest, live: Manifest) -> Iterator[str]:
    have, want = set(saved.module_buffers), set(live.module_buffers)
    missing, beyond = sorted(want - have - set(saved.excluded)), sorted(have - want)
    if missing:
        text = f"buffers missing from the checkpoint: {list_names(missing)}"
        yield f"{text}; pass {LENIENT} to leave them at their current values"
    if beyond:
        yield (
            f"buffers in the checkpoint, but not in the model: {list_names(beyond)}; register "
            "those that training creates in a hook of the module "
            f"(register_load_state_dict_pre_hook), or pass {LENIENT} to ignore them"
        )
    yield from perhaps_renamed(dict.fromkeys(beyond), dict.fromkeys(missing), have & want)


def _groups(saved: Manifest, live: Manifest) -> Iterator[str]:
    if len(saved.groups) != len(live.groups):
        yield (
            f"saved with {len(saved.groups)} parameter groups, here are {len(live.groups)}; "
            f"{_OTHER_GROUPS}"
        )
        return
    group_of = {name: index for index, group in enumerate(saved.groups) for name in group.names}
    for index, group in enumerate(live.groups):
        # Parameters in no group on one side are reported as missing, unexpected or frozen.
        moved = [n for n in group.names if group_of.get(n, index) != index]
        if moved:
            was = ", ".join(map(str, sorted({group_of[n] for n in moved})))
            yield (
                f"in parameter group {index} here, in {was} when saved: {list_names(moved)}; "
                f"{_OTHER_GROUPS}"
            )
        if another := other_algorithm([saved.groups[index]], group):
            yield f"parameter group {index} here has members {another}"


def _incompatible_buffers(buffers: Sequence[BufferPair], rounded: Collection[str]) -> Iterator[str]:
    reshaped = [(b.name, b.saved_shape, b.shape) for b in buffers if b.saved_shape != b.shape]
    if reshaped:
        yield (
            f"buffers of different shapes: {_changes(reshaped)}; register them with the saved "
            "shapes, or assign tensors of the saved shapes in a hook of the module "
            "(register_load_state_dict_pre_hook), which gets the saved buffers; or rename the "
            f"saved ones, as in {_renamed_away(reshaped[0][0])}, with {LENIENT}"
        )
    lossy = [
        (b.name, b.saved_dtype, b.dtype)
        for b in buffers
        if b.loses and not _is_rounding(b.saved_dtype, b.dtype, rounded)
    ]
    if lossy:
        yield f"buffers of types that cannot represent the saved values: {_changes(lossy)}"
    shared = [b.name for b in buffers if not b.writable]
    if shared:
        yield (
            "buffers that cannot be written (expanded views, sparse, or on the meta device): "
            f"{list_names(shared)}; register a .clone() of expanded ones"
        )


def rounded_buffers(buffers: Sequence[BufferPair], live: Manifest) -> list[str]:
    """Return the names of the buffers that a load rounds, noting those that become infinite.

    For example, a mask that contains fp32's lowest number becomes -inf in bf16.
    """
    types = _rounds_to(live)
    found = [b for b in buffers if b.loses and _is_rounding(b.saved_dtype, b.dtype, types)]
    return [
        f"{b.name} (values too large for {b.dtype} become infinite)" if b.overflows else b.name
        for b in found
    ]


def _rounds_to(live: Manifest) -> Collection[str]:
    """Return the types to which values may be rounded: the run's; in an evaluation, any."""
    return {LOW_PRECISION.get(live.precision, "")} if live.groups else FLOATING.keys()


def _is_rounding(saved: str, dtype: str, rounded: Collection[str]) -> bool:
    """Whether a cast is the rounding that is applied to weights too."""
    return saved in FLOATING and dtype in rounded


def _loses(saved: str, dtype: str, rounded: Collection[str]) -> bool:
    """Whether a cast loses values in another way than the rounding of weights."""
    if saved == dtype or _is_rounding(saved, dtype, rounded):
        return False
    if saved not in FLOATING or dtype not in FLOATING:
        return True
    return any(has < needs for has, needs in zip(FLOATING[dtype], FLOATING[saved], strict=True))


def _by_name(parameters: Iterable[Parameter]) -> dict[str, Parameter]:
    return {p.name: p for p in parameters}


def _owned(parameter: Parameter) -> bool:
    return parameter.group is not None


def _may_lack(parameter: Parameter, wanted: RestoreScope) -> bool:
    """Whether a load tolerates that one side lacks the parameter."""
    if _owned(parameter) and not wanted.strict_optimizer:
        return True
    return not wanted.strict and not (wanted.optimizer_state and _owned(parameter))


def left_out_but_trained(saved: Manifest, live: Manifest) -> list[str]:
    """Return the parameters that were excluded from the save and are trained here."""
    trained = {p.name for p in live.optimized}
    return [name for name in saved.excluded if name in trained]


def _renamed_away(name: str) -> str:
    """Return a ``rename`` option that moves a parameter's saved layer out of the model."""
    layer = name.rpartition(".")[0] or name
    away = {layer: f"saved.{layer}"}
    return f"rename={away!r}"


def _changes(changes: Iterable[tuple[str, object, object]]) -> str:
    return list_names(f"{name} (saved {saved}, here {here})" for name, saved, here in changes)


def describe_unrestored(saved: Manifest, live: Manifest, wanted: RestoreScope) -> Iterator[str]:
    """Yield the state that a compatible load does not restore, by name."""
    have, want = _by_name(saved.parameters), _by_name(live.parameters)
    left_out = set(saved.excluded)  # on purpose: no difference, unless it is trained here
    kept = [n for n in want if n not in have]
    trained = [n for n in kept if _owned(want[n])] + left_out_but_trained(saved, live)
    if trained:
        yield f"not in the checkpoint, trained from the current values: {list_names(trained)}"
    frozen = [n for n in kept if not _owned(want[n])]
    if frozen:
        yield f"not in the checkpoint, left at the current values: {list_names(frozen)}"
    beyond = [n for n in have if n not in want and n not in left_out]
    if beyond:
        yield f"in the checkpoint, but not in the model: {list_names(beyond)}"
    if live.groups:
        shapes = {n: have[n].shape for n in beyond}, {n: want[n].shape for n in kept}
        yield from perhaps_renamed(*shapes, have.keys() & want.keys())
    if live.groups and wanted.optimizer_state and not wanted.strict_optimizer:
        yield from _describe_other_owners(saved, live)
    held, here = set(saved.module_buffers), set(live.module_buffers)
    if missing := sorted(here - held):
        text = "buffers not in the checkpoint, left at the current values"
        yield f"{text}: {list_names(missing)}"
    if unused := sorted(held - here):
        yield f"buffers in the checkpoint, but not in the model: {list_names(unused)}"


def _describe_other_owners(saved: Manifest, live: Manifest) -> Iterator[str]:
    """Yield the parameters whose optimizer state is fresh or dropped, and groups that changed."""
    want, held = _by_name(live.parameters), {p.name for p in saved.frozen}
    if thawed := [p.name for p in live.optimized if p.name in held]:
        text = "frozen in the checkpoint, trained here with fresh optimizer state"
        yield f"{text}: {list_names(thawed)}"
    frozen = [p.name for p in saved.optimized if p.name in want and not _owned(want[p.name])]
    if frozen:
        text = "trained in the checkpoint, frozen here: optimizer state not restored"
        yield f"{text}: {list_names(frozen)}"
    for index, effect in shared_step_counters(saved, live):
        yield (
            f"new members of parameter group {index} share the restored step count{effect}; "
            f"{OWN_GROUP} to start them at step 0"
        )
    for index, group in enumerate(match_groups(saved, live)):
        if not group.origins:
            yield f"parameter group {index} is new, with the hyperparameters configured here"
        elif group.origins != (index,):
            numbers = ", ".join(map(str, group.origins))
            yield f"parameter group {index} continues with the state of saved group {numbers}"
