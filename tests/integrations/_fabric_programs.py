"""Programs of ranks that run Lightning Fabric."""

from __future__ import annotations

import gc
import inspect
import io
import os
import weakref
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection

from lightning_elastic_zero import ElasticDeepSpeedFabricStrategy, ElasticSampler, plan_batches
from lightning_elastic_zero.engine.installation import use_accelerator
from lightning_elastic_zero.storage.own_files import is_checkpoint
from tests.integrations._hf_programs import (
    GLOBAL_BATCH,
    Run,
    State,
    Tokens,
    all_seen,
    full_weight,
    library_warnings,
    state_of,
    tiny_model,
)
from tests.support.engines import forget_tensor_ranks
from tests.support.outcome import error_text


@dataclass(frozen=True)
class FabricCase:
    """A run of a loop of Fabric."""

    stage: int = 3
    by_name: bool = False
    save: str = ""
    load: str = ""
    steps: int = 3
    bound: bool = True
    """Whether the strategy is this library's, or Fabric's own."""
    options: dict[str, Any] = field(default_factory=dict)


class StockStrategy(DeepSpeedStrategy):
    """Fabric's own strategy, on CPU ranks."""

    def setup_environment(self) -> None:
        use_accelerator("cpu")
        devices = range(len(self.parallel_devices or ()))
        self.parallel_devices = [torch.device("cpu", index) for index in devices]
        super(DeepSpeedStrategy, self).setup_environment()


def run_fabric(case: FabricCase) -> tuple[Run, dict[str, Any], dict[str, Any]]:
    """Train with samples by global position; return the run, the state, and the unused entries."""
    world = int(os.environ["WORLD_SIZE"])
    strategy: Any = f"elastic_deepspeed_stage_{case.stage}"
    if not case.by_name:
        make = ElasticDeepSpeedFabricStrategy if case.bound else StockStrategy
        strategy = make(
            stage=case.stage, reduce_bucket_size=1000, allgather_bucket_size=1000, **case.options
        )
    fabric: Any = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    # Fabric's own strategy cannot accumulate.
    plan = plan_batches(GLOBAL_BATCH, 2 if case.bound else GLOBAL_BATCH, world)
    data = Tokens(48)
    sizes = (plan.accumulate, plan.largest_micro_batch)
    names = ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu")
    fabric.strategy.config |= dict(zip(names, sizes, strict=True))
    model: Any = tiny_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if "scheduler" in inspect.signature(fabric.setup).parameters:
        model, optimizer, schedule = fabric.setup(model, optimizer, scheduler=schedule)
    else:
        model, optimizer = fabric.setup(model, optimizer)
    mean, lost = MeanMetric(), MetricCollection([MeanMetric()])
    mean.persistent(True)
    state = {"model": model, "optimizer": optimizer, "step": 0, "schedule": schedule}
    state |= {"mean": mean, "lost": lost}
    run, unused = Run(), dict[str, Any]()
    if case.load:
        state["unsaved"] = 0
        with library_warnings() as run.warnings, redirect_stderr(io.StringIO()) as shown:
            unused = fabric.load(case.load, state)
        run.shown = shown.getvalue()
        run.first_state = _state(model)
    sampler = ElasticSampler(data, plan, fabric.global_rank, seed=5)
    loader = DataLoader(data, batch_size=plan.largest_micro_batch, sampler=sampler)
    all_seen()
    losses: list[float] = []
    while int(state["step"]) < case.steps:
        sampler.start_at(*divmod(state["step"], sampler.steps))
        for micro_batch, batch in enumerate(loader, 1):
            loss = model(**fabric.to_device(batch)).loss
            losses.append(float(fabric.all_reduce(loss.detach())))
            fabric.backward(loss)
            optimizer.step()
            if micro_batch % plan.accumulate:
                continue
            schedule.step()
            state["step"] += 1
            run.samples[state["step"]] = all_seen()
            mean.update(float(state["step"]))
            lost.update(1.0)
            run.losses[state["step"]] = sum(losses) / len(losses)
            losses.clear()
            if state["step"] == case.steps:
                break
    if case.save:
        with library_warnings() as warnings:
            fabric.save(case.save, {**state, "extra": {"note": "mine"}})
        run.log += [{"warning": warning} for warning in warnings]
        if case.options.get("async_save"):
            strategy.wait_for_save()
    run.states[-1] = _state(model)
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]
    kept = {"step": state["step"], "last_epoch": schedule.last_epoch, "mean": float(mean.compute())}
    fabric._strategy._deepspeed_engine.destroy()
    return run, kept, unused


def accumulated(
    stage: int,
    accumulate: int,
    *,
    counted: int = 0,
    steps_each: bool = True,
    clears: bool = False,
    divided: bool = False,
    marked: bool = False,
) -> State:
    """Take two clipped optimizer steps on 120 samples each; return the full weights.

    ``counted``: DeepSpeed's accumulation, if it is another. ``steps_each``: whether
    ``optimizer.step()`` follows each micro-batch, or the last one. ``clears``: whether the
    gradients are cleared after each micro-batch. ``divided``: whether the loop divides the loss.
    ``marked``: whether the loop calls DeepSpeed's engine, and marks the last micro-batch.
    """
    world = int(os.environ["WORLD_SIZE"])
    strategy = ElasticDeepSpeedFabricStrategy(stage=stage, reduce_bucket_size=1000)
    fabric: Any = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    fabric.strategy.config |= {
        "gradient_accumulation_steps": counted or accumulate,
        "gradient_clipping": 0.1,
    }
    model: Any = tiny_model()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    engine = model._forward_module
    try:
        for step in range(2):
            mine = Tokens(240).tokens[120 * step : 120 * (step + 1)][fabric.global_rank :: world]
            for number, batch in enumerate(mine.chunk(accumulate), 1):
                if marked:
                    engine.set_gradient_accumulation_boundary(number == accumulate)
                loss = model(input_ids=batch, labels=batch, index=torch.zeros(1)).loss
                fabric.backward(loss / accumulate if divided else loss)
                if steps_each or number == accumulate:
                    (engine if marked else optimizer).step()
                if clears or number == accumulate:
                    optimizer.zero_grad()
        assert engine.global_steps == 2
        return {name: full_weight(p) for name, p in engine.module.named_parameters()}
    finally:
        engine.destroy()


def whole_batches() -> State:
    """Take the same steps as ``accumulated`` on one rank, with torch only."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in Tokens(240).tokens.chunk(2):
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch, index=torch.zeros(1)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def accumulation_failure(stage: int, **more: Any) -> str:
    """Accumulate so that DeepSpeed would lose gradients; return the error on this rank."""
    return error_text(partial(accumulated, stage, 3, **more))


def save_two_engines(folder: str, *, direct: bool) -> list[bool]:
    """Save two engines in the background; return which are there after the wait.

    ``direct``: by the engines' own method, which Fabric's ``save`` calls.
    """
    strategy = ElasticDeepSpeedFabricStrategy(stage=2, reduce_bucket_size=1000, async_save=True)
    fabric: Any = Fabric(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy
    )
    fabric.launch()
    models = []
    for _ in range(2):
        model = tiny_model()
        models.append(fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))[0])
    for number in (1, 0):  # the last engine first
        if direct:
            models[number]._forward_module.save_checkpoint(f"{folder}/{number}")
        else:
            fabric.save(f"{folder}/{number}", {"model": models[number]})
    strategy.wait_for_save()
    found = [is_checkpoint(Path(folder, str(number))) for number in range(2)]
    for model in models:
        model._forward_module.destroy()
    return found


def are_freed(*, bound: bool) -> list[bool]:
    """Set up two models, then give the first up; return which of their engines are freed."""
    make = ElasticDeepSpeedFabricStrategy if bound else StockStrategy
    fabric: Any = Fabric(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=make(stage=2, reduce_bucket_size=1000),
    )
    fabric.launch()
    models = []
    for _ in range(2):
        model = tiny_model()
        models.append(fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))[0])
    engines = [weakref.ref(model._forward_module) for model in models]
    engines[0]().destroy()  # type: ignore[union-attr]
    del models[0], model
    gc.collect()
    freed = [engine() is None for engine in engines]
    models[0]._forward_module.destroy()
    return freed


def failure_of(case: FabricCase) -> str:
    """Run a loop that must fail; return its error on this rank."""
    return error_text(lambda: run_fabric(case))


def cut_failure() -> str:
    """Set up a model with tensor parallelism; return the error on this rank."""
    strategy: Any = ElasticDeepSpeedFabricStrategy(stage=1, reduce_bucket_size=1000)
    specs = [{"patterns": ["0.weight$"], "partition_type": "column"}]
    cuts = {"partition_config": {"use_default_specs": False, "layer_specs": specs}}
    strategy.config["tensor_parallel"] = {"autotp_size": 2, **cuts}
    strategy.config["train_micro_batch_size_per_gpu"] = 1
    fabric: Any = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    try:
        return error_text(partial(fabric.setup, model, torch.optim.AdamW(model.parameters())))
    finally:
        forget_tensor_ranks()


def _state(model: Any) -> State:
    return state_of(model._forward_module)
