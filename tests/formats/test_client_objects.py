"""Objects of the trainer's state are stored as plain data and come back as they were."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import io
from contextlib import suppress
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_elastic_zero.errors import CheckpointFormatError, SaveError, UnsupportedError
from lightning_elastic_zero.formats.client_state import (
    _BUILD,
    find_unknown,
    load_objects,
    store_objects,
)
from tests.support.bits import bitwise_repr

WHERE = "a.ckpt/checkpoint/client_objects.pt"


class Mine:
    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mine) and self.value == other.value

    def __hash__(self) -> int:
        return 0


def written_and_read(value: object, *, allow_pickle: bool = False) -> object:
    file = io.BytesIO()
    torch.save(store_objects(((("x",), value),)), file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    (((place,), found),) = load_objects(stored, WHERE, allow_pickle=allow_pickle)
    assert place == "x"
    return found


KNOWN = [
    Path("/data"),
    argparse.Namespace(lr=0.1, path=Path("x")),
    collections.Counter("aab"),
    collections.OrderedDict([(Path("b"), 1), ("a", {"c": np.float32(2)})]),
    collections.deque([1, 2], maxlen=2),
    *(collections.defaultdict(list, {"a": [1]}), collections.defaultdict(int, {"a": 1})),
    collections.defaultdict(None, {Path("a"): np.float64(1)}),
    *({(1, 2): {"nested": Path("x")}}, 1 - 2j),
    *(np.float64(0.5), np.int32(7), np.bool_(True), np.datetime64("2026-01-02")),
    *(np.str_("text"), np.str_("")),
    *(np.arange(6, dtype=np.int16).reshape(2, 3), np.arange(6, dtype=">i4")),
    np.asfortranarray(np.ones((2, 3), dtype=np.float32)),
    np.arange(12).reshape(3, 4)[:, ::2],
    *(np.array(["a", "bcd"]), np.array([True, False]), np.array(["2026-01-02"], dtype="M8[D]")),
    *(np.array(3.0), np.zeros((0, 2))),
    *(torch.float16, torch.Size([2]), torch.device("cuda", 1)),
    *(torch.arange(6.0).view(2, 3), torch.ones(2, dtype=torch.bfloat16)),
    torch.nn.Parameter(torch.ones(1)),
    (Path("x"), torch.tensor([float("nan"), -0.0])),
    collections.deque([torch.zeros(1)]),
    collections.defaultdict(list, {"loss": [torch.tensor(0.5)]}),
]


@pytest.mark.parametrize("value", KNOWN, ids=lambda value: f"{value!r:.30}")
def test_known_classes_need_no_permission(value: object) -> None:
    """A value comes back bit for bit, also inside other objects."""
    assert bitwise_repr(written_and_read(value)) == bitwise_repr(value)
    inside = argparse.Namespace(held=[{"k": (value,)}])
    assert bitwise_repr(written_and_read(inside)) == bitwise_repr(inside)


def test_arrays_keep_their_memory_order() -> None:
    one = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    found: Any = written_and_read([one, one])
    assert found[0].flags.fnc
    found[0][:] = 0
    assert np.array_equal(found[1], one)


def a_list_that_contains_itself() -> list[Any]:
    found: list[Any] = [Path("x")]
    found.append(found)
    return found


Pair = collections.namedtuple("Pair", "a b")  # noqa: PYI024 (what users write)

UNKNOWN = [
    (Mine([1, 2]), f"{__name__}.Mine"),
    ([{"k": (1, ("a", "b"), Mine(3))}], f"{__name__}.Mine"),
    (Pair(1, 2), f"{__name__}.Pair"),
    (collections.defaultdict(Mine), f"{__name__}.Mine"),  # type: ignore[arg-type] # never called
    (np.zeros(2, dtype=[("a", "f8")]), "numpy.dtypes.VoidDType"),
    (np.array([1, None], dtype=object), "numpy.dtypes.ObjectDType"),
    (dt.timedelta(seconds=1), "datetime.timedelta"),
    (frozenset({1}), "builtins.frozenset"),
    (PureWindowsPath("c:/d"), "pathlib.PureWindowsPath"),
    (b"", "builtins.bytes"),
    (argparse.ArgumentError(None, "x"), "argparse.ArgumentError"),
    (a_list_that_contains_itself(), r"builtins.list \(contains itself\)"),
]


@pytest.mark.parametrize(("value", "name"), UNKNOWN, ids=lambda value: f"{value!s:.30}")
def test_other_classes_need_permission(value: object, name: str) -> None:
    objects = (((("a"), 0), Path("x")), (("callbacks", "B", "x"), value))
    (found,) = find_unknown(objects).items()
    assert found == ("callbacks.B.x", name.replace("\\", ""))
    stored = store_objects(objects)
    with pytest.raises(
        UnsupportedError, match=rf"state contains a Python object of {name} \(callba"
    ):
        load_objects(stored, WHERE, allow_pickle=False)
    loaded = load_objects(stored, WHERE, allow_pickle=True)
    assert [path for path, _ in loaded] == [("a", 0), ("callbacks", "B", "x")]
    assert repr(loaded[1][1])[:20] == repr(value)[:20]


def test_objects_of_other_classes_stay_shared() -> None:
    one = Mine(1)
    stored = store_objects(((("a",), one), (("b",), [one])))
    (_, first), (_, second) = load_objects(stored, WHERE, allow_pickle=True)
    assert first is second[0]  # type: ignore[index]


def test_an_object_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(SaveError, match=r"deep\.f, a function that cannot be pickled"):
        store_objects(((("deep", "f"), lambda: 0),))


def test_a_missing_class_is_named() -> None:
    stored = store_objects(((("x",), Mine(1)),))
    data = stored["pickle"].numpy().tobytes().replace(b"Mine", b"Gone")
    stored["pickle"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with pytest.raises(CheckpointFormatError, match=r"cannot be built here .*Gone"):
        load_objects(stored, WHERE, allow_pickle=True)


_leaves = st.one_of(
    st.none(),
    st.integers(-2, 1 << 62),
    st.text(max_size=3),
    st.sampled_from(["O", "<f8", "|b1", "|V8", "<U3", "O,f8", "T", "1e99", "list", "dict"]),
    st.binary(max_size=9),
    st.integers(0, 24).map(lambda n: torch.arange(n, dtype=torch.uint8)),
)
_trees = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.tuples(st.sampled_from(sorted(_BUILD)), inner).map(lambda item: {item[0]: item[1]}),
    ),
    max_leaves=12,
)


@given(_trees)
def test_any_plain_data_is_built_or_refused(tree: object) -> None:
    """Every stored tree is built or refused, and an array contains only its own bytes."""
    stored = {"values": [[["x"], tree]]}
    with suppress(CheckpointFormatError):
        ((_, found),) = load_objects(stored, WHERE, allow_pickle=False)
        bitwise_repr(found)
