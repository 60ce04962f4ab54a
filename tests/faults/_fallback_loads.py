"""Loads from a folder in which newer checkpoints are damaged, as ranks do them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from tests.support.checkpoints import Saved
from tests.support.engines import Setup, engine_of
from tests.support.fits import FitSpec
from tests.support.oracle import differences, dump


@dataclass(frozen=True)
class FallbackResult:
    """How a load ended on one rank."""

    message: str
    """Class and message of what was raised."""
    instead_of: str
    warnings: tuple[str, ...]
    is_older: bool
    """Rank 0: the engine holds just what the older checkpoint's writer held."""


class WarningCollector(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.texts.append(record.getMessage())


def load_from(setup: Setup, path: str, older: Saved, options: dict[str, Any]) -> FallbackResult:
    """Load into a run from another seed."""
    from lightning_elastic_zero.api import load_checkpoint

    message, instead_of, kept = "", "", WarningCollector()
    log = logging.getLogger("lightning_elastic_zero")
    log.addHandler(kept)
    try:
        with engine_of(setup, 7, tilt=3.0) as engine:
            try:
                instead_of = load_checkpoint(engine, path, **options).instead_of
            except Exception as error:  # noqa: BLE001 - the test looks at it
                message = f"{type(error).__name__}: {error}"
            found = dump(engine, setup)
    finally:
        log.removeHandler(kept)
    same = found is None or not differences(older.dump(), found)
    return FallbackResult(message, instead_of, tuple(kept.texts), same)


def fit_and_test(root: str, path: str) -> tuple[int, str]:
    """Resume with leave to fall back, then test from the same path; give the step, what was said.

    To evaluate another checkpoint than the one that was named is no use to anybody.
    """
    from tests.support.fits import error_of, fit

    plan = FitSpec(f"{root}/out", 2, epochs=2, ckpt_path=path, strategy={"fallback": True})
    return int(fit(plan)["step"]), error_of(plan, "test")
