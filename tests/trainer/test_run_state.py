"""The entries of a run's state in a checkpoint; docs/format.md describes them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from lightning_elastic_zero.trainer.run_state import RunState

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
SAVED = RunState(random={"torch": 1}, axis=3, waits_to_stop=True, plateau_step_pending=False)


def test_a_state_is_restored_from_its_entries() -> None:
    entries = SAVED.to_plain()
    assert not {"results", "random_before_fetch"} & entries.keys()
    assert entries["plateau_step_pending"] is False
    assert RunState.from_plain({**entries, "of_a_newer_release": 1}) == SAVED


def test_other_software_saves_no_state() -> None:
    assert RunState.from_plain({}) == RunState()


def test_every_entry_is_on_the_page() -> None:
    section = PAGE.partition("adds these entries of")[2].partition("Optional entries")[0]
    lacking = [field.name for field in fields(RunState) if f"`{field.name}`" not in section]
    assert not lacking
