"""The state of a rank and the targets of a restore, as tensors between engine and formats.

``RankState`` refers to the state of one rank of a live engine. ``RestoreTargets`` are the buffers
that a restore fills before live state changes. Host memory for whole states is allocated in large
pages.
"""

from __future__ import annotations

import copy
import ctypes
import math
import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from lightning_elastic_zero.core.layout import Fragment, TensorKey
from lightning_elastic_zero.core.manifest import Plain, StateKey, TrainingProgress
from lightning_elastic_zero.errors import CheckpointMismatchError, UnsupportedError

Scalar: TypeAlias = "torch.Tensor | int | float | bool | None"
"""An optimizer state that is one value per flat buffer: a 0-dimensional tensor or a number."""

_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class FlatState:
    """One flat buffer of one rank: masters, and the states that share its fragments."""

    fragments: tuple[Fragment, ...]
    """Places of the parameters' elements; other elements are padding."""
    master: torch.Tensor
    """Master weights, shape ``(partition elements,)``, usually fp32."""
    elementwise: Mapping[str, torch.Tensor]
    """Optimizer states of the same shape as ``master``."""
    scalars: Mapping[str, Scalar]
    """Optimizer states with one value for the buffer."""
    in_module: bool = False
    """Whether the masters are the module's own weights (stage 0 in fp32), which users may change
    between steps, for example to validate averaged weights."""
    weights: tuple[torch.Tensor, ...] = ()
    """The module's weights, 1-D for each fragment. Empty if they are known to equal the rounded
    masters; they differ if user code has changed either in place since the last step."""


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank, by reference."""

    flats: tuple[FlatState, ...]
    frozen: Mapping[str, torch.Tensor]
    """Weights that the optimizer does not own: this rank's piece, 1-D without padding."""
    module_buffers: Mapping[str, torch.Tensor]
    """Persistent module buffers, with their shapes. They may differ between ranks."""
    module_weights: Mapping[str, torch.Tensor]
    """Low-precision weights of the module; empty unless they are saved too."""
    loss_scaler: Mapping[str, Plain]
    """Class and fields of DeepSpeed's loss scaler."""
    lr_scheduler: Mapping[str, object] | None = None
    """State of a scheduler that the engine itself steps (not with Lightning)."""
    optimizer_state: Mapping[Any, Any] = field(default_factory=dict)
    """Optimizer state under keys that are not parameters; the same on all ranks."""
    replica_sums: tuple[int, ...] = ()
    """Stage 0, where every rank has all masters: a sum over the bits of each flat buffer."""
    frozen_sums: Mapping[str, int] = field(default_factory=dict)
    """Stages 0 to 2, where every rank has all frozen weights: a sum over the bits of each."""
    tensor_rank: int = 0
    """The tensor rank whose shards it has."""
    copy_sums: Mapping[str, int] = field(default_factory=dict)
    """Of parameters that every tensor rank has: a sum over the bits of this rank's elements."""

    def tensors(self) -> dict[TensorKey, torch.Tensor]:
        """Return the tensors of which plans consist (``formats/elastic_plan``)."""
        found: dict[TensorKey, torch.Tensor] = {}
        for index, flat in enumerate(self.flats):
            found[TensorKey("master", index)] = flat.master
            found |= {TensorKey("state", index, key): t for key, t in flat.elementwise.items()}
            names = (TensorKey("module", f.name) for f in flat.fragments)
            found |= zip(names, flat.weights, strict=bool(flat.weights))
        return found | {TensorKey("frozen", name): t for name, t in self.frozen.items()}

    def large_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that grow with the model."""
        yield from (*self.tensors().values(), *self.module_weights.values())


@dataclass(frozen=True, slots=True)
class RestoreValues:
    """Small values that a load commits together with the filled buffers."""

    scalars: tuple[Mapping[str, Scalar], ...]
    """Scalar optimizer states of each flat buffer; empty without optimizer state."""
    groups: tuple[Mapping[str, Plain], ...]
    """Saved hyperparameters and counters of each parameter group."""
    module_buffers: Mapping[str, torch.Tensor]
    progress: TrainingProgress
    loss_scaler: Mapping[str, Plain] = field(default_factory=dict)
    lr_scheduler: Mapping[str, object] | None = None
    optimizer_state: Mapping[Any, Any] | None = None
    """Optimizer state under keys that are not parameters; None keeps the live one."""
    optimizer: str = ""
    """Class name of the optimizer that saved the hyperparameters."""
    group_origins: tuple[int | None, ...] = ()
    """For each live parameter group the saved group that it continues; None: it is new."""
    saved_groups: int = 0
    """Number of saved parameter groups."""
    restores_state: bool = True
    """Whether the optimizer's state is restored; else it starts fresh."""
    restores_hyperparameters: bool = True
    """False keeps the live ones."""
    module_weights: tuple[torch.Tensor, ...] = ()
    """For each flat buffer, the module's weights if they are not the rounded masters."""

    @property
    def has_other_weights(self) -> bool:
        """Whether the module gets weights that are not the rounded masters."""
        return any(weights.numel() for weights in self.module_weights)


@dataclass(frozen=True, slots=True)
class RestoreTargets:
    """The buffers that a load fills, and functions to commit or discard them."""

    fragments: tuple[Fragment, ...]
    """The wanted fragments; ``Fragment.buffer`` is an index of ``weights`` and ``states``."""
    weights: tuple[torch.Tensor, ...]
    """1-D targets: the masters of a flat buffer, or one frozen weight."""
    states: tuple[Mapping[str, torch.Tensor], ...]
    """For each of ``weights``, a 1-D target per element-wise state; none for frozen weights."""
    commit: Callable[[RestoreValues], None]
    """Makes the filled buffers and the values live. Collective; it must not fail."""
    rollback: Callable[[], None]
    """Restores the live state after a failure. Not collective, since a rank may be lost."""
    round_masters: Callable[[], tuple[torch.Tensor, ...]] = tuple
    """Returns the filled masters of each flat buffer in the module's dtype, on the host; an empty
    tensor if the module's weights are the masters."""


def state_key(name: str, value: object, *, elementwise: bool) -> StateKey:
    """Describe an optimizer state by one of its values."""
    if isinstance(value, torch.Tensor):
        dtype = dtype_name(value.dtype)
    else:
        dtype = "None" if value is None else type(value).__name__
    return StateKey(name, "elementwise" if elementwise else "scalar", dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def precision_of(dtype: torch.dtype) -> str:
    """Return a manifest's name for the dtype of a module's weights."""
    return _PRECISIONS.get(dtype, dtype_name(dtype))


def check_cast(saved: torch.dtype, wanted: torch.dtype, where: str) -> None:
    """Refuse casts to or from integers: quantized weights have separate scales."""
    floating = saved.is_floating_point and wanted.is_floating_point
    if saved != wanted and not floating and not (saved.is_complex and wanted.is_complex):
        msg = (
            f"{where} has elements of {saved}, expected {wanted}: only floating-point types are "
            "cast. Quantized weights have separate scales: save them dequantized"
        )
        raise CheckpointMismatchError(msg)


def is_lossy_cast(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a type cannot hold all of a tensor's values; NaN stays NaN."""
    if values.dtype == dtype:
        return False
    if values.is_complex() and not dtype.is_complex:
        return True
    found, kept = values, values.to(dtype).to(values.dtype)
    if values.is_floating_point():  # 8-bit types cannot be compared.
        found, kept = found.double(), kept.double()
    return bool(((found != kept) & ~((found != found) & (kept != kept))).any())


def can_overflow(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether finite floating-point values may be too large for another type."""
    floating = saved.is_floating_point or saved.is_complex
    return floating and saved != wanted and torch.finfo(wanted).max < torch.finfo(saved).max


def overflowed(values: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
    """Return a mask of the finite values that are infinite, or NaN, in the type of ``cast``."""
    return values.isfinite() & ~cast.isfinite()


def overflows(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether finite values would become infinite, or NaN, in a floating-point type."""
    if not (values.is_floating_point() and dtype.is_floating_point):
        return False
    if not can_overflow(values.dtype, dtype):
        return False
    # As fp64, because isfinite() does not support 8-bit types.
    return bool(overflowed(values.double(), values.to(dtype).double()).any())


INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes, to copy and compare elements without a cast."""

_HOST_DEVICES = ("cpu", "meta")

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def itemsize_of(dtype: str) -> int:
    """Return the bytes of one element of a dtype, such as ``"bfloat16"``."""
    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on an accelerator's device."""
    return tensor.device.type not in _HOST_DEVICES


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements, 1-D and contiguous, without lazy conjugation."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    # Not contiguous(): one element is contiguous with any stride, but a view as bytes needs 1.
    return flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)


def bit_sums(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return a sum over the bits of each tensor, computed on its device."""
    # All are started before the first is awaited; frozen weights may be on several devices.
    sums = [_bits(tensor).sum(dtype=torch.int64) for tensor in tensors]
    return tuple(int(each) for each in sums)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors of one shape, dtype and device have the same bits.

    On the host by the system's function, which takes 0.7 of the time of NumPy, and 0.6 of that of
    ``torch.equal``: both write a result for each element.
    """
    one, other = _bits(one), _bits(other)
    if one.device.type == "cpu" and one.shape == other.shape:
        return not _memcmp(one.data_ptr(), other.data_ptr(), one.nbytes)
    return torch.equal(one, other)


def different_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements of two 1-D tensors of one dtype that differ in their bits."""
    if one.dtype == torch.complex128:
        return one != other
    return _bits(one) != _bits(other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = torch.view_as_real(tensor) if tensor.dtype == torch.complex128 else tensor
    return tensor.detach().reshape(-1).view(INTEGER_DTYPES[tensor.element_size()])


def is_writable(tensor: torch.Tensor) -> bool:
    """Whether each element has its own memory, unlike in an expanded view or a meta tensor."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return not any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def plain(value: object, where: str) -> Plain:
    """Return a hyperparameter as plain data; a 0-dimensional tensor becomes a tagged number.

    NumPy's numbers and texts become Python's if that is exact. Raises UnsupportedError for other
    types; ``where`` describes the hyperparameter.
    """
    value = numpy_to_python(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return {"tensor": value.item(), "dtype": dtype_name(value.dtype)}
    if isinstance(value, tuple):
        return tuple(plain(v, where) for v in value)
    if isinstance(value, list):
        return [plain(v, where) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: plain(v, where) for k, v in value.items()}
    msg = (
        f"{where} is a {type(value).__name__}, which cannot be saved: hyperparameters must be "
        "numbers, strings, or lists, tuples and dicts of them"
    )
    raise UnsupportedError(msg)


def canonical_repr(value: object, where: str = "a value") -> str:
    """Return the text by which ranks or shards compare a scalar or a hyperparameter.

    It contains type and value but no device. NaN equals NaN, and -0.0 equals 0.0. Raises
    UnsupportedError for a value that is not plain data.
    """
    return repr(_without_negative_zero(plain(value, where)))


def _without_negative_zero(value: Plain) -> Plain:
    if type(value) is float:
        return value + 0.0  # -0.0 + 0.0 is 0.0
    if isinstance(value, (list, tuple)):
        return type(value)(_without_negative_zero(v) for v in value)
    if isinstance(value, dict):
        return {key: _without_negative_zero(v) for key, v in sorted(value.items())}
    return value


def numpy_to_python(value: Any) -> Any:
    """Replace NumPy's numbers and texts by Python's, if exact, in dicts, lists and tuples."""
    if isinstance(value, np.generic):
        return _exact(value)
    if isinstance(value, dict):
        items = [(numpy_to_python(k), numpy_to_python(v)) for k, v in value.items()]
        if all(k is n and v is m for (k, v), (n, m) in zip(value.items(), items, strict=True)):
            return value
        changed = copy.copy(value)
        changed.clear()
        for key, inner in items:
            changed[key] = inner  # Not update(), with which a Counter counts.
        return changed
    if type(value) in (list, tuple):
        return type(value)(map(numpy_to_python, value))
    return value


def _exact(value: np.generic) -> Any:
    """Return Python's value if it is equal; a long double may have more digits."""
    if isinstance(value, (np.datetime64, np.timedelta64, np.void)):
        return value
    kinds = {np.longdouble: float, np.clongdouble: complex}
    found: Any = kinds.get(type(value), type(value).item)(value)
    return found if found == value or found != found else value


def cast_like(value: Any, live: object) -> Any:
    """Convert numbers back to the NumPy types of a live value (see ``numpy_to_python``).

    A learning rate of ``np.float32`` has other steps than Python's float of the same value.
    """
    if isinstance(live, np.number) and type(value) in (int, float):
        found = type(live)(value)
        # NumPy would compare in the narrower type.
        return found if found.item() == value or found != found else value
    if isinstance(value, dict) and isinstance(live, dict):
        return {key: cast_like(v, live.get(key)) for key, v in value.items()}
    if type(value) in (list, tuple) and isinstance(live, list | tuple) and len(value) == len(live):
        return type(value)(map(cast_like, value, live))
    return value


def unplain(value: Any, live: object = None) -> Any:
    """Undo ``plain``: a tagged number becomes a tensor again, also in dicts, lists and tuples.

    Tensors are created on the device of the ``live`` value that they replace, and numbers get its
    NumPy types (``cast_like``).
    """
    if isinstance(value, dict) and value.keys() == {"tensor", "dtype"}:
        device = live.device if isinstance(live, torch.Tensor) else None
        dtype = getattr(torch, str(value["dtype"]))
        return torch.tensor(value["tensor"], dtype=dtype, device=device)
    if isinstance(value, dict):
        held = live if isinstance(live, dict) else {}
        return {key: unplain(v, held.get(key)) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        if not isinstance(live, (list, tuple)) or len(live) != len(value):
            live = [None] * len(value)
        return type(value)(map(unplain, value, live))
    return cast_like(value, live)


_ZEROS_BYTES = 4 << 20
"""Minimum size of zeros that are mapped separately. The system limits the number of mappings."""

_CHUNK_BYTES = 256 << 10
"""Minimum size of a chunk that is mapped separately, which costs less than filling it."""

NOT_FOR_CHILDREN = mmap.MADV_DONTFORK
"""Excludes memory from forked children that do not read it. Otherwise, the system would copy each
page when the parent writes it."""


def host_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros on the host, in pages that the system creates at their first use.

    Unlike ``torch.zeros``, nothing writes them. Raises OSError if the system has no memory.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < _ZEROS_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
    return map_pages(size_bytes).view(dtype).view(tuple(shape))


def host_chunk(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return uninitialized host memory for a part of a tensor, which is unmapped at its end.

    With ``torch.empty``, malloc may not reuse the memory of earlier chunks if something small was
    allocated after each, and the process would grow to the size of the whole tensor. Raises OSError
    if the system has no memory.
    """
    size_bytes = numel * dtype.itemsize
    if size_bytes < _CHUNK_BYTES:
        return torch.empty(numel, dtype=dtype, device="cpu")
    return map_pages(size_bytes).view(dtype)


def map_pages(size_bytes: int, *advice: int) -> torch.Tensor:
    """Map zeroed memory as a 1-D tensor of ``torch.uint8``, which owns it.

    ``torch.empty`` fills its result if deterministic algorithms are requested. ``advice`` is for
    ``madvise``; a kernel without it ignores it, since it only affects speed. Raises OSError if the
    system has no memory.
    """
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for option in advice:
        with suppress(OSError):
            pages.madvise(option)
    return torch.frombuffer(pages, dtype=torch.uint8)


LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types of values without parts. Checked first, since lists of numbers may be long."""


def tensors_of(tree: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in dicts, lists, tuples, sets and attributes of dicts and tensors."""
    parts: Iterable[object] = ()
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        parts = tree.values()
    elif isinstance(tree, list | tuple | set | frozenset):
        parts = tree
    for part in parts:
        if type(part) not in LEAVES:
            yield from tensors_of(part)
    if isinstance(tree, torch.Tensor | OrderedDict):
        yield from tensors_of(vars(tree))


MOST_LEVELS = 200
"""Levels of a tree that are read: walks over it recurse, and Python stops at a thousand calls."""


def measure(tree: object, most_levels: int = MOST_LEVELS) -> tuple[int, int]:
    """Return how many values a walk over a tree visits, and the bytes of its distinct tensors.

    A few bytes of a pickle can repeat one list a billion times, or expand an element to a tensor of
    any size. Raises ValueError if the tree contains itself, or is nested more deeply than
    ``most_levels``.
    """
    counts: dict[int, int] = {}
    sizes: dict[int, int] = {}

    def count(part: Any, levels: int) -> int:
        if id(part) in counts:
            return counts[id(part)]
        if not levels:
            msg = f"contains itself, or has more than {most_levels} levels"
            raise ValueError(msg)
        inside: list[Any] = []
        if isinstance(part, torch.Tensor):
            sizes[id(part)] = part.numel() * part.element_size()
        elif isinstance(part, dict):
            inside = [*part, *part.values()]
        elif isinstance(part, list | tuple | set):
            inside = list(part)
        if isinstance(part, torch.Tensor | OrderedDict):
            inside.append(vars(part))
        found = 1 + len(inside)
        if not LEAVES.issuperset(map(type, inside)):
            found += sum(count(each, levels - 1) for each in inside if type(each) not in LEAVES)
        counts[id(part)] = found
        return found

    return count(tree, most_levels), sum(sizes.values())


def with_copies(tree: Any, copies: Mapping[torch.Tensor, torch.Tensor]) -> Any:
    """Return a tree with copies in place of the tensors that have one.

    Dicts, lists, tuples and sets are copied with their types; all else is shared. A tensor in two
    places stays one object. Copies get the kind (parameter or tensor), ``requires_grad`` and
    attributes of the originals. ``copy.deepcopy`` would take six times as long for long lists of
    numbers.
    """
    return _with_copies(tree, dict(copies), set())


def _with_copies(
    tree: Any, copies: dict[torch.Tensor, torch.Tensor], complete: set[torch.Tensor]
) -> Any:
    if isinstance(tree, torch.Tensor):
        if tree in copies and tree not in complete:
            complete.add(tree)
            copies[tree] = copied = _of_same_kind(copies[tree], tree)
            vars(copied).update(_with_copies(vars(tree), copies, complete))
        return copies.get(tree, tree)
    if isinstance(tree, dict):
        # copy.copy() keeps the attributes of subclasses.
        result = copy.copy(tree)
        for key, value in tree.items():
            # Not update(): a Counter would count.
            result[key] = _with_copies(value, copies, complete)
        if fields := getattr(tree, "__dict__", None):
            vars(result).update(_with_copies(fields, copies, complete))
        return result
    if type(tree) in {list, tuple, set, frozenset}:
        return type(tree)(
            value if type(value) in LEAVES else _with_copies(value, copies, complete)
            for value in tree
        )
    return tree


def _of_same_kind(values: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    if isinstance(original, torch.nn.Parameter):
        return torch.nn.Parameter(values, requires_grad=original.requires_grad)
    return values.requires_grad_(original.requires_grad)
