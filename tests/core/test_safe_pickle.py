from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import io
import pickle
import types
import uuid
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch

from lightning_elastic_zero.errors import CheckpointFormatError, UnsupportedError
from lightning_elastic_zero.formats.client_state import host_pickle
from lightning_elastic_zero.formats.pickles import find_refused, load_objects
from tests.support.bits import bitwise_repr

WHERE = "a.ckpt/checkpoint/client_objects.pt (hyper_parameters.x)"


class Mine:
    """A class of a user's."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mine) and self.value == other.value

    def __hash__(self) -> int:
        return 0


def load(data: bytes, *, allow_pickle: bool = False) -> object:
    """Load a pickle as a checkpoint's reader does."""
    return load_objects(data, WHERE, allow_pickle=allow_pickle)


def pushed(value: object) -> bytes:
    """Return the opcodes that put a value on a pickle's stack."""
    return pickle.dumps(value, protocol=3)[2:-1]


def named(module: str, name: str) -> bytes:
    """Return the opcodes that put a global on the stack, under a name that may hold dots."""
    return pushed(module) + pushed(name) + pickle.STACK_GLOBAL


def forged(*opcodes: bytes) -> bytes:
    """Make a pickle that no class would make."""
    return b"\x80\x04" + b"".join(opcodes) + b"."


def calling(module: str, name: str, *arguments: object) -> bytes:
    """Make a pickle that calls a global."""
    return forged(named(module, name), pushed(arguments), pickle.REDUCE)


SAFE_VALUES = [
    Path("/data"),
    PurePosixPath("a/b"),
    PureWindowsPath("c:/d"),
    dt.datetime(2026, 1, 2, 3, tzinfo=dt.timezone.utc),
    dt.date(2026, 1, 2),
    dt.timedelta(seconds=3),
    decimal.Decimal("1.50"),
    fractions.Fraction(1, 3),
    uuid.UUID(int=7),
    argparse.Namespace(lr=0.1, path=Path("x")),
    types.SimpleNamespace(a=[1, (2, {3})]),
    collections.Counter("aab"),
    collections.deque([1, 2], maxlen=2),
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(int, {"a": 1}),
    frozenset({1, 2}),
    range(1, 9, 2),
    slice(1, None),
    bytearray(b"ab"),
    2**3000,
    b"",
    1 - 2j,
    np.float64(0.5),
    np.int32(7),
    np.bool_(True),
    np.datetime64("2026-01-02"),
    np.str_("text"),
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.asfortranarray(np.ones((2, 3), dtype=np.float32)),
    np.array(["a", "bcd"]),
    np.array([1, None, "x"], dtype=object),
    np.zeros((0, 2)),
    np.dtype("float32"),
    torch.float16,
    torch.Size([2]),
    torch.device("cuda", 1),
    torch.arange(6.0).view(2, 3),
    torch.ones(2, dtype=torch.bfloat16),
    torch.nn.Parameter(torch.ones(1)),
    (Path("x"), torch.tensor([float("nan"), -0.0])),
    collections.deque([torch.zeros(1)]),
    collections.defaultdict(list, {"loss": [torch.tensor(0.5)]}),
]


class TestHarmless:
    @pytest.mark.parametrize("protocol", [4, 5])
    @pytest.mark.parametrize("value", SAFE_VALUES, ids=lambda value: f"{value!r:.30}")
    def test_values_are_read_without_permission(self, value: object, protocol: int) -> None:
        """What is only a value comes back as it was, tensors inside of objects too."""
        read = load(pickle.dumps([((), value)], protocol))
        assert bitwise_repr(read) == bitwise_repr([((), value)])

    def test_shared_values_stay_shared(self) -> None:
        """An object that stands in two places is one object afterwards."""
        one = types.SimpleNamespace(array=np.ones(2))
        read = load(pickle.dumps([one, one]))
        assert isinstance(read, list)
        assert read[0] is read[1]

    def test_paths_of_python_3_13(self) -> None:
        """Python 3.13 pickles paths under a name that no other version has."""
        assert load(calling("pathlib._local", "PosixPath", "/a", "b")) == Path("/a/b")
        assert load(calling("pathlib", "PosixPath", "/a", "b")) == Path("/a/b")


class TestRefused:
    @pytest.mark.parametrize(
        ("module", "name"),
        [
            ("os", "system"),
            ("posix", "system"),
            ("subprocess", "Popen"),
            ("builtins", "eval"),
            ("builtins", "exec"),
            ("builtins", "getattr"),
            ("builtins", "__import__"),
            ("builtins", "open"),
            ("pathlib", "Path"),
            ("pathlib", "Path.unlink"),
            ("pathlib", "PosixPath.unlink"),
            ("pathlib", "PosixPath.write_text"),
            ("pathlib.PosixPath", "unlink"),
            ("pathlib", "os.system"),
            ("pathlib._local", "os.system"),
            ("collections", "_sys.modules"),
            ("collections", "Counter.__init__.__globals__"),
            ("uuid", "os.system"),
            ("argparse", "_os.system"),
            ("argparse", "FileType"),
            ("types", "FunctionType"),
            ("types", "CodeType"),
            ("functools", "partial"),
            ("operator", "attrgetter"),
            ("importlib", "import_module"),
            ("numpy.testing._private.utils", "runstring"),
            ("numpy.testing", "runstring"),
            ("numpy", "load"),
            ("numpy", "fromfile"),
            ("numpy", "memmap"),
            ("torch", "load"),
            ("torch.hub", "load"),
            ("torch", "float32.__class__"),
            ("torch.storage", "TypedStorage"),
            ("lightning_elastic_zero.formats.pickles", "load_objects"),
            ("", "os.system"),
            ("os.", "system"),
        ],
    )
    def test_what_can_run_code_is_not_even_imported(self, module: str, name: str) -> None:
        """A global that is not on the list is refused by its name, however it is spelled."""
        with pytest.raises(UnsupportedError) as caught:
            load(calling(module, name, "touch ran"))
        assert str(caught.value) == (
            f"{WHERE}: the trainer's state holds a Python object of {module}.{name}. "
            "Building it can run code. If you trust this checkpoint, pass allow_pickle=True (to "
            "ElasticDeepSpeedStrategy, or to load_checkpoint)"
        )

    def test_a_users_class_needs_permission(self) -> None:
        """An object of one's own is refused, and with permission comes back."""
        data = pickle.dumps(Mine([1, 2]))
        with pytest.raises(UnsupportedError, match=r"test_safe_pickle\.Mine"):
            load(data)
        assert load(data, allow_pickle=True) == Mine([1, 2])

    @pytest.mark.parametrize(
        "target",
        [
            named("pathlib", "PosixPath"),
            named("collections", "Counter"),
            named("argparse", "Namespace"),
            named("numpy", "ndarray"),
            named("numpy", "dtype"),
            named("numpy._core.multiarray", "_reconstruct"),
            named("torch._utils", "_rebuild_tensor_v2"),
        ],
    )
    def test_no_class_is_changed(self, target: bytes) -> None:
        """A pickle cannot set attributes of what everybody uses: ``Path.exists`` could be one."""
        state = pickle.MARK + pickle.NONE + pushed({"changed": 1}) + pickle.TUPLE
        with pytest.raises(UnsupportedError, match="a pickle that changes"):
            load(forged(target, state, pickle.BUILD))
        assert not hasattr(PosixPath, "changed")

    def test_bytes_are_not_taken_for_pointers_by_a_forged_dtype(self) -> None:
        """A dtype that hides that it holds objects would let NumPy follow any address."""
        fields = pickle.MARK + pushed(3) + pushed("|") + pickle.NONE + pushed(("a",))
        fields += pushed({"a": 0}) + pushed(8) + pushed(1) + pushed(0) + pickle.TUPLE
        dtype = named("numpy", "dtype") + pushed(("V8", False, True)) + pickle.REDUCE
        with pytest.raises(UnsupportedError, match="with a layout of its own"):
            load(forged(dtype, fields, pickle.BUILD))

    def test_bytes_are_not_taken_for_pointers_by_ndarray_itself(self) -> None:
        """``numpy.ndarray`` cannot be called with a buffer and the dtype of objects."""
        dtype = named("numpy", "dtype") + pushed(("O8", False, True)) + pickle.REDUCE
        arguments = pickle.MARK + pushed((1,)) + dtype + pushed(b"A" * 8) + pickle.TUPLE
        with pytest.raises(CheckpointFormatError):
            load(forged(named("numpy", "ndarray"), arguments, pickle.REDUCE))

    def test_the_dtypes_of_others_do_not_change(self) -> None:
        """A dtype's state is set on a dtype of its own, never on NumPy's one float64."""
        dtype = named("numpy", "dtype") + pushed(("f8", False, False)) + pickle.REDUCE
        state = pushed((3, ">", None, None, None, -1, -1, 0))
        assert load(forged(dtype, state, pickle.BUILD)) == np.dtype(">f8")
        assert np.dtype("f8").isnative

    @pytest.mark.parametrize("text", [1, ["f8"], [("a", "O")], None])
    def test_a_dtype_is_made_of_its_name_only(self, text: object) -> None:
        """Nothing but the name of a dtype makes one."""
        with pytest.raises(CheckpointFormatError, match="a pickle with a dtype named"):
            load(calling("numpy", "dtype", text))

    def test_the_storage_of_a_tensor_is_no_back_door(self, tmp_path: Path) -> None:
        """Torch unpickles a tensor's storage without a guard; here it is guarded too."""

        class Attack:
            def __reduce__(self) -> tuple[Any, ...]:
                return Path.touch, (tmp_path / "ran",)

        file = io.BytesIO()
        torch.save(Attack(), file, _use_new_zipfile_serialization=False)
        with pytest.raises(CheckpointFormatError):
            load(calling("torch.storage", "_load_from_bytes", file.getvalue()))
        assert list(tmp_path.iterdir()) == []


KEPT, FIRST = pickle.BINPUT + b"\xc8", pickle.BINGET + b"\xc8"
"""Keeps what is on the stack, and puts it there again."""


def an_array(*, kept: bool = True) -> bytes:
    """Return the opcodes of an empty array before its state is set, and keep it."""
    begin = named("numpy._core.multiarray", "_reconstruct")
    arguments = pickle.MARK + named("numpy", "ndarray") + pushed((0,)) + pushed(b"b") + pickle.TUPLE
    return begin + arguments + pickle.REDUCE + (KEPT if kept else b"")


def a_dtype(text: str) -> bytes:
    """Return the opcodes of a dtype."""
    return named("numpy", "dtype") + pushed((text, False, True)) + pickle.REDUCE


def array_state(shape: tuple[int, ...], dtype: str, data: bytes) -> bytes:
    """Return the opcodes that set an array's state; the data are opcodes too."""
    fields = pushed(1) + pushed(shape) + a_dtype(dtype) + pickle.NEWFALSE + data
    return pickle.MARK + fields + pickle.TUPLE + pickle.BUILD


def array_over(data: bytes, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the opcodes of an array over bytes; the data are opcodes."""
    over = named("numpy._core.numeric", "_frombuffer")
    fields = data + a_dtype(dtype) + pushed(shape) + pushed("C")
    return over + pickle.MARK + fields + pickle.TUPLE + pickle.REDUCE


class TestMemory:
    """A pickle cannot reach memory that is not its own, nor ask for more than it holds."""

    @pytest.mark.parametrize(
        "opcodes",
        [
            an_array() + array_state((2000,), "u1", pushed(b"a" * 2000)),
            array_over(pushed(b"a" * 2000), "u1", (2000,)) + KEPT,
        ],
        ids=["built", "over bytes"],
    )
    def test_an_array_has_one_state(self, opcodes: bytes) -> None:
        """What was made of an array keeps its memory: nothing gives it other memory afterwards."""
        again = array_state((1,), "u1", pushed(b"b"))
        with pytest.raises(CheckpointFormatError, match="a second state of one object"):
            load(forged(opcodes + again))

    def test_an_array_is_not_made_over_an_array(self) -> None:
        """Memory belongs to one array; that of another one, of a list or of a text does not do."""
        array = an_array() + array_state((2000,), "u1", pushed(b"a" * 2000))
        for other in (array, pushed("a" * 2000), named("numpy", "ndarray")):
            with pytest.raises(CheckpointFormatError, match="an array of no bytes"):
                load(forged(array_over(other, "u1", (2000,))))

    @pytest.mark.parametrize(
        "second",
        [
            array_over(FIRST, "u1", (2000,)),
            an_array(kept=False) + array_state((2000,), "u1", FIRST),
        ],
        ids=["over bytes", "built"],
    )
    def test_arrays_do_not_share_memory(self, second: bytes) -> None:
        """Two arrays of the same bytes, and the bytes themselves, do not see one another."""
        data = pushed(b"a" * 2000) + KEPT
        # A pickle may copy as much as it holds: this one is long enough for two copies.
        one = forged(pickle.MARK + data + second + second + pushed(b"b" * 4000) + pickle.TUPLE)
        found = load(one)
        assert isinstance(found, tuple)
        for array in found[1:3]:
            if array.flags.writeable:
                array[:] = 0
        assert found[0] == b"a" * 2000
        assert not np.shares_memory(found[1], found[2])

    @pytest.mark.parametrize(
        "dtype", ["O,f8", "(2,2)O", "f8,f8", "T", "O", "i8,", "f8 ", "<f8", "U" * 3, "S3,S3"]
    )
    def test_dtypes_are_plain(self, dtype: str) -> None:
        """A dtype is one number, text, time or object: no structure, no text of NumPy's own."""
        with pytest.raises(CheckpointFormatError, match="a pickle with a dtype named"):
            load(forged(a_dtype(dtype)))

    @pytest.mark.parametrize(
        "opcodes",
        [
            an_array() + array_state((3,), "O8", pushed([1])),
            an_array() + array_state((1 << 40,), "O8", pushed([])),
            an_array() + array_state((1,), "O8", pushed(b"a" * 8)),
            an_array() + array_state((1 << 40,), "u1", pushed(b"a")),
            an_array() + array_state((-1,), "u1", pushed(b"a")),
            an_array() + array_state((0, 1 << 62, 8), "u1", pushed(b"")),
            an_array() + array_state((2,), "b1", pushed(b"\x00\x02")),
            array_over(pushed(b"a" * 8), "O8", (1,)),
            array_over(pushed(b"a" * 8), "f8", (2,)),
            array_over(pushed(b"a" * 8), "f8", (1 << 60,)),
        ],
    )
    def test_arrays_have_the_bytes_of_their_shape(self, opcodes: bytes) -> None:
        """An array of other bytes, or of other objects, than its shape says is refused."""
        with pytest.raises(CheckpointFormatError, match=r"a pickle with (an array|objects|truth)"):
            load(forged(opcodes))

    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            ("builtins.bytearray", (1 << 33,)),
            ("builtins.list", (range(1 << 33),)),
            ("builtins.set", (range(1 << 33),)),
            ("builtins.int", (decimal.Decimal("1e99999999"),)),
            ("fractions.Fraction", ("1e99999999",)),
            ("collections.deque", (range(1 << 33),)),
            ("collections.Counter", (range(1 << 33),)),
            ("datetime.date", (b"\x07\xe8\x02\xff",)),
        ],
    )
    def test_classes_are_called_as_their_own_pickles_call_them(
        self, name: str, arguments: tuple[object, ...]
    ) -> None:
        """A few bytes do not become gigabytes, nor a date that there is not."""
        module, _, attribute = name.rpartition(".")
        with pytest.raises(CheckpointFormatError, match=r"that it does not take|is out of range"):
            load(calling(module, attribute, *arguments))

    def test_what_is_copied_is_not_more_than_what_is_there(self) -> None:
        """Bytes that are kept once cannot be copied a thousand times."""
        data = pushed(b"a" * 100_000) + KEPT
        copies = array_over(FIRST, "u1", (100_000,)) * 1000
        with pytest.raises(CheckpointFormatError, match="more copies than it has bytes"):
            load(forged(data + copies))
        claimed = pickle.BYTEARRAY8 + (1 << 33).to_bytes(8, "little") + b"a"
        with pytest.raises(CheckpointFormatError, match="fewer bytes than it says"):
            load(forged(claimed))

    def test_values_that_are_alike_are_no_copies(self) -> None:
        """Many paths of the same long part, as any pickle has them, are read."""
        many = [Path("/a-folder-with-a-long-name" * 20, "b") for _ in range(2000)]
        assert load(pickle.dumps(many)) == many

    @pytest.mark.parametrize(
        "opcodes",
        [
            pickle.EMPTY_DICT + pushed(()) + pickle.TUPLE1 * 200_000 + pickle.NONE + pickle.SETITEM,
            pickle.EMPTY_DICT
            + pickle.EMPTY_TUPLE
            + (pickle.DUP + pickle.TUPLE2) * 60
            + pickle.NONE
            + pickle.SETITEM,
        ],
        ids=["deep", "wide"],
    )
    def test_keys_can_be_hashed(self, opcodes: bytes) -> None:
        """A key that would take all the stack, or a thousand years, is refused."""
        with pytest.raises(CheckpointFormatError, match="a key nested too deep"):
            load(forged(opcodes))

    def test_arrays_in_arrays_end(self) -> None:
        """A chain of arrays is cut off before its end takes all the stack."""
        chain = pushed(1)
        for _ in range(200):
            inner = pickle.EMPTY_LIST + chain + pickle.APPEND
            chain = an_array(kept=False) + array_state((1,), "O8", inner)
        with pytest.raises(CheckpointFormatError, match="arrays nested too deep"):
            load(forged(chain))

    @pytest.mark.parametrize(
        ("offset", "size", "stride"),
        [
            (0, (7,), (1,)),
            (1, (6,), (1,)),
            (-1, (1,), (1,)),
            (0, (2, 3), (3, 2)),
            (0, (1 << 40,), (1,)),
            (0, (1 << 32, 1 << 32), (0, 0)),
            (0, (2,), (-1,)),
            (6, (1,), (1,)),
            (0, (2,), (1, 1)),
        ],
    )
    def test_tensors_stay_within_their_storage(
        self, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
    ) -> None:
        """A tensor that reaches beyond its storage is refused: torch would enlarge it."""
        held = torch.arange(6.0)._typed_storage().__reduce__()[1][0]  # type: ignore[no-untyped-call]
        storage = named("torch.storage", "_load_from_bytes") + pushed((held,)) + pickle.REDUCE
        hooks = named("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
        where = pushed(offset) + pushed(size) + pushed(stride) + pickle.NEWFALSE + hooks
        rebuild = named("torch._utils", "_rebuild_tensor_v2")
        with pytest.raises(CheckpointFormatError, match=r"a tensor (beyond its|of no) "):
            load(forged(rebuild + pickle.MARK + storage + where + pickle.TUPLE + pickle.REDUCE))


class TestDamaged:
    @pytest.mark.parametrize("allow_pickle", [True, False])
    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"no pickle",
            pickle.dumps({"a": Path("x")})[:-5],
            calling("collections", "Counter", 1, 2),
            calling("decimal", "Decimal", "no number"),
            forged(pushed("id"), pickle.BINPERSID),
            forged(b"(" * 10),
        ],
    )
    def test_what_cannot_be_read_is_an_error_of_the_format(
        self, data: bytes, allow_pickle: bool
    ) -> None:
        """Whatever goes wrong in a pickle is one kind of error, and names the file."""
        with pytest.raises(CheckpointFormatError) as caught:
            load(data, allow_pickle=allow_pickle)
        assert str(caught.value).startswith(f"{WHERE}: an object cannot be built here (")

    def test_a_class_that_is_gone(self) -> None:
        """With permission, a class that is not there any more is named."""
        with pytest.raises(CheckpointFormatError, match="no_such_module"):
            load(calling("no_such_module", "Thing"), allow_pickle=True)


@pytest.mark.parametrize("before", [0, 1, 5, 2500])
def test_what_is_refused_is_told_by_its_place(before: int) -> None:
    """Of all objects just the one that needs leave, at the save as at the load."""
    objects: list[tuple[tuple[str | int, ...], object]] = []
    objects += [(("callbacks", "A", i), Path(str(i))) for i in range(before)]
    objects += [(("callbacks", "B", "x"), [{"k": (1, ("a", "b"), Mine(3))}])]
    objects += [(("later",), Path("z"))]
    with pytest.raises(UnsupportedError, match=r"Mine \(callbacks\.B\.x\)\."):
        load(host_pickle(objects))
    (found,) = find_refused(objects).items()
    assert found == ("callbacks.B.x", f"a Python object of {__name__}.Mine")


def test_what_cannot_be_pickled_is_left_to_the_save() -> None:
    """To say what a load refuses breaks no save: that names by itself what it cannot write."""
    assert find_refused([(("a",), lambda: 0), (("b",), Path("x"))]) == {}
