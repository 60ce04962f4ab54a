"""Adam's two kinds of weight decay: in the gradient (Adam), or beside it (AdamW)."""

from __future__ import annotations

from typing import Any

from lightning_elastic_zero.engine.optimizer_state import ADAM_FAMILY
from lightning_elastic_zero.manifest import Manifest

DECOUPLED_KEY = "decoupled_weight_decay"
"""Where newer releases of torch keep which kind it is; DeepSpeed's optimizers have an attribute."""

BY_CLASS = {"AdamW": True, "Adam": False}

NAMED = {True: "decoupled (AdamW's)", False: "in the gradient (Adam's)"}


def weight_decay_change(source: Manifest, inner: Any) -> str:  # noqa: ANN401 (any optimizer)
    """Return in sentences how weight decay is of another kind; empty where it is not.

    Args:
        source: the checkpoint, whose hyperparameters are restored.
        inner: the live optimizer, which one of Adam's kind saved.
    """
    name = type(inner).__name__
    if name not in ADAM_FAMILY:
        return ""
    for index, (held, group) in enumerate(zip(source.groups, inner.param_groups, strict=False)):
        if not held.hyperparameters.get("weight_decay"):
            continue
        own = BY_CLASS.get(source.writer.optimizer)
        was = held.hyperparameters.get(DECOUPLED_KEY, own)
        now = group.get(DECOUPLED_KEY, getattr(inner, "adam_w_mode", BY_CLASS.get(name)))
        if was is None or now is None or bool(was) == bool(now):
            continue
        saved, here = NAMED[bool(was)], NAMED[bool(now)]
        if DECOUPLED_KEY in held.hyperparameters and DECOUPLED_KEY in group:
            return (
                f"Weight decay of parameter group {index} goes on as it was saved, {saved}; {name} "
                f"is configured here with one that is {here}. load_hyperparameters=False takes "
                "what is configured."
            )
        return (
            f"Weight decay of parameter group {index} was {saved} when it was saved, and {name} "
            f"has one that is {here}: steps are other ones from now on. Configure the optimizer "
            "that was saved to go on as before."
        )
    return ""
