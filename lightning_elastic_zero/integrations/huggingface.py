"""``elastic``: exact resume on another number of devices, by one line in a user's script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from lightning_elastic_zero.core.options import takes
from lightning_elastic_zero.integrations.engines import (
    OTHER_OPTIONS,
    EngineCheckpoints,
    Loop,
    LoopOptions,
    bound_options,
    is_engine,
)

T = TypeVar("T")


@takes(LoopOptions)
def elastic(x: T, **options: Any) -> T:
    """Make a Trainer, an Accelerator or an engine save and load elastic checkpoints.

    Call it on every rank. The methods are bound on the object that is passed, and on the engines
    that it creates later; no class and no module is changed. Folders and file names stay as the
    loop has them: ``checkpoint-10/global_step10`` is then a checkpoint of this library. Checkpoints
    that DeepSpeed itself wrote there are loaded too.

    ``x.wait_for_save()`` waits for a save with ``async_save``; a Trainer does so at the end of
    ``train()``.

    Args:
        x: a ``transformers.Trainer`` or a subclass of it (TRL), an ``accelerate.Accelerator``, or
            what ``deepspeed.initialize`` returned first.
        **options: of ``ElasticOptions``, and ``allow_global_batch_change`` (bool): load a
            checkpoint that was saved with another number of samples per optimizer step. False:
            refuse it, and name the settings that keep the number.

    Returns:
        ``x``.

    Raises:
        TypeError: ``x`` is something else, or an option is unknown.
        ValueError: an option has a value that it cannot have, or another one than in an earlier
            call for the same object.
        UnsupportedError: the Trainer or Accelerator does not run DeepSpeed, or saves to several
            nodes' own disks.
    """
    checked = LoopOptions(**options)
    if (before := bound_options(x)) is not None:
        if replace(before, **options) != before:
            raise ValueError(OTHER_OPTIONS)
    elif is_engine(x):
        EngineCheckpoints(x, checked, Loop()).bind()
    elif _is(x, "transformers", "Trainer"):
        from lightning_elastic_zero.integrations.trainers import (
            bind_trainer,
        )

        bind_trainer(x, checked)
    elif _is(x, "accelerate", "Accelerator"):
        from lightning_elastic_zero.integrations.accelerators import (
            AcceleratorBinding,
        )

        AcceleratorBinding(x, checked).bind()
    else:
        msg = (
            f"elastic() was given a {type(x).__name__}: it takes a transformers.Trainer, an "
            "accelerate.Accelerator, or the engine that deepspeed.initialize returns"
        )
        raise TypeError(msg)
    return x


def _is(value: object, package: str, name: str) -> bool:
    """Whether something is of a class that this module does not import."""
    return any(
        cls.__name__ == name and cls.__module__.split(".")[0] == package
        for cls in type(value).__mro__
    )


@takes(LoopOptions)
def wrap_initialize(**options: Any) -> Callable[[], None]:
    """Make every engine that ``deepspeed.initialize`` creates from now on elastic.

    For programs without code of yours, such as LLaMA-Factory: call it before the program starts.
    It replaces ``deepspeed.initialize`` for the whole process, and covers engines only: what
    ``elastic(trainer)`` restores besides (random state of additional ranks, accelerate's
    schedulers) stays as those libraries leave it.

    Args:
        **options: of ``elastic``.

    Returns:
        A function that restores ``deepspeed.initialize``.
    """
    from lightning_elastic_zero.engine.support import replace_initialize

    LoopOptions(**options)
    return replace_initialize(lambda engine: elastic(engine, **options))
