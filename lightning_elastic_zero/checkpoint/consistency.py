"""Comparison of the state that all ranks must share at a save.

Rank 0 sends digests of its state to all ranks: a fixed number for each kind of state, because all
ranks share one store. Each rank compares them with its own before it writes, and reports to rank 0
what may differ (``Differences``); rank 0 then refuses the save or warns, and names the first
difference.

Hyperparameters may differ between ranks: a scheduler that steps on a metric of one rank lowers the
learning rate of that rank only. A checkpoint for any number of ranks cannot keep that, and neither
an entry of the trainer's state that differs. The run continues: rank 0's values are saved, and a
warning names the difference.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from lightning_elastic_zero.core.manifest import Group, Manifest
from lightning_elastic_zero.core.tensors import RankState, canonical_repr
from lightning_elastic_zero.core.text import TreePath, format_names, format_ranks, format_tree_path
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.formats.client_state import SplitState, digest_of, entry_digests
from lightning_elastic_zero.formats.reader import EXTRA_STATES, OPTIMIZER_STATE

log = logging.getLogger(__name__)

SCHEDULERS = "lr_schedulers"
"""The client state's entry for schedulers' states, which belong to the rates: Lightning's name."""

_BUCKETS = 32
"""Digests of each kind of state; each is of the items whose names fall into its bucket."""
_EMPTY = "0" * 16
"""The digest of an empty bucket."""
_MOST_ROWS, _MOST_ITEMS = 2000, 64
"""Rows of a table, and items of each kind of state, that a rank reports."""
_MOST_SHOWN, _MOST_NAMED = 400, 4

Items = Mapping[str, str]
"""Digests or values of one kind of state, by name."""


@dataclass(frozen=True, slots=True)
class ComparedState:
    """The state of a rank that is compared with that of rank 0."""

    tables: Mapping[str, Sequence[str]]
    """Rows that must be equal on all ranks, by the title of the table in messages."""
    scalars: Sequence[Mapping[str, str]]
    """Scalar optimizer states of each flat buffer, as text."""
    hyperparameters: Sequence[Mapping[str, str]]
    """Those of each parameter group, as text."""
    replicas: Items
    """Stage 0: a checksum of the masters in each flat buffer."""
    frozen: Items
    """Stages 0 to 2: a checksum of each frozen weight."""
    buffers: Items
    """Module buffers."""
    extra_states: Items
    """Results of ``get_extra_state``."""
    optimizer_state: Items
    """Optimizer state of no parameter."""
    entries: Items
    """Other entries of the client state, except those that are declared as a rank's own."""

    @classmethod
    def of(
        cls, manifest: Manifest, state: RankState, client: SplitState, rank_state: SplitState
    ) -> ComparedState:
        """Return the compared state of this rank; ``rank_state`` is its declared state."""
        entries = entry_digests(client, declared=rank_state.plain)
        of_library: dict[str, dict[str, str]] = {EXTRA_STATES: {}, OPTIMIZER_STATE: {}}
        for path in list(entries):
            if path[0] in of_library:
                of_library[str(path[0])][format_tree_path(path[1:])] = entries.pop(path)
        return cls(
            _tables(manifest, state.tensor_rank),
            [
                {k: canonical_repr(v, f"the state {k!r}") for k, v in flat.scalars.items()}
                for flat in state.flats
            ],
            [*map(_texts, manifest.groups)],
            # Other shards have other sums: those of tensor rank 0 are compared.
            {str(i): str(value) for i, value in enumerate(state.replica_sums)}
            if not state.tensor_rank
            else {},
            {name: str(value) for name, value in state.frozen_sums.items()}
            if not state.tensor_rank
            else {},
            {name: digest_of(tensor) for name, tensor in state.module_buffers.items()},
            of_library[EXTRA_STATES],
            of_library[OPTIMIZER_STATE],
            {json.dumps(path): digest for path, digest in entries.items()},
        )

    def digests(self) -> dict[str, Any]:
        """Return what rank 0 sends to all ranks."""
        return {
            "tables": {title: _digest(list(rows)) for title, rows in self.tables.items()},
            "scalars": _digest([*map(dict, self.scalars)]),
            "buckets": {kind: _bucket_digests(items) for kind, items in self.items().items()},
        }

    def items(self) -> dict[str, Items]:
        """Return the state that consists of named items, by its kind."""
        groups = {str(i): _digest(dict(group)) for i, group in enumerate(self.hyperparameters)}
        return {
            "hyperparameters": groups,
            "replicas": self.replicas,
            "frozen": self.frozen,
            "buffers": self.buffers,
            "extra_states": self.extra_states,
            "optimizer_state": self.optimizer_state,
            "entries": self.entries,
        }


@dataclass(frozen=True, slots=True)
class Differences:
    """What may differ on a rank from rank 0: all in the buckets whose digests differ."""

    tables: Sequence[str] = ()
    """Titles of tables that differ: the rank is of another run, and writes nothing."""
    rows: Sequence[str] = ()
    """The first rows of the first of these tables."""
    scalars: Sequence[Mapping[str, str]] = ()
    """All of the rank; empty if they are equal."""
    hyperparameters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By the index of the group."""
    replicas: Items = field(default_factory=dict)
    frozen: Items = field(default_factory=dict)
    extra_states: bool = False
    optimizer_state: bool = False
    entries: Items = field(default_factory=dict)
    entry_buckets: Sequence[int] = ()
    """Those of ``entries``; empty if there are too many to report."""

    @classmethod
    def between(cls, this_rank: ComparedState, rank_zero: Mapping[str, Any]) -> Differences:
        """Compare a rank's state with the ``digests`` of rank 0."""
        digests = this_rank.digests()
        titles = [t for t in this_rank.tables if digests["tables"][t] != rank_zero["tables"][t]]
        if titles:
            return cls(titles, this_rank.tables[titles[0]][:_MOST_ROWS])

        def reported(kind: str) -> list[str]:
            return differing_items(this_rank, rank_zero, kind)[:_MOST_ITEMS]

        def buckets(kind: str) -> list[int]:
            return _differing_buckets(this_rank.items()[kind], rank_zero, kind)

        entries = reported("entries")
        return cls(
            scalars=this_rank.scalars if digests["scalars"] != rank_zero["scalars"] else (),
            hyperparameters={
                i: this_rank.hyperparameters[int(i)] for i in reported("hyperparameters")
            },
            replicas={index: this_rank.replicas[index] for index in reported("replicas")},
            frozen={name: this_rank.frozen[name] for name in reported("frozen")},
            extra_states=bool(buckets("extra_states")),
            optimizer_state=bool(buckets("optimizer_state")),
            entries={name: this_rank.entries[name] for name in entries},
            entry_buckets=buckets("entries") if len(entries) < _MOST_ITEMS else (),
        )


def differing_items(this_rank: ComparedState, rank_zero: Mapping[str, Any], kind: str) -> list[str]:
    """Return the names of this rank's items that may differ from rank 0's."""
    items = this_rank.items()[kind]
    buckets = _differing_buckets(items, rank_zero, kind)
    return [name for name in items if _bucket_of(name) in buckets]


def _differing_buckets(items: Items, rank_zero: Mapping[str, Any], kind: str) -> list[int]:
    pairs = zip(_bucket_digests(items), rank_zero["buckets"][kind], strict=True)
    return [index for index, (one, other) in enumerate(pairs) if one != other]


def _bucket_digests(items: Items) -> list[str]:
    buckets: list[list[tuple[str, str]]] = [[] for _ in range(_BUCKETS)]
    for item in sorted(items.items()):
        buckets[_bucket_of(item[0])].append(item)
    return [_digest(bucket) if bucket else _EMPTY for bucket in buckets]


def _bucket_of(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode(errors="surrogatepass")) % _BUCKETS


def _digest(value: object) -> str:
    data = json.dumps(value, sort_keys=True).encode(errors="surrogatepass")
    return xxhash.xxh3_64_hexdigest(data)


def check_consistent(
    rank_zero: ComparedState, manifest: Manifest, of_ranks: Sequence[Differences]
) -> bool:
    """Rank 0: refuse ranks that do not hold the run that rank 0 holds.

    Returns whether scalar optimizer states that may differ (``StateKey.may_differ``) do so, between
    the ranks or between flat buffers of one group.

    Raises:
        UnsupportedError: a rank does not; the tables, or the states with both values, are named.
    """
    for rank, differences in enumerate(of_ranks):
        if differences.tables:
            here, there = _first_difference(
                differences.rows, rank_zero.tables[differences.tables[0]]
            )
            msg = (
                f"the ranks differ in their {', '.join(differences.tables)}: first {here} on rank "
                f"{rank}, {there} on rank 0. Build the same model and optimizer, and take the same "
                "steps, on all ranks"
            )
            raise UnsupportedError(msg)
        if differences.optimizer_state:
            kept = format_names(map(repr, rank_zero.optimizer_state)) or "(any)"
            msg = (
                f"{manifest.writer.optimizer} keeps state under the key {kept}, which differs "
                f"between rank {rank} and rank 0: optimizer state without a parameter must be "
                "equal on all ranks"
            )
            raise UnsupportedError(msg)
    return _check_scalars(rank_zero.scalars, manifest, of_ranks)


def _check_scalars(
    rank_zero: Sequence[Mapping[str, str]], manifest: Manifest, of_ranks: Sequence[Differences]
) -> bool:
    differing = False
    of_groups: dict[tuple[int, str], str] = {}
    for rank, differences in enumerate(of_ranks):
        for index, (mine, theirs) in enumerate(
            zip(differences.scalars or rank_zero, rank_zero, strict=True)
        ):
            group = manifest.buffers[index].group
            may_differ = {key.name for key in manifest.groups[group].state if key.may_differ}
            if manifest.weights_only:  # The manifest has no states.
                may_differ = mine.keys() - {"step"}
            for key in may_differ & mine.keys():
                differing |= of_groups.setdefault((group, key), mine[key]) != mine[key]
            for key in sorted((mine.keys() | theirs.keys()) - may_differ):
                if mine.get(key) != theirs.get(key):
                    msg = (
                        f"the optimizer state {key!r} of flat buffer {index} is "
                        f"{mine.get(key, 'missing')} on rank {rank} and "
                        f"{theirs.get(key, 'missing')} on rank 0, expected one count on all ranks. "
                        "With torch_autocast in float16, DeepSpeed 0.18.9 lets each rank skip "
                        "other steps: train in bfloat16 there"
                    )
                    raise UnsupportedError(msg)
    return differing


def warn_of_differences(
    rank_zero: ComparedState,
    manifest: Manifest,
    of_ranks: Sequence[Differences],
    warned_entries: set[str],
) -> None:
    """Rank 0: warn of state of ranks that the checkpoint does not contain.

    An entry of the client state is named once, in ``warned_entries``.
    """
    _warn_of_hyperparameters(rank_zero.hyperparameters, of_ranks)
    _warn_of_replicas(rank_zero.replicas, manifest, of_ranks)
    _warn_of_frozen(rank_zero.frozen, of_ranks)
    found: dict[str, list[int]] = {}
    for rank, differences in enumerate(of_ranks):
        for path in _differing_entries(rank_zero.entries, differences):
            if not (path[0] == SCHEDULERS and differences.hyperparameters):
                found.setdefault(format_tree_path(path), []).append(rank)
    new = [name for name in found if name not in warned_entries]
    warned_entries.update(new)
    if new:
        log.warning(
            "The trainer's state differs between ranks: %s. Rank 0's is saved, and a resume uses "
            "it on every rank. State of single ranks belongs into rank_state of save_checkpoint, "
            "or into get_extra_state of a module.",
            format_names((f"{name} on {format_ranks(found[name])}" for name in new), _MOST_NAMED),
        )


def _differing_entries(rank_zero: Items, differences: Differences) -> list[TreePath]:
    buckets = differences.entry_buckets
    lacking = {name for name in rank_zero if _bucket_of(name) in buckets}
    names = sorted(lacking | differences.entries.keys())
    theirs = differences.entries
    found: list[TreePath] = [
        tuple(json.loads(n)) for n in names if rank_zero.get(n) != theirs.get(n)
    ]
    if theirs and not found:  # It is not among the reported ones.
        return [(f"one of {len(rank_zero)} entries",)]
    return found


def _warn_of_replicas(
    rank_zero: Items, manifest: Manifest, of_ranks: Sequence[Differences]
) -> None:
    ranks = [rank for rank, differences in enumerate(of_ranks) if differences.replicas]
    if not ranks:
        return
    drifted = {
        int(index)
        for differences in of_ranks
        for index, value in differences.replicas.items()
        if rank_zero[index] != value
    }
    names = [n for i in sorted(drifted) for n in manifest.buffers[i].names]
    if not names:  # It is not among the reported ones.
        names = [f"one of {len(rank_zero)} flat buffers"]
    log.warning(
        "In stage 0 every rank trains all weights, but those of %s differ from rank 0's (%s). Each "
        "rank writes a part of them, and a resume gives the same weights to all ranks. Use the "
        "same hyperparameters on all ranks, and make the same changes to weights.",
        format_ranks(ranks),
        format_names(names, _MOST_NAMED),
    )


def _warn_of_frozen(rank_zero: Items, of_ranks: Sequence[Differences]) -> None:
    differing: dict[str, list[int]] = {}
    for rank, differences in enumerate(of_ranks):
        theirs = differences.frozen
        names = [name for name, value in theirs.items() if rank_zero.get(name) != value]
        if theirs and not names:  # It is not among the reported ones.
            names = [f"one of {len(rank_zero)} weights"]
        for name in names:
            differing.setdefault(name, []).append(rank)
    if differing:
        log.warning(
            "Frozen weights differ between ranks: %s. Rank 0's are saved, and a resume gives them "
            "to all ranks. Make the same changes on all ranks, or register them as buffers, which "
            "are saved for each rank.",
            format_names(
                (f"{name} on {format_ranks(ranks)}" for name, ranks in differing.items()),
                _MOST_NAMED,
            ),
        )


@dataclass(frozen=True, slots=True, order=True)
class _Drift:
    """A hyperparameter that differs between ranks."""

    group: int
    key: str


def _warn_of_hyperparameters(
    rank_zero: Sequence[Mapping[str, str]], of_ranks: Sequence[Differences]
) -> None:
    values: dict[_Drift, dict[int, str]] = {}
    for rank, differences in enumerate(of_ranks):
        for index, theirs in differences.hyperparameters.items():
            group = int(index)
            for key, value in theirs.items():
                if value != rank_zero[group][key]:
                    values.setdefault(_Drift(group, key), {})[rank] = value
    if not values:
        return
    sentences = [
        _sentence(drift, values[drift], rank_zero, len(of_ranks)) for drift in sorted(values)
    ][:_MOST_NAMED]
    if len(values) > _MOST_NAMED:
        sentences.append(f"{len(values) - _MOST_NAMED} more")
    log.warning(
        "The ranks train with different hyperparameters: %s. Each rank updates its part of the "
        "weights with its own values. The checkpoint contains rank 0's values and schedulers, and "
        "a resume uses them on every rank. A scheduler that steps on a metric needs the same value "
        "on all ranks: self.log(..., sync_dist=True).",
        "; ".join(sentences),
    )


def _sentence(
    drift: _Drift,
    of_rank: Mapping[int, str],
    rank_zero: Sequence[Mapping[str, str]],
    world_size: int,
) -> str:
    first = rank_zero[drift.group][drift.key]
    ranks: dict[str, list[int]] = {first: []}
    for rank in range(world_size):
        ranks.setdefault(of_rank.get(rank, first), []).append(rank)
    values = ", ".join(f"{value} on {format_ranks(which)}" for value, which in ranks.items())
    return f"{drift.key} of parameter group {drift.group} is {values}"


def _first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    """Return the first rows that differ; long ones are cut around the difference."""
    rows = itertools.zip_longest(mine[:_MOST_ROWS], theirs[:_MOST_ROWS], fillvalue="nothing")
    later = (f"something after row {_MOST_ROWS}", "something else")
    one, other = next(((one, other) for one, other in rows if one != other), later)
    if len(one) <= _MOST_SHOWN and len(other) <= _MOST_SHOWN:
        return one, other
    same = zip(one, other, strict=False)
    at = next((i for i, (a, b) in enumerate(same) if a != b), min(len(one), len(other)))
    shown = slice(max(0, at - _MOST_SHOWN // 2), at + _MOST_SHOWN // 2)
    return f"... {one[shown]} ...", f"... {other[shown]} ..."


def _tables(manifest: Manifest, tensor_rank: int) -> dict[str, list[str]]:
    groups = [(g.names, sorted(g.hyperparameters), g.state) for g in manifest.groups]
    tables = {
        "parameters": list(map(repr, manifest.parameters)),
        "parameter groups": list(map(repr, groups)),
        "flat buffers": list(map(repr, manifest.buffers)),
        "progress": [repr(manifest.progress)],
        "module buffers": list(map(repr, manifest.module_buffers)),
        "ZeRO stage": [repr(manifest.stage)],
        "weights that are left out": sorted(manifest.excluded),
    }
    if manifest.tensor_parallel.size > 1:
        tables["cuts of parameters"] = list(map(repr, manifest.tensor_parallel.cuts))
    if tensor_rank:  # ``shards`` compares those of the same tensor rank.
        del tables["flat buffers"]
    return tables


def _texts(group: Group) -> dict[str, str]:
    return {key: canonical_repr(value) for key, value in group.hyperparameters.items()}
