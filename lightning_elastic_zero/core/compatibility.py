"""Comparison of a checkpoint with a model: every difference by name, in one error.

State that a compatible load does not restore: allowed, and reported by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_elastic_zero.core.manifest import Manifest, Parameter
from lightning_elastic_zero.core.names import (
    OWN_GROUP,
    group_conflicts,
    guess_key_mapping,
    match_groups,
    other_algorithm,
    shared_step_counters,
)
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import CheckpointMismatchError

_INTEGRAL = ("int", "uint", "bool", "qint", "quint", "bits")
"""How the types begin whose elements are whole numbers or bits, as of quantized weights."""

LISTED = 20
"""What is listed of each kind of difference; the rest is counted."""


list_names = partial(format_names, limit=LISTED)


LOW_PRECISION = {"bf16": "bfloat16", "fp16": "float16"}
"""The type to which a run of each precision rounds its weights."""

FLOATING = {"float64": (11, 52), "float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10)}
"""Bits of exponent and mantissa: what has as many of both holds every value of a type."""


LENIENT_OPTIMIZER = "strict_optimizer=False"
"""How trained parameters may be missing from a checkpoint, or too many in it."""

LENIENT = "strict=False (strict_loading = False in a LightningModule)"
"""How frozen ones and buffers may be missing from a checkpoint, or too many in it."""

_OTHER_OWNERS = (
    f"let requires_grad be what it was before the optimizer is made, or pass {LENIENT_OPTIMIZER}: "
    "all else is restored, and theirs begins anew or is left out; or load_optimizer_state=False: a "
    "fresh optimizer on the saved weights"
)
_OTHER_GROUPS = (
    f"give the optimizer the groups of the save, or pass {LENIENT_OPTIMIZER}: each parameter goes "
    "on with what it had; or load_optimizer_state=False and load_hyperparameters=False: a fresh "
    "optimizer with the groups as they are configured here"
)


@dataclass(frozen=True, slots=True)
class BufferPair:
    """A module buffer as it was saved, beside the model's own of that name."""

    name: str
    saved_shape: tuple[int, ...]
    shape: tuple[int, ...]
    saved_dtype: str
    dtype: str
    loses: bool
    """Whether the model's type cannot hold the values that were saved."""
    overflows: bool = False
    """Whether finite ones among them would become infinite."""
    writable: bool = True
    """False where the model's buffer is an expanded view, or on the meta device."""


@dataclass(frozen=True, slots=True)
class RestoreScope:
    """What a load wants of a checkpoint."""

    optimizer_state: bool
    """The optimizer's state, and so groups with the same members."""
    hyperparameters: bool = True
    """Each group's hyperparameters: the same number of groups."""
    lr_scheduler: bool = True
    """The state of the scheduler that the engine steps, also where there are no hyperparameters."""
    strict: bool = True
    """False (Lightning's ``strict_loading``): frozen parameters and buffers that the checkpoint
    lacks stay as they are, and what it has beyond the model is left out. Without optimizer state
    that holds of trained parameters too."""
    strict_optimizer: bool = True
    """False: other parameters may be trained here than there, and in other groups. Those that the
    checkpoint lacks stay as they are, those of which it has no state begin with a fresh one, and
    what it has beyond is left out."""


def check_compatible(
    saved: Manifest,
    live: Manifest,
    wanted: RestoreScope,
    where: str,
    buffers: Sequence[BufferPair] = (),
) -> None:
    """Compare a checkpoint with a live engine before anything is changed.

    Args:
        saved: the checkpoint's manifest.
        live: what the engine says of itself.
        wanted: what is to be restored.
        where: the checkpoint's path, for the message.
        buffers: the module buffers that both have.

    Raises:
        CheckpointMismatchError: with all differences, by name.
    """
    differences = [
        *_differences(saved, live, wanted),
        *_incompatible_buffers(buffers, _rounds_to(live)),
    ]
    if not differences:
        return
    listed = "\n".join(f"  - {difference}" for difference in differences)
    msg = (
        f"{where} does not fit this model.\n"
        f"Saved: {describe(saved)}\nHere: {describe(live)}\n{listed}"
    )
    raise CheckpointMismatchError(msg)


def describe(manifest: Manifest) -> str:
    """Return one line about a checkpoint, or a live engine."""
    numel = sum(p.numel for p in manifest.parameters)
    devices = f"{manifest.world_size} device{'s' if manifest.world_size > 1 else ''}"
    has_run = bool(manifest.writer.engine)
    parts = [
        # An evaluation, or a checkpoint of whole tensors: how many devices wrote it is not known.
        f"ZeRO-{manifest.stage} on {devices}" if manifest.stage or has_run else "no ZeRO",
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
    """Yield each kind of difference."""
    if wanted.optimizer_state and saved.weights_only:
        yield (
            "it holds no optimizer state (it was saved with save_weights_only=True, or is a file "
            "of weights): test or predict with it, or pass load_optimizer_state=False to start a "
            "new run on its weights"
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
            "left out when saved (exclude_frozen_parameters), but trained here: "
            f"{list_names(lost)}; freeze them here too, or load a checkpoint that holds them, or "
            f"train the model's own from where they are: {LENIENT_OPTIMIZER}"
        )
    if wanted.strict:
        yield from _absent_buffers(saved, live)
    if not live.groups or not (wanted.optimizer_state or wanted.hyperparameters):
        return
    if wanted.strict_optimizer:
        yield from _groups(saved, live)
    else:
        yield from group_conflicts(
            saved, live, state=wanted.optimizer_state, hyperparameters=wanted.hyperparameters
        )


def _absent(
    have: Mapping[str, Parameter], want: Mapping[str, Parameter], wanted: RestoreScope
) -> Iterator[str]:
    """Yield what one side has and the other has not, and what may have been renamed."""
    missing = {n: p for n, p in want.items() if n not in have and not _may_lack(p, wanted)}
    beyond = {n: p for n, p in have.items() if n not in want and not _may_lack(p, wanted)}
    # Only a run that trains has an optimizer to be lenient about.
    training = any(map(_owned, want.values()))
    for owned, option in ((True, LENIENT_OPTIMIZER), (False, LENIENT)):
        absent, unused = (
            [n for n, p in side.items() if (_owned(p) and training) == owned]
            for side in (missing, beyond)
        )
        if absent:
            stay = "would start new ones as they are" if owned else "would leave them as they are"
            yield f"missing from the checkpoint: {list_names(absent)}; {option} {stay}"
        if unused:
            text = f"in the checkpoint, but not in the model: {list_names(unused)}"
            yield f"{text}; {option} would leave them out"
    away, new = ({n: p.shape for n, p in side.items()} for side in (beyond, missing))
    yield from perhaps_renamed(away, new, have.keys() & want.keys())


def perhaps_renamed(
    beyond: Mapping[str, object], missing: Mapping[str, object], common: Iterable[str]
) -> Iterator[str]:
    """Suggest what may have been renamed, of names with their shapes if they have any."""
    if renamed := guess_key_mapping(beyond, missing, common):
        yield f"perhaps renamed since the save; if so, load with rename={renamed!r}"


def _reshaped(both: Sequence[tuple[Parameter, Parameter]]) -> Iterator[str]:
    """Yield parameters of other shapes: each as it was saved, and as it is here."""
    changes = [(p.name, was.shape, p.shape) for was, p in both if was.shape != p.shape]
    if changes:
        yield (
            f"of other shapes: {_changes(changes)}; configure the model that was saved. To start "
            f"layers of a new size as they are here, rename the saved ones away, as by "
            f"{_renamed_away(changes[0][0])}, with {LENIENT_OPTIMIZER}; frozen ones, and to "
            f"evaluate: {LENIENT}"
        )


def _retyped(
    both: Sequence[tuple[Parameter, Parameter]], left_out: Iterable[str], rounded: Collection[str]
) -> Iterator[str]:
    """Yield parameters of types that are not cast, or that lose what frozen ones held."""
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
            f"of other types, and integers are not cast: {_changes(integral)}; quantized "
            "weights have scales beside them: save them dequantized"
        )
    if lossy:
        yield f"frozen, of types that cannot hold what was saved: {_changes(lossy)}"


def _ownership(both: Sequence[tuple[Parameter, Parameter]]) -> Iterator[str]:
    """Yield parameters that are trained on one side and frozen on the other."""
    frozen = [p.name for was, p in both if _owned(was) and not _owned(p)]
    thawed = [p.name for was, p in both if _owned(p) and not _owned(was)]
    if frozen:
        yield f"trained when saved, frozen here: {list_names(frozen)}; {_OTHER_OWNERS}"
    if thawed:
        yield f"frozen when saved, trained here: {list_names(thawed)}; {_OTHER_OWNERS}"


def _absent_buffers(saved: Manifest, live: Manifest) -> Iterator[str]:
    """Yield missing and unexpected module buffers."""
    have, want = set(saved.module_buffers), set(live.module_buffers)
    missing, beyond = sorted(want - have - set(saved.excluded)), sorted(have - want)
    if missing:
        text = f"buffers missing from the checkpoint: {list_names(missing)}"
        yield f"{text}; {LENIENT} would leave them as they are"
    if beyond:
        text = f"buffers in the checkpoint, but not in the model: {list_names(beyond)}"
        yield f"{text}; {LENIENT} would leave them out"
    yield from perhaps_renamed(dict.fromkeys(beyond), dict.fromkeys(missing), have & want)


def _groups(saved: Manifest, live: Manifest) -> Iterator[str]:
    """Yield differences in the number and the membership of parameter groups."""
    if len(saved.groups) != len(live.groups):
        yield (
            f"saved with {len(saved.groups)} parameter groups, here are {len(live.groups)}; "
            f"{_OTHER_GROUPS}"
        )
        return
    group_of = {name: index for index, group in enumerate(saved.groups) for name in group.names}
    for index, group in enumerate(live.groups):
        # What is in no group on one side is told of elsewhere: missing, unexpected, frozen.
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
    """Yield the module buffers that cannot take what was saved."""
    reshaped = [(b.name, b.saved_shape, b.shape) for b in buffers if b.saved_shape != b.shape]
    if reshaped:
        yield (
            f"buffers of other shapes: {_changes(reshaped)}; register them with the shapes that "
            "were saved, or rename the saved ones away, as by "
            f"{_renamed_away(reshaped[0][0])}, with {LENIENT}"
        )
    lossy = [
        (b.name, b.saved_dtype, b.dtype)
        for b in buffers
        if b.loses and not _is_rounding(b.saved_dtype, b.dtype, rounded)
    ]
    if lossy:
        yield f"buffers of types that cannot hold what was saved: {_changes(lossy)}"
    shared = [b.name for b in buffers if not b.writable]
    if shared:
        yield (
            "buffers that cannot be written (expanded views, sparse, or on the meta device): "
            f"{list_names(shared)}; .clone() expanded ones where they are registered"
        )


def rounded_buffers(buffers: Sequence[BufferPair], live: Manifest) -> list[str]:
    """Return the buffers that a load rounds, as it does with weights: names, and what is infinite.

    A mask of the lowest number of fp32 is -inf in a run in bf16, whoever casts it.
    """
    types = _rounds_to(live)
    found = [b for b in buffers if b.loses and _is_rounding(b.saved_dtype, b.dtype, types)]
    return [
        f"{b.name} (numbers too large for {b.dtype} become infinite)" if b.overflows else b.name
        for b in found
    ]


def _rounds_to(live: Manifest) -> Collection[str]:
    """Return the types to which values may be rounded: the run's own; in an evaluation, any."""
    return {LOW_PRECISION.get(live.precision, "")} if live.groups else FLOATING.keys()


def _is_rounding(saved: str, dtype: str, rounded: Collection[str]) -> bool:
    """Whether a cast is the rounding that weights undergo too."""
    return saved in FLOATING and dtype in rounded


def _loses(saved: str, dtype: str, rounded: Collection[str]) -> bool:
    """Whether a cast loses values, other than by the rounding that weights undergo too."""
    if saved == dtype or _is_rounding(saved, dtype, rounded):
        return False
    if saved not in FLOATING or dtype not in FLOATING:
        return True
    return any(has < needs for has, needs in zip(FLOATING[dtype], FLOATING[saved], strict=True))


def _by_name(parameters: Iterable[Parameter]) -> dict[str, Parameter]:
    return {p.name: p for p in parameters}


def _owned(parameter: Parameter) -> bool:
    """Whether the optimizer owns it."""
    return parameter.group is not None


def _may_lack(parameter: Parameter, wanted: RestoreScope) -> bool:
    """Whether a load may go on without a parameter, on either side."""
    if _owned(parameter) and not wanted.strict_optimizer:
        return True
    return not wanted.strict and not (wanted.optimizer_state and _owned(parameter))


def left_out_but_trained(saved: Manifest, live: Manifest) -> list[str]:
    """Return what was left out of the checkpoint on purpose and is trained here."""
    trained = {p.name for p in live.optimized}
    return [name for name in saved.excluded if name in trained]


def _renamed_away(name: str) -> str:
    """Return the option that takes a parameter's layer, as saved, out of the model's names."""
    layer = name.rpartition(".")[0] or name
    away = {layer: f"saved.{layer}"}
    return f"rename={away!r}"


def _changes(changes: Iterable[tuple[str, object, object]]) -> str:
    """List names with what was saved of each, and what is here."""
    return list_names(f"{name} (saved {saved}, here {here})" for name, saved, here in changes)


def describe_unrestored(saved: Manifest, live: Manifest, wanted: RestoreScope) -> Iterator[str]:
    """Yield what a load that fits goes on without, by name: it is told, since it is allowed."""
    have, want = ({p.name: p for p in m.parameters} for m in (saved, live))
    left_out = set(saved.excluded)
    kept = [n for n in want if n not in have]
    trained = [n for n in kept if want[n].group is not None] + left_out_but_trained(saved, live)
    if trained:
        yield f"not in the checkpoint, and trained from what they are here: {list_names(trained)}"
    gone = left_out.union(kept).difference(trained)
    frozen = [n for n in want if n in gone and want[n].group is None]
    if frozen:
        yield f"not in the checkpoint, and left as they are here: {list_names(frozen)}"
    beyond = [n for n in have if n not in want and n not in left_out]
    if beyond:
        yield f"in the checkpoint, and not in the model: {list_names(beyond)}"
    if live.groups:
        shapes = {n: have[n].shape for n in beyond}, {n: want[n].shape for n in kept}
        yield from perhaps_renamed(*shapes, have.keys() & want.keys())
    if live.groups and wanted.optimizer_state and not wanted.strict_optimizer:
        yield from _describe_other_owners(saved, live)
    buffers = set(live.module_buffers) - set(saved.module_buffers)
    if buffers:
        text = "buffers that are not in the checkpoint, left as they are here"
        yield f"{text}: {list_names(buffers)}"


def _describe_other_owners(saved: Manifest, live: Manifest) -> Iterator[str]:
    """Yield whose optimizer state begins anew, whose is left out, and what groups go on with."""
    want = {p.name: p for p in live.parameters}
    held = {p.name for p in saved.frozen}
    if thawed := [p.name for p in live.optimized if p.name in held]:
        text = "frozen when saved, and trained here with fresh optimizer state"
        yield f"{text}: {list_names(thawed)}"
    frozen = [p.name for p in saved.optimized if p.name in want and want[p.name].group is None]
    if frozen:
        text = "trained when saved, and frozen here, without optimizer state"
        yield f"{text}: {list_names(frozen)}"
    for index, effect in shared_step_counters(saved, live):
        yield (
            f"what begins anew in parameter group {index} has the count of steps of what is "
            f"restored there{effect}; {OWN_GROUP} to have it begin at step 0"
        )
    for index, group in enumerate(match_groups(saved, live)):
        if not group.origins:
            yield f"parameter group {index} is new, with the hyperparameters configured here"
        elif group.origins != (index,):
            numbers = ", ".join(map(str, group.origins))
            yield f"parameter group {index} goes on with what group {numbers} was saved with"
