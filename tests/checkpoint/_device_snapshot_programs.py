"""Saves on a GPU: ``python -m tests.checkpoint._device_snapshot_programs CASE DEVICE FOLDER``."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.checkpoint.background import AsyncCheckpointer
from lightning_elastic_zero.checkpoint.consistency import Differences
from lightning_elastic_zero.checkpoint.file_queue import FileQueue
from lightning_elastic_zero.checkpoint.save import ShardContents
from lightning_elastic_zero.checkpoint.snapshot import Snapshotter
from lightning_elastic_zero.checkpoint.streams import current_device, use_device
from lightning_elastic_zero.checkpoint.types import CheckpointStats, SaveRequest
from lightning_elastic_zero.coordination.ranks import OneRank
from lightning_elastic_zero.core.layout import Fragment
from lightning_elastic_zero.core.manifest import Group, Manifest, Parameter, Writer
from lightning_elastic_zero.core.partition import FlatBuffer
from lightning_elastic_zero.core.tensors import FlatState, RankState, Scalar, state_key
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.engine.optimizer import split_state
from lightning_elastic_zero.formats.client_state import SplitState
from tests.support.small_checkpoints import NoEngine


class Metric:
    def __init__(self, total: torch.Tensor) -> None:
        self.total = total


NUMEL = 1200
PADDED = NUMEL + 8


class DeviceRun(LiveEngine):
    """One parameter with padding, and an optimizer that keeps steps and rates on the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(NoEngine())
        generator = torch.Generator().manual_seed(0)
        self.master = torch.randn(PADDED, generator=generator).to(device).requires_grad_()
        self.inner = torch.optim.ASGD([self.master], foreach=False)
        self.buffer = torch.zeros(3).to(device)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(1000 + step)
            self.master.grad = torch.randn(PADDED, generator=generator).to(self.master.device)
            self.inner.step()
            with torch.no_grad():
                self.buffer.add_(1.0)

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
        return ShardContents(path, self.describe(), self.rank_state(), SplitState())

    def rank_state(self, **_: bool) -> RankState:
        fragments = (Fragment("w", 0, NUMEL, 0, 0, 0),)
        flat = FlatState(fragments, self.master.detach(), *self._own_states())
        return RankState((flat,), {}, {"buffer": self.buffer}, {}, {})

    def module(self) -> torch.nn.Module:
        return torch.nn.Module()

    def check(self) -> None:
        """Accept every run."""


def trained(device: torch.device, steps: int = 3) -> DeviceRun:
    """Return a run with scalar states on the device."""
    run = DeviceRun(device)
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
        snapshot = snapshotter.take(run.contents(Path()))
        snapshot.wait()
        run.train(5, 6)
        assert stored(snapshot.contents.state) == wanted != stored(run.rank_state())
    snapshotter.close()


def offload(device: torch.device, _: Path) -> None:
    """Memory that is freed after a snapshot is read before it is reused."""
    run, snapshotter = trained(device), Snapshotter()
    wanted = stored(run.rank_state())
    torch.cuda._sleep(200_000_000)  # copies start after this delay
    snapshot = snapshotter.take(run.contents(Path()))
    tensors = (run.master, run.inner.state[run.master]["ax"])
    for tensor in tensors:
        tensor.data = tensor.data.cpu()
    others = [torch.full((PADDED,), torch.nan).to(device) for _ in range(4)]
    snapshot.wait()
    del others
    for tensor in tensors:
        tensor.data.add_(1000.0)
    assert stored(snapshot.contents.state) == wanted
    snapshotter.close()


def write(device: torch.device, folder: Path) -> None:
    """The writer uses its rank's device only, and no file contains a device name."""
    use_device(device)
    assert current_device() == device
    run, path = trained(device), folder / "a.ckpt"
    published = deque[CheckpointStats]()
    writer = AsyncCheckpointer(OneRank(), FileQueue(), published)
    state = {
        "best": torch.tensor(0.25).to(device),
        "weight": torch.nn.Parameter(torch.ones(2).to(device)),
        "metric": Metric(torch.ones(3).to(device)),
    }
    writer.save(SaveRequest(run, path, state), OneRank())
    writer.wait_for_copies()
    run.train(3, 4)
    writer.wait_until_finished(OneRank())
    assert published[0].bytes
    assert writer.stop() is None
    assert current_device() == device
    cuda: Any = torch._C
    contexts = [i for i in range(torch.cuda.device_count()) if cuda._cuda_hasPrimaryContext(i)]
    assert contexts == [device.index], contexts
    for file in path.rglob("*.pt"):
        assert b"cuda" not in file.read_bytes()
        torch.load(file, weights_only=True)


def scalars(device: torch.device, folder: Path) -> None:
    """Scalars on different devices are compared by value."""
    drafts = []
    for index in range(2):
        run = trained(own := torch.device(device.type, index))
        (flat,) = run.rank_state().flats
        assert own in {v.device for v in flat.scalars.values() if isinstance(v, torch.Tensor)}
        drafts.append(run.contents(folder))
    first, mine = (contents.compared() for contents in drafts)
    assert Differences.between(mine, first.digests()) == Differences.between(first, first.digests())


CASES: dict[str, Callable[[torch.device, Path], None]] = {
    "copies": copies,
    "offload": offload,
    "write": write,
    "scalars": scalars,
}


if __name__ == "__main__":
    # Pickled classes are looked up in their module, which must not be __main__.
    from tests.checkpoint import _device_snapshot_programs

    _device_snapshot_programs.CASES[sys.argv[1]](torch.device(sys.argv[2]), Path(sys.argv[3]))
