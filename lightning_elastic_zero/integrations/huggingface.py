"""``elastic``: exact resume on another number of devices, by one line in a user's script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from lightning_elastic_zero.core.options import takes
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.integrations.engines import (
    OTHER_OPTIONS,
    EngineCheckpoints,
    Loop,
    LoopOptions,
    bound_options,
    is_a,
    is_engine,
)

T = TypeVar("T")


@takes(LoopOptions)
def elastic(x: T, **options: Any) -> T:
    """Make a Trainer, an Accelerator or an engine save and load elastic checkpoints.

    Call it on every rank. It replaces methods of ``x`` and of the engines that ``x`` creates later,
    but changes no class or module. Folders and file names stay the same:
    ``checkpoint-10/global_step10`` is then a checkpoint of this library. Existing checkpoints of
    DeepSpeed load too.

    With ``async_save``, ``x.wait_for_save()`` waits for publication. A Trainer calls it at the end
    of ``train()``.

    Args:
        x: A ``transformers.Trainer`` or a subclass of it (TRL), an ``accelerate.Accelerator``, or
            the engine that ``deepspeed.initialize`` returned.
        **options: Fields of ``ElasticOptions``, and ``allow_global_batch_change`` (bool): load a
            checkpoint that was saved with another number of samples per optimizer step. False:
            refuse it, and list settings that keep the number.

    Returns:
        ``x``.

    Raises:
        TypeError: ``x`` is something else, or an option is unknown.
        ValueError: An option has an invalid value, or another one than in an earlier call for the
            same object.
        UnsupportedError: The Trainer or Accelerator does not run DeepSpeed, or an argument of it
            is not supported.
    """
    checked = LoopOptions(**options)
    if not getattr(getattr(x, "args", None), "save_on_each_node", False):
        _refuse_node_copies(options)
    if (before := bound_options(x)) is not None:
        if replace(before, **options) != before:
            raise ValueError(OTHER_OPTIONS)
    elif is_engine(x):
        EngineCheckpoints(x, checked, Loop(is_plain=True)).bind()
    elif is_a(x, "transformers", "Trainer"):
        from lightning_elastic_zero.integrations.trainers import bind_trainer

        bind_trainer(x, checked)
    elif is_a(x, "accelerate", "Accelerator"):
        from lightning_elastic_zero.integrations.accelerators import bind_accelerator

        bind_accelerator(x, checked)
    else:
        msg = (
            f"elastic() was given a {type(x).__name__}: it takes a transformers.Trainer, an "
            "accelerate.Accelerator, or the engine that deepspeed.initialize returns"
        )
        raise TypeError(msg)
    return x


@takes(LoopOptions)
def wrap_initialize(**options: Any) -> Callable[[], None]:
    """Make every engine that ``deepspeed.initialize`` creates from now on elastic.

    For programs whose code you do not edit, such as LLaMA-Factory: call it before the program
    starts. It replaces ``deepspeed.initialize`` in the whole process and covers only the engine's
    state: random state of additional ranks and accelerate's schedulers are not converted.

    Args:
        **options: Those of ``elastic``, without ``async_save``: the program may delete its last
            complete checkpoint, or save over it, while the next one is being written.

    Returns:
        A function that restores the original ``deepspeed.initialize``.

    Raises:
        TypeError: An option is unknown.
        ValueError: An option has an invalid value.
        UnsupportedError: ``async_save`` is set.
    """
    from lightning_elastic_zero.engine.installation import replace_initialize

    checked = LoopOptions(**options)
    _refuse_node_copies(options)
    if checked.async_save:
        msg = (
            "wrap_initialize(async_save=True): the program does not know that saves are in the "
            "background, and may delete its last complete checkpoint while the next one is being "
            "written (save_total_limit=1). Leave it out, or have the program call "
            "elastic(trainer, async_save=True), which checks this, or elastic(engine, "
            "async_save=True)"
        )
        raise UnsupportedError(msg)
    return replace_initialize(lambda engine: elastic(engine, **options))


def _refuse_node_copies(options: Mapping[str, Any]) -> None:
    if "node_copies" in options:
        msg = (
            f"node_copies={options['node_copies']} has no effect here: only a Trainer with "
            "save_on_each_node=True saves on nodes. Leave it out"
        )
        raise ValueError(msg)
