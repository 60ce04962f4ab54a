"""Nodes that are lost, cut off or killed at any system call: no acknowledged save is lost."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_elastic_zero.checkpoint import nodes as nodes_module
from lightning_elastic_zero.cli import NO, UNVERIFIED, main
from lightning_elastic_zero.coordination.ranks import connect_ranks
from lightning_elastic_zero.errors import SaveError, UnsupportedError
from lightning_elastic_zero.storage.file_write import SUMS_SUFFIX
from lightning_elastic_zero.storage.node_files import NodeFiles, NodeState
from lightning_elastic_zero.storage.node_names import Agreement, NodeRecord, agree
from lightning_elastic_zero.tools.inspection import inspect_checkpoint
from lightning_elastic_zero.tools.report import summary_lines
from tests.checkpoint._node_run import NodeRun
from tests.support.launch import Job, be_rank, result_of
from tests.support.nodes import Nodes, needs_mounts
from tests.support.plain_checkpoints import make_state, manifest_of, rank_state
from tests.support.processes import PROMPT_TIMEOUT_S, free_port
from tests.support.ranks import ForkServer
from tests.support.small_checkpoints import contents, fill

LONG = pytest.mark.long


class Runs:
    """Successive worlds on nodes, whose notes say what was acknowledged."""

    def __init__(self, folder: Path, fork_server: ForkServer) -> None:
        self.nodes = Nodes(folder, fork_server)
        self.nodes.mounted.mkdir()
        self.saved = 0
        """The last step that any rank knows to be saved."""
        self.errors: list[str] = []
        """What the ranks of the last world printed; rank 0 prints the whole message."""
        self._count = 0

    def run(self, *nodes: int, fails: bool = False, **changes: Any) -> list[dict[str, Any]]:
        """Run a world on nodes; after the death of one rank, kill the others, as launchers do."""
        for node in nodes:
            self.nodes.disk(node).mkdir(exist_ok=True)
        folders = tuple(str(self.nodes.disk(node)) for node in nodes)
        run = NodeRun(self.nodes.url, folders, str(self.nodes.mounted), **changes)
        self._count += 1
        port, server = free_port(), self.nodes.fork_server
        ranks = [
            server.start_program(
                partial(be_rank, run, port, Job(rank, len(nodes)), store_of_launcher=False),
                self.nodes.root,
                f"{self._count}-{rank}",
            )
            for rank in range(len(nodes))
        ]
        end = time.monotonic() + PROMPT_TIMEOUT_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            if any(rank.poll() for rank in ranks):
                for rank in ranks:
                    rank.kill()
            time.sleep(0.02)
        for rank in ranks:
            rank.kill()
        results = [result_of(rank.poll() or 0, rank) for rank in ranks]
        notes = [result.notes for result in results]
        if run.kills < 0 and not fails:
            assert [result.returncode for result in results] == [0] * len(nodes), results
        known = [note["saved"] for note in notes if "saved" in note]
        self.saved = max([self.saved, *known])
        self.errors = [result.stderr for result in results]
        return notes

    def check(self, *nodes: int) -> None:
        """Resume on nodes; the last acknowledged save, or a later one, is found and intact."""
        acknowledged = self.saved
        notes = self.run(*nodes, steps=1)
        assert {note["resumed"] for note in notes} <= {acknowledged, acknowledged + 1}
        left = {path.name for node in nodes for path in self.nodes.path(node).glob("step-*")}
        assert left == {f"step-{self.saved}"}
        hidden = [p for n in nodes for p in self.nodes.path(n).rglob(".zero-*")]
        assert {path.name for path in hidden} == {".zero-lock", ".zero-node.json"}


@pytest.fixture
def runs(tmp_path: Path, fork_server: ForkServer) -> Runs:
    needs_mounts()
    return Runs(tmp_path, fork_server)


@pytest.mark.parametrize(
    ("rank", "parts"),
    [(0, (0.6,)), *(pytest.param(rank, (0.25, 0.6, 0.9), marks=LONG) for rank in range(2))],
)
def test_a_killed_rank_loses_no_acknowledged_save(
    runs: Runs, rank: int, parts: tuple[float, ...]
) -> None:
    """Its node is lost with it, and returns empty."""
    calls = runs.run(0, 1)[rank]["calls"]
    for part in parts:
        runs.run(0, 1, kills=rank, at_call=int(calls * part))
        runs.nodes.lose(rank)
        runs.check(1, 0)


@pytest.mark.long
def test_two_neighbours_may_be_lost_with_three_copies(runs: Runs) -> None:
    runs.run(0, 1, 2, 3, copies=3)
    runs.nodes.lose(1, 2)
    runs.check(3, 0)


def test_two_neighbours_lost_with_two_copies_are_named(runs: Runs) -> None:
    """No rank starts at step 0."""
    runs.run(0, 1, 2, 3)
    runs.nodes.lose(1, 2)
    notes = runs.run(3, 0, fails=True)
    assert notes == [{}, {}]
    assert "no checkpoint is complete" in runs.errors[0]
    assert "nodes that are missing: disk-1, disk-2" in runs.errors[0]


def test_tools_tell_files_of_other_nodes_from_damaged_ones(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.run(0, 1, copies=1, steps=1)
    report = inspect_checkpoint(f"node://{runs.nodes.path(0)}/step-1")
    assert report.damage == ()
    assert report.elsewhere
    assert all("rank_1_" in name for name in report.elsewhere)
    assert len(report.files) > len(report.elsewhere)
    (line,) = (each for each in summary_lines(report) if each.startswith("other nodes"))
    assert f" {len(report.elsewhere)} of {len(report.files)} files: " in line
    assert main(["verify", report.path]) == UNVERIFIED
    assert "NOT verified, because this node does not have these files" in capsys.readouterr().out
    shard = next(runs.nodes.path(0, "step-1").rglob("*rank_0_*.pt"))
    shard.write_bytes(bytes(byte ^ 1 for byte in shard.read_bytes()))
    assert main(["verify", report.path]) == NO
    assert "DAMAGED" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["TORCHELASTIC_RESTART_COUNT", "JOBSET_RESTART_ATTEMPT"])
def test_a_restart_on_empty_nodes_warns(runs: Runs, launcher: str) -> None:
    """Once, on rank 0, also if only another rank's launcher knows of it."""
    warning = "none of the nodes here (disk-0, disk-1) has a checkpoint. The job was restarted"
    runs.run(0, 1)
    assert warning not in "".join(runs.errors)
    runs.nodes.lose(0, 1)
    notes = runs.run(0, 1, restarted={1: launcher})
    assert [note["resumed"] for note in notes] == [0, 0]
    assert [error.count(warning) for error in runs.errors] == [1, 0]


@pytest.mark.long
def test_an_older_checkpoint_than_that_of_lost_nodes_is_named(runs: Runs) -> None:
    shared = runs.nodes.root / "shared"
    runs.run(0, 1, shared=str(shared))
    runs.nodes.lose(0, 1)
    notes = runs.run(0, 1, shared=str(shared))
    assert [note["resumed"] for note in notes] == [2, 2]
    assert "none of the nodes here (disk-0, disk-1) has a checkpoint. Resume" in runs.errors[0]


def test_a_node_that_was_cut_off_contributes_no_names(runs: Runs) -> None:
    runs.run(0, 1)
    runs.run(1)
    assert runs.saved == 4
    runs.check(0, 1)


def test_two_parts_that_went_on_alone_are_refused(runs: Runs) -> None:
    runs.run(0, 1)
    runs.run(1)
    runs.run(0)
    notes = runs.run(0, 1, fails=True)
    assert notes == [{}, {}]
    assert "without the other" in runs.errors[0]


def test_a_folder_of_another_run_is_refused(runs: Runs) -> None:
    runs.run(0)
    runs.run(1)
    assert runs.run(0, 1, fails=True) == [{}, {}]
    assert "belongs to another run" in runs.errors[0]


def test_a_folder_that_machines_share_is_refused(runs: Runs) -> None:
    runs.nodes.disk(0).mkdir()
    runs.nodes.disk(1).symlink_to(runs.nodes.disk(0))
    boots = tuple(str(runs.nodes.root / f"boot-{machine}") for machine in range(2))
    for boot in boots:
        Path(boot).write_text(boot)
    assert runs.run(0, 1, fails=True, boots=boots) == [{}, {}]
    assert "is one folder that" in runs.errors[0]
    assert "save_on_each_node=False" in runs.errors[0]


def test_containers_that_share_a_folder_are_one_node(runs: Runs) -> None:
    """One for each rank, as some launchers start them."""
    runs.run(0, 0)
    assert "has only one copy of each file, because the job runs on one node" in runs.errors[0]
    runs.check(0, 1)


@pytest.mark.long
def test_a_missing_node_is_named_if_all_have_the_same_host_name(runs: Runs) -> None:
    """Its ranks had other numbers."""
    runs.run(0, 1, 2, host="gpu")
    state = json.loads(runs.nodes.path(1, ".zero-node.json").read_text())
    runs.run(2, 0, host="gpu")
    assert f"are missing: gpu (folder {state['node'][:8]})\n" in runs.errors[0]


@pytest.mark.long
def test_a_fresh_node_does_not_change_the_number_of_copies(runs: Runs) -> None:
    runs.run(0, 1, copies=1)
    runs.run(0, 1, 2, copies=None)
    state = json.loads(runs.nodes.path(2, ".zero-node.json").read_text())
    assert state["copies"] == 1


def test_a_copy_that_a_read_has_found_to_be_damaged_is_replaced(runs: Runs) -> None:
    runs.run(0, 1, steps=1)
    intact = {path: path.read_bytes() for path in runs.nodes.path(0).rglob("*_states.pt")}
    for path, data in intact.items():
        path.write_bytes(data[:-9] + b"different")
    runs.run(0, 1, steps=0)
    assert "do not match their checksum" in runs.errors[0]
    noted = json.loads(runs.nodes.path(0, ".zero-node.json").read_text())["damaged"]
    found = [runs.nodes.path(0, name) for name in noted]
    assert found
    runs.run(0, 1, steps=0)
    assert [path.read_bytes() for path in found] == [intact[path] for path in found]
    assert "do not match their checksum" not in runs.errors[0]


def damaged_on(runs: Runs, node: int) -> list[str]:
    found: list[str] = json.loads(runs.nodes.path(node, ".zero-node.json").read_text())["damaged"]
    return found


def test_a_file_without_its_checksums_is_copied_again_with_them(runs: Runs) -> None:
    """As an aborted join leaves it; it may be damaged."""
    runs.run(0, 1, steps=1)
    copies = {p: p.read_bytes() for p in runs.nodes.path(1).rglob("*_states.pt*")}
    for path, data in copies.items():
        if path.name.endswith(SUMS_SUFFIX):
            path.unlink()
        else:
            path.write_bytes(data[:-9] + b"different")
    runs.run(0, 1, steps=0)
    assert {path: path.read_bytes() for path in copies} == copies
    assert damaged_on(runs, 0) == damaged_on(runs, 1) == []


def test_a_node_without_room_for_copies_gets_them_later(runs: Runs) -> None:
    """Its neighbour's files are not damaged."""
    runs.run(0, 1, steps=1)
    runs.nodes.lose(1)
    runs.run(0, 1, steps=0, room_bytes={1: (1 << 20) + 9})
    assert "has one copy less" in runs.errors[1]
    assert damaged_on(runs, 0) == []
    assert not list(runs.nodes.path(1).rglob("*_states.pt"))
    runs.run(0, 1, steps=0)
    names = [{p.name for p in runs.nodes.path(n).rglob("*_states.pt*")} for n in (0, 1)]
    assert names[0] == names[1] != set()


def test_checksums_that_cannot_be_read_do_not_end_a_join(runs: Runs) -> None:
    runs.run(0, 1, steps=1)
    for path in runs.nodes.path(0).rglob(f"*_states.pt{SUMS_SUFFIX}"):
        path.write_bytes(b"\xff" + path.read_bytes()[1:])
    runs.nodes.lose(1)
    runs.run(0, 1, steps=0, fails=True)
    assert "has one copy less: node disk-0: its checksums cannot be read" in runs.errors[1]


@pytest.mark.long
def test_a_node_without_room_refuses_a_save_before_it_is_written(runs: Runs) -> None:
    """The state of both ranks is needed on each node."""
    runs.run(0, 1, steps=1)
    state = make_state()
    manifest = manifest_of(state, 3, 2)
    of_ranks = [rank_state(state, manifest, rank).large_tensors() for rank in range(2)]
    needed_bytes = sum(tensor.nbytes for of_rank in of_ranks for tensor in of_rank)
    room_bytes = (1 << 20) + needed_bytes - 1
    runs.run(0, 1, fails=True, room_bytes={1: room_bytes})
    message = f"{needed_bytes} bytes are needed, but disk-1 has {room_bytes} left"
    assert message in runs.errors[0]
    runs.check(0, 1)


@pytest.mark.parametrize(
    "nodes", [pytest.param((0,), marks=LONG), pytest.param((0, 1), marks=LONG), (1, 0)]
)
def test_checkpoints_of_others_in_the_folder_are_refused(
    runs: Runs, nodes: tuple[int, ...]
) -> None:
    """They were saved on the disk before, without ``node://``."""
    for node in nodes:
        runs.nodes.disk(node).mkdir()
    runs.nodes.path(0).mkdir(mode=0o700)
    theirs = fill(runs.nodes.path(0, "step-9"), "theirs")
    before = contents(theirs)
    for _ in range(2):
        runs.run(*nodes, fails=True)
        assert "step-9/manifest.json). Choose a new folder" in "".join(runs.errors)
    assert contents(theirs) == before


def test_a_world_that_begins_during_a_join_keeps_its_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of the first one go on after the second one has saved."""
    url, files = f"node://{tmp_path}/run", NodeFiles(tmp_path / "run")
    name = tmp_path / "run/step-1/manifest.json"

    def late(records: Sequence[NodeRecord]) -> Agreement:
        with files.locked():
            second = NodeState(worlds=("second",), published="second", fence="second")
            files.set_state(second)
            files.write_name("step-1/manifest.json", b'{"format": "lightning_elastic_zero"}', 1)
        return agree(records)

    monkeypatch.setattr(nodes_module, "agree", late)
    with closing(connect_ranks()) as ranks, pytest.raises(SaveError, match="has started again"):
        nodes_module.join_folder(url, ranks)
    assert name.exists()
    assert files.state().worlds == ("second",)


def test_a_loopback_address_of_one_of_several_machines_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.1.1")
    of_ranks = ((0,), (1,))
    alone = nodes_module._Place(("a", "b"), ("one", "one"), 0, 0, of_ranks)
    assert nodes_module._own_address(alone).startswith("127.")
    with pytest.raises(UnsupportedError, match="on a, which other nodes cannot reach"):
        nodes_module._own_address(replace(alone, boots=("one", "other")))


@pytest.mark.long
@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_name_is_replaced_by_an_intact_one(runs: Runs, damaged: int) -> None:
    runs.run(0, 1)
    name = runs.nodes.path(damaged, f"step-{runs.saved}/manifest.json")
    status = name.stat()
    name.write_bytes(name.read_bytes()[:-50])
    os.utime(name, ns=(status.st_mtime_ns, status.st_mtime_ns))
    runs.check(0, 1)


@pytest.mark.long
def test_many_kills(runs: Runs) -> None:
    seed = int(os.environ.get("SEED", time.time_ns() % 10_000))
    print(f"SEED={seed}")
    draw = random.Random(seed)
    calls = runs.run(0, 1, 2)[0]["calls"]
    for _ in range(40):
        rank = draw.randrange(3)
        runs.run(0, 1, 2, kills=rank, at_call=draw.randrange(1, calls))
        if draw.random() < 0.7:
            runs.nodes.lose(rank)
        left = [node for node in range(3) if node != rank]
        draw.shuffle(left)
        runs.check(*left)
        runs.check(*draw.sample(range(3), 3))
