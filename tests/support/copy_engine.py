"""An adversarial copy engine: streams and events that do no more than torch's interface promises.

It replaces torch in the one module that uses devices (``checkpoint/streams``). The memory of a
"device" is host memory, so that CPU engines can use it; the library sees a ``LateTensor``. The
engine chooses the worst order of events that the interface permits:

- A copy on a stream is made only when a thread waits for it. Until then its destination contains
  NaN (-1 for integers). The copy reads the value that its source has at that time.
- The copies of one stream are made in order. Only ``wait_stream`` orders copies of different
  streams. A read on a stream that was not ordered after the write returns NaN.
- The training stream is not the default stream of other threads. They start with a stream of
  their own on device 0, which waits for nothing.
- Freed memory is lost, unless ``record_stream`` has kept it.
- Threads other than the training thread read, and wait for events, as late as possible: while
  training waits for them, or after it has ended.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_elastic_zero.core.tensors import RankState

KIND = "privateuseone"
DEVICES = (1, 2)
"""Devices with the tensors of training; device 0 belongs to another process."""

WAITING_S = 0.02
"""How long training must wait before other threads continue; a missing wait is shorter."""

_GLANCE_S = 0.005


@dataclass(eq=False)
class Stream:
    device: torch.device
    engine: CopyEngine
    immediate: bool = False
    """Jobs run when they are submitted: training streams, and default streams of other threads."""
    given: int = 0
    done: int = 0
    jobs: deque[tuple[int, Callable[[], None], Event | None]] = field(default_factory=deque)
    behind: dict[Stream, int] = field(default_factory=dict)
    """Positions that other streams have reached before jobs submitted from now on start."""
    kept: list[tuple[int, object]] = field(default_factory=list)
    """Memory recorded on this stream, with the position until which it is kept."""

    def give(self, job: Callable[[], None], after: Event | None = None) -> int:
        self.given += 1
        self.jobs.append((self.given, job, after))
        return self.given

    def wait_stream(self, other: Stream) -> None:
        with self.engine.changed:
            event = Event(self.engine, other)
            for stream, place in event.behind.items():
                self.behind[stream] = max(self.behind.get(stream, 0), place)
            self.give(_nothing, event)


class Event:
    """A position of a stream, with the positions of streams that precede it."""

    def __init__(self, engine: CopyEngine, stream: Stream) -> None:
        self._engine, self.stream = engine, stream
        self.record()

    def record(self) -> None:
        stream = self.stream
        self.place = stream.given
        self.behind = {**stream.behind, stream: stream.given}

    def synchronize(self) -> None:
        self._engine.touch()
        self._engine.hold_back()
        with self._engine.changed:
            self._engine.finish(self.stream, self.place)
            for stream, place in self.behind.items():
                self._engine.known[stream] = max(self._engine.known.get(stream, 0), place)


class CopyEngine:
    """The streams, their order, and when each thread may read; created by the training thread."""

    def __init__(self, seed: int = 0) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.contexts: set[int] = set()
        """Devices that were the current device of a thread during an operation."""
        self.known: dict[Stream, int] = {}
        """Positions of streams that the host has waited for."""
        self.copied_on: list[Stream] = []
        """The stream of each non-blocking copy."""
        self._training = threading.get_ident()
        self._random = random.Random(seed)
        self._haste = (0.0, 0.3, 0.7)[seed % 3]
        self._local = threading.local()
        self._local.device = DEVICES[0]
        self._own = {i: Stream(torch.device(KIND, i), self, immediate=True) for i in (0, *DEVICES)}
        self._streams: list[Stream] = [*self._own.values()]
        self._written: dict[int, tuple[Stream, int]] = {}
        self._waiting_since: float | None = None
        self._over = False

    # -- the interface of torch ------------------------------------------------------------

    def new_stream(self, device: torch.device) -> Stream:
        with self.changed:
            self._streams.append(Stream(device, self))
            return self._streams[-1]

    def current_stream(self, device: torch.device | None = None) -> Stream:
        index = self.current_index() if device is None else device.index
        chosen: dict[int, Stream] = self._local.__dict__.setdefault("streams", {})
        if index not in chosen:
            if threading.get_ident() == self._training:
                chosen[index] = self._own[index]
            else:
                with self.changed:
                    chosen[index] = Stream(torch.device(KIND, index), self, immediate=True)
                    self._streams.append(chosen[index])
        return chosen[index]

    def set_stream(self, stream: Stream) -> None:
        self.current_stream(stream.device)
        self._local.streams[stream.device.index] = stream
        self._local.device = stream.device.index

    def current_index(self) -> int:
        return int(self._local.__dict__.setdefault("device", 0))

    def touch(self) -> None:
        self.contexts.add(self.current_index())

    # -- order of events ---------------------------------------------------------------------

    def finish(self, stream: Stream, place: int) -> None:
        """Run jobs in a random permitted order, until a stream has reached a position."""
        while stream.done < place:
            others = [s for s in self._streams if s.jobs and self._is_ready(s)]
            hasty = self._random.random() < self._haste
            self._step(self._random.choice(others) if hasty else self._ready(stream))

    def _ready(self, stream: Stream) -> Stream:
        """Return the stream whose next job must run first."""
        while not self._is_ready(stream):
            after = stream.jobs[0][2]
            assert after is not None
            stream = after.stream
        return stream

    @staticmethod
    def _is_ready(stream: Stream) -> bool:
        after = stream.jobs[0][2]
        return after is None or after.stream.done >= after.place

    @staticmethod
    def _step(stream: Stream) -> None:
        place, job, _ = stream.jobs.popleft()
        job()
        stream.done = place
        stream.kept = [(until, kept) for until, kept in stream.kept if until > place]

    def finish_all(self) -> None:
        with self.changed:
            for stream in self._streams:
                self.finish(stream, stream.given)

    def pending_copies(self) -> int:
        with self.changed:
            return sum(job is not _nothing for s in self._streams for _, job, _ in s.jobs)

    def hold_back(self) -> None:
        """Block threads other than the training thread until training waits or has ended."""
        if threading.get_ident() == self._training:
            return
        with self.changed:
            while not self._over and (
                self._waiting_since is None or time.monotonic() - self._waiting_since < WAITING_S
            ):
                self.changed.wait(None if self._waiting_since is None else _GLANCE_S)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark that the training thread waits for other threads in this context."""
        with self.changed:
            self._waiting_since = time.monotonic()
            self.changed.notify_all()
        try:
            yield
        finally:
            with self.changed:
                self._waiting_since = None

    def while_waiting(self, call: Callable[[], None]) -> Callable[[], None]:
        def waits() -> None:
            with self.waiting():
                call()

        return waits

    # -- writes to tensors -------------------------------------------------------------------

    def stamp(self, tensor: torch.Tensor, stream: Stream) -> None:
        with self.changed:
            stream.given += 1
            if stream.immediate and not stream.jobs:
                stream.done = stream.given
            else:
                stream.jobs.append((stream.given, _nothing, None))
            self._written[tensor.untyped_storage().data_ptr()] = (stream, stream.given)

    def is_ordered(self, address: int, stream: Stream, behind: dict[Stream, int]) -> bool:
        """Return whether the last write to an address is ordered before a read on a stream."""
        writer, place = self._written.get(address, (stream, 0))
        return writer is stream or max(behind.get(writer, 0), self.known.get(writer, 0)) >= place

    @contextmanager
    def in_place_of_torch(self) -> Iterator[CopyEngine]:
        """Replace torch in ``checkpoint/streams``; run all jobs at the end."""
        from lightning_elastic_zero.checkpoint import streams as device_streams

        names: Any = device_streams
        real, names.torch = names.torch, _torch(self)
        try:
            yield self
        finally:
            with self.changed:
                self._over = True
                self.changed.notify_all()
            self.finish_all()
            names.torch = real


def _torch(engine: CopyEngine) -> Any:
    """Return replacements of the names that ``checkpoint/streams`` uses from torch."""
    return SimpleNamespace(
        accelerator=SimpleNamespace(
            current_stream=engine.current_stream,
            set_stream=engine.set_stream,
            current_accelerator=lambda: torch.device(KIND),
            synchronize=engine.finish_all,
        ),
        Stream=engine.new_stream,
        Event=lambda device, *, blocking: _LateEvent(engine, device, blocking=blocking),
        get_device_module=lambda _: SimpleNamespace(is_initialized=lambda: True),
    )


class _LateEvent(Event):
    """An event that is not recorded on creation."""

    def __init__(self, engine: CopyEngine, device: torch.device, *, blocking: bool) -> None:
        assert blocking, "a thread that waits must not spin"
        self._engine, self._device = engine, device

    def record(self) -> None:
        self._engine.touch()
        with self._engine.changed:
            self.stream = self._engine.current_stream(self._device)
            super().record()


def _nothing() -> None:
    """Do nothing, as a job that only marks a position in a stream."""


HOST = torch.device("cpu")

_READS = {"item", "tolist", "__bool__", "__float__", "__int__", "equal"}
"""Methods that return a value to the host; they wait for the tensor's stream."""

_COMPUTES = {"clone", "zeros_like", "empty_like"}


class LateTensor(torch.Tensor):
    """A tensor that reports a device, or a host tensor that is read late; views share memory."""

    place: torch.device
    engine: CopyEngine

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if func == torch.Tensor.device.__get__:
            return args[0].place
        if name in _OWN:
            return _OWN[name](*args, **kwargs)
        late = [value for value in args if isinstance(value, LateTensor)]
        if name in _READS:
            args = [_read(a) if isinstance(a, LateTensor) else a for a in args]
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        assert not isinstance(result, tuple | list) or not any(map(torch.is_tensor, result)), name
        if not isinstance(result, torch.Tensor):
            return result
        address = result.untyped_storage().data_ptr()
        if not any(address == _address(tensor) for tensor in late):
            assert name in _COMPUTES, f"the copy engine does not support {name}"
            return _computed(result, late[0])
        return _wrapped(result, late[0].place, late[0].engine)

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        with self.engine.changed:
            stream.kept.append((stream.given, _raw(self)))


def on_device(tensor: torch.Tensor, engine: CopyEngine, place: torch.device) -> LateTensor:
    wrapped = _wrapped(tensor.detach(), place, engine)
    if place != HOST:
        engine.stamp(wrapped, engine.current_stream(place))
    return wrapped


def some_place(number: int) -> torch.device:
    turn = number % (len(DEVICES) + 1)
    return HOST if turn == len(DEVICES) else torch.device(KIND, DEVICES[turn])


def large_on_devices(state: RankState, engine: CopyEngine, first: int = 0) -> RankState:
    placed = _Placing(engine, first)
    return replace(
        state,
        flats=tuple(
            replace(flat, master=placed.one(flat.master), elementwise=placed.all(flat.elementwise))
            for flat in state.flats
        ),
        frozen=placed.all(state.frozen),
        module_weights=placed.all(state.module_weights),
    )


def small_on_devices(state: RankState, engine: CopyEngine, first: int = 0) -> RankState:
    placed = _Placing(engine, first)
    return replace(
        state,
        flats=tuple(replace(flat, scalars=placed.all(flat.scalars)) for flat in state.flats),
        module_buffers=placed.all(state.module_buffers),
    )


class _Placing:
    def __init__(self, engine: CopyEngine, first: int) -> None:
        self._engine, self._numbers = engine, itertools.count(first)

    def one(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return on_device(value, self._engine, some_place(next(self._numbers)))

    def all(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.one(value) for name, value in tensors.items()}


def _wrapped(tensor: torch.Tensor, place: torch.device, engine: CopyEngine) -> LateTensor:
    with torch._C.DisableTorchFunctionSubclass():
        wrapped = tensor.as_subclass(LateTensor)
    wrapped.place, wrapped.engine = place, engine
    return wrapped


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def _address(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


def poison(tensor: torch.Tensor) -> None:
    """Set all bits: NaN for floats, -1 for integers."""
    with torch.no_grad():
        raw = _raw(tensor)
        if raw.is_contiguous():
            raw.reshape(-1).view(torch.uint8).fill_(0xFF)


def _read(source: LateTensor) -> torch.Tensor:
    """Return a copy made on the calling thread's stream, after the stream's jobs."""
    engine = source.engine
    engine.hold_back()
    if source.place == HOST:
        return _raw(source)
    engine.touch()
    with engine.changed:
        stream = engine.current_stream(source.place)
        engine.finish(stream, stream.given)
        made = _raw(source).clone()
        if not engine.is_ordered(_address(source), stream, stream.behind):
            poison(made)
        return made


def _computed(result: torch.Tensor, like: LateTensor) -> LateTensor:
    engine, place = like.engine, like.place
    if place == HOST:
        return _wrapped(result, place, engine)
    stream = engine.current_stream(place)
    engine.touch()
    with engine.changed:
        if not engine.is_ordered(_address(like), stream, stream.behind):
            poison(result)
        made = _wrapped(result, place, engine)
        engine.stamp(result, stream)
    return made


def _to(source: LateTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    copies = kwargs.pop("copy", False)
    parsed: Any = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype, non_blocking, _ = parsed
    assert not non_blocking, "the copy engine does not support a non-blocking to()"
    assert device == HOST, f"the copy engine does not support to({device})"
    found = _read(source)
    found = found if dtype is None else found.to(dtype)
    return found.clone() if copies and found.data_ptr() == _address(source) else found


def _numpy(source: LateTensor) -> Any:
    if source.place != HOST:
        msg = f"can't convert {source.place} tensor to numpy: no host reads a device's memory"
        raise TypeError(msg)
    return _read(source).numpy()


def _copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(to, LateTensor):
        assert isinstance(source, LateTensor)
        _from_device(to, source, non_blocking=non_blocking)
    elif to.place == HOST:
        _raw(to).copy_(_read(source) if isinstance(source, LateTensor) else source)
    else:
        assert not isinstance(source, LateTensor), "the copy engine cannot copy between devices"
        _to_device(to, source, non_blocking=non_blocking)
    return to


def _from_device(to: torch.Tensor, source: LateTensor, *, non_blocking: bool) -> None:
    engine = source.engine
    poison(to)
    if source.place == HOST or not non_blocking:
        to.copy_(_read(source))
        return
    engine.touch()
    with engine.changed:
        stream = engine.current_stream(source.place)
        engine.copied_on.append(stream)
        read = _later(source, stream)
        if stream.immediate:  # Later computations of training follow the copy.
            held = read()
            stream.give(lambda: _put(to, held))
        else:
            stream.give(lambda: _put(to, read()))


def _put(to: torch.Tensor, found: torch.Tensor | None) -> None:
    if found is not None:
        with torch.no_grad():
            to.copy_(found)


def _later(source: LateTensor, stream: Stream) -> Callable[[], torch.Tensor | None]:
    """Return a function that reads a source; None if it is freed or not yet written then."""
    engine, address, raw = source.engine, _address(source), _raw(source)
    behind = dict(stream.behind)
    memory: Any = StorageWeakRef(raw.untyped_storage())
    dtype, layout = raw.dtype, (raw.storage_offset(), raw.size(), raw.stride())
    del raw

    def read() -> torch.Tensor | None:
        if memory.expired() or not engine.is_ordered(address, stream, behind):
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
        return torch.empty(0, dtype=dtype).set_(storage, *layout).clone()

    return read


def _to_device(to: LateTensor, source: torch.Tensor, *, non_blocking: bool) -> None:
    engine, target = to.engine, _raw(to)
    engine.touch()
    with engine.changed:
        stream = engine.current_stream(to.place)
        if non_blocking:
            engine.copied_on.append(stream)
        poison(target)
        # From memory that is not pinned, the source is read before the call returns.
        held = source if non_blocking else source.clone()
        stream.give(lambda: _put(target, held))


_OWN: dict[str, Callable[..., Any]] = {
    "copy_": _copy,
    "to": _to,
    "cpu": lambda source: _to(source, HOST),
    "numpy": _numpy,
}
