from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoint._budget_ranks import SUB_GROUP_BYTES, load_swapped, save_swapped
from tests.support.ranks import ForkServer, Pools, skip_without

pytestmark = [pytest.mark.engine, pytest.mark.long]

RANKS = 2
SUB_GROUPS = (8, 24)
"""100 and 300 MB of masters and moments, half of it on each rank."""

OTHER_PAGES_BYTES = 64e6
"""Other resident memory: mapped files, including those of the checkpoint."""


def test_memory_does_not_grow_with_the_sub_groups(
    fork_server: ForkServer, pools: Pools, tmp_path: Path
) -> None:
    """States in files are only mapped; the system's peak counts pages of mapped files."""
    skip_without("AsyncIOBuilder", pools)
    for sub_groups in SUB_GROUPS:
        path = tmp_path / f"{sub_groups}.ckpt"
        for call in (
            partial(save_swapped, sub_groups, str(path)),
            partial(load_swapped, sub_groups, str(path), steps_before=0),
            partial(load_swapped, sub_groups, str(path), steps_before=1),
        ):
            own = Pools(fork_server)  # New ranks, whose memory no other test has grown.
            try:
                found = own.run(RANKS, call)
            finally:
                own.close()
            print(sub_groups, call.func.__name__, call.keywords, found)
            for rank in found:
                assert rank["anonymous"] < SUB_GROUP_BYTES / RANKS
                state = sub_groups * SUB_GROUP_BYTES / RANKS
                assert rank["resident"] < state + OTHER_PAGES_BYTES
        shutil.rmtree(path)
