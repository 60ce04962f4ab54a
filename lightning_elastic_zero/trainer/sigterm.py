"""SIGTERM, where no callback answers it: all ranks of a fit stop before the same batch.

Lightning answers the signal with a broadcast within the signal handler (since 2.5.2). Ranks get it
at different places, so that the handler of one meets another collective of the others, and they
wait for each other until somebody kills them: torchrun's agent after 30 s, at each node that joins.
Here the handler notes the signal, and no more. Before each batch there is a collective already, by
which Lightning tells the ranks of rank 0's signal: it tells of any rank's now, and Lightning hears
of the signal then only. So no rank leaves a step, a validation or the check before the first batch
alone; what begins no batch any more, as the end of a fit, asks once more.

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
    is_fitting,
    note_sigterm,
    replace_sigterm_steps,
)

_SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
"""What a shell tells of a process that SIGTERM has ended."""


class SigtermAgreement:
    """Whether any rank of a fit was sent a SIGTERM."""

    def __init__(self) -> None:
        self._heard = False

    def begin(self, trainer: pl.Trainer) -> None:
        """Take the place of Lightning's handler and broadcast, for a fit or an evaluation."""
        self._heard = False
        replace_sigterm_steps(
            trainer, partial(self._on_signal, trainer), partial(self.stop_together, trainer)
        )

    def _on_signal(self, trainer: pl.Trainer, number: int, _: object) -> None:
        """Note it, and pass it on to ranks that Lightning has started.

        One device, and each rank of an evaluation, which has no collective before a batch, ends by
        itself.
        """
        launcher = trainer.strategy.launcher
        if not self._heard and launcher is not None:
            launcher.kill(number)
        self._heard = True
        if trainer.world_size == 1 or not is_fitting(trainer):
            note_sigterm(trainer)

    def stop_together(self, trainer: pl.Trainer) -> None:
        """Raise on all ranks where any was sent a SIGTERM; collective, where there are several.

        Raises:
            SIGTERMException: one was.
            RuntimeError: a rank is gone, or the network.
        """
        if trainer.world_size == 1:
            return  # Lightning asks for itself.
        heard = self._heard or trainer.received_sigterm
        if any_rank(flag=heard, device=trainer.strategy.root_device):
            note_sigterm(trainer)
            with suppress(RuntimeError):  # Who is gone already has no part in it.
                trainer.strategy.barrier()
            raise SIGTERMException


def set_exit_code(exception: BaseException) -> None:
    """Set the exit code of a process that SIGTERM ends, under torchrun.

    By Lightning it ends with 0. The agent of a rank that has heard of another one's signal would
    take that for the end of the job, and end the whole rendezvous.
    """
    if isinstance(exception, SIGTERMException) and exception.code is None and JOB in os.environ:
        exception.code = _SIGTERM_EXIT_CODE
