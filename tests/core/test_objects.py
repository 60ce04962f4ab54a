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
from lightning_elastic_zero.formats.objects import load_objects
from tests.core.spelling import spelled

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
    """Give the opcodes that put a value on a pickle's stack."""
    return pickle.dumps(value, protocol=3)[2:-1]


def named(module: str, name: str) -> bytes:
    """Give the opcodes that put a global on the stack, under a name that may hold dots."""
    return pushed(module) + pushed(name) + pickle.STACK_GLOBAL


def forged(*opcodes: bytes) -> bytes:
    """Make a pickle that no class would make."""
    return b"\x80\x04" + b"".join(opcodes) + b"."


def calling(module: str, name: str, *arguments: object) -> bytes:
    """Make a pickle that calls a global."""
    return forged(named(module, name), pushed(arguments), pickle.REDUCE)


HARMLESS_VALUES = [
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
    @pytest.mark.parametrize("value", HARMLESS_VALUES, ids=lambda value: f"{value!r:.30}")
    def test_values_are_read_without_permission(self, value: object, protocol: int) -> None:
        """What is only a value comes back as it was, tensors inside of objects too."""
        read = load(pickle.dumps([((), value)], protocol))
        assert spelled(read) == spelled([((), value)])

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
            ("lightning_elastic_zero.formats.objects", "load_objects"),
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
        with pytest.raises(UnsupportedError, match=r"test_objects\.Mine"):
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
        with pytest.raises(CheckpointFormatError, match="a pickled dtype named"):
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
