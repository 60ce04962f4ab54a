"""Which cases of a test run now, where all would take too long: other ones with each commit.

A test marked ``rotating(3)`` runs three of its cases in ``make test`` and all of them in ``make
test-long``; with ``per="scenario"``, three for each value of that parameter. One marked ``engine``
that says nothing runs one. Of a file marked ``rotating_tests(3)``, or of the tests with the same
``group="..."``, three tests run in a turn, with the cases that are drawn of them. Cases marked
``essential`` run always. The turn is the number of commits that lead to HEAD, so that consecutive
commits sweep over all cases, and ``--rotation`` repeats a turn.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[1]

T = TypeVar("T")


@dataclass(frozen=True)
class Rotation:
    """A turn of the rotation."""

    turn: int

    def chosen(self, points: Sequence[T], count: int) -> list[T]:
        """Return that many of the points, in their order, as the turn has it.

        A sweep over all of them takes as few turns as there can be; each sweep has its own order.
        """
        if len(points) <= count:
            return list(points)
        turns = -(-len(points) // count)
        sweep, place = divmod(self.turn, turns)
        order = sorted(range(len(points)), key=lambda i: _digest(f"{sweep} {i} {points[i]}"))
        # The last turn of a sweep is filled up from its beginning.
        now = {order[(place * count + i) % len(points)] for i in range(count)}
        return [point for i, point in enumerate(points) if i in now]

    def part_of(self, text: str) -> tuple[int, int]:
        """Return which part a ``--part`` names, counted from 0, and of how many.

        Raises:
            ValueError: it is neither ``I/N`` nor ``commit/N``.
        """
        which, _, of = text.partition("/")
        parts = int(of)
        part = self.turn % parts if which == "commit" else int(which) - 1
        if not 0 <= part < parts:
            msg = f"--part={text}: parts are counted from 1 to {parts}"
            raise ValueError(msg)
        return part, parts


def parts_of(tests: Iterable[str], parts: int) -> list[int]:
    """Deal cases out to parts like cards, so that each part has its share of every test.

    Args:
        tests: of each case the name of its test.
        parts: how many there are.

    Returns:
        The part of each case.
    """
    dealt: dict[str, int] = {}
    found = []
    for test in tests:
        place = dealt.setdefault(test, _digest(test) % parts)
        found.append(place % parts)
        dealt[test] += 1
    return found


def turn_of_commit() -> int:
    """Return the number of commits that lead to HEAD; a number of HEAD's own in a shallow clone."""
    if _git("rev-parse", "--is-shallow-repository") == "false":
        return int(_git("rev-list", "--count", "HEAD") or 0)
    return int(_git("rev-parse", "HEAD")[:8] or "0", 16)


def _git(*arguments: str) -> str:
    """Return what git prints; nothing where there is no git, or no repository."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
