"""The small model, the configuration of a run (`EngineCase`), and the engine built from it."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import distributed, nn

VOCABULARY, WIDTH, HIDDEN = 50, 33, 65
GLOBAL_BATCH = 24  # Divides by 1, 2, 3, 4 and 8 ranks.

UNTRAINED = "never"
BUFFERS = ("bn.running_mean", "bn.running_var", "bn.num_batches_tracked", "average", "seen")
"""The persistent buffers; ``scratch`` is not persistent."""

ODD_BUFFERS = {
    "reshaped": (torch.full((1,), 0.1), torch.full((2, 2), 300)),
    "narrow": (torch.full((HIDDEN,), 0.1, dtype=torch.float16), torch.tensor(3, dtype=torch.uint8)),
    "integer": (torch.full((HIDDEN,), 3), torch.tensor(data=True)),
}
"""Versions of ``average`` and ``seen`` with shapes or types that differ from the default ones."""


class Norm(nn.BatchNorm1d):
    """BatchNorm in fp32; DeepSpeed casts parameters to bf16 (and buffers, before 0.19)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, var = self.running_mean.float(), self.running_var.float()
        found = nn.functional.batch_norm(
            input.float(), mean, var, self.weight.float(), self.bias.float(), training=self.training
        )
        if self.training and mean is not self.running_mean:
            self.running_mean.copy_(mean)
            self.running_var.copy_(var)
        return found.to(input.dtype)


class Net(nn.Module):
    """A model with tied, frozen, one-element, unused and optionally empty parameters, and buffers.

    Args:
        seed: of all random values.
        empty: add a parameter without elements.
        renamed: name the layer ``b`` ``c``.
        hidden: size of the inner layer.
        buffers: a key of ``ODD_BUFFERS``: constant buffers with other shapes or types.
        thawed: train the layer ``frozen``, and freeze ``a``.
    """

    def __init__(
        self,
        seed: int,
        *,
        empty: bool = False,
        renamed: bool = False,
        hidden: int = HIDDEN,
        buffers: str = "",
        thawed: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.a = nn.Linear(WIDTH, hidden)
        self.bn = Norm(hidden)
        self.frozen = nn.Linear(hidden, hidden)
        self.output = "c" if renamed else "b"
        self.add_module(self.output, nn.Linear(hidden, WIDTH))
        self.one = nn.Parameter(torch.randn(1))
        self.never = nn.Parameter(torch.randn(7))
        if empty:
            self.empty = nn.Parameter(torch.empty(0))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.average: torch.Tensor
        self.seen: torch.Tensor
        self.buffers_are = buffers
        average, seen = ODD_BUFFERS.get(buffers, (torch.randn(hidden), torch.tensor(seed)))
        self.register_buffer("average", average.clone())
        self.register_buffer("seen", seen.clone())
        self.register_buffer("scratch", torch.full((3,), float(seed)), persistent=False)
        self.frozen.requires_grad_(thawed)
        self.a.requires_grad_(not thawed)
        for tensor in (self.bn.weight, self.bn.bias, self.bn.running_mean):
            nn.init.normal_(tensor)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one row of scores per token."""
        h = self.bn(torch.relu(self.a(self.embedding(x))))
        if self.training and not self.buffers_are:
            with torch.no_grad():
                self.average.lerp_(h.detach().float().mean(0).to(self.average.dtype), 0.25)
                self.seen.add_(x.numel())
        h = self.get_submodule(self.output)(h + self.frozen(h))
        scores: torch.Tensor = self.head(h) * self.one
        return scores


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's part of a step's global batch, which does not depend on the world size."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randint(0, VOCABULARY, (GLOBAL_BATCH,), generator=generator)
    y = torch.randn(GLOBAL_BATCH, VOCABULARY, generator=generator)
    size = GLOBAL_BATCH // world
    return x[rank * size : (rank + 1) * size], y[rank * size : (rank + 1) * size]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def group_members(model: nn.Module, grouping: str) -> list[list[nn.Parameter]]:
    """Return the members of each parameter group; "every" includes frozen parameters."""
    parameters = list(trained(model).values())
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    new = [p for name, p in trained(model).items() if name.startswith(("c.", "frozen."))]
    old = [[p for p in ps if all(p is not n for n in new)] for ps in (matrices, vectors)]
    biases = [p for name, p in trained(model).items() if name.endswith("bias")]
    others = [p for name, p in trained(model).items() if not name.endswith("bias")]
    return {
        "one": [parameters],
        "two": [matrices, vectors],
        "swapped": [vectors, matrices],
        "reversed": [matrices[::-1], vectors[::-1]],
        "every": [list(model.parameters())],
        "every two": [list(model.parameters())[:4], list(model.parameters())[4:]],
        "three": [matrices, vectors[:3], vectors[3:]],
        "biases": [others, biases],
        "new apart": [*old, new],
    }[grouping]


@contextmanager
def fp16_on_cpu() -> Iterator[None]:
    """Let DeepSpeed build fp16 engines on CPUs whose oneDNN lacks fp16; torch has its own code."""
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    before = get_accelerator()
    if before.device_name() != "cpu" or before.is_fp16_supported():
        yield
        return
    half_on_cpu = CPU_Accelerator()
    half_on_cpu.is_fp16_supported = lambda: True
    set_accelerator(half_on_cpu)
    try:
        yield
    finally:
        set_accelerator(before)


def forget_autocast() -> None:
    """Undo ``torch_autocast``, which DeepSpeed sets for the whole process."""
    from deepspeed.runtime import torch_autocast

    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    torch_autocast.TORCH_AUTOCAST_DTYPE = None


@contextmanager
def wrapper_of_0_18_4() -> Iterator[None]:
    """Make DeepSpeed use the stage 0 wrapper for ``B``, as 0.18.4 does."""
    from deepspeed.runtime import engine

    if engine.DDP_BFLOAT16 == engine.BFLOAT16:  # This release, or already patched.
        yield
        return
    before, kind = engine.DDP_BFLOAT16, engine.FP16_UnfusedOptimizer
    engine.DDP_BFLOAT16 = engine.BFLOAT16
    # Later releases call this method at the end of each window.
    kind.set_gradient_accumulation_boundary = lambda _, __: None
    try:
        yield
    finally:
        engine.DDP_BFLOAT16 = before
        del kind.set_gradient_accumulation_boundary


OTHERS = {
    "bitsandbytes.optim.SGD": {"lr": 0.01, "momentum": 0.9},
    "bitsandbytes.optim.PytorchLARS": {"lr": 0.01, "momentum": 0.9},
    "transformers.optimization.Adafactor": {"lr": 1e-3, "relative_step": False},
}
"""Required arguments in addition to the hyperparameters of the groups."""


def optimizer_of_class(name: str, groups: list[dict[str, Any]]) -> Any:
    """Make an optimizer from a qualified class name, or a torch optimizer with a single group."""
    if "." in name:
        return class_of(name)(groups, **OTHERS.get(name, {"lr": 1e-3}))
    return class_of(f"torch.optim.{name}")([p for group in groups for p in group["params"]])


def class_of(name: str) -> Any:
    package, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(package), kind)


SMALLEST_BYTES = 1024
"""The smallest tensor that DeepSpeed swaps here; its default is 1 MiB."""

AIO = {"block_size": SMALLEST_BYTES}
"""DeepSpeed's options for reading and writing swapped tensors."""


def swap_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"elastic-zero-swap-{os.getpid()}"


def offload_options(setup: EngineCase) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if setup.offload:
        options["offload_optimizer"] = {
            "device": "cpu",
            "pin_memory": setup.pinned,
            "ratio": setup.ratio,
        }
    if setup.nvme:
        pipelined = setup.nvme == "pipelined"
        options["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": str(swap_folder()),
            "pin_memory": False,
            "buffer_count": 16 if pipelined else 5,
            "pipeline_read": pipelined,
            "pipeline_write": pipelined,
        }
    if setup.offloaded_weights:
        options["offload_param"] = {"device": "cpu", "pin_memory": setup.pinned}
    return options


@contextmanager
def surroundings(setup: EngineCase) -> Iterator[None]:
    with ExitStack() as stack:
        if setup.nvme:
            stack.enter_context(_small_tensors_swapped())
        if setup.unpartitioned:
            stack.enter_context(wrapper_of_0_18_4())
        if setup.optimizer == "Muon":  # Compiling it takes a minute per process.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def _small_tensors_swapped() -> Iterator[None]:
    """Make DeepSpeed swap tensors smaller than 1 MiB; remove the swap folder afterwards."""
    from deepspeed.runtime.swap_tensor import optimizer_utils

    least, optimizer_utils.MIN_AIO_BYTES = optimizer_utils.MIN_AIO_BYTES, SMALLEST_BYTES
    try:
        yield
    finally:
        optimizer_utils.MIN_AIO_BYTES = least
        shutil.rmtree(swap_folder(), ignore_errors=True)


def step_some_on_device(engine: Any, setup: EngineCase) -> None:
    """On a CPU, rename the device of the optimizer part that is not offloaded."""
    if setup.ratio < 1 and engine.device.type == "cpu":
        devices = engine.optimizer.subgroup_to_device
        devices.update(dict.fromkeys(range(int((1 - setup.ratio) * len(devices))), "cpu:0"))


Engine: TypeAlias = Any
"""DeepSpeed is untyped."""


QUICK_SCALER = {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2}
"""A loss scale that grows after two steps, and shrinks after the second overflow."""

QUICK_GRAD_SCALER = {
    "scale": 256.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2,
    "_growth_tracker": 0,
}
"""The same for torch's GradScaler.

Under ZeRO-1/2 a scale that overflows from the start would never shrink, because DeepSpeed skips
the scaler's update then.
"""

OVERFLOW = 1e30
"""A factor that makes a loss overflow in fp16."""


@dataclass(frozen=True)
class EngineCase:
    """The configuration of a run."""

    world: int
    zero: str = "1"
    """A ZeRO stage, or ``B``: ZeRO-1 in bf16 with fp32 gradients, which uses BF16_Optimizer.

    ``0`` uses torch's own optimizer in fp32, and FP16_UnfusedOptimizer otherwise; with the
    optimizer ``FusedAdam``, it uses FP16_Optimizer.
    """
    precision: str = "fp32"
    round_robin: bool = False
    alignment: bool = False
    offload: bool = False
    sub_group: int = 1_000_000_000
    bucket: int = 50_000
    persistence: int = 100_000
    optimizer: str = "AdamW"
    grouping: str = "two"
    empty: bool = False
    renamed: bool = False
    hidden: int = HIDDEN
    steady: bool = False
    """BatchNorm in eval mode, so that the loss does not depend on the split of the batch."""
    elastic: bool = False
    """DeepSpeed's ``elastic_checkpoint``."""
    sequential: bool = False
    """``stage3_allgather_sequential``: gather weights one after another (ZeRO-3)."""
    hpz: int = 1
    """``zero_hpz_partition_size``: ranks that share a second copy of the weights (ZeRO-3)."""
    quantized: str = ""
    """Suffix of ``zero_quantized_...``: ``weights`` or ``gradients``."""
    accumulation: int = 1
    """Micro-batches per optimizer step; ``train`` counts micro-batches."""
    buffers: str = ""
    """Buffers of other shapes or types (``ODD_BUFFERS``)."""
    bf16_masters: bool = False
    """``bf16_master_weights_and_grads``, or that of fp16, which needs CPUAdam; optimizer states are
    bf16 too, unless offloaded. Recorded fixtures name this field."""
    autocast: bool = False
    """``torch_autocast`` in fp16, with torch's scaler."""
    thawed: bool = False
    """Freeze another layer (``Net``)."""
    muon_in_memory: bool = False
    """``save_muon_momentum_buffer_in_memory``."""
    contiguous: bool = True
    """``contiguous_gradients``."""
    pinned: bool = True
    """``pin_memory`` of offloaded state."""
    offloaded_weights: bool = False
    """``offload_param`` to the CPU (ZeRO-3)."""
    ratio: float = 1.0
    """The fraction of the optimizer that is offloaded (ZeRO-3)."""
    nvme: str = ""
    """Keep masters and optimizer states in files (ZeRO-3): ``plain`` or ``pipelined``."""
    fp32_gradients: bool = False
    """Accumulate gradients in fp32 (ZeRO-2 and 3)."""
    unpartitioned: bool = False
    """``B`` as in DeepSpeed 0.18.4 (``wrapper_of_0_18_4``)."""
    sequence: int = 1
    """Ranks that share a sequence (Ulysses); the only engines are in test_sequence_parallelism."""
    net: Callable[[EngineCase, int], nn.Module] | None = None
    """Creates another model than ``Net``, from the case and a seed."""

    def __str__(self) -> str:
        base = f"zero{self.zero}x{self.world}-{self.precision}"
        skipped = ("world", "zero", "precision")
        named = [f for f in fields(self) if f.name not in skipped]
        odd = [(f.name, getattr(self, f.name)) for f in named if getattr(self, f.name) != f.default]
        options = [
            n if value is True else f"{n}_{getattr(value, '__name__', value)}" for n, value in odd
        ]
        return "-".join([base, *options])

    @property
    def stage(self) -> int:
        return 1 if self.zero == "B" else int(self.zero)

    @property
    def dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision, torch.float32)

    @property
    def master_dtype(self) -> torch.dtype:
        return self.dtype if self.bf16_masters else torch.float32

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of the masters, except for CPUAdam, which uses fp32."""
        return torch.float32 if self.optimizer == "CPUAdam" else self.master_dtype

    @property
    def momentum_dtype(self) -> torch.dtype:
        """Muon's momentum has the dtype of communicated gradients, or that of the masters."""
        in_files = self.nvme and not self.muon_in_memory
        if (self.zero == "3" and not in_files) or (self.zero in "12" and not self.offload):
            return self.dtype
        return self.master_dtype

    def dtype_of_state(self, kind: str) -> torch.dtype:
        is_momentum = self.optimizer == "Muon" and kind == "momentum_buffer"
        return self.momentum_dtype if is_momentum else self.state_dtype

    @property
    def buffers_kept(self) -> tuple[str, ...]:
        if self.net is None:
            return BUFFERS
        model = self.twin().model(0)
        return tuple(name for name, _ in model.named_buffers() if name in model.state_dict())

    def model(self, seed: int) -> Any:
        if self.net is not None:
            return self.net(self, seed)
        return Net(
            seed,
            empty=self.empty,
            renamed=self.renamed,
            hidden=self.hidden,
            buffers=self.buffers,
            thawed=self.thawed,
        )

    def twin(self) -> EngineCase:
        """Return a simpler setup with the same layout of flat buffers."""
        fused = self.zero == "0" and self.optimizer == "FusedAdam"
        # Muon sorts its parameters by size.
        optimizer = self.optimizer if fused or self.optimizer == "Muon" else "SGD"
        plain = replace(
            self, steady=False, elastic=False, accumulation=1, autocast=False, sequence=1
        )
        # fp16 cannot represent the bf16 numbers that identify elements. Both have the same size.
        precision = "bf16" if self.precision == "fp16" else self.precision
        plain = replace(plain, optimizer=optimizer, precision=precision, bf16_masters=False)
        return replace(plain, ratio=1.0, nvme="", quantized="")

    def config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": self.bucket,
            "allgather_bucket_size": self.bucket,
            "round_robin_gradients": self.round_robin,
            "contiguous_gradients": self.contiguous,
        }
        if self.alignment:
            zero["parameter_alignment"] = True
        if self.elastic:
            zero["elastic_checkpoint"] = True
        zero.update(offload_options(self))
        if self.zero == "3":
            zero["sub_group_size"] = self.sub_group
            zero["stage3_param_persistence_threshold"] = self.persistence
            if self.sequential:
                zero["stage3_allgather_sequential"] = True
        if self.quantized:
            zero[f"zero_quantized_{self.quantized}"] = True
        if self.hpz > 1:
            zero["zero_hpz_partition_size"] = self.hpz
        if self.optimizer == "Muon":
            zero["reduce_scatter"] = False
            zero["save_muon_momentum_buffer_in_memory"] = self.muon_in_memory
        return {
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // self.world,
            # Lightning refuses this key; 1 is DeepSpeed's default.
            **({"gradient_accumulation_steps": self.accumulation} if self.accumulation > 1 else {}),
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 1.0,  # The default since 0.19; before, gradients were not clipped.
            "aio": AIO,
            **self._types(),
        }

    def _types(self) -> dict[str, Any]:
        types: dict[str, Any] = {"bf16": {"enabled": self.precision == "bf16"}}
        if self.precision == "fp16":
            types["fp16"] = {"enabled": True, **QUICK_SCALER}
        if self.bf16_masters and self.precision == "fp16":
            types["fp16"]["fp16_master_weights_and_grads"] = True
        elif self.bf16_masters:
            masters = {"bf16_master_weights_and_grads": True}
            types["bf16"] |= {**masters, "bf16_optimizer_states": not self.offload}
        if self.autocast:
            types["torch_autocast"] = {"enabled": True, "dtype": "float16"}
        if self.zero == "B" or self.fp32_gradients:
            types["data_types"] = {"grad_accum_dtype": "fp32"}
        return types


CAPTURABLE = ("capturable", "foreach capturable", "fused capturable")
"""torch's AdamW with step counts on the device; on a CPU only the fused one can step."""

BETAS = ("Adam", "AdamW", "AMSGrad", "NAdam", "RAdam", "Adamax", "fused", "foreach", *CAPTURABLE)
"""torch optimizers whose groups get different betas."""

ODD_SHAPES = {"MatrixState": (2, 3), "ShortState": (5,), "QuantizedState": (0,)}
"""Optimizers whose state is not element-wise."""


class Quantized(torch.Tensor):
    """A tensor subclass with additional data, as quantized states are."""


class OddState(torch.optim.Optimizer):
    def __init__(self, params: Any, shape: tuple[int, ...]) -> None:
        super().__init__(params, {"lr": 0.01})
        self.shape = shape

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    one_each = torch.ones_like(p.detach()).as_subclass(Quantized)
                    self.state[p]["factors"] = torch.ones(self.shape) if self.shape[0] else one_each
                    p.add_(p.grad, alpha=-group["lr"])


def make_optimizer(name: str, members: list[list[nn.Parameter]], tilt: float) -> Engine:
    """Make an optimizer with different groups; ``tilt`` scales learning rates and weight decays."""
    rates, decays = (1e-3, 5e-3, 2e-3), (0.1, 0.01, 0.02)
    groups: list[dict[str, Any]] = [
        {"params": ps, "lr": rates[i] * tilt, "weight_decay": decays[i] * tilt}
        for i, ps in enumerate(members)
    ]
    if name in ODD_SHAPES:
        return OddState([{"params": ps} for ps in members], ODD_SHAPES[name])
    if name == "Muon":
        return _muon(members, tilt)
    if name in (*BETAS, "CPUAdam", "FusedAdam"):
        for i, group in enumerate(groups):
            group["betas"] = (0.9 - 0.05 * i, 0.99 - 0.01 * i - tilt / 1000)
    if name in DEEPSPEEDS:
        return deepspeeds_own(name)(groups)
    if "." in name or name in ("LBFGS", "SparseAdam"):
        return optimizer_of_class(name, groups)
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "Adam": (torch.optim.Adam, {}),
        "AdamW": (torch.optim.AdamW, {}),
        "AMSGrad": (torch.optim.AdamW, {"amsgrad": True}),
        "SGD": (torch.optim.SGD, {}),
        "Momentum": (torch.optim.SGD, {"momentum": 0.9}),
        "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.25}),
        "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        "NAdam": (torch.optim.NAdam, {}),
        "RAdam": (torch.optim.RAdam, {}),
        "Adamax": (torch.optim.Adamax, {}),
        "Adadelta": (torch.optim.Adadelta, {}),
        "Adafactor": (torch.optim.Adafactor, {}),
        "ASGD": (torch.optim.ASGD, {}),
        "Rprop": (torch.optim.Rprop, {}),
        "fused": (torch.optim.AdamW, {"fused": True}),
        "foreach": (torch.optim.AdamW, {"foreach": True, "maximize": True}),
        "capturable": (torch.optim.AdamW, {"capturable": True}),
        "foreach capturable": (torch.optim.AdamW, {"foreach": True, "capturable": True}),
        "fused capturable": (torch.optim.AdamW, {"fused": True, "capturable": True}),
        "fused SGD": (torch.optim.SGD, {"fused": True, "momentum": 0.9, "maximize": True}),
        "differentiable": (torch.optim.Adam, {"foreach": False, "decoupled_weight_decay": True}),
    }
    if name == "Rprop":
        groups = [{k: v for k, v in group.items() if k != "weight_decay"} for group in groups]
    kind, options = kinds[name]
    return kind(groups, **options)


DEEPSPEEDS = {
    "CPUAdam": ("deepspeed.ops.adam", "DeepSpeedCPUAdam", "CPUAdamBuilder"),
    "FusedAdam": ("deepspeed.ops.adam", "FusedAdam", "FusedAdamBuilder"),
    "CPULion": ("deepspeed.ops.lion", "DeepSpeedCPULion", "CPULionBuilder"),
    "CPUAdagrad": ("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad", "CPUAdagradBuilder"),
}
"""DeepSpeed's own optimizers: module, class and operator builder."""


def deepspeeds_own(name: str) -> Any:
    module, kind, _ = DEEPSPEEDS[name]
    return class_of(f"{module}.{kind}")


def _muon(members: list[list[nn.Parameter]], tilt: float) -> Engine:
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    matrices, rest = members
    for parameter in matrices:
        parameter.use_muon = True  # type: ignore[attr-defined]
    return MuonWithAuxAdam(
        [
            {"params": matrices, "lr": 0.01 * tilt, "use_muon": True},
            {"params": rest, "lr": 0.01 * tilt, "use_muon": False},
        ]
    )


def inner_of(engine: Engine) -> Engine:
    """Return the wrapped optimizer; in stage 0 with fp32, DeepSpeed does not wrap it."""
    optimizer = engine.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


@contextmanager
def engine_of(
    setup: EngineCase, seed: int, *, tilt: float = 1.0, model: nn.Module | None = None
) -> Iterator[Engine]:
    import deepspeed

    model = setup.model(seed) if model is None else model
    optimizer = make_optimizer(setup.optimizer, group_members(model, setup.grouping), tilt)
    with fp16_on_cpu() if setup.precision == "fp16" else nullcontext(), surroundings(setup):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=setup.config(), dist_init_required=False
        )
        step_some_on_device(engine, setup)
        if setup.autocast:
            grad_scaler_of(engine).load_state_dict(QUICK_GRAD_SCALER)
        try:
            yield engine
        finally:
            engine.destroy()
            del engine, model, optimizer
            gc.collect()
            reset_secondary_partition(setup)
            if setup.autocast:
                forget_autocast()


def grad_scaler_of(engine: Engine) -> Engine:
    """Return torch's GradScaler of ``torch_autocast``, or None; in stage 0 the engine has it."""
    own = getattr(engine, "torch_autocast_z0_gradscaler", None)
    return own or getattr(engine.optimizer, "torch_autocast_gradscaler", None)


def forget_tensor_ranks() -> None:
    """Reset DeepSpeed's global groups of tensor ranks, which later engines would use."""
    from deepspeed.runtime.tensor_parallel import init_utils
    from deepspeed.utils import groups

    groups.mpu = groups.mesh_device = None
    groups._DATA_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = None
    groups._TENSOR_MODEL_PARALLEL_GROUP = None
    init_utils._TP_MODEL_INIT_ARGS = None


def reset_secondary_partition(setup: EngineCase) -> None:
    """Undo hpZ, whose groups DeepSpeed keeps for the whole process."""
    if setup.hpz > 1:
        from deepspeed.utils import groups

        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def train(engine: Engine, setup: EngineCase, first: int, last: int) -> list[float]:
    """Train steps ``[first, last)`` on fixed data; in fp16, one step in four overflows."""
    rank, losses = distributed.get_rank(), []
    for step in range(first, last):
        if setup.steady:
            engine.module.bn.eval()
        x, y = (part.to(engine.device) for part in batch(step, rank, setup.world))
        loss = (engine(x).float() - y).pow(2).mean()
        overflows = setup.precision == "fp16" and step % 4 == 1
        engine.backward(loss * OVERFLOW if overflows else loss)
        engine.step()
        losses.append(float(loss))
    return losses
