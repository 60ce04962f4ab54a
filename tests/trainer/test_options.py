"""Options of the strategy and of the trainer, as a resumed run meets them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine._pool import Pools
from tests.trainer import _optional
from tests.trainer._fitting import Plan, error_of, fit, listing

pytestmark = pytest.mark.engine


def all_of(worlds: Pools, world: int, plan: Plan) -> list[dict[str, Any]]:
    """Fit on a world; give what each rank saw."""
    return worlds.run(world, partial(fit, plan))


def test_a_new_rate_stays(worlds: Pools, tmp_path: Path) -> None:
    """With load_hyperparameters=False the configured rate is kept, and the schedule's place."""
    root = str(tmp_path)
    all_of(worlds, 2, Plan(root, 2))
    again = Plan(root, 2, epochs=2, ckpt_path="last", lr=0.5)
    again.strategy["load_hyperparameters"] = False
    for seen in all_of(worlds, 1, again):
        assert seen["lrs"] == [0.5, 1.0]
        assert seen["lrs at end"] == [0.25, 0.5]
        assert seen["step"] == 4


def test_frozen_weights_may_stay_out(worlds: Pools, tmp_path: Path) -> None:
    """exclude_frozen_parameters: the rest comes back, the frozen stay the model's own."""
    root = str(tmp_path)
    options = {"exclude_frozen_parameters": True}
    first = all_of(worlds, 2, Plan(root, 3, strategy=options))[0]["end"]
    again = Plan(root, 1, epochs=2, ckpt_path="last", seed=3)
    for seen in all_of(worlds, 3, again):
        differ = {name for name, value in seen["start"].items() if value != first[name]}
        assert differ == {"frozen.weight", "frozen.bias"}


def test_precision_may_change(worlds: Pools, tmp_path: Path) -> None:
    """A run in bf16 goes on in fp32 and the other way round; fp16 is refused by name on CPU."""
    root = str(tmp_path)
    all_of(worlds, 2, Plan(root, 3, trainer={"precision": "bf16-true"}))
    again = Plan(root, 2, epochs=2, ckpt_path="last", trainer={"precision": "32-true"})
    assert all_of(worlds, 1, again)[0]["step"] == 4
    mixed = Plan(root, 1, epochs=3, ckpt_path="last", trainer={"precision": "bf16-mixed"})
    assert all_of(worlds, 3, mixed)[0]["step"] == 6
    half = Plan(root, 1, epochs=4, ckpt_path="last", trainer={"precision": "16-mixed"})
    for message in worlds.run(2, partial(error_of, half)):
        assert message.startswith("ValueError: Type fp16 is not supported")


def test_elastic_flag_of_a_user_config(worlds: Pools, tmp_path: Path) -> None:
    """elastic_checkpoint with ZeRO-3 is taken, where DeepSpeed itself raises."""
    root = str(tmp_path)
    config = {"zero_optimization": {"stage": 3, "elastic_checkpoint": True}}
    plan = Plan(root, 3, strategy={"config": config | {"zero_allow_untested_optimizer": True}})
    assert all_of(worlds, 2, plan)[0]["step"] == 2
    assert listing(root)["last.ckpt"]


def test_rounded_masters_on_demand(worlds: Pools, tmp_path: Path) -> None:
    """load_from_fp32_weights: false in a user's config gives masters that equal the weights."""
    root, trainer = str(tmp_path), {"precision": "bf16-true"}
    all_of(worlds, 2, Plan(root, 2, trainer=trainer))
    saved = (tmp_path / "last.ckpt").rename(tmp_path / "saved.ckpt")
    for keep, rounded in ((True, False), (False, True)):
        zero = {"stage": 1, "load_from_fp32_weights": keep}
        config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
        plan = Plan(
            root,
            1,
            epochs=2,
            ckpt_path=str(saved),
            strategy={"config": config},
            trainer=trainer,
        )
        for values in worlds.run(3, partial(_optional.masters_and_weights, plan)):
            assert all(master == weight for master, weight in values) is rounded


def test_a_fresh_optimizer_on_demand(worlds: Pools, tmp_path: Path) -> None:
    """load_optimizer_state=False goes on at the saved step and weights, without moments."""
    root = str(tmp_path)
    first = all_of(worlds, 3, Plan(root, 3))[0]
    again = Plan(root, 2, epochs=2, ckpt_path="last", strategy={"load_optimizer_state": False})
    for seen in all_of(worlds, 2, again):
        assert seen["start"] == first["end"]
        assert (seen["step"], seen["epoch"]) == (4, 2)
        masters = {k: v for k, v in first["optimizer at end"].items() if k.endswith("fp32")}
        assert seen["optimizer"] == masters


def test_what_a_loose_load_forgives(worlds: Pools, tmp_path: Path) -> None:
    """strict_loading=False forgives buffers and frozen weights that only one side has."""
    root = str(tmp_path)
    first = all_of(worlds, 2, Plan(root, 1))[0]
    more = Plan(root, 3, epochs=2, ckpt_path="last", more=True)
    for message in worlds.run(3, partial(error_of, more)):
        assert message.startswith("CheckpointMismatchError")
        for name in ("extra.weight", "extra.bias", "mask"):
            assert name in message
    loose = Plan(root, 3, epochs=2, ckpt_path="last", more=True, strict=False)
    for seen in all_of(worlds, 3, loose):
        kept = {name: seen["start"][name] for name in first["end"]}
        assert kept == first["end"]
        assert seen["step"] == 4
    fewer = Plan(root, 2, epochs=3, ckpt_path="last")
    for message in worlds.run(2, partial(error_of, fewer)):
        assert message.startswith("CheckpointMismatchError")
        assert "extra.weight" in message
    fewer = Plan(root, 2, epochs=3, ckpt_path="last", strict=False)
    assert all_of(worlds, 2, fewer)[0]["step"] == 6


def test_no_state_dicts_are_built(worlds: Pools, tmp_path: Path) -> None:
    """A save asks neither the module nor the optimizer for a state dict, and is profiled."""
    for seen in worlds.run(2, partial(_optional.save_with_state_dicts_forbidden, str(tmp_path))):
        assert seen["step"] == 2
        assert "save_checkpoint" in seen["profiled"]
    assert listing(str(tmp_path))["last.ckpt"]


def test_own_objects_come_back_with_leave(worlds: Pools, tmp_path: Path) -> None:
    """Plain and harmless hyperparameters always come back; others when allow_pickle=True."""
    root = str(tmp_path)
    worlds.run(2, partial(_optional.fit_with_objects, root, "harmless", False))
    for seen in worlds.run(3, partial(_optional.fit_with_objects, root, "harmless", False)):
        assert seen == "the same"
    worlds.run(2, partial(_optional.fit_with_objects, root, "odd", False))
    for seen in worlds.run(1, partial(_optional.fit_with_objects, root, "odd", False)):
        assert seen.startswith("UnsupportedError")
        assert "hyper_parameters" in seen
        assert "allow_pickle=True" in seen
    for seen in worlds.run(3, partial(_optional.fit_with_objects, root, "odd", True)):
        assert seen == "the same"


def test_what_cannot_be_pickled(worlds: Pools, tmp_path: Path) -> None:
    """It fails the save on all ranks, and says where in the trainer's state it sits."""
    for message in worlds.run(2, partial(_optional.fit_with_lambda, str(tmp_path))):
        assert message.startswith("SaveError")
        assert "callbacks.Unpicklable.of_mine" in message
    assert not any(listing(str(tmp_path)).values())
