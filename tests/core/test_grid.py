"""Ranks of grids of data ranks and tensor ranks."""

from __future__ import annotations

from itertools import product

import pytest

from lightning_elastic_zero.core.grid import RankGrid

GRIDS = [RankGrid(*counts) for counts in product((1, 2, 3), repeat=2)]


@pytest.mark.parametrize("saved", GRIDS, ids=str)
def test_tensor_ranks_of_another_grid_have_one_counterpart(saved: RankGrid) -> None:
    for grid in GRIDS:
        found = [saved.counterpart(rank, grid) for rank in range(grid.ranks)]
        if grid == saved:
            assert found == list(range(grid.ranks))
            continue
        for rank, counterpart in enumerate(found):
            assert counterpart == found[grid.data_rank(rank) * grid.tensor]
            assert saved.data_rank(counterpart) == grid.data_rank(rank) % saved.data
