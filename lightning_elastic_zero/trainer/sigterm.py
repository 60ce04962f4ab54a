"""SIGTERM, where no callback answers it: all ranks stop before the same batch, at once.

Lightning answers the signal with a broadcast within the signal handler (since 2.5.2). Ranks get it
at different places, so that the handler of one meets another collective of the others, and they
wait for each other until somebody kills them: torchrun's agent after 30 s, at each node that joins.
Here the handler notes the signal, and no more. Before each batch there is a collective already, by
which Lightning tells the ranks of rank 0's signal: it tells of any rank's now. A rank that has got
the signal in the midst of a batch waits for it, in the place of leaving the others alone.

Where that collective fails, training ends. Lightning goes on: after a rank has died, rank 0 then is
in its next collective, while ranks without a connection to the dead one still wait for the flag.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import partial

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_elastic_zero.coordination import any_rank
from lightning_elastic_zero.trainer.launched_world import JOB
from lightning_elastic_zero.trainer.lightning_internals import (
    SigtermSteps,
    end_batch,
    end_epoch,
    note_sigterm,
    replace_sigterm_steps,
)

EXIT_CODE = 128 + signal.SIGTERM
"""What a shell tells of a process that SIGTERM has ended."""


def stop_together(trainer: pl.Trainer) -> None:
    """Make a trainer's ranks stop before the same batch, and at once where one of them is gone."""
    steps = SigtermSteps(
        handler=partial(_on_signal, trainer),
        before_batch=partial(_before_batch, trainer),
        after_batch=partial(_after_batch, trainer),
        after_epoch=partial(_after_epoch, trainer),
    )
    replace_sigterm_steps(trainer, steps)


def set_exit_code(exception: BaseException) -> None:
    """Set the exit code of a process that SIGTERM ends, under torchrun.

    By Lightning it ends with 0. The agent of a rank that has heard of another one's signal would
    take that for the end of the job, and end the whole rendezvous.
    """
    if isinstance(exception, SIGTERMException) and exception.code is None and JOB in os.environ:
        exception.code = EXIT_CODE


def _on_signal(trainer: pl.Trainer, number: int, _: object) -> None:
    """Note it, and pass it on to ranks that Lightning has started."""
    launcher = trainer.strategy.launcher
    if not trainer.received_sigterm and launcher is not None:
        launcher.kill(number)
    note_sigterm(trainer)


def _before_batch(trainer: pl.Trainer) -> None:
    """Raise on all ranks where any was sent a SIGTERM; collective.

    Raises:
        SIGTERMException: one was.
        RuntimeError: a rank is gone, or the network.
    """
    if any_rank(flag=trainer.received_sigterm, device=trainer.strategy.root_device):
        with suppress(RuntimeError):  # Who is gone already has no part in it.
            trainer.strategy.barrier()
        raise SIGTERMException


def _after_batch(trainer: pl.Trainer, fetcher: object) -> None:
    """End a batch; where this rank was sent a SIGTERM, all ranks hear of it before the next one.

    Raises:
        SIGTERMException: there are no others; or a validation was left, in which ranks are alone.
    """
    try:
        end_batch(trainer, fetcher)
    except SIGTERMException:
        if trainer.world_size == 1 or not trainer.training:
            raise


def _after_epoch(trainer: pl.Trainer) -> None:
    """End an epoch, likewise; the last one ends as any does.

    Raises:
        SIGTERMException: there are no others; or a callback has raised it.
    """
    progress = trainer.fit_loop.epoch_progress.total
    completed = progress.completed
    try:
        end_epoch(trainer)
    except SIGTERMException:
        if trainer.world_size == 1 or progress.completed == completed:
            raise
