"""Saves on a device: ``python -m tests.core._device_snapshot_programs CASES LIBRARY FOLDER``."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.checkpoint.background import Snapshotter
from lightning_elastic_zero.checkpoint.consistency import (
    RankZeroTables,
    check_consistent,
    table_digests,
    write_tables,
)
from lightning_elastic_zero.checkpoint.fingerprint import PIECE_BYTES, rank_part
from lightning_elastic_zero.checkpoint.manager import AsyncCheckpointer, CheckpointLinks, Retention
from lightning_elastic_zero.checkpoint.save import ShardContents
from lightning_elastic_zero.checkpoint.streams import current_device, use_device
from lightning_elastic_zero.checkpoint.types import SaveOptions
from lightning_elastic_zero.coordination.ranks import OneRank
from lightning_elastic_zero.core.layout import Fragment
from lightning_elastic_zero.core.manifest import Group, Manifest, Parameter, StateKey
from lightning_elastic_zero.core.partition import FlatBuffer
from lightning_elastic_zero.core.tensors import FlatState, RankState, is_on_device
from lightning_elastic_zero.data_progress.sampler import collect_rng_states, set_rng_states
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.engine.optimizer import split_state
from tests.core import _late_device
from tests.core._device_restore import restore
from tests.support.plain_checkpoints import make_state, manifest_of, rank_state
from tests.support.small_checkpoints import NoEngine

NUMEL = 1000


class Metric:
    def __init__(self, total: torch.Tensor) -> None:
        self.total = total


@dataclass
class OnOneDevice(LiveEngine):
    """A live state on a device: one parameter, Adam's moments and step."""

    device: torch.device

    def __post_init__(self) -> None:
        super().__init__(NoEngine())
        self.master = torch.arange(float(NUMEL)).to(self.device)
        self.moment = (torch.arange(float(NUMEL)) * 2).to(self.device)
        self.step = torch.tensor(3.0).to(self.device)

    def describe(self) -> Manifest:
        keys = (
            StateKey("exp_avg", "elementwise", "float32"),
            StateKey("step", "scalar", "float32"),
        )
        parameter = Parameter("w", (NUMEL,), "float32", 0)
        buffer = FlatBuffer(0, ("w",), (NUMEL,), (), NUMEL)
        group = Group(("w",), {"lr": 0.1}, keys)
        return Manifest("", 1, 1, "fp32", "float32", (parameter,), (group,), (buffer,), (), ())

    def rank_state(self, **_: bool) -> RankState:
        fragment = Fragment("w", 0, NUMEL, 0, 0, 0)
        flat = FlatState((fragment,), self.master, {"exp_avg": self.moment}, {"step": self.step})
        return RankState((flat,), {}, {}, {}, {})

    def module(self) -> torch.nn.Module:
        return torch.nn.Module()

    def contents(self) -> ShardContents:
        return ShardContents(Path(), self.describe(), self.rank_state(), {})

    def check(self) -> None:
        """Refuse nothing."""

    def step_on(self) -> None:
        for tensor in (self.master, self.moment, self.step):
            tensor.add_(1000.0)

    def offload(self) -> None:
        """Memory that is freed after a snapshot is read before it is used again."""
        for tensor in (self.master, self.moment):
            tensor.data = tensor.data.cpu() if tensor.is_cuda else tensor.data.clone()


def check(state: RankState) -> None:
    (flat,) = state.flats
    assert torch.equal(flat.master.cpu(), torch.arange(float(NUMEL)))
    assert torch.equal(flat.elementwise["exp_avg"].cpu(), torch.arange(float(NUMEL)) * 2)


def copies(device: torch.device, _: Path) -> None:
    live, camera = OnOneDevice(device), Snapshotter()
    for _turn in range(2):  # the second one takes the same memory
        snapshot = camera.take(live.contents(), 0)
        snapshot.wait(lambda: False)
        live.step_on()
        check(snapshot.contents.state)
        live = OnOneDevice(device)
    camera.close()


def offload(device: torch.device, _: Path) -> None:
    """Memory that is freed after a snapshot is read before it is used again."""
    for memory_bytes in (None, 0):  # copied, and written from where it is
        live, camera = OnOneDevice(device), Snapshotter(memory_bytes)
        if device.type == "cuda":
            # Copies begin when this is over.
            torch.cuda._sleep(200_000_000)
        snapshot = camera.take(live.contents(), 0)
        live.offload()
        others = [torch.full((NUMEL,), torch.nan).to(device) for _ in range(4)]
        snapshot.wait_for_copies()
        del others
        live.step_on()
        check(snapshot.contents.state)
        camera.close()


def write(device: torch.device, folder: Path) -> None:
    use_device(device)
    assert current_device() == device
    for name, memory_bytes in (("copied", None), ("live", 0)):
        live = OnOneDevice(device)
        writer = AsyncCheckpointer(OneRank(), CheckpointLinks(), Retention(), memory_bytes)
        state = {
            "best": torch.tensor(0.25).to(device),
            "weight": torch.nn.Parameter(torch.ones(2).to(device)),
            "metric": Metric(torch.ones(3).to(device)),
        }
        path = folder / f"{name}.ckpt"
        saved = writer.save(live, path, OneRank(), state, SaveOptions())
        writer.wait_for_copies()
        live.step_on()
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
        own = torch.device(device.type, index)
        flat = torch.ones(8).to(own).requires_grad_()
        optimizer = torch.optim.ASGD([flat], foreach=False)
        flat.grad = torch.ones(8).to(own)
        optimizer.step()
        elementwise, values = split_state(optimizer, flat, optimizer.state[flat])
        assert {str(v.device) for v in values.values() if isinstance(v, torch.Tensor)} & {str(own)}
        state = RankState((FlatState((), flat.detach(), elementwise, values),), {}, {}, {}, {})
        manifest = Manifest("", 1, 2, "fp32", "float32", (), (), (), (), ())
        drafts.append(ShardContents(folder, manifest, state, {}))
    first, mine = (contents.tables() for contents in drafts)
    write_tables(folder, first)
    check_consistent(RankZeroTables(table_digests(first), mine, folder))


def randomness(device: torch.device, _: Path) -> None:
    if device.type == "late":
        module = torch.get_device_module(device)
        module.set_rng_state(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), device)
        state = collect_rng_states(device)
        other = torch.device(device.type, 0)
        set_rng_states(state, other)
        assert module.get_rng_state(other).tolist() == [1, 2, 3, 4]


def fingerprint(device: torch.device, _: Path) -> None:
    state = make_state({"large": (3, PIECE_BYTES // 8 + 5), "small": (3,)})
    manifest = manifest_of(state, 2, 1)
    held = rank_state(state, manifest, 0)
    flats = tuple(
        replace(
            flat,
            master=flat.master.to(device),
            elementwise={key: values.to(device) for key, values in flat.elementwise.items()},
        )
        for flat in held.flats
    )
    assert is_on_device(flats[0].master)
    assert rank_part(manifest, replace(held, flats=flats), 0) == rank_part(manifest, held, 0)


def unreadable(device: torch.device, folder: Path) -> None:
    """Show where the memory of a tensor is, and read there: this ends the process."""
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
    "fingerprint": fingerprint,
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
    # Objects are pickled by their module's name.
    from tests.core import _device_snapshot_programs

    _device_snapshot_programs.main(*sys.argv[1:])
