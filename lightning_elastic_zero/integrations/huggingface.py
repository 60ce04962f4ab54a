"""``elastic``: exact resume on another number of devices, by one line in a user's script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lightning_elastic_zero.coordination.liveness import ABSENT_TIMEOUT_S, STALL_TIMEOUT_S
from lightning_elastic_zero.integrations.engines import (
    EngineCheckpoints,
    Options,
    is_elastic,
    is_engine,
)

T = TypeVar("T")


def elastic(
    x: T,
    *,
    allow_global_batch_change: bool = False,
    strict_optimizer: bool = True,
    rename: Mapping[str, str] | None = None,
    allow_pickle: bool = False,
    fallback: bool = False,
    fingerprint: bool = False,
    save_module_weights: bool = False,
    async_save: bool = False,
    max_snapshot_bytes: int | None = None,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    absent_timeout_s: float = ABSENT_TIMEOUT_S,
) -> T:
    """Make a Trainer, an Accelerator or an engine save and load elastic checkpoints.

    Call it on every rank. The methods are bound on the object that is passed, and on the engines
    that it creates later; no class and no module is changed. Folders and file names stay as the
    loop has them: ``checkpoint-10/global_step10`` is then a checkpoint of this library. Checkpoints
    that DeepSpeed itself wrote there are loaded too.

    Args:
        x: a ``transformers.Trainer`` or a subclass of it (TRL), an ``accelerate.Accelerator``, or
            what ``deepspeed.initialize`` returned first.
        allow_global_batch_change: True: load a checkpoint that was saved with another number of
            samples per optimizer step. False: refuse it, and name the settings that keep the
            number.
        strict_optimizer: see ``load_checkpoint``, as ``rename`` and ``allow_pickle``.
        rename: see ``load_checkpoint``.
        allow_pickle: see ``load_checkpoint``.
        fallback: True: where a checkpoint is damaged or unfinished, resume from the newest intact
            one before it, with a warning. A Trainer looks in its ``output_dir``.
        fingerprint: True: saves record a fingerprint of the state, and loads compare it.
        save_module_weights: True: write the low-precision weights too, for tools that need them.
        async_save: True: training waits only for a copy of the state in host memory; the checkpoint
            is written in the background. ``x.wait_for_save()`` waits for it; a Trainer does so at
            the end of ``train()``.
        max_snapshot_bytes: limit of that copy per rank; None: no limit.
        stall_timeout_s: see ``save_checkpoint``, as ``absent_timeout_s``.
        absent_timeout_s: see ``save_checkpoint``.

    Returns:
        ``x``.

    Raises:
        TypeError: ``x`` is something else.
        ValueError: an option has a value that it cannot have.
        UnsupportedError: the Trainer or Accelerator does not run DeepSpeed, or saves to several
            nodes' own disks.
    """
    options = Options.of(
        allow_global_batch_change=allow_global_batch_change,
        strict_optimizer=strict_optimizer,
        rename=rename,
        allow_pickle=allow_pickle,
        fallback=fallback,
        fingerprint=fingerprint,
        save_module_weights=save_module_weights,
        async_save=async_save,
        max_snapshot_bytes=max_snapshot_bytes,
        stall_timeout_s=stall_timeout_s,
        absent_timeout_s=absent_timeout_s,
    )
    if is_engine(x):
        if not is_elastic(x):
            EngineCheckpoints(x, options).bind()
    elif _is(x, "transformers", "Trainer"):
        from lightning_elastic_zero.integrations.trainers import (  # noqa: PLC0415 (slow)
            bind_trainer,
        )

        bind_trainer(x, options)
    elif _is(x, "accelerate", "Accelerator"):
        from lightning_elastic_zero.integrations.accelerators import (  # noqa: PLC0415 (slow)
            AcceleratorBinding,
        )

        if not is_elastic(x):
            AcceleratorBinding(x, options).bind()
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
    from lightning_elastic_zero.engine.support import replace_initialize  # noqa: PLC0415 (DeepSpeed)

    Options.of(**options)
    return replace_initialize(lambda engine: elastic(engine, **options))
