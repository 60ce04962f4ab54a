"""The rows of the report that are about the directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lightning_elastic_zero.checkpoint.directory_check import find_unseen
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.selftest.environment import Environment
from lightning_elastic_zero.selftest.report import Result, Row
from lightning_elastic_zero.storage.probe import SYNC_FILE, SYNC_NAMES, probe_capabilities

SEEN = "directory: visible between hosts"

_WORST_FIRST: tuple[Result, ...] = ("FAILS", "not checked", "does without", "holds")


def directory_rows(ranks: Ranks, folder: Path, setting: Environment) -> list[Row]:
    """Try the directory out, on every starter. Collective.

    Args:
        ranks: the starters.
        folder: the selftest's own, which rank 0 has made.
        setting: where this runs.
    """
    unseen = find_unseen(ranks, folder, range(ranks.world_size), "selftest")
    if unseen or setting.hosts > 1:
        seen = [Row(SEEN, "FAILS" if unseen else "holds", unseen)]
    else:
        seen = [Row(SEEN, "not checked", "all ranks are on one host")]
    if unseen:
        return seen
    return seen + _abilities(ranks, folder, setting)


def _abilities(ranks: Ranks, folder: Path, setting: Environment) -> list[Row]:
    """Return what the directory can do on all ranks: of each ability what the worst one found."""

    def probe() -> list[tuple[str, Result, str]]:
        own = folder / f"probe-{ranks.rank}"
        try:
            own.mkdir()
        except OSError as error:
            return [("directory: write", "FAILS", f"{own.name}: {error.strerror or error}")]
        return [(found.what, found.outcome, found.details) for found in probe_capabilities(own)]

    found: dict[str, Row] = {}
    for of_rank in ranks.all_gather("selftest: try the directory out", probe):
        for what, result, details in of_rank:
            row = Row(what, result, details)
            before = found.setdefault(what, row)
            if _WORST_FIRST.index(row.result) < _WORST_FIRST.index(before.result):
                found[what] = row
    return [_without_memory(row, setting) for row in found.values()]


def _without_memory(row: Row, setting: Environment) -> Row:
    """Return the row; that bytes came to a disk is no finding where there is none."""
    if row.what in {SYNC_FILE, SYNC_NAMES} and row.result == "holds" and setting.in_memory:
        kind = setting.file_system[0]
        why = f"{kind} is memory: what lies there is lost with the machine, synced or not"
        return replace(row, result="not checked", details=why)
    return row
