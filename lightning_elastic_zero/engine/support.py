"""Refusal, by name and before training, of what the library cannot save or resume.

Optimizers that are refused: their state cannot be cut, or their update depends on the cut.

DeepSpeed as it is installed: the accelerator that it uses, its operators, its own script.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import util
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import torch
from torch.distributed import get_world_size

from lightning_elastic_zero.core.manifest import STAGE_WEIGHTS, STAGES
from lightning_elastic_zero.core.requirements import DEEPSPEED, version_of
from lightning_elastic_zero.core.tensors import dtype_name
from lightning_elastic_zero.engine.addresses import full_shape
from lightning_elastic_zero.engine.buffers import (
    PLAIN,
    REPLICATED,
    LiveFlatBuffer,
    inner_optimizer,
    live_flat_buffers,
)
from lightning_elastic_zero.engine.deepspeed import (
    check_builder,
    check_names,
    check_ops,
    compatible_operators,
    updates_offloaded_momentum,
)
from lightning_elastic_zero.engine.optimizer import BITSANDBYTES, package_of
from lightning_elastic_zero.errors import UnsupportedError

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


def _on_flat_buffers(inner: Any) -> Iterator[str]:
    """Yield what is unfit about an optimizer that does not see whole parameters."""
    name = type(inner).__name__
    if name in CUT_OPTIMIZERS and package_of(inner) != BITSANDBYTES:
        yield _cut(name)
    if name == "Muon" and package_of(inner) == "torch":
        yield (
            "the optimizer torch.optim.Muon in ZeRO: it steps whole matrices, which are cut; use "
            'stage 0, or DeepSpeed\'s Muon ("optimizer": {"type": "Muon"} in its config)'
        )


def _bitsandbytes(inner: Any, name: str, *, in_zero: bool) -> Iterator[str]:
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


def _is_quantized(inner: Any) -> bool:
    """Whether an optimizer is one of torchao's or bitsandbytes' with a state of 8 bits or fewer."""
    package = package_of(inner)
    if package == "torchao":
        return math.isfinite(getattr(inner, "block_size", math.inf))
    if package == BITSANDBYTES:
        options = getattr(inner, "args", None)
        return bool(getattr(options, "optim_bits", 32) < 16)  # noqa: PLR2004 (bits)
    return False


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

NVME_WEIGHTS = (
    "zero_optimization.offload_param.device = nvme: weights in files are neither saved nor "
    "restored; offload weights to cpu instead"
)
SUPER_OFFLOAD = (
    "zero_optimization.offload_optimizer.super_offload: another process has its optimizer, whose "
    "state is out of reach; leave it out: offload_optimizer to cpu is supported without it"
)
ZENFLOW = (
    "zero_optimization.zenflow: a second optimizer, whose state is out of reach, steps the largest "
    "gradients; leave it out: offload_optimizer to cpu is supported without it"
)
EXPERTS = "each rank has some of the experts only"
EXPERT_PARALLEL = (
    f"expert_parallel.enabled: expert parallelism, in which {EXPERTS}; leave it out: all ranks "
    "have all experts then, and ZeRO-3 shares out their weights"
)
EXPERT_LAYERS = (
    f"mixture-of-experts layers of DeepSpeed: expert parallelism, in which {EXPERTS}; use layers "
    "that have all experts on all ranks, as those of transformers: ZeRO-3 shares out their weights"
)
PIPELINE = (
    "a PipelineModule: pipeline parallelism, in which each rank has some of the layers only; make "
    "the model a plain torch.nn.Module: ZeRO-3 shares out its weights"
)
QUANTIZED_FROZEN_WEIGHTS = (
    "zero_optimization.zero_quantized_nontrainable_weights: frozen weights would be integers with "
    "scales beside them; leave it out"
)
SEQUENCE_MESH = (
    "sequence_parallel_size and data_parallel_size: ZeRO would cut over the data ranks alone, and "
    "sequence ranks hold copies; leave them out. With a plain engine, sequence parallelism goes by "
    "an mpu: deepspeed.runtime.sequence_parallel.parallel_state_sp"
)
RANDOM_LTD = (
    "data_efficiency.data_routing.random_ltd: the state of its scheduler would be lost; leave it "
    "out"
)
CURRICULUM = (
    "data_efficiency.data_sampling.curriculum_learning: the state of its data sampler would be "
    "lost; leave it out, and order the data in a sampler of your own"
)


def optimizer_wrapper(engine: Any) -> str:
    """Return the class name of the engine's optimizer wrapper; empty without an optimizer.

    One that is not wrapped, as in stage 0, has the name of torch's own class.
    """
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        return PLAIN
    name = type(engine.optimizer).__name__
    if name == "BF16_Optimizer" and not getattr(engine.optimizer, "using_real_optimizer", True):
        return ""
    return "" if name in NO_OPTIMIZER_CLASSES else name


def check_supported(engine: Any) -> None:
    """Refuse an engine that the library cannot save and resume.

    Raises:
        UnsupportedError: with every reason that was found.
    """
    if not hasattr(engine, "optimizer"):
        found = f"{type(engine).__module__}.{type(engine).__qualname__}"
        _refuse([f"{found} is no DeepSpeed engine: pass what deepspeed.initialize returned first"])
    _refuse([*_release(engine)])  # What is looked at below may not be there else.
    reasons = [*_parallelism(engine), *_optimizer(engine), *_offload(engine), *_state(engine)]
    _refuse(reasons, trains=bool(optimizer_wrapper(engine)))


def check_config(config: Mapping[str, Any], *, trains: bool = True) -> None:
    """Refuse a DeepSpeed config that the library cannot serve, before an engine is built on it.

    Args:
        config: the DeepSpeed config dict. What only a live engine shows is left to
            ``check_supported``.
        trains: whether an optimizer will be made. An evaluation has none, and Lightning makes its
            engine of the precision and of ZeRO-3's section alone: each rank has the whole model,
            whatever else the config says, and reads weights only.

    Raises:
        UnsupportedError: with every reason that was found.
    """
    if reason := DEEPSPEED.incompatibility(version_of(DEEPSPEED.package)):
        _refuse([reason])
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    reasons = [*_stage(stage)]
    if trains or stage == STAGE_WEIGHTS:
        reasons += _zero_options(zero)
    if trains:
        reasons += _other_ranks(config)
        reasons += unfit_name(config.get("optimizer") or {}, stage)
        reasons += _data_efficiency(config.get("data_efficiency") or {})
    _refuse(reasons, trains=trains)


def check_optimizer(
    optimizer: torch.optim.Optimizer, config: Mapping[str, Any], module: torch.nn.Module
) -> None:
    """Refuse an optimizer for ZeRO before DeepSpeed, which asks for an option to take it first.

    What stage 0 makes of it depends on DeepSpeed's release, and is left to ``check_supported``.

    Args:
        optimizer: the user's.
        config: the DeepSpeed config dict.
        module: whose parameters it trains.

    Raises:
        UnsupportedError: with every reason that was found.
    """
    groups = enumerate(group["params"] for group in optimizer.param_groups)
    reasons = [*_not_in_module(((i, p) for i, held in groups for p in held), module)]
    if (config.get("zero_optimization") or {}).get("stage", 0):
        reasons += unfit_class(optimizer, in_zero=True)
    _refuse(reasons)


def _zero_options(zero: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of ZeRO that keep state where it cannot be reached."""
    if (zero.get("offload_param") or {}).get("device") == "nvme":
        yield NVME_WEIGHTS
    if (zero.get("offload_optimizer") or {}).get("super_offload"):
        yield SUPER_OFFLOAD
    if zero.get("zenflow"):
        yield ZENFLOW
    if zero.get("zero_quantized_nontrainable_weights"):
        yield QUANTIZED_FROZEN_WEIGHTS


def _other_ranks(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the kinds of parallelism beside data parallelism that a config asks for."""
    size = (config.get("tensor_parallel") or {}).get("autotp_size", 0)
    if size > 1:
        yield f"tensor_parallel.autotp_size = {size}: {_tensor_parallelism(size)}"
    if (config.get("expert_parallel") or {}).get("enabled"):
        yield EXPERT_PARALLEL
    if "data_parallel_size" in config and config.get("sequence_parallel_size", 1) > 1:
        yield SEQUENCE_MESH


def _tensor_parallelism(size: int) -> str:
    """Return why tensor parallelism is refused."""
    return (
        f"tensor or model parallelism over {size} ranks, in which each has a slice of a weight; "
        "leave it out: ZeRO-3 shares out the weights too"
    )


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


def _refuse(reasons: list[str], *, trains: bool = True) -> None:
    """Raise for all reasons at once, so that nobody mends a config one error at a time."""
    if reasons:
        what = (
            "save and resume this run"
            if trains
            else "evaluate this model: its weights can be neither loaded nor saved"
        )
        listed = "\n".join(f"  - {reason}" for reason in reasons)
        msg = f"lightning_elastic_zero cannot {what}:\n{listed}"
        raise UnsupportedError(msg)


def _release(engine: Any) -> Iterator[str]:
    """Yield what is wrong with the installed release of DeepSpeed."""
    found = version_of(DEEPSPEED.package)
    if reason := DEEPSPEED.incompatibility(found):
        yield reason
    yield from check_names(engine, optimizer_wrapper(engine), found)


def _parallelism(engine: Any) -> Iterator[str]:
    """Yield the kinds of parallelism beside data parallelism that are in use."""
    if "PipelineEngine" in {kind.__name__ for kind in type(engine).__mro__}:
        yield PIPELINE
    elif engine.mp_world_size > 1:
        yield _tensor_parallelism(engine.mp_world_size)
    elif engine.seq_dp_world_size != get_world_size():
        yield (
            f"ZeRO over {engine.seq_dp_world_size} of {get_world_size()} ranks, as sequence "
            "parallelism by a device mesh (mesh_param) has it: its sequence ranks hold copies. "
            "Pass an mpu to deepspeed.initialize whose get_sequence_data_parallel_group has all "
            "ranks (deepspeed.runtime.sequence_parallel.parallel_state_sp), so that ZeRO cuts over "
            "all of them"
        )
    if engine.has_moe_layers:
        yield EXPERT_LAYERS


def _optimizer(engine: Any) -> Iterator[str]:
    """Yield what is unknown or unfit about the optimizer and its wrapper."""
    wrapper = optimizer_wrapper(engine)
    if not wrapper:
        return
    if wrapper not in OPTIMIZER_WRAPPERS:
        known = "; ".join(f"{name} ({what})" for name, what in OPTIMIZER_WRAPPERS.items())
        yield (
            f"the optimizer wrapper {wrapper}; known are {known}. Leave out the option that brings "
            "it, or install a release of DeepSpeed that this library was tested with"
        )
        return
    yield from _inner_optimizer(engine, wrapper)


def _inner_optimizer(engine: Any, wrapper: str) -> Iterator[str]:
    """Yield what is unfit about the optimizer inside a known wrapper."""
    inner = inner_optimizer(engine.optimizer)
    name = type(inner).__name__
    yield from unfit_class(inner, in_zero=wrapper not in REPLICATED)
    offloaded = wrapper == "DeepSpeedZeroOptimizer" and engine.optimizer.cpu_offload
    if offloaded and any(group.get("use_muon") for group in inner.param_groups):
        yield from _offloaded_muon(engine.optimizer)
    if wrapper != PLAIN:
        yield from _added_later(engine)
    buffers = live_flat_buffers(engine.optimizer, wrapper)
    members = [(buffer.group, p) for buffer in buffers for p in buffer.parameters]
    yield from _not_in_module(members, engine.module)
    yield from _mixed_types(buffers)
    flats = len({buffer.group for buffer in buffers})
    if len(inner.param_groups) < flats:
        yield (
            f"{name} with {flats} parameter groups: DeepSpeed itself collapses them into "
            f"{len(inner.param_groups)} when it starts; put all parameters into one group"
        )


def _not_in_module(
    members: Iterable[tuple[int, torch.nn.Parameter]], module: torch.nn.Module
) -> Iterator[str]:
    """Yield the parameter groups with parameters that have no name in the module."""
    known, unnamed = set(module.parameters()), dict[int, list[str]]()
    for group, parameter in members:
        if parameter not in known:
            unnamed.setdefault(group, []).append(str(full_shape(parameter)))
    for group, shapes in unnamed.items():
        yield (
            f"parameter group {group} of the optimizer has {len(shapes)} parameters that the "
            f"module lacks, of the shapes {', '.join(shapes[:5])}: register them in the module, "
            "as attributes of it or of a submodule, or leave them out of the optimizer"
        )


def _mixed_types(buffers: Iterable[LiveFlatBuffer]) -> Iterator[str]:
    """Yield the parameter groups of stage 0 whose weights have several types."""
    types = dict[int, set[str]]()
    for buffer in buffers:
        types.setdefault(buffer.group, set()).add(dtype_name(buffer.values.dtype))
    for group, names in types.items():
        if len(names) > 1:
            yield (
                f"parameter group {group} has weights of the types {' and '.join(sorted(names))}: "
                "put the weights of each type into a parameter group of their own"
            )


def _offloaded_muon(optimizer: Any) -> Iterator[str]:
    """Yield that a release does not keep offloaded momentum as it is known here."""
    if not updates_offloaded_momentum(optimizer):
        found = version_of(DEEPSPEED.package)
        yield f"Muon with offload_optimizer in ZeRO-1/2 under DeepSpeed {found}: 0.19.8 can do it"


def _added_later(engine: Any) -> Iterator[str]:
    """Yield the parameter groups that DeepSpeed has not made flat buffers of: it does not train."""
    whole = set(engine.module.parameters())
    for index, group in enumerate(engine.optimizer.optimizer.param_groups):
        if any(p in whole and p.requires_grad for p in group["params"]):
            yield (
                f"parameter group {index}, which was added to the optimizer after DeepSpeed was "
                "initialized, so that it is not partitioned: let all groups be there from the "
                "beginning, with lr=0 until their turn comes"
            )


def _offload(engine: Any) -> Iterator[str]:
    """Yield the kinds of offload that are not supported."""
    if getattr(engine.optimizer, "params_in_nvme_and_cpu", False):
        yield NVME_WEIGHTS
    if getattr(engine, "zenflow", False):
        yield ZENFLOW


def _state(engine: Any) -> Iterator[str]:
    """Yield options that hold state which would not come back."""
    if engine.zero_quantized_nontrainable_weights():
        yield QUANTIZED_FROZEN_WEIGHTS
    if engine.random_ltd_enabled():
        yield RANDOM_LTD
    if engine.curriculum_learning_enabled():
        yield CURRICULUM


log = logging.getLogger(__name__)

_OLD_S = 600.0
"""No operator's build takes longer: who holds such a lock elsewhere has ended too."""

_LOOK_AGAIN_S = 0.5
"""From closing a lock to removing it takes microseconds."""


def use_accelerator(name: str, *, compiles: bool = True) -> None:
    """Set DeepSpeed's accelerator to the one that the trainer uses: ``"cpu"`` or ``"cuda"``.

    DeepSpeed decides once per process, by ``DS_ACCELERATOR`` or by what it finds.

    Args:
        name: the accelerator.
        compiles: whether to wait, where need be, while DeepSpeed compiles what speeds gloo up.

    Raises:
        UnsupportedError: it has decided otherwise already.
    """
    os.environ.setdefault("DS_ACCELERATOR", name)
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415 (after the variable is set)

    chosen = get_accelerator().device_name()
    if chosen != name:
        msg = (
            f"the trainer runs on {name}, but DeepSpeed has chosen {chosen} in this process: set "
            f"the environment variable DS_ACCELERATOR={name} before the script starts"
        )
        raise UnsupportedError(msg)
    if name == "cpu":
        _do_without_shared_memory_op(get_accelerator(), tries=compiles)


def report_abandoned_builds(config: Mapping[str, Any]) -> None:
    """Warn of locks that whatever loads an operator waits for; one rank of each node does.

    Args:
        config: DeepSpeed's, which tells whether an operator is needed.

    Raises:
        UnsupportedError: an old lock is that of an operator that nothing replaces.
    """
    offload = (config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    for name, lock in abandoned_builds().items():
        try:
            age_s = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            continue  # Removed since.
        msg = (
            f"a killed build of the operator {name} has probably left its lock: no process that is "
            f"visible here holds it, and it is {age_s / 60:.0f} minutes old. Whatever loads the "
            f"operator waits without end. If no other machine builds it now, delete {lock}"
        )
        if name == "async_io" and offload.get("device") == "nvme" and age_s > _OLD_S:
            raise UnsupportedError(msg)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            log.warning("%s", msg)


def abandoned_builds() -> dict[str, Path]:
    """Return the locks of operators' builds that no process has open, as far as one sees.

    torch (``torch.utils.file_baton``) makes the file before it builds or loads an operator, keeps
    it open, and closes and removes it at the end. Who finds it waits until it is gone: after a
    build that was killed, for ever. None is removed here: it may be another machine's.
    """
    first = _unheld_locks()
    if first:
        time.sleep(_LOOK_AGAIN_S)  # Until one that was just closed is removed.
    again = _unheld_locks() if first else {}
    return {lock.parent.name: lock for lock, stamp in again.items() if first.get(lock) == stamp}


def _unheld_locks() -> dict[Path, tuple[int, int]]:
    """Return locks that no process has open, each with its inode and time of change."""
    if root := os.environ.get("TORCH_EXTENSIONS_DIR"):
        locks = Path(root).glob("*/lock")
    else:
        from torch.utils.cpp_extension import get_default_build_root  # noqa: PLC0415 (is slow)

        python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
        locks = Path(get_default_build_root()).glob(f"{python}_*/*/lock")
    found = {}
    for lock in locks:
        with suppress(OSError):
            status = lock.stat()
            if not _is_open(status):
                found[lock] = (status.st_ino, status.st_ctime_ns)
    return found


def _is_open(file: os.stat_result) -> bool:
    """Whether a process that may be looked at has a file open."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    if os.path.samestat(descriptor.stat(), file):
                        return True
    return False


def _do_without_shared_memory_op(
    accelerator: Any,
    *,
    tries: bool,
) -> None:
    """Make DeepSpeed start on a machine that cannot compile its shared-memory collectives.

    They are an optional speed-up beside gloo, but ``init_distributed`` raises where they do not
    build. DeepSpeed consults its table of compatible ops first; what cannot be built is not.

    Args:
        accelerator: DeepSpeed's.
        tries: whether they are built at all.
    """
    from deepspeed import ops  # noqa: PLC0415 (DeepSpeed takes seconds to import)

    found = version_of(DEEPSPEED.package)
    check_ops(ops, accelerator, found)
    builder = accelerator.create_op_builder("ShareMemCommBuilder")
    if builder is None:
        return
    check_builder(builder, found)
    table = compatible_operators(ops)
    if not table.get(builder.NAME, False):
        return
    if tries and (lock := abandoned_builds().get(builder.NAME)):
        log.warning("going on without DeepSpeed's shared-memory collectives: nobody holds %s", lock)
        tries = False
    if not tries:
        table[builder.NAME] = False
        return
    try:
        builder.load()
    except (RuntimeError, ImportError, OSError, SubprocessError) as error:
        log.warning("going on without DeepSpeed's shared-memory collectives: %s", error)
        table[builder.NAME] = False


def recovery_script() -> Path | None:
    """Return DeepSpeed's own ``zero_to_fp32.py``, which checkpoints carry; None where it lacks."""
    spec = util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return None
    script = Path(next(iter(spec.submodule_search_locations))) / "utils" / "zero_to_fp32.py"
    return script if script.is_file() else None


def replace_initialize(wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Make ``deepspeed.initialize`` pass each engine through a function, until it is undone.

    Args:
        wrap: called with each engine; returns it.

    Returns:
        A function that restores ``deepspeed.initialize``.
    """
    import deepspeed  # noqa: PLC0415 (takes seconds)

    original = deepspeed.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        engine, *rest = original(*args, **kwargs)
        return (wrap(engine), *rest)

    def restore() -> None:
        deepspeed.initialize = original

    deepspeed.initialize = initialize
    return restore
