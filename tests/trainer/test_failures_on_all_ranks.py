"""A failure is raised on every rank in bounded time, and loses no data."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.fits import FitCase, fit, listing
from tests.support.processes import PROMPT_TIMEOUT_S
from tests.support.ranks import Pools
from tests.trainer import _failure_cases

pytestmark = pytest.mark.engine


def messages_of(worlds: Pools, world: int, case: Any, *arguments: Any) -> list[str]:
    """Run a case on a world; return each rank's message, in bounded time."""
    started = time.monotonic()
    messages = worlds.run(world, partial(case, *arguments))
    assert time.monotonic() - started < PROMPT_TIMEOUT_S
    return messages


@pytest.mark.long
def test_paths_that_differ_between_ranks_are_refused(worlds: Pools, tmp_path: Path) -> None:
    for message in messages_of(worlds, 2, _failure_cases.save_to_own_path, str(tmp_path)):
        assert message.startswith("SaveError")
        assert "Pass the same path on all ranks" in message
    assert not any(listing(str(tmp_path)).values())


def test_a_checkpoint_that_one_rank_cannot_find_stops_all(worlds: Pools, tmp_path: Path) -> None:
    root = str(tmp_path)
    worlds.run(2, partial(fit, FitCase(root, 2)))
    for message in messages_of(worlds, 2, _failure_cases.resume_on_first_rank_only, root):
        assert message.startswith("RanksError")
        assert "load" in message


@pytest.mark.long
def test_objects_are_restored_only_with_allow_pickle(worlds: Pools, tmp_path: Path) -> None:
    """Also objects of the state of a rank."""
    root = str(tmp_path)
    first = messages_of(worlds, 2, _failure_cases.save_objects, root)
    assert first[0].startswith(f"saved; {root}/x.ckpt: deep.0.odd contains a Python object of")
    assert "Odd, which is not plain data: loading this checkpoint needs allow_pickle" in first[0]
    assert first[1] == "saved"
    for message in messages_of(worlds, 1, _failure_cases.load_objects, root, False):
        assert message.startswith("UnsupportedError")
        assert "allow_pickle=True" in message
        assert "Odd (deep.0.odd)." in message
        assert "path" not in message.partition("Building")[0]
    for world in (2, 3):
        assert (
            messages_of(worlds, world, _failure_cases.load_objects, root, True) == ["equal"] * world
        )


def test_an_exception_inside_an_optimizer_step_saves_and_deletes_nothing(
    worlds: Pools, tmp_path: Path
) -> None:
    for message in messages_of(
        worlds, 2, _failure_cases.fail_in_training, str(tmp_path), "step", (0, 1)
    ):
        assert "is not saved: an optimizer step has begun to change weights" in message
        assert message.splitlines()[-1] == "RuntimeError: out of luck"
    assert listing(str(tmp_path)) == {"step=2-last.ckpt": True, "step=2.ckpt": True}


def test_a_job_is_not_requeued_without_its_save(worlds: Pools, tmp_path: Path) -> None:
    """It would resume from an older checkpoint, or begin anew."""
    for message in messages_of(worlds, 2, _failure_cases.requeue_in_step, str(tmp_path)):
        assert message.startswith("SaveError")
        assert "is not saved: an optimizer step has begun" in message
        assert "The job is not requeued" in message
    assert not listing(str(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize(
    ("hook", "saves"), [("on_train_start", False), ("on_train_batch_end", True)]
)
def test_save_on_exception_saves_if_all_ranks_raise(
    hook: str, saves: bool, worlds: Pools, tmp_path: Path
) -> None:
    """If the save fails too, both errors are reported. Before the first batch, nothing is saved."""
    together, alone = tmp_path / "together", tmp_path / "alone"
    fails = partial(messages_of, worlds, 2, _failure_cases.fail_in_training)
    for message in fails(str(together), hook, (0, 1)):
        assert message.splitlines()[-1] == "RuntimeError: out of luck"
        assert "RanksError" not in message
    assert bool(list(together.glob("*/manifest.json"))) == saves
    for message in fails(str(alone), hook, (1,)):
        assert ("is not saved: the run ended before its first batch" in message) != saves
        assert "RuntimeError: out of luck" in message
        assert "RanksError: " in message.rpartition("During handling of the above")[2]
    assert not listing(str(alone))
