"""A call that one rank made by mistake does not affect later calls of all ranks."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from tests.support.engines import Engine, EngineCase, engine_of, train
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

SETUP = EngineCase(2, "2")
ALONE_S, TOGETHER_S = 1, 30


class _TimeIsUpError(Exception):
    """The time limit of a rank has passed."""


def _give_up(*_: object) -> None:
    raise _TimeIsUpError


def _saved(engine: Engine, path: Path, timeout_s: int) -> str:
    from lightning_elastic_zero.api import save_checkpoint

    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(timeout_s)
    try:
        save_checkpoint(engine, path)
    except Exception as error:  # noqa: BLE001 (the test checks it)
        return f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    return "saved"


def saves(folder: str) -> list[str]:
    """Save on one rank, then twice on all ranks."""
    from torch import distributed

    found = []
    with engine_of(SETUP, 0) as engine:
        for step in range(3):
            train(engine, SETUP, step, step + 1)
            if step == 0 and distributed.get_rank() == 0:
                found.append(_saved(engine, Path(folder, "alone"), ALONE_S))
            if step > 0:
                found.append(_saved(engine, Path(folder, str(step)), TOGETHER_S))
    return found


def test_a_save_on_one_rank_does_not_disturb_later_saves(pools: Pools, tmp_path: Path) -> None:
    first, second = pools.run(SETUP.world, partial(saves, str(tmp_path)))
    assert first == ["_TimeIsUpError: ", "saved", "saved"]
    assert second == ["saved", "saved"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
