"""Names of a job's nodes: no acknowledged change is lost, whatever nodes meet again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_elastic_zero.storage.node_names import (
    DisagreementError,
    NameVersion,
    NodeRecord,
    agree,
    copy_targets,
    holders_of_pairs,
    is_manifest,
    is_name,
    later_ns,
    newest_ns,
    planned_copies,
    save_of,
    unnamed,
)

SAVE, OTHER = "a" * 32, "b" * 32


def node(host: str, worlds: str = "", **names: int) -> NodeRecord:
    """Return a node that has published in the last of its worlds."""
    return NodeRecord(
        host,
        host,
        f"boot of {host}",
        tuple(worlds),
        published=worlds[-1:],
        members={each: each for each in "abc"},
        names={f"{key}/manifest.json": NameVersion(ns, str(ns)) for key, ns in names.items()},
    )


def names_of(*nodes: NodeRecord) -> dict[str, int]:
    agreed = agree(nodes).names
    return {key.split("/")[0]: version.modified_ns for key, (_, version) in agreed.items()}


class TestAgreement:
    def test_new_nodes_have_no_names(self) -> None:
        agreed = agree([node("a"), node("b")])
        assert (agreed.worlds, agreed.names, agreed.stale, agreed.missing) == ((), {}, (), ())

    def test_a_new_node_takes_over_the_names(self) -> None:
        assert names_of(node("new"), node("a", "1", x=5)) == {"x": 5}

    def test_the_newest_version_of_a_name_counts(self) -> None:
        """A killed commit is on some nodes only."""
        assert names_of(node("a", "1", x=5), node("b", "1", x=7, y=6)) == {"x": 7, "y": 6}

    def test_a_stale_node_contributes_no_names(self) -> None:
        nodes = node("a", "1", old=9), node("b", "12", new=5)
        assert names_of(*nodes) == {"new": 5}
        assert agree(nodes).stale == (0,)

    def test_missing_members_are_named(self) -> None:
        assert agree([node("a", "1", x=5), node("new")]).missing == ("b", "c")

    def test_a_node_with_a_new_folder_is_named(self) -> None:
        back = replace(node("b"), node="other")
        missing = agree([node("a", "1", x=5), back]).missing
        assert missing == ("b (now with a new folder)", "c")

    def test_new_and_stale_nodes_do_not_change_the_number_of_copies(self) -> None:
        stale, member = replace(node("a", "1"), copies=3), replace(node("b", "12"), copies=1)
        assert agree([stale, member, node("new")]).copies == 1

    def test_a_node_that_alone_completed_a_join_returns(self) -> None:
        """It was lost before anything was published in that world."""
        lost = replace(node("a", "12", x=5), published="1")
        others = node("b", "13", x=5, y=6)
        assert names_of(lost, others) == {"x": 5, "y": 6}
        assert agree([lost, others]).stale == (0,)

    def test_a_join_that_one_node_missed_counts(self) -> None:
        """It took over the names, and may have deleted what the others still have."""
        behind, ahead = node("a", "1", x=5, y=6), replace(node("b", "12", x=5), published="1")
        assert names_of(behind, ahead) == {"x": 5}

    @pytest.mark.parametrize(
        ("one", "other", "message"),
        [
            ("1", "2", "another run"),
            ("13", "12", "without the other"),
            ("1345", "12", "without the other"),
        ],
    )
    def test_disjoint_runs_are_refused_by_name(self, one: str, other: str, message: str) -> None:
        with pytest.raises(DisagreementError, match=f"(?s)(a|b).*{message}|{message}.*(a|b)"):
            agree([node("a", one, x=5), node("b", other, y=6)])


DELETED = "deleted"


@dataclass
class Run:
    """A simulation of nodes that publish and delete names, with kills after any request."""

    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    acknowledged: dict[str, int] = field(default_factory=dict)
    """By name, the version that all members of the last world have; 0: deleted."""
    in_flight: dict[str, set[int]] = field(default_factory=dict)
    """By name, later versions whose change was killed, and which may count or not."""
    worlds: int = 0
    newest_ns: int = 0
    left: int = 0
    """Requests until all ranks are killed."""

    def request(self, host: str, **changes: Any) -> None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        self.nodes[host] = replace(self.nodes.get(host, NodeRecord(host, host, host)), **changes)

    def join(self, hosts: Sequence[str]) -> None:
        agreed = agree([self.nodes.get(host, NodeRecord(host, host, host)) for host in hosts])
        self.worlds += 1
        names = {key: version for key, (_, version) in agreed.names.items()}
        kept = {key: version for key, version in names.items() if version.digest != DELETED}
        for host in hosts:
            self.request(host, names=names)
        for host in hosts:
            self.request(host, names=kept)
        self.newest_ns = newest_ns(kept.values())
        worlds = (*agreed.worlds, str(self.worlds))
        for host in hosts:
            self.request(host, worlds=worlds, published=agreed.published)

    def change(self, key: str, hosts: Sequence[str], now_ns: int, *, deletes: bool) -> None:
        self.newest_ns = ns = later_ns(now_ns, self.newest_ns)
        self.in_flight.setdefault(key, set()).add(0 if deletes else ns)
        version = NameVersion(ns, DELETED if deletes else str(ns))
        for host in hosts:
            self.request(host, published=self.nodes[host].worlds[-1])
            self.request(host, names={**self.nodes[host].names, key: version})
        for host in hosts if deletes else ():
            names = {name: each for name, each in self.nodes[host].names.items() if name != key}
            self.request(host, names=names)
        self.acknowledged[key] = 0 if deletes else ns
        del self.in_flight[key]

    def check(self, host: str) -> None:
        for key, version in self.acknowledged.items():
            found = self.nodes[host].names.get(key, NameVersion(0, "")).modified_ns
            assert found == version or found in self.in_flight.get(key, set())
            if found != version:  # It was rolled forward.
                self.acknowledged[key] = found
                del self.in_flight[key]


HOSTS = ("a", "b", "c", "d")
worlds = st.tuples(
    st.lists(st.sampled_from(HOSTS), min_size=1, max_size=4, unique=True),
    st.lists(
        st.tuples(
            st.sampled_from(["x/manifest.json", "y/manifest.json"]),
            st.integers(1, 60),
            st.booleans(),
        ),
        max_size=4,
    ),
    st.integers(0, 40),
)


@given(st.lists(worlds, max_size=10))
@settings(max_examples=150, deadline=None)
def test_no_acknowledged_name_is_lost(
    worlds: list[tuple[list[str], list[tuple[str, int, bool]], int]],
) -> None:
    """Worlds share a member with the last one in which a change began; clocks jump."""
    run, last = Run(), list(HOSTS)
    for hosts, changes, killed_after in worlds:
        if not set(hosts) & set(last):
            continue
        run.left = killed_after
        with suppress(KeyboardInterrupt):
            run.join(hosts)
            run.check(hosts[0])
            for key, now_ns, deletes in changes:
                last = hosts
                run.change(key, hosts, now_ns, deletes=deletes)


class TestData:
    def test_names_are_told_from_data(self) -> None:
        assert is_name("step-1/manifest.json")
        assert is_manifest("a/b.ckpt/manifest.json")
        assert is_name(f".zero-owner-{SAVE}.json")
        assert not is_manifest(f".zero-owner-{SAVE}.json")
        assert not is_name(f"step-1/{SAVE}/manifest.json")
        assert save_of(f"step-1/{SAVE}/checkpoint/x.pt") == SAVE
        assert not save_of("step-1/manifest.json")

    def test_files_of_saves_without_a_name_are_found(self) -> None:
        keys = [f"x/{SAVE}/latest", f"x/{OTHER}/latest", "x/manifest.json"]
        assert list(unnamed(keys, {SAVE})) == [f"x/{OTHER}/latest"]

    def test_a_file_and_its_checksums_count_where_both_are(self) -> None:
        found = holders_of_pairs({"a": [0, 1, 2], "a.sums": [1, 2, 3], "b": [0], "b.sums": [1]})
        assert found == {"a": [1, 2], "a.sums": [1, 2], "b": [0], "b.sums": [1]}

    def test_copies_are_on_the_next_nodes(self) -> None:
        boots = ["a", "b", "c"]
        assert copy_targets(boots, 2, 2) == (0,)
        assert copy_targets(boots, 1, 3) == (2, 0)
        assert copy_targets(boots, 1, 9) == (2, 0)
        assert copy_targets(["a"], 0, 2) == ()

    def test_other_machines_get_copies_first(self) -> None:
        assert copy_targets(["a", "a", "b"], 0, 2) == (2,)
        assert copy_targets(["a", "a"], 0, 2) == (1,)

    @given(
        st.dictionaries(st.text("xy", min_size=1), st.sets(st.integers(0, 3)).map(sorted)),
        st.integers(1, 5),
    )
    def test_each_file_gets_enough_copies_once(
        self, holders: dict[str, list[int]], copies: int
    ) -> None:
        boots = ["a", "b", "a", "c"]
        plan = planned_copies(holders, boots, copies)
        for key, nodes in holders.items():
            new = [n for n, files in plan.items() for each in files if each == key]
            assert not set(new) & set(nodes)
            assert len(new) == len(set(new))
            if nodes:
                assert len(nodes) + len(new) == max(len(nodes), min(copies, 4))
