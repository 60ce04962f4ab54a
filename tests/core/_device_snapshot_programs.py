"""Saves on a device: ``python -m tests.core._device_snapshot_programs CASES LIBRARY FOLDER``."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.checkpoint.background import AsyncCheckpointer
from lightning_elastic_zero.checkpoint.consistency import (
    RankZeroTables,
    check_consistent,
    table_digests,
    write_tables,
)
from lightning_elastic_zero.checkpoint.load import load_engine
from lightning_elastic_zero.checkpoint.retention import CheckpointLinks, Retention
from lightning_elastic_zero.checkpoint.save import ShardContents, save_engine
from lightning_elastic_zero.checkpoint.snapshot import Snapshotter
from lightning_elastic_zero.checkpoint.streams import current_device, use_device
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
from lightning_elastic_zero.storage.folders import folder_at
from tests.core import _late_device
from tests.support.small_checkpoints import NoEngine


class Metric:
    def __init__(self, total: torch.Tensor) -> None:
        self.total = total


NUMEL = 1200
PADDED = NUMEL + 8
OPTIMIZERS: dict[str, Any] = {
    "Adam": torch.optim.Adam,
    "ASGD": torch.optim.ASGD,
    "Momentum": torch.optim.SGD,
}
"""Adam: moments, with steps on the host. ASGD: steps and rates on the device. SGD: no steps."""


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
        writer = Writer(optimizer=type(self.inner).__name__)
        return Manifest("", 1, 1, "bf16", "float32", *tables, writer=writer)

    def contents(self, path: Path) -> ShardContents:
        return ShardContents(path, self.describe(), self.rank_state(), {})

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
        """Accept every optimizer."""

    def check_scheduler(self, _: object) -> None:
        """Accept every scheduler."""

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
        """Accept every run."""


_FRAGMENTS = (Fragment("w", 0, NUMEL, 0, 0, 0),)


def trained(device: torch.device, steps: int = 3) -> DeviceRun:
    """Return a run with scalar states on the device."""
    run = DeviceRun(device, "ASGD", 0)
    run.train(0, steps)
    return run


def stored(state: RankState) -> list[Any]:
    (flat,) = state.flats
    small = [*flat.scalars.values(), *state.module_buffers.values()]
    return [torch.as_tensor(v).tolist() for v in (flat.master, *flat.elementwise.values(), *small)]


def copies(device: torch.device, _: Path) -> None:
    snapshotter = Snapshotter()
    for turn in range(2):  # the second snapshot reuses the memory
        run = trained(device, 3 + turn)
        wanted = stored(run.rank_state())
        snapshot = snapshotter.take(run.contents(Path()), 0)
        snapshot.wait(lambda: False)
        run.train(5, 6)
        assert stored(snapshot.contents.state) == wanted != stored(run.rank_state())
    snapshotter.close()


def offload(device: torch.device, _: Path) -> None:
    """Memory that is freed after a snapshot is read before it is reused."""
    for memory_bytes in (None, 0):  # copied first; written directly from the device
        run, snapshotter = trained(device), Snapshotter(memory_bytes)
        wanted = stored(run.rank_state())
        if device.type == "cuda":
            # Copies start after this delay.
            torch.cuda._sleep(200_000_000)
        snapshot = snapshotter.take(run.contents(Path()), 0)
        tensors = (run.master, run.inner.state[run.master]["ax"])
        for tensor in tensors:
            tensor.data = tensor.data.cpu() if tensor.is_cuda else tensor.data.clone()
        others = [torch.full((PADDED,), torch.nan).to(device) for _ in range(4)]
        snapshot.wait_for_copies()
        del others
        for tensor in tensors:
            tensor.data.add_(1000.0)
        assert stored(snapshot.contents.state) == wanted
        snapshotter.close()


def write(device: torch.device, folder: Path) -> None:
    use_device(device)
    assert current_device() == device
    for name, memory_bytes in (("copied", None), ("live", 0)):
        run = trained(device)
        writer = AsyncCheckpointer(OneRank(), CheckpointLinks(), Retention(), memory_bytes)
        state = {
            "best": torch.tensor(0.25).to(device),
            "weight": torch.nn.Parameter(torch.ones(2).to(device)),
            "metric": Metric(torch.ones(3).to(device)),
        }
        path = folder / f"{name}.ckpt"
        saved = writer.save(run, path, OneRank(), state, SaveOptions())
        writer.wait_for_copies()
        run.train(3, 4)
        writer.wait_until_finished(OneRank())
        assert saved.result(0).bytes
        assert writer.stop() is None
    assert current_device() == device
    assert _contexts(device) == [device.index], _contexts(device)


def _contexts(device: torch.device) -> list[int]:
    if device.type == "cuda":
        cuda: Any = torch._C
        count = range(torch.cuda.device_count())
        return [index for index in count if cuda._cuda_hasPrimaryContext(index)]
    return _late_device.contexts()


def scalars(device: torch.device, folder: Path) -> None:
    drafts = []
    for index in range(2):
        run = trained(own := torch.device(device.type, index))
        (flat,) = run.rank_state().flats
        assert own in {v.device for v in flat.scalars.values() if isinstance(v, torch.Tensor)}
        drafts.append(run.contents(folder))
    first, mine = (contents.tables() for contents in drafts)
    write_tables(folder_at(folder), first)
    tables = RankZeroTables(table_digests(first), mine, folder_at(folder))
    check_consistent(tables, drafts[1].manifest)


def randomness(device: torch.device, _: Path) -> None:
    if device.type == "late":
        module = torch.get_device_module(device)
        module.set_rng_state(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), device)
        state = collect_rng_states(device)
        other = torch.device(device.type, 0)
        set_rng_states(state, other)
        assert module.get_rng_state(other).tolist() == [1, 2, 3, 4]


def restore(device: torch.device, folder: Path) -> None:
    """A state is restored on another device bit for bit, and training continues identically."""
    other = torch.device(device.type, 1)
    for optimizer in OPTIMIZERS:
        for memory_bytes in (None, 0):
            path = folder / f"{optimizer}-{memory_bytes}.ckpt"
            run, wanted = _save_in_background(DeviceRun(device, optimizer, 0), path, memory_bytes)
            for steps in (0, 2):  # into a fresh run, and into one with trained state
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


def _save_in_background(
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


def unreadable(device: torch.device, folder: Path) -> None:
    """Print a message, then read a tensor's device memory on the host, which ends the process."""
    tensor = torch.ones(4).to(device)
    assert tensor.cpu().tolist() == [1.0] * 4
    print("reads", flush=True)
    ctypes.string_at(tensor.data_ptr(), 4)
    (folder / "was read").touch()


CASES: dict[str, Callable[[torch.device, Path], Any]] = {
    "copies": copies,
    "offload": offload,
    "write": write,
    "scalars": scalars,
    "randomness": randomness,
    "restore": restore,
    "unreadable": unreadable,
}


def main(cases: str, library: str, folder: str) -> None:
    if library.startswith("cuda"):
        device = torch.device(library)
    else:
        _late_device.register(Path(library))
        device = torch.device("late", 2)
    for case in cases.split(","):
        CASES[case](device, Path(folder))


if __name__ == "__main__":
    # Pickled classes are looked up in their module, which must not be __main__.
    from tests.core import _device_snapshot_programs

    _device_snapshot_programs.main(*sys.argv[1:])
