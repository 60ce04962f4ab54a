"""Engines saved to an object store and loaded from it on other numbers of ranks, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.checkpoints import Saved, load, train_and_save
from tests.support.engines import EngineCase
from tests.support.ranks import Pools
from tests.support.store_servers import with_environment


@dataclass(frozen=True)
class SavedInStore(Saved):
    """A checkpoint in a store, with the oracle's dump on the disk."""

    dumped: str = ""

    @property
    def dump_path(self) -> str:
        """Path of the oracle's dump."""
        return self.dumped


@pytest.mark.parametrize(
    ("zero", "precision", "worlds"),
    [
        pytest.param("3", "bf16", (2, 1), marks=pytest.mark.essential),
        *(
            pytest.param(zero, precision, worlds, marks=pytest.mark.long)
            for zero in "0123"
            for precision in ("fp32", "bf16")
            for worlds in ((2, 3, 1), (3, 2, 2))
        ),
    ],
)
def test_state_is_restored_on_other_numbers_of_ranks(
    zero: str,
    precision: str,
    worlds: tuple[int, ...],
    pools: Pools,
    s3: tuple[str, Mapping[str, str]],
    tmp_path: Path,
) -> None:
    """Each world loads the save of the previous one, and saves it again."""
    bucket, environment = s3
    run = partial(with_environment, environment)
    places = [
        SavedInStore(
            EngineCase(world, zero, precision), f"{bucket}/{uuid4()}/a.ckpt", {}, f"{tmp_path}/{n}"
        )
        for n, world in enumerate(worlds)
    ]
    pools.run(worlds[0], partial(run, partial(train_and_save, places[0])))
    for source, target in itertools.pairwise(places):
        call = partial(load, target.setup, source, copy_to=target)
        verdict = pools.run(target.setup.world, partial(run, call))[0]
        assert verdict is not None
        verdict.assert_same()
