"""The state of any optimizer is restored, including torchao's and bitsandbytes' if installed."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import (
    Loading,
    Saved,
    Saving,
    assert_continues,
    assert_refused,
    assert_restored,
    found_after_load,
    load,
)
from tests.support.engines import (
    DEEPSPEEDS,
    ODD_SHAPES,
    Engine,
    EngineCase,
    engine_of,
    inner_of,
    train,
)
from tests.support.outcome import captured_log, error_text
from tests.support.ranks import ForkServer, Pools, skip_without

pytestmark = pytest.mark.engine

RUNS = {
    "2 to 3": (EngineCase(2, "2"), EngineCase(3, "3", sub_group=700)),
    "3 to 1": (EngineCase(3, "3", "bf16"), EngineCase(1, "1", "bf16")),
    "0 to 2": (EngineCase(3, "0"), EngineCase(2, "2")),
    "3 to 0": (EngineCase(2, "3"), EngineCase(3, "0")),
    "0 to 0": (EngineCase(2, "0", "bf16"), EngineCase(3, "0", "bf16")),
}

STATES = {
    "Adam": {"exp_avg", "exp_avg_sq"},
    "AMSGrad": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "SGD": set(),
    "Momentum": {"momentum_buffer"},
    "Adagrad": {"sum"},
    "RMSprop": {"square_avg", "momentum_buffer", "grad_avg"},
    "NAdam": {"exp_avg", "exp_avg_sq"},
    "RAdam": {"exp_avg", "exp_avg_sq"},
    "Adamax": {"exp_avg", "exp_inf"},
    "Adadelta": {"square_avg", "acc_delta"},
    "Adafactor": {"variance"},
    "ASGD": {"ax"},
    "Rprop": {"prev", "step_size"},
    "fused": {"exp_avg", "exp_avg_sq"},
    "foreach": {"exp_avg", "exp_avg_sq"},
    "fused SGD": {"momentum_buffer"},
    "CPUAdam": {"exp_avg", "exp_avg_sq"},
    "FusedAdam": {"exp_avg", "exp_avg_sq"},
    "CPULion": {"exp_avg"},
    "CPUAdagrad": {"exp_avg_sq"},
}
"""The element-wise states of each optimizer. Other tests use AdamW."""

COMPILED_FIRST = {"CPULion": {"exp_avg", "exp_avg_sq"}, "CPUAdagrad": {"exp_avg_sq"}}
"""Optimizers whose operators ``make`` does not compile."""


def state_kinds(saved: Saved) -> set[str]:
    """Return the kinds of optimizer state that the oracle found."""
    kinds = {key.split("/")[0] for key in saved.dump()}
    return kinds - {"master", "weight", "frozen", "buffer", "group", "counter", "scaler", "scalar"}


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        pytest.param(name, runs, id=f"{name}-{which}")
        for name in STATES
        for which, runs in RUNS.items()
        # In stage 0, its states are factors of matrices, which are refused.
        if not (name == "Adafactor" and "0" in which)
    ],
)
def test_every_state_is_restored_on_another_world_and_stage(
    name: str, runs: tuple[EngineCase, EngineCase], pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    # Adagrad makes states of frozen weights, too.
    grouping = "every" if name == "Adagrad" else "two"
    options: dict[str, Any] = {"optimizer": name, "grouping": grouping}
    if name in DEEPSPEEDS:
        skip_without(DEEPSPEEDS[name][2], pools)
    offload = name in DEEPSPEEDS and name != "FusedAdam"
    source, target = (replace(run, offload=offload and run.zero != "0", **options) for run in runs)
    saved = saved_by(source)
    assert state_kinds(saved) >= STATES[name]
    assert_restored(pools.run, target, saved, steps_before=1)


@pytest.mark.parametrize(
    "target",
    [
        EngineCase(2, "3", optimizer="FusedAdam", sub_group=700),
        pytest.param(EngineCase(2, "0"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_fused_adam_resumes_the_count_of_each_group(
    target: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """In stage 0, it counts on the last parameter of a group only."""
    skip_without("FusedAdamBuilder", pools)
    saved = saved_by(EngineCase(3, "0", optimizer="FusedAdam"))
    steps = {value for key, value in saved.dump().items() if key.startswith("scalar/step/")}
    assert len(steps) == 1
    assert steps != {"0"}
    verdict = pools.run(target.world, partial(load, target, saved, steps_before=1))[0]
    assert verdict is not None
    if target.optimizer == "FusedAdam":
        verdict.assert_same()


@pytest.mark.long
@pytest.mark.parametrize("name", COMPILED_FIRST)
def test_every_state_of_a_cpu_optimizer_is_restored(
    name: str, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """Including from memory that is not pinned."""
    skip_without(f"{name}Builder", pools)
    grouping = "one" if name == "CPUAdagrad" else "two"
    for runs in RUNS.values():
        source, target = (
            replace(run, optimizer=name, offload=True, pinned=run.world == 3, grouping=grouping)
            for run in runs
        )
        saved = saved_by(source)
        assert state_kinds(saved) == COMPILED_FIRST[name]
        assert_restored(pools.run, target, saved, steps_before=1)


def test_adagrad_without_saved_state_is_reset_to_its_start(
    pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """Adagrad creates its state in its constructor."""
    source, target = (replace(run, optimizer="Adagrad", grouping="one") for run in RUNS["3 to 1"])
    options = {"load_optimizer_state": False}
    program = partial(found_after_load, target, saved_by(source), options, steps_before=1)
    found = pools.run(target.world, program)[0]
    assert found is not None
    before, after = found
    sums = [key for key in after if key.startswith("sum/")]
    assert sums
    assert not all(bool((before[key] == 0.25).all()) for key in sums)
    assert all(bool((after[key] == 0.25).all()) for key in sums)
    assert {v for k, v in after.items() if k.startswith("scalar/step/")} == {"tensor(0.)"}


class Wrapping(torch.optim.Optimizer):
    """An optimizer that steps another one, as ``Lookahead`` of several packages does."""

    def __init__(self, params: Any, lr: float) -> None:
        self.base = torch.optim.AdamW(params, lr=lr)
        self.param_groups, self.defaults = self.base.param_groups, self.base.defaults
        self.state = defaultdict(dict)
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class Counting(torch.optim.SGD):
    """An optimizer with a counter of its own in ``state_dict``."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "total_step": 3}


WRAPPING, COUNTING = (f"{cls.__module__}.{cls.__name__}" for cls in (Wrapping, Counting))


@pytest.mark.parametrize(
    ("setup", "names"),
    [
        (EngineCase(2, "0", optimizer=WRAPPING), ("Wrapping", "keeps state in base")),
        (EngineCase(2, "2", optimizer=COUNTING), ("Counting", "keeps state in total_step")),
        (EngineCase(2, "1", optimizer="MatrixState"), ("'factors'", "(2, 3)", "OddState")),
        (EngineCase(3, "2", optimizer="ShortState"), ("'factors'", "(5,)", "OddState")),
        (EngineCase(2, "3", optimizer="MatrixState"), ("'factors'", "(2, 3)", "OddState")),
        (EngineCase(2, "2", optimizer="QuantizedState"), ("'factors'", "Quantized", "OddState")),
        (EngineCase(2, "2", optimizer="LBFGS"), ("LBFGS", "closure")),
        (EngineCase(3, "3", optimizer="SparseAdam"), ("SparseAdam", "sparse gradients")),
        (
            EngineCase(3, "0", optimizer="Adafactor"),
            ("Adafactor", "stage 0", "factors of each matrix"),
        ),
        (EngineCase(2, "2", optimizer="Adagrad"), ("Adagrad", "2 parameter groups", "one group")),
        (EngineCase(2, "3", optimizer="Adagrad"), ("Adagrad", "2 parameter groups", "one group")),
    ],
    ids=str,
)
def test_a_state_without_a_rule_is_refused_by_name_at_save(
    setup: EngineCase, names: tuple[str, ...], pools: Pools, tmp_path: Path
) -> None:
    act = Saving(str(tmp_path / "never.ckpt"))
    steps = 1 if setup.optimizer in ODD_SHAPES else 0  # DeepSpeed cannot step with the others.
    assert_refused(pools.run, setup, act, *names, error="UnsupportedError", steps=steps, look=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("optimizer", [pytest.param("AdamW", marks=pytest.mark.long), WRAPPING])
def test_a_hook_runs_before_each_step_or_is_refused(optimizer: str, pools: Pools) -> None:
    setup = EngineCase(2, "0", optimizer=optimizer)
    for error, calls in pools.run(2, partial(count_hooks, setup)):
        assert ("Wrapping does not call the hooks" in error) == (optimizer == WRAPPING)
        assert calls == (0 if error else 2)


def count_hooks(setup: EngineCase) -> tuple[str, int]:
    """Train two steps with a hook; return its error, and how often it was called."""
    from lightning_elastic_zero.engine.live import LiveEngine

    calls: list[int] = []
    with engine_of(setup, 0) as engine:
        error = error_text(lambda: LiveEngine(engine).add_step_pre_hook(lambda: calls.append(1)))
        train(engine, setup, 0, 2)
    return error, len(calls)


STATES_OF_OTHERS = {
    "torchao.optim.adam._AdamW": {"exp_avg", "exp_avg_sq"},
    "bitsandbytes.optim.AdamW": {"state1", "state2"},
    "bitsandbytes.optim.Lion": {"state1"},
    "bitsandbytes.optim.SGD": {"state1"},
}
"""Element-wise states of each optimizer.

torchao's have the bits of the masters. Its name is private; it is the reference of torchao's 8-bit
optimizers. The states of bitsandbytes have 32 bits.
"""

EACH_OF_OTHERS = pytest.mark.parametrize("name", STATES_OF_OTHERS)


def need(name: str) -> None:
    pytest.importorskip(name.partition(".")[0])


@EACH_OF_OTHERS
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_every_state_of_other_packages_is_restored(
    name: str, runs: tuple[EngineCase, EngineCase], pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    need(name)
    source, target = (replace(run, optimizer=name) for run in runs)
    saved = saved_by(source)
    assert state_kinds(saved) == STATES_OF_OTHERS[name]
    assert_restored(pools.run, target, saved, steps_before=1)


@EACH_OF_OTHERS
@pytest.mark.parametrize("zero", ["0", "2", "3"])
def test_optimizers_of_other_packages_continue_bit_for_bit(
    name: str, zero: str, pools: Pools, tmp_path: Path
) -> None:
    need(name)
    setup = EngineCase(2, zero, optimizer=name)
    assert_continues(pools.run, setup, tmp_path)


def test_lars_continues_in_stage_0(
    pools: Pools, saved_by: Callable[..., Saved], tmp_path: Path
) -> None:
    """Its norms are norms of whole parameters."""
    name = "bitsandbytes.optim.PytorchLARS"
    need(name)
    source, target = (EngineCase(world, "0", optimizer=name) for world in (2, 3))
    saved = saved_by(source)
    assert state_kinds(saved) == {"momentum_buffer"}
    assert_restored(pools.run, target, saved, steps_before=1)
    assert_continues(pools.run, source, tmp_path)


class AdamW(torch.optim.Optimizer):
    """A user's optimizer with the name of torch's: an int as step count, and a bf16 average."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state: dict[str, Any] = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p, dtype=torch.bfloat16))
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad.bfloat16(), 0.1)
                p.sub_(state["exp_avg"].to(p), alpha=group["lr"] / (1 - 0.9 ** state["step"]))


@pytest.mark.parametrize("zero", ["0", "2", "3"])
def test_a_users_optimizer_named_like_torchs_continues_bit_for_bit(
    zero: str, pools: Pools, tmp_path: Path
) -> None:
    name = f"{AdamW.__module__}.{AdamW.__name__}"
    assert_continues(pools.run, EngineCase(2, zero, optimizer=name), tmp_path)


@pytest.mark.cases(2)
@pytest.mark.parametrize("saves_torchs", [True, False])
def test_an_optimizer_of_the_same_name_in_another_package_is_refused(
    saves_torchs: bool, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    name = "bitsandbytes.optim.AdamW"
    need(name)
    names = ("AdamW", name) if saves_torchs else (name, "AdamW")
    source, target = (EngineCase(2, "2", optimizer=each) for each in names)
    saved = saved_by(source)
    here = "bitsandbytes.AdamW" if saves_torchs else "torch.AdamW"
    message_parts = (f"another package than this run's {here}", "load_optimizer_state=False")
    assert_refused(pools.run, target, Loading(saved.path), *message_parts)


TRANSFORMERS_ADAFACTOR = "transformers.optimization.Adafactor"


def norms(engine: Engine) -> list[float]:
    return [float(state["RMS"]) for state in inner_of(engine).state.values()]


def adafactor_continued(setup: EngineCase, folder: str) -> list[Any]:
    """Return the norms and losses of a run, and of resumed ones from both libraries' saves."""
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, 2)
        save_checkpoint(engine, f"{folder}/ours")
        save_checkpoint(engine, f"{folder}/weights", weights_only=True)
        engine.save_checkpoint(f"{folder}/stock", tag="tag")
        found: list[Any] = [(norms(engine), train(engine, setup, 2, 4))]
    for path in ("ours", "stock"):
        with engine_of(setup, 7) as engine:
            load_checkpoint(engine, f"{folder}/{path}")
            found.append((norms(engine), train(engine, setup, 2, 4)))
    return found


def adafactor_moved(setup: EngineCase, path: str) -> tuple[list[float], list[str]]:
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 7) as engine, captured_log("lightning_elastic_zero") as logged:
        load_checkpoint(engine, path)
        return norms(engine), [text for text in logged if "RMS" in text]


def adafactor_saved(setup: EngineCase, path: str) -> list[float]:
    from lightning_elastic_zero.api import save_checkpoint

    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, 2)
        save_checkpoint(engine, path)
        return norms(engine)


def test_scalars_of_a_ranks_part_are_restored_on_it(
    fork_server: ForkServer, own_pools: Pools, tmp_path: Path
) -> None:
    """The Adafactor of transformers keeps the norm of a rank's part of the weights.

    In ZeRO-3, this part includes padding, which is uninitialized memory in a new run.
    """
    setup = EngineCase(2, "2", optimizer=TRANSFORMERS_ADAFACTOR)
    fork_server.import_modules("transformers.optimization")  # It takes each rank a second.
    of_ranks = own_pools.run(2, partial(adafactor_continued, setup, str(tmp_path)))
    assert of_ranks[0][0][0] != of_ranks[1][0][0]
    for run, ours, stock in of_ranks:
        assert ours == run
        assert stock == run
    target = EngineCase(3, "3", optimizer=TRANSFORMERS_ADAFACTOR, sub_group=700)
    moved = own_pools.run(3, partial(adafactor_moved, target, str(tmp_path / "ours")))
    saved = [norm for each in of_ranks for norm in each[0][0]]
    assert all(norm in saved for values, _ in moved for norm in values)
    assert [len(warned) for _, warned in moved] == [1, 0, 0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("setup", "target"),
    [
        (EngineCase(2, "2"), EngineCase(2, "3", sub_group=700)),
        (EngineCase(1, "3", sub_group=700), EngineCase(1, "3")),
    ],
    ids=str,
)
def test_scalars_of_other_parts_are_replaced_with_a_warning(
    setup: EngineCase, target: EngineCase, pools: Pools, tmp_path: Path
) -> None:
    """They differ between the flat buffers of one rank, too."""
    setup, target = (replace(each, optimizer=TRANSFORMERS_ADAFACTOR) for each in (setup, target))
    path = str(tmp_path / "a.ckpt")
    saved = pools.run(setup.world, partial(adafactor_saved, setup, path))
    moved = pools.run(target.world, partial(adafactor_moved, target, path))
    held = [norm for of_rank in saved for norm in of_rank]
    assert {str(norm) for values, _ in moved for norm in values} <= {str(norm) for norm in held}
    assert [len(warned) for _, warned in moved] == [1, *[0] * (target.world - 1)]
