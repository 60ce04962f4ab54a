"""Loads of damaged checkpoints by ranks, with the error and the state of each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tests.support.engines import EngineCase, engine_of, train
from tests.support.fits import FitCase, error_of, fit
from tests.support.oracle import differences, dump
from tests.support.outcome import NOTHING, error_text


@dataclass(frozen=True)
class Outcome:
    message: str
    """Class and message of the error."""
    as_wanted: bool
    """Whether the engine has its earlier state after an error, and the saved state otherwise."""


def load_each(setup: EngineCase, good: str, damaged: tuple[str, ...]) -> list[Outcome]:
    """Load each checkpoint into one engine, which trains a step before each load."""
    from lightning_elastic_zero.api import load_checkpoint

    found = []
    with engine_of(setup, 7, tilt=3.0) as engine:
        load_checkpoint(engine, good)
        saved = dump(engine, setup)
        for step, path in enumerate(damaged):
            train(engine, setup, 100 + step, 101 + step)
            before = dump(engine, setup)
            message = error_text(partial(load_checkpoint, engine, path))
            wanted, after = saved if message == NOTHING else before, dump(engine, setup)
            same = wanted is None or after is None or not differences(wanted, after)
            found.append(Outcome(message, same))
    return found


def fit_from_each(root: str, damaged: tuple[str, ...], good: str) -> list[str]:
    """Resume a Trainer from each damaged checkpoint, then from the intact one; list the errors."""
    plans = [FitCase(f"{root}/out", 2, epochs=1, ckpt_path=path) for path in (*damaged, good)]
    return [error_of(plan) for plan in plans]


def save_two(root: str) -> None:
    """Save one run after one epoch and after two."""
    keep = {"save_top_k": -1, "filename": "{epoch}", "auto_insert_metric_name": False}
    fit(FitCase(root, 2, epochs=2, checkpoint=keep))
