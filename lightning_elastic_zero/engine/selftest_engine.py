"""Small engines for ``selftest``, whose state is read by DeepSpeed's public functions.

These share no code with the functions that save and restore the state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lightning_elastic_zero.engine.deepspeed import relink_states
from lightning_elastic_zero.engine.support import use_accelerator

VOCABULARY, WIDTH, HIDDEN = 29, 17, 13
"""Primes, so that no number of ranks divides a parameter."""

MOMENTS = ("exp_avg", "exp_avg_sq")
_SAMPLES = 2
_PARTITIONED = 3
_PERSISTENT_ELEMENTS = 8
"""Largest parameter that stage 3 leaves whole; the model has smaller and larger ones."""


class TrialModel(nn.Module):
    """A model with tied, frozen, one-element and unused parameters, and buffers.

    ``state_bytes`` is the minimum size of masters and moments together, for measurements.
    """

    def __init__(self, seed: int, state_bytes: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        # 12 bytes per element of the embedding and of two linear layers.
        width = max(WIDTH, state_bytes // (12 * (VOCABULARY + 2 * HIDDEN)) + 1)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.inner = nn.Linear(width, HIDDEN)
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(requires_grad=False)
        self.outer = nn.Linear(HIDDEN, width)
        self.one = nn.Parameter(torch.randn(1))
        self.never = nn.Parameter(torch.randn(7))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.average: torch.Tensor
        self.seen: torch.Tensor
        self.register_buffer("average", torch.randn(HIDDEN))
        self.register_buffer("seen", torch.tensor(seed))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.inner(self.embedding(tokens)))
        with torch.no_grad():
            self.average.lerp_(h.float().mean(0).to(self.average.dtype), 0.25)
            self.seen.add_(tokens.numel())
        h = self.outer(h + self.frozen(h))
        loss: torch.Tensor = (self.head(h) * self.one).float().pow(2).mean()
        return loss


def join_ranks(device: str, timeout_s: float) -> None:
    """Initialize DeepSpeed's process group from the environment variables."""
    use_accelerator(device, compiles=False)
    import deepspeed  # after the accelerator is chosen
    from deepspeed.accelerator import get_accelerator

    if device != "cpu":
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(
        # On CPUs DeepSpeed itself may choose a library that is not installed.
        "gloo" if device == "cpu" else get_accelerator().communication_backend_name(),
        auto_mpi_discovery=False,
        timeout=timedelta(seconds=timeout_s),
    )


@contextmanager
def trial_engine(model: TrialModel, stage: int, *, tilt: float = 1.0) -> Iterator[Any]:
    """Make an engine with AdamW and two parameter groups for the context. Collective.

    Stages 1 to 3 train in bf16 if the device supports it; stage 0 in fp32 with torch's optimizer.
    ``tilt`` is a factor on rates and decays, so that they differ from another engine's.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "lr": 1e-3 * tilt, "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "lr": 5e-3 * tilt, "weight_decay": 0.0},
    ]
    zero: dict[str, int] = {"stage": stage}
    if stage == _PARTITIONED:
        zero["stage3_param_persistence_threshold"] = _PERSISTENT_ELEMENTS
    config = {
        "train_micro_batch_size_per_gpu": _SAMPLES,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bool(stage) and get_accelerator().is_bf16_supported()},
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, betas=(0.9, 0.99 - tilt / 100)),
        config=config,
        dist_init_required=False,
    )
    try:
        yield engine
    finally:
        engine.destroy()


def train(engine: Any, first: int, last: int) -> None:
    """Take the optimizer steps ``[first, last)``; each rank has its own samples."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * step + engine.global_rank)
        tokens = torch.randint(0, VOCABULARY, (_SAMPLES,), generator=generator)
        engine.backward(engine(tokens.to(engine.device)))
        engine.step()


def gather_full_state(engine: Any) -> tuple[dict[str, torch.Tensor | str], list[str]]:
    """Return everything that must survive, whole, on every rank. Collective.

    First, masters, Adam's moments, frozen weights and buffers as host tensors in their parameters'
    shapes; steps, hyperparameters and counters as text. -0.0 becomes 0.0, because DeepSpeed sums
    over ranks. Second, the names of weights that differ from their rounded masters on this rank.
    """
    # At stage 0 with fp32 DeepSpeed does not wrap the optimizer.
    inner = engine.optimizer
    inner = inner if isinstance(inner, torch.optim.Optimizer) else inner.optimizer
    # DeepSpeed links states only once, when the other groups may not have any yet.
    relink_states(engine.optimizer)
    found: dict[str, torch.Tensor | str] = {}
    wrong: list[str] = []
    for name, parameter in engine.module.named_parameters():
        weight = _whole(engine, parameter)
        if not parameter.requires_grad:
            found[f"frozen weight {name}"] = weight
            continue
        state = _master_and_moments(engine, inner, parameter)
        for key, tensor in state.items():
            found[f"{key} of {name}"] = tensor.detach().cpu() + 0.0
        if not torch.equal(state["master"].detach().cpu().to(weight.dtype), weight + 0.0):
            wrong.append(name)
    for name, buffer in engine.module.named_buffers():
        found[f"buffer {name}"] = buffer.detach().cpu().clone()
    steps = {float(s["step"]) for s in inner.state.values() if "step" in s}
    found["the optimizer's steps"] = repr(sorted(steps))
    for index, group in enumerate(inner.param_groups):
        values = [(key, group[key]) for key in ("lr", "betas", "eps", "weight_decay")]
        found[f"hyperparameters of group {index}"] = repr(values)
    for counter in ("global_steps", "skipped_steps"):
        found[f"counter {counter}"] = repr(getattr(engine, counter))
    return found, wrong


def _whole(engine: Any, parameter: nn.Parameter) -> torch.Tensor:
    """Return a weight as the forward pass uses it, on the host."""
    if engine.zero_optimization_stage() < _PARTITIONED:
        return parameter.detach().cpu().clone()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().cpu().clone()


def _master_and_moments(
    engine: Any, inner: torch.optim.Optimizer, parameter: nn.Parameter
) -> dict[str, torch.Tensor]:
    if engine.zero_optimization_stage() == 0:
        state = inner.state.get(parameter, {})
        return {"master": parameter, **{key: state[key] for key in MOMENTS if key in state}}
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
    return {"master": safe_get_full_fp32_param(parameter), **found}
