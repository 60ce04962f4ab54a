"""Unsupported configurations are refused at setup, by name and with a remedy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.processes import HANG_TIMEOUT_S
from tests.support.ranks import ForkServer, Pools
from tests.trainer._refused_engines import BY_SAVE, said_by_save
from tests.trainer._refused_setups import (
    BY_TRAINER,
    EVALUATED,
    EVALUATION_HEADING,
    HEADING,
    NEWER,
    OF_OTHER_PACKAGES,
    Refused,
    said_of_all,
)


def refuse_all(
    worlds: Pools, folder: Path, cases: Mapping[str, Refused], heading: str = HEADING
) -> None:
    """Fail unless each rank is told the sentence alone, before a step, and nothing is written."""
    for said in worlds.run(2, partial(said_of_all, str(folder), cases), HANG_TIMEOUT_S):
        wanted = {
            name: f"{heading}  - {case.sentence} (after 0 steps)" for name, case in cases.items()
        }
        assert said == wanted
    assert not list(folder.iterdir())


@pytest.mark.engine
def test_a_trainer_is_refused(worlds: Pools, tmp_path: Path) -> None:
    """In setup, whatever the installed release of DeepSpeed has of it, by one sentence."""
    refuse_all(worlds, tmp_path, BY_TRAINER)


@pytest.mark.engine
def test_an_evaluation_is_refused(worlds: Pools, tmp_path: Path) -> None:
    """Where weights alone cannot be read either: with the same sentences."""
    refuse_all(worlds, tmp_path, EVALUATED, EVALUATION_HEADING)


@pytest.mark.engine
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch's Muon came with 2.9")
def test_newer_optimizers_are_refused(worlds: Pools, tmp_path: Path) -> None:
    """As above, where torch has them."""
    refuse_all(worlds, tmp_path, NEWER)


@pytest.mark.engine
@pytest.mark.cases(2)
@pytest.mark.parametrize("package", OF_OTHER_PACKAGES)
def test_optimizers_with_few_bits_are_refused(package: str, worlds: Pools, tmp_path: Path) -> None:
    """By name, with the package that they are of, where it is installed."""
    pytest.importorskip(package)
    refuse_all(worlds, tmp_path, OF_OTHER_PACKAGES[package])


@pytest.mark.engine
@pytest.mark.cases(2)
@pytest.mark.parametrize("case", BY_SAVE)
def test_an_engine_is_refused(case: str, fork_server: ForkServer, tmp_path: Path) -> None:
    """At its first save, on each rank, and nothing is written: no Trainer comes that far."""
    own = Pools(fork_server)  # DeepSpeed keeps its groups for the process.
    try:
        messages = own.run(2, partial(said_by_save, case, str(tmp_path / "never.ckpt")))
    finally:
        own.close()
    reasons = "".join(f"\n  - {reason}" for reason in BY_SAVE[case][1])
    for message in messages:
        heading, _, found = message.partition(":\n")
        assert heading.startswith("UnsupportedError: step 'save: look at the engine at step 0'")
        assert heading.endswith("lightning_elastic_zero cannot save and resume this run")
        assert f"\n{found}" == reasons
    assert not list(tmp_path.iterdir())
