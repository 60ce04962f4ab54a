"""The state of a run, determined without this library and without arithmetic on offsets.

A twin engine of the same configuration is built from parameters whose elements all have different
values. The twin's raw flat buffers then show which element is at which position on which rank. The
same positions of a real engine's buffers contain that element's master weight and optimizer
states. The values are bf16 numbers, which bf16 weights and fp32 masters represent exactly. Padding
is NaN, because torch fills uninitialised memory of ranks.

`write_state` is the inverse: it writes a dump into an engine's raw buffers through the same map.
`compare_with_reference` trains such an engine for comparison with a resumed run. CPUs sum in
different orders, so a continuation can only be compared with one computed on the same machine.

This module must not import ``lightning_elastic_zero``.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import distributed

from tests.support.engines import (
    BUFFERS,
    Engine,
    EngineCase,
    engine_of,
    grad_scaler_of,
    inner_of,
    train,
    trained,
)

Dump: TypeAlias = "dict[str, Any]"
"""Keys are ``kind/...``; values are tensors, or the ``repr`` of other values."""

FIRST_CODE = 128
"""The bits of the smallest normal bf16 number, to avoid zeros and denormals."""

PADDING = -1

_maps: dict[EngineCase, list[torch.Tensor]] = {}


class OracleError(Exception):
    """The engine's state is inconsistent: the library damaged it, or the oracle is wrong."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise OracleError(message)


# -- positions of elements --------------------------------------------------------------------


def flat_buffers(engine: Engine, setup: EngineCase) -> list[torch.Tensor]:
    """Return this rank's raw master buffers; in stage 0 each optimized tensor is one."""
    if setup.zero == "3":
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    stepped = [p for group in inner_of(engine).param_groups for p in group["params"]]
    if _is_replicated(engine, setup):
        return [p for p in stepped if p.requires_grad and p.numel()]
    return stepped


def _is_replicated(engine: Engine, setup: EngineCase) -> bool:
    """Return whether each rank has the full state.

    This is so in stage 0 (except bf16 before DeepSpeed 0.18), and for ``B`` in 0.18.4.
    """
    kind = type(engine.optimizer).__name__
    return kind.startswith("FP16_") or (setup.zero == "0" and kind != "BF16_Optimizer")


def positions(setup: EngineCase) -> list[torch.Tensor]:
    """Return the element number at each position of this rank's flat buffers. Collective."""
    twin = setup.twin()
    if twin not in _maps:
        model = twin.model(0)
        at = FIRST_CODE
        for parameter in trained(model).values():
            codes = torch.arange(at, at + parameter.numel()).to(torch.int16)
            parameter.data = codes.view(torch.bfloat16).float().view(parameter.shape)
            at += parameter.numel()
        # With learning rate 0, because DeepSpeed's stage 0 wrapper steps in bf16 when it is built.
        with engine_of(twin, 0, tilt=0.0, model=model) as engine:
            flats = [_decode(_on_host(flat).flatten(), at) for flat in flat_buffers(engine, twin)]
            copies = setup.world if _is_replicated(engine, twin) else 1
        _check_tiling(flats, at - FIRST_CODE, copies)
        _maps[twin] = flats
    return _maps[twin]


def _decode(flat: torch.Tensor, end: int) -> torch.Tensor:
    short = flat.to(torch.bfloat16)
    codes = short.view(torch.int16).long()
    known = (short.to(flat.dtype) == flat) & (codes >= FIRST_CODE) & (codes < end)
    return torch.where(known, codes - FIRST_CODE, PADDING)


def _check_tiling(flats: list[torch.Tensor], numel: int, copies: int) -> None:
    from deepspeed.accelerator import get_accelerator

    counts = torch.zeros(numel, dtype=torch.long)
    for flat in flats:
        counts += torch.bincount(flat[flat != PADDING], minlength=numel)
    # NCCL only accepts tensors on the device.
    counts = counts.to(get_accelerator().current_device_name())
    distributed.all_reduce(counts)
    wrong = counts != copies
    require(not wrong.any(), f"{int(wrong.sum())} elements are not at {copies} positions")


# -- the state of one rank --------------------------------------------------------------------


def held_values(engine: Engine, setup: EngineCase) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Return host copies of each flat buffer's masters and states, swapped in if necessary."""
    optimizer, found = engine.optimizer, []
    for index, flat in enumerate(flat_buffers(engine, setup)):
        inner, swapped = inner_of(engine), False
        if setup.zero == "3":
            swapped = optimizer._swappable_optimizer_subgroup(index)
            if setup.ratio < 1 and optimizer.subgroup_to_device[index] != "cpu":
                inner = optimizer.backup_optimizer
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(index)
        states = {
            key: _on_host(value) if isinstance(value, torch.Tensor) else value
            for key, value in inner.state.get(flat, {}).items()
        }
        if inner is not inner_of(engine) and states:
            states["step"] = int(states["step"])  # As CPUAdam counts.
        found.append((_on_host(flat), states))
        if swapped:
            optimizer._release_swap_buffers(index)
    if setup.optimizer == "FusedAdam" and len(found) > len(inner_of(engine).param_groups):
        _count_by_group(engine, setup, [states for _, states in found])
    return found


def _count_by_group(engine: Engine, setup: EngineCase, found: list[dict[str, Any]]) -> None:
    """Set all steps of a group to the last one, which FusedAdam uses in stage 0."""
    group_of = {
        id(parameter): group
        for group in inner_of(engine).param_groups
        for parameter in group["params"]
    }
    last: dict[int, dict[str, Any]] = {}
    for flat, states in zip(flat_buffers(engine, setup), found, strict=True):
        if setup.zero == "0" and states:
            last[id(group_of[id(flat)])] = states
    for flat, states in zip(flat_buffers(engine, setup), found, strict=True):
        if setup.zero == "0" and states:
            states["step"] = last[id(group_of[id(flat)])]["step"]


def split_full_momenta(engine: Engine, setup: EngineCase, piece: dict[str, Any]) -> None:
    """Convert Muon's momenta of full parameters (ZeRO-1/2) to element-wise states.

    The momenta are kept for the comparison between ranks.
    """
    names = {p: name for name, p in trained(engine.module).items()}
    numels = {name: p.numel() for name, p in trained(setup.model(0)).items()}
    piece["momenta"] = {}
    for group, state in enumerate(piece["states"]):
        if setup.optimizer == "Muon" and group == 0 and setup.zero in "12" and not setup.offload:
            at, whole = 0, state.pop("momentum_buffer", torch.empty(0))
            everything = torch.zeros(sum(numels.values()), dtype=whole.dtype)
            for parameter in engine.optimizer.params_in_partition[group] if len(whole) else ():
                name, numel = names[parameter], parameter.numel()
                piece["momenta"][name] = whole[at : at + numel]
                first = sum(list(numels.values())[: list(numels).index(name)])
                everything[first : first + numel] = piece["momenta"][name]
                at += numel
            places = piece["places"][group]
            if len(whole):
                state["momentum_buffer"] = everything[places.clamp(min=0)] * (places != PADDING)


def _piece(engine: Engine, setup: EngineCase) -> dict[str, Any]:
    inner = inner_of(engine)
    held = held_values(engine, setup)
    scaler, grad_scaler = scaler_of(engine), grad_scaler_of(engine)
    buffers = dict(engine.module.named_buffers())
    return {
        "places": positions(setup),
        "masters": [values.flatten() for values, _ in held],
        "states": [_flat_states(states, values) for values, states in held],
        "groups": [
            {k: repr(v) for k, v in group.items() if k != "params"} for group in inner.param_groups
        ],
        "weights": _weights(engine, setup),
        "buffers": {name: _on_host(buffers[name]) for name in setup.buffers_kept},
        "counters": {
            name: getattr(engine, name)
            for name in ("global_steps", "global_samples", "skipped_steps")
        },
        "scaler": {k: repr(v) for k, v in sorted(vars(scaler).items())} if scaler else {},
        "grad_scaler": repr(grad_scaler.state_dict()) if grad_scaler else "",
    }


def scaler_of(engine: Engine) -> Engine:
    return getattr(engine.optimizer, "loss_scaler", None) or getattr(
        engine.optimizer, "loss_scale_config", None
    )


def _flat_states(states: dict[str, Any], flat: torch.Tensor) -> dict[str, Any]:
    return {
        key: value.flatten() if _is_vector(value) and value.shape == flat.shape else value
        for key, value in states.items()
    }


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _weights(engine: Engine, setup: EngineCase) -> dict[str, torch.Tensor]:
    """Return the full module weights; in ZeRO-3, check that gathered weights are not stale."""
    parameters = dict(engine.module.named_parameters())
    if setup.zero != "3":
        return {name: _on_host(p) for name, p in parameters.items()}
    import deepspeed

    found: list[dict[str, torch.Tensor]] = []
    # Persistent parameters are gathered already. Leaving the context partitions them, so that the
    # second pass gathers them anew.
    for _ in range(2):
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            found.append({name: _on_host(p) for name, p in parameters.items()})
    stale = [n for n in parameters if not torch.equal(found[0][n], found[1][n])]
    require(not stale, f"stale gathered parameters: {stale}")
    return found[1]


# -- the state of all ranks -----------------------------------------------------------------------


def dump(engine: Engine, setup: EngineCase) -> Dump | None:
    """Return the full state that a checkpoint must preserve, on rank 0. Collective."""
    piece = _piece(engine, setup)
    split_full_momenta(engine, setup, piece)
    pieces: list[Any] | None = [None] * setup.world if distributed.get_rank() == 0 else None
    distributed.gather_object(piece, pieces)
    if pieces is None:
        return None
    names = list(trained(setup.model(0)))
    numels = [p.numel() for p in trained(setup.model(0)).values()]
    shapes = {n: w.shape for n, w in pieces[0]["weights"].items()}
    starts = [sum(numels[:i]) for i in range(len(numels))]
    whole: Dump = {}
    for kind, flat in _elementwise(pieces, sum(numels)).items():
        for name, start, numel in zip(names, starts, numels, strict=True):
            values, covered = (t[start : start + numel] for t in flat)
            if numel and bool(covered.any()):
                require(covered.all(), f"{kind} of {name} is incomplete")
                whole[f"{kind}/{name}"] = values.view(shapes[name])
    for name, momentum in ((n, m) for p in pieces for n, m in p["momenta"].items()):
        same = same_bits(momentum, whole[f"momentum_buffer/{name}"].flatten())
        require(same, f"ranks differ in the momentum of {name}")
    whole.update(_scalars(pieces, names, starts))
    whole.update(_once(pieces, names))
    return whole


def _elementwise(
    pieces: list[dict[str, Any]], numel: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Merge masters and element-wise states of all ranks; return each with a coverage mask."""
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for piece in pieces:
        for places, master, state in zip(
            piece["places"], piece["masters"], piece["states"], strict=True
        ):
            here = places != PADDING
            tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.ndim}
            for key, tensor in {"master": master, **tensors}.items():
                if key not in found:
                    whole = torch.zeros(numel, dtype=tensor.dtype)
                    found[key] = (whole, torch.zeros(numel, dtype=torch.bool))
                require(tensor.shape == master.shape, f"{key} is not element-wise")
                again = places[here][found[key][1][places[here]]]
                if len(again):  # In stage 0 each rank has all elements.
                    known = found[key][0][places[here]]
                    require(same_bits(known, tensor[here]), f"{key} differs between ranks")
                found[key][0][places[here]] = tensor[here]
                found[key][1][places[here]] = True
    return found


def _scalars(pieces: list[dict[str, Any]], names: list[str], starts: list[int]) -> Dump:
    """Return each parameter's scalar states, on which all ranks must agree."""
    found: Dump = {}
    begins = torch.tensor(starts)
    for index in range(len(pieces[0]["masters"])):
        states = [
            {k: repr(v) for k, v in p["states"][index].items() if not _is_vector(v)} for p in pieces
        ]
        require(all(s == states[0] for s in states), f"scalars of buffer {index} differ: {states}")
        for piece in pieces:
            places = piece["places"][index]
            owners = torch.bucketize(places[places != PADDING], begins, right=True) - 1
            for owner in set(owners.tolist()):
                found.update({f"scalar/{k}/{names[owner]}": v for k, v in states[0].items()})
    return found


def _is_vector(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _once(pieces: list[dict[str, Any]], names: list[str]) -> Dump:
    """Return the state that each rank has in full: weights, buffers, groups, counters."""
    found: Dump = {}
    for kind in ("groups", "counters", "scaler", "grad_scaler"):
        require(all(p[kind] == pieces[0][kind] for p in pieces), f"{kind} differ between ranks")
    for name, weight in pieces[0]["weights"].items():
        same = all(same_bits(p["weights"][name], weight) for p in pieces)
        require(same, f"{name} differs between ranks")
        found[f"{'weight' if name in names else 'frozen'}/{name}"] = weight
    for index, group in enumerate(pieces[0]["groups"]):
        found.update({f"group/{index}/{key}": value for key, value in group.items()})
    found.update({f"counter/{k}": repr(v) for k, v in pieces[0]["counters"].items()})
    found.update({f"scaler/{k}": v for k, v in pieces[0]["scaler"].items()})
    if pieces[0]["grad_scaler"]:
        found["scaler/grad_scaler"] = pieces[0]["grad_scaler"]
    for rank, piece in enumerate(pieces):
        found.update({f"buffer/{rank}/{name}": t for name, t in piece["buffers"].items()})
    return found


# -- comparing --------------------------------------------------------------------------------


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are bitwise equal: NaN equals itself, -0 does not equal 0."""
    return one.dtype == other.dtype and one.shape == other.shape and differing_bits(one, other) == 0


def differing_bits(one: torch.Tensor, other: torch.Tensor) -> int:
    ones, others = (t.contiguous().flatten().view(torch.uint8) for t in (one, other))
    counts = Counter((ones ^ others).tolist())
    return sum(value.bit_count() * count for value, count in counts.items())


def unrounded(found: Dump) -> list[str]:
    weights = {k.removeprefix("weight/"): v for k, v in found.items() if k.startswith("weight/")}
    return [
        name
        for name, weight in weights.items()
        if weight.numel() and not same_bits(found[f"master/{name}"].to(weight.dtype), weight)
    ]


def expected_in(saved: Dump, source: EngineCase, target: EngineCase) -> Dump:
    """Return the state that a run of the target setup must have after loading a saved one."""
    wanted: Dump = {}
    for key, value in saved.items():
        kind, _, name = key.partition("/")
        if kind == "weight" and value.numel():
            master = saved[f"master/{name}"].to(target.master_dtype)
            wanted[key] = master.to(target.dtype)
        elif kind in ("weight", "frozen"):
            wanted[key] = value.to(target.dtype)
        elif kind != "buffer":
            dtype = target.master_dtype if kind == "master" else target.dtype_of_state(kind)
            wanted[key] = value.to(dtype) if isinstance(value, torch.Tensor) else value
    for rank in range(target.world):
        own = rank if source.world == target.world else 0
        for name in target.buffers_kept:
            wanted[f"buffer/{rank}/{name}"] = saved[f"buffer/{own}/{name}"]
    return wanted


def differences(wanted: Dump, found: Dump) -> dict[str, int]:
    """Return the number of differing bits of each entry; -1 where bits cannot be counted."""
    differing = dict.fromkeys(wanted.keys() ^ found.keys(), -1)
    for key in wanted.keys() & found.keys():
        one, other = wanted[key], found[key]
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            differing.update({key: -1} if one != other else {})
        elif one.dtype != other.dtype or one.shape != other.shape:
            differing[key] = -1
        elif bits := differing_bits(one, other):
            differing[key] = bits
    return differing


def tensors_in(found: Dump) -> int:
    return sum(isinstance(value, torch.Tensor) for value in found.values())


KERNEL_OPTIONS = ("foreach", "fused")
"""Hyperparameters that select kernels; a load keeps those of the live run."""

NO_STATES = {"master", "weight", "frozen", "buffer", "group", "counter", "scaler", "scalar"}
"""Kinds of entries that are not element-wise states of the optimizer."""


def write_state(engine: Engine, setup: EngineCase, held: Dump, *, states: bool = True) -> None:
    """Write a dump into an engine, optionally without optimizer states. Collective."""
    names = list(trained(setup.model(0)))
    with torch.no_grad():
        _write_flats(engine, setup, held, names, states=states)
        _write_weights(engine, setup, held)
        buffers = dict(engine.module.named_buffers())
        for name in BUFFERS:
            # With the saved dtype: Lightning casts buffers to bf16, DeepSpeed does not.
            buffers[name].data = held[f"buffer/{distributed.get_rank()}/{name}"].clone()
    for key, value in held.items():
        kind, _, rest = key.partition("/")
        if kind == "group":
            _write_hyperparameter(engine, rest, value)
        elif kind == "counter":
            setattr(engine, rest, parsed(value))


def parsed(text: str) -> Any:
    if text.startswith("tensor("):
        return torch.tensor(ast.literal_eval(text.removeprefix("tensor(").removesuffix(")")))
    return ast.literal_eval(text)


def _write_flats(
    engine: Engine, setup: EngineCase, held: Dump, names: list[str], *, states: bool
) -> None:
    inner = inner_of(engine)
    masters = _whole(held, "master", setup)
    kinds = {key.partition("/")[0] for key in held} - NO_STATES
    vectors = {kind: _whole(held, kind, setup) for kind in sorted(kinds)} if states else {}
    scalars = _writable_scalars(held, names) if states else {}
    for flat, places in zip(flat_buffers(engine, setup), positions(setup), strict=True):
        here = places != PADDING
        flat.data.view(-1)[here] = masters[places[here]].to(flat.dtype)
        if states:
            inner.state[flat].clear()  # A dump from before the first step has no states.
        for kind, vector in vectors.items():
            tensor = torch.zeros_like(flat.data, dtype=vector.dtype)
            tensor.view(-1)[here] = vector[places[here]]
            inner.state[flat][kind] = tensor
        for name, value in scalars.items():
            inner.state[flat][name] = value.clone() if isinstance(value, torch.Tensor) else value


def _whole(held: Dump, kind: str, setup: EngineCase) -> torch.Tensor:
    pieces = []
    for name, parameter in trained(setup.model(0)).items():
        found = held.get(f"{kind}/{name}", torch.zeros(parameter.shape))
        pieces.append(found.flatten())
    return torch.cat(pieces)


def _writable_scalars(held: Dump, names: list[str]) -> dict[str, Any]:
    """Return the scalar states, which must be equal for all parameters."""
    found: dict[str, str] = {}
    for key, value in held.items():
        kind, _, rest = key.partition("/")
        if kind == "scalar":
            name, _, parameter = rest.partition("/")
            require(parameter in names, f"{parameter} is not trained")
            require(found.setdefault(name, value) == value, f"{name} differs between parameters")
    return {name: parsed(value) for name, value in found.items()}


def _write_weights(engine: Engine, setup: EngineCase, held: Dump) -> None:
    parameters = dict(engine.module.named_parameters())
    trainable = trained(setup.model(0))
    wanted = {n: held[f"{'weight' if n in trainable else 'frozen'}/{n}"] for n in parameters}
    if setup.zero != "3":
        for name, parameter in parameters.items():
            parameter.data.copy_(wanted[name])
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(parameters.values()), modifier_rank=0):
        for name, parameter in parameters.items():
            parameter.data.copy_(wanted[name])


def _write_hyperparameter(engine: Engine, path: str, value: str) -> None:
    index, _, key = path.partition("/")
    if key not in KERNEL_OPTIONS:
        inner_of(engine).param_groups[int(index)][key] = parsed(value)


MORE = 2
"""Default number of steps that both runs train."""

Losses = list[list[float]]
"""The losses of each rank."""

TrainOn = Callable[[Engine, EngineCase, int, int], list[float]]
"""Trains steps ``[first, last)`` and returns this rank's losses."""


@dataclass(frozen=True)
class ReferenceComparison:
    """A resumed run compared with a reference run, into which the oracle wrote the saved state."""

    lacking: dict[str, int]
    """Entries that the reference run did not have after the write; must be empty."""
    losses: tuple[Losses, Losses]
    """Of the resumed run and of the reference run."""
    differing: dict[str, int]
    """Differing bits of the final states."""
    unlike: dict[str, int]
    """Differing bits of the final states if the reference run has a fresh optimizer."""

    def assert_same(self, *, stateless: bool = False) -> None:
        """Fail unless both are equal; ``stateless``: the saved optimizer had no state yet."""
        assert not self.lacking
        resumed, other = self.losses
        assert all(resumed)
        assert resumed == other
        assert not self.differing
        masters = [key for key in self.unlike if key.startswith("master/")]
        assert bool(masters) != stateless, "the negative control"


def compare_with_reference(
    setup: EngineCase,
    first: int,
    wanted: Dump | None,
    resumed: tuple[list[float], Dump | None],
    train_on: TrainOn = train,
    *,
    steps: int = MORE,
) -> ReferenceComparison | None:
    """Write the saved state into a reference run, train it, and compare. Collective.

    Args:
        setup: of both runs.
        first: the step of the saved run.
        wanted: the dump of the saved run, on rank 0.
        resumed: this rank's losses of the resumed run, and its final dump, on rank 0.
        train_on: trains an engine as the resumed run was trained.
        steps: number of steps that the resumed run was trained.
    """
    shared = [wanted]
    distributed.broadcast_object_list(shared, 0)
    held = shared[0]
    assert held is not None
    ends: list[Dump | None] = []
    with engine_of(setup, 11, tilt=3.0) as engine:
        for states in (False, True):  # First with a fresh optimizer.
            write_state(engine, setup, held, states=states)
            found = dump(engine, setup)
            losses = train_on(engine, setup, first, first + steps)
            ends.append(dump(engine, setup))
    everyone: list[Any] = [None] * setup.world
    distributed.all_gather_object(everyone, (resumed[0], losses))
    without, other = ends
    if wanted is None or found is None or without is None or other is None or resumed[1] is None:
        return None
    return ReferenceComparison(
        lacking=restored_differences(wanted, found),
        losses=([own for own, _ in everyone], [own for _, own in everyone]),
        differing=differences(resumed[1], other),
        unlike=differences(without, other),
    )


def restored_differences(wanted: Dump, found: Dump) -> dict[str, int]:
    return {
        key: bits
        for key, bits in differences(wanted, found).items()
        if not (key.startswith("group/") and key.endswith(KERNEL_OPTIONS))
        and not key.startswith("scaler/")  # BF16_Optimizer has none; the others are equal.
    }
