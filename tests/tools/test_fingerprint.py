"""Equal states have equal fingerprints, however they are sharded; other states have others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from awscrt.checksums import crc64nvme
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_elastic_zero.core.fingerprint import (
    FingerprintPart,
    TensorId,
    run_part,
    scalars_part,
)
from lightning_elastic_zero.tools.fingerprint import fingerprint_checkpoint, tensor_fingerprints
from tests.support.foreign_checkpoints import unpack
from tests.support.plain_checkpoints import make_state, write_elastic

Run = Callable[..., tuple[int, str, str]]

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]

ONES = (1 << 64) - 1


def part(values: torch.Tensor, start: int = 0, **changes: object) -> FingerprintPart:
    shape = (values.numel(),)
    which = {"part": "weights", "name": "w", "key": "", "dtype": values.dtype, "shape": shape}
    return run_part(TensorId(**{**which, **changes}), start, values)  # type: ignore[arg-type]


def by_the_formula(values: torch.Tensor, tensor: TensorId) -> int:
    """Return the value of a tensor by the module's formula, bit by bit, lowest bit first."""
    polynomial = int(f"{0xAD93D23594C93659:064b}"[::-1], 2)

    def times_x(register: int) -> int:
        return register >> 1 ^ (polynomial if register & 1 else 0)

    def product(a: int, b: int) -> int:
        total = 0
        for bit in range(63, -1, -1):
            total ^= a if b >> bit & 1 else 0
            a = times_x(a)
        return total

    register = 0
    for byte in values.view(torch.uint8).tolist():
        register ^= byte
        for _ in range(8):
            register = times_x(register)
    power, behind = 1 << 63 >> 8, tensor.bytes_behind()  # x to the 8th
    while behind:
        register = product(register, power) if behind & 1 else register
        power, behind = product(power, power), behind >> 1
    return register ^ tensor.presence().weights


@pytest.fixture(scope="module")
def long() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn((2 << 20) + 77, generator=generator)


def test_the_fingerprint_is_that_of_the_formula(long: torch.Tensor) -> None:
    """The standard gives a check value for nine digits, with initial value and inversion."""
    assert crc64nvme(b"123456789") == 0xAE8B14860A799888
    for count in (1, 2, 77, 5000):
        values = long[:count]
        which = TensorId("weights", "w", "", values.dtype, (count,))
        assert part(values).weights == by_the_formula(values, which)


def test_the_fingerprint_never_changes_between_releases() -> None:
    values = torch.arange(4.0)
    text = b"\0weights\0w\0\0float32\x004"
    behind, there = (xxhash.xxh3_128_intdigest(what + text) for what in (b"tensor", b"there"))
    which = TensorId("weights", "w", "", values.dtype, (4,))
    assert which.bytes_behind() == ((behind >> 64) ^ (behind & ONES)) >> 1
    assert which.presence().weights == (there >> 64) ^ (there & ONES)
    three = xxhash.xxh3_128_intdigest(b"scalar\0w\0step\x003")
    assert scalars_part("w", [("step", 3.0)]).optimizer == (three >> 64) ^ (three & ONES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_add_up_in_any_order(dtype: torch.dtype, long: torch.Tensor) -> None:
    values = (long * 100).to(dtype)
    shape = (len(values),)
    cuts = [0, 1, 2, 1000, 65535, 65539, 2 << 20, len(values)]
    runs = [part(values[a:b], a, shape=shape) for a, b in itertools.pairwise(cuts)]
    forward, backward = FingerprintPart(), FingerprintPart()
    for run in runs:
        forward += run
    for run in reversed(runs):
        backward = run + backward
    assert forward == backward == part(values)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_flips_swaps_shifts_and_zeros_change_the_fingerprint(data: st.DataObject) -> None:
    numel = data.draw(st.integers(3, 200))
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    a = data.draw(st.integers(0, numel - 2))
    b = data.draw(st.integers(a + 1, numel - 1))
    other = values.clone()
    match data.draw(st.sampled_from(["sign", "signs", "swap", "zero", "shift", "cancel", "bit"])):
        case "sign":
            other[a] = -other[a]
        case "signs":
            other[[a, b]] = -other[[a, b]]
        case "swap":
            other[[a, b]] = other[[b, a]]
        case "zero":
            other[a : b + 1] = 0
        case "shift":
            other[a : b + 1] = other[a : b + 1].roll(1)
        case "cancel":  # One value grows as much as the other shrinks.
            other.view(torch.int32)[a] += 1
            other.view(torch.int32)[b] -= 1
        case "bit":
            other.view(torch.int32)[a] ^= 1 << data.draw(st.integers(0, 30))
    assert part(other) != part(values)


def test_no_two_flipped_signs_cancel() -> None:
    zeros = torch.zeros(1 << 17)
    seen = {part(zeros)}
    places = [0, 1, 2, 100, 65535, 65536, 65537, len(zeros) - 1]
    count = 1
    for i, a in enumerate(places):
        for b in places[i:]:
            other = zeros.clone()
            other[[a, b]] = -0.0
            seen.add(part(other))
            count += 1
    assert len(seen) == count


def test_swapped_tensors_change_the_fingerprint() -> None:
    one, other, zeros = torch.randn(50), torch.randn(50), torch.zeros(50)
    assert part(one) + part(one, name="v") != part(zeros) + part(zeros, name="v")
    assert part(one) + part(other, name="v") != part(other) + part(one, name="v")


def test_a_part_beyond_the_tensor_is_refused() -> None:
    part(torch.ones(3), 6, shape=(3, 3))
    with pytest.raises(ValueError, match="no 3 elements from 7 on"):
        part(torch.ones(3), 7, shape=(3, 3))
    with pytest.raises(ValueError, match=r"expected 1-D torch\.float32, found torch\.float64"):
        part(torch.ones(3, dtype=torch.float64), dtype=torch.float32)


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(10.0)[5::10],
        torch.tensor([5.0]).expand(1),
        torch.arange(10.0)[::3],
        torch.tensor([1 - 2j, 5 + 3j]).conj(),
        torch.tensor([1 - 2j, 5 + 3j]).conj().imag,
        torch._neg_view(torch.arange(3.0)),
    ],
    ids=[
        "one of a column",
        "one expanded",
        "strided",
        "conjugate",
        "its imaginary part",
        "negative",
    ],
)
def test_strides_do_not_change_the_fingerprint(values: torch.Tensor) -> None:
    held = torch.tensor(values.tolist(), dtype=values.dtype)
    assert part(values) == part(held)
    assert part(values) != part(held + 1)


def test_name_key_type_shape_and_step_change_the_fingerprint() -> None:
    values = torch.zeros(9)
    parts = [
        part(values),
        part(values, name="v"),
        part(values, shape=(3, 3)),
        part(values, part="optimizer", key="exp_avg"),
        part(values, part="optimizer", key="exp_avg_sq"),
        part(values.bfloat16()),
    ]
    assert len(set(parts)) == len(parts)
    three = scalars_part("w", [("step", torch.tensor(3.0))])
    assert three == scalars_part("w", [("step", 3)])
    assert three != scalars_part("w", [("step", 4)])
    assert three != scalars_part("v", [("step", 3)])


@pytest.mark.parametrize(("stage", "world_size"), [(1, 1), (1, 3), (2, 5), (3, 2), (3, 7)])
def test_the_fingerprint_does_not_depend_on_the_sharding(
    stage: int, world_size: int, tmp_path: Path
) -> None:
    state = make_state()
    reference = fingerprint_checkpoint(write_elastic(tmp_path / "whole", state, 1, 1), threads=1)
    cut = write_elastic(tmp_path / "cut", state, stage, world_size)
    for threads in (1, 2, 3):
        assert fingerprint_checkpoint(cut, threads=threads) == reference


def test_large_tensors_are_covered_to_the_last_element(tmp_path: Path) -> None:
    """It is read in several chunks; the others are small."""
    state = make_state({"large": (5, (1 << 20) + 3), "small": (3,)})
    expected = FingerprintPart()
    for name, values in (*state.masters.items(), *state.frozen.items(), *state.buffers.items()):
        expected += part(values.reshape(-1), name=name, shape=tuple(values.shape))
    found = fingerprint_checkpoint(write_elastic(tmp_path / "large", state))
    assert found.weights == expected.total().weights


def test_weights_only_have_the_fingerprint_of_the_weights(tmp_path: Path) -> None:
    state = make_state()
    full = fingerprint_checkpoint(write_elastic(tmp_path / "whole", state))
    lean = fingerprint_checkpoint(write_elastic(tmp_path / "lean", state, weights_only=True))
    assert (lean.weights, lean.optimizer) == (full.weights, "")
    assert full.optimizer


def test_a_changed_element_changes_its_tensor_alone(tmp_path: Path, run: Run) -> None:
    state = make_state()
    one = write_elastic(tmp_path / "one", state, 3, 2)
    state.states["head.weight"]["exp_avg"][2, 3] += 1
    other = write_elastic(tmp_path / "other", state, 2, 3)
    mine, its = tensor_fingerprints(one), tensor_fingerprints(other)
    assert {at for at in mine if mine[at] != its[at]} == {("head.weight", "exp_avg")}
    code, out, _ = run("fingerprint", one, other, "--tensors")
    assert code == 0
    numbers = [line.split()[0] for line in out.splitlines() if not line.startswith(" ")]
    assert numbers == [str(fingerprint_checkpoint(path)) for path in (one, other)]
    assert numbers[0].split("-")[0] == numbers[1].split("-")[0]
    assert numbers[0] != numbers[1]


@pytest.mark.parametrize("name", ["zero2-ds0.19", "universal3", "elastic2-ds0.19", "momentum"])
def test_the_fingerprint_of_other_software_is_that_of_its_engine(name: str, tmp_path: Path) -> None:
    fixture = unpack(name, tmp_path)
    truth = fixture.truth()
    found = tensor_fingerprints(fixture.checkpoint)
    held = {
        (key.split("/", 1)[1], "" if key.startswith("master/") else key.split("/", 1)[0])
        for key, value in truth.items()
        if isinstance(value, torch.Tensor) and key.split("/")[0] in {"master", "exp_avg"}
    }
    assert held <= set(found)
    for name_, key in held:
        tensor = truth[f"{key or 'master'}/{name_}"]
        which = TensorId(
            "optimizer" if key else "weights", name_, key, tensor.dtype, tuple(tensor.shape)
        )
        total = run_part(which, 0, tensor.flatten()).total()
        assert found[name_, key] == (total.optimizer if key else total.weights), name_
