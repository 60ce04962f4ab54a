"""The Trainer's fp16 precisions ``16-true`` and ``16-mixed``, with changes of stage and world."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed import zero
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.engines import OVERFLOW, fp16_on_cpu
from tests.support.fits import WIDTH, FitCase, RegressionNet, Watch, fit
from tests.support.oracle import differences
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

SCALER = {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2}
"""Options of the strategy: a scale that grows after two steps, and shrinks after overflows."""

GLOBAL_BATCH, STEPS_PER_EPOCH = 12, 4
"""In micro-batches of 2 samples, so that the accumulation depends on the number of ranks."""

STATES = ("master", "exp_avg", "exp_avg_sq")

KNOWN_TO_BOTH_SCALERS = {"cur_scale", "cur_iter", "last_overflow_iter"}
"""Entries of the loss scaler that stage 0 and ZeRO have in common."""

Held = dict[str, Any]
"""Keys are ``kind/name``; values are tensors, numbers, or the ``repr`` of other values."""


def half(root: Path, precision: str, stage: int, **changes: Any) -> FitCase:
    """Return a fit whose result is the state at the start of training and at its end."""
    fixed = {"net": OverflowingNet, "data": samples_of, "watch": StateRecorder, "strategy": SCALER}
    batch = None if changes.get("manual") else GLOBAL_BATCH
    fields = {**fixed, "trainer": {"precision": precision}, "global_batch": batch, **changes}
    return FitCase(str(root), stage, **fields)


def samples_of(_: FitCase) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(STEPS_PER_EPOCH * GLOBAL_BATCH, WIDTH, generator=generator)
    return {"train_dataloaders": DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)}


class OverflowingNet(RegressionNet):
    """A net whose loss overflows in fp16 at one optimizer step of each epoch."""

    def __init__(self, case: FitCase, *, retained: bool = False) -> None:
        """With manual optimization, take one step per micro-batch.

        With ``retained``, take two through one graph.
        """
        super().__init__(case.rate, case.seed)
        self.automatic_optimization = not case.manual
        self.retained = retained

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            if self.retained:
                self.manual_backward(loss, retain_graph=True)
                optimizer.step()
            self.manual_backward(loss)
            optimizer.step()
            return loss
        overflows = self.trainer.global_step % STEPS_PER_EPOCH == 1
        return loss * OVERFLOW if overflows else loss

    def configure_optimizers(self) -> Any:
        """Return AdamW with one group.

        In ZeRO-1/2, DeepSpeed's functions do not find the states of a second group.
        """
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class StateRecorder(Watch):
    """Records the state when training starts and when it ends."""

    def __init__(self, case: FitCase) -> None:
        super().__init__(case)
        self.held: list[Held] = []
        self._trained: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trained = [name for name, p in pl_module.named_parameters() if p.requires_grad]
        # Before the first step, DeepSpeed's function for moments raises.
        kinds = STATES if trainer.global_step else STATES[:1]
        self.held.append(state_of(trainer.model, self._trained, kinds))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.held.append(state_of(trainer.model, self._trained, STATES))

    def seen(self, *_: Any) -> tuple[Held, Held]:
        start, end = self.held
        return start, end


def state_of(engine: Any, trained: Sequence[str], kinds: Sequence[str]) -> Held:
    """Return the full state on each rank as host copies, read with DeepSpeed's functions.

    Collective. ``kinds``: of states of the trained parameters.
    """
    optimizer = engine.optimizer
    parameters = dict(engine.module.named_parameters())
    found: Held = {}
    for name in trained:
        states = _states_of(parameters[name], optimizer, kinds)
        found |= {f"{kind}/{name}": on_host(state) for kind, state in states}
    for name, parameter in parameters.items():
        with zero.GatheredParameters([parameter]):
            found[f"{'weight' if name in trained else 'frozen'}/{name}"] = on_host(parameter)
    found |= {f"buffer/{name}": on_host(b) for name, b in engine.module.named_buffers()}
    inner = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer
    for index, group in enumerate(inner.param_groups):
        found |= {f"group/{index}/{k}": repr(v) for k, v in group.items() if k != "params"}
    found["steps"] = sorted({float(state["step"]) for state in inner.state.values()})
    for name in ("global_steps", "global_samples", "skipped_steps"):
        found[f"counter/{name}"] = int(getattr(engine, name))
    scaler = getattr(optimizer, "loss_scaler", None) or optimizer.loss_scale_config
    return found | {f"scaler/{k}": repr(v) for k, v in vars(scaler).items()}


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _states_of(
    parameter: nn.Parameter, optimizer: Any, kinds: Sequence[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a parameter's master and moments; DeepSpeed's functions do not support stage 0."""
    if not hasattr(optimizer, "fp32_groups"):
        yield kinds[0], safe_get_full_fp32_param(parameter)
        yield from ((key, safe_get_full_optimizer_state(parameter, key)) for key in kinds[1:])
        return
    for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for weight, master in zip(weights, masters, strict=True):
            if weight is parameter:
                yield kinds[0], master
                yield from ((key, optimizer.optimizer.state[master][key]) for key in kinds[1:])


def half_precision_fit(case: FitCase) -> tuple[Held, Held]:
    with fp16_on_cpu():
        start, end = fit(case)
    return start, end


def wanted_of(saved: Held, source: FitCase, target: FitCase, found: Held) -> Held:
    """Return the state that a resumed run must have.

    Buffers have the type of the resumed run: DeepSpeed casts them to fp16 in ZeRO-3, Lightning
    with ``16-true``.
    """
    same_scaler = (source.stage == 0) == (target.stage == 0)
    wanted: Held = {}
    for key, value in saved.items():
        kind, _, name = key.partition("/")
        if kind == "weight":
            wanted[key] = saved[f"master/{name}"].to(torch.float16)
        elif kind == "buffer":
            wanted[key] = value.to(found[key].dtype)
        elif kind != "scaler" or same_scaler or name in KNOWN_TO_BOTH_SCALERS:
            wanted[key] = value
    return wanted


def differing(wanted: Held, found: Held) -> dict[str, int]:
    """Return the entries that are missing or not bitwise equal."""
    return differences(wanted, {key: found[key] for key in wanted.keys() & found.keys()})


CASES = [
    ("16-true", 0, 2, "16-true", 0, 3),
    ("16-true", 1, 3, "16-true", 2, 2),
    ("16-true", 2, 2, "16-true", 3, 1),
    ("16-true", 3, 2, "16-true", 0, 3),
    ("16-true", 0, 1, "16-true", 1, 2),
    ("16-mixed", 0, 2, "16-mixed", 3, 3),
    ("16-mixed", 1, 2, "16-mixed", 0, 1),
    ("16-mixed", 2, 3, "16-mixed", 1, 2),
    ("16-mixed", 3, 2, "16-mixed", 2, 3),
    ("16-true", 2, 2, "16-mixed", 2, 3),
    ("16-mixed", 3, 3, "16-true", 3, 2),
]


@pytest.mark.long
@pytest.mark.parametrize(("precision", "stage", "ranks", "other", "target", "more"), CASES)
def test_half_precision_state_is_restored_on_another_world(
    precision: str,
    stage: int,
    ranks: int,
    other: str,
    target: int,
    more: int,
    worlds: Pools,
    tmp_path: Path,
) -> None:
    first = half(tmp_path / "first", precision, stage)
    ends = [end for _, end in worlds.run(ranks, partial(half_precision_fit, first))]
    saved = ends[0]
    assert saved["counter/skipped_steps"] == 1
    assert saved["scaler/last_overflow_iter"] == "1"
    assert saved["weight/first.weight"].dtype == torch.float16
    assert all(saved[f"{key}/first.weight"].any() for key in STATES[1:])
    last = str(tmp_path / "first" / "last.ckpt")
    second = half(tmp_path / "second", other, target, epochs=2, ckpt_path=last, rate=0.9, seed=9)
    for start, end in worlds.run(more, partial(half_precision_fit, second)):
        wanted = wanted_of(saved, first, second, start)
        assert not differing(wanted, start)
        assert differing({k: v for k, v in wanted.items() if k.startswith("master")}, end)
        assert end["counter/global_steps"] == 8
        assert end["counter/skipped_steps"] == 2


@pytest.mark.parametrize("precision", ["16-true", "16-mixed"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_half_precision_run_continues_bit_for_bit(
    stage: int, precision: str, worlds: Pools, tmp_path: Path
) -> None:
    """Also overflows, skipped steps and changes of the loss scale."""
    first = half(tmp_path / "half", precision, stage)
    worlds.run(2, partial(half_precision_fit, first))
    last = str(tmp_path / "half" / "last.ckpt")
    again = replace(first, epochs=2, ckpt_path=last, seed=9, rate=0.9)
    reference = replace(first, root=str(tmp_path / "whole"), epochs=2)
    resumed: list[Any] = worlds.run(2, partial(half_precision_fit, again))
    for (_, uninterrupted), (_, end) in zip(
        worlds.run(2, partial(half_precision_fit, reference)), resumed, strict=True
    ):
        assert not differing(uninterrupted, end)
        assert uninterrupted["counter/skipped_steps"] == 2


@pytest.mark.long
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_gradients_of_stage_0_equal_those_of_zero(
    manual: bool, worlds: Pools, tmp_path: Path
) -> None:
    """DeepSpeed divides them by the loss scale in all stages, but scales the loss only in ZeRO."""
    moments = []
    for stage in (0, 1):
        plan = half(tmp_path / str(stage), "16-true", stage, max_steps=1, manual=manual)
        moments.append(worlds.run(2, partial(half_precision_fit, plan))[0][1])
    assert_close_moments(*moments)


def assert_close_moments(one: Held, other: Held) -> None:
    """Compare with tolerances, because sums in another order are rounded differently in fp16."""
    for key in (f"{key}/{name}" for key in STATES[1:] for name in ("first.weight", "last.weight")):
        assert other[key].any()
        torch.testing.assert_close(one[key], other[key], rtol=0.05, atol=1e-6)


@pytest.mark.long
def test_each_pass_through_a_retained_graph_uses_the_current_scale(
    worlds: Pools, tmp_path: Path
) -> None:
    """The loss scale doubles between two steps of a micro-batch."""
    ends = []
    for stage in (0, 1):
        plan = half(tmp_path / str(stage), "16-true", stage, max_steps=4, rate=0.0, manual=True)
        ends.append(
            worlds.run(
                2,
                partial(
                    half_precision_fit, replace(plan, net=partial(OverflowingNet, retained=True))
                ),
            )[0][1]
        )
    assert ends[0]["scaler/cur_scale"] == ends[1]["scaler/cur_scale"] == "512.0"
    assert_close_moments(*ends)
