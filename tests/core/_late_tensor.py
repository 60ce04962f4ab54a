"""Tensors of a "device" in the host's memory, read by nobody but through ``_copy_engine``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_elastic_zero.core.tensors import RankState
from tests.core._copy_engine import DEVICES, KIND, CopyEngine, Stream

HOST = torch.device("cpu")

_READS = {"item", "tolist", "__bool__", "__float__", "__int__", "equal"}
"""What gives the host a value: it waits for the stream that it is on."""

_COMPUTES = {"clone", "zeros_like", "empty_like"}


class LateTensor(torch.Tensor):
    """A tensor that says it lies on a device; views of it share its memory.

    One whose place is the host is read there, but by other threads than training's only as late as
    the copy engine lets them.
    """

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
        """Keep the memory until a stream has come so far; torch's takes no stream but its own."""
        with self.engine.changed:
            stream.kept.append((stream.given, _raw(self)))


def on_device(tensor: torch.Tensor, engine: CopyEngine, place: torch.device) -> LateTensor:
    """Return a live tensor as one that lies on a device, or on the host, written by training."""
    wrapped = _wrapped(tensor.detach(), place, engine)
    if place != HOST:
        engine.stamp(wrapped, engine.current_stream(place))
    return wrapped


def some_place(number: int) -> torch.device:
    """Return a device, another one or the host, in turn."""
    turn = number % (len(DEVICES) + 1)
    return HOST if turn == len(DEVICES) else torch.device(KIND, DEVICES[turn])


def large_on_devices(state: RankState, engine: CopyEngine, first: int = 0) -> RankState:
    """Return a rank's state, its large tensors on two devices and on the host in turn."""
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
    """Return it with buffers and scalars there, which a save wants to be of no class of ours."""
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
    """Return the same memory as a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def _address(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN; integers with -1, all bits of both being set."""
    with torch.no_grad():
        raw = _raw(tensor)
        if raw.is_contiguous():
            raw.reshape(-1).view(torch.uint8).fill_(0xFF)


def _read(source: LateTensor) -> torch.Tensor:
    """Return a copy of what is there on the calling thread's stream, once that has come so far."""
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
    """Return what a device has computed on the current stream, of what had been written."""
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


def _cpu(source: LateTensor) -> torch.Tensor:
    return _to(source, HOST)


def _numpy(source: LateTensor) -> Any:
    if source.place != HOST:
        msg = f"can't convert {source.place} tensor to numpy: no host reads a device's memory"
        raise TypeError(msg)
    return _read(source).numpy()


def _copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy as ``Tensor.copy_`` does, from a device or to it."""
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
    """Return what reads a source that may be gone by then, or not be written yet."""
    engine, address, raw = source.engine, _address(source), _raw(source)
    behind = dict(stream.behind)
    memory: Any = StorageWeakRef(raw.untyped_storage())  # type: ignore[no-untyped-call]
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
    "cpu": _cpu,
    "numpy": _numpy,
}
