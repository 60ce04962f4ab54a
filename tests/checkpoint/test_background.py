"""Saves in the background: copy streams, host buffers and progress reports."""

from __future__ import annotations

import errno
import mmap
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_elastic_zero.checkpoint import background, snapshot
from lightning_elastic_zero.checkpoint import streams as device_streams
from lightning_elastic_zero.checkpoint.background import AsyncCheckpointer
from lightning_elastic_zero.checkpoint.file_queue import FileQueue
from lightning_elastic_zero.checkpoint.save import ShardContents, save_engine
from lightning_elastic_zero.checkpoint.snapshot import (
    HostBuffer,
    Snapshot,
    Snapshotter,
    copy_plain_data,
)
from lightning_elastic_zero.checkpoint.streams import (
    current_device,
    on_stream,
    record_event,
    side_stream,
    use_device,
)
from lightning_elastic_zero.checkpoint.types import CheckpointStats, SaveRequest
from lightning_elastic_zero.coordination.ranks import OneRank
from lightning_elastic_zero.core.layout import Fragment
from lightning_elastic_zero.core.manifest import Group, Manifest, Parameter, StateKey
from lightning_elastic_zero.core.partition import FlatBuffer
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.tensors import FlatState, RankState, is_on_device
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.formats.client_state import SplitState
from lightning_elastic_zero.formats.torch_read import StoredRun
from lightning_elastic_zero.storage.disk_checkpoints import (
    StagedDirectory,
    remove_leftovers,
)
from lightning_elastic_zero.storage.file_write import CHUNK_BYTES
from lightning_elastic_zero.storage.folders import folder_at
from tests.checkpoint._snapshot_memory import MB
from tests.support.bits import open_verified, write_tree
from tests.support.checkpoints import differing_files
from tests.support.copy_engine import (
    DEVICES,
    KIND,
    CopyEngine,
    LateTensor,
    large_on_devices,
    on_device,
    small_on_devices,
)
from tests.support.processes import HANG_TIMEOUT_S, output_of
from tests.support.ranks import ROOT, environment
from tests.support.small_checkpoints import NoEngine, manifest_of

NUMEL = 600
NAMES = ("a", "b", "c")

_ADAM = (StateKey("exp_avg", "elementwise", "float32"), StateKey("step", "scalar", "float32"))
STEP_ALONE = _ADAM[1:]
"""State keys of an optimizer without moments."""

Values = dict[str, list[float]]


@dataclass
class LateRun(LiveEngine):
    """Masters, moments, steps and a buffer of three parameters, each in its own group."""

    late: CopyEngine
    first: int = 0
    """Number that selects the device of the first tensor; see ``some_place``."""
    in_module: tuple[str, ...] = NAMES[-1:]
    """Parameters whose masters are the module's own weights, which forward changes too."""
    keys: tuple[StateKey, ...] = _ADAM
    masters: dict[str, torch.Tensor] = field(init=False)
    moments: dict[str, torch.Tensor] = field(init=False)
    steps: dict[str, torch.Tensor] = field(init=False)
    average: torch.Tensor = field(init=False)
    hooks: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(NoEngine())
        self.masters = {n: torch.arange(float(NUMEL)) + 1000 * i for i, n in enumerate(NAMES)}
        keeps = self.keys is not STEP_ALONE
        self.moments = {name: self.masters[name] * 0.5 for name in NAMES if keeps}
        self.steps = {name: torch.tensor(3.0) for name in NAMES}
        self.average = torch.arange(5.0)

    def values(self) -> Values:
        found = {f"master {n}": t.tolist() for n, t in self.masters.items()}
        found |= {f"exp_avg {n}": t.tolist() for n, t in self.moments.items()}
        found |= {f"step {n}": [t.item()] for n, t in self.steps.items()}
        return found | {"average": self.average.tolist()}

    def describe(self) -> Manifest:
        parameters = tuple(Parameter(n, (NUMEL,), "float32", i) for i, n in enumerate(NAMES))
        groups = tuple(Group((name,), {"lr": 0.1}, self.keys) for name in NAMES)
        buffers = tuple(FlatBuffer(i, (n,), (NUMEL,), (), NUMEL) for i, n in enumerate(NAMES))
        tables = (parameters, groups, buffers, ("average",), ())
        return Manifest("", 1, 1, "fp32", "float32", *tables)

    def rank_state(self, **_: bool) -> RankState:
        state = RankState(
            tuple(
                FlatState(
                    (Fragment(name, 0, NUMEL, 0, i, 0),),
                    self.masters[name],
                    {"exp_avg": self.moments[name]} if self.moments else {},
                    {"step": self.steps[name]},
                    in_module=name in self.in_module,
                )
                for i, name in enumerate(NAMES)
            ),
            {},
            {"average": self.average},
            {},
            {},
        )
        return large_on_devices(state, self.late, self.first)

    def module(self) -> torch.nn.Module:
        return torch.nn.Module()

    def contents(self) -> ShardContents:
        """Return the contents of a shard, with small tensors on devices too."""
        state = small_on_devices(self.rank_state(), self.late, self.first)
        return ShardContents(Path(), self.describe(), state, SplitState())

    def check(self) -> None:
        """Accept every run."""

    def add_step_pre_hook(self, call: Callable[[], None]) -> Callable[[], None]:
        self.hooks.append(call)
        return lambda: self.hooks.remove(call)

    def train_step(self) -> None:
        """Change all tensors in place, as an optimizer does after its hooks."""
        for tensor in (self.average, *(self.masters[name] for name in self.in_module)):
            tensor.add_(1)  # in forward
        for call in self.hooks:
            self.late.while_waiting(call)()
        for tensor in self._tensors():
            tensor.add_(4096)

    def undo_steps(self) -> None:
        for tensor in self._tensors():
            tensor.sub_(2 * 4096)
        for tensor in (self.average, *(self.masters[name] for name in self.in_module)):
            tensor.sub_(2)

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        states = (self.masters, self.moments, self.steps)
        return *(tensor for of_kind in states for tensor in of_kind.values()), self.average

    def free_memory(self) -> None:
        """Free the memory of masters and moments, as DeepSpeed's ``offload_states`` does."""
        for tensors in (self.masters, self.moments):
            for tensor in tensors.values():
                tensor.data = tensor.data.clone()


@contextmanager
def writing(snapshot: Snapshot, late: CopyEngine) -> Iterator[Values]:
    """Read a snapshot in another thread, as the writer does; join the thread at the end."""
    found: Values = {}
    failed: list[BaseException] = []

    device = current_device()

    def write() -> None:
        try:
            use_device(device)
            snapshot.wait()
            found.update(_read(snapshot.contents))
        except BaseException as error:  # noqa: BLE001 (the test fails by it)
            failed.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    yield found
    with late.waiting():
        thread.join(HANG_TIMEOUT_S)
    assert not thread.is_alive()
    assert not failed, failed


def _read(contents: ShardContents) -> Values:
    found: Values = {"average": contents.state.module_buffers["average"].tolist()}
    for name, flat in zip(NAMES, contents.state.flats, strict=True):
        kept = {"master": flat.master, **flat.elementwise}
        for kind, tensor in kept.items():
            found[f"{kind} {name}"] = tensor.tolist()
        step = flat.scalars["step"]
        assert isinstance(step, torch.Tensor)
        found[f"step {name}"] = [step.cpu().item()]
    return found


@pytest.fixture(params=range(3))
def late(request: pytest.FixtureRequest) -> Iterator[CopyEngine]:
    """Yield a copy engine that replaces torch's, with a random order of copies."""
    with CopyEngine(request.param).in_place_of_torch() as engine:
        yield engine
    assert engine.contexts <= set(DEVICES), "a thread has used another device"


def test_a_copy_is_nan_until_its_event_is_waited_for(late: CopyEngine) -> None:
    source, device = torch.zeros(4), torch.device(KIND, 1)
    to, seen = torch.ones(4), on_device(source, late, device)
    with on_stream(side_stream(device)):
        to.copy_(seen, non_blocking=True)
        event = record_event(device)
    source += 7
    assert to.isnan().all()
    event.synchronize()
    assert to.tolist() == [7.0] * 4


def test_a_stream_that_does_not_wait_reads_nan(late: CopyEngine) -> None:
    device = torch.device(KIND, 1)
    seen = on_device(torch.zeros(4), late, device)
    with on_stream(late.new_stream(device)):  # type: ignore[arg-type]
        assert seen.cpu().isnan().all()
    assert not seen.cpu().isnan().any()


def test_the_host_cannot_read_device_memory(late: CopyEngine) -> None:
    seen = on_device(torch.zeros(4), late, torch.device(KIND, 1))
    with pytest.raises(TypeError, match="no host reads"):
        seen.numpy()


def test_on_stream_restores_device_and_stream(late: CopyEngine) -> None:
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


def test_a_snapshot_is_unaffected_by_later_training(late: CopyEngine) -> None:
    snapshotter = Snapshotter()
    for first in range(3):
        run = LateRun(late, first)
        wanted = run.values()
        snapshot = snapshotter.take(run.contents())
        run.hooks = [snapshot.wait]
        with writing(snapshot, late) as found:
            run.train_step()
            run.train_step()
        assert found == wanted
    snapshotter.close()
    assert not any(stream.immediate for stream in late.copied_on), "training's stream has copied"


@pytest.mark.parametrize("first", range(3))
def test_a_snapshot_of_small_tensors_alone_is_unaffected_by_training(
    first: int, late: CopyEngine
) -> None:
    run = LateRun(late, first, in_module=NAMES, keys=STEP_ALONE)
    snapshotter, wanted = Snapshotter(), run.values()
    snapshot = snapshotter.take(run.contents())
    with writing(snapshot, late) as found:
        run.train_step()
    assert found == wanted
    snapshotter.close()


def test_a_snapshot_keeps_every_field_of_the_state() -> None:
    """A field added in the future must be copied too, neither dropped nor shared with training."""
    live = [torch.full((4,), float(n)) for n in range(8)]
    fragment = Fragment("a", 0, 4, 0, 0, 0)
    states = {"exp_avg": live[1]}, {"step": live[2]}
    flat = FlatState((fragment,), live[0], *states, in_module=True, weights=(live[7],))
    of_engine = {"scale": 8}, {"last_epoch": 1}, {"global": {"rates": live[6]}}, (7,)
    tensors = (flat,), {"f": live[3]}, {"average": live[4]}, {"low": live[5]}
    state = RankState(*tensors, *of_engine, tensor_rank=1, copy_sums={"f": 9}, frozen_sums={"f": 8})
    for held in (state, flat):
        empty = {"{}", "()", "None", "False"}
        assert all(repr(getattr(held, each.name)) not in empty for each in fields(held))
    parameters = (Parameter("a", (4,), "float32", 0),)
    tables = (Group(("a",), {"lr": 0.1}, _ADAM),), (FlatBuffer(0, ("a",), (4,), (), 4),)
    manifest = Manifest("", 1, 1, "fp32", "float32", parameters, *tables, ("average",), ())
    wanted = repr(asdict(state))
    snapshotter = Snapshotter()
    snapshot = snapshotter.take(ShardContents(Path(), manifest, state, SplitState()))
    snapshot.wait()
    for tensor in live:
        tensor.fill_(-1)
    assert repr(asdict(snapshot.contents.state)) == wanted
    snapshotter.close()


def test_copies_of_an_abandoned_snapshot_do_not_reach_the_next(late: CopyEngine) -> None:
    snapshotter, run, other = Snapshotter(), LateRun(late), LateRun(late)
    other.train_step()
    wanted = other.values()
    snapshotter.take(run.contents())
    with late.waiting():
        snapshot = snapshotter.take(other.contents())
    for _ in range(2):
        with writing(snapshot, late) as found:
            pass
        assert found == wanted
        late.finish_all()
    snapshotter.close()


def test_close_waits_for_the_copies_of_an_abandoned_snapshot(late: CopyEngine) -> None:
    snapshotter = Snapshotter()
    with late.waiting():
        snapshotter.take(LateRun(late).contents())
        snapshotter.close()
    assert not late.pending_copies()


def test_copies_that_a_failed_snapshot_has_started_do_not_reach_the_next(
    late: CopyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        msg = "out of memory"
        raise RuntimeError(msg)

    snapshotter, run = Snapshotter(), LateRun(late)
    with monkeypatch.context() as patch:
        patch.setattr(LateTensor, "record_stream", refuse)
        with pytest.raises(RuntimeError, match="out of memory"):
            snapshotter.take(run.contents())
    assert late.pending_copies()
    with late.waiting():
        snapshot, wanted = snapshotter.take(run.contents()), run.values()
    snapshot.wait()
    run.train_step()
    late.finish_all()
    with writing(snapshot, late) as found:
        pass
    assert found == wanted
    snapshotter.close()


def test_memory_freed_after_a_snapshot_is_copied_first(late: CopyEngine) -> None:
    snapshotter, run = Snapshotter(), LateRun(late)
    wanted = run.values()
    snapshot = snapshotter.take(run.contents())
    run.free_memory()
    with writing(snapshot, late) as found:
        pass
    assert found == wanted
    snapshotter.close()


def test_a_background_save_equals_a_blocking_one(late: CopyEngine, tmp_path: Path) -> None:
    """All files are equal, except for the save id."""
    run, ranks = LateRun(late), OneRank()
    save_engine(SaveRequest(run, tmp_path / "blocking", {"epoch": 1}), ranks)
    published = deque[CheckpointStats]()
    writer = AsyncCheckpointer(OneRank(), FileQueue(), published)
    end_hook = run.add_step_pre_hook(writer.wait_for_copies)
    for turn in range(2):  # The second save reuses the memory.
        # Threads that are not in inference mode fill the first save's memory.
        with torch.inference_mode(mode=not turn):
            path = tmp_path / f"behind{turn}"
            writer.save(SaveRequest(run, path, {"epoch": 1}), ranks)
        run.train_step()
        run.train_step()
        with late.waiting():
            writer.wait_until_finished(ranks)
        assert published.pop().path == str(path)
        run.undo_steps()
    end_hook()
    with late.waiting():
        assert writer.stop() is None
    for turn in range(2):
        assert not differing_files(tmp_path / f"behind{turn}", tmp_path / "blocking")


def test_a_save_waits_until_the_memory_of_the_previous_one_is_free(
    late: CopyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_GLANCE_S", 0.01)
    blocked = _BlockedRanks()
    run, ranks = LateRun(late), _UnblocksWhileWaiting(blocked)
    save_engine(SaveRequest(run, tmp_path / "blocking", {"epoch": 1}), OneRank())
    writer = AsyncCheckpointer(blocked, FileQueue(), deque())
    run.hooks = [writer.wait_for_copies]
    writer.save(SaveRequest(run, tmp_path / "behind", {"epoch": 1}), ranks)
    run.train_step()
    ranks.waits = True
    with late.waiting():
        writer.save(SaveRequest(run, tmp_path / "next", {"epoch": 1}), ranks)
        blocked.opened.set()
        writer.wait_until_finished(ranks)
        assert writer.stop() is None
    assert not differing_files(tmp_path / "behind", tmp_path / "blocking")


def test_a_load_into_devices_waits_for_the_buffers_copy(late: CopyEngine, tmp_path: Path) -> None:
    numel, device = CHUNK_BYTES // 2, torch.device(KIND, 1)
    values = torch.arange(4.0 * numel)
    targets = [torch.zeros(numel), torch.zeros(2 * numel)]
    starts = (0, 2 * numel)
    with open_verified(tmp_path, write_tree(tmp_path, {"a": values})) as file:
        for target, start in zip(targets, starts, strict=True):
            run = StoredRun(file.tree["a"], start, start + target.numel())
            file.read_into([(on_device(target, late, device), run)])
            assert target.isnan().all(), "copied too early"
    late.finish_all()
    for target, start in zip(targets, starts, strict=True):
        assert torch.equal(target, values[start : start + target.numel()])


class _BlockedRanks(OneRank):
    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()

    def broadcast(self, step: str, work: Callable[[], Any], others: Any = None) -> Any:
        assert self.opened.wait(HANG_TIMEOUT_S)
        return super().broadcast(step, work, others)


class _UnblocksWhileWaiting(OneRank):
    def __init__(self, blocked: _BlockedRanks) -> None:
        super().__init__()
        self.progress = Progress(self._open)
        self.waits = False
        self._blocked = blocked

    def _open(self) -> None:
        if self.waits:
            self._blocked.opened.set()


def contents_of(*tensors: torch.Tensor) -> ShardContents:
    """Return contents with frozen weights alone."""
    state = RankState((), {str(i): t for i, t in enumerate(tensors)}, {}, {}, {})
    return ShardContents(
        Path(), Manifest("", 1, 1, "fp32", "float32", (), (), (), (), ()), state, SplitState()
    )


STATE = [
    torch.arange(1000.0),
    torch.ones(7, 3, dtype=torch.bfloat16),
    torch.zeros(0),
    torch.tensor(3),
    torch.arange(10, dtype=torch.uint8)[::2],
]


def test_copies_equal_their_sources_and_do_not_overlap() -> None:
    snapshotter = Snapshotter()
    copies = snapshotter.take(contents_of(*STATE)).contents.state.frozen.values()
    for copied, source in zip(copies, STATE, strict=True):
        assert copied.dtype == source.dtype
        assert copied.is_contiguous()
        assert torch.equal(copied, source)
    snapshotter.close()


def test_memory_is_reused_and_grows_as_needed() -> None:
    snapshotter = Snapshotter()

    def grown(*tensors: torch.Tensor) -> tuple[int, int]:
        """Return the bytes that a snapshot lacks, and the size of the block after it."""
        contents = contents_of(*tensors)
        missing_bytes = snapshotter.missing_bytes(contents)
        snapshotter.take(contents)
        return missing_bytes, snapshotter._memory.size_bytes

    missing_bytes, size_bytes = grown(*STATE)
    state_bytes = sum(tensor.nbytes for tensor in STATE)
    assert state_bytes <= missing_bytes == size_bytes <= state_bytes + 64 * len(STATE)
    assert grown(*STATE[:2]) == (0, size_bytes)
    assert grown(torch.zeros(5000)) == (20032 - size_bytes, 20032)
    snapshotter.close()
    assert snapshotter._memory.size_bytes == 0


def measured(program: str) -> int:
    command = [sys.executable, "-m", "tests.checkpoint._snapshot_memory", program]
    return int(output_of(command, ROOT, environment()).splitlines()[-1])


@pytest.mark.long
def test_forked_children_do_not_copy_the_block() -> None:
    assert measured("fork") < 16 * MB


@pytest.mark.long
def test_a_growing_block_frees_the_old_one_first() -> None:
    assert 0.9 <= measured("grow") / (192 * MB) <= 1.1


def test_an_allocation_failure_names_size_and_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(SaveError, match=r"\b2\.0 GB\b") as raised:
        HostBuffer().allocate(2000 * MB)
    assert "async_save" in str(raised.value)


def test_a_kernel_without_madvise_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unadvised(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Unadvised)
    assert HostBuffer().allocate(1000).fill_(2).sum() == 2000


def test_pinning_shows_progress_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pins, seen = threading.Event(), []

    def note() -> None:
        seen.append(time.monotonic())
        if len(seen) == 8:
            pins.set()

    driver = SimpleNamespace(
        cudaHostRegister=lambda *_: 0 if pins.wait(60) else 1, cudaHostUnregister=lambda _: 0
    )
    monkeypatch.setattr(device_streams, "_cudart", lambda: driver)
    monkeypatch.setattr(snapshot, "_TOUCHED_BYTES", MB)
    monkeypatch.setattr(snapshot, "_SHOWN_EVERY_S", 0.01)
    memory = HostBuffer()
    memory.allocate(5 * MB, Progress(note), pinned=True)
    assert pins.is_set()
    assert len(seen) >= 8
    memory.release()

    pins.clear()
    monkeypatch.setattr(snapshot, "_PIN_S", 0.05)
    threading.Timer(1.0, pins.set).start()
    before = len(seen)
    memory.allocate(5 * MB, Progress(lambda: seen.append(0.0)), pinned=True)
    assert len(seen) - before <= 5 + 10
    memory.release()


@pytest.mark.gpu
def test_pinned_memory_takes_asynchronous_copies() -> None:
    source = torch.randn(1 << 20, device="cuda")
    memory = HostBuffer()
    target = memory.allocate(source.nbytes, pinned=True).view(source.dtype)
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(target, source.cpu())
    memory.release()


def test_a_copy_of_plain_data_shares_no_memory() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    nested: list[Any] = [1, {"t": torch.ones(2)}, (torch.ones(1),)]
    tree: dict[str, Any] = {"a": nested, "w": weight, "same": weight}
    copied = copy_plain_data(tree)
    nested[1]["t"].zero_()
    nested[2][0].zero_()
    nested.append(2)
    weight.data.zero_()
    assert len(copied["a"]) == 3
    assert copied["a"][1]["t"].tolist() == [1.0, 1.0]
    assert copied["a"][2][0].item() == 1.0
    assert type(copied["w"]) is torch.nn.Parameter
    assert copied["w"].tolist() == [1.0, 1.0]
    assert copied["same"] is copied["w"]


FILES = 7


def fill(directory: Path) -> Path:
    names = [f"checkpoint/zero_pp_rank_{n}_mp_rank_00_model_states.pt" for n in range(FILES)]
    (directory / "checkpoint").mkdir(parents=True)
    for name in names:
        (directory / name).touch()
    (directory / "manifest.json").write_text(manifest_of(dict.fromkeys(names, "")))
    return directory


def put_link(root: Path, progress: Progress) -> None:
    fill(root / "a.ckpt")
    folder_at(fill(root / "last.ckpt")).make_link(folder_at(root / "a.ckpt"), progress)


def publish(root: Path, progress: Progress) -> None:
    fill(root / "a.ckpt")
    staged = StagedDirectory.create(root / "a.ckpt", "5a7e")
    staged.put_in_place()
    staged.clean(progress)


def sweep(root: Path, progress: Progress) -> None:
    fill(root / ".zero-removed-1")
    remove_leftovers(root, progress)


@pytest.mark.parametrize("work", [put_link, publish, sweep], ids=lambda work: work.__name__)
def test_removing_reports_progress_for_each_file(
    work: Callable[[Path, Progress], None], tmp_path: Path
) -> None:
    seen = []
    work(tmp_path, Progress(lambda: seen.append(time.monotonic())))
    assert len(seen) >= FILES
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_events_of_cuda_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.Event`` ignores ``blocking``, and a waiting thread would spin."""
    made: list[dict[str, Any]] = []

    class FakeEvent:
        def __init__(self, **options: Any) -> None:
            made.append(options)

        def record(self) -> None:
            made[-1]["recorded"] = True

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    device_streams.record_event(torch.device("cuda", 1))
    assert made == [{"blocking": True, "recorded": True}]


def test_without_an_accelerator_cuda_is_not_initialised() -> None:
    before = torch.cuda.is_initialized()
    if not before:
        assert device_streams.current_device() is None
    device_streams.use_device(None)
    device_streams.finish_device_work()
    assert torch.cuda.is_initialized() == before
    assert not is_on_device(torch.zeros(1))
    assert not is_on_device(torch.zeros(1, device="meta"))
