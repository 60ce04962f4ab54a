"""Refusal, by name and before training, of what the library cannot save or resume."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed import get_world_size

from lightning_elastic_zero.engine.deepspeed_internals import updates_offloaded_momentum
from lightning_elastic_zero.engine.flat_buffers import (
    PLAIN,
    REPLICATED,
    inner_optimizer,
    live_flat_buffers,
)
from lightning_elastic_zero.engine.releases import check_names
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.manifest import STAGES
from lightning_elastic_zero.requirements import DEEPSPEED, version_of

OPTIMIZER_WRAPPERS = {
    PLAIN: "stage 0 in fp32",
    "FP16_Optimizer": "stage 0 in bf16 or fp16, with FusedAdam",
    "FP16_UnfusedOptimizer": "stage 0 in bf16 or fp16",
    "DeepSpeedZeroOptimizer": "ZeRO-1 and ZeRO-2",
    "BF16_Optimizer": "ZeRO-1 in bf16 with fp32 gradient accumulation",
    "DeepSpeedZeroOptimizer_Stage3": "ZeRO-3",
}
"""The optimizer wrappers whose flat buffers the library knows, by exact class name."""

NO_OPTIMIZER_CLASSES = ("NoneType", "DeepSpeedZeRoOffload", "DummyOptim")
"""What stands in the wrapper's place in an engine for inference."""

RANK_LOCAL_OPTIMIZERS = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")
"""Their state is each rank's own."""

CUT_OPTIMIZERS = ("FusedLamb", "Lamb", "LAMB")
"""Their update depends on how the parameters are cut, which stage 0 does not do."""

MATRIX_OPTIMIZERS = ("Adafactor",)
"""Their state depends on the weights' shapes, which flat buffers do not have."""

NVME_WEIGHTS = "zero_optimization.offload_param.device = nvme: offload weights to cpu instead"
UNUSABLE_OPTIMIZERS = {
    "LBFGS": "its step calls a closure, which ZeRO does not pass",
    "SparseAdam": "it takes sparse gradients only, and ZeRO's are dense",
}
"""Those of torch's that cannot step under ZeRO."""

RANDOM_LTD = (
    "data_efficiency.data_routing.random_ltd: the state of its scheduler would be lost; leave it "
    "out"
)
CURRICULUM = (
    "data_efficiency.data_sampling.curriculum_learning: the state of its data sampler would be "
    "lost; leave it out, and order the data in a sampler of your own"
)


def optimizer_wrapper(engine: Any) -> str:  # noqa: ANN401 (untyped library)
    """Return the class name of the engine's optimizer wrapper; empty without an optimizer.

    One that is not wrapped, as in stage 0, has the name of torch's own class.
    """
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        return PLAIN
    name = type(engine.optimizer).__name__
    if name == "BF16_Optimizer" and not getattr(engine.optimizer, "using_real_optimizer", True):
        return ""
    return "" if name in NO_OPTIMIZER_CLASSES else name


def check_supported(engine: Any) -> None:  # noqa: ANN401 (untyped library)
    """Refuse an engine that the library cannot save and resume.

    Raises:
        UnsupportedError: with every reason that was found.
    """
    if not hasattr(engine, "optimizer"):
        found = f"{type(engine).__module__}.{type(engine).__qualname__}"
        _refuse([f"{found} is no DeepSpeed engine: pass what deepspeed.initialize returned first"])
    _refuse([*_release(engine)])  # What is looked at below may not be there else.
    reasons = [*_parallelism(engine), *_optimizer(engine), *_offload(engine), *_state(engine)]
    _refuse(reasons)


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a DeepSpeed config that the library cannot serve, before an engine is built on it.

    Args:
        config: the DeepSpeed config dict. What only a live engine shows is left to
            ``check_supported``.

    Raises:
        UnsupportedError: with every reason that was found.
    """
    if reason := DEEPSPEED.incompatibility(version_of(DEEPSPEED.package)):
        _refuse([reason])
    zero = config.get("zero_optimization") or {}
    reasons = [*_stage(zero.get("stage", 0))]
    if (zero.get("offload_param") or {}).get("device") == "nvme":
        reasons.append(NVME_WEIGHTS)
    if (zero.get("offload_optimizer") or {}).get("super_offload"):
        reasons.append("zero_optimization.offload_optimizer.super_offload")
    if zero.get("zenflow"):
        reasons.append("zero_optimization.zenflow")
    if (config.get("tensor_parallel") or {}).get("autotp_size", 0) > 1:
        reasons.append("tensor_parallel: tensor parallelism")
    _refuse([*reasons, *_data_efficiency(config.get("data_efficiency") or {})])


def _data_efficiency(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the schedules of data that have a state of their own, which no checkpoint has."""
    for part, name, title in (
        ("data_sampling", "curriculum_learning", CURRICULUM),
        ("data_routing", "random_ltd", RANDOM_LTD),
    ):
        levels = [config, config.get(part) or {}, (config.get(part) or {}).get(name) or {}]
        if all(level.get("enabled") for level in levels):
            yield title


def _stage(stage: object) -> Iterator[str]:
    """Yield what is wrong with a stage: DeepSpeed takes "3" for 3, and Lightning does not."""
    if type(stage) is not int or stage not in STAGES:
        hint = ", and no string: leave out the quotes" if isinstance(stage, str) else ""
        yield f"zero_optimization.stage = {stage!r}: it must be 0, 1, 2 or 3{hint}"


def _refuse(reasons: list[str]) -> None:
    """Raise for all reasons at once, so that nobody mends a config one error at a time."""
    if reasons:
        listed = "\n".join(f"  - {reason}" for reason in reasons)
        msg = f"lightning_elastic_zero cannot save and resume this run:\n{listed}"
        raise UnsupportedError(msg)


def _release(engine: Any) -> Iterator[str]:  # noqa: ANN401 (untyped library)
    """Yield what is wrong with the installed release of DeepSpeed."""
    found = version_of(DEEPSPEED.package)
    if reason := DEEPSPEED.incompatibility(found):
        yield reason
    yield from check_names(engine, optimizer_wrapper(engine), found)


def _parallelism(engine: Any) -> Iterator[str]:  # noqa: ANN401 (untyped library)
    """Yield the kinds of parallelism beside data parallelism that are in use."""
    if type(engine).__name__ == "PipelineEngine":
        yield "pipeline parallelism (PipelineEngine)"
    if engine.mp_world_size > 1:
        yield f"tensor or model parallelism over {engine.mp_world_size} ranks"
    if engine.seq_dp_world_size * engine.mp_world_size != get_world_size():
        yield (
            f"ZeRO over {engine.seq_dp_world_size} of {get_world_size()} ranks, as sequence "
            "parallelism by a device mesh (mesh_param) has it: its sequence ranks hold copies. "
            "Pass an mpu to deepspeed.initialize whose get_sequence_data_parallel_group has all "
            "ranks (deepspeed.runtime.sequence_parallel.parallel_state_sp), so that ZeRO cuts over "
            "all of them"
        )
    if engine.has_moe_layers:
        yield "mixture-of-experts layers (expert parallelism)"


def _optimizer(engine: Any) -> Iterator[str]:  # noqa: ANN401 (untyped library)
    """Yield what is unknown or unfit about the optimizer and its wrapper."""
    wrapper = optimizer_wrapper(engine)
    if not wrapper:
        return
    if wrapper not in OPTIMIZER_WRAPPERS:
        known = "; ".join(f"{name} ({what})" for name, what in OPTIMIZER_WRAPPERS.items())
        yield f"the optimizer wrapper {wrapper}; known are {known}"
        return
    yield from _inner_optimizer(engine, wrapper)


def _inner_optimizer(engine: Any, wrapper: str) -> Iterator[str]:  # noqa: ANN401 (untyped library)
    """Yield what is unfit about the optimizer inside a known wrapper."""
    inner = inner_optimizer(engine.optimizer)
    name = type(inner).__name__
    yield from _by_class(inner, wrapper)
    if _is_quantized(inner):
        yield (
            f"the optimizer {type(inner).__module__.partition('.')[0]}.{name}: its state is "
            "quantized in blocks of the flat buffer, which cannot be cut elsewhere bit for bit; "
            "use one with 16 or 32 bits"
        )
    offloaded = wrapper == "DeepSpeedZeroOptimizer" and engine.optimizer.cpu_offload
    if offloaded and any(group.get("use_muon") for group in inner.param_groups):
        yield from _offloaded_muon(engine.optimizer)
    if wrapper != PLAIN:
        yield from _added_later(engine)
    flats = len({buffer.group for buffer in live_flat_buffers(engine.optimizer, wrapper)})
    if len(inner.param_groups) < flats:
        yield (
            f"{name} with {flats} parameter groups: DeepSpeed itself collapses them into "
            f"{len(inner.param_groups)} when it starts; put all parameters into one group"
        )


def _by_class(inner: torch.optim.Optimizer, wrapper: str) -> Iterator[str]:
    """Yield what is unfit about the optimizer's class."""
    name = type(inner).__name__
    if name in RANK_LOCAL_OPTIMIZERS:
        yield f"the optimizer {name}: its state is each rank's own"
    if name in CUT_OPTIMIZERS and wrapper not in REPLICATED:
        yield f"the optimizer {name}: its update depends on how the parameters are cut; use stage 0"
    if wrapper == PLAIN and name in MATRIX_OPTIMIZERS and _has_matrices(inner):
        yield (
            f"the optimizer {name} in stage 0: it keeps factors of each matrix there, which cannot "
            "be cut for another number of devices; use stage 1, 2 or 3"
        )
    if name in UNUSABLE_OPTIMIZERS:
        yield f"the optimizer {name}: {UNUSABLE_OPTIMIZERS[name]}"


def _has_matrices(inner: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has parameters of two dimensions or more."""
    return any(p.ndim > 1 for group in inner.param_groups for p in group["params"])


def _offloaded_muon(optimizer: Any) -> Iterator[str]:  # noqa: ANN401 (untyped library)
    """Yield that a release does not keep offloaded momentum as it is known here."""
    if not updates_offloaded_momentum(optimizer):
        found = version_of(DEEPSPEED.package)
        yield f"Muon with offload_optimizer in ZeRO-1/2 under DeepSpeed {found}: 0.19.8 can do it"


def _is_quantized(inner: Any) -> bool:  # noqa: ANN401 (any optimizer)
    """Whether an optimizer is one of torchao's or bitsandbytes' with a state of 8 bits or fewer."""
    package = type(inner).__module__.partition(".")[0]
    if package == "torchao":
        return math.isfinite(getattr(inner, "block_size", math.inf))
    if package == "bitsandbytes":
        options = getattr(inner, "args", None)
        return bool(getattr(options, "optim_bits", 32) < 16)  # noqa: PLR2004 (bits)
    return False


def _added_later(engine: Any) -> Iterator[str]:  # noqa: ANN401 (untyped library)
    """Yield the parameter groups that DeepSpeed has not made flat buffers of: it does not train."""
    whole = set(engine.module.parameters())
    for index, group in enumerate(engine.optimizer.optimizer.param_groups):
        if any(p in whole and p.requires_grad for p in group["params"]):
            yield (
                f"parameter group {index}, which was added to the optimizer after DeepSpeed was "
                "initialized, so that it is not partitioned: let all groups be there from the "
                "beginning, with lr=0 until their turn comes"
            )


def _offload(engine: Any) -> Iterator[str]:  # noqa: ANN401 (untyped library)
    """Yield the kinds of offload that are not supported."""
    if getattr(engine.optimizer, "params_in_nvme_and_cpu", False):
        yield NVME_WEIGHTS
    if getattr(engine, "zenflow", False):
        yield "zero_optimization.zenflow"


def _state(engine: Any) -> Iterator[str]:  # noqa: ANN401 (untyped library)
    """Yield options that hold state which would not come back."""
    if engine.zero_quantized_nontrainable_weights():
        yield "zero_optimization.zero_quantized_nontrainable_weights: frozen weights are int8"
    if engine.random_ltd_enabled():
        yield RANDOM_LTD
    if engine.curriculum_learning_enabled():
        yield CURRICULUM
