"""Checkpoints of models with shared modules, and with layers that are frozen late."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from tests.support.engines import Engine, EngineCase
from tests.support.oracle import same_bits
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

WIDTH = 8

Held = dict[str, torch.Tensor]


class Twice(nn.Module):
    """A block that occurs three times, as in ALBERT, and a frozen layer with two names."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.layers = nn.ModuleList([block] * 3)
        self.one = frozen
        self.other = frozen
        self.late = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        found: torch.Tensor = self.late(self.other(self.one(x)))
        return found


def make(setup: EngineCase, seed: int) -> Engine:
    """Make an engine; freeze a layer after the optimizer was created."""
    import deepspeed

    model = Twice(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=setup.config(), dist_init_required=False
    )
    engine.module.late.requires_grad_(requires_grad=False)
    return engine


def held(engine: Engine) -> Held:
    """Return masters, moments, frozen weights and buffers, gathered by DeepSpeed. Collective."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: Held = {f"buffer/{n}": b.clone() for n, b in engine.module.named_buffers()}
    for name, parameter in engine.module.named_parameters():
        if name.startswith("one"):
            with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                found[f"frozen/{name}"] = parameter.detach().clone()
            continue
        # ZeRO-3's functions return nothing for parameters without gradients.
        is_frozen = not parameter.requires_grad
        parameter.requires_grad_(requires_grad=True)
        found[f"master/{name}"] = safe_get_full_fp32_param(parameter).clone()
        state = safe_get_full_optimizer_state(parameter, "exp_avg")
        found[f"exp_avg/{name}"] = state.clone()
        parameter.requires_grad_(requires_grad=not is_frozen)
    return found


def write(setup: EngineCase, path: str) -> Held:
    engine = make(setup, 0)
    for _ in range(2):
        torch.manual_seed(distributed.get_rank())
        engine.backward(engine(torch.randn(12, WIDTH)).pow(2).mean())
        engine.step()
    engine.save_checkpoint(path, tag="two", client_state={})
    found = held(engine)
    engine.destroy()
    distributed.barrier()
    return found


def read(setup: EngineCase, path: str) -> Held:
    """Load into a run with another seed that has trained one step. Collective."""
    from lightning_elastic_zero.api import load_checkpoint

    engine = make(setup, 7)
    torch.manual_seed(3)
    engine.backward(engine(torch.randn(12, WIDTH)).pow(2).mean())
    engine.step()
    load_checkpoint(engine, path)
    found = held(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize(("zero", "target"), [("1", "3"), ("2", "1"), ("3", "2")])
def test_shared_modules_and_late_frozen_layers_are_restored(
    zero: str, target: str, pools: Pools, tmp_path: Path
) -> None:
    """DeepSpeed lists them once and saves them three times, or also lists them as frozen."""
    wanted: Any = pools.run(2, partial(write, EngineCase(2, zero), str(tmp_path)))[0]
    assert len(wanted) == 17
    for setup in (EngineCase(2, zero), EngineCase(1, target)):
        found: Any = pools.run(setup.world, partial(read, setup, str(tmp_path)))[0]
        assert found.keys() == wanted.keys()
        assert not [name for name in wanted if not same_bits(wanted[name], found[name])]
