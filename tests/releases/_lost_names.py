"""Fit with a Trainer under releases that lack a name on which the library relies.

A program, run by a cell's Python. For each of the two packages it prints the error's class and
message, and the number of optimizer steps before the error.
"""

from __future__ import annotations

import json
import logging
import warnings

import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_elastic_zero.engine.deepspeed import NAMES
from lightning_elastic_zero.trainer.lightning import PRIVATE_NAMES
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

LOST = "a_name_that_no_release_has"


def refusal() -> dict[str, object]:
    """Fit; return the error and the number of steps."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ElasticDeepSpeedStrategy(stage=2),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(BoringModel(), BoringDataModule())
    except Exception as error:  # noqa: BLE001 - the test checks it
        raised = f"{type(error).__name__}: {error}"
    else:
        raised = "nothing was raised"
    return {"raised": raised, "steps": trainer.global_step}


def main() -> None:
    """Fit with a missing name of each package, and without one."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    names = PRIVATE_NAMES["the fit loop"]
    PRIVATE_NAMES["the fit loop"] += f" {LOST}"
    of_lightning = refusal()
    PRIVATE_NAMES["the fit loop"] = names
    wrapper = NAMES["DeepSpeedZeroOptimizer"]
    names_of_all = wrapper[""]
    wrapper[""] += f" {LOST}"
    of_deepspeed = refusal()
    wrapper[""] = names_of_all
    print(json.dumps({"Lightning": of_lightning, "DeepSpeed": of_deepspeed, "none": refusal()}))


if __name__ == "__main__":
    main()
