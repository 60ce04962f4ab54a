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
from lightning_elastic_zero.engine.installation import use_accelerator

VOCABULARY, WIDTH, HIDDEN = 29, 17, 13
"""Primes, so that no number of ranks divides a parameter."""

_SAMPLES = 2
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

    It trains at ZeRO stage 1, 2 or 3, in bf16 if the device supports it. ``tilt`` is a factor on
    rates and decays, so that they differ from another engine's.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "lr": 1e-3 * tilt, "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "lr": 5e-3 * tilt, "weight_decay": 0.0},
    ]
    zero = {"stage": stage, "stage3_param_persistence_threshold": _PERSISTENT_ELEMENTS}
    config = {
        "train_micro_batch_size_per_gpu": _SAMPLES,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": get_accelerator().is_bf16_supported()},
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


def full_state(engine: Any) -> dict[str, torch.Tensor]:
    """Return everything that must survive, whole, on every rank, on the host. Collective.

    Masters, Adam's moments, frozen weights, buffers, steps, hyperparameters and counters, and
    whether each trained weight of this rank equals its rounded master.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    inner = engine.optimizer.optimizer
    # DeepSpeed links states only once, when the other groups may not have any yet.
    relink_states(engine.optimizer)
    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters([*parameters.values()]):
        weights = {name: p.detach().cpu().clone() for name, p in parameters.items()}
    state = {f"buffer {name}": b.cpu().clone() for name, b in engine.module.named_buffers()}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            state[f"frozen weight {name}"] = weights[name]
            continue
        state[f"master of {name}"] = master = safe_get_full_fp32_param(parameter).cpu()
        equal = torch.equal(master.to(weights[name].dtype), weights[name])
        state[f"weight {name} equals its rounded master"] = torch.tensor(equal)
        for key in ("exp_avg", "exp_avg_sq"):
            state[f"{key} of {name}"] = safe_get_full_optimizer_state(parameter, key).cpu()
    steps = {float(s["step"]) for s in inner.state.values() if "step" in s}
    state["the optimizer's steps"] = torch.tensor(sorted(steps))
    for index, group in enumerate(inner.param_groups):
        values = [group["lr"], *group["betas"], group["eps"], group["weight_decay"]]
        state[f"hyperparameters of group {index}"] = torch.tensor(values, dtype=torch.float64)
    counters = [engine.global_steps, engine.skipped_steps]
    state["steps and skipped steps of the engine"] = torch.tensor(counters)
    return state
