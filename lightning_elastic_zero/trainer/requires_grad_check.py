"""Parameters that are frozen or unfrozen during a fit: DeepSpeed does not follow, so this warns."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_elastic_zero.engine import follows_requires_grad, trained_parameters
from lightning_elastic_zero.text import format_names

_LISTED = 10
"""Names in a warning; the rest is counted."""

_HELPS = (
    "To train a part of a model later, let it require a gradient before fit, in a parameter group "
    "of its own with lr=0, and raise that group's lr when its turn has come (lr=0 keeps it as it "
    "is). Or end the fit and begin another one from its checkpoint, load_optimizer_state=False: "
    "DeepSpeed asks what requires a gradient when a fit begins"
)


class RequiresGradCheck:
    """Compares what requires a gradient with what the optimizer was built of."""

    def __init__(self, engine: Any) -> None:
        """Begin a fit with DeepSpeed's engine, whose optimizer owns what is trained."""
        owned = set(trained_parameters(engine))
        parameters = [] if follows_requires_grad(engine) else list(engine.module.parameters())
        self._trained = tuple(p for p in parameters if p in owned and p.requires_grad)
        self._others = tuple(p for p in parameters if p not in owned and not p.requires_grad)
        self._told_epoch = -1

    def before_batch(self, trainer: pl.Trainer, _batch_idx: int) -> None:
        """Warn of what is not as it was when the fit began; once in an epoch."""
        module, epoch = trainer.lightning_module, trainer.current_epoch
        if self._told_epoch == epoch:
            return
        thawed = {p for p in self._others if p.requires_grad}
        frozen = {p for p in self._trained if not p.requires_grad}
        if not (thawed or frozen):
            return
        self._told_epoch = epoch
        said = []
        if thawed:
            said.append(
                f"unfrozen since the fit began, and not trained: {_names(module, thawed)}. "
                "DeepSpeed builds its optimizer once, of what requires a gradient then"
            )
        if frozen:
            said.append(
                f"frozen since the fit began, and still changed by weight decay and the "
                f"optimizer's moments: {_names(module, frozen)}"
            )
        rank_zero_warn(f"Epoch {epoch}: parameters {'; '.join(said)}. {_HELPS}.")


def _names(module: nn.Module, parameters: Collection[nn.Parameter]) -> str:
    """List names, the first of them where there are many."""
    return format_names((n for n, p in module.named_parameters() if p in parameters), _LISTED)
