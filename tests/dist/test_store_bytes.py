"""What a save asks of the job's store does not grow with the model."""

from __future__ import annotations

import pytest

from tests.dist._save_programs import FEW, MANY, WORLD, saves
from tests.support.launch import RankResult, run_ranks
from tests.support.ranks import ForkServer

NUMBERS_BYTES = 200
"""By how much what is sent may differ: sizes and seconds have more or fewer digits."""


@pytest.fixture(scope="module")
def saved(fork_server: ForkServer) -> list[RankResult]:
    """Return what the ranks noted of their saves."""
    results = run_ranks(saves, WORLD, fork_server)
    for result in results:
        assert f"parameters {MANY}" in result.notes, result.stderr[-3000:]
    return results


@pytest.mark.parametrize("odd", ["same", "client", "buffers"])
def test_bytes_do_not_grow_with_the_model(odd: str, saved: list[RankResult]) -> None:
    """Thirty times the parameters, buffers and entries of the trainer: the same bytes on each rank.

    Also where a rank has values of its own, as each has of its random numbers: the tables that it
    compares them with lie on the disk, and nothing of them is left in the checkpoint.
    """
    for rank, result in enumerate(saved):
        (few, said, left), (many, said_of_many, _) = (
            result.notes[f"{odd} {count}"] for count in (FEW, MANY)
        )
        print(f"{odd}: {few} and {many} bytes on rank {rank}")
        assert (said, said_of_many) == ("", "")
        assert left == ["checkpoint", "latest", "manifest.json"]
        assert abs(many - few) <= NUMBERS_BYTES


@pytest.mark.parametrize("count", [FEW, MANY])
def test_the_difference_is_named_all_the_same(count: int, saved: list[RankResult]) -> None:
    """Every rank hears which parameter is another one, and what it is on both."""
    for result in saved:
        _, said, left = result.notes[f"parameters {count}"]
        assert "do not agree on their parameters" in said
        assert f"rank {WORLD - 1} of {WORLD}" in said
        assert "model.odd.weight" in said
        assert f"model.layers.{count // 2}.weight" in said
        assert not left
