"""What is lost where a load casts: buffers that are rounded, weights that become infinite."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch

from lightning_elastic_zero.checkpoint.types import LiveState
from lightning_elastic_zero.compatibility import BufferPair, list_names
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.layout import spans
from lightning_elastic_zero.manifest import Manifest
from lightning_elastic_zero.tensor_state import (
    RestoreTargets,
    can_overflow,
    dtype_name,
    is_lossy_cast,
    is_writable,
    overflowed,
    overflows,
)

log = logging.getLogger(__name__)

_CHECKED_ELEMENTS = 1 << 20
"""Elements that are cast at a time."""


def buffer_pairs(
    saved: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]
) -> Iterator[BufferPair]:
    """Yield the module buffers that both have, as they are there and here."""
    for name, held, wanted in ((n, saved[n], live[n]) for n in live if n in saved):
        yield BufferPair(
            name,
            saved_shape=tuple(held.shape),
            shape=tuple(wanted.shape),
            saved_dtype=dtype_name(held.dtype),
            dtype=dtype_name(wanted.dtype),
            loses=is_lossy_cast(held, wanted.dtype),
            overflows=overflows(held, wanted.dtype),
            writable=is_writable(wanted),
        )


def check_infinite_weights(
    where: str, targets: RestoreTargets, saved: Manifest, live: LiveState
) -> None:
    """Name the weights that forward cannot use here, on the ranks that hold their masters.

    Args:
        where: the checkpoint's path.
        targets: filled.
        saved: the checkpoint.
        live: the engine that it is loaded into.

    Raises:
        CheckpointMismatchError: the masters would be infinite too.
    """
    here, keeps = live.describe(), live.keeps_masters()
    found = infinite_weights(targets, saved, here, rounds_masters=not keeps)
    if found and not keeps:
        msg = (
            f"{where}: numbers that {here.precision} cannot hold, to which the config has masters "
            "rounded (zero_optimization.load_from_fp32_weights: false), so that these would become "
            f"infinite: {list_names(found)}. Set it to true, or run in a precision whose type "
            "holds them"
        )
        raise CheckpointMismatchError(msg)
    if found:
        log.warning(
            "%s: numbers that %s cannot hold, so that these weights become infinite (their "
            "masters do not): %s. Run in a precision whose type holds them",
            where,
            here.precision,
            list_names(found),
        )


def infinite_weights(
    targets: RestoreTargets, saved: Manifest, here: Manifest, *, rounds_masters: bool = False
) -> list[str]:
    """Return the parameters of which this rank received a master that its weight cannot hold.

    Only where weights had a type of larger numbers when they were saved: in one of the same type
    they were infinite then too, and such a run goes on as it was.

    Args:
        targets: filled. ``weights`` are masters, where the engine has some.
        saved: the checkpoint. A parameter's ``dtype`` is that of its weight, not of its master.
        here: the live engine.
        rounds_masters: masters will be rounded to the weights, and so are looked at whatever type
            the weights had.
    """
    was = {p.name: getattr(torch, p.dtype) for p in saved.parameters}
    types = {
        p.name: getattr(torch, p.dtype)
        for p in here.optimized
        if p.name in was and (rounds_masters or can_overflow(was[p.name], getattr(torch, p.dtype)))
    }
    found: dict[str, None] = {}
    for fragment in targets.fragments:
        if fragment.name in types and fragment.name not in found:
            end = fragment.offset + fragment.stop - fragment.start
            masters = targets.weights[fragment.buffer].detach()[fragment.offset : end]
            if _become_infinite(masters, types[fragment.name]):
                found[fragment.name] = None
    return [*found]


def _become_infinite(masters: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a finite master is infinite in a type; a bounded part of them at a time."""
    if not can_overflow(masters.dtype, dtype):
        return False
    for start, stop in spans(0, masters.numel(), _CHECKED_ELEMENTS):
        part = masters[start:stop].cpu()
        cast = part.to(dtype)
        if not cast.isfinite().all() and overflowed(part, cast).any():
            return True
    return False
