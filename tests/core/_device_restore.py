"""Save a run on a device, also in the background, and restore it, without DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.checkpoint.load import load_engine
from lightning_elastic_zero.checkpoint.manager import AsyncCheckpointer, CheckpointLinks, Retention
from lightning_elastic_zero.checkpoint.save import save_engine
from lightning_elastic_zero.checkpoint.types import LoadOptions, SaveOptions
from lightning_elastic_zero.coordination.ranks import OneRank
from lightning_elastic_zero.core.layout import Fragment
from lightning_elastic_zero.core.manifest import Group, Manifest, Parameter, Writer
from lightning_elastic_zero.core.partition import FlatBuffer
from lightning_elastic_zero.core.tensors import (
    FlatState,
    RankState,
    RestoreTargets,
    RestoreValues,
    Scalar,
    state_key,
)
from lightning_elastic_zero.data_progress.sampler import collect_rng_states, set_rng_states
from lightning_elastic_zero.engine.buffers import LiveFlatBuffer
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.engine.optimizer import split_state
from lightning_elastic_zero.engine.restore import (
    FlatTarget,
    allocate_states,
    commit_groups,
    commit_masters,
    commit_state,
    flat_target,
    rebuild_masters,
)
from tests.support.small_checkpoints import NoEngine

NUMEL = 1200
PADDED = NUMEL + 8
OPTIMIZERS: dict[str, Any] = {
    "Adam": torch.optim.Adam,
    "ASGD": torch.optim.ASGD,
    "Momentum": torch.optim.SGD,
}
"""Moments, with steps on the host; steps and rates on the device; no steps at all."""


@dataclass
class DeviceRun(LiveEngine):
    """One parameter in bf16, its master in fp32 with padding, and an optimizer."""

    device: torch.device
    optimizer: str
    seed: int
    master: torch.Tensor = field(init=False)
    low: torch.nn.Parameter = field(init=False)
    inner: torch.optim.Optimizer = field(init=False)
    buffer: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        super().__init__(NoEngine())
        generator = torch.Generator().manual_seed(self.seed)
        values = torch.randn(PADDED, generator=generator).to(torch.bfloat16)
        self.low = torch.nn.Parameter(values.to(self.device))
        self.master = values.float().to(self.device).requires_grad_()
        options: dict[str, Any] = {"momentum": 0.9} if self.optimizer == "Momentum" else {}
        group = {"params": [self.master], "lr": 0.01 * (1 + self.seed)}
        self.inner = OPTIMIZERS[self.optimizer]([group], foreach=False, **options)
        self.buffer = torch.full((3,), float(self.seed)).to(self.device)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(1000 + step)
            self.master.grad = torch.randn(PADDED, generator=generator).to(self.device)
            self.inner.step()
            self._round()
            with torch.no_grad():
                self.buffer.add_(1.0)

    @torch.no_grad()
    def _round(self) -> None:
        self.low.copy_(self.master.to(torch.bfloat16))

    def held(self) -> dict[str, Any]:
        elementwise, scalars = self._own_states()
        tensors = {"master": self.master, "low": self.low, **elementwise}
        found = {name: t.detach().cpu()[:NUMEL].tolist() for name, t in tensors.items()}
        small = {n: v.item() if torch.is_tensor(v) else v for n, v in scalars.items()}
        lr = self.inner.param_groups[0]["lr"]
        return {**found, **small, "buffer": self.buffer.cpu().tolist(), "lr": lr}

    def _own_states(self) -> tuple[dict[str, torch.Tensor], dict[str, Scalar]]:
        return split_state(self.inner, self.master, self.inner.state.get(self.master, {}))

    # -- LiveEngine ------------------------------------------------------------------------

    def describe(self) -> Manifest:
        elementwise, scalars = self._own_states()
        keys = [state_key(k, v, elementwise=True) for k, v in elementwise.items()]
        keys += [state_key(k, v, elementwise=False) for k, v in scalars.items()]
        parameter = Parameter("w", (NUMEL,), "bfloat16", 0)
        group = Group(("w",), {"lr": self.inner.param_groups[0]["lr"]}, tuple(keys))
        buffer = FlatBuffer(0, ("w",), (NUMEL,), (), PADDED)
        tables = ((parameter,), (group,), (buffer,), ("buffer",), ())
        about = Writer(optimizer=type(self.inner).__name__)
        return Manifest("", 1, 1, "bf16", "float32", *tables, writer=about)

    def rank_state(self, **_: bool) -> RankState:
        flat = FlatState(_FRAGMENTS, self.master.detach(), *self._own_states())
        return RankState((flat,), {}, self.module_buffers(), {}, {})

    def module_buffers(self) -> dict[str, torch.Tensor]:
        return {"buffer": self.buffer}

    def keeps_masters(self) -> bool:
        return True

    def module(self) -> torch.nn.Module:
        return torch.nn.Module()

    def check_optimizer(self, *_: object, **__: object) -> None:
        """Refuse nothing."""

    def check_scheduler(self, _: object) -> None:
        """Refuse nothing."""

    def allocate_targets(self, source: Manifest, *, with_optimizer: bool) -> RestoreTargets:
        assert with_optimizer
        live = LiveFlatBuffer(0, (self.low,), (), self.master, self.low.data)
        states = allocate_states(self.inner, live, _FRAGMENTS, source)
        flat = flat_target(live, _FRAGMENTS, states, whole=True)

        @torch.no_grad()
        def commit(values: RestoreValues) -> None:
            self._commit_flat(flat, values)

        fill, kept = (flat.master,), (flat.states,)
        return RestoreTargets(_FRAGMENTS, fill, kept, commit, lambda: rebuild_masters([flat]))

    def _commit_flat(self, flat: FlatTarget, values: RestoreValues) -> None:
        commit_masters(flat, keep_fp32=True)
        commit_state(self.inner, flat, values.scalars[0])
        commit_groups(self.inner, values)
        self._round()
        self.buffer.copy_(values.module_buffers["buffer"])

    def check(self) -> None:
        """Refuse nothing."""


_FRAGMENTS = (Fragment("w", 0, NUMEL, 0, 0, 0),)


def restore(device: torch.device, folder: Path) -> None:
    """A state saved on a device is restored on another one bit for bit, and training goes on so."""
    other = torch.device(device.type, 1)
    for optimizer in OPTIMIZERS:
        for memory_bytes in (None, 0):
            path = folder / f"{optimizer}-{memory_bytes}.ckpt"
            run, wanted = _saved_behind(DeviceRun(device, optimizer, 0), path, memory_bytes)
            for steps in (0, 2):  # into a fresh run, and into one that has a state
                resumed = DeviceRun(other, optimizer, 7)
                resumed.train(50, 50 + steps)
                set_rng_states({other.type: torch.zeros(4, dtype=torch.uint8)}, other)
                loaded = load_engine(resumed, path, OneRank(), LoadOptions())
                assert resumed.held() == wanted, (optimizer, memory_bytes, steps)
                assert not resumed.master.detach().cpu()[NUMEL:].any(), "padding"
                assert resumed.master.device == resumed.low.device == other
                set_rng_states(loaded.client_state["rng"], other)
                module = torch.get_device_module(other)
                assert module.get_rng_state(other).tolist() == [1, 2, 3, 4]
                resumed.train(3, 6)
                assert resumed.held() == run.held()


def _saved_behind(
    run: DeviceRun, path: Path, memory_bytes: int | None
) -> tuple[DeviceRun, dict[str, Any]]:
    ranks = OneRank()
    run.train(0, 3)
    wanted = run.held()
    module = torch.get_device_module(run.device)
    module.set_rng_state(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), run.device)
    client = {"rng": collect_rng_states(run.device)}
    save_engine(run, path.with_suffix(".blocking"), ranks, client, SaveOptions())
    writer = AsyncCheckpointer(OneRank(), CheckpointLinks(), Retention(), memory_bytes)
    writer.save(run, path, ranks, client, SaveOptions())
    writer.wait_for_copies()
    run.train(3, 6)
    writer.wait_until_finished(ranks)
    assert writer.stop() is None
    return run, wanted
