"""Programs of ranks that run a plain engine of DeepSpeed."""

from __future__ import annotations

import atexit
import errno
import gc
import inspect
import io
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch.optim.lr_scheduler import LambdaLR

from lightning_elastic_zero import elastic, save_checkpoint, wrap_initialize
from lightning_elastic_zero.checkpoint import background
from lightning_elastic_zero.checkpoint.save import write_shards
from lightning_elastic_zero.core import progress
from tests.integrations._hf_programs import (
    MICRO,
    State,
    Tokens,
    library_warnings,
    state_of,
    tiny_model,
)
from tests.support.launch import Job
from tests.support.outcome import error_text
from tests.support.processes import HANG_TIMEOUT_S


def initialize(
    stage: int, *, accumulate: int | None = None, schedule: Callable[[int], float] | None = None
) -> Any:
    """Return an engine of a tiny model."""
    micro, fitting = MICRO[dist.get_world_size()]
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulate or fitting,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
    }
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = LambdaLR(optimizer, schedule) if schedule else None
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, lr_scheduler=scheduler
    )
    return engine


def train_steps(engine: Any, steps: int) -> None:
    """Train for some optimizer steps, on the same samples on any number of ranks."""
    data, rank, world = Tokens().tokens, dist.get_rank(), dist.get_world_size()
    micro, accumulate = MICRO[world]
    for _ in range(steps):
        step = engine.global_steps
        mine = list(range(step * 12 + rank, (step + 1) * 12, world))
        for part in range(accumulate):
            batch = data[mine[part * micro : (part + 1) * micro]]
            engine.backward(engine(input_ids=batch, labels=batch, index=torch.zeros(1)).loss)
            engine.step()


def save(folder: str, stage: int, *, wrapped: bool = False) -> State:
    """Train and save two tags in one folder; return the state of the second."""
    restore: Callable[[], None] | None = wrap_initialize() if wrapped else None
    try:
        engine = initialize(stage)
    finally:
        if restore is not None:
            restore()
    if not wrapped:
        assert elastic(engine) is engine
        assert elastic(engine) is engine  # the second call changes nothing
        with pytest.raises(ValueError, match="with other options"):
            elastic(engine, allow_pickle=True)
    assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters
    assert engine.load_checkpoint(folder) == (None, None)
    for step in (1, 2):
        train_steps(engine, 1)
        assert engine.save_checkpoint(folder, client_state={"step": step}) is True
    state = state_of(engine)
    engine.destroy()
    return state


def save_tags(folder: str, *tags: str) -> dict[str, Any]:
    """Save these tags in turn; return the client state that a load without a tag finds."""
    engine = elastic(initialize(2))
    for tag in tags:
        engine.save_checkpoint(folder, tag, client_state={"tag": tag})
    _, client_state = engine.load_checkpoint(folder)
    engine.destroy()
    assert client_state is not None
    return client_state


def save_within(folder: str) -> list[str]:
    """Save three times within a step, and once after it; return the warnings."""
    engine, batch = elastic(initialize(2)), Tokens().tokens[:2]
    with library_warnings() as warnings:
        for _ in range(MICRO[dist.get_world_size()][1]):
            engine.backward(engine(input_ids=batch, labels=batch, index=torch.zeros(1)).loss)
            engine.step()
            engine.save_checkpoint(folder)
            if engine.micro_steps == 1:
                save_checkpoint(engine, f"{folder}/other")
    engine.destroy()
    return warnings


def load_schedule(folder: str, *, saves: bool) -> list[str]:
    """Save or load an engine whose schedule depends on the number of ranks; return warnings."""
    total = 12 * dist.get_world_size()
    engine = elastic(initialize(2, schedule=lambda step: 1.0 - step / total))
    with library_warnings() as warnings:
        if saves:
            train_steps(engine, 2)
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
    engine.destroy()
    return warnings


def load(folder: str, stage: int, tag: str | None = None) -> tuple[State, Any, Any]:
    """Load on this number of ranks; return the state, and the results of the load."""
    engine = elastic(initialize(stage))
    path, client_state = engine.load_checkpoint(folder, tag)
    state = state_of(engine)
    train_steps(engine, 1)
    engine.destroy()
    return state, path, client_state


def refusals(folder: str) -> list[str]:
    """Return the errors of loads that cannot be intended."""
    found = []
    for accumulate, arguments in ((None, {"custom_load_fn": print}), (5, {}), (None, {"tag": "x"})):
        engine = elastic(initialize(2, accumulate=accumulate))
        found.append(error_text(partial(engine.load_checkpoint, folder, **arguments)))
        engine.destroy()
    return found


def load_while_saving(folder: str) -> list[tuple[Any, int]]:
    """Load the tag that is being written in the background."""
    engine = elastic(initialize(2), async_save=True)
    found = []
    for step in (1, 2):
        train_steps(engine, 1)
        engine.save_checkpoint(folder, "best", client_state={"step": step})
    _, state = engine.load_checkpoint(folder, "best")
    found.append((state, engine.global_steps))
    engine.destroy()
    return found


def forget_save(folder: str, job: Job, *, fails: bool) -> None:
    """End after the engine was collected; its save in flight is written during the exit hooks."""
    job.set_environment()
    engine, may_write = elastic(initialize(0), async_save=True), threading.Event()

    def write_at_exit(*args: Any) -> Any:
        assert may_write.wait(HANG_TIMEOUT_S)
        if fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_shards(*args)

    pytest.MonkeyPatch().setattr(background, "write_shards", write_at_exit)
    engine.save_checkpoint(folder)
    seen = weakref.ref(engine)
    del engine
    gc.collect()
    job.note("is collected", seen() is None)
    atexit.register(may_write.set)


def end_during_save(folder: str, job: Job, *, raises: bool) -> None:
    """End while a save in the background takes longer than it has after an exception."""
    job.set_environment()
    engine, patch = elastic(initialize(0), async_save=True), pytest.MonkeyPatch()

    def write_slowly(contents: Any, ranks: Any, cancellation: Any) -> Any:
        time.sleep(3.0)
        return write_shards(contents, ranks, cancellation)

    patch.setattr(background, "write_shards", write_slowly)
    patch.setattr(background, "DRAIN_TIMEOUT_S", 0.5)
    engine.save_checkpoint(folder)
    if raises:
        raise RuntimeError


def load_module_only(folder: str) -> tuple[int, int]:
    """Return the counters of an engine that has loaded weights only."""
    engine = elastic(initialize(2))
    engine.load_checkpoint(folder, load_module_only=True)
    counters = (engine.global_steps, engine.global_samples)
    engine.destroy()
    return counters


def load_for_inference(folder: str) -> bool:
    """Load into an engine without optimizer; return whether it has all masters."""
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    engine = elastic(deepspeed.initialize(model=tiny_model(), config=config)[0])
    engine.load_checkpoint(folder)
    saved = get_fp32_state_dict_from_zero_checkpoint(folder)
    weights = dict(engine.module.named_parameters())
    equal = all(torch.equal(weights[name], saved[name]) for name in weights)
    engine.destroy()
    return equal


def fall_back_beside_another_engine(folder: str) -> list[str]:
    """Save two engines of equal shapes into one folder; load one whose saves are damaged."""
    rank = dist.get_rank()
    actor, critic = elastic(initialize(2)), elastic(initialize(2), fallback=True)
    for step in (1, 2):
        for engine, name in ((critic, "critic"), (actor, "actor")):
            train_steps(engine, 1)
            engine.save_checkpoint(folder, f"{name}-{step}", client_state={"is": (name, step)})
    critic.save_checkpoint(folder, "best")
    train_steps(actor, 1)
    actor.save_checkpoint(folder, "best-1")
    found = []
    for tag, damaged in (("critic-2", "critic-2"), ("critic-2", "critic-1"), ("best", "best")):
        dist.barrier()
        if rank == 0:
            shard = next(Path(folder, damaged).rglob("*optim_states.pt"))
            shard.write_bytes(shard.read_bytes()[:-1])
        dist.barrier()
        try:
            found.append(str(critic.load_checkpoint(folder, tag)[1]["is"]))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found.append(f"{type(error).__name__}: {error}")
    actor.destroy()
    critic.destroy()
    return found


def shown_on_a_terminal(folder: str) -> str:
    """Save and load with a standard error that is a terminal; return what it shows on rank 0."""
    engine, text = elastic(initialize(2)), io.StringIO()
    train_steps(engine, 1)
    text.isatty = lambda: True  # type: ignore[method-assign]
    progress.QUIET_S, quiet_s = 0.0, progress.QUIET_S
    try:
        with redirect_stderr(text):
            engine.save_checkpoint(folder)
            engine.load_checkpoint(folder)
    finally:
        progress.QUIET_S = quiet_s
    engine.destroy()
    return text.getvalue()


def save_to_several_folders(folder: str) -> tuple[str, float]:
    """Save like Ray's template, in which each worker has its own temporary folder."""
    engine = elastic(initialize(2))
    began = time.monotonic()
    failure = error_text(lambda: engine.save_checkpoint(f"{folder}/worker-{dist.get_rank()}"))
    engine.destroy()
    return failure, time.monotonic() - began


def save_stock_over(folder: str, tag: str) -> list[str]:
    """Save without the line over a tag of this library; return how loads are refused."""
    engine = initialize(2)
    train_steps(engine, 1)
    engine.save_checkpoint(folder, tag, save_latest=False)
    engine.destroy()
    return [failure_of(folder, 2, tag=tag, fallback=True) for tag in ("global_step2", None)]


def failure_of(
    folder: str, stage: int, *, tag: str | None = None, bound: bool = True, **options: Any
) -> str:
    """Load what must fail; return how, on this rank."""
    engine = initialize(stage)
    if bound:
        elastic(engine, **options)
    failure = error_text(lambda: engine.load_checkpoint(folder, tag))
    engine.destroy()
    return failure
