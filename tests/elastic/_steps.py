"""What the ranks of a job have noted, and what must hold of it after whatever has happened."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pytest


@dataclass(frozen=True, slots=True, order=True)
class StepRecord:
    """What a rank has noted once."""

    time: float
    """In seconds, by the clock that all nodes share here."""

    event: str
    step: int
    rank: int
    world: int
    met_at: str
    """Address and port of the store in which the world's ranks met: no two worlds have the same."""

    pid: int
    samples: tuple[int, ...] = ()
    loss: float = 0.0

    @property
    def is_step(self) -> bool:
        """Whether it tells of an optimizer step, not of a start."""
        return self.event == "step"


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step of all ranks of a world."""

    samples: tuple[int, ...]
    """Of all ranks, sorted."""

    loss: float


Undisturbed: TypeAlias = dict[int, Step]
"""The steps of a run to which nothing happens, by number."""


def read_lines(folder: Path) -> list[StepRecord]:
    """Return what all ranks have noted, by time; a line that was cut was never finished."""
    found = []
    for path in folder.glob("steps-*.jsonl"):
        for text in path.read_text().splitlines():
            with suppress(ValueError):
                plain = json.loads(text)
                found.append(StepRecord(**{**plain, "samples": tuple(plain.get("samples", ()))}))
    return sorted(found)


def steps_of(lines: Iterable[StepRecord]) -> dict[tuple[str, int], Step]:
    """Return the steps that all ranks of a world have taken, by world and step."""
    by_step: dict[tuple[str, int], dict[int, StepRecord]] = defaultdict(dict)
    for line in lines:
        if line.is_step:
            by_step[line.met_at, line.step][line.rank] = line
    return {
        key: Step(tuple(sorted(s for r in ranks.values() for s in r.samples)), ranks[0].loss)
        for key, ranks in by_step.items()
        if len(ranks) == next(iter(ranks.values())).world
    }


def check_steps(lines: list[StepRecord], undisturbed: Mapping[int, Step]) -> None:
    """Check that each step, also one that was taken twice, is that of the undisturbed run."""
    steps = steps_of(lines)
    assert {step for _, step in steps} == set(undisturbed)
    for (_, number), step in steps.items():
        assert step.samples == undisturbed[number].samples, f"step {number}"
        assert step.loss == pytest.approx(undisturbed[number].loss, rel=1e-5), f"step {number}"


def steps_taken_again(lines: list[StepRecord]) -> dict[float, int]:
    """Return, by when a world after the first one started, how many steps were lost before it."""
    starts: dict[str, StepRecord] = {}
    for line in lines:
        if not line.is_step:
            starts.setdefault(line.met_at, line)
    _, *later = starts.values()
    found = {}
    for start in later:
        before = [line.step for line in lines if line.is_step and line.time < start.time]
        found[start.time] = max(before, default=0) - start.step
    return found


def seconds_to_next_step(lines: list[StepRecord], since: float) -> float:
    """Return how long after an instant a world that began later has taken its first step."""
    began = {line.met_at for line in lines if not line.is_step and line.time > since}
    later = [line.time for line in lines if line.is_step and line.met_at in began]
    return min(later) - since
