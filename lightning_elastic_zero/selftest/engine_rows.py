"""The rows of the report that engines are needed for: three worlds of workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.manifest import STAGES
from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.selftest.checks import (
    COPY,
    GOOD,
    MEASURED,
    MODES,
    NEXT_SAVE,
    NEXT_STAGE,
    PUBLICATION,
    RAW,
    STALL,
    TOLD,
    TORN,
    UNMEASURED,
    checkpoint_file,
    returned_name,
    saved_name,
)
from lightning_elastic_zero.selftest.environment import Environment
from lightning_elastic_zero.selftest.report import Row
from lightning_elastic_zero.selftest.worker_pool import run_world
from lightning_elastic_zero.selftest.worker_protocol import Request, State, WorldReport
from lightning_elastic_zero.selftest.worlds import Worlds, measured_bytes
from lightning_elastic_zero.tools.report import format_bytes
from lightning_elastic_zero.tools.verification import newest_sound_checkpoint, verify_checkpoint

_COLLECTIVE_TIMEOUT_S = 120.0
"""For how long a worker waits for another one in DeepSpeed's own collectives."""


@dataclass(frozen=True, slots=True)
class Starters:
    """Who starts workers, and how."""

    ranks: Ranks
    folder: Path
    """The selftest's own."""
    world_timeout_s: float
    on_phase: Callable[[str], None]

    def run(
        self,
        task: str,
        world_size: int,
        setting: Environment,
        expected: Mapping[str, State],
        killed: int | None = None,
    ) -> WorldReport:
        """Run a task of ``rank_tasks`` on so many workers. Collective."""
        request = Request(
            task=task,
            device=setting.device,
            folder=str(self.folder),
            collective_timeout_s=min(_COLLECTIVE_TIMEOUT_S, self.world_timeout_s),
            expected=expected,
            measured_bytes=measured_bytes(world_size),
        )
        return run_world(self.ranks, world_size, request, self.world_timeout_s, killed)


@dataclass(frozen=True, slots=True)
class WorldReports:
    """What the three worlds told, those that ran so far."""

    saves: WorldReport | None = None
    loads: WorldReport | None = None
    returns: WorldReport | None = None
    kept: str | None = None
    """What was wrong with the checkpoint before the kill; None: not looked at."""
    unpublished: str | None = None
    """What was wrong with the one that was being written."""


def engine_rows(starters: Starters, setting: Environment) -> list[Row]:
    """Save, measure, kill and load, on all worlds. Collective."""
    worlds, on_phase = setting.worlds, starters.on_phase
    on_phase(f"saving on {worlds.saves}, measuring, and killing a rank")
    saves = starters.run("save_all", worlds.saves, setting, {}, worlds.saves - 1)
    kept, unpublished = None, None
    if saves.problem(GOOD) == "":
        kept, unpublished = starters.ranks.broadcast(
            "selftest: look at what a kill has left", lambda: _after_kill(starters.folder)
        )
    on_phase(f"loading on {worlds.loads}")
    loads = starters.run("load_all", worlds.loads, setting, saves.states())
    on_phase(f"loading on {worlds.returns}")
    returns = starters.run("load_again", worlds.returns, setting, loads.states())
    found = WorldReports(saves, loads, returns, kept, unpublished)
    return _world_rows(found, worlds) + _uncovered_rows(setting)


def unchecked_rows(setting: Environment, why: str) -> list[Row]:
    """Return the rows where no world has run."""
    rows = [
        Row(row.what, "not checked", why) for row in _world_rows(WorldReports(), setting.worlds)
    ]
    return rows + _uncovered_rows(setting)


def _world_rows(found: WorldReports, worlds: Worlds) -> list[Row]:
    """Return the rows of what was found."""
    return [
        *_process_rows(found, worlds),
        *_load_rows(found, worlds),
        *_kill_rows(found, worlds),
        *_figure_rows(found, worlds),
    ]


def _uncovered_rows(setting: Environment) -> list[Row]:
    """Return rows for what cannot be found out here, whatever happens."""
    rows = []
    if not setting.worlds.changes:
        one = "there is one device: start it under torchrun on more, or where there are more"
        rows.append(Row("another number of devices", "not checked", one))
    if setting.device == "cpu":
        why = "processors were used: torch sees no GPU here, or DS_ACCELERATOR=cpu is set"
        rows.append(Row("on GPUs", "not checked", why))
    else:
        how = "GPUs were used: DS_ACCELERATOR=cpu makes it use processors"
        rows.append(Row("on processors", "not checked", how))
    return rows


def _process_rows(found: WorldReports, worlds: Worlds) -> list[Row]:
    """Whether all processes came to the end of their task."""
    rows = []
    for task, report, size in (
        ("saving", found.saves, worlds.saves),
        ("loading", found.loads, worlds.loads),
        ("loading again", found.returns, worlds.returns),
    ):
        what = f"processes, {task} on {size}"
        ended = {} if report is None else report.unfinished()
        if report is None:
            rows.append(Row(what, "not checked"))
        elif ended:
            first = min(ended)
            more = f" ({len(ended)} of {size} did not finish)" if len(ended) > 1 else ""
            rows.append(Row(what, "FAILS", f"of rank {first} {ended[first]}{more}"))
        else:
            rows.append(Row(what, "holds"))
    return rows


def _load_rows(found: WorldReports, worlds: Worlds) -> list[Row]:
    """Return the rows of each checkpoint that was saved and loaded."""
    rows = []
    to, back = f"{worlds.saves} -> {worlds.loads}", f"{worlds.loads} -> {worlds.returns}"
    for stage in STAGES:
        for mode in MODES:
            name = saved_name(stage, mode)
            told = {
                "saving": _reported_problem(found.saves, name),
                "loading": _reported_problem(found.loads, name),
            }
            rows.append(_row(f"ZeRO-{stage}, {mode}, {to}", told))
    for stage in STAGES:
        name = returned_name(stage)
        told = {
            "saving": _reported_problem(found.loads, name),
            "loading": _reported_problem(found.returns, name),
        }
        rows.append(_row(f"ZeRO-{stage} to ZeRO-{NEXT_STAGE[stage]}, {back}", told))
    return rows


def _kill_rows(found: WorldReports, worlds: Worlds) -> list[Row]:
    """Return the rows of the kill: none of them holds where nothing was killed in its save."""
    no_kill = found.saves.no_kill() if found.saves else ""
    good = {"saving": _reported_problem(found.saves, GOOD), "its bytes": found.kept}
    told = {"": _reported_problem(found.saves, TOLD)}
    if worlds.saves == 1:
        survivors = Row("kill: the other ranks are told", "not checked", "there is one rank")
    else:
        survivors = _row("kill: the other ranks are told", told)
    rows = [
        survivors,
        _row("kill: the last good checkpoint is whole", good),
        _row("kill: what was being written is not published", {"": found.unpublished}),
        _row("kill: the last good one is loaded", {"": _reported_problem(found.loads, GOOD)}),
        _row("kill: the next save succeeds", {"": _reported_problem(found.loads, NEXT_SAVE)}),
    ]
    return [
        replace(row, result="not checked", details=no_kill)
        if no_kill and row.result == "holds"
        else row
        for row in rows
    ]


def _reported_problem(report: WorldReport | None, check: str) -> str | None:
    return None if report is None else report.problem(check)


def _row(what: str, told: Mapping[str, str | None]) -> Row:
    """Return a row of several parts: it fails where one does, and holds where all do."""
    for part, problem in told.items():
        if problem:
            return Row(what, "FAILS", f"{part}, {problem}" if part else problem)
    if any(problem is None for problem in told.values()):
        return Row(what, "not checked", "its processes did not come to it")
    return Row(what, "holds", "bit for bit" if "loading" in told else "")


def _figure_rows(found: WorldReports, worlds: Worlds) -> list[Row]:
    """Return the rows of what was measured: none of them holds or fails, but that of measuring."""
    whats = (
        "speed: written and synced, per rank",
        "speed: written and synced, in sum",
        "background: publication beside a raw write",
        "background: stall beside a copy",
    )
    problem = _reported_problem(found.saves, MEASURED)
    raw, copy, publication, stall = (
        found.saves.figures(name) if found.saves else [] for name in (RAW, COPY, PUBLICATION, STALL)
    )
    if problem or not (raw and copy and publication and stall):
        why = _reported_problem(found.saves, UNMEASURED) or "it was not measured"
        rows = [Row(what, "not checked", why) for what in whats]
        return [*rows, Row("speed", "FAILS", problem)] if problem else rows
    size_bytes = measured_bytes(worlds.saves)
    each = [format_bytes(size_bytes / seconds) for seconds in (max(raw), min(raw))]
    total = format_bytes(size_bytes * len(raw) / max(raw))
    sizes = f"{format_bytes(size_bytes)} on each of {len(raw)} ranks"
    details = (
        f"{each[0]}/s to {each[1]}/s, {sizes}",
        f"{total}/s",
        f"{max(publication):.2f} s and {max(raw):.2f} s: {max(publication) / max(raw):.1f} times",
        f"{max(stall):.3f} s and {max(copy):.3f} s: {max(stall) / max(copy):.1f} times",
    )
    return [Row(what, "measured", text) for what, text in zip(whats, details, strict=True)]


def _after_kill(folder: Path) -> tuple[str, str]:
    """Rank 0: return what is wrong with the good checkpoint, and with the torn one; empty: nothing.

    The good one must be sound, and the newest sound one; nothing may have the torn one's name.
    """
    good, torn = (folder / checkpoint_file(name) for name in (GOOD, TORN))
    unpublished = f"{torn.name} is there, though its save was killed" if torn.exists() else ""
    try:
        verified = verify_checkpoint(good)
        newest = newest_sound_checkpoint(folder)
    except ElasticZeroError as error:
        return f"{type(error).__name__}: {error}", unpublished
    if verified.problem:
        return verified.problem, unpublished
    if newest is None or newest.name != good.name:
        return f"the newest sound checkpoint is {newest}, not {good.name}", unpublished
    return "", unpublished
