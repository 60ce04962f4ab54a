"""Comparison of the state that all ranks must share at a save.

The ranks compare their tables, which grow with the number of parameters, and all ranks share one
store. So rank 0 sends a digest of each table and writes the tables into the new directory; a rank
reads a table only if its own digest differs. Hyperparameters may differ between ranks: a scheduler
that steps on a metric of one rank lowers the learning rate of that rank only. A checkpoint for any
number of ranks cannot keep that. The run continues: rank 0's values are saved, and a warning names
the difference.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from lightning_elastic_zero.core.manifest import Group, Manifest
from lightning_elastic_zero.core.tensors import RankState, canonical_repr
from lightning_elastic_zero.core.text import format_names, format_ranks
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.storage.folder import Folder
from lightning_elastic_zero.storage.own_files import TABLE_PREFIX

log = logging.getLogger(__name__)

Tables = Mapping[str, Any]
"""JSON data that ranks compare, by name."""

_Drift = tuple[int, str]
"""Index of a parameter group, and a hyperparameter of it."""

_MOST_SENT = 16
_MOST_SHOWN = 400
_MOST_TOLD = 4


def comparison_tables(manifest: Manifest, state: RankState) -> Tables:
    """Return the tables that must be equal on all ranks, and the hyperparameters' digests."""
    return {
        "tables": _tables(manifest),
        "scalars": [
            {key: canonical_repr(value, f"the state {key!r}") for key, value in f.scalars.items()}
            for f in state.flats
        ],
        "hyperparameters": [
            xxhash.xxh3_64_hexdigest(text.encode(errors="surrogatepass"))
            for text in (canonical_repr(dict(g.hyperparameters)) for g in manifest.groups)
        ],
        "replicas": list(state.replica_sums),
    }


def table_digests(tables: Tables) -> dict[str, str]:
    """Return a digest of each table."""
    return {name: xxhash.xxh3_128_hexdigest(_table_text(table)) for name, table in tables.items()}


def write_tables(folder: Folder, tables: Tables) -> None:
    """Write rank 0's tables into a folder, until ``Folder.remove_left``."""
    for name, table in tables.items():
        folder.leave(f"{TABLE_PREFIX}{name}", _table_text(table))


class RankZeroTables:
    """Rank 0's tables. A table is read only if this rank's own differs.

    ``sent`` are rank 0's digests, ``folder`` contains its tables.
    """

    def __init__(self, sent: Mapping[str, str], own: Tables, folder: Folder) -> None:
        self._sent, self.own, self._folder = sent, own, folder
        self._digests = table_digests(own)
        self._read: dict[str, Any] = {}

    def is_same(self, name: str) -> bool:
        """Whether this rank's table equals rank 0's."""
        return self._sent[name] == self._digests[name]

    def __getitem__(self, name: str) -> Any:
        """Return rank 0's table; raise SaveError if it cannot be read."""
        if self.is_same(name):
            return self.own[name]
        if name not in self._read:
            data = self._folder.await_left(
                f"{TABLE_PREFIX}{name}",
                lambda data: xxhash.xxh3_128_hexdigest(data) == self._sent[name],
            )
            self._read[name] = json.loads(data)
        return self._read[name]


def check_consistent(first: RankZeroTables, manifest: Manifest) -> bool:
    """Refuse a rank that does not hold the run that rank 0 holds.

    Returns whether scalar optimizer states that may differ (``StateKey.may_differ``) do so, between
    the ranks or between flat buffers of one group.

    Raises:
        UnsupportedError: it does not; the tables, or the states with both values, are named.
    """
    tables = first.own["tables"]
    if differ := [name for name, table in first["tables"].items() if tables[name] != table]:
        here, there = _first_difference(tables[differ[0]], first["tables"][differ[0]])
        msg = (
            f"the ranks differ in their {', '.join(differ)}: first {here} on this rank, {there} on "
            "rank 0. Build the same model and optimizer, and take the same steps, on all ranks"
        )
        raise UnsupportedError(msg)
    differing = False
    of_groups: dict[tuple[int, str], str] = {}
    for index, (mine, theirs) in enumerate(
        zip(first.own["scalars"], first["scalars"], strict=True)
    ):
        group = manifest.buffers[index].group
        may_differ = {key.name for key in manifest.groups[group].state if key.may_differ}
        if manifest.weights_only:  # The manifest has no states.
            may_differ = mine.keys() - {"step"}
        for key in may_differ & mine.keys():
            differing |= of_groups.setdefault((group, key), mine[key]) != mine[key]
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) == theirs.get(key):
                continue
            if key not in may_differ:
                msg = (
                    f"the optimizer state {key!r} of flat buffer {index} is "
                    f"{mine.get(key, 'missing')} on this rank and {theirs.get(key, 'missing')} on "
                    "rank 0, expected one count on all ranks. With torch_autocast in float16, "
                    "DeepSpeed 0.18.9 lets each rank skip other steps: train in bfloat16 there"
                )
                raise UnsupportedError(msg)
            differing = True
    return differing


def drifted_hyperparameters(first: RankZeroTables, manifest: Manifest) -> list[list[Any]]:
    """Return ``[group, {key: text}]`` for the first groups that differ from rank 0's."""
    pairs = zip(first.own["hyperparameters"], first["hyperparameters"], strict=True)
    drifted = [index for index, (mine, theirs) in enumerate(pairs) if mine != theirs]
    return [[index, _texts(manifest.groups[index])] for index in drifted[:_MOST_SENT]]


def drifted_replicas(first: RankZeroTables) -> list[int]:
    """Stage 0: return the flat buffers whose masters differ from rank 0's."""
    pairs = zip(first.own["replicas"], first["replicas"], strict=True)
    return [index for index, (mine, theirs) in enumerate(pairs) if mine != theirs][:_MOST_SENT]


def warn_of_replicas(manifest: Manifest, of_ranks: Sequence[Sequence[int]]) -> None:
    """Rank 0: warn of ranks whose weights differ, from the ``drifted_replicas`` of each rank."""
    ranks = [rank for rank, drifted in enumerate(of_ranks) if drifted]
    if not ranks:
        return
    names = [n for i in sorted(set().union(*of_ranks)) for n in manifest.buffers[i].names]
    log.warning(
        "In stage 0 every rank trains all weights, but those of %s differ from rank 0's (%s). Each "
        "rank writes a part of them, and a resume gives the same weights to all ranks. Use the "
        "same hyperparameters on all ranks, and make the same changes to weights.",
        format_ranks(ranks),
        format_names(names, _MOST_TOLD),
    )


def warn_of_drift(manifest: Manifest, of_ranks: Sequence[list[list[Any]]]) -> None:
    """Rank 0: warn of differing hyperparameters, from the ``drifted_hyperparameters`` of ranks."""
    own = list(map(_texts, manifest.groups))
    values: dict[_Drift, dict[int, str]] = {}
    for rank, groups in enumerate(of_ranks):
        for group, theirs in groups:
            for key, value in theirs.items():
                if value != own[group][key]:
                    values.setdefault((group, key), {})[rank] = value
    if not values:
        return
    sentences = [
        _sentence(drift, values[drift], own, len(of_ranks)) for drift in sorted(values)[:_MOST_TOLD]
    ]
    if len(values) > _MOST_TOLD:
        sentences.append(f"{len(values) - _MOST_TOLD} more")
    log.warning(
        "The ranks train with different hyperparameters: %s. Each rank updates its part of the "
        "weights with its own values. The checkpoint contains rank 0's values and schedulers, and "
        "a resume uses them on every rank. A scheduler that steps on a metric needs the same value "
        "on all ranks: self.log(..., sync_dist=True).",
        "; ".join(sentences),
    )


def _sentence(
    drift: _Drift, of_rank: Mapping[int, str], own: Sequence[Mapping[str, str]], world_size: int
) -> str:
    group, key = drift
    first = own[group][key]
    ranks: dict[str, list[int]] = {first: []}
    for rank in range(world_size):
        ranks.setdefault(of_rank.get(rank, first), []).append(rank)
    values = ", ".join(f"{value} on {format_ranks(which)}" for value, which in ranks.items())
    return f"{key} of parameter group {group} is {values}"


def _first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    """Return the first rows that differ; long ones are cut around the difference."""
    rows = itertools.zip_longest(mine, theirs, fillvalue="nothing")
    one, other = next((one, other) for one, other in rows if one != other)
    if len(one) <= _MOST_SHOWN and len(other) <= _MOST_SHOWN:
        return one, other
    same = zip(one, other, strict=False)
    at = next((i for i, (a, b) in enumerate(same) if a != b), min(len(one), len(other)))
    shown = slice(max(0, at - _MOST_SHOWN // 2), at + _MOST_SHOWN // 2)
    return f"... {one[shown]} ...", f"... {other[shown]} ..."


def _tables(manifest: Manifest) -> dict[str, list[str]]:
    """Return the rows that must be equal on all ranks, by their title in messages."""
    groups = [(g.names, sorted(g.hyperparameters), g.state) for g in manifest.groups]
    return {
        "parameters": list(map(repr, manifest.parameters)),
        "parameter groups": list(map(repr, groups)),
        "flat buffers": list(map(repr, manifest.buffers)),
        "progress": [repr(manifest.progress)],
        "module buffers": list(map(repr, manifest.module_buffers)),
        "ZeRO stage": [repr(manifest.stage)],
        "weights that are left out": sorted(manifest.excluded),
    }


def _texts(group: Group) -> dict[str, str]:
    """Return a group's hyperparameters as text."""
    return {key: canonical_repr(value) for key, value in group.hyperparameters.items()}


def _table_text(table: object) -> bytes:
    return json.dumps(table).encode()
