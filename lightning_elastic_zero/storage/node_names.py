"""What the nodes of a job agree on when they meet: pure rules, without files or connections.

A run goes through *worlds*: each start of its ranks is one. Every node records the worlds that it
belonged to, so nodes that meet again know which of them missed something. Two kinds of objects:

    names    manifests, links and owners: on all nodes, written by rank 0
    data     the files of a save: on the node that wrote them, and copies on the next nodes

A manifest on any node proves that all copies of its data existed. So the names of nodes that
belonged to the last world are united, and the newest version of each counts. A node that missed a
world contributes data, which checksums verify, but never names: they may have been replaced or
deleted meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_elastic_zero.core.manifest import MANIFEST_NAME
from lightning_elastic_zero.core.save_files import SAVE_ID
from lightning_elastic_zero.storage.file_write import SUMS_SUFFIX


@dataclass(frozen=True, slots=True, order=True)
class NameVersion:
    """One content of a name. The newest one compares as the greatest."""

    modified_ns: int
    """Later than that of every name before it, on whichever node: see ``later_ns``."""
    digest: str


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What a node knows when it joins a world."""

    node: str
    """The id of its folder."""
    host: str
    """For messages."""
    boot: str
    """Of its machine. Copies on another machine survive the loss of this one."""
    worlds: tuple[str, ...] = ()
    """The worlds that it, or nodes whose names it took over, belonged to; empty: a new folder."""
    published: str = ""
    """The last of them in which a name of a checkpoint was written or deleted; empty: none."""
    members: Mapping[str, str] = field(default_factory=dict)
    """The hosts of the last of them, by the ids of their folders."""
    copies: int = 0
    """How many nodes have each file; 0: nobody has chosen a number."""
    names: Mapping[str, NameVersion] = field(default_factory=dict)
    """Its manifests and links, by key."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The names of a new world."""

    worlds: tuple[str, ...]
    """The worlds of the run so far, without the new one."""
    published: str
    """The last of them in which a name was written or deleted."""
    names: Mapping[str, tuple[int, NameVersion]]
    """By key: a node that has the newest version, and the version."""
    copies: int
    """How many nodes have each file; 0: nobody has chosen a number."""
    stale: tuple[int, ...]
    """Nodes that missed a world, and contribute data only."""
    missing: tuple[str, ...]
    """Hosts of the last world whose folders are not here."""


class DisagreementError(Exception):
    """The folders of two nodes are of different runs, or of two continuations of one run."""


def agree(nodes: Sequence[NodeRecord]) -> Agreement:
    """Decide which names the nodes of a new world have.

    Raises:
        DisagreementError: two nodes have published without each other.
    """
    deciding = _deciding(nodes)
    names: dict[str, tuple[int, NameVersion]] = {}
    for n in deciding:
        for key, version in nodes[n].names.items():
            if key not in names or names[key][1] < version:
                names[key] = (n, version)
    here, hosts = {node.node for node in nodes}, {node.host for node in nodes}
    worlds = tuple(dict.fromkeys(world for n in deciding for world in nodes[n].worlds))
    members = {node: host for n in deciding for node, host in nodes[n].members.items()}
    return Agreement(
        worlds,
        published=max((nodes[n].published for n in deciding), key=("", *worlds).index, default=""),
        names=names,
        copies=max((nodes[n].copies for n in deciding), default=0),
        stale=tuple(n for n, node in enumerate(nodes) if node.worlds and n not in deciding),
        missing=tuple(
            f"{host} (now with a new folder)" if host in hosts else host
            for node, host in members.items()
            if node not in here
        ),
    )


def _deciding(nodes: Sequence[NodeRecord]) -> list[int]:
    """Return the nodes whose names count.

    A change that was acknowledged in a world is on all of its members. So a node that belonged to
    the last world in which any other one published has all acknowledged names.
    """
    leading = [
        n
        for n, node in enumerate(nodes)
        if node.worlds and all(_includes(node, other) for other in nodes)
    ]
    if not leading and any(node.worlds for node in nodes):
        raise DisagreementError(_disagreement(nodes))
    last = {nodes[n].worlds[-1] for n in leading}
    # One that others have joined without is behind: they may have deleted what it still has.
    behind = {world for n in leading for world in nodes[n].worlds[:-1]} & last
    return [n for n in leading if nodes[n].worlds[-1] not in behind]


def _includes(node: NodeRecord, other: NodeRecord) -> bool:
    return not other.published or other.published in node.worlds


def _disagreement(nodes: Sequence[NodeRecord]) -> str:
    pairs = [(a, b) for a in nodes for b in nodes if not (_includes(a, b) or _includes(b, a))]
    one, other = pairs[0] if pairs else nodes[:2]
    if set(one.worlds).isdisjoint(other.worlds):
        return (
            f"the folder on {other.host} belongs to another run than the one on {one.host}. Delete "
            "it there if that run has ended, or choose another folder"
        )
    return (
        f"{one.host} and {other.host} have each published checkpoints of this run without the "
        "other. Start the run on the nodes whose checkpoints you want, or delete the folder on one"
    )


def newest_ns(versions: Iterable[NameVersion]) -> int:
    """Return the time of the newest name; 0 if there is none."""
    return max((each.modified_ns for each in versions), default=0)


def later_ns(now_ns: int, than_ns: int) -> int:
    """Return the time of a new name: later than all others, whatever the machines' clocks are."""
    return max(now_ns, than_ns + 1)


# -- data ----------------------------------------------------------------------------------------


def is_name(key: str) -> bool:
    """Whether an object is on all nodes: a manifest, a link, or hidden next to one."""
    *above, last = key.split("/")
    in_save = any(map(SAVE_ID.fullmatch, above))
    return not in_save and (last == MANIFEST_NAME or last.startswith(".zero-"))


def is_manifest(key: str) -> bool:
    """Whether an object is the manifest of a checkpoint, or a link."""
    return is_name(key) and key.rpartition("/")[2] == MANIFEST_NAME


def save_of(key: str) -> str:
    """Return the id of the save that a file belongs to; empty for others."""
    return next(filter(SAVE_ID.fullmatch, key.split("/")[:-1]), "")


def unnamed(keys: Iterable[str], saves: Collection[str]) -> Iterator[str]:
    """Yield the files of saves that no manifest names, given the ids of those that one names."""
    for key in keys:
        if (save := save_of(key)) and save not in saves:
            yield key


def copy_targets(boots: Sequence[str], node: int, copies: int) -> tuple[int, ...]:
    """Return the nodes that get copies of a node's data: the next ones, on other machines first."""
    ring = [(node + step) % len(boots) for step in range(1, len(boots))]
    used, near, far = {boots[node]}, list[int](), list[int]()
    for each in ring:
        (near if boots[each] in used else far).append(each)
        used.add(boots[each])
    return tuple((far + near)[: copies - 1])


def holders_of_pairs(holders: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Return the nodes that have a file and its checksums, for both; or each, if none has both.

    A join that was aborted can leave a file without its checksums.
    """
    found = {key: list(nodes) for key, nodes in holders.items()}
    for key, nodes in holders.items():
        sums = key + SUMS_SUFFIX
        if both := [node for node in nodes if node in holders.get(sums, ())]:
            found[key] = found[sums] = both
    return found


def planned_copies(
    holders: Mapping[str, Sequence[int]], boots: Sequence[str], copies: int
) -> dict[int, list[str]]:
    """Return which files each node must get until each file has enough copies.

    ``holders`` are the nodes that have each file.
    """
    plan: dict[int, list[str]] = {}
    for key, nodes in holders.items():
        missing = min(copies, len(boots)) - len(nodes)
        if not nodes or missing <= 0:
            continue
        candidates = copy_targets(boots, nodes[0], len(boots))
        targets = [node for node in candidates if node not in nodes][:missing]
        for target in targets:
            plan.setdefault(target, []).append(key)
    return plan
