"""Fits that record fingerprints, and what they said of them."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm

from lightning_elastic_zero.api import load_checkpoint, save_checkpoint
from lightning_elastic_zero.checkpoint import load as loading
from lightning_elastic_zero.checkpoint.fingerprint import check_loaded
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy
from tests.support.fits import FitSpec
from tests.support.outcome import error_text, log_heard
from tests.trainer._failure_cases import engine as plain_engine


@dataclass(frozen=True)
class FingerprintResult:
    saved: str
    """The last save's."""
    live: str
    """Of what was live after the load."""
    messages: tuple[str, ...]


def messages_of_lightning() -> AbstractContextManager[list[str]]:
    """Collect this rank's messages of Lightning's logger."""
    return log_heard("lightning.pytorch.utilities.rank_zero", logging.INFO)


def fit(plan: FitSpec, verb: str = "fit") -> FingerprintResult:
    trainer, net, data, _ = plan.make()
    with messages_of_lightning() as said:
        getattr(trainer, verb)(net, data, ckpt_path=plan.ckpt_path)
    strategy = trainer.strategy
    assert isinstance(strategy, ElasticDeepSpeedStrategy)
    of = [stats.fingerprint if stats else "" for stats in (strategy.last_save, strategy.last_load)]
    return FingerprintResult(
        of[0], of[1], tuple(text for text in said if text.startswith(("Saved", "Loaded")))
    )


def resume_with_a_flipped_bit(
    plan: FitSpec, rank: int, which: str = "masters"
) -> tuple[str, int, str]:
    """Resume where one bit of one rank flips after the first load, before it is compared.

    Args:
        plan: of the run.
        rank: whose.
        which: of its ``"masters"``, the ``"weights"`` that forward reads, or ``"frozen"`` ones.

    Returns:
        The error, the batches that were trained on, and what was loaded in the end.
    """
    flips = [rank]

    def after_the_flip(saved: Any, live: LiveEngine, *of_load: Any) -> Any:
        if flips and comm.get_rank() == flips.pop():
            held = live.rank_state(exclude_frozen=False, keep_module_weights=True)
            if which == "masters":
                fragment = held.flats[0].fragments[0]
                held.flats[0].master.view(torch.int32)[fragment.offset] ^= 1
            else:
                trained = {f.name for flat in held.flats for f in flat.fragments}
                frozen = (name for name in held.frozen if held.module_weights[name].numel())
                name = next(frozen) if which == "frozen" else min(trained)
                bits = {2: torch.int16, 4: torch.int32}[held.module_weights[name].element_size()]
                held.module_weights[name].view(-1).view(bits)[0] ^= 1
        return check_loaded(saved, live, *of_load)

    trainer, net, data, _ = plan.make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "check_loaded", after_the_flip)
        error = error_text(lambda: trainer.fit(net, data, ckpt_path=plan.ckpt_path))
    strategy = trainer.strategy
    assert isinstance(strategy, ElasticDeepSpeedStrategy)
    loaded = strategy.last_load.path if strategy.last_load else ""
    return error, trainer.fit_loop.total_batch_idx + 1, loaded


def with_own_paths(root: str) -> tuple[str, str]:
    """Save to paths that differ between ranks; load one that ranks spell differently.

    Returns:
        The error of the save; the result of the comparison, or the error of the load.
    """
    engine, rank = plain_engine(), comm.get_rank()
    refused = error_text(
        lambda: save_checkpoint(engine, f"{root}/of-{rank}.ckpt", fingerprint=True)
    )
    path, link = Path(root, "a.ckpt"), Path(root, "link")
    save_checkpoint(engine, path, fingerprint=True)
    if rank == 1:
        link.symlink_to(path)
    told: list[str] = []

    def load() -> None:
        loaded = load_checkpoint(engine, link if rank else path, fingerprint=True)
        told.append(loaded.fingerprint_result)

    failed = error_text(load)
    return refused, told[0] if told else failed
