"""Failure cases that run on ranks; most return the error message of their rank."""

from __future__ import annotations

import logging
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from torch import nn

from lightning_elastic_zero.api import load_checkpoint, save_checkpoint
from lightning_elastic_zero.checkpoint import manager
from lightning_elastic_zero.coordination.liveness import Timeouts
from tests.support.fits import SMALL_BUCKETS, FitCase, error_of
from tests.support.outcome import NOTHING, captured_log, captured_warnings, error_text

IN_EXCEPTION_ABSENT_S = 4 * Timeouts().heartbeat_interval_s
"""The shortest timeout that is permitted for ranks that have not entered a call."""


FAILING_STEP = 4


class Odd:
    """Neither plain data nor an instance of a class known to be safe."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    def __hash__(self) -> int:
        return 1


def engine() -> Any:
    """Build a small ZeRO-2 engine that has taken a step."""
    module = nn.Linear(9, 3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2, **SMALL_BUCKETS},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(module.parameters())
    made, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    made.backward(made(torch.ones(1, 9)).sum())
    made.step()
    return made


def save_to_own_path(root: str) -> str:
    return error_text(lambda: save_checkpoint(engine(), f"{root}/{comm.get_rank()}.ckpt"))


def resume_on_first_rank_only(root: str) -> str:
    """Resume with a path that only rank 0 has found, as in a folder that is not shared."""
    found = f"{root}/last.ckpt" if comm.get_rank() == 0 else None
    return error_of(FitCase(f"{root}/other", 2, epochs=2, ckpt_path=found))


def fail_in_training(root: str, hook: str, ranks: tuple[int, ...]) -> str:
    """Train with saves on exceptions until some ranks raise in a hook, and others much later.

    Returns warnings of omitted saves and the traceback.
    """

    def fail(*_: Any) -> None:
        if comm.get_rank() not in ranks:
            time.sleep(2 * IN_EXCEPTION_ABSENT_S)
        msg = "out of luck"
        raise RuntimeError(msg)

    class Failing(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            """Take a step, and fail before DeepSpeed copies masters into the weights."""
            super().step(closure)
            if any(state["step"] == FAILING_STEP for state in self.state.values()):
                fail()

    manager._IN_EXCEPTION_ABSENT_S = IN_EXCEPTION_ABSENT_S
    options: dict[str, Any] = {"save_on_exception": True, "save_last": True, "every_n_epochs": 5}
    if hook == "step":
        options.update(every_n_train_steps=2, every_n_epochs=None, filename="{step}")
    plan = FitCase(root, 2, epochs=3, checkpoint=options)
    # A ModelCheckpoint saves nothing at step 0.
    added: list[Any] = [OnExceptionCheckpoint(root)]
    if hook != "step":
        added.insert(0, LambdaCallback(**{hook: fail}))
    trainer, net, data, _ = plan.make(*added)
    if hook == "step":
        net.configure_optimizers = lambda: Failing(net.parameters())
        # With a name of its own, each last checkpoint is deleted for the next one.
        (saves,) = (c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint))
        saves.CHECKPOINT_NAME_LAST = "{step}-last"
    trace = NOTHING
    with captured_warnings("is not saved") as warned:
        try:
            trainer.fit(net, **data)
        except Exception as error:  # noqa: BLE001 - the test checks it
            trace = "".join(traceback.format_exception(error))
    return "\n".join([*warned, trace])


def requeue_in_step(root: str) -> str:
    """Save as Lightning does before it requeues a SLURM job, inside an optimizer step."""
    trainers: list[Any] = []

    class Signalled(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            """Take a step, and save before DeepSpeed copies masters into the weights."""
            super().step(closure)
            trainers[0].save_checkpoint(f"{root}/hpc_ckpt_1.ckpt")

    trainer, net, data, _ = FitCase(root, 2).make()
    trainers.append(trainer)
    net.configure_optimizers = lambda: Signalled(net.parameters())
    return error_text(partial(trainer.fit, net, **data))


def save_objects(root: str) -> str:
    """Save a state that contains Python objects; return the messages about them."""
    state = {"path": Path("a/b"), "deep": [{"odd": Odd()}], "plain": 1}
    with captured_log("lightning_elastic_zero", logging.WARNING) as messages:
        save_checkpoint(engine(), f"{root}/x.ckpt", state, {"own": [comm.get_rank(), Odd()]})
    return "; ".join(["saved", *messages])


def load_objects(root: str, allow: bool) -> str:
    expected = {"path": Path("a/b"), "deep": [{"odd": Odd()}], "plain": 1}
    own = {"own": [comm.get_rank(), Odd()]} if comm.get_world_size() == 2 else {}

    def load() -> None:
        found = load_checkpoint(engine(), f"{root}/x.ckpt", allow_pickle=allow)
        assert found.client_state == expected
        assert found.rank_state == own

    error = error_text(load)
    return "equal" if error == NOTHING else error
