"""Links to checkpoints, made in ``ModelCheckpoint``'s place while a run lasts.

``ModelCheckpoint(save_last="link")`` removes its link, then makes it anew, as soon as the save has
returned. Killed in between, there is none; and what is saved in the background is not there yet.
Nothing else of Lightning's stands between the two, so that this one method is answered here: on the
instance, from the strategy's setup to its teardown.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

_METHOD = "_link_checkpoint"
"""Of Lightning's 2.6: a static method of the trainer, the checkpoint and the link to it."""


class Linking:
    """Answers the callbacks that would make links to checkpoints by themselves."""

    def __init__(self) -> None:
        self._answered: list[Checkpoint] = []

    def begin(self, trainer: pl.Trainer, make: Callable[[str, str], None]) -> None:
        """Answer the trainer's callbacks; whoever has a way of his own keeps it.

        Args:
            trainer: whose callbacks they are.
            make: lets a link name a checkpoint: called on all ranks, with the checkpoint's path
                and the link's.
        """

        def instead(trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
            make(filepath, linkpath)
            trainer.strategy.barrier()

        self.end()
        self._answered = [c for c in trainer.checkpoint_callbacks if _is_lightnings_own(c)]
        for callback in self._answered:
            vars(callback)[_METHOD] = instead

    def end(self) -> None:
        """Leave the callbacks as they were."""
        for callback in self._answered:
            vars(callback).pop(_METHOD, None)
        self._answered = []


def _is_lightnings_own(callback: Checkpoint) -> bool:
    """Tell whether a callback makes links the way that Lightning does."""
    lightnings = getattr(ModelCheckpoint, _METHOD, None)
    of_its_class = getattr(type(callback), _METHOD, None)
    return lightnings is not None and of_its_class is lightnings and _METHOD not in vars(callback)
