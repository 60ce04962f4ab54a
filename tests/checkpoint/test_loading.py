"""Transfers into live state: every element once, and casts without silent overflow."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from lightning_elastic_zero.checkpoint.load_checks import infinite_weights
from lightning_elastic_zero.core.layout import Fragment, Layout, TransferPlan
from lightning_elastic_zero.core.manifest import Group, Manifest, Parameter
from lightning_elastic_zero.core.partition import FlatBuffer
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import RestoreTargets
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.formats.reader import (
    WEIGHT,
    CheckpointReader,
    check_no_overflow,
    scalars_by_buffer,
)
from lightning_elastic_zero.formats.torch_read import StoredRun
from tests.support.plain_checkpoints import (
    STATES,
    make_state,
    manifest_of,
    write_dcp,
    write_elastic,
)

SHAPES = {"a": (5, 3), "b": (4,), "c": (7,)}


def sub_groups(*names: Sequence[str]) -> tuple[FlatBuffer, ...]:
    numel = {"a": 15, "b": 4, "c": 7, "new": 2}
    return tuple(FlatBuffer(0, tuple(n), tuple(numel[name] for name in n)) for n in names)


def steps_of(path: Path, steps: Sequence[float], live: tuple[FlatBuffer, ...]) -> list[float]:
    """Save with these steps in the sub-groups ``a, b`` and ``c``; return those of live ones."""
    state = make_state(SHAPES)
    state = replace(state, groups=(tuple(SHAPES),), rates=(1e-3,), steps=tuple(steps))
    write_elastic(path, state, 3, 2, buffers=sub_groups("ab", "c"))
    here = replace(manifest_of(state, 3, 2), buffers=live)
    with closing(open_checkpoint(path)) as source:
        found = scalars_by_buffer(source, here, source.manifest.groups)
    return [float(scalars["step"]) for scalars in found]  # type: ignore[arg-type]


def test_each_sub_group_keeps_its_steps(tmp_path: Path) -> None:
    assert steps_of(tmp_path, (3.0, 5.0), sub_groups("ab", "c")) == [3.0, 5.0]
    assert steps_of(tmp_path / "cut", (3.0, 5.0), sub_groups("a", "c", "b")) == [3.0, 5.0, 3.0]


def test_merged_sub_groups_need_equal_steps(tmp_path: Path) -> None:
    assert steps_of(tmp_path, (4.0, 4.0), sub_groups("abc")) == [4.0]
    with pytest.raises(CheckpointMismatchError, match=r"3\..*5\..*sub_group_size"):
        steps_of(tmp_path / "differ", (3.0, 5.0), sub_groups("abc"))


def test_a_new_parameter_takes_the_steps_of_its_group(tmp_path: Path) -> None:
    assert steps_of(tmp_path, (4.0, 4.0), sub_groups("abc", ["new"])) == [4.0, 4.0]
    assert steps_of(tmp_path / "new", (3.0, 5.0), sub_groups("ab", ["c", "new"])) == [3.0, 5.0]


def test_a_parameter_without_elements_takes_the_steps_of_its_group(tmp_path: Path) -> None:
    state = make_state({"empty": (0, 3), "a": (5, 3)})
    state = replace(state, groups=(("empty", "a"),), rates=(1e-3,))
    live = (FlatBuffer(0, ("empty",), (0,)), FlatBuffer(0, ("empty", "a"), (0, 15)))
    write_elastic(tmp_path, state, 3, 2)
    here = replace(manifest_of(state, 3, 2), buffers=live)
    with closing(open_checkpoint(tmp_path)) as source:
        found = scalars_by_buffer(source, here, source.manifest.groups)
    assert [scalars["step"] for scalars in found] == [3.0, 3.0]


def test_states_of_fresh_parameters_are_not_read(tmp_path: Path) -> None:
    state = make_state(SHAPES)
    write_elastic(tmp_path, state, 1, 2)
    wanted = (Fragment("a", 0, 15, 0, 0, 0), Fragment("b", 1, 4, 0, 0, 15))
    frozen = Fragment("frozen.weight", 0, 12, 0, 1, 0)
    weights = (torch.full((18,), -1.0), torch.full((12,), -1.0, dtype=torch.bfloat16))
    states: tuple[dict[str, torch.Tensor], ...] = (
        {key: torch.full((18,), -1.0) for key in STATES},
        {},
    )
    filled = [{WEIGHT: w, **of_flat} for w, of_flat in zip(weights, states, strict=True)]
    with closing(open_checkpoint(tmp_path)) as source:
        plans = (
            TransferPlan(wanted, source.layout()),
            TransferPlan([frozen], source.frozen_layout()),
        )
        for _, transfers in (each for plan in plans for each in plan.by_rank()):
            source.read(transfers, filled, NO_PROGRESS, weights_only={"b"})
    masters = torch.cat([state.masters["a"].view(-1), state.masters["b"][1:]])
    assert torch.equal(weights[0], masters)
    assert torch.equal(weights[1], state.frozen["frozen.weight"].view(-1))
    for key in STATES:
        assert torch.equal(states[0][key][:15], state.states["a"][key].view(-1))
        assert torch.equal(states[0][key][15:], torch.full((3,), -1.0))


NUMEL = (1 << 20) + 3
"""More elements than are checked at a time."""


def manifest(dtype: str, *names: str, frozen: tuple[str, ...] = ()) -> Manifest:
    parameters = [Parameter(n, (NUMEL,), dtype, None if n in frozen else 0) for n in names]
    return Manifest(
        "", 0, 1, "any", "float32", tuple(parameters), (Group(names, {}, ()),), (), (), ()
    )


def targets(*held: tuple[str, torch.Tensor]) -> RestoreTargets:
    """Return received tensors, each between two elements that belong to no parameter."""
    huge = torch.full((1,), 3e38)
    return RestoreTargets(
        tuple(Fragment(n, 0, v.numel(), 0, i, 1) for i, (n, v) in enumerate(held)),
        tuple(torch.cat([huge, v, huge]) for _, v in held),
        tuple({} for _ in held),
        lambda _: None,
        lambda: None,
    )


def with_last(number: float) -> torch.Tensor:
    values = torch.zeros(NUMEL)
    values[-1] = number
    return values


@pytest.mark.parametrize(
    ("saved", "here", "number", "named"),
    [
        ("float32", "float16", 65504.0, False),
        ("float32", "float16", -65520.0, True),
        ("bfloat16", "float16", 7e4, True),
        ("float64", "float16", 7e4, True),
        ("float16", "float16", 7e4, False),
        ("float32", "bfloat16", 7e4, False),
        ("float32", "bfloat16", 3.4e38, True),
        ("bfloat16", "bfloat16", 3.4e38, False),
        ("float16", "bfloat16", 3.4e38, False),
        ("float32", "float32", 3.4e38, False),
        ("float32", "float16", math.inf, False),
        ("float32", "float16", math.nan, False),
    ],
)
def test_a_weight_that_a_cast_makes_infinite_is_named(
    saved: str, here: str, number: float, named: bool
) -> None:
    held = targets(("a", with_last(0.0)), ("b", with_last(number)), ("b", with_last(number)))
    found = infinite_weights(held, manifest(saved, "a", "b", "gone"), manifest(here, "a", "b"))
    assert found == (["b"] if named else [])


def test_frozen_and_new_parameters_are_not_checked() -> None:
    held = targets(("frozen", with_last(7e4)), ("new", with_last(7e4)))
    here = manifest("float16", "frozen", "new", frozen=("frozen",))
    assert infinite_weights(held, manifest("float32", "frozen"), here) == []


@pytest.mark.parametrize(
    ("saved", "here", "number", "named"),
    [
        ("float16", "float16", 7e4, True),
        ("bfloat16", "bfloat16", 3.4e38, True),
        ("float16", "bfloat16", 3.4e38, True),
        ("float16", "float16", 65504.0, False),
        ("float32", "float32", 3.4e38, False),
        ("float16", "float16", math.inf, False),
    ],
)
def test_masters_are_checked_against_the_rounded_type(
    saved: str, here: str, number: float, named: bool
) -> None:
    held = targets(("a", with_last(number)))
    wanted = manifest(saved, "a"), manifest(here, "a")
    assert infinite_weights(held, *wanted, rounds_masters=True) == (["a"] if named else [])


HUGE_NUMEL = (1 << 20) + 12


def zip_file(weight: torch.Tensor, folder: Path) -> Path:
    torch.save({"state_dict": {"w": weight}}, folder / "model.ckpt")
    return folder / "model.ckpt"


def transposed(weight: torch.Tensor, folder: Path) -> Path:
    return zip_file(weight.view(4, -1).t().contiguous().t(), folder)


def directory(weight: torch.Tensor, folder: Path) -> Path:
    return write_dcp(folder / "model.distcp", {"model": {"w": weight}})


KINDS = [zip_file, transposed, directory]

CASTS = [
    (torch.float64, torch.float32, 1e300),
    (torch.float64, torch.float32, -1e39),
    (torch.float32, torch.float16, 65520.0),
    (torch.float32, torch.bfloat16, 3.4e38),
    (torch.bfloat16, torch.float16, 1e30),
]
"""The type in the file, the type here, and a number that only the former can represent."""


def read(path: Path, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
    with closing(open_checkpoint(path)) as source:
        target = torch.zeros(stop - start, dtype=dtype)
        wanted = Fragment("w", start, stop, rank=0, buffer=0, offset=0)
        for _, transfers in TransferPlan([wanted], layout_of(source)).by_rank():
            source.read(transfers, [{WEIGHT: target}], NO_PROGRESS)
        return target


def layout_of(source: CheckpointReader) -> Layout:
    return source.layout() if source.manifest.optimized else source.frozen_layout()


@pytest.mark.parametrize("write", KINDS)
@pytest.mark.parametrize(("saved", "here", "number"), CASTS, ids=str)
def test_a_number_that_is_too_large_is_refused_by_name(
    write: Callable[..., Path], saved: torch.dtype, here: torch.dtype, number: float, tmp_path: Path
) -> None:
    weight = torch.arange(HUGE_NUMEL, dtype=torch.float32).remainder(7).to(saved)
    weight[0], weight[-3] = math.inf, number
    path = write(weight, tmp_path)
    message = f"w has the {saved} value {weight[-3].item():.9g}, which overflows {here}"
    with pytest.raises(CheckpointMismatchError, match=re.escape(message.replace("torch.", ""))):
        read(path, here, 0, HUGE_NUMEL)
    assert torch.equal(read(path, here, 0, HUGE_NUMEL - 3), weight[:-3].to(here))


@pytest.mark.parametrize("write", KINDS)
@pytest.mark.parametrize(("saved", "here", "number"), CASTS, ids=str)
def test_infinities_and_nan_of_the_file_are_kept(
    write: Callable[..., Path], saved: torch.dtype, here: torch.dtype, number: float, tmp_path: Path
) -> None:
    weight = torch.ones(HUGE_NUMEL, dtype=saved)
    weight[::1000], weight[1], weight[-1] = math.inf, -math.inf, math.nan
    found = read(write(weight, tmp_path), here, 0, HUGE_NUMEL)
    torch.testing.assert_close(found, weight.to(here), rtol=0, atol=0, equal_nan=True)
    weight[5] = number
    found = read(write(weight, tmp_path), saved, 0, HUGE_NUMEL)
    torch.testing.assert_close(found, weight, rtol=0, atol=0, equal_nan=True)


@dataclass
class File:
    """A file of one tensor, which notes the runs that are read, and counts eight bytes for each."""

    path: Path
    stored: torch.Tensor
    runs: list[StoredRun] = field(default_factory=list)

    def read_into(
        self, wanted: Iterable[tuple[torch.Tensor, StoredRun]], _: Progress = NO_PROGRESS
    ) -> int:
        before = len(self.runs)
        for target, run in wanted:
            self.runs.append(run)
            target.copy_(self.stored[run.start : run.stop])
        return 8 * (len(self.runs) - before)

    def load_tree(self, subtree: object) -> object:
        return subtree


@pytest.mark.parametrize(
    ("saved", "here", "reads"),
    [
        (torch.float32, torch.float32, 0),
        (torch.bfloat16, torch.float32, 0),
        (torch.float16, torch.bfloat16, 0),
        (torch.int64, torch.int64, 0),
        (torch.float64, torch.float32, 1),
    ],
)
def test_only_non_finite_parts_of_narrowing_casts_are_read_again(
    saved: torch.dtype, here: torch.dtype, reads: int
) -> None:
    numel = 2 * HUGE_NUMEL
    stored = torch.ones(numel, dtype=saved)
    if saved.is_floating_point:
        stored[-1] = math.inf
    file, run = File(Path("file"), stored), StoredRun(stored, 0, numel)
    assert check_no_overflow(file, run, stored.to(here), "w", WEIGHT) == 8 * reads
    assert len(file.runs) == reads
    assert sum(run.stop - run.start for run in file.runs) < HUGE_NUMEL


def test_an_infinite_optimizer_state_is_named_with_a_remedy() -> None:
    stored = torch.full((3,), 1e39, dtype=torch.float64)
    file, run = File(Path("folder/file"), stored), StoredRun(stored, 0, 3)
    with pytest.raises(CheckpointMismatchError) as refusal:
        check_no_overflow(file, run, stored.to(torch.bfloat16), "layer.w", "exp_avg")
    message = str(refusal.value)
    assert (
        "folder/file: the optimizer state exp_avg of layer.w has the float64 value 1e+39" in message
    )
    assert "bfloat16 (at most 3.38953139e+38)" in message
    assert "load_optimizer_state=False" in message
    assert "precision" in message
