"""An adversarial copy engine: streams and events that do no more than torch's interface promises.

It takes torch's place in the one module that speaks to devices (``device_streams``). What is on a
"device" lies in the host's memory, so that engines on processors have one, and is seen by the
library as ``LateTensor``. The engine is as unkind as an order of events may be:

- A copy on a stream is made when somebody waits for it and not before; until then its destination
  holds NaN (-1 for integers). What it reads is what its source holds *then*.
- Within a stream copies are made in their order; streams have none among each other but what
  ``wait_stream`` says. What a stream reads that it was not ordered behind is NaN.
- Training's own stream is nobody's default stream: other threads begin with one that waits for
  nothing, on device 0.
- Memory that is given back is gone, unless ``record_stream`` has kept it.
- Other threads than training's read, and wait for an event, as late as they can: while training
  waits for them, or when it has ended.
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
"""Those on which training's tensors lie; device 0 is somebody else's."""

WAITING_S = 0.02
"""For how long training waits before others go on: a wait that is left out is shorter."""

_GLANCE_S = 0.005


@dataclass(eq=False)
class Stream:
    device: torch.device
    engine: CopyEngine
    immediate: bool = False
    """Work is done when it is given: training's streams, and other threads' default ones."""
    given: int = 0
    done: int = 0
    jobs: deque[tuple[int, Callable[[], None], Event | None]] = field(default_factory=deque)
    behind: dict[Stream, int] = field(default_factory=dict)
    """How far other streams have come when what is given from now on begins."""
    kept: list[tuple[int, object]] = field(default_factory=list)
    """Memory that was recorded on this stream, until it has come so far."""

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
    """How far a stream has come, and all that it was ordered behind."""

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
    """Streams, their order, and who may read when; made by training's thread."""

    def __init__(self, seed: int = 0) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.contexts: set[int] = set()
        """The devices that a thread had as its own when it asked for something."""
        self.known: dict[Stream, int] = {}
        """How far streams have come, as the host knows."""
        self.copied_on: list[Stream] = []
        """The stream of each copy that did not wait."""
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

    # -- what torch has --------------------------------------------------------------------

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

    # -- what may happen when ----------------------------------------------------------------

    def finish(self, stream: Stream, place: int) -> None:
        """Do jobs in a random order that is allowed, until a stream has come so far."""
        while stream.done < place:
            others = [s for s in self._streams if s.jobs and self._is_ready(s)]
            hasty = self._random.random() < self._haste
            self._step(self._random.choice(others) if hasty else self._ready(stream))

    def _ready(self, stream: Stream) -> Stream:
        """Return the stream whose next job this stream needs."""
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
        """Let another thread than training's go on only while training waits, or has ended."""
        if threading.get_ident() == self._training:
            return
        with self.changed:
            while not self._over and (
                self._waiting_since is None or time.monotonic() - self._waiting_since < WAITING_S
            ):
                self.changed.wait(None if self._waiting_since is None else _GLANCE_S)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let training's thread wait for others in here."""
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

    # -- what tensors hold -------------------------------------------------------------------

    def stamp(self, tensor: torch.Tensor, stream: Stream) -> None:
        with self.changed:
            stream.given += 1
            if stream.immediate and not stream.jobs:
                stream.done = stream.given
            else:
                stream.jobs.append((stream.given, _nothing, None))
            self._written[tensor.untyped_storage().data_ptr()] = (stream, stream.given)

    def is_ordered(self, address: int, stream: Stream, behind: dict[Stream, int]) -> bool:
        """Return whether an address was written before a stream reads it."""
        writer, place = self._written.get(address, (stream, 0))
        return writer is stream or max(behind.get(writer, 0), self.known.get(writer, 0)) >= place

    @contextmanager
    def in_place_of_torch(self) -> Iterator[CopyEngine]:
        """Replace torch in ``device_streams``; all jobs are done at the end."""
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
    """Return what ``device_streams`` uses of torch."""
    return SimpleNamespace(
        accelerator=SimpleNamespace(
            current_stream=engine.current_stream,
            set_stream=engine.set_stream,
            current_accelerator=lambda: torch.device(KIND),
        ),
        Stream=engine.new_stream,
        Event=lambda device, *, blocking: _LateEvent(engine, device, blocking=blocking),
        get_device_module=lambda _: SimpleNamespace(is_initialized=lambda: True),
    )


class _LateEvent(Event):
    """One that is not recorded when it is made."""

    def __init__(self, engine: CopyEngine, device: torch.device, *, blocking: bool) -> None:
        assert blocking, "a thread that waits must not spin"
        self._engine, self._device = engine, device

    def record(self) -> None:
        self._engine.touch()
        with self._engine.changed:
            self.stream = self._engine.current_stream(self._device)
            super().record()


def _nothing() -> None:
    """Do nothing: what only takes a place in a stream."""


HOST = torch.device("cpu")

_READS = {"item", "tolist", "__bool__", "__float__", "__int__", "equal"}
"""What gives the host a value: it waits for the stream that it is on."""

_COMPUTES = {"clone", "zeros_like", "empty_like"}


class LateTensor(torch.Tensor):
    """A tensor that claims to be on a device, or on the host and read late; views share memory."""

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
            assert name in _COMPUTES, f"the copy engine knows nothing of {name}"
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
    """Fill with NaN; integers with -1: all bits of both are set."""
    with torch.no_grad():
        raw = _raw(tensor)
        if raw.is_contiguous():
            raw.reshape(-1).view(torch.uint8).fill_(0xFF)


def _read(source: LateTensor) -> torch.Tensor:
    """Return a copy on the calling thread's stream, after its jobs."""
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
    assert not non_blocking, "who reads the copy, and when?"
    assert device == HOST, f"the copy engine moves nothing to {device}"
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
        assert not isinstance(source, LateTensor), "the copy engine copies nothing between devices"
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
        if stream.immediate:  # What training computes next comes after it.
            held = read()
            stream.give(lambda: _put(to, held))
        else:
            stream.give(lambda: _put(to, read()))


def _put(to: torch.Tensor, found: torch.Tensor | None) -> None:
    if found is not None:
        with torch.no_grad():
            to.copy_(found)


def _later(source: LateTensor, stream: Stream) -> Callable[[], torch.Tensor | None]:
    """Return a function that reads a source, which may be freed or not be written by then."""
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
        # Without pinned memory the source has been read when the call returns.
        held = source if non_blocking else source.clone()
        stream.give(lambda: _put(target, held))


_OWN: dict[str, Callable[..., Any]] = {
    "copy_": _copy,
    "to": _to,
    "cpu": lambda source: _to(source, HOST),
    "numpy": _numpy,
}
