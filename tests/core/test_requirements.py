"""Installed releases are compared with pyproject.toml and with the names that the library needs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_elastic_zero.core.requirements import (
    DEEPSPEED,
    LIGHTNING,
    Requirement,
    missing_names,
    version_of,
)
from lightning_elastic_zero.engine.deepspeed import missing
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.trainer.accumulation import LossScalingCheck

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("requirement", [DEEPSPEED, LIGHTNING], ids=lambda r: r.package)
def test_the_refused_range_is_that_of_pyproject(requirement: Requirement) -> None:
    assert f'"{requirement}"' in (ROOT / "pyproject.toml").read_text()
    pinned = f"{requirement.package}=={requirement.newest_tested}"
    assert pinned in (ROOT / "constraints.txt").read_text().split("\n")


@pytest.mark.parametrize(
    ("found", "refused"),
    [
        *((r, True) for r in ("0.15.4", "0.17.6", "0.18.0", "0.18", "0.18.1", "0.18.2", "0.18.3")),
        ("0.18.3+cu126", True),
        *((r, False) for r in ("0.16.0", "0.17.5", "0.18.4", "0.19.8", "0.20.0.dev1+abcdef")),
        *(("", False), ("unknown", False)),
    ],
)
def test_a_release_outside_the_range_is_refused(found: str, refused: bool) -> None:
    reason = DEEPSPEED.incompatibility(found)
    assert (reason is not None) is refused
    if reason is not None:
        assert f"DeepSpeed {found} is installed" in reason
        assert "install deepspeed>=0.16,!=0.17.6,!=0.18.0,!=0.18.1,!=0.18.2,!=0.18.3" in reason
        assert ("1/A" in reason) is found.startswith("0.18.3")
        assert ("all micro-batches but the last" in reason) is (
            found.startswith(("0.17.6", "0.18")) and not found.startswith("0.18.3")
        )


def test_missing_names_are_listed_with_the_release() -> None:
    missing = missing_names(torch.nn.Linear(1, 1), ("weight", "gone", "bias", "lost"))
    sentence = LIGHTNING.missing_names_message("9.9", "Linear", missing)
    assert sentence is not None
    assert "Lightning 9.9 has no gone, lost in Linear" in sentence
    assert "install lightning>=2.5,!=2.6.2,!=2.6.3; 2.6.6 is the newest tested release" in sentence
    assert LIGHTNING.missing_names_message("9.9", "Linear", []) is None


def passed(
    check: LossScalingCheck, factor: float, *, weight: float = 1.0, accumulate: int = 4
) -> float:
    """Run a backward pass whose gradient is scaled where DeepSpeed places its hooks."""
    parameter = torch.ones(3, requires_grad=True)
    returned = parameter.sum()
    returned.register_hook(lambda gradient: gradient * factor)
    loss = returned / accumulate
    with check.watch(loss, weight * 8.0, accumulate):
        (loss * weight * 8.0).backward()
    assert parameter.grad is not None
    return float(parameter.grad[0])


@pytest.mark.parametrize("accumulate", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("weight", [1.0, 0.75])
def test_a_loss_that_is_divided_once_passes(accumulate: int, weight: float) -> None:
    gradient = passed(LossScalingCheck(), 1.0, weight=weight, accumulate=accumulate)
    assert gradient == pytest.approx(8.0 * weight / accumulate)


@pytest.mark.parametrize("factor", [0.25, 4.0, 0.5])
def test_a_loss_that_is_scaled_twice_is_refused(factor: float) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(f"are {factor:g} times")) as refused:
        passed(LossScalingCheck(), factor)
    assert "deepspeed>=0.16,!=0.17.6,!=0.18.0,!=0.18.1,!=0.18.2,!=0.18.3" in str(refused.value)
    assert passed(LossScalingCheck(), factor, accumulate=1) == factor * 8.0


def test_the_loss_scale_is_checked_once() -> None:
    check = LossScalingCheck()
    passed(check, 0.25, weight=0.0)
    passed(check, 1.0)
    passed(check, 0.25)


def test_releases_are_read_once() -> None:
    version_of("torch")
    before = version_of.cache_info().hits
    assert version_of("torch") == torch.__version__
    assert version_of.cache_info().hits == before + 1


@pytest.mark.parametrize(
    ("found", "is_new"),
    [("0.19.8", True), ("0.19.8+cu128", True), ("0.20.0", True), ("0.19.7", False), ("", False)],
)
def test_names_of_newer_releases_are_required_of_those_only(found: str, is_new: bool) -> None:
    assert DEEPSPEED.is_at_least(found, "0.19.8") is is_new


@pytest.mark.parametrize(
    ("title", "live", "lost"),
    [
        ("deepspeed.ops", SimpleNamespace(), "__compatible_ops__"),
        ("the accelerator", SimpleNamespace(), "create_op_builder"),
        ("an operator's builder", SimpleNamespace(NAME="an operator"), "load"),
        ("an operator's builder", SimpleNamespace(load=None), "NAME"),
    ],
)
def test_missing_names_of_operators_are_refused_at_setup(
    title: str, live: object, lost: str
) -> None:
    (sentence,) = missing(title, live, "0.20.0")
    assert f"DeepSpeed 0.20.0 has no {lost} in {title}" in sentence
    assert "0.19.8 is the newest" in sentence
    setattr(live, lost, None)
    assert not [*missing(title, live, "0.20.0")]
