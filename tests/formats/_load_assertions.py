"""Loads of checkpoints by torch and Lightning into ZeRO engines, and the expected results."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from tests.formats._restore_programs import Case, Outcome, restore
from tests.formats._torch_writers import Run
from tests.support.checkpoints import Loading, Refusal, Saved, found_after_load, refusal
from tests.support.engines import EngineCase, engine_of, train
from tests.support.foreign_checkpoints import Fixture
from tests.support.oracle import Dump, differences, dump
from tests.support.outcome import captured_log
from tests.support.processes import PROMPT_TIMEOUT_S
from tests.support.ranks import Pools

TARGETS = (
    EngineCase(1, "2", bucket=5000),
    EngineCase(2, "3", bucket=5000, sub_group=700),
    EngineCase(3, "1", bucket=5000, round_robin=True),
)
"""One, two and three devices, and all stages; no tensor can be divided by three."""


def as_fixture(run: Run) -> Fixture:
    """Return the state of a writer as a fixture, with the buffers of one rank."""
    folder = Path(f"{run.path}.d")
    folder.mkdir(exist_ok=True)
    truth = folder / "truth.pt"
    if not truth.exists():
        truth.symlink_to(run.truth_path)
    return Fixture(folder, EngineCase(1), {"steps": run.steps})


def assert_restored(
    pools: Pools, run: Run, target: EngineCase, client_state: dict[str, Any], **changes: Any
) -> None:
    """Assert that a load restores the state of the writer, bit for bit."""
    case = Case(
        fixture=as_fixture(run),
        target=target,
        path=run.path,
        client_state=client_state,
        **changes,
    )
    assert restored(pools, case).verdict.tensors >= 27


def restored(pools: Pools, case: Case) -> Outcome:
    """Load; assert that the state is the writer's, bit for bit."""
    outcome = pools.run(case.target.world, partial(restore, case))[0]
    assert outcome is not None
    outcome.verdict.assert_same()
    return outcome


def around_load(pools: Pools, target: EngineCase, path: str, **options: Any) -> tuple[Dump, Dump]:
    """Return what a run held before and after a load."""
    program = partial(found_after_load, target, Saved(target, path), options)
    pair = pools.run(target.world, program)[0]
    assert pair is not None
    return pair


def refused_all(
    pools: Pools, target: EngineCase, paths: list[str], **options: Any
) -> list[Refusal]:
    """Return the errors of loads of several checkpoints into one run, which must not change."""
    of_ranks = pools.run(target.world, partial(refusals, target, paths, **options))
    assert all(found == of_ranks[0] for found in of_ranks), of_ranks
    return [Refusal(*found, 0.0, unchanged=True) for found in of_ranks[0]]


def refusals(target: EngineCase, paths: list[str], **options: Any) -> list[tuple[str, str]]:
    """Try to load each checkpoint; return the names and messages of the errors. Collective."""
    with engine_of(target, 7, tilt=3.0) as engine:
        train(engine, target, 100, 101)
        before = dump(engine, target)
        found = []
        for path in paths:
            try:
                Loading(path, options)(engine)
            except Exception as error:  # noqa: BLE001 (the test checks it)
                found.append((type(error).__name__, str(error)))
            else:
                found.append(("nothing", path))
        after = dump(engine, target)
    assert before is None or after is None or not differences(before, after)
    return found


def refused(pools: Pools, target: EngineCase, path: str, **options: Any) -> Refusal:
    """Return the error of a load, which must be prompt, equal on all ranks, and change nothing."""
    found = pools.run(target.world, partial(refusal, target, Loading(path, options)))
    first = found[0]
    assert all((r.error, r.message) == (first.error, first.message) for r in found), found
    assert all(r.unchanged for r in found), found
    assert all(r.seconds < PROMPT_TIMEOUT_S for r in found)
    return first


def warnings_of_load(setup: EngineCase, path: str, again: str = "", **options: Any) -> list[str]:
    """Load, and save again; return this rank's warnings. Collective."""
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    with engine_of(setup, 7) as engine:
        with captured_log("lightning_elastic_zero", logging.WARNING) as messages:
            load_checkpoint(engine, path, **options)
        if again:
            save_checkpoint(engine, again)
    return messages
