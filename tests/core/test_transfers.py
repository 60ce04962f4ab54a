"""What a load reads, and where it goes; and the scalars of flat buffers that were cut otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_elastic_zero.checkpoint.load import plans, read_targets, scalars_by_buffer
from lightning_elastic_zero.core.layout import Fragment
from lightning_elastic_zero.core.partition import FlatBuffer
from lightning_elastic_zero.core.progress import NO_PROGRESS
from lightning_elastic_zero.core.tensors import RestoreTargets
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats.open import open_checkpoint
from tests.support.plain_checkpoints import (
    STATES,
    WholeState,
    make_state,
    manifest_of,
    write_elastic,
)

SHAPES = {"a": (5, 3), "b": (4,), "c": (7,)}


def one_group(steps: Sequence[float]) -> WholeState:
    """Return a state of one parameter group in two sub-groups, which have taken these steps."""
    state = make_state(SHAPES)
    return replace(state, groups=(tuple(SHAPES),), rates=(1e-3,), steps=tuple(steps))


def sub_groups(*names: Sequence[str]) -> tuple[FlatBuffer, ...]:
    """Return ZeRO-3's sub-groups of one parameter group."""
    numel = {"a": 15, "b": 4, "c": 7, "new": 2}
    return tuple(FlatBuffer(0, tuple(n), tuple(numel[name] for name in n)) for n in names)


def steps_of(path: Path, steps: Sequence[float], live: tuple[FlatBuffer, ...]) -> list[float]:
    """Save with these steps in the sub-groups ``a, b`` and ``c``; return those of live ones."""
    state = one_group(steps)
    write_elastic(path, state, 3, 2, buffers=sub_groups("ab", "c"))
    here = replace(manifest_of(state, 3, 2), buffers=live)
    with closing(open_checkpoint(path)) as source:
        found = scalars_by_buffer(source, here, source.manifest.groups)
    return [float(scalars["step"]) for scalars in found]  # type: ignore[arg-type]


def test_a_sub_group_goes_on_with_its_own_steps(tmp_path: Path) -> None:
    """Sub-groups of one group may have taken different steps."""
    assert steps_of(tmp_path, (3.0, 5.0), sub_groups("ab", "c")) == [3.0, 5.0]
    assert steps_of(tmp_path / "cut", (3.0, 5.0), sub_groups("a", "c", "b")) == [3.0, 5.0, 3.0]


def test_sub_groups_that_become_one_agree(tmp_path: Path) -> None:
    """One flat buffer has one value of each: those that differ are refused, and both are named."""
    assert steps_of(tmp_path, (4.0, 4.0), sub_groups("abc")) == [4.0]
    with pytest.raises(CheckpointMismatchError, match=r"3\..*5\..*sub_group_size"):
        steps_of(tmp_path / "differ", (3.0, 5.0), sub_groups("abc"))


def test_a_new_parameter_counts_as_its_group_does(tmp_path: Path) -> None:
    """What was not saved takes the steps of the others in its group, alone in a buffer or not."""
    assert steps_of(tmp_path, (4.0, 4.0), sub_groups("abc", ["new"])) == [4.0, 4.0]
    assert steps_of(tmp_path / "beside", (3.0, 5.0), sub_groups("ab", ["c", "new"])) == [3.0, 5.0]


def test_states_are_read_where_they_are_wanted(tmp_path: Path) -> None:
    """Of a parameter with fresh states the weights are read, and its states stay what they are."""
    state = make_state(SHAPES)
    write_elastic(tmp_path, state, 1, 2)
    wanted = (Fragment("a", 0, 15, 0, 0, 0), Fragment("b", 1, 4, 0, 0, 15))
    frozen = Fragment("frozen.weight", 0, 12, 0, 1, 0)
    weights = (torch.full((18,), -1.0), torch.full((12,), -1.0, dtype=torch.bfloat16))
    states: tuple[dict[str, torch.Tensor], ...] = (
        {key: torch.full((18,), -1.0) for key in STATES},
        {},
    )
    targets = RestoreTargets((*wanted, frozen), weights, states, lambda _: None, lambda: None)
    with closing(open_checkpoint(tmp_path)) as source:
        for plan in plans(source, targets, with_state={"a"}):
            for _, transfers in plan.by_rank():
                source.read(transfers, read_targets(targets), NO_PROGRESS)
    masters = torch.cat([state.masters["a"].view(-1), state.masters["b"][1:]])
    assert torch.equal(weights[0], masters)
    assert torch.equal(weights[1], state.frozen["frozen.weight"].view(-1))
    for key in STATES:
        assert torch.equal(states[0][key][:15], state.states["a"][key].view(-1))
        assert torch.equal(states[0][key][15:], torch.full((3,), -1.0))
