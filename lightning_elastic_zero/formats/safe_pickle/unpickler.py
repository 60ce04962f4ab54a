"""The unpickler of what is not plain data, and the objects of the trainer's state that it reads.

What it builds is a closed list of names, and of what each is called with (``policy``). It is not
enough to look at what a pickle asks for by name: one can also change a class that everybody uses,
set an array's state a second time while somebody uses the first, or have a few bytes copied a
million times. So each step of the unpickler that builds or changes something is checked.
"""

from __future__ import annotations

import collections
import io
import itertools
import pickle
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

from lightning_elastic_zero.errors import (
    CheckpointFormatError,
    ElasticZeroError,
)
from lightning_elastic_zero.formats.elastic.client_state import host_pickle
from lightning_elastic_zero.formats.safe_pickle.allowed_calls import (
    CLIENT_OBJECTS_POLICY,
    INTERNED_CLASSES,
    is_key,
    size_of,
)
from lightning_elastic_zero.formats.safe_pickle.any_class import AnyClassUnpickler
from lightning_elastic_zero.formats.safe_pickle.array_builders import (
    array_state,
    empty_array,
    is_own_state,
    require,
)
from lightning_elastic_zero.formats.safe_pickle.policy import PLAIN_DATA, PicklePolicy
from lightning_elastic_zero.formats.tree_path import TreePath, format_tree_path

_MOVED = {"pathlib._local": "pathlib"}
"""Where Python 3.13 says that its paths are, which no other version does."""

_DICTS = (dict, collections.Counter, collections.OrderedDict, collections.defaultdict)

_BASE: dict[int, Callable[[Any], None]] = pickle._Unpickler.dispatch  # noqa: SLF001

_OLDER = (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4)
"""Ways to call that pickles of these values do not use."""

_SPARE = 1024
"""What a pickle may copy beyond its own size, in bytes."""


def load_objects(data: bytes, where: str, *, allow_pickle: bool) -> object:
    """Unpickle the objects of a client state.

    Args:
        data: the pickle.
        where: the file and the places in the client state, for messages.
        allow_pickle: build whatever class it holds; that can run code from the checkpoint.

    Raises:
        UnsupportedError: it needs a class that is not known to be harmless and was not allowed.
        CheckpointFormatError: an object cannot be built here: its class cannot be imported, or
            does not take what was saved.
    """
    try:
        if allow_pickle:
            return AnyClassUnpickler(data, PLAIN_DATA).load()
        return SafeUnpickler(data, CLIENT_OBJECTS_POLICY, where).load()
    except ElasticZeroError:
        raise
    except Exception as error:
        msg = (
            f"{where}: an object cannot be built here ({error!r}): make its class importable, in "
            "the version that was saved"
        )
        raise CheckpointFormatError(msg) from error


def find_refused(objects: Iterable[tuple[TreePath, object]]) -> dict[str, str]:
    """Return what of a client state's objects a load refuses unless it is allowed, by its place.

    What cannot be pickled at all is not told: no save of it comes about.
    """
    found = {}
    for path, value in objects:
        try:
            unpickler = SafeUnpickler(host_pickle(value), CLIENT_OBJECTS_POLICY, "")
        except Exception:  # noqa: BLE001, S112 - whatever a user's class raises, the save names
            continue
        try:
            unpickler.load()
        except Exception:  # noqa: BLE001 - and whatever stands in the way of a load is an answer
            found[format_tree_path(path)] = unpickler.refused or f"a {type(value).__name__}"
    return found


class SafeUnpickler(pickle._Unpickler):  # noqa: SLF001 (the C one's steps cannot be checked)
    """Builds what a policy lists, as its own pickles do, and changes no class."""

    stack: list[Any]
    """What was read since the last mark."""
    metastack: list[list[Any]]
    """What was read before each mark."""

    def __init__(self, data: bytes, policy: PicklePolicy, where: str) -> None:
        """Prepare reading a pickle; ``where`` is for messages."""
        super().__init__(io.BytesIO(data))
        self._policy = policy
        self._where = where
        self.refused = ""
        """What was refused."""
        self._left = len(data) + _SPARE
        self._rules: dict[int, tuple[object, Callable[..., bool]]] = {}
        self._shared: dict[object, object] = {}
        self._begun: dict[int, object] = {}
        self._depths: dict[int, tuple[object, int]] = {}

    def find_class(self, module: str, name: str) -> object:
        """Return a global that the pickle asks for.

        Raises:
            UnsupportedError: it is not listed.
        """
        wanted = f"{_MOVED.get(module, module)}.{name}"
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if wanted not in self._policy.names:
            self._refuse(f"a Python object of {module}.{name}")
        found, rule = self._policy.names[wanted]
        self._rules[id(found)] = (found, rule)
        return found

    # -- what is called ------------------------------------------------------------------------

    def load_reduce(self) -> None:
        """Call what is listed."""
        args = self.stack.pop()
        self.stack[-1] = self._called(self.stack[-1], args, lambda found: found(*args))

    def load_newobj(self) -> None:
        """Make an instance of what is listed."""
        args = self.stack.pop()
        self.stack[-1] = self._called(self.stack[-1], args, lambda cls: cls.__new__(cls, *args))

    def _called(self, found: object, args: object, call: Callable[[Any], object]) -> object:
        """Call what is listed, with what its own pickles call it with.

        Raises:
            UnsupportedError: it is not listed.
        """
        _, rule = self._rules.get(id(found), (None, None))
        if rule is None:
            self._refuse(f"a pickle that calls {found!r}")
        require(type(args) is tuple and rule(args), f"a call of {found!r} that it does not take")
        if found in INTERNED_CLASSES:
            return self._once((found, args), call)
        self._spend(size_of(args))  # type: ignore[arg-type]
        made = call(found)
        if found is empty_array or isinstance(made, (np.dtype, *self._policy.hashed)):
            self._begun[id(made)] = made
        return made

    def _once(self, what: tuple[object, object], call: Callable[[Any], object]) -> object:
        """Make equal immutable values once: each copies what it is made of."""
        if what not in self._shared:
            self._shared[what] = call(what[0])
        return self._shared[what]

    def _spend(self, count: int) -> None:
        """Count what is copied: each byte of a pickle is used once, but for a few."""
        self._left -= count
        require(self._left >= 0, "more copies than it has bytes")

    def load_call(self) -> None:
        """Refuse the ways to call that pickles of values do not use."""
        require(holds=False, what="a call of an older protocol")

    # -- what is changed -----------------------------------------------------------------------

    def load_build(self) -> None:
        """Set an object's state: an instance's, once if it is of NumPy or a key; never a class's.

        Raises:
            UnsupportedError: it is another object's.
        """
        state, instance = self.stack.pop(), self.stack[-1]
        if isinstance(instance, (np.dtype, np.ndarray, *self._policy.hashed)):
            require(self._begun.pop(id(instance), None) is instance, "a second state of one object")
        if isinstance(instance, (np.dtype, np.ndarray)):
            self._build_array(instance, state)
        elif set_state := self._policy.states.get(type(instance)):
            set_state(instance, state)
        else:
            self._refuse(f"a pickle that changes {instance!r}")

    def _build_array(self, instance: Any, state: object) -> None:  # noqa: ANN401 (of NumPy)
        if isinstance(instance, np.dtype):
            if not is_own_state(instance, state):
                self._refuse(f"a NumPy array of {instance} with a layout of its own")
        else:
            state = array_state(state, self._depth_of)
            values = state[4]
            self._spend(len(values))
            depths = [self._depth_of(value) for value in values] if type(values) is list else [0]
            self._depths[id(instance)] = instance, 1 + max(depths, default=0)
        instance.__setstate__(state)

    def _depth_of(self, value: object) -> int:
        """Return how deep an array is nested; 0 for anything else."""
        known, depth = self._depths.get(id(value), (None, 0))
        return depth if known is value else 0

    def load_append(self) -> None:
        """Append to a list."""
        _check_target(self.stack[-2], collections.deque, list)
        _BASE[pickle.APPEND[0]](self)

    def load_appends(self) -> None:
        """Append to a list."""
        _check_target(self.metastack[-1][-1], collections.deque, list)
        _BASE[pickle.APPENDS[0]](self)

    def load_setitem(self) -> None:
        """Set an item of a dict."""
        _check_target(self.stack[-3], *_DICTS)
        self._check_keys(self.stack[-2:-1])
        _BASE[pickle.SETITEM[0]](self)

    def load_setitems(self) -> None:
        """Set items of a dict."""
        _check_target(self.metastack[-1][-1], *_DICTS)
        self._check_keys(self.stack[::2])
        _BASE[pickle.SETITEMS[0]](self)

    def load_additems(self) -> None:
        """Add to a set."""
        _check_target(self.metastack[-1][-1], set)
        self._check_keys(self.stack)
        _BASE[pickle.ADDITEMS[0]](self)

    def load_dict(self) -> None:
        """Make a dict of what is on the stack."""
        self._check_keys(self.stack[::2])
        _BASE[pickle.DICT[0]](self)

    def load_frozenset(self) -> None:
        """Make a frozenset of what is on the stack."""
        self._check_keys(self.stack)
        _BASE[pickle.FROZENSET[0]](self)

    def load_bytearray8(self) -> None:
        """Make a bytearray of what is there, not of what is said to be there."""
        size_bytes = int.from_bytes(self.read(8), "little")  # type: ignore[attr-defined]
        require(size_bytes <= self._left, "fewer bytes than it says")
        data = bytearray(self.read(size_bytes))  # type: ignore[attr-defined]
        require(len(data) == size_bytes, "fewer bytes than it says")
        self.append(data)  # type: ignore[attr-defined]

    def _refuse(self, what: str) -> NoReturn:
        self.refused = what
        at = _place(itertools.chain(*self.metastack, self.stack))
        raise self._policy.refuse(self._where, what, at)

    def _check_keys(self, keys: Iterable[object]) -> None:
        """Refuse keys that cannot be hashed in bounded time."""
        hashed = self._policy.hashed
        require(all(is_key(key, hashed) for key in keys), "a key nested too deep")

    _checked: ClassVar[dict[int, Callable[[Any], None]]] = {
        **_BASE,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        **dict.fromkeys((opcode[0] for opcode in _OLDER), load_call),
        pickle.BUILD[0]: load_build,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.ADDITEMS[0]: load_additems,
        pickle.DICT[0]: load_dict,
        pickle.FROZENSET[0]: load_frozenset,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }
    dispatch = _checked


def _place(begun: Iterable[object]) -> str:
    """Return where in the client state the object sits that is being built.

    Args:
        begun: what an unpickler has on its stacks, the outermost first: pairs of a place and an
            object, which are complete, and then the place of this one.
    """
    for value in begun:
        if type(value) is tuple and value and all(type(key) in (str, int) for key in value):
            return format_tree_path(value)
    return ""


def _check_target(target: object, *kinds: type) -> None:
    """Refuse to fill what is no container: arrays and tensors take items too."""
    require(type(target) in kinds, f"a {type(target).__name__} that is filled")
