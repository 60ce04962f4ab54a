from __future__ import annotations

import copy
import enum
import io
import pickle
import re
import threading
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_elastic_zero.core.tensors import numpy_to_python, plain, unplain
from lightning_elastic_zero.core.text import format_tree_path
from lightning_elastic_zero.errors import SaveError, UnsupportedError
from lightning_elastic_zero.formats.client_state import (
    SplitState,
    check_loads_weights_only,
    entry_digests,
    is_plain,
    join_objects,
    pickled,
    split_objects,
)
from lightning_elastic_zero.formats.torch_read import TorchFile
from lightning_elastic_zero.storage.file_read import RangeFile
from tests.support.bits import bitwise_repr
from tests.support.strategies import plain_leaves, trees


def name_of_case(value: object) -> str:
    """Return a test id without memory addresses, so that it is the same in each process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


class Color(str, enum.Enum):
    RED = "red"


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save({"value": value}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["value"]


def digests(state: dict[str, Any]) -> dict[Any, str]:
    return entry_digests(SplitState(state), {})


def file_bytes(value: object) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


def with_field(value: Any, field: object) -> Any:
    value.attached = field
    return value


objects: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [PurePosixPath("/data"), Decimal("1.5"), frozenset({1}), Color.RED, range(3), 2**3000, b""]
    ),
    st.builds(lambda: {Color.RED: 1}),
    st.builds(lambda: (torch.ones(2), Path("x"))),
    st.builds(lambda: deque([torch.zeros(1)], maxlen=2)),
    st.builds(lambda: with_field(OrderedDict(a=1), Path("x"))),
)
"""Values that are not plain data, alone or inside a container."""


class TestSplit:
    @given(trees(plain_leaves | objects))
    def test_split_client_state_joins_to_the_same_value(self, tree: dict[str, Any]) -> None:
        before = bitwise_repr(tree)
        split = split_objects(tree)
        plain = through_a_file(split.plain)
        assert bitwise_repr(plain) == bitwise_repr(split.plain)
        assert bitwise_repr(join_objects(plain, split.objects)) == before
        assert bitwise_repr(tree) == before

    @given(trees(plain_leaves))
    def test_plain_data_is_not_split(self, tree: dict[str, Any]) -> None:
        assert is_plain(tree)
        assert split_objects(tree).objects == ()

    @pytest.mark.parametrize(
        "value",
        [
            *(Color.RED, {Color.RED: 1}, {"a": {Color.RED: 1}}, b"", 2**2040, [-(2**2040)]),
            *(with_field(torch.ones(1), object), with_field(OrderedDict(a=1), Path("x"))),
            *((1, Path("x")), {(1, Path("x")): 1}, {None: Path("x")}, deque(), float, lambda: 0),
            *(torch.eye(2).to_sparse(), torch.tensor([1 + 2j]).conj()),
            *(torch.empty(2, device="meta"), [np.float64(1)]),
            *({torch.ones(1)}, {(1, torch.ones(1)): 1}),
        ],
        ids=name_of_case,
    )
    def test_a_value_that_other_software_could_not_read_is_an_object(self, value: object) -> None:
        """A single enum key in a model file would make the whole checkpoint unreadable."""
        assert not is_plain(value)
        split = split_objects({"a": value, "b": 1})
        assert len(split.objects) == 1
        assert through_a_file(split.plain)["b"] == 1

    def test_objects_have_paths(self) -> None:
        path = Path("x")
        split = split_objects({"a": {"b": [1, path], 7: path}, "c": path})
        assert split.plain == {"a": {"b": [1, None], 7: None}, "c": None}
        assert split.objects == ((("a", "b", 1), path), (("a", 7), path), (("c",), path))
        assert [format_tree_path(place) for place, _ in split.objects] == ["a.b.1", "a.7", "c"]

    def test_a_view_is_saved_with_its_own_bytes_only(self) -> None:
        flat = torch.arange(1_000_000.0)
        state = {
            "alone": flat[3:5],
            "deep": [{"x": flat[::500_000]}],
            "tuple": (flat[1:3].view(1, 2),),
            "odd": {None: flat[2:4]},
            "trained": torch.nn.Parameter(flat[7:9]),
        }
        plain = split_objects(state).plain
        assert bitwise_repr(plain) == bitwise_repr(state)
        assert file_bytes(plain) < 10_000

    def test_a_tensor_that_fills_its_storage_is_not_copied(self) -> None:
        full = torch.ones(3)
        assert split_objects({"a": full}).plain["a"] is full

    def test_a_state_dict_keeps_its_metadata(self) -> None:
        state = torch.nn.BatchNorm1d(2).state_dict()
        back = through_a_file(split_objects({"s": state}).plain)["s"]
        assert back._metadata == state._metadata  # type: ignore[attr-defined]

    @pytest.mark.parametrize("key", [Color.RED, None, 1.5, ("a", 1)])
    def test_entries_need_plain_names(self, key: Any) -> None:
        with pytest.raises(SaveError, match="expected a string"):
            split_objects({key: 1})

    @pytest.mark.parametrize("levels", [180, 200, 400])
    def test_a_value_is_saved_only_as_deep_as_it_can_be_read(
        self, levels: int, tmp_path: Path
    ) -> None:
        value: list[Any] = []
        for _ in range(levels):
            value = [value]
        if levels > 180:
            with pytest.raises(SaveError, match=r"has 'mine', which .* is nested too deep"):
                split_objects({"mine": value})
            return
        torch.save({"in": {"a": {"file": split_objects({"mine": value}).plain}}}, tmp_path / "a.pt")
        file = TorchFile(RangeFile(tmp_path / "a.pt"))
        assert file.load_tree(file.tree)["in"]["a"]["file"]["mine"] == value

    @pytest.mark.parametrize("kind", [dict, list])
    def test_a_value_that_contains_itself_is_refused(self, kind: type) -> None:
        inside: Any = {"inside": None} if kind is dict else [None]
        inside["inside" if kind is dict else 0] = inside
        with pytest.raises(SaveError, match="has 'mine', which contains itself"):
            split_objects({"mine": inside})


class TestWithoutNumpy:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (np.float64(0.1), 0.1),
            (np.float32(0.1), 0.10000000149011612),
            (np.float16(0.1), 0.0999755859375),
            (np.longdouble(0.1), 0.1),
            (np.float64("nan"), float("nan")),
            (np.int8(-3), -3),
            (np.uint64(2**64 - 1), 2**64 - 1),
            (np.bool_(True), True),
            (np.complex64(1j), 1j),
            (np.str_("a"), "a"),
            (np.bytes_(b"a"), b"a"),
            ({np.int64(1): [np.float64(2), (np.int32(3), "x")]}, {1: [2.0, (3, "x")]}),
            (Counter({np.int64(1): 2}), Counter({1: 2})),
            (OrderedDict(a=np.int64(1)), OrderedDict(a=1)),
        ],
        ids=name_of_case,
    )
    def test_numpy_numbers_become_python_numbers(self, value: object, expected: object) -> None:
        assert bitwise_repr(numpy_to_python(value)) == bitwise_repr(expected)

    @pytest.mark.parametrize(
        "value",
        [np.longdouble(1) / 3, np.datetime64("2026-01-02"), np.ones(2), Path("x"), {1: 2}, None],
        ids=name_of_case,
    )
    def test_inexact_and_other_values_are_not_converted(self, value: object) -> None:
        assert numpy_to_python(value) is value

    def test_numpy_hyperparameters_are_converted_and_arrays_refused(self) -> None:
        assert bitwise_repr(plain({"lr": np.float32(0.5)}, "x")) == bitwise_repr({"lr": 0.5})
        with pytest.raises(UnsupportedError, match="x is a ndarray"):
            plain(np.ones(2), "x")

    @pytest.mark.parametrize(
        "value",
        [
            torch.tensor(0.1),
            (torch.tensor(0.9, dtype=torch.float64), 0.999),
            {"a": [torch.tensor(2**62 + 1), True, None, 2**70, 5e-324]},
        ],
        ids=["alone", "in a tuple", "nested"],
    )
    def test_tensors_among_hyperparameters_round_trip(self, value: object) -> None:
        for live in (None, value):
            assert bitwise_repr(unplain(plain(value, "x"), live)) == bitwise_repr(value)


class TestReadable:
    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            ({"a": [1, Fraction(1, 3)]}, r"Unsupported .*fractions\.Fraction"),
            ({"a": {"b": np.float64(1)}}, "numpy"),
            ({"a": torch.eye(2).to_sparse()}, "is not a plain tensor"),
            ({"a": deque([1])}, "deque"),
            ({Color.RED: 1}, "Color"),
            (with_field(OrderedDict(a=1), Fraction(1, 3)), "Fraction"),
            (threading.Lock(), "lock"),
        ],
        ids=name_of_case,
    )
    def test_the_reason_is_in_the_error(self, value: object, reason: str) -> None:
        with pytest.raises(SaveError, match=f"the state: saved state has to be .*{reason}"):
            check_loads_weights_only({"fine": 1, "the state": value})

    @pytest.mark.parametrize("value", [Color.RED, {Color.RED: 1}, bytearray(b"a"), torch.strided])
    def test_what_torch_reads_is_not_refused(self, value: object) -> None:
        with torch.serialization.safe_globals([Color]):
            assert through_a_file(value) == value
            check_loads_weights_only({"state": [value]})

    @given(trees(plain_leaves))
    def test_plain_data_is_readable(self, tree: dict[str, Any]) -> None:
        check_loads_weights_only({"state": tree})

    def test_torchs_schedulers_are_readable(self) -> None:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
        schedulers = [
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]),
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
        ]
        check_loads_weights_only({"schedulers": [one.state_dict() for one in schedulers]})


class TestFingerprints:
    @given(trees(plain_leaves), trees(plain_leaves))
    def test_fingerprints_are_equal_if_and_only_if_trees_are(
        self, one: dict[str, Any], other: dict[str, Any]
    ) -> None:
        assert (digests(one) == digests(other)) == (bitwise_repr(one) == bitwise_repr(other))
        assert digests(one) == digests(copy.deepcopy(one))

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ({"a": {"b": 1}}, {"a.b": 1}),
            ({"a.b": 1, "a": {"b": 2}}, {"a.b": 3, "a": {"b": 2}}),
            ({"a": {"1": 1}}, {"a": {1: 1}}),
            ({"a": [{}]}, {"a": {0: {}}}),
            ({"a": {"b": {}}}, {"a": {"b": []}}),
            ({"a": {"b": 1}}, {"a": OrderedDict(b=1)}),
            ({'["a", "b"]': 1}, {"a": {"b": 1}}),
            ({"a": 1}, {"a": True}),
            ({"a": 0.0}, {"a": -0.0}),
            ({"a": (1, 2)}, {"a": [1, 2]}),
            ({"a": ("ab", "c")}, {"a": ("a", "bc")}),
            ({"a": "1"}, {"a": b"1"}),
            ({"a": torch.zeros(2)}, {"a": -torch.zeros(2)}),
            ({"a": torch.zeros(2)}, {"a": torch.zeros(2, 1)}),
            ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.int32)}),
            ({"a": torch.zeros(0)}, {"a": torch.zeros(0, 1)}),
            ({"a": torch.zeros(2)}, {"a": torch.nn.Parameter(torch.zeros(2))}),
            ({"a": {(1, 2): 0}}, {"a": {(1, 3): 0}}),
            ({"a": 1}, {"a": 1, "b": 2}),
        ],
        ids=name_of_case,
    )
    def test_similar_values_have_different_digests(
        self, one: dict[str, Any], other: dict[str, Any]
    ) -> None:
        assert digests(one) != digests(other)

    def test_nans_are_compared_by_their_bits(self) -> None:
        bits = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32)
        one, other = bits.view(torch.float32)
        assert digests({"a": one}) == digests({"a": one.clone()})
        assert digests({"a": one}) != digests({"a": other})

    def test_sharing_order_and_strides_do_not_change_digests(self) -> None:
        shared = "some text"
        apart = shared.encode().decode()
        assert apart is not shared
        assert digests({"a": (shared, shared)}) == digests({"a": (shared, apart)})
        # Set members with colliding hashes keep their insertion order.
        one, other = {0, 8}, {8}
        other.add(0)
        assert list(one) != list(other)
        assert digests({"a": one}) == digests({"a": other})
        assert digests({"a": {"b": 1, "c": 2}}) == digests({"a": {"c": 2, "b": 1}})
        base = torch.arange(6.0).view(2, 3)
        assert digests({"a": base.t()}) == digests({"a": base.t().contiguous()})
        # torch treats a single element as contiguous, whatever its strides.
        for view in (base[1:2, 1], torch.ones(()).expand(1)):
            same = torch.tensor(view.tolist())
            assert digests({"a": view}) == digests({"a": same})
            assert digests({"a": view}) != digests({"a": same + 1})

    def test_every_kind_of_tensor_has_a_digest(self) -> None:
        numbers = torch.tensor([1 + 2j, 3 - 4j])
        dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
        for one, other in [(numbers, numbers.conj()), (numbers.conj().imag, numbers.imag)]:
            assert digests({"a": one}) == digests({"a": one.clone()})
            assert digests({"a": one}) != digests({"a": other})
        twice = (dense * 2).to_sparse()
        assert digests({"a": dense.to_sparse()}) != digests({"a": twice})

    def test_a_flat_mapping_keeps_its_names(self) -> None:
        assert digests({"bn.mean": torch.zeros(1)}).keys() == {("bn.mean",)}


class TestEntryDigests:
    @given(trees(plain_leaves | objects))
    def test_equal_states_have_equal_digests(self, tree: dict[str, Any]) -> None:
        one, other = split_objects(tree), split_objects(copy.deepcopy(tree))
        assert entry_digests(one, {}) == entry_digests(other, {})

    @pytest.mark.parametrize(
        ("first", "mine", "expected"),
        [
            ({"a": {"b": 1, "c": 2}, "d": 2}, {"a": {"b": 3, "c": 2}, "d": 2}, {("a", "b")}),
            ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}, {("a", "c")}),
            ({"a": {"b": {"c": 1, "e": 2}}}, {"a": {"b": {"c": 1}}}, {("a", "b")}),
            ({"a": 1, "b": {"c": 2}}, {"a": 1}, {("b", "c")}),
            ({0: 1, "a": 2}, {"a": 2}, {(0,)}),
            ({"a": [1, 2]}, {"a": [1]}, {("a",)}),
            ({"a.b": 1, "a": {"b": 2}}, {"a.b": 3, "a": {"b": 2}}, {("a.b",)}),
            ({"a": {i: i for i in range(99)}}, {"a": {0: 0}}, {("a",), ("a", 0)}),
            ({"a": {"b": Path("x")}}, {"a": {"b": Path("y")}}, {("a", "b")}),
        ],
    )
    def test_entries_that_differ_have_other_digests(
        self, first: dict[str, Any], mine: dict[str, Any], expected: set[Any]
    ) -> None:
        one, other = (entry_digests(split_objects(each), {}) for each in (first, mine))
        differing = {p for p in one.keys() | other.keys() if one.get(p) != other.get(p)}
        assert differing == expected

    def test_declared_entries_have_none(self) -> None:
        state = split_objects({"a": {"b": 1, "c": 2}, "d": Path("x"), "e": 3})
        assert entry_digests(state, {"a": {"b": 5}, "d": None}).keys() == {("a", "c"), ("e",)}


class TestPickled:
    def test_an_unpicklable_value_is_named_with_place_and_remedy(self) -> None:
        with pytest.raises(SaveError) as caught:
            pickled(threading.Lock(), ("callbacks", "Timer", 0))
        assert str(caught.value).startswith(
            "the trainer's state has callbacks.Timer.0, a lock that cannot be pickled ("
        )
        assert "save_hyperparameters(ignore=[...])" in str(caught.value)

    def test_a_picklable_value_round_trips(self) -> None:
        assert pickle.loads(pickled(Path("x"), ())) == Path("x")  # noqa: S301
