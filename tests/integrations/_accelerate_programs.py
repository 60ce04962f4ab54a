"""Programs of ranks that run accelerate's own loop."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import weakref
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DummyScheduler, ProjectConfiguration
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    MultiplicativeLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import DataLoader

from lightning_elastic_zero import elastic, wrap_initialize
from lightning_elastic_zero.errors import CheckpointMismatchError
from tests.integrations._hf_programs import (
    GLOBAL_BATCH,
    MICRO,
    EpochBatches,
    EpochTokens,
    Run,
    State,
    Stream,
    Tokens,
    _seen,
    all_seen,
    ds_config,
    library_warnings,
    sampler_of,
    seed_everything,
    state_of,
    tiny_model,
    use_gloo,
)
from tests.support.outcome import error_text


@dataclass(frozen=True)
class LoopCase:
    """A run of accelerate's loop."""

    stage: int = 2
    save_at: tuple[int, ...] = ()
    folder: str = ""
    name: str = ""
    """The folder of all saves; empty: one for each step."""
    load: str = ""
    start: int = 0
    """Optimizer steps done before the run."""
    steps: int = 12
    schedule: str = "lambda"
    samples: int = 72
    bound: bool = True
    seedable: bool = True
    data_seed: int | None = None
    state_at: tuple[int, ...] = ()
    sampler: str = ""
    batches: bool = False
    """Whether a user's batch sampler seeds each epoch."""
    drop_last: bool = False
    even: bool = True
    """Whether accelerate fills up the batches of an epoch."""
    micro: tuple[int, int] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    dropout: float = 0.0
    epoch_data: bool = False
    """Whether the data set has ``set_epoch``."""
    dispatch: bool | None = None
    """Whether rank 0 reads the batches of all ranks; None: of a stream only."""
    stream: bool = False
    """Whether the data set is iterable and has no length."""
    save_within: int = 0
    """Step in which a state is saved after its first micro-batch, too."""
    split: bool = False
    """Whether ``batch_size`` is that of all ranks."""
    sets_epoch: bool = True
    """Whether the loop calls ``set_epoch``, as loops that never resume need not."""
    epoch_steps: int = 0
    """Steps after which the loop leaves an epoch; 0: at its end."""
    wrapped: bool = False
    """Whether ``wrap_initialize`` was called before, with the same options."""
    evaluates: bool = False
    """Whether each step is followed by an evaluation that ends after its first batch."""
    paired: bool = False
    """Whether each batch is joined with that of a second loader."""
    evaluation_last: bool = False
    """Whether the loader of the evaluation is prepared after the one of the training."""
    steps_per: str = ""
    """What the loop steps the schedule for, if it is not stepped with the optimizer."""
    warmup: int = 0
    """Fixed numbers of a ``DummyScheduler``: its warm-up; 0: multiples of the ranks."""
    skipped: int | None = None
    """Batches that the loop has counted when it resumes, as in accelerate's example."""


class Plateau(ReduceLROnPlateau):
    """A loss that never falls."""

    def step(self, metrics: Any = 1.0) -> None:  # type: ignore[override]  # as torch's
        super().step(metrics)


def scheduler_of(kind: str, optimizer: Any, steps: int, times: int, accumulate: int = 1) -> Any:
    """Return a schedule as users of accelerate make it, counted in steps of all ranks."""
    total = steps * times
    if kind == "own":
        return LambdaLR(optimizer, lambda step: 1.0 - step / (steps * accumulate))
    if kind == "warmup":  # counts optimizer steps, as on one rank
        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
    if kind == "lambda":

        @functools.wraps(abs)  # as decorators leave it
        def falling(step: int) -> float:
            return max(0.0, 1.0 - step / total)

        return LambdaLR(optimizer, falling)
    if kind == "cosine":
        return CosineAnnealingLR(optimizer, T_max=total)
    if kind == "sequential":
        warm = LambdaLR(optimizer, lambda step: (step + times) / (11 * times))
        return SequentialLR(
            optimizer, [warm, CosineAnnealingLR(optimizer, 2 * times)], [10 * times]
        )
    if kind == "chained":
        warm = LambdaLR(optimizer, lambda step: (step + times) / (13 * times))
        return ChainedScheduler([warm, ExponentialLR(optimizer, 0.99)], optimizer)
    if kind == "multiplicative":
        return MultiplicativeLR(optimizer, lambda _: 0.95)
    if kind == "plateau":
        return Plateau(optimizer, patience=3 * times)
    return OneCycleLR(optimizer, max_lr=0.02, total_steps=total)


def loop(case: LoopCase) -> Run:
    """Train for some steps, saving and loading as asked."""
    run = Run()
    restore = wrap_initialize(**case.options) if case.wrapped else None
    try:
        with library_warnings() as run.warnings:
            _loop(case, run)
    finally:
        if restore is not None:
            restore()
    return run


def _loop(case: LoopCase, run: Run) -> None:
    use_gloo()
    seed_everything(7)
    micro, accumulate = case.micro or MICRO[dist.get_world_size()]
    config = ds_config(case.stage, {})
    config["train_micro_batch_size_per_gpu"] = micro
    config["gradient_accumulation_steps"] = accumulate
    config["train_batch_size"] = micro * accumulate * dist.get_world_size()
    if case.schedule == "dummy":
        names = ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
        config["scheduler"] = {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")}
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        gradient_accumulation_steps=accumulate,
        step_scheduler_with_optimizer=not case.steps_per,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=case.seedable,
            data_seed=case.data_seed,
            dispatch_batches=case.dispatch,
            even_batches=case.even,
            split_batches=case.split,
        ),
    )
    if case.bound:
        assert elastic(accelerator, **case.options) is accelerator
    model = tiny_model(case.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = sampler_of(case.sampler, case.samples) if case.sampler else None
    batch_size = micro * (accelerator.num_processes if case.split else 1)
    data: Any = EpochTokens(case.samples) if case.epoch_data else Tokens(case.samples)
    loader: Any = DataLoader(
        Stream(case.samples) if case.stream else data,
        batch_size=batch_size,
        shuffle=sampler is None and not case.stream,
        sampler=sampler,
        drop_last=case.drop_last,
    )
    if case.batches:
        loader = DataLoader(loader.dataset, batch_sampler=EpochBatches(case.samples, batch_size))
    evaluation: Any = DataLoader(Tokens(10), batch_size=batch_size)
    if not case.evaluation_last:
        evaluation = accelerator.prepare(evaluation)
    times = 1 if case.split else accelerator.num_processes
    per_step = accumulate if case.steps_per == "micro-batch" else 1
    schedule = scheduler_of(case.schedule, optimizer, 12, times, per_step)
    if case.schedule == "dummy":
        total = 48 if case.warmup else 24 * times
        schedule = DummyScheduler(optimizer, total, warmup_num_steps=case.warmup or 5)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if case.evaluation_last:
        evaluation = accelerator.prepare(evaluation)
    loaders = [loader]
    if case.paired:
        loaders.append(
            accelerator.prepare(
                DataLoader(Tokens(case.samples), batch_size=batch_size, shuffle=True)
            )
        )
    if case.load:
        accelerator.load_state(case.load)
        run.first_state = state_of(model)
    run.draws[-1] = float(torch.rand(()))
    _seen.clear()
    losses: list[float] = []
    step, per_epoch = case.start, case.epoch_steps or case.samples // GLOBAL_BATCH
    while step < case.steps:
        if case.sets_epoch:
            loader.set_epoch(step // per_epoch)
        skip = step % per_epoch * accumulate
        if case.skipped is not None and step == case.start:
            skip = case.skipped if case.stream else case.skipped % len(loader)
        begun = [accelerator.skip_first_batches(x, skip) if skip else x for x in loaders]
        model.train()
        for batches in zip(*begun, strict=False):
            with accelerator.accumulate(model):
                batch = {key: torch.cat([each[key] for each in batches]) for key in batches[0]}
                loss = model(**batch).loss
                losses.append(float(loss))
                accelerator.backward(loss)
                optimizer.step()
                if accelerator.sync_gradients or case.steps_per != "optimizer step":
                    schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                if step + 1 == case.save_within and accelerator.step % accumulate == 1:
                    accelerator.save_state(f"{case.folder}/within_{case.save_within}")
                continue
            step += 1
            mean = torch.tensor(losses).mean()
            losses.clear()
            run.losses[step] = float(accelerator.reduce(mean, "mean"))
            run.samples[step] = all_seen()
            run.rates[step] = optimizer.param_groups[0]["lr"]
            if step in case.state_at:
                run.states[step] = state_of(model)
            if case.evaluates:
                next(iter(evaluation))
            if step in case.save_at:
                target = f"{case.folder}/{case.name or f'step_{step}'}"
                accelerator.save_state(target)
                if case.name and accelerator.is_main_process:  # as after a kill at this step
                    shutil.copytree(target, f"{case.folder}/killed_at_{step}")
            if step == case.steps or (case.epoch_steps and step % case.epoch_steps == 0):
                break
    if case.bound:
        accelerator.wait_for_save()
    run.log.append({"step": accelerator.step})
    model.destroy()
    _end(accelerator)


def _end(accelerator: Any) -> None:
    accelerator.free_memory()
    _end_state()


def _end_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    gc.collect()


def is_freed(*, bound: bool) -> bool:
    """Return whether a deleted Accelerator is freed after a step, with its data set."""
    use_gloo()
    config = ds_config(2, {"train_micro_batch_size_per_gpu": 2})
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    if bound:
        elastic(accelerator)
    model, data = tiny_model(), Tokens()
    held = weakref.ref(data), weakref.ref(accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        break
    del accelerator, model, data, optimizer, loader, batch
    _end_state()
    return held[0]() is None and held[1]() is None


def first_step_with_evaluation(
    micro: int, evaluated: int, *, complete: bool, configured: int | str = "auto"
) -> tuple[str, list[str]]:
    """Prepare two loaders with a model, with a micro-batch size in DeepSpeed's configuration.

    Returns the error and the warnings of the first step, which follows an evaluation that is
    complete or ended early.
    """
    use_gloo()
    config = ds_config(2, {"train_micro_batch_size_per_gpu": configured})
    accelerator = elastic(Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)))
    model: Any = tiny_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader, evaluation = accelerator.prepare(
        model, optimizer, *(DataLoader(Tokens(32), batch_size=size) for size in (micro, evaluated))
    )
    evaluated_batches = iter(evaluation)
    next(evaluated_batches)
    if complete:
        list(evaluated_batches)
    loader = accelerator.skip_first_batches(loader, 1)
    with library_warnings() as warnings:
        error = error_text(lambda: accelerator.backward(model(**next(iter(loader))).loss))
    model.destroy()
    _end(accelerator)
    return error, warnings


def two_engines(
    folder: str, *, teacher: bool, load: bool, asynchronous: bool = False
) -> list[State]:
    """Save or load two engines of one Accelerator; return their states.

    The first uses ZeRO-2, the second ZeRO-3. A teacher has no optimizer and no state.
    """
    use_gloo()
    micro, accumulate = MICRO[dist.get_world_size()]
    plugins = {}
    for stage in (2, 3):
        config = ds_config(stage, {})
        config["train_micro_batch_size_per_gpu"] = micro
        config["gradient_accumulation_steps"] = accumulate
        config["train_batch_size"] = micro * accumulate * dist.get_world_size()
        plugins[str(stage)] = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = elastic(
        Accelerator(deepspeed_plugins=plugins, gradient_accumulation_steps=accumulate),
        async_save=asynchronous,
    )
    engines: list[Any] = []
    for stage in (2, 3):
        accelerator.state.select_deepspeed_plugin(str(stage))
        model = tiny_model()
        if teacher and engines:
            engines.append(accelerator.prepare(model))
            break
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * stage)
        engines.append(accelerator.prepare(model, optimizer)[0])
    trained = engines[:1] if teacher else engines
    if load:
        accelerator.load_state(folder)
    else:
        tokens = Tokens().tokens[:2]
        for engine in trained:
            for _ in range(accumulate):
                engine.backward(engine(tokens, labels=tokens, index=torch.zeros(1)).loss)
                engine.step()
        accelerator.save_state(folder)
        accelerator.wait_for_save()
    states = [state_of(engine) for engine in trained]
    for engine in engines:
        engine.destroy()
    _end(accelerator)
    return states


def save_named(folder: str, saves: int) -> tuple[list[str], list[str], str]:
    """Save into folders that accelerate names, then load in another Accelerator and save again.

    Returns the folders after the first saves and after the last, and the refusal of a load to which
    no model was given.
    """
    folders, refusal = [], ""
    for first in (True, False):
        use_gloo()
        config = ds_config(2, {"train_micro_batch_size_per_gpu": 2})
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
        accelerator = elastic(
            Accelerator(
                deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), project_config=project
            )
        )
        if not first:
            try:
                accelerator.load_state()
            except CheckpointMismatchError as error:
                refusal = str(error)
        model = tiny_model()
        engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        if not first:
            accelerator.load_state()
        for _ in range(saves if first else 1):
            accelerator.save_state()
        folders.append(sorted(path.name for path in Path(folder, "checkpoints").iterdir()))
        engine.destroy()
        _end(accelerator)
    return folders[0], folders[1], refusal


def load_unseen(folder: str, options: dict[str, Any]) -> list[str]:
    """Load folders that rank 1 does not see; return the error of each load on this rank.

    The first is the newest that accelerate has named, the second is passed.
    """
    use_gloo()
    config = ds_config(2, {"train_micro_batch_size_per_gpu": 2})
    accelerator = elastic(
        Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
            project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True),
        ),
        **options,
    )
    model = tiny_model()
    engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    accelerator.save_state()
    accelerator.wait_for_everyone()
    is_dir, saved = Path.is_dir, Path(folder, "checkpoints", "checkpoint_0")

    def unless_hidden(path: Path) -> bool:
        return path != saved and is_dir(path)

    try:
        if not accelerator.is_main_process:
            Path.is_dir = unless_hidden  # type: ignore[assignment,method-assign]
        return [error_text(partial(accelerator.load_state, path)) for path in (None, str(saved))]
    finally:
        Path.is_dir = is_dir  # type: ignore[method-assign]
        engine.destroy()
        _end(accelerator)


def fall_back_with_two_engines(folder: str) -> list[str]:
    """Save two engines of equal shapes; return which saves replace damaged ones."""
    use_gloo()
    micro, accumulate = MICRO[dist.get_world_size()]
    config = ds_config(2, {})
    config["train_micro_batch_size_per_gpu"] = micro
    config["gradient_accumulation_steps"] = accumulate
    config["train_batch_size"] = micro * accumulate * dist.get_world_size()
    accelerator = elastic(
        Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
            gradient_accumulation_steps=accumulate,
            project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True),
        ),
        fallback=True,
    )
    engines, tokens = [], Tokens().tokens[:2]
    for _ in range(2):
        model = tiny_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engines.append(accelerator.prepare(model, optimizer)[0])
    for _ in range(2):
        for engine in engines:
            for _ in range(accumulate):
                engine.backward(engine(tokens, labels=tokens, index=torch.zeros(1)).loss)
                engine.step()
        accelerator.save_state()
    found = []
    for damaged in ("", "checkpoint_1/pytorch_model", "checkpoint_0/pytorch_model_1"):
        accelerator.wait_for_everyone()
        if damaged and accelerator.is_main_process:
            shard = next(Path(folder, "checkpoints", damaged).rglob("*optim_states.pt"))
            shard.write_bytes(shard.read_bytes()[:-1])
        accelerator.wait_for_everyone()
        try:
            accelerator.load_state()
            found.append(str([engine.global_steps for engine in engines]))
        except Exception as error:  # noqa: BLE001 (the test checks it)
            found.append(f"{type(error).__name__}: {error}")
    for engine in engines:
        engine.destroy()
    _end(accelerator)
    return found


def stock_failure(case: LoopCase) -> str:
    """Run a loop that must fail; return its error on this rank."""
    return error_text(lambda: loop(case))


def rotate_unfinished(folder: str, limit: int) -> tuple[list[str], ...]:
    """Load state 0 among other folders, then save; return the numbers after each save."""
    found = []
    for first in (True, False):
        use_gloo()
        config = ds_config(1, {"train_micro_batch_size_per_gpu": 1})
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=limit)
        accelerator = elastic(
            Accelerator(
                deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), project_config=project
            ),
            fallback=True,
        )
        model = tiny_model()
        engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        states = Path(folder, "checkpoints")
        if first:
            accelerator.save_state()
            shutil.copytree(states / "checkpoint_0", states / "checkpoint_1")
            (states / "checkpoint_1" / "lightning_elastic_zero.json").unlink()
            (states / "best_9").mkdir()
        else:
            accelerator.load_state()
            for _ in range(3):
                accelerator.save_state()
                found.append(sorted(p.name.split("_")[1] for p in states.glob("checkpoint_*")))
        engine.destroy()
        _end(accelerator)
    return tuple(found)


def refusals() -> list[str]:
    """Bind an Accelerator without DeepSpeed, and one under an old release; return errors."""
    plugin = DeepSpeedPlugin(hf_ds_config=ds_config(1, {"train_micro_batch_size_per_gpu": 1}))
    release, found = accelerate.__version__, []
    for version in (release, "1.14.0"):
        use_gloo()
        if version == release:
            del os.environ["ACCELERATE_USE_DEEPSPEED"]
        accelerate.__version__ = version
        try:
            elastic(Accelerator(deepspeed_plugin=None if version == release else plugin))
        except Exception as error:  # noqa: BLE001 (the test checks it)
            found.append(f"{type(error).__name__}: {error}")
        finally:
            accelerate.__version__ = release
    use_gloo()
    return found
