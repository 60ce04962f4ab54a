"""Weights beside the masters: averages, what hooks take out, and what is there after a fit."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.support.fits import FitSpec, RegressionNet, error_of, fit
from tests.support.ranks import Pools
from tests.trainer import _module_weights

pytestmark = pytest.mark.engine

BEST = {"monitor": "val_loss", "save_top_k": 1, "filename": "best"}


@pytest.mark.parametrize("options", [{}, {"save_weights_only": True}], ids=["whole", "weights"])
def test_the_average_is_evaluated(options: dict[str, bool], worlds: Pools, tmp_path: Path) -> None:
    """Any process, stage and number of devices finds the value that a checkpoint was chosen for."""
    plan = FitSpec(str(tmp_path), 2, epochs=3, checkpoint={**BEST, **options}, hidden=24)
    fitted = worlds.run(2, partial(_module_weights.fit_averaged, plan))[0]
    assert fitted["in this process"] == pytest.approx(fitted["loss"], rel=1e-6)
    for world, stage, with_callback in ((2, 1, True), (1, 3, True), (3, 3, False), (3, 2, False)):
        new = FitSpec(str(tmp_path), stage, ckpt_path=fitted["best"], seed=world, hidden=24)
        for found in worlds.run(
            world, partial(_module_weights.evaluate_averaged, new, with_callback)
        ):
            print(world, stage, fitted["loss"], found)
            assert found["validate"] == pytest.approx(fitted["loss"], rel=1e-5)
            assert found["test"] == pytest.approx(fitted["loss"], rel=1e-5)
        if world == 1:
            assert found["predict"] == pytest.approx(fitted["loss"], rel=1e-5)


@pytest.mark.long
def test_an_average_can_begin_later(worlds: Pools, tmp_path: Path) -> None:
    """A run that was saved without an average goes on with one."""
    root = str(tmp_path)
    worlds.run(2, partial(fit, FitSpec(root, 2, checkpoint=BEST, hidden=24)))
    plan = FitSpec(
        f"{root}/on", 2, epochs=2, ckpt_path=f"{root}/best.ckpt", checkpoint=BEST, hidden=24
    )
    for found in worlds.run(1, partial(_module_weights.fit_averaged, plan)):
        assert found["in this process"] == pytest.approx(found["loss"], rel=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("verb", ["test", "predict"])
def test_a_save_after_an_evaluation(verb: str, stage: int, worlds: Pools, tmp_path: Path) -> None:
    """The training state is still there: a run goes on from it as from a save before."""
    for found in worlds.run(
        2, partial(_module_weights.save_after, FitSpec(str(tmp_path), stage), verb)
    ):
        assert found["before"]["start"] == found["fitted"]
        assert found["after"] == found["before"]
    of_saves = [
        json.loads((tmp_path / f"{name}.ckpt/manifest.json").read_text())["progress"]
        for name in ("before", "after")
    ]
    assert of_saves[0] == of_saves[1]
    assert of_saves[0]["sampler"]["consumed"]


@pytest.mark.parametrize(("stage", "how"), [(2, "edited"), (2, "another"), (3, "another")])
def test_a_save_after_the_module_has_changed(
    stage: int, how: str, worlds: Pools, tmp_path: Path
) -> None:
    """Written is what was evaluated last, and never the weights of another module."""
    program = partial(
        _module_weights.save_after_a_change,
        FitSpec(str(tmp_path), stage),
        how,
        str(tmp_path / "a.ckpt"),
    )
    found = worlds.run(2, program)
    assert [len(of["said"]) for of in found] == [1, 0]
    # Buffers of a norm are of rank 0.
    assert found[0]["fitted"] != found[0]["tested"] == found[0]["loaded"]


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
def test_a_save_without_a_fit(stage: int, worlds: Pools, tmp_path: Path) -> None:
    """What an evaluation holds is saved as weights, which any run can begin with."""
    root, path = str(tmp_path), str(tmp_path / "alone.ckpt")
    program = partial(
        _module_weights.save_without_fit, FitSpec(root, stage, seed=3), "validate", path
    )
    saved = worlds.run(2, program)
    assert ["nothing was trained here" in "".join(of["said"]) for of in saved] == [True, False]
    manifest = json.loads((tmp_path / "alone.ckpt" / "manifest.json").read_text())
    assert manifest["weights_only"]
    shapes = {p["name"]: p["shape"] for p in manifest["parameters"]}
    assert shapes.items() <= worlds.run(1, partial(_module_weights.recovered, path))[0].items()
    # A run begins with it, and its own checkpoint is evaluated and saved as weights again.
    begun = FitSpec(root, 2, seed=5, ckpt_path=path, strategy={"load_optimizer_state": False})
    runs = worlds.run(3, partial(fit, begun))
    assert all(run["start"] == saved[0]["weights"] and run["step"] == 2 for run in runs)
    assert (
        "has no optimizer state" in worlds.run(1, partial(error_of, replace(begun, strategy={})))[0]
    )
    again = FitSpec(root, 4 - stage, seed=6, ckpt_path=f"{root}/last.ckpt")
    evaluated = partial(_module_weights.save_without_fit, again, "predict", f"{root}/again.ckpt")
    weights = worlds.run(2, evaluated)[0]["weights"]
    assert weights == runs[0]["end"]
    begun = replace(begun, root=f"{root}/on", ckpt_path=f"{root}/again.ckpt")
    assert worlds.run(1, partial(fit, begun))[0]["start"] == weights


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("thaw", [True, False], ids=["unfrozen", "frozen"])
def test_what_is_unfrozen_or_frozen_later_is_said(
    thaw: bool, stage: int, worlds: Pools, tmp_path: Path
) -> None:
    """Once in each epoch, by name, on the first rank: DeepSpeed does not follow."""
    plan = FitSpec(str(tmp_path), stage, epochs=3)
    first, second = worlds.run(2, partial(_module_weights.switched, plan, thaw))
    word = "unfrozen since the fit began, and not trained" if thaw else "frozen since the fit began"
    assert [
        text.startswith(f"Epoch {n}: parameters {word}")
        for n, text in zip((1, 2), first["said"], strict=True)
    ] == [True, True]
    assert all("last.weight, last.bias" in text and "lr=0" in text for text in first["said"])
    assert "first" not in first["said"][0].partition("Or start")[0].partition("To train")[0]
    assert not second["said"]
    changes = len(set(first["weights"]))
    assert changes == (1 if thaw else len(first["weights"])), first["weights"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "target", "of"),
    [
        (2, 3, _module_weights.Pruning),
        (2, 3, _module_weights.PruningAndAdding),
        (3, 1, _module_weights.PruningAndAdding),
    ],
)
def test_weights_that_a_hook_takes_out(
    stage: int, target: int, of: type[RegressionNet], worlds: Pools, tmp_path: Path
) -> None:
    """Frozen weights and buffers are not written; who loads the checkpoint keeps its own.

    Also where the hook puts an entry of its own into the weights.
    """
    root = str(tmp_path)
    program = partial(_module_weights.pruned, of=of)
    ends = worlds.run(2, partial(program, FitSpec(root, stage)))
    manifest = json.loads((tmp_path / "last.ckpt" / "manifest.json").read_text())
    assert manifest["excluded"] == list(_module_weights.Pruning.took)
    assert "norm.running_mean" not in manifest["module_buffers"]
    worlds.run(2, partial(fit, FitSpec(f"{root}/whole", stage)))
    assert (
        _module_weights.sizes(f"{root}/last.ckpt")
        < _module_weights.sizes(f"{root}/whole/last.ckpt") - 31 * 31 * 4
    )
    for verb in ("fit", "validate"):
        plan = FitSpec(f"{root}/{verb}", target, epochs=2, seed=4, ckpt_path=f"{root}/last.ckpt")
        found = worlds.run(1, partial(program, plan, verb))[0]
        loaded = found["start"] if verb == "fit" else found["end"]
        same = {name for name, digest in loaded.items() if digest == ends[0]["end"][name]}
        assert loaded.keys() - same == set(_module_weights.Pruning.took)


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_that_a_hook_renames(stage: int, worlds: Pools, tmp_path: Path) -> None:
    """Nothing is left out: they are saved under their own names, once."""
    root = str(tmp_path)
    program = partial(_module_weights.pruned, of=_module_weights.Renaming)
    ends = worlds.run(2, partial(program, FitSpec(root, stage)))
    manifest = json.loads((tmp_path / "last.ckpt" / "manifest.json").read_text())
    assert not manifest["excluded"]
    worlds.run(2, partial(fit, FitSpec(f"{root}/whole", stage)))
    sizes = [_module_weights.sizes(f"{root}/{name}last.ckpt") for name in ("", "whole/")]
    assert sizes[0] <= sizes[1]
    plan = FitSpec(f"{root}/on", stage, epochs=2, seed=4, ckpt_path=f"{root}/last.ckpt")
    assert worlds.run(1, partial(program, plan))[0]["start"] == ends[0]["end"]
