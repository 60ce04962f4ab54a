"""Steps that an optimizer has counted, through conversions: of empty parameters, and odd ones."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_elastic_zero.errors import CheckpointFormatError, UnsupportedError
from lightning_elastic_zero.tools.conversion import convert_checkpoint
from lightning_elastic_zero.tools.differences import diff_checkpoints
from lightning_elastic_zero.tools.fingerprint import fingerprint_checkpoint
from lightning_elastic_zero.tools.verification import verify_checkpoint
from lightning_elastic_zero.tools.view import open_view
from lightning_elastic_zero.tools.weight_files import ConvertOptions
from tests.tools._checkpoints import make_state, write_elastic

_STATES = ("exp_avg", "exp_avg_sq")


def _write_dcp(
    folder: Path, steps: dict[str, float | None], sizes: dict[str, int], **more: Any
) -> Path:
    """Write a group of parameters with these steps; None: the group counts, if ``more`` does."""
    state = {
        name: {
            **{key: torch.rand(sizes.get(name, 3)) for key in _STATES},
            **({} if step is None else {"step": torch.tensor(float(step))}),
        }
        for name, step in steps.items()
    }
    group = {"params": list(steps), "lr": 0.1, **more}
    tree = {
        "model": {name: torch.rand(sizes.get(name, 3)) for name in steps},
        "optimizer": {"state": state, "param_groups": [group]},
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(tree, checkpoint_id=folder, no_dist=True)  # type: ignore[attr-defined]
    return folder


def _steps(path: Path) -> dict[str, object]:
    with open_view(path) as view:
        found = {p.name: view.scalars(p.name).get("step") for p in view.manifest.optimized}
    return {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in found.items()}


_GROUPS = [
    (("empty", "a"), ("b",)),
    (("a", "empty"), ("b",)),
    (("b",), ("empty", "a")),
    (("empty", "nil", "a"), ("b",)),
]


_TARGETS = ("universal", "dcp", "lightning", "elastic")
# A single file keeps states by position, which here could mean several weights: it is told so.
_AMBIGUOUS = ("lightning", _GROUPS[2])


@pytest.mark.parametrize(
    ("to", "groups"),
    [(to, groups) for to in _TARGETS for groups in _GROUPS if (to, groups) != _AMBIGUOUS],
)
def test_empty_members(to: str, groups: tuple[tuple[str, ...], ...], tmp_path: Path) -> None:
    """An empty parameter, wherever it is in its group, takes no state from it, nor its type."""
    names = [name for names in groups for name in names]
    sizes = {"empty": (0,), "nil": (2, 0), "a": (4, 3), "b": (2,)}
    state = replace(make_state({name: sizes[name] for name in names}), groups=groups)
    source = write_elastic(tmp_path / "a.ckpt", state)
    there, back = tmp_path / "there.ckpt", tmp_path / "back.ckpt"
    convert_checkpoint(source, there, to, ConvertOptions(optimizer=True))
    convert_checkpoint(there, back, "elastic", ConvertOptions(buffers=["mean"]))
    for found in (there, back):
        assert _steps(found) == dict.fromkeys(names, 3.0)
        assert diff_checkpoints(source, found).tensors == ()
        assert fingerprint_checkpoint(found) == fingerprint_checkpoint(source)
        assert verify_checkpoint(found).is_sound
        with open_view(found) as view:
            assert view.manifest.master_dtype == "float32"
            assert {key.dtype for g in view.manifest.groups for key in g.state} == {"float32"}


def test_every_member_of_a_universal_checkpoint_has_its_step(tmp_path: Path) -> None:
    """DeepSpeed compares the steps of all members, and refuses where one has none."""
    groups = (("empty", "a"), ("b",))
    state = replace(make_state({"empty": (0,), "a": (4, 3), "b": (2,)}), groups=groups)
    source = write_elastic(tmp_path / "a.ckpt", state)
    convert_checkpoint(source, tmp_path / "u", "universal")
    zero = tmp_path / "u" / "universal" / "zero"
    for name in ("empty", "a", "b"):
        assert torch.load(zero / name / "step.pt") == 3
        assert torch.load(zero / name / "fp32.pt")["param"].dtype == torch.float32
    shared = torch.load(zero / "optimizer_state.pt")
    assert shared["optimizer_state_dict"]["state"][0]["step"] == 3
    # As it was written once, and by others, who list no files.
    (zero / "empty" / "step.pt").unlink()
    del shared["elastic_zero"]
    torch.save(shared, zero / "optimizer_state.pt")
    assert _steps(tmp_path / "u") == {"empty": 3.0, "a": 3.0, "b": 3.0}


def test_a_group_with_several_steps(tmp_path: Path) -> None:
    """A universal checkpoint has one for a group: others are not lost, but refused."""
    source = _write_dcp(tmp_path / "dcp", {"a": 3, "b": 5, "c": 3}, {})
    with pytest.raises(UnsupportedError, match=r"3.0 of a, 5.0 of b.* one step per group"):
        convert_checkpoint(source, tmp_path / "u", "universal")
    assert not (tmp_path / "u").exists()
    convert_checkpoint(source, tmp_path / "own", "elastic")
    assert _steps(tmp_path / "own") == {"a": 3.0, "b": 5.0, "c": 3.0}


def test_a_universal_checkpoint_with_several_steps(tmp_path: Path) -> None:
    """One that has them is refused in a load, and is not sound: one step would be lost."""
    source = _write_dcp(tmp_path / "dcp", {"a": 3, "b": 3}, {})
    convert_checkpoint(source, tmp_path / "u", "universal")
    assert verify_checkpoint(tmp_path / "u").is_sound
    torch.save(torch.tensor(5.0), tmp_path / "u" / "universal" / "zero" / "b" / "step.pt")
    found = verify_checkpoint(tmp_path / "u")
    assert not found.is_sound
    assert "3.0 of a, and 5.0 of b" in found.problem


@pytest.mark.parametrize("step", [math.nan, math.inf])
@pytest.mark.parametrize("to", ["elastic", "universal"])
def test_a_step_that_is_no_number(to: str, step: float, tmp_path: Path) -> None:
    """It is refused by the parameter's name, and weights alone can still be had."""
    source = _write_dcp(tmp_path / "dcp", {"a": 3, "b": step}, {})
    with pytest.raises(CheckpointFormatError, match=f"'step' of b is {step}"):
        convert_checkpoint(source, tmp_path / "target", to)
    assert not (tmp_path / "target").exists()
    convert_checkpoint(source, tmp_path / "w.pt", "fp32")


@pytest.mark.parametrize("step", [7, 7.0, torch.tensor(7)])
def test_a_step_of_the_group(step: float | torch.Tensor, tmp_path: Path) -> None:
    """Some optimizers count in the group: that is how far the run had come."""
    source = _write_dcp(tmp_path / "dcp", {"a": None, "b": None}, {}, step=step)
    convert_checkpoint(source, tmp_path / "own", "elastic")
    with open_view(tmp_path / "own") as view:
        assert view.manifest.progress.global_steps == 7
    convert_checkpoint(source, tmp_path / "u", "universal")
    assert torch.load(tmp_path / "u" / "universal" / "zero" / "b" / "step.pt") == 7


def test_a_step_of_the_group_that_is_no_number(tmp_path: Path) -> None:
    """It is refused as those of parameters are; what is no number at all is no count."""
    source = _write_dcp(tmp_path / "nan", {"a": None, "b": None}, {}, step=math.nan)
    with pytest.raises(CheckpointFormatError, match="'step' of a is nan"):
        convert_checkpoint(source, tmp_path / "own", "elastic")
    named = _write_dcp(tmp_path / "named", {"a": None, "b": None}, {}, step="cosine")
    convert_checkpoint(named, tmp_path / "own", "elastic")
    with open_view(tmp_path / "own") as view:
        assert view.manifest.progress.global_steps == 0


def test_an_empty_first_parameter_of_another_type(tmp_path: Path) -> None:
    """The masters' type is that of the first one with elements."""
    source = _write_dcp(tmp_path / "dcp", {"a": 3, "b": 3}, {"a": 0})
    convert_checkpoint(source, tmp_path / "own", "elastic")
    with open_view(tmp_path / "own") as view:
        assert view.manifest.master_dtype == "float32"
    assert _steps(tmp_path / "own") == {"a": 3.0, "b": 3.0}
