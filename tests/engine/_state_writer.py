"""Puts a state into an engine by hand: the inverse of the oracle.

What a dump says is written into the raw flat buffers, through the same map of elements by which
the oracle reads them. So a run can be made to hold what another one held, without a checkpoint and
without the library that is tested; what both compute from there on is computed here, twice.

Nothing here may import ``lightning_elastic_zero``.
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import distributed

from tests.engine._model import BUFFERS, trained
from tests.engine._oracle import PADDING, Dump, flat_buffers, positions, require
from tests.engine._setup import Engine, Setup, inner_of

KERNEL_OPTIONS = ("foreach", "fused")
"""Hyperparameters that are the live run's own: they choose kernels, and are not restored."""

NO_STATES = {"master", "weight", "frozen", "buffer", "group", "counter", "scaler", "scalar"}
"""Kinds of entries that are not element-wise states of the optimizer."""


def write_state(engine: Engine, setup: Setup, held: Dump, *, states: bool = True) -> None:
    """Make an engine hold what a dump says. Collective; each rank has the whole dump.

    Args:
        engine: any that was made of ``setup``.
        setup: of the engine.
        held: as the oracle gives it.
        states: with the optimizer's states; without them they stay what they are.
    """
    names = list(trained(setup.model(0)))
    with torch.no_grad():
        _write_flats(engine, setup, held, names, states=states)
        _write_weights(engine, setup, held)
        buffers = dict(engine.module.named_buffers())
        for name in BUFFERS:
            # With its dtype: Lightning casts buffers to bf16, DeepSpeed does not.
            buffers[name].data = held[f"buffer/{distributed.get_rank()}/{name}"].clone()
    for key, value in held.items():
        kind, _, rest = key.partition("/")
        if kind == "group":
            _write_hyperparameter(engine, rest, value)
        elif kind == "counter":
            setattr(engine, rest, parsed(value))


def parsed(text: str) -> Any:
    """Return what a ``repr`` in a dump stands for."""
    if text.startswith("tensor("):
        return torch.tensor(ast.literal_eval(text.removeprefix("tensor(").removesuffix(")")))
    return ast.literal_eval(text)


def _write_flats(
    engine: Engine, setup: Setup, held: Dump, names: list[str], *, states: bool
) -> None:
    """Write masters and the optimizer's states into this rank's flat buffers."""
    inner = inner_of(engine)
    masters = _whole(held, "master", setup)
    kinds = {key.partition("/")[0] for key in held} - NO_STATES
    vectors = {kind: _whole(held, kind, setup) for kind in sorted(kinds)} if states else {}
    scalars = _scalars(held, names) if states else {}
    for flat, places in zip(flat_buffers(engine, setup), positions(setup), strict=True):
        here = places != PADDING
        flat.data.view(-1)[here] = masters[places[here]].to(flat.dtype)
        if states:
            inner.state[flat].clear()  # An optimizer that has not stepped has none.
        for kind, vector in vectors.items():
            tensor = torch.zeros_like(flat.data, dtype=vector.dtype)
            tensor.view(-1)[here] = vector[places[here]]
            inner.state[flat][kind] = tensor
        for name, value in scalars.items():
            inner.state[flat][name] = value.clone() if isinstance(value, torch.Tensor) else value


def _whole(held: Dump, kind: str, setup: Setup) -> torch.Tensor:
    """Return all elements of a kind in the order of their numbers."""
    pieces = []
    for name, parameter in trained(setup.model(0)).items():
        found = held.get(f"{kind}/{name}", torch.zeros(parameter.shape))
        pieces.append(found.flatten())
    return torch.cat(pieces)


def _scalars(held: Dump, names: list[str]) -> dict[str, Any]:
    """Return the scalar states, of which each parameter must have the same."""
    found: dict[str, str] = {}
    for key, value in held.items():
        kind, _, rest = key.partition("/")
        if kind == "scalar":
            name, _, parameter = rest.partition("/")
            require(parameter in names, f"{parameter} is not trained")
            require(found.setdefault(name, value) == value, f"{name} differs between parameters")
    return {name: parsed(value) for name, value in found.items()}


def _write_weights(engine: Engine, setup: Setup, held: Dump) -> None:
    """Write the weights that forward uses, frozen ones too."""
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
