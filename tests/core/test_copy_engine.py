"""Snapshots of a state on devices whose copies come as late, and in as odd an order, as may be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elastic_zero.checkpoint import background as async_save
from lightning_elastic_zero.checkpoint.background import AsyncCheckpointer, Snapshotter
from lightning_elastic_zero.checkpoint.save import save_engine
from lightning_elastic_zero.checkpoint.streams import (
    current_device,
    on_stream,
    record_event,
    side_stream,
)
from lightning_elastic_zero.checkpoint.types import CheckpointStats, SaveOptions
from lightning_elastic_zero.coordination.ranks import OneRank
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.formats.torch_read import StoredRun
from lightning_elastic_zero.storage.checksums import CHUNK_BYTES
from tests.core._copy_engine import DEVICES, KIND, CopyEngine
from tests.core._late_runs import NAMES, SMALL_MEMORY, STEP_ALONE, LateRun, writing
from tests.core._late_tensor import on_device
from tests.support.bits import open_verified, write_tree
from tests.support.checkpoints import differing_files
from tests.support.processes import HANG_TIMEOUT_S

SEEDS = range(3)


@pytest.fixture(params=SEEDS)
def late(request: pytest.FixtureRequest) -> Iterator[CopyEngine]:
    """Yield a copy engine in torch's place, of another order each."""
    with CopyEngine(request.param).in_place_of_torch() as engine:
        yield engine
    assert engine.contexts <= set(DEVICES), "a thread has asked another device"


def test_a_copy_is_nan_until_it_is_waited_for(late: CopyEngine) -> None:
    """It then holds what is there by then; the engine itself would else show nothing."""
    source, device = torch.zeros(4), torch.device(KIND, 1)
    to, seen = torch.ones(4), on_device(source, late, device)
    with on_stream(side_stream(device)):
        to.copy_(seen, non_blocking=True)
        event = record_event(device)
    source += 7
    assert to.isnan().all()
    event.synchronize()
    assert to.tolist() == [7.0] * 4


def test_what_is_read_out_of_order_is_nan(late: CopyEngine) -> None:
    """A stream that waits for nothing finds nothing."""
    device = torch.device(KIND, 1)
    seen = on_device(torch.zeros(4), late, device)
    with on_stream(late.new_stream(device)):  # type: ignore[arg-type]
        assert seen.cpu().isnan().all()
    assert not seen.cpu().isnan().any()


def test_no_host_reads_a_devices_memory(late: CopyEngine) -> None:
    """It is copied first."""
    seen = on_device(torch.zeros(4), late, torch.device(KIND, 1))
    with pytest.raises(TypeError, match="no host reads"):
        seen.numpy()


def test_work_goes_to_a_stream_of_its_device_and_back(late: CopyEngine) -> None:
    """Device and stream are those from before; the stream is behind what training has given."""
    other, before = torch.device(KIND, 2), late.current_stream()
    training = late.current_stream(other)
    seen = on_device(torch.zeros(4), late, other)
    stream: Any = side_stream(other)
    with on_stream(stream):
        assert current_device() == other
        assert late.current_stream() is stream
        assert not seen.cpu().isnan().any()
    assert late.current_stream() is before
    assert late.current_stream(other) is training


@pytest.mark.parametrize("memory_bytes", SMALL_MEMORY)
def test_a_snapshot_holds_what_was_there(memory_bytes: int | None, late: CopyEngine) -> None:
    """Whatever training does after its hook, and whether there is memory for copies or not.

    Each of them takes the same memory, and lies elsewhere.
    """
    camera = Snapshotter(memory_bytes)
    for first in range(3):
        run = LateRun(late, first)
        wanted = run.values()
        snapshot = camera.take(run.contents(), 0)
        run.hooks = [lambda taken=snapshot: taken.wait(lambda: False)]  # type: ignore[misc]
        with writing(snapshot, late) as found:
            run.step_on()
            run.step_on()
        assert found == wanted
    camera.close()
    assert not any(stream.immediate for stream in late.copied_on), "training's stream copies"


@pytest.mark.parametrize("first", range(3))
def test_small_copies_alone_are_waited_for(first: int, late: CopyEngine) -> None:
    """Steps on devices from which nothing large is copied, or all of it at once."""
    run = LateRun(late, first, in_module=NAMES, keys=STEP_ALONE)
    camera, wanted = Snapshotter(), run.values()
    snapshot = camera.take(run.contents(), 0)
    with writing(snapshot, late) as found:
        run.step_on()
    assert found == wanted
    camera.close()


def test_another_snapshot_in_the_same_memory(late: CopyEngine) -> None:
    """Copies of one that nobody waits for, because its save failed, never come into the next."""
    camera, run, other = Snapshotter(), LateRun(late), LateRun(late)
    other.step_on()
    wanted = other.values()
    camera.take(run.contents(), 0)
    with late.waiting():
        snapshot = camera.take(other.contents(), 0)
    for _ in range(2):
        with writing(snapshot, late) as found:
            pass
        assert found == wanted
        late.finish_all()
    camera.close()


def test_what_nobody_waits_for_is_over_when_the_memory_is_released(late: CopyEngine) -> None:
    """A run ends with a snapshot whose save has failed: no copy comes after that."""
    camera = Snapshotter()
    with late.waiting():
        camera.take(LateRun(late).contents(), 0)
        camera.close()
    assert not late.pending_copies()


@pytest.mark.parametrize("memory_bytes", SMALL_MEMORY)
def test_memory_that_is_given_back_is_read_before(
    memory_bytes: int | None, late: CopyEngine
) -> None:
    """As DeepSpeed's ``offload_states`` does it behind a save, before anything is copied."""
    camera, run = Snapshotter(memory_bytes), LateRun(late)
    wanted = run.values()
    snapshot = camera.take(run.contents(), 0)
    run.give_back()
    with writing(snapshot, late) as found:
        pass
    assert found == wanted
    camera.close()


@pytest.mark.parametrize("memory_bytes", SMALL_MEMORY)
def test_a_save_behind_training_equals_a_blocking_one(
    memory_bytes: int | None, late: CopyEngine, tmp_path: Path
) -> None:
    """As the strategy saves, with its step hook: file by file, but for the save's number."""
    run, ranks, ended = LateRun(late), OneRank(), _Ended()
    save_engine(run.handle(), tmp_path / "blocking", ranks, {"epoch": 1}, SaveOptions())
    writer = AsyncCheckpointer(OneRank(), _nothing, _nothing, ended, memory_bytes)
    end_hook = run.handle().add_step_pre_hook(writer.wait_for_copies)
    for turn in range(2):  # The second one takes the same memory.
        # The memory of the first one is filled by threads that are not in inference mode.
        with torch.inference_mode(mode=not turn):
            path = tmp_path / f"behind{turn}"
            writer.save(run.handle(), path, ranks, {"epoch": 1}, SaveOptions())
        run.step_on()
        run.step_on()
        with late.waiting():
            writer.wait_until_finished(ranks)
        assert ended.stats[-1] is not None
        run.step_back()
    end_hook()
    with late.waiting():
        assert writer.stop() is None
    for turn in range(2):
        assert not differing_files(tmp_path / f"behind{turn}", tmp_path / "blocking")


def test_a_save_waits_for_the_one_before(
    late: CopyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its snapshot takes the memory from which that one is written, which is held until it waits.

    One that does not wait has taken it by then.
    """
    monkeypatch.setattr(async_save, "_GLANCE_S", 0.01)
    line = _HeldLine()
    run, ranks = LateRun(late), _OpensWhileWaiting(line)
    save_engine(run.handle(), tmp_path / "blocking", OneRank(), {"epoch": 1}, SaveOptions())
    writer = AsyncCheckpointer(line, _nothing, _nothing, _Ended())
    run.hooks = [writer.wait_for_copies]
    writer.save(run.handle(), tmp_path / "behind", ranks, {"epoch": 1}, SaveOptions())
    run.step_on()
    ranks.waits = True
    with late.waiting():
        writer.save(run.handle(), tmp_path / "next", ranks, {"epoch": 1}, SaveOptions())
        line.opened.set()
        writer.wait_until_finished(ranks)
        assert writer.stop() is None
    assert not differing_files(tmp_path / "behind", tmp_path / "blocking")


def test_a_load_reads_no_buffer_late(late: CopyEngine, tmp_path: Path) -> None:
    """What is read of a file goes through one buffer, and no host writes to a device's memory."""
    numel, device = CHUNK_BYTES // 2, torch.device(KIND, 1)
    values = torch.arange(4.0 * numel)
    targets = [torch.zeros(numel), torch.zeros(2 * numel)]
    starts = (0, 2 * numel)
    with open_verified(tmp_path, write_tree(tmp_path, {"a": values})) as file:
        for target, start in zip(targets, starts, strict=True):
            run = StoredRun(file.tree["a"], start, start + target.numel())
            file.read_into([(on_device(target, late, device), run)])
            assert target.isnan().all(), "there before it may be"
    late.finish_all()
    for target, start in zip(targets, starts, strict=True):
        assert torch.equal(target, values[start : start + target.numel()])


class _HeldLine(OneRank):
    """A line of the writer's that is held before it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()

    def broadcast(self, step: str, work: Callable[[], Any]) -> Any:
        """Wait, and do it."""
        assert self.opened.wait(HANG_TIMEOUT_S)
        return super().broadcast(step, work)


class _OpensWhileWaiting(OneRank):
    """Training's line, by which it shows that it waits."""

    def __init__(self, line: _HeldLine) -> None:
        super().__init__()
        self.progress = Progress(self._open)
        self.waits = False
        self._line = line

    def _open(self) -> None:
        if self.waits:
            self._line.opened.set()


class _Ended:
    def __init__(self) -> None:
        self.stats: list[CheckpointStats | None] = []

    def __call__(self, _: Path, stats: CheckpointStats | None) -> None:
        self.stats.append(stats)


def _nothing(*_: object) -> None:
    """Do nothing."""
