"""Saving behind training: what is written, when it is there, and who hears that it failed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.engine._pool import Pools
from tests.trainer._background import Run, strategy_of

pytestmark = pytest.mark.engine


def save_in_the_midst(run: Run, step: int = 2) -> dict[str, Any]:
    """Save after a step, train to the end, and only then let the writer write."""
    seen: dict[str, Any] = {}
    target = Path(run.root) / "a.ckpt"

    def look(trainer: pl.Trainer) -> None:
        seen["there at the end"] = target.exists()
        run.gate.touch()

    run.deeds = {step: lambda trainer: trainer.save_checkpoint(str(target)), -1: look}
    trainer, net, data, director = run.make()
    trainer.fit(net, data)
    figures = strategy_of(trainer).last_save
    assert figures is not None, (director.errors, director.causes)
    return {**seen, "errors": director.errors, "figures": figures}


def files_of(checkpoint: Path) -> dict[str, Any]:
    """Read all that was written, but for what tells one save from another."""
    found: dict[str, Any] = {}
    for file in sorted(checkpoint.rglob("*.pt")):
        found[file.name] = _without_ids(torch.load(file, weights_only=True))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    return found | {
        "manifest": {k: v for k, v in manifest.items() if k not in ("save_id", "files")}
    }


def _without_ids(tree: Any) -> Any:  # noqa: ANN401 - what a file holds
    if isinstance(tree, torch.Tensor):
        return (
            str(tree.dtype),
            tuple(tree.shape),
            tree.contiguous().view(-1).view(torch.uint8).tolist(),
        )
    if isinstance(tree, dict):
        return {k: _without_ids(v) for k, v in tree.items() if k not in ("save_id", "pickle")}
    if isinstance(tree, (list, tuple)):
        return [_without_ids(v) for v in tree]
    return tree


@pytest.mark.parametrize(("stage", "precision"), [(1, "32-true"), (2, "bf16-true"), (3, "32-true")])
def test_it_equals_a_blocking_save(
    stage: int, precision: str, pools: Pools, tmp_path: Path
) -> None:
    """What is written while training goes on is the state at the save, bit for bit."""
    blocking = Run(str(tmp_path / "blocking"), stage, async_save=False, precision=precision)
    behind = Run(str(tmp_path / "behind"), stage, precision=precision)
    for run in (blocking, behind):
        run.gated = True
        pools.run(2, partial(save_in_the_midst, run))
    expected = files_of(Path(blocking.root) / "a.ckpt")
    found = files_of(Path(behind.root) / "a.ckpt")
    assert found.keys() == expected.keys()
    for name, tree in expected.items():
        assert found[name] == tree, name


def test_training_does_not_wait(pools: Pools, tmp_path: Path) -> None:
    """While the writer is held, training goes on to its end, and nothing is published."""
    for seen in pools.run(2, partial(save_in_the_midst, Run(str(tmp_path), gated=True))):
        assert not seen["there at the end"]
        assert seen["figures"].waited_s < seen["figures"].seconds
    assert (tmp_path / "a.ckpt" / "manifest.json").is_file()
