"""Optimizers that are refused: their state cannot be cut, or their update depends on the cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lightning_elastic_zero.engine.optimizer_state import BITSANDBYTES, package_of

RANK_LOCAL_OPTIMIZERS = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")
"""Their state is each rank's own. DeepSpeed had them until 0.19.8 left them out."""

CUT_OPTIMIZERS = ("FusedLamb", "Lamb", "LAMB")
"""Their update depends on how the parameters are cut, which stage 0 does not do."""

MATRIX_OPTIMIZERS = ("Adafactor",)
"""Their state depends on the weights' shapes, which flat buffers do not have."""

TWO_MOMENTS = ("AdEMAMix", "AdEMAMix32bit", "PagedAdEMAMix", "PagedAdEMAMix32bit")
"""bitsandbytes' that keep two moments of a parameter in one tensor."""

UNUSABLE_OPTIMIZERS = {
    "LBFGS": "its step calls a closure, which ZeRO does not pass; use Adam or AdamW",
    "SparseAdam": "it takes sparse gradients only, and ZeRO's are dense; use Adam or AdamW",
}
"""Those of torch's that cannot step under ZeRO."""


def unfit_name(section: Mapping[str, Any], stage: object) -> Iterator[str]:
    """Yield what is unfit about an optimizer that DeepSpeed is to make, by the name it has there.

    DeepSpeed takes the name in any case; some releases refuse some of them by themselves.

    Args:
        section: ``optimizer`` of its config.
        stage: of ZeRO.
    """
    found = str(section.get("type", "")).lower()
    for name in RANK_LOCAL_OPTIMIZERS:
        if found == name.lower():
            yield _rank_local(name)
    for name in UNUSABLE_OPTIMIZERS:
        if found == name.lower():
            yield _unusable(name)
    if found == "lamb" and stage != 0:
        yield _cut("FusedLamb")


def _rank_local(name: str) -> str:
    """Return why an optimizer is refused whose ranks have errors of their own."""
    return f"the optimizer {name}: its state is each rank's own; use Adam or AdamW"


def _unusable(name: str) -> str:
    """Return why one of torch's optimizers is refused that cannot step."""
    return f"the optimizer {name}: {UNUSABLE_OPTIMIZERS[name]}"


def _cut(name: str) -> str:
    """Return why an optimizer is refused that looks at whole parameters."""
    return (
        f"the optimizer {name}: its update depends on how the parameters are cut; use stage 0, or "
        "Adam or AdamW"
    )


def unfit_class(inner: torch.optim.Optimizer, *, in_zero: bool) -> Iterator[str]:
    """Yield what is unfit about a live optimizer's class.

    Args:
        inner: the optimizer that steps.
        in_zero: whether it is given flat buffers, which are cut, and no whole parameters.
    """
    name = type(inner).__name__
    if name in RANK_LOCAL_OPTIMIZERS:
        yield _rank_local(name)
    if in_zero:
        yield from _on_flat_buffers(inner)
    if package_of(inner) == BITSANDBYTES:
        yield from _bitsandbytes(inner, name, in_zero=in_zero)
    if not in_zero and name in MATRIX_OPTIMIZERS and _has_matrices(inner):
        yield (
            f"the optimizer {name} in stage 0: it keeps factors of each matrix there, which cannot "
            "be cut for another number of devices; use stage 1, 2 or 3"
        )
    if _is_quantized(inner):
        yield (
            f"the optimizer {package_of(inner)}.{name}: its state is quantized in blocks of the "
            "flat buffer, which cannot be cut elsewhere bit for bit; use one with 16 or 32 bits"
        )
    if name in UNUSABLE_OPTIMIZERS:
        yield _unusable(name)


def _on_flat_buffers(inner: Any) -> Iterator[str]:  # noqa: ANN401 (any optimizer)
    """Yield what is unfit about an optimizer that does not see whole parameters."""
    name = type(inner).__name__
    if name in CUT_OPTIMIZERS and package_of(inner) != BITSANDBYTES:
        yield _cut(name)
    if name == "Muon" and package_of(inner) == "torch":
        yield (
            "the optimizer torch.optim.Muon in ZeRO: it steps whole matrices, which are cut; use "
            'stage 0, or DeepSpeed\'s Muon ("optimizer": {"type": "Muon"} in its config)'
        )


def _bitsandbytes(inner: Any, name: str, *, in_zero: bool) -> Iterator[str]:  # noqa: ANN401 (any optimizer)
    """Yield what is unfit about one of bitsandbytes' optimizers, but for the bits of its state."""
    keeps_norm = getattr(getattr(inner, "args", None), "max_unorm", 0.0) > 0.0
    if in_zero and (keeps_norm or name == "PytorchLARS"):
        yield (
            f"the optimizer {BITSANDBYTES}.{name}: its update depends on the norm of a whole "
            "parameter, which is cut; use Adam or AdamW"
        )
    elif keeps_norm:
        yield (
            f"the optimizer {BITSANDBYTES}.{name} in stage 0: it keeps the norm of a parameter's "
            "update as a vector of one element (unorm_vec), which is neither one value per element "
            "nor one for all; use Adam or AdamW"
        )
    if name in TWO_MOMENTS:
        yield (
            f"the optimizer {BITSANDBYTES}.{name}: two moments of a parameter are one tensor, "
            "which has no rule by which it could be cut; use Adam or AdamW"
        )


def _has_matrices(inner: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has parameters of two dimensions or more."""
    return any(p.ndim > 1 for group in inner.param_groups for p in group["params"])


def _is_quantized(inner: Any) -> bool:  # noqa: ANN401 (any optimizer)
    """Whether an optimizer is one of torchao's or bitsandbytes' with a state of 8 bits or fewer."""
    package = package_of(inner)
    if package == "torchao":
        return math.isfinite(getattr(inner, "block_size", math.inf))
    if package == BITSANDBYTES:
        options = getattr(inner, "args", None)
        return bool(getattr(options, "optim_bits", 32) < 16)  # noqa: PLR2004 (bits)
    return False
