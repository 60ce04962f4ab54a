"""State that users add to a run is restored, or refused by name before it is published."""

from __future__ import annotations

import contextlib
import fractions
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.checkpoints import Saved, assert_refused
from tests.support.engines import Engine, EngineCase, engine_of, inner_of, train
from tests.support.oracle import differences, dump
from tests.support.outcome import captured_log
from tests.support.ranks import Pools

STEPS = 3


def cosine(epoch: int) -> Any:
    """Return a factor as a NumPy number."""
    return np.cos(epoch / 10)


class Ratio:
    """A callable whose attributes a scheduler saves; one of them is not plain data."""

    def __init__(self) -> None:
        self.ratio = fractions.Fraction(1, 3)

    def __call__(self, epoch: int) -> float:
        return float(self.ratio)


class Annealed(torch.optim.SGD):
    """An optimizer with state under a key that is not a parameter; its steps become smaller."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        begin = {"scale": 1.0, "seen": 0, "sums": torch.zeros(2), "last": (None, True)}
        kept: Any = self.state.setdefault("global", begin)  # type: ignore[call-overload]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * kept["scale"])
        kept.update(scale=kept["scale"] * 0.75, seen=kept["seen"] + 1, last=(kept["seen"], False))
        kept["sums"] += kept["seen"]


ANNEALED = f"{Annealed.__module__}.{Annealed.__name__}"


def global_state(setup: EngineCase, folder: str, steps: int) -> tuple[Any, Any, str]:
    """Save after some steps; return the state, and how this and a resumed run continue."""
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint
    from lightning_elastic_zero.errors import ElasticZeroError

    def continue_training(engine: Engine) -> tuple[list[float], str]:
        losses = train(engine, setup, STEPS, 2 * STEPS)
        return losses, repr(dict(inner_of(engine).state["global"]))

    def held_by(engine: Engine) -> str:
        state = inner_of(engine).state
        return repr({key: value for key, value in state.items() if isinstance(key, str)})

    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, steps)
        save_checkpoint(engine, f"{folder}/global.ckpt")
        engine.save_checkpoint(f"{folder}/stock", tag="tag")
        saved = held_by(engine)
        continued = continue_training(engine)
    with engine_of(setup, 1) as engine:
        train(engine, setup, 0, 1)
        load_checkpoint(engine, f"{folder}/global.ckpt")
        restored = held_by(engine)
        resumed = continue_training(engine)
        try:
            load_checkpoint(engine, f"{folder}/stock")
        except ElasticZeroError as error:
            stock = str(error)
        else:
            stock = held_by(engine)
    return (saved, *continued), (restored, *resumed), stock


class FailsToUnpickle(Exception):  # noqa: N818 (it is a value here)
    """An object that can be pickled but not unpickled."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} {other}")


def _schedule(engine: Engine, factor: Any) -> None:
    engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer.optimizer, factor)


def _found(engine: Engine, losses: list[float]) -> dict[str, Any]:
    """Return everything that depends on the scheduler and on the scalar states."""
    inner = engine.optimizer.optimizer
    states = [{k: s[k] for k in ("scale", "count", "flag")} for s in inner.state.values()]
    return {
        "rates": [float(group["lr"]).hex() for group in inner.param_groups],
        "scheduler": json.loads(json.dumps(engine.lr_scheduler.state_dict(), default=float)),
        "states": json.loads(json.dumps(states, default=lambda value: value.item())),
        "scale": float(engine.optimizer.loss_scaler.cur_scale),
        "losses": [loss.hex() for loss in losses],
    }


def numbers_of_numpy(setup: EngineCase, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Save a run with NumPy numbers everywhere; return how it and a resumed run continue."""
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    path = f"{folder}/numbers.ckpt"
    client = {"best": np.float32(0.1), "rates": [np.float64(1) / 3], "seen": {"n": np.int64(3)}}
    client["learned"] = torch.nn.Parameter(torch.tensor(2.0))
    client["leaf"] = [torch.ones(2, requires_grad=True)]
    with engine_of(setup, 0) as engine:
        _schedule(engine, cosine)
        train(engine, setup, 0, STEPS)
        for state in engine.optimizer.optimizer.state.values():
            state.update(scale=np.float32(0.1), count=np.int64(7), flag=np.bool_(True))
        engine.optimizer.loss_scaler.cur_scale = np.float64(2)
        save_checkpoint(engine, path, client)
        continued = _found(engine, train(engine, setup, STEPS, 2 * STEPS))
    with engine_of(setup, 1) as engine:
        _schedule(engine, cosine)
        engine.optimizer.loss_scaler.cur_scale = 8.0  # A fixed scale is restored too.
        read = load_checkpoint(engine, path).client_state
        assert repr(read) == repr(client), read
        resumed = _found(engine, train(engine, setup, STEPS, 2 * STEPS))
        _load_with_another_scaler(engine, path)
    return continued, resumed


def _load_with_another_scaler(engine: Engine, path: str) -> None:
    """Check that a scaler of another class, as in fp16, is not changed."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    from lightning_elastic_zero.api import load_checkpoint

    engine.optimizer.loss_scaler = DynamicLossScaler(
        4.0, 1000, 1.0, 1, consecutive_hysteresis=False
    )
    before = dict(vars(engine.optimizer.loss_scaler))
    load_checkpoint(engine, path)
    assert vars(engine.optimizer.loss_scaler) == before


def refused_saves(setup: EngineCase, folder: str) -> dict[str, str]:
    """Save states that no load could read; return the errors, and the other files in the folder."""
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint
    from lightning_elastic_zero.errors import ElasticZeroError

    found: dict[str, str] = {}
    within: dict[str, Any] = {}
    within["within"] = within

    def attempt(name: str, engine: Engine, client: dict[str, Any]) -> None:
        try:
            save_checkpoint(engine, f"{folder}/{name}.ckpt", client)
        except ElasticZeroError as error:
            found[name] = f"{type(error).__name__}: {error}"

    with engine_of(setup, 0) as engine:
        attempt("within", engine, {"mine": within})
        attempt("unmade", engine, {"callbacks": {"Mine": [FailsToUnpickle(1, 2)]}})
        _schedule(engine, Ratio())
        attempt("scheduler", engine, {})
        with torch.serialization.safe_globals([fractions.Fraction]):
            save_checkpoint(engine, f"{folder}/numbers.ckpt")
            _schedule(engine, ratio := Ratio())
            ratio.ratio *= 2
            load_checkpoint(engine, f"{folder}/numbers.ckpt")
            assert ratio.ratio == fractions.Fraction(1, 3)
        engine.lr_scheduler = None
        engine.module.bn.register_buffer("sparse", torch.eye(2).to_sparse())
        attempt("buffer", engine, {})
        del engine.module.bn.sparse
        train(engine, setup, 0, 1)
        state = inner_of(engine).state
        state["global"] = {"a": [1, FailsToUnpickle(1, 2)]}
        attempt("object", engine, {})
        state["global"] = {"a": [1, engine.global_rank]}
        attempt("differing", engine, {})
        del state["global"]
        name, parameter = next(iter(engine.module.named_parameters()))
        state[parameter] = {"mine": torch.zeros(3)}
        attempt("parameter", engine, {})
        found["parameter"] = found["parameter"].replace(name, "NAME")
        del state[parameter]
        save_checkpoint(engine, f"{folder}/numbers.ckpt")
    remaining = sorted(path.name for path in Path(folder).iterdir() if path.name != "numbers.ckpt")
    return {**found, "left": ", ".join(remaining)}


def reassign_average(engine: Engine) -> None:
    """Reassign buffers under inference mode, as an evaluation may, on the last rank."""
    if engine.global_rank:
        module = engine.module
        with torch.inference_mode():
            module.average = module.average * 2
            module.bn.running_mean = torch.zeros_like(module.bn.running_mean)


def load_after(
    setup: EngineCase,
    folder: str,
    change: Callable[[Engine], None],
    mode: Callable[[], contextlib.AbstractContextManager[Any]],
) -> tuple[dict[str, int], list[float], list[float]]:
    """Load into a changed engine; return its differences two steps later, and all losses.

    Args:
        setup: the setup of both runs.
        folder: the folder of the checkpoint.
        change: applied to the second engine before it loads.
        mode: returns the context in which both the save and the load are called.
    """
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    path = f"{folder}/{setup}.ckpt"
    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, STEPS)
        with mode():
            save_checkpoint(engine, path)
        continued = train(engine, setup, STEPS, STEPS + 2)
        wanted = dump(engine, setup)
    with engine_of(setup, 7) as engine:
        train(engine, setup, 100, 101)
        change(engine)
        with mode():
            load_checkpoint(engine, path)
        resumed = train(engine, setup, STEPS, STEPS + 2)
        found = dump(engine, setup)
    return differences(wanted or {}, found or {}), continued, resumed


def leave(_: Engine) -> None:
    """Change nothing."""


@dataclass(frozen=True)
class LoadingAfter:
    """A picklable load into an engine that was changed."""

    path: str
    change: Callable[[Engine], None]
    unchanged: bool = True

    def __call__(self, engine: Engine) -> None:
        """Change the engine, and load; fail if this changes a weight that must not change."""
        from lightning_elastic_zero.api import load_checkpoint

        self.change(engine)
        before = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        try:
            load_checkpoint(engine, self.path)
        finally:
            for name, parameter in engine.module.named_parameters() if self.unchanged else ():
                assert torch.equal(parameter, before[name]), name


def reassign(layer: str, engine: Engine) -> None:
    if engine.global_rank:
        with torch.inference_mode():
            bias = engine.module.get_parameter(f"{layer}.bias")
            bias.data = bias * 2


def expand_frozen(engine: Engine) -> None:
    """Give all elements of a frozen weight of the last rank one shared value."""
    if engine.global_rank:
        bias = engine.module.frozen.bias
        bias.data = torch.ones(1).expand(bias.shape)


class Stubborn(dict[str, Any]):
    """A parameter group that raises when it is changed."""

    def __setitem__(self, key: str, value: object) -> None:
        raise TypeError(key)


def refuse_hyperparameters(engine: Engine) -> None:
    if engine.global_rank:
        groups = engine.optimizer.optimizer.param_groups
        groups[0] = Stubborn(groups[0])


def leave_buffer_on_meta(engine: Engine) -> None:
    if engine.global_rank:
        engine.module.average = engine.module.average.to("meta")


pytestmark = pytest.mark.engine


@pytest.mark.parametrize("setup", [EngineCase(2, "1", "fp32"), EngineCase(2, "3", "fp32")], ids=str)
def test_numpy_numbers_are_restored(setup: EngineCase, pools: Pools, tmp_path: Path) -> None:
    """NumPy numbers in a schedule, an optimizer state and a loss scale."""
    program = partial(numbers_of_numpy, setup, str(tmp_path))
    for continued, resumed in pools.run(setup.world, program):
        assert resumed == continued
        assert continued["states"][0] == {"scale": 0.10000000149011612, "count": 7, "flag": True}


@pytest.mark.parametrize(
    ("setup", "steps"),
    [
        (EngineCase(2, "3", "bf16", optimizer=ANNEALED), 2),
        (EngineCase(2, "0", optimizer=ANNEALED), 2),
        (EngineCase(2, "0", optimizer=ANNEALED), 0),
        (EngineCase(2, "1", optimizer=ANNEALED), 2),
        (EngineCase(2, "B", "bf16", optimizer=ANNEALED), 2),
    ],
    ids=str,
)
def test_optimizer_state_outside_parameters_is_restored_or_removed(
    setup: EngineCase, steps: int, pools: Pools, tmp_path: Path
) -> None:
    program = partial(global_state, setup, str(tmp_path), steps)
    for continued, resumed, stock in pools.run(setup.world, program):
        assert resumed == continued
        assert ("sums" in continued[0]) == bool(steps)
        if setup.stage:  # DeepSpeed's own files of stage 0 are not read for training.
            assert "state that belongs to no parameter (keys 'global')" in stock


def saved_states(path: str) -> list[str]:
    """Save an entry that differs between ranks, and states of ranks; return the warnings."""
    from lightning_elastic_zero.api import save_checkpoint

    with engine_of(EngineCase(2, "2"), 0) as engine:
        rank = engine.global_rank
        client = {"mine": {"own": [rank, Path("a")], "path": Path("b")}, "path": Path("c")}
        with captured_log("lightning_elastic_zero", logging.WARNING) as messages:
            save_checkpoint(engine, path, client, {"seen": rank, "at": [Path(f"{rank}")]})
    return messages


def loaded_states(setup: EngineCase, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 1) as engine:
        loaded = load_checkpoint(engine, path)
    return loaded.client_state, loaded.rank_state


def states_in_evaluation(case: EngineCase, path: str) -> dict[str, Any]:
    """Load into an engine without an optimizer; return the rank state."""
    import deepspeed

    from lightning_elastic_zero.api import load_checkpoint

    config = case.config()
    engine, *_ = deepspeed.initialize(model=case.model(7), config=config, dist_init_required=False)
    try:
        return load_checkpoint(engine, path).rank_state
    finally:
        engine.destroy()


def test_rank_0s_client_state_serves_all_and_each_rank_gets_its_rank_state(
    pools: Pools, tmp_path: Path
) -> None:
    """On the same number of ranks; one warning names the entry that only rank 0 has as it was."""
    path = str(tmp_path / "a.ckpt")
    (warning,), others = pools.run(2, partial(saved_states, path))
    assert "The trainer's state differs between ranks: mine.own on rank 1. Rank 0's is" in warning
    assert not others
    client = {"mine": {"own": [0, Path("a")], "path": Path("b")}, "path": Path("c")}
    same = pools.run(2, partial(loaded_states, EngineCase(2, "3"), path))
    assert same == [(client, {"seen": rank, "at": [Path(f"{rank}")]}) for rank in range(2)]
    assert pools.run(1, partial(loaded_states, EngineCase(1, "2"), path)) == [(client, {})]
    evaluated = pools.run(2, partial(states_in_evaluation, EngineCase(2, "3"), path))
    assert evaluated == [own for _, own in same]


def test_state_that_no_load_could_read_is_refused_at_save(pools: Pools, tmp_path: Path) -> None:
    setup = EngineCase(2, "2")
    for found in pools.run(setup.world, partial(refused_saves, setup, str(tmp_path))):
        assert "the trainer's state has 'mine', which contains itself" in found["within"]
        assert (
            "callbacks.Mine.0, a FailsToUnpickle that can be pickled but not unpickled"
            in found["unmade"]
        )
        for name, part, reason in (
            ("scheduler", "the scheduler's state", "Fraction"),
            ("buffer", "the module's buffers", "is not a plain tensor"),
            ("object", "the optimizer's state of no parameter", "FailsToUnpickle"),
        ):
            assert re.search(f"{part}: saved state has to be plain .*{reason}", found[name])
        assert "keeps state under the key 'global', which differs" in found["differing"]
        assert "AdamW keeps ['mine'] for NAME, which it does not step" in found["parameter"]
        assert found["left"] == ""


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("setup", "change", "mode"),
    [
        (EngineCase(2, "0"), leave, torch.inference_mode),
        (EngineCase(2, "2", "bf16"), leave, torch.inference_mode),
        (EngineCase(2, "3", sub_group=700), leave, torch.inference_mode),
        (EngineCase(2, "2"), reassign_average, contextlib.nullcontext),
    ],
    ids=["0", "2", "3", "buffers made in it"],
)
def test_training_continues_after_a_load_under_inference_mode_or_into_buffers_made_in_it(
    setup: EngineCase, change: Any, mode: Any, pools: Pools, tmp_path: Path
) -> None:
    program = partial(load_after, setup, str(tmp_path), change, mode)
    for differing, continued, resumed in pools.run(setup.world, program):
        assert resumed == continued
        assert not differing


@pytest.mark.essential
@pytest.mark.parametrize("setup", [EngineCase(2, "1"), EngineCase(2, "3")], ids=str)
def test_a_commit_that_fails_on_one_rank_raises_on_all(
    setup: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """The error says that the engine must no longer be used."""
    load = LoadingAfter(saved_by(setup).path, refuse_hyperparameters, unchanged=False)
    message = "now has a mixture of states: TypeError: "
    assert_refused(pools.run, setup, load, message, error="RanksError", look=False)


@pytest.mark.essential
@pytest.mark.parametrize(
    ("zero", "change", "message"),
    [
        ("1", expand_frozen, "frozen weights that cannot be"),
        ("1", leave_buffer_on_meta, "buffers that cannot be"),
        ("1", partial(reassign, "frozen"), "neither changed nor trained: frozen.bias."),
        ("0", partial(reassign, "b"), "neither changed nor trained: b.bias."),
    ],
    ids=["expanded", "on meta", "frozen", "trained"],
)
def test_all_ranks_refuse_a_target_that_one_cannot_write(
    zero: str,
    change: Callable[[Engine], None],
    message: str,
    pools: Pools,
    saved_by: Callable[..., Saved],
) -> None:
    setup = EngineCase(2, zero)
    load = LoadingAfter(saved_by(setup).path, change)
    assert_refused(pools.run, setup, load, message, look=False)
