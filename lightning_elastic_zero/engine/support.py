"""Checks before training that refuse, by name, features that cannot be saved or resumed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import get_world_size

from lightning_elastic_zero.core.manifest import STAGE_WEIGHTS, STAGES
from lightning_elastic_zero.core.requirements import DEEPSPEED, version_of
from lightning_elastic_zero.core.tensors import dtype_name
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.engine.addresses import full_shape
from lightning_elastic_zero.engine.buffers import (
    REPLICATED,
    LiveFlatBuffer,
    inner_optimizer,
    live_flat_buffers,
    optimizer_wrapper,
)
from lightning_elastic_zero.engine.deepspeed import (
    PLAIN,
    check_names,
    updates_offloaded_momentum,
)
from lightning_elastic_zero.engine.optimizer import BITSANDBYTES, package_of
from lightning_elastic_zero.engine.tensor_parallel import (
    ZERO_INIT,
    configured_size,
    is_cut,
    tensor_ranks,
    unfit_release,
    unfit_run,
)
from lightning_elastic_zero.errors import UnsupportedError

UNFIT_OPTIMIZERS = {
    **dict.fromkeys(
        ("OnebitAdam", "OnebitLamb", "ZeroOneAdam"),  # DeepSpeed 0.19.8 removed them.
        "its state differs between ranks; use Adam or AdamW",
    ),
    "LBFGS": "its step requires a closure, which ZeRO does not pass; use Adam or AdamW",
    "SparseAdam": "it requires sparse gradients, and ZeRO's are dense; use Adam or AdamW",
}
"""Optimizers that are refused at every stage, and why."""

NORMS_IN_ZERO = (
    "its update depends on how the parameters are partitioned; use stage 0, or Adam or AdamW"
)

OPTIMIZER_WRAPPERS = {
    PLAIN: "stage 0 in fp32",
    "FP16_Optimizer": "stage 0 in bf16 or fp16, with FusedAdam",
    "FP16_UnfusedOptimizer": "stage 0 in bf16 or fp16",
    "DeepSpeedZeroOptimizer": "ZeRO-1 and ZeRO-2",
    "BF16_Optimizer": "ZeRO-1 in bf16 with fp32 gradient accumulation",
    "DeepSpeedZeroOptimizer_Stage3": "ZeRO-3",
}
"""The supported optimizer wrappers, by exact class name."""

NVME_WEIGHTS = (
    "zero_optimization.offload_param.device = nvme: weights in files cannot be saved or restored; "
    "offload weights to cpu instead"
)

ZENFLOW = (
    "zero_optimization.zenflow: a second optimizer steps the largest gradients, and its state is "
    "not accessible; remove the option: offload_optimizer to cpu works without it"
)

_TENSOR_PARALLELISM = (
    "tensor parallelism, which this library supports in ElasticDeepSpeedStrategy, under Hugging "
    "Face and with a plain engine, but not under Fabric; use these, or remove the option: ZeRO-3 "
    "partitions the weights too"
)

EXPERTS = "each rank has only some of the experts"

QUANTIZED_FROZEN_WEIGHTS = (
    "zero_optimization.zero_quantized_nontrainable_weights: frozen weights would be integers with "
    "separate scales; remove the option"
)

SHARDED_BASE_WEIGHTS = (
    "deepspeed.linear.LoRAConfig.base_weight_sharding > 1: each rank has only a part of some "
    "frozen weights; set it to 1: ZeRO-3 partitions them too"
)

RANDOM_LTD = (
    "data_efficiency.data_routing.random_ltd: the state of its scheduler would be lost; remove the "
    "option"
)

COMPRESSION = (
    "compression_training: the step of its schedules would be lost; remove the option, which "
    "DeepSpeed 0.19.8 does not have"
)

LOCO = (
    "zero_optimization.zeropp_loco_param: its error feedback would be lost; remove the option, "
    "which DeepSpeed 0.19.8 does not have"
)

CURRICULUM = (
    "data_efficiency.data_sampling.curriculum_learning: the state of its data sampler would be "
    "lost; remove the option, and order the data in your own sampler"
)


def unfit_name(section: Mapping[str, Any], stage: object) -> Iterator[str]:
    """Yield the reasons to refuse an optimizer that the DeepSpeed config names, in any case."""
    kind = str(section.get("type", "")).lower()
    for name, why in UNFIT_OPTIMIZERS.items():
        if kind == name.lower():
            yield f"the optimizer {name}: {why}"
    if kind == "lamb" and stage != 0:
        yield f"the optimizer FusedLamb: {NORMS_IN_ZERO}"


def unfit_class(inner: torch.optim.Optimizer, *, in_zero: bool) -> Iterator[str]:
    """Yield the reasons to refuse an optimizer, which steps partitioned flat buffers in ZeRO."""
    name, package = type(inner).__name__, package_of(inner)
    if name in UNFIT_OPTIMIZERS:
        yield f"the optimizer {name}: {UNFIT_OPTIMIZERS[name]}"
    if package == BITSANDBYTES:
        yield from _bitsandbytes(inner, name, in_zero=in_zero)
    elif in_zero and name.lower() in {"fusedlamb", "lamb", "lars"}:
        yield f"the optimizer {name}: {NORMS_IN_ZERO}"
    if in_zero and name == "Muon" and package == "torch":
        yield (
            "the optimizer torch.optim.Muon in ZeRO: it requires whole matrices, which ZeRO "
            'partitions; use stage 0, or DeepSpeed\'s Muon ("optimizer": {"type": "Muon"} in its '
            "config)"
        )
    has_matrices = any(p.ndim > 1 for group in inner.param_groups for p in group["params"])
    if not in_zero and name == "Adafactor" and has_matrices:
        yield (
            f"the optimizer {name} in stage 0: it keeps factors of each matrix, which cannot be "
            "partitioned for another number of devices; use stage 1, 2 or 3"
        )
    if _is_quantized(inner):
        yield (
            f"the optimizer {package}.{name}: its state is quantized in blocks of the flat buffer, "
            "which cannot be repartitioned bit for bit; use one with 16 or 32 bits"
        )
    if outside := _state_outside(inner):
        yield (
            f"the optimizer {package}.{name}: it keeps state in {format_names(outside)}, but only "
            "that in its `state` and `param_groups` is saved; use an optimizer that has no other"
        )


def _state_outside(inner: torch.optim.Optimizer) -> list[str]:
    """Return where an optimizer keeps state besides that of its parameters and groups.

    A wrapper, such as timm's ``Lookahead``, has that of another optimizer; others add counters of
    their own to ``state_dict()``.
    """
    found = [
        name
        for name, value in vars(inner).items()
        if isinstance(value, torch.optim.Optimizer) and value.state is not inner.state
    ]
    if type(inner).state_dict is not torch.optim.Optimizer.state_dict:
        found += sorted(inner.state_dict().keys() - {"state", "param_groups"})
    return found


def _bitsandbytes(inner: Any, name: str, *, in_zero: bool) -> Iterator[str]:
    keeps_norm = getattr(getattr(inner, "args", None), "max_unorm", 0.0) > 0.0
    if in_zero and (keeps_norm or name == "PytorchLARS"):
        yield (
            f"the optimizer {BITSANDBYTES}.{name}: its update depends on the norm of a whole "
            "parameter, which ZeRO partitions; use Adam or AdamW"
        )
    elif keeps_norm:
        yield (
            f"the optimizer {BITSANDBYTES}.{name} in stage 0: its state unorm_vec is neither "
            "element-wise nor a scalar; use Adam or AdamW"
        )
    if name in ("AdEMAMix", "AdEMAMix32bit", "PagedAdEMAMix", "PagedAdEMAMix32bit"):
        yield (
            f"the optimizer {BITSANDBYTES}.{name}: it keeps two moments of a parameter in one "
            "tensor, which cannot be partitioned; use Adam or AdamW"
        )


def _is_quantized(inner: Any) -> bool:
    """Whether an optimizer of torchao or bitsandbytes has a state of 8 bits or fewer."""
    package = package_of(inner)
    if package == "torchao":
        return math.isfinite(getattr(inner, "block_size", math.inf))
    if package == BITSANDBYTES:
        options = getattr(inner, "args", None)
        return bool(getattr(options, "optim_bits", 32) < 16)  # noqa: PLR2004 (bits)
    return False


def check_supported(engine: Any) -> None:
    """Raise UnsupportedError with every reason why an engine cannot be saved and resumed."""
    if not hasattr(engine, "optimizer"):
        name = f"{type(engine).__module__}.{type(engine).__qualname__}"
        refuse([f"{name} is not a DeepSpeed engine: pass deepspeed.initialize(...)[0]"])
    release, wrapper = version_of(DEEPSPEED.package), optimizer_wrapper(engine)
    # The checks below use these names.
    incompatible = filter(None, [DEEPSPEED.incompatibility(release)])
    refuse([*incompatible, *check_names(engine, wrapper, release)])
    reasons = [*_parallelism(engine), *_optimizer(engine, wrapper), *_options(engine)]
    refuse(reasons, trains=bool(wrapper))


def check_config(config: Mapping[str, Any], *, trains: bool = True) -> None:
    """Refuse an unsupported DeepSpeed config before an engine is built with it.

    For an evaluation (``trains=False``), only the precision, tensor parallelism and the ZeRO-3
    section are used: whatever else the config contains, only weights are read. Raises
    UnsupportedError with every reason.
    """
    if reason := DEEPSPEED.incompatibility(version_of(DEEPSPEED.package)):
        refuse([reason])
    refuse([*_config_reasons(config, trains=trains)], trains=trains)


def _config_reasons(config: Mapping[str, Any], *, trains: bool) -> Iterator[str]:
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in STAGES:  # DeepSpeed accepts "3", Lightning does not.
        hint = " without quotes" if isinstance(stage, str) else ""
        yield f"zero_optimization.stage: {stage!r}, expected 0, 1, 2 or 3{hint}"
    if trains or stage == STAGE_WEIGHTS:
        if (zero.get("offload_param") or {}).get("device") == "nvme":
            yield NVME_WEIGHTS
        if (zero.get("offload_optimizer") or {}).get("super_offload"):
            yield (
                "zero_optimization.offload_optimizer.super_offload: another process owns the "
                "optimizer, and its state is not accessible; remove the option: "
                "offload_optimizer to cpu works without it"
            )
        if zero.get("zenflow"):
            yield ZENFLOW
        if zero.get("zero_quantized_nontrainable_weights"):
            yield QUANTIZED_FROZEN_WEIGHTS
    if configured_size(config) > 1:
        yield from unfit_release(version_of(DEEPSPEED.package))
    if not trains:
        return
    if (config.get("expert_parallel") or {}).get("enabled"):
        yield (
            f"expert_parallel.enabled: expert parallelism, in which {EXPERTS}; remove the option: "
            "all ranks then have all experts, and ZeRO-3 partitions their weights"
        )
    if "data_parallel_size" in config and config.get("sequence_parallel_size", 1) > 1:
        yield (
            "sequence_parallel_size and data_parallel_size: ZeRO would partition over the data "
            "ranks only, and sequence ranks would hold copies; remove them. With a plain engine, "
            "configure sequence parallelism with an mpu: "
            "deepspeed.runtime.sequence_parallel.parallel_state_sp"
        )
    yield from unfit_name(config.get("optimizer") or {}, stage)
    if zero.get("zeropp_loco_param") is not None:
        yield LOCO
    compression = (config.get("compression_training") or {}).values()
    # DeepSpeed adds sections that enable nothing to the dict of its caller.
    if any((method.get("shared_parameters") or {}).get("enabled") for method in compression):
        yield COMPRESSION
    schedules = config.get("data_efficiency") or {}
    for part, name, title in (
        ("data_sampling", "curriculum_learning", CURRICULUM),
        ("data_routing", "random_ltd", RANDOM_LTD),
    ):
        section = schedules.get(part) or {}
        levels = (schedules, section, section.get(name) or {})
        if all(level.get("enabled") for level in levels):
            yield title


def check_optimizer(
    optimizer: torch.optim.Optimizer,
    config: Mapping[str, Any],
    module: torch.nn.Module,
    *,
    is_scheduled: bool,
) -> None:
    """Refuse a user's optimizer for ZeRO before DeepSpeed asks for an option to accept it.

    ``check_supported`` checks stage 0. Raises UnsupportedError with every reason.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    reasons = [
        *_not_in_module(((i, p) for i, members in enumerate(groups) for p in members), module)
    ]
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    reasons += _untrained_groups(groups, stage, is_scheduled=is_scheduled)
    if stage:
        reasons += unfit_class(optimizer, in_zero=True)
    refuse(reasons)


def _untrained_groups(
    groups: Iterable[Sequence[torch.nn.Parameter]], stage: int, *, is_scheduled: bool
) -> Iterator[str]:
    """Yield the parameter groups with which DeepSpeed fails without naming them."""
    for index, members in enumerate(groups):
        if not members and is_scheduled:
            yield (
                f"parameter group {index} of the optimizer is empty: DeepSpeed removes it, and the "
                "learning-rate scheduler then has one rate too many; create groups with parameters "
                "only"
            )
        elif members and stage in (1, 2) and not any(p.requires_grad for p in members):
            yield (
                f"parameter group {index} of the optimizer has frozen parameters only "
                f"({len(members)}), which ZeRO-{stage} does not support; pass only parameters that "
                "require a gradient to the optimizer. To train a group later, use lr=0 until then"
            )


def check_no_shards(engine: Any) -> None:
    """Refuse tensor parallelism, for callers that take every rank for a data rank.

    Raises UnsupportedError if there are tensor ranks.
    """
    size = int(getattr(engine, "mp_world_size", 1))
    refuse([f"tensor_parallel.autotp_size = {size}: {_TENSOR_PARALLELISM}"] if size > 1 else [])


def check_creation(config: Mapping[str, Any]) -> None:
    """Refuse to create a model in ``zero.Init`` if its layers will be cut."""
    refuse([ZERO_INIT] if configured_size(config) > 1 else [])


def check_uncut(module: torch.nn.Module, config: Mapping[str, Any]) -> None:
    """Refuse a module of an earlier engine with tensor parallelism for a run without it."""
    reason = (
        "layers that an earlier engine has cut for tensor parallelism, in a run without it: create "
        "the module again, or use the same number of tensor ranks"
    )
    refuse([reason] if configured_size(config) == 1 and is_cut(module) else [])


def refuse(reasons: list[str], *, trains: bool = True) -> None:
    """Raise UnsupportedError with the reasons, if there are any."""
    if reasons:
        evaluate = "evaluate this model: its weights can be neither loaded nor saved"
        what = "save and resume this run" if trains else evaluate
        listed = "\n".join(f"  - {reason}" for reason in reasons)
        msg = f"lightning_elastic_zero cannot {what}:\n{listed}"
        raise UnsupportedError(msg)


def _parallelism(engine: Any) -> Iterator[str]:
    if "PipelineEngine" in {kind.__name__ for kind in type(engine).__mro__}:
        yield (
            "a PipelineModule: pipeline parallelism, in which each rank has only some of the "
            "layers; use a plain torch.nn.Module: ZeRO-3 partitions its weights"
        )
    elif tensor_ranks(engine) > 1:
        yield from unfit_run(engine, version_of(DEEPSPEED.package))
    elif engine.seq_dp_world_size != get_world_size():
        yield (
            f"ZeRO over {engine.seq_dp_world_size} of {get_world_size()} ranks, as with sequence "
            "parallelism by a device mesh (mesh_param): its sequence ranks hold copies. Pass an "
            "mpu to deepspeed.initialize with all ranks in get_sequence_data_parallel_group "
            "(deepspeed.runtime.sequence_parallel.parallel_state_sp), so that ZeRO partitions over "
            "all of them"
        )
    if engine.has_moe_layers:
        yield (
            f"mixture-of-experts layers of DeepSpeed: expert parallelism, in which {EXPERTS}; use "
            "layers with all experts on all ranks, such as those of transformers: ZeRO-3 "
            "partitions their weights"
        )


def _optimizer(engine: Any, wrapper: str) -> Iterator[str]:
    if not wrapper:
        return
    if wrapper not in OPTIMIZER_WRAPPERS:
        known = "; ".join(f"{name} ({what})" for name, what in OPTIMIZER_WRAPPERS.items())
        yield (
            f"the optimizer wrapper {wrapper}; supported are {known}. Remove the option that "
            "selects it, or install a release of DeepSpeed that this library was tested with"
        )
        return
    inner = inner_optimizer(engine.optimizer)
    yield from unfit_class(inner, in_zero=wrapper not in REPLICATED)
    offloaded = wrapper == "DeepSpeedZeroOptimizer" and engine.optimizer.cpu_offload
    has_muon = any(group.get("use_muon") for group in inner.param_groups)
    if offloaded and has_muon and not updates_offloaded_momentum(engine.optimizer):
        release = version_of(DEEPSPEED.package)
        yield f"Muon with offload_optimizer in ZeRO-1/2 under DeepSpeed {release}: requires 0.19.8"
    if wrapper != PLAIN:
        yield from _added_later(engine)
    buffers = live_flat_buffers(engine.optimizer, wrapper)
    members = [(buffer.group, p) for buffer in buffers for p in buffer.parameters]
    yield from _not_in_module(members, engine.module)
    yield from _mixed_types(buffers)
    flats = len({buffer.group for buffer in buffers})
    if len(inner.param_groups) < flats:
        yield (
            f"{type(inner).__name__} with {flats} parameter groups: DeepSpeed merges them into "
            f"{len(inner.param_groups)} at initialization; put all parameters into one group"
        )


def _not_in_module(
    members: Iterable[tuple[int, torch.nn.Parameter]], module: torch.nn.Module
) -> Iterator[str]:
    known, unnamed = set(module.parameters()), dict[int, list[str]]()
    for group, parameter in members:
        if parameter not in known:
            unnamed.setdefault(group, []).append(str(full_shape(parameter)))
    for group, shapes in unnamed.items():
        yield (
            f"parameter group {group} of the optimizer has {len(shapes)} parameters that the "
            f"module lacks, with the shapes {', '.join(shapes[:5])}: register them in the module, "
            "or remove them from the optimizer"
        )


def _mixed_types(buffers: Iterable[LiveFlatBuffer]) -> Iterator[str]:
    """Yield the types of masters, of which a manifest has one; in ZeRO, DeepSpeed casts them."""
    types = sorted({dtype_name(buffer.values.dtype) for buffer in buffers})
    if len(types) > 1:
        yield (
            f"trained weights of the types {' and '.join(types)} in stage 0: use one type, or "
            "ZeRO-1 with a separate parameter group for each type"
        )


def _added_later(engine: Any) -> Iterator[str]:
    """Yield the parameter groups without flat buffers, which DeepSpeed does not train."""
    whole = set(engine.module.parameters())
    for index, group in enumerate(engine.optimizer.optimizer.param_groups):
        if any(p in whole and p.requires_grad for p in group["params"]):
            yield (
                f"parameter group {index} was added to the optimizer after DeepSpeed was "
                "initialized, so it is not partitioned: create all groups at the start, with lr=0 "
                "until they are trained"
            )


def _options(engine: Any) -> Iterator[str]:
    scheduler = getattr(engine, "compression_scheduler", None)
    compression = getattr(scheduler, "different_compression_methods", {})
    for is_used, reason in (
        (getattr(engine.optimizer, "params_in_nvme_and_cpu", False), NVME_WEIGHTS),
        (getattr(engine, "zenflow", False), ZENFLOW),
        (engine.zero_quantized_nontrainable_weights(), QUANTIZED_FROZEN_WEIGHTS),
        (engine.optimized_linear_base_weight_sharding, SHARDED_BASE_WEIGHTS),
        (engine.random_ltd_enabled(), RANDOM_LTD),
        (engine.curriculum_learning_enabled(), CURRICULUM),
        (getattr(engine.optimizer, "zeropp_loco_param", None) is not None, LOCO),
        (any(method["enabled"] for method in compression.values()), COMPRESSION),
    ):
        if is_used:
            yield reason
