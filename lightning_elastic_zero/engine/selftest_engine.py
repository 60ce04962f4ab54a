"""Small engines that try things out, and what they hold by DeepSpeed's own account.

What ``selftest`` saves and loads. Their state is read by DeepSpeed's public functions, which share
no code with those that save and restore it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lightning_elastic_zero.engine.deepspeed import link_states, links_states, unlink_states
from lightning_elastic_zero.engine.support import use_accelerator
from lightning_elastic_zero.errors import ElasticZeroError

VOCABULARY, WIDTH, HIDDEN = 29, 17, 13
"""Primes: no number of ranks divides a parameter."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The element-wise states of Adam."""

HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")

_SAMPLES = 2

_PARTITIONED = 3
"""The stage in which parameters are cut up too."""

_PERSISTENT_ELEMENTS = 8
"""Of parameters that stage 3 leaves whole: some here are smaller, and some larger."""


class TrialModel(nn.Module):
    """Tied, frozen, buffered, one-element and never used parameters, of shapes that divide badly.

    Args:
        seed: everything is drawn from it.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Linear(WIDTH, HIDDEN)
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(requires_grad=False)
        self.outer = nn.Linear(HIDDEN, WIDTH)
        self.one = nn.Parameter(torch.randn(1))
        self.never = nn.Parameter(torch.randn(7))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.average: torch.Tensor
        self.seen: torch.Tensor
        self.register_buffer("average", torch.randn(HIDDEN))
        self.register_buffer("seen", torch.tensor(seed))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        h = torch.relu(self.inner(self.embedding(tokens)))
        with torch.no_grad():
            self.average.lerp_(h.float().mean(0).to(self.average.dtype), 0.25)
            self.seen.add_(tokens.numel())
        h = self.outer(h + self.frozen(h))
        loss: torch.Tensor = (self.head(h) * self.one).float().pow(2).mean()
        return loss

    def sample(self, generator: torch.Generator) -> torch.Tensor:
        """Return what ``forward`` takes."""
        return torch.randint(0, VOCABULARY, (_SAMPLES,), generator=generator)


class WideModel(nn.Module):
    """Square layers: a state of some size, to time things by.

    Args:
        width: of each layer.
        layers: how many.
    """

    def __init__(self, width: int, layers: int = 8) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.float().pow(2).mean()

    def sample(self, generator: torch.Generator) -> torch.Tensor:
        """Return what ``forward`` takes."""
        return torch.randn(1, self.width, generator=generator)


def join_ranks(device: str, timeout_s: float) -> None:
    """Make DeepSpeed's process group of the ranks that the environment names.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        timeout_s: how long a collective may take.

    Raises:
        UnsupportedError: DeepSpeed has chosen another accelerator.
    """
    use_accelerator(device, compiles=False)
    import deepspeed  # noqa: PLC0415 (after the accelerator is chosen)
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415 (likewise)

    on_processors = device == "cpu"
    if not on_processors:
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(
        # DeepSpeed's own choice for processors may be a library that is not there.
        "gloo" if on_processors else get_accelerator().communication_backend_name(),
        auto_mpi_discovery=False,
        timeout=timedelta(seconds=timeout_s),
    )


@contextmanager
def trial_engine(model: TrialModel | WideModel, stage: int, *, tilt: float = 1.0) -> Iterator[Any]:
    """Make an engine with AdamW and two parameter groups; collective. It ends with the context.

    Stages 1 to 3 train in bf16 where the device can; stage 0 in fp32, as torch's own optimizer.

    Args:
        model: what it trains.
        stage: of ZeRO.
        tilt: a factor on rates and decays, so that another engine's differ.
    """
    import deepspeed  # noqa: PLC0415 (DeepSpeed takes seconds to import)
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415 (likewise)

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
    """Take the optimizer steps ``[first, last)``; each rank has samples of its own."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * step + engine.global_rank)
        sample = engine.module.sample(generator).to(engine.device)
        if sample.is_floating_point():
            sample = sample.to(next(engine.module.parameters()).dtype)
        engine.backward(engine(sample))
        engine.step()


def gather_full_state(engine: Any) -> dict[str, torch.Tensor | str]:
    """Return all that must survive, whole, on every rank. Collective.

    Masters, Adam's moments, frozen weights and buffers as tensors on the host, of the shapes of
    their parameters; steps, hyperparameters and counters as text. -0.0 counts as 0.0: DeepSpeed
    adds up what ranks have.

    Raises:
        ElasticZeroError: the weights that the forward pass uses are not the masters, rounded. It
            is raised on ranks that found that, after all ranks' part in the collectives.
    """
    inner = _inner_optimizer(engine)
    _link_all_groups(engine.optimizer)
    found: dict[str, torch.Tensor | str] = {}
    untrue: list[str] = []
    for name, parameter in engine.module.named_parameters():
        weight = _whole(engine, parameter)
        if not parameter.requires_grad:
            found[f"frozen weight {name}"] = weight
            continue
        of_parameter = _master_and_moments(engine, inner, parameter)
        for key, tensor in of_parameter.items():
            found[f"{key} of {name}"] = tensor.detach().cpu() + 0.0
        master = found[f"master of {name}"]
        if not torch.equal(torch.as_tensor(master).to(weight.dtype), weight + 0.0):
            untrue.append(name)
    for name, buffer in engine.module.named_buffers():
        found[f"buffer {name}"] = buffer.detach().cpu().clone()
    found.update(_texts(engine, inner))
    if untrue:
        msg = f"{len(untrue)} weights are not their masters, rounded; the first: {untrue[0]}"
        raise ElasticZeroError(msg)
    return found


def _texts(engine: Any, inner: torch.optim.Optimizer) -> dict[str, str]:
    """Return steps, hyperparameters and counters."""
    found: dict[str, str] = {}
    steps = {float(s["step"]) for s in inner.state.values() if "step" in s}
    found["the optimizer's steps"] = repr(sorted(steps))
    for index, group in enumerate(inner.param_groups):
        values = [(key, group[key]) for key in HYPERPARAMETERS]
        found[f"hyperparameters of group {index}"] = repr(values)
    for counter in ("global_steps", "skipped_steps"):
        found[f"counter {counter}"] = repr(getattr(engine, counter))
    return found


def _inner_optimizer(engine: Any) -> torch.optim.Optimizer:
    """Return the optimizer that steps: in stage 0 with fp32 DeepSpeed leaves it as it is."""
    optimizer = engine.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


def _link_all_groups(optimizer: Any) -> None:
    """Make ZeRO-1/2 link each parameter to its optimizer state.

    It does so by itself when the first group has stepped, and no other one has a state yet.
    """
    if links_states(optimizer):
        unlink_states(optimizer)
        link_states(optimizer)


def _whole(engine: Any, parameter: nn.Parameter) -> torch.Tensor:
    """Return a weight as the forward pass finds it, on the host."""
    if engine.zero_optimization_stage() < _PARTITIONED:
        return parameter.detach().cpu().clone()
    import deepspeed  # noqa: PLC0415 (DeepSpeed takes seconds to import)

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().cpu().clone()


def _master_and_moments(
    engine: Any,
    inner: torch.optim.Optimizer,
    parameter: nn.Parameter,
) -> dict[str, torch.Tensor]:
    """Return a parameter's master and what the optimizer keeps for its elements, whole."""
    if engine.zero_optimization_stage() == 0:
        state = inner.state.get(parameter, {})
        return {"master": parameter, **{key: state[key] for key in MOMENTS if key in state}}
    from deepspeed.utils import (  # noqa: PLC0415 (DeepSpeed takes seconds to import)
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
    )

    found = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
    return {"master": safe_get_full_fp32_param(parameter), **found}
