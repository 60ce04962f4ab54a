"""Requests to a worker and its reports, in files without a name, which a kill leaves whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_elastic_zero.selftest.checks import DYING, GOOD, TOLD

BY_KILL = "signal 9"
"""In the words of how a process ended: by SIGKILL."""

State = Mapping[str, str]
"""What an engine held: of each tensor, or number, a digest."""


@dataclass(frozen=True, slots=True)
class Request:
    """What all ranks of a world are to do; the same for each."""

    task: str
    """Name of a function in ``rank_tasks``."""
    device: str
    """``"cpu"`` or ``"cuda"``."""
    folder: str
    """The selftest's own, in the directory that is tested."""
    collective_timeout_s: float
    expected: Mapping[str, State] = field(default_factory=dict)
    """What checkpoints hold, by their names."""
    measured_bytes: int = 0
    """Of state on each rank, to time things by."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank of a world told, until it ended."""

    rank: int
    problems: Mapping[str, str] = field(default_factory=dict)
    """By check: what was wrong; empty where it held."""
    states: Mapping[str, State] = field(default_factory=dict)
    """By checkpoint, what was saved; of rank 0."""
    figures: Mapping[str, float] = field(default_factory=dict)
    finished: bool = False
    """Whether it came to the end of its task."""
    ended: str = ""
    """How its process ended, with its last words, where it did not finish."""


@dataclass(frozen=True, slots=True)
class WorldReport:
    """What a world told."""

    ranks: tuple[RankReport, ...]
    killed: int | None = None
    """The rank that was killed on purpose: it need not tell of each check."""

    def problem(self, check: str) -> str | None:
        """Return what was wrong with a check, with the ranks; empty: it held; None: not checked."""
        told = {r.rank: r.problems[check] for r in self.ranks if check in r.problems}
        wrong = {rank: text for rank, text in told.items() if text}
        if wrong:
            first = min(wrong)
            others = f" (and {len(wrong) - 1} other ranks)" if len(wrong) > 1 else ""
            return f"rank {first}{others}: {wrong[first]}"
        silent = {r.rank for r in self.ranks} - told.keys() - {self.killed}
        return "" if told and not silent else None

    def states(self) -> dict[str, State]:
        """Return what was saved, by checkpoint."""
        return {name: state for r in self.ranks for name, state in r.states.items()}

    def figures(self, name: str) -> list[float]:
        """Return what was measured, by rank."""
        return [r.figures[name] for r in self.ranks if name in r.figures]

    def unfinished(self) -> dict[int, str]:
        """Return how processes ended that did not come to the end of their task, but were to."""
        return {r.rank: r.ended for r in self.ranks if not (r.finished or self._was_killed(r))}

    def no_kill(self) -> str:
        """Return why this is no world in which a rank was killed in its save; empty: it is one."""
        for report in self.ranks:
            if report.rank == self.killed and not self._was_killed(report):
                how = report.ended or "its process came to the end of its task"
                return f"rank {report.rank} was not killed in its save: {how}"
        if len(self.ranks) > 1 and self.problem(TOLD) != "":
            return "the other ranks did not tell that the save had failed"
        return ""

    def _was_killed(self, report: RankReport) -> bool:
        """Whether a process ended as it was to: killed in a save, after the one that must stay."""
        by_kill = report.rank == self.killed and BY_KILL in report.ended
        return by_kill and report.problems.get(GOOD) == "" and DYING in report.problems


class Sender:
    """A worker's side: appends lines to its file."""

    def __init__(self, descriptor: int, rank: int) -> None:
        self._descriptor = descriptor
        self.rank = rank

    def checked(self, check: str, problem: str = "") -> None:
        """Report that a check was made, and what was wrong."""
        self._send("problems", check, problem)

    def saved(self, name: str, state: State) -> None:
        """Report the content of a checkpoint."""
        self._send("states", name, dict(state))

    def measured(self, name: str, value: float) -> None:
        """Report a figure."""
        self._send("figures", name, value)

    def finished(self) -> None:
        """Report that the task is done."""
        self._send("finished", "", value=True)

    def _send(self, kind: str, name: str, value: object) -> None:
        os.write(self._descriptor, json.dumps([kind, name, value]).encode() + b"\n")


def read_report(data: bytes, rank: int, ended: str) -> RankReport:
    """Return what a worker has told; a line that a kill has cut is none."""
    told: dict[str, dict[str, Any]] = {"problems": {}, "states": {}, "figures": {}, "finished": {}}
    for line in data.splitlines(keepends=True):
        if line.endswith(b"\n"):
            kind, name, value = json.loads(line)
            told[kind][name] = value
    finished = bool(told.pop("finished"))
    return RankReport(rank, **told, finished=finished, ended="" if finished else ended)


def to_plain(report: RankReport) -> dict[str, Any]:
    """Return a report as ranks hand it around."""
    return asdict(report)


def world_report(
    by_starter: Sequence[Sequence[Mapping[str, Any]]], killed: int | None
) -> WorldReport:
    """Return what all starters have collected, in the order of the ranks."""
    found = [RankReport(**plain) for of_starter in by_starter for plain in of_starter]
    return WorldReport(tuple(sorted(found, key=lambda r: r.rank)), killed)
