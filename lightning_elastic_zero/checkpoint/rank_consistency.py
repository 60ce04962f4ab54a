"""What ranks compare before they write one checkpoint: what must be alike, and what may drift.

Hyperparameters may drift apart: a scheduler that steps on a metric that each rank has for itself
lowers the rate on one rank and not on another. Each rank then steps its part of the weights with a
rate of its own, which no checkpoint that fits any number of ranks can keep. That is no reason to
end a run: rank 0's are saved, which a load gives to every rank, and the difference is told.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.manifest import Manifest
from lightning_elastic_zero.tensor_state import RankState, canonical_repr
from lightning_elastic_zero.text import format_ranks

SCHEDULERS = "lr_schedulers"
"""The client state's entry for schedulers' states, which belong to the rates: Lightning's name."""

ComparisonTables = Mapping[str, Any]
"""What ranks compare, as JSON has it."""

_Drift = tuple[int, str]
"""Index of a parameter group, and a hyperparameter of it."""

_MOST_SENT = 16
_MOST_SHOWN = 400
_MOST_TOLD = 4

log = logging.getLogger(__name__)


def comparison_tables(manifest: Manifest, state: RankState) -> ComparisonTables:
    """Return what the other ranks compare themselves with; rank 0's."""
    return {
        "tables": _tables(manifest),
        "scalars": _scalars(state),
        "hyperparameters": [_digest(group.hyperparameters) for group in manifest.groups],
    }


def check_consistent(first: ComparisonTables, manifest: Manifest, state: RankState) -> None:
    """Refuse a rank that does not hold the run that rank 0 holds.

    Raises:
        UnsupportedError: it does not; the tables, or the states with both values, are named.
    """
    tables = _tables(manifest)
    if differ := [name for name, table in first["tables"].items() if tables[name] != table]:
        here, there = _first_difference(tables[differ[0]], first["tables"][differ[0]])
        msg = (
            f"the ranks do not agree on their {', '.join(differ)}: they do not hold one run. The "
            f"first difference is {here} here, and {there} on rank 0"
        )
        raise UnsupportedError(msg)
    pairs = enumerate(zip(_scalars(state), first["scalars"], strict=True))
    for index, (mine, theirs) in pairs:
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                msg = (
                    f"the optimizer's state {key!r} of flat buffer {index} is "
                    f"{mine.get(key, 'not there')} here and {theirs.get(key, 'not there')} on rank "
                    "0: states that are one value per buffer must be the same on all ranks, or "
                    "they do not hold one run"
                )
                raise UnsupportedError(msg)


def drifted_hyperparameters(first: ComparisonTables, manifest: Manifest) -> list[list[Any]]:
    """Return this rank's hyperparameters of the groups in which they differ from rank 0's.

    Returns:
        ``[group, {key: text}]`` each; of many groups the first ones.
    """
    found = [
        [index, {key: canonical_repr(value) for key, value in group.hyperparameters.items()}]
        for index, group in enumerate(manifest.groups)
        if _digest(group.hyperparameters) != first["hyperparameters"][index]
    ]
    return found[:_MOST_SENT]


def warn_of_drift(manifest: Manifest, of_ranks: Sequence[list[list[Any]]]) -> None:
    """Log which hyperparameters differ, with each rank's value; on rank 0.

    Args:
        manifest: rank 0's.
        of_ranks: what ``drifted_hyperparameters`` returned on each rank, in order.
    """
    own = [
        {key: canonical_repr(value) for key, value in group.hyperparameters.items()}
        for group in manifest.groups
    ]
    values: dict[_Drift, dict[int, str]] = {}
    for rank, groups in enumerate(of_ranks):
        for group, theirs in groups:
            for key, value in theirs.items():
                if value != own[group][key]:
                    values.setdefault((group, key), {})[rank] = value
    if not values:
        return
    told = [
        _sentence(drift, values[drift], own, len(of_ranks)) for drift in sorted(values)[:_MOST_TOLD]
    ]
    if len(values) > _MOST_TOLD:
        told.append(f"{len(values) - _MOST_TOLD} more")
    log.warning(
        "The ranks do not train with the same hyperparameters: %s. Each steps its part of the "
        "weights with its own. The checkpoint holds rank 0's, and a resume gives them, and the "
        "states of rank 0's schedulers, to every rank. A scheduler that steps on a metric needs "
        "the same value on all ranks: self.log(..., sync_dist=True).",
        "; ".join(told),
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
    """Return the first rows that differ, the same rows cut to where they do."""
    rows = itertools.zip_longest(mine, theirs, fillvalue="nothing")
    one, other = next((one, other) for one, other in rows if one != other)
    if len(one) <= _MOST_SHOWN and len(other) <= _MOST_SHOWN:
        return one, other
    same = zip(one, other, strict=False)
    at = next((i for i, (a, b) in enumerate(same) if a != b), min(len(one), len(other)))
    shown = slice(max(0, at - _MOST_SHOWN // 2), at + _MOST_SHOWN // 2)
    return f"... {one[shown]} ...", f"... {other[shown]} ..."


def _tables(manifest: Manifest) -> dict[str, list[str]]:
    """Return the rows of what must be alike on all ranks, by the name that a message calls it."""
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


def _scalars(state: RankState) -> list[dict[str, str]]:
    return [
        {key: canonical_repr(value, f"the state {key!r}") for key, value in flat.scalars.items()}
        for flat in state.flats
    ]


def _digest(hyperparameters: Mapping[str, Any]) -> str:
    text = canonical_repr(dict(hyperparameters))
    return xxhash.xxh3_64_hexdigest(text.encode(errors="surrogatepass"))
