"""Costs of saving and loading: bytes and memory in proportion to the state, and operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint._budget_ranks import (
    STATE_BYTES,
    evaluate,
    load,
    load_newest,
    operations,
    reload,
    save,
)
from tests.support.nodes import Nodes, needs_mounts
from tests.support.ranks import ForkServer, Pools

pytestmark = pytest.mark.engine

EXTRA_BYTES = 64e6
"""Memory above a rank's own state: one bounded chunk, and overhead of Python and torch."""


@pytest.fixture
def measured(fork_server: ForkServer) -> Callable[..., list[dict[str, Any]]]:
    def run(
        call: Callable[[int, str], dict[str, Any]], ranks: int, stage: int, path: Path
    ) -> list[dict[str, Any]]:
        pools = Pools(fork_server)
        try:
            return pools.run(ranks, partial(call, stage, str(path)))
        finally:
            pools.close()

    return run


@pytest.mark.long
def test_ranks_read_the_state_once_and_hold_one_chunk_more(
    measured: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Ranks read at most 1.05 times the state, and use at most 64 MB above their own state."""
    path = tmp_path / "big.ckpt"
    for saved in measured(save, 2, 3, path):
        assert saved["extra"] < EXTRA_BYTES
        assert STATE_BYTES <= saved["written"] <= 1.01 * STATE_BYTES
    for ranks, stage in ((3, 2), (1, 3)):
        loaded = measured(load, ranks, stage, path)
        assert sum(rank["read"] for rank in loaded) <= 1.05 * STATE_BYTES
        assert sum(rank["read"] for rank in loaded) >= STATE_BYTES
        for rank in loaded:
            # A kernel without these counters would let everything pass. Memory that was free before
            # may be reused, so the value is some megabytes less than a rank's own state.
            assert -rank["own"] / 2 < rank["extra"] < EXTRA_BYTES
    # An evaluation reads the masters, a third of the state, and no byte of optimizer state.
    evaluated = measured(evaluate, 2, 3, path)
    assert sum(rank["read"] for rank in evaluated) <= 1.05 * STATE_BYTES / 3


@pytest.mark.long
@pytest.mark.parametrize("copies", [2, 3])
def test_nodes_send_the_state_once_for_each_additional_copy(
    fork_server: ForkServer, tmp_path: Path, copies: int
) -> None:
    """After the loss of a node, the others read the state once, and send what one has not."""
    needs_mounts()
    nodes = Nodes(tmp_path, fork_server)
    with nodes.world(0, 1, 2) as run:
        saved = run(partial(save, 3, f"{nodes.url}/big", node_copies=copies))
    sent_bytes = sum(rank["sent"] for rank in saved)
    assert (copies - 1) * STATE_BYTES <= sent_bytes <= 1.02 * (copies - 1) * STATE_BYTES
    assert all(rank["extra"] < EXTRA_BYTES for rank in saved)
    nodes.lose(0)
    with nodes.world(1, 2) as run:
        loaded = run(partial(load_newest, 3, nodes.url))
    assert STATE_BYTES <= sum(rank["read"] for rank in loaded) <= 1.05 * STATE_BYTES
    assert all(rank["extra"] < EXTRA_BYTES for rank in loaded)


@pytest.mark.long
def test_a_load_into_live_state_takes_each_page_once(
    measured: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """fp32 masters are received in place; states next to the live ones, which are then freed."""
    path = tmp_path / "live.ckpt"
    measured(save, 2, 3, path)
    for stage in (2, 3):
        for loaded in measured(reload, 2, stage, path):
            assert loaded["states"] / 2 < loaded["extra"] < loaded["states"] + EXTRA_BYTES
            assert loaded["left"] < EXTRA_BYTES
            masters = loaded["states"] / 2
            assert masters <= loaded["copied"] < 1.1 * masters
            # Each rank sends only its own part of ZeRO-2's weights.
            assert loaded["gathered"] < 0.01 * masters


SAVE_AGREEMENTS, LOAD_AGREEMENTS = 3, 4
RANK_0_SYNCS = 8
"""In addition to its files: the owner file, `latest`, the script, the manifest, four folders."""
LOOKS_PER_FILE, OTHER_LOOKS = 5, 50
"""Status calls of rank 0 for each file that it replaces, and for everything else together."""


@pytest.mark.long
@pytest.mark.parametrize(("stage", "own_files"), [(2, 1), (3, 2)])
def test_fixed_costs_of_agreements_syncs_and_files(
    stage: int,
    own_files: int,
    measured: Callable[..., list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    """Each costs milliseconds or a round trip, even for a small state."""
    path = tmp_path / f"{stage}.ckpt"
    of_ranks = measured(operations, 3, stage, path)
    files = sum(1 for file in path.rglob("*") if file.is_file())
    for rank, found in enumerate(of_ranks):
        (saved, _), (loaded, opened) = found["save"], found["load"]
        assert 0 < saved["agreements"] <= SAVE_AGREEMENTS
        assert 0 < loaded["agreements"] <= LOAD_AGREEMENTS
        assert "syncs" not in loaded
        written = 2 * (own_files if rank else 2)  # each with its checksums
        assert written <= saved["syncs"] <= written + (0 if rank else RANK_0_SYNCS)
        assert saved["looks"] >= (0 if rank else files)
        assert saved["looks"] <= (10 if rank else LOOKS_PER_FILE * files + OTHER_LOOKS)
        if rank:
            shard = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            model = "mp_rank_00_model_states.pt"
            model = f"zero_pp_rank_0_{model}" if stage == 3 else model
            read = (shard, f"{shard}.sums", model, f"{model}.sums")
            # The manifest first, up to the size of a link that was copied from a store.
            marks = ("manifest.json", "manifest.json", "latest")
            assert sorted(opened) == sorted((*read, *marks))
