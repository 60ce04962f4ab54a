"""The memory of snapshots: allocated once, as large as the state, and used again."""

from __future__ import annotations

import errno
import mmap
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

from lightning_elastic_zero.checkpoint import background as host_buffer
from lightning_elastic_zero.checkpoint import streams as device_streams
from lightning_elastic_zero.checkpoint.background import HostBuffer, copy_plain_data
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.errors import SaveError
from tests.core._memory import MB, zeros
from tests.support.processes import HANG_TIMEOUT_S
from tests.support.ranks import ROOT, environment

STATE = [
    torch.zeros(1000),
    torch.zeros(7, 3, dtype=torch.bfloat16),
    torch.zeros(0),
    torch.zeros((), dtype=torch.int64),
    torch.zeros(5, dtype=torch.uint8),
]


def test_what_is_given_is_alike_and_apart() -> None:
    """Each tensor has its source's shape and type, and no two share a byte."""
    given = HostBuffer().allocate_like(STATE)
    for value, (tensor, source) in enumerate(zip(given, STATE, strict=True)):
        assert (tensor.shape, tensor.dtype) == (source.shape, source.dtype)
        tensor.fill_(value)
    assert [bool((tensor == value).all()) for value, tensor in enumerate(given)] == [True] * 5


def test_memory_is_used_again() -> None:
    """A second save of no larger state takes no new memory; a larger one takes what it needs."""
    memory = HostBuffer()
    first = memory.allocate_like(STATE)[0].data_ptr()
    size_bytes = memory.size_bytes
    state_bytes = sum(t.numel() * t.element_size() for t in STATE)
    assert state_bytes <= size_bytes <= state_bytes + 64 * len(STATE)
    assert memory.allocate_like(STATE[:2])[0].data_ptr() == first
    assert memory.size_bytes == size_bytes
    memory.allocate_like([torch.zeros(5000)])
    assert memory.size_bytes == 20032
    memory.release()
    assert memory.size_bytes == 0


def measured(program: str) -> int:
    """Return the bytes that a program of ``_memory`` counts, in a process of its own."""
    command = [sys.executable, "-m", "tests.core._memory", program]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        timeout=HANG_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="counts pages as Linux tells them")
def test_forked_children_cost_nothing() -> None:
    """While a loader's worker lives, the next save does not take the block's memory once more."""
    assert measured("fork") < 16 * MB


@pytest.mark.cases(1)
@pytest.mark.skipif(sys.platform != "linux", reason="counts pages as Linux tells them")
@pytest.mark.parametrize("when", ["at once", "behind"])
def test_a_block_that_grows_is_not_held_twice(when: str) -> None:
    """Where a state has outgrown the block, the old one is given back before there is a new one."""
    assert 0.9 <= measured(f"grow {when}") / (192 * MB) <= 1.1


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how much was wanted, and both ways in which a save needs less."""

    def refuse(*_: object, **__: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(SaveError, match=r"\b2\.0 GB\b") as raised:
        HostBuffer().allocate_like([zeros(2000 * MB)])
    assert "max_snapshot_bytes" in str(raised.value)
    assert "async_save" in str(raised.value)


def test_a_system_without_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel takes no advice on pages, memory is given all the same."""

    class Unadvised(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Unadvised)
    (given,) = HostBuffer().allocate_like([torch.zeros(1000)])
    assert given.fill_(2.0).sum() == 2000


class Driver:
    """A CUDA driver that takes its time to pin memory."""

    def __init__(self, pins: threading.Event) -> None:
        self._pins = pins

    def cudaHostRegister(self, *_: int) -> int:  # noqa: N802 (as the driver has it)
        """Pin, at last."""
        return 0 if self._pins.wait(60) else 1

    def cudaHostUnregister(self, _: int) -> int:  # noqa: N802 (as the driver has it)
        """Unpin."""
        return 0


def test_pinning_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are made in parts, each a sign of life; so is every second of the driver's one call.

    A driver that does not return is given up after a time in proportion to the memory.
    """
    pins, seen = threading.Event(), []

    def note() -> None:
        seen.append(time.monotonic())
        if len(seen) == 8:
            pins.set()

    monkeypatch.setattr(device_streams, "_cudart", lambda: Driver(pins))
    monkeypatch.setattr(host_buffer, "_TOUCHED_BYTES", MB)
    monkeypatch.setattr(host_buffer, "_SHOWN_EVERY_S", 0.01)
    memory = HostBuffer()
    memory._of(5 * MB, Progress(note), pinned=True)
    assert pins.is_set()
    assert len(seen) >= 8
    memory.release()

    pins.clear()
    monkeypatch.setattr(host_buffer, "_PIN_S", 0.05)
    threading.Timer(1.0, pins.set).start()
    before = len(seen)
    memory._of(5 * MB, Progress(lambda: seen.append(0.0)), pinned=True)
    assert len(seen) - before <= 5 + 10
    memory.release()


@pytest.mark.gpu
def test_pinned_memory_takes_copies_behind() -> None:
    """What a side stream copies into it is what the device held."""
    source = torch.randn(1 << 20, device="cuda")
    memory = HostBuffer()
    (target,) = memory.allocate_like([source])
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(target, source.cpu())
    memory.release()


def test_a_copy_of_plain_data_is_nobody_elses() -> None:
    """Changing what was copied, however deep, changes nothing in the copy."""
    weight = torch.nn.Parameter(torch.ones(2))
    tree: dict[str, Any] = {
        "a": [1, {"t": torch.ones(2)}, (torch.ones(1),)],
        "w": weight,
        "same": weight,
    }
    copied = copy_plain_data(tree)
    tree["a"][1]["t"].zero_()
    tree["a"][2][0].zero_()
    tree["a"].append(2)
    weight.data.zero_()
    assert len(copied["a"]) == 3
    assert copied["a"][1]["t"].tolist() == [1.0, 1.0]
    assert copied["a"][2][0].item() == 1.0
    assert type(copied["w"]) is torch.nn.Parameter
    assert copied["w"].tolist() == [1.0, 1.0]
    assert copied["same"] is copied["w"]
