"""Calls, bytes and memory that a save or load costs ranks, also with the optimizer in files."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.engines import swap_folder

WIDTH = 1536
LAYERS = 9
BYTES_PER_PARAMETER = 12
STATE_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * BYTES_PER_PARAMETER
"""fp32 masters and Adam's two moments: 255 MB."""


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.pow(2).mean()


def resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(found.split()[1]) * 1024


def anonymous_bytes() -> int:
    return resident_bytes("RssAnon")


def bytes_read() -> int:
    """Return the bytes that this process has read through the system, from the cache or the disk.

    ``rchar`` excludes mapped reads, and ``read_bytes`` cached ones.
    """
    return int(Path("/proc/self/io").read_text().split()[1])  # rchar


class PeakMemory:
    def __enter__(self) -> PeakMemory:
        self.before = self.highest = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.highest = max(self.highest, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.highest = max(self.highest, anonymous_bytes())


class SentBytes:
    """Counts the bytes that this process sends to others from Python.

    The job's store is not counted, which is in C++.
    """

    def __enter__(self) -> SentBytes:
        self._sent: list[int] = []  # From several threads.
        self._patch = pytest.MonkeyPatch()
        for owner, name in ((os, "sendfile"), (socket.socket, "send"), (socket.socket, "sendall")):
            self._patch.setattr(owner, name, self._counting(getattr(owner, name)))
        return self

    def _counting(self, send: Callable[..., int | None]) -> Callable[..., int | None]:
        def counting(*args: Any) -> int | None:
            sent = send(*args)
            self._sent.append(memoryview(args[1]).nbytes if sent is None else sent)
            return sent

        return counting

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        self.count = sum(self._sent)


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that torch copies or gathers (gloo copies those) in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.gathered = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make the call, and count the bytes that it copies."""
        del types
        if func.overloadpacket.__name__ in {"copy_", "clone", "_to_copy"}:
            self.count += args[0].nbytes
        if func.overloadpacket.__name__ == "allgather_":
            self.gathered += sum(t.nbytes for t in args[0][0])
        return func(*args, **(kwargs or {}))


def make_engine(stage: int, width: int = WIDTH) -> Any:
    import deepspeed

    # Deterministic algorithms fill all requested memory, as if it were used: see
    # support/fork_server.py.
    torch.use_deterministic_algorithms(mode=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    module = Mlp(width)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


def save(stage: int, path: str, node_copies: int = 2) -> dict[str, int]:
    from lightning_elastic_zero.api import save_checkpoint

    engine = make_engine(stage)
    engine.backward(engine(torch.randn(1, WIDTH)))
    engine.step()
    save_checkpoint(engine, f"{path}.warm", node_copies=node_copies)
    with PeakMemory() as peak, SentBytes() as sent:
        figures = save_checkpoint(engine, path, node_copies=node_copies)
    extra = peak.highest - peak.before
    return {"extra": extra, "written": figures.bytes, "sent": sent.count}


def load(stage: int, path: str) -> dict[str, int]:
    from lightning_elastic_zero.api import load_checkpoint

    engine = make_engine(stage)
    before = bytes_read()
    with PeakMemory() as peak:
        loaded = load_checkpoint(engine, path)
    after = bytes_read()
    states = engine.optimizer.optimizer.state.values()
    own = sum(t.nbytes for s in states for t in s.values() if isinstance(t, torch.Tensor))
    return {
        "extra": peak.highest - peak.before - own,
        "own": own,
        "read": after - before,
        "figures": loaded.stats.bytes,
    }


def load_newest(stage: int, folder: str) -> dict[str, int]:
    from lightning_elastic_zero.api import newest_checkpoint

    newest = newest_checkpoint(folder)
    assert newest is not None
    return load(stage, newest)


def reload(stage: int, path: str) -> dict[str, int]:
    """Load three times; return the memory of the second load, and the bytes copied by the third."""
    from lightning_elastic_zero.api import load_checkpoint

    engine = make_engine(stage)
    engine.backward(engine(torch.randn(1, WIDTH)))
    engine.step()
    load_checkpoint(engine, path)
    with PeakMemory() as peak:
        load_checkpoint(engine, path)
    with CopiedBytes() as copied:
        load_checkpoint(engine, path)
    states = engine.optimizer.optimizer.state.values()
    return {
        "extra": peak.highest - peak.before,
        "left": anonymous_bytes() - peak.before,
        "copied": copied.count,
        "gathered": copied.gathered,
        "states": sum(t.nbytes for s in states for t in s.values() if isinstance(t, torch.Tensor)),
    }


def evaluate(stage: int, path: str) -> dict[str, int]:
    import deepspeed

    from lightning_elastic_zero.api import load_checkpoint

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=Mlp(WIDTH), config=config)
    before = bytes_read()
    with PeakMemory() as peak:
        load_checkpoint(engine, path)
    return {"extra": peak.highest - peak.before, "read": bytes_read() - before}


SMALL_WIDTH = 64


class Operations:
    def __init__(self, folder: str) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self._folder, self.counts = folder, Counter[str]()
        self.opened: list[str] = []
        sys.addaudithook(self._on_event)
        fsync, compare_set = os.fsync, PrefixStore.compare_set

        def counting_fsync(descriptor: int) -> None:
            self.counts["syncs"] += 1
            fsync(descriptor)

        def counting_compare_set(store: Any, key: str, *rest: Any) -> Any:
            self.counts["agreements"] += key.endswith("/step")
            return compare_set(store, key, *rest)

        os.fsync = counting_fsync  # type: ignore[assignment]
        setattr(PrefixStore, "compare_set", counting_compare_set)  # noqa: B010 (torch's stubs)
        for name in ("stat", "lstat"):
            self._count_calls(name, getattr(os, name))

    def _count_calls(self, name: str, call: Callable[..., Any]) -> None:
        def counting(path: Any, *args: Any, **options: Any) -> Any:
            self.counts["looks"] += str(path).startswith(self._folder)
            return call(path, *args, **options)

        setattr(os, name, counting)

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).startswith(self._folder):
            self.opened.append(Path(str(args[0])).name)

    def of(self, work: Callable[[], object]) -> tuple[dict[str, int], list[str]]:
        self.counts.clear()
        self.opened.clear()
        work()
        return dict(self.counts), list(self.opened)


def operations(stage: int, path: str) -> dict[str, Any]:
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    engine = make_engine(stage, SMALL_WIDTH)
    engine.backward(engine(torch.randn(1, SMALL_WIDTH)))
    engine.step()
    save_checkpoint(engine, path)
    counted = Operations(str(Path(path).parent))
    return {
        "save": counted.of(lambda: save_checkpoint(engine, path)),
        "load": counted.of(lambda: load_checkpoint(engine, path)),
    }


SWAPPED_WIDTH = 1024
SUB_GROUP_BYTES = SWAPPED_WIDTH * SWAPPED_WIDTH * 12
"""fp32 masters and Adam's two moments of one layer, which is a sub-group: 12.6 MB."""


def with_sub_groups(layers: int) -> nn.Module:
    """Make a model of square layers without biases, each of which fills a sub-group."""
    return nn.Sequential(
        *(nn.Linear(SWAPPED_WIDTH, SWAPPED_WIDTH, bias=False) for _ in range(layers))
    )


@contextmanager
def swapped_engine(layers: int) -> Iterator[Any]:
    import deepspeed

    # Deterministic algorithms fill all requested memory, as if it were used: see
    # support/fork_server.py.
    torch.use_deterministic_algorithms(mode=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": SWAPPED_WIDTH * SWAPPED_WIDTH // distributed.get_world_size(),
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": str(swap_folder()),
                "pin_memory": False,
                "buffer_count": 4,
            },
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    module = with_sub_groups(layers)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    try:
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        yield engine
    finally:
        shutil.rmtree(swap_folder(), ignore_errors=True)


def step(engine: Any) -> None:
    engine.backward(engine(torch.randn(1, SWAPPED_WIDTH)).pow(2).mean())
    engine.step()
    flats = engine.optimizer.fp32_partitioned_groups_flat
    assert len(flats) == len(list(engine.module.parameters()))
    assert not any(flat.numel() for flat in flats)


def measured(work: Callable[[], object]) -> dict[str, int]:
    """Do work; return the peaks of anonymous memory, and of resident memory with mapped files."""
    Path("/proc/self/clear_refs").write_text("5")  # The high-water mark is reset.
    resident = resident_bytes("VmRSS")
    with PeakMemory() as peak:
        work()
    return {"anonymous": peak.highest - peak.before, "resident": resident_bytes("VmHWM") - resident}


def save_swapped(layers: int, path: str) -> dict[str, int]:
    from lightning_elastic_zero.api import save_checkpoint

    with swapped_engine(layers) as engine:
        step(engine)
        save_checkpoint(engine, path)
        return measured(lambda: save_checkpoint(engine, path))


def load_swapped(layers: int, path: str, *, steps_before: int) -> dict[str, int]:
    from lightning_elastic_zero.api import load_checkpoint

    with swapped_engine(layers) as engine:
        for _ in range(steps_before):
            step(engine)
        found = measured(lambda: load_checkpoint(engine, path))
        step(engine)
    return found
