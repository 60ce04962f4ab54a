"""What modules keep by ``get_extra_state`` comes back, whoever saved it, on any number of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine._extra_state_programs import load_extra_states, save_extra_states
from tests.support.engines import Setup
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

RUNS = [
    (Setup(2, "2"), Setup(3, "3", sub_group=700)),
    (Setup(3, "3"), Setup(1, "1")),
    (Setup(2, "1", "bf16"), Setup(2, "0")),
]
EMPTY: dict[str, Any] = {"scales": None, "bytes": None, "rank": None}


@pytest.mark.parametrize(("source", "target"), RUNS, ids=str)
def test_extra_states_come_back(source: Setup, target: Setup, pools: Pools, tmp_path: Path) -> None:
    """Dictionaries, tensors, each rank's own where as many load; others' files have rank 0's."""
    pools.run(source.world, partial(save_extra_states, source, str(tmp_path)))
    paths = sorted(map(str, tmp_path.iterdir()))
    assert len(paths) == 3 + (source.stage < 3)
    call = partial(load_extra_states, target, paths, EMPTY, load_optimizer_state=False)
    for rank, of_rank in enumerate(pools.run(target.world, call)):
        for path, (found, warned) in zip(paths, of_rank, strict=True):
            assert isinstance(found, dict), (path, found)
            scales = found["scales"]
            assert torch.equal(scales.pop("amax"), torch.tensor([1.5, 2.5]))
            assert scales == {"steps": 7, "names": ["a", "b"]}
            assert torch.equal(found["bytes"], torch.arange(5, dtype=torch.uint8))
            as_many = source.world == target.world
            assert found["rank"] == (rank if as_many and path.endswith(".ckpt") else 0), path
            assert not warned


@pytest.mark.long
def test_extra_states_of_one_side_alone(pools: Pools, tmp_path: Path) -> None:
    """A warning names what only the model has, and what only the checkpoint has; all else comes."""
    source, target = Setup(2, "2"), Setup(2, "3")
    pools.run(source.world, partial(save_extra_states, source, str(tmp_path)))
    values = {"scales": None, "bytes": None, "other": "as it is"}
    path = [str(tmp_path / "ours.ckpt")]
    call = partial(load_extra_states, target, path, values, strict=False)
    for rank, [(found, warned)] in enumerate(pools.run(target.world, call)):
        assert found["scales"]["steps"] == 7
        assert found["other"] == "as it is"
        texts = " | ".join(warned)
        assert ("keep their current one: kept.other._extra_state" in texts) == (rank == 0)
        assert ("accepts through set_extra_state: kept.rank._extra_state" in texts) == (rank == 0)


@pytest.mark.long
def test_a_module_that_does_not_take_it(pools: Pools, tmp_path: Path) -> None:
    """The error has the module's own words, on all ranks; a renamed module gets its state."""
    source, target = Setup(2, "2"), Setup(2, "1")
    pools.run(source.world, partial(save_extra_states, source, str(tmp_path)))
    path = [str(tmp_path / "ours.ckpt")]
    bad = partial(load_extra_states, target, path, {**EMPTY, "scales": 1})
    for [(error, _)] in pools.run(target.world, bad):
        assert "set_extra_state of kept.scales (Keeping) raised TypeError: wants a number" in error
    moved = {"scales": None, "bytes": None, "moved": None}
    rename = {"kept.rank": "kept.moved"}
    call = partial(load_extra_states, target, path, moved, rename=rename)
    for rank, [(found, warned)] in enumerate(pools.run(target.world, call)):
        assert (found["moved"], warned) == (rank, [])
