"""The broadcast by which Lightning tells all ranks of a SIGTERM: where it fails, training ends.

Since 2.5.2, ``_TrainingEpochLoop`` broadcasts rank 0's flag before each batch, and goes on where
that raises. After a rank has died, rank 0 then is in its next collective, while ranks without a
connection to the dead one still wait for the flag: nobody fails before the collectives' timeout.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_elastic_zero.coordination import broadcast_flag
from lightning_elastic_zero.trainer.lightning_internals import replace_sigterm_broadcast


def raise_failures(trainer: pl.Trainer) -> None:
    """Make a trainer's broadcast raise what it fails by."""
    replace_sigterm_broadcast(trainer, partial(_broadcast, trainer))


def _broadcast(trainer: pl.Trainer) -> None:
    """Raise on all ranks where rank 0 was sent a SIGTERM, as Lightning does; collective.

    Raises:
        SIGTERMException: it was.
        RuntimeError: a rank is gone, or the network.
    """
    if broadcast_flag(flag=trainer.received_sigterm, device=trainer.strategy.root_device):
        with suppress(RuntimeError):  # Who is gone already has no part in it.
            trainer.strategy.barrier()
        raise SIGTERMException
