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

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

KIND = "privateuseone"
DEVICES = (1, 2)
"""Those on which training's tensors lie; device 0 is somebody else's."""

WAITING_S = 0.02
"""For how long training waits before others go on: a wait that is left out is shorter."""

_GLANCE_S = 0.005


@dataclass(eq=False)
class Stream:
    """Work in order, beside other streams'."""

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
        """Enqueue a job; return its number."""
        self.given += 1
        self.jobs.append((self.given, job, after))
        return self.given

    def wait_stream(self, other: Stream) -> None:
        """Begin with what follows when the other has done what it was given so far."""
        with self.engine.changed:
            event = Event(self.engine, other)
            for stream, place in event.behind.items():
                self.behind[stream] = max(self.behind.get(stream, 0), place)
            self.give(_nothing, event)


class Event:
    """How far a stream has come, and all that it was ordered behind."""

    def __init__(self, engine: CopyEngine, stream: Stream) -> None:
        self._engine, self._stream = engine, stream
        self.record()

    def record(self) -> None:
        """Note what the stream has been given so far."""
        stream = self._stream
        self.place = stream.given
        self.behind = {**stream.behind, stream: stream.given}

    def synchronize(self) -> None:
        """Wait until that is done."""
        self._engine.touch()
        self._engine.hold_back()
        with self._engine.changed:
            self._engine.finish(self._stream, self.place)
            for stream, place in self.behind.items():
                self._engine.known[stream] = max(self._engine.known.get(stream, 0), place)

    def needs(self) -> tuple[Stream, int]:
        """Return the stream, and how far it has to come."""
        return self._stream, self.place


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
        """Return a stream that waits for nothing."""
        with self.changed:
            self._streams.append(Stream(device, self))
            return self._streams[-1]

    def current_stream(self, device: torch.device | None = None) -> Stream:
        """Return the calling thread's stream on a device, or on its own one."""
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
        """Make a stream the calling thread's, and its device."""
        self.current_stream(stream.device)
        self._local.streams[stream.device.index] = stream
        self._local.device = stream.device.index

    def current_index(self) -> int:
        """Return the calling thread's device."""
        return int(self._local.__dict__.setdefault("device", 0))

    def touch(self) -> None:
        """Note that a thread asks its device for something."""
        self.contexts.add(self.current_index())

    # -- what may happen when ----------------------------------------------------------------

    def finish(self, stream: Stream, place: int) -> None:
        """Do jobs in a random order that is allowed, until a stream has come so far."""
        while stream.done < place:
            others = [s for s in self._streams if s.jobs and self._is_ready(s)]
            hasty = self._random.random() < self._haste
            self._step(self._random.choice(others) if hasty else self._ready(stream))

    def _ready(self, stream: Stream) -> Stream:
        """Return the stream whose next job has to be done so that this one gets on."""
        while not self._is_ready(stream):
            after = stream.jobs[0][2]
            assert after is not None
            stream = after.needs()[0]
        return stream

    @staticmethod
    def _is_ready(stream: Stream) -> bool:
        after = stream.jobs[0][2]
        return after is None or after.needs()[0].done >= after.needs()[1]

    @staticmethod
    def _step(stream: Stream) -> None:
        place, job, _ = stream.jobs.popleft()
        job()
        stream.done = place
        stream.kept = [(until, kept) for until, kept in stream.kept if until > place]

    def finish_all(self) -> None:
        """Do all that was given."""
        with self.changed:
            for stream in self._streams:
                self.finish(stream, stream.given)

    def pending_copies(self) -> int:
        """Return how many jobs streams have that copy."""
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
        """Return a call by which training may wait for others."""

        def waits() -> None:
            with self.waiting():
                call()

        return waits

    # -- what tensors hold -------------------------------------------------------------------

    def stamp(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Note that a stream writes a tensor now."""
        with self.changed:
            stream.given += 1
            if stream.immediate and not stream.jobs:
                stream.done = stream.given
            else:
                stream.jobs.append((stream.given, _nothing, None))
            self._written[tensor.untyped_storage().data_ptr()] = (stream, stream.given)

    def is_ordered(self, address: int, stream: Stream, behind: dict[Stream, int]) -> bool:
        """Whether what is read at an address on a stream has been written before."""
        writer, place = self._written.get(address, (stream, 0))
        return writer is stream or max(behind.get(writer, 0), self.known.get(writer, 0)) >= place

    @contextmanager
    def in_place_of_torch(self) -> Iterator[CopyEngine]:
        """Be what the library finds in ``device_streams`` in here; all is done at the end."""
        from lightning_elastic_zero.checkpoint import streams as device_streams

        names: Any = device_streams
        real, names.torch = names.torch, _Torch(self)
        try:
            yield self
        finally:
            with self.changed:
                self._over = True
                self.changed.notify_all()
            self.finish_all()
            names.torch = real


class _Torch:
    """What ``device_streams`` asks torch for."""

    def __init__(self, engine: CopyEngine) -> None:
        self.accelerator = _Accelerator(engine)
        self.Stream = engine.new_stream
        self._engine = engine

    def Event(self, device: torch.device, *, blocking: bool) -> Event:  # noqa: N802 (torch's name)
        """Make an event; it is recorded on the current stream."""
        assert blocking, "a thread that waits must not spin"
        return _LateEvent(self._engine, device)

    @staticmethod
    def get_device_module(_: torch.device) -> type[_Module]:
        """Return what says whether the device was started."""
        return _Module


class _LateEvent(Event):
    """One that is not recorded when it is made."""

    def __init__(self, engine: CopyEngine, device: torch.device) -> None:
        self._engine, self._device = engine, device

    def record(self) -> None:
        """Note what the current stream has been given so far."""
        self._engine.touch()
        with self._engine.changed:
            self._stream = self._engine.current_stream(self._device)
            super().record()


class _Module:
    @staticmethod
    def is_initialized() -> bool:
        return True


class _Accelerator:
    """``torch.accelerator``."""

    def __init__(self, engine: CopyEngine) -> None:
        self.current_stream, self.set_stream = engine.current_stream, engine.set_stream

    @staticmethod
    def current_accelerator() -> torch.device:
        """Return the kind of device."""
        return torch.device(KIND)


def _nothing() -> None:
    """Do nothing: what only takes a place in a stream."""
