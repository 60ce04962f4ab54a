"""ModelCheckpoint and ckpt_path with a folder on nodes, which lose their memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.fits import Data, FitSpec, RegressionNet, WeightRecorder, fit
from tests.support.nodes import Nodes, needs_mounts
from tests.support.outcome import captured_log, error_text
from tests.support.ranks import ForkServer

EACH_STEP = {
    "every_n_train_steps": 1,
    "filename": "{step}",
    "save_top_k": 2,
    "monitor": "step",
    "mode": "max",
    "save_last": "link",
}
"""Options of the ``ModelCheckpoint`` on nodes, which saves after each of two steps of an epoch."""


@pytest.fixture
def nodes(tmp_path: Path, fork_server: ForkServer) -> Nodes:
    needs_mounts()
    return Nodes(tmp_path, fork_server)


@dataclass(frozen=True)
class TwoFolders(FitSpec):
    """A fit that also saves into a folder that all nodes share."""

    shared: str = ""
    every: int = 2

    def make(self) -> tuple[pl.Trainer, RegressionNet, Data, WeightRecorder]:
        trainer, *others = super().make()
        shared = ModelCheckpoint(
            self.shared, filename="{step}", every_n_train_steps=self.every, save_last="link"
        )
        trainer.callbacks.append(shared)  # type: ignore[attr-defined]
        return (trainer, *others)  # type: ignore[return-value]


def names(nodes: Nodes, node: int) -> list[str]:
    return sorted(path.name for path in nodes.path(node).iterdir() if path.name[0] != ".")


@pytest.mark.essential
@pytest.mark.engine
@pytest.mark.parametrize("async_save", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_lost_node_costs_no_step(nodes: Nodes, *, async_save: bool) -> None:
    """Also rank 0's: the run ends as one that was not interrupted, and old saves free all nodes."""
    options = {"async_save": async_save}
    plan = FitSpec(nodes.url, checkpoint=EACH_STEP, strategy=options)
    whole = replace(plan, root=str(nodes.root / "whole"), epochs=2)
    with nodes.world(0, 1) as run:
        expected = run(partial(fit, whole))[0]
        first = run(partial(fit, plan))[0]
    assert names(nodes, 0) == names(nodes, 1) == ["last.ckpt", "step=1.ckpt", "step=2.ckpt"]
    nodes.lose(0)
    resumed = replace(plan, epochs=2, ckpt_path="last", seed=1)
    with nodes.world(2, 1) as run:
        second = run(partial(fit, resumed))[0]
    assert second["start"] == first["end"]
    assert second["end"] == expected["end"]
    assert names(nodes, 1) == names(nodes, 2) == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
    nodes.lose(2)
    with nodes.world(1) as run:
        third = run(partial(fit, replace(resumed, epochs=3)))[0]
    assert third["start"] == second["end"]


def fit_with_log(plan: FitSpec) -> tuple[str, dict[str, Any], str]:
    """Return the error, the result and the warnings of a fit."""
    result: dict[str, Any] = {}
    with captured_log("lightning_elastic_zero", logging.WARNING) as log:
        error = error_text(lambda: result.update(fit(plan)))
    return error, result, "\n".join(log)


@pytest.mark.essential
@pytest.mark.engine
def test_missing_nodes_are_named(nodes: Nodes) -> None:
    """Two neighbours of three are lost: the shared checkpoint is taken, and without it none."""
    shared = str(nodes.root / "shared")
    plan = TwoFolders(nodes.url, epochs=2, checkpoint=EACH_STEP, shared=shared, every=3)
    with nodes.world(0, 1, 2) as run:
        run(partial(fit, plan))
    nodes.lose(1, 2)
    alone = FitSpec(nodes.url, checkpoint=EACH_STEP, ckpt_path="last", epochs=3)
    with nodes.world(0, 1) as run:
        for error, _, _ in run(partial(fit_with_log, alone)):
            assert error.startswith("CheckpointCorruptedError: ")
            assert "no checkpoint is complete. " in error
            assert f"{nodes.url}/step=4.ckpt is incomplete" in error
            assert "missing: disk-1 (now with a new folder), disk-2" in error
        resumed = replace(plan, ckpt_path="last", epochs=3)
        (error, result, log), *_ = run(partial(fit_with_log, resumed))
        assert not error
        assert result["step"] == 6
        assert "step=4.ckpt is incomplete: " in log
        assert f"Resume from {shared}/step=3.ckpt." in log
        assert run(partial(fit_with_log, replace(alone, epochs=4)))[0][1]["step"] == 8
