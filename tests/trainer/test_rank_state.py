"""Entries of a run's state that each rank restores as it saved them."""

from __future__ import annotations

from typing import Any

from lightning_elastic_zero.trainer.checkpoint_io import with_rank_state


def test_a_ranks_entry_replaces_that_of_rank_0_also_if_it_is_none() -> None:
    client: dict[str, Any] = {"ours": {"order": [1], "metrics": {}}, "epoch": 3}
    merged = with_rank_state(client, {"ours": {"order": None}})
    assert merged == {"ours": {"order": None, "metrics": {}}, "epoch": 3}
    assert client["ours"]["order"] == [1]
