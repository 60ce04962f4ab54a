"""No test depends on how busy the machine is: no short time decides whether it passes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.timeouts import PROMPT_TIMEOUT_S

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "tests").rglob("*.py"))

USUAL_S = 1800
"""What pyproject.toml lets a test take."""

MEASURED = ("seconds", "took", "monotonic", "perf_counter", "elapsed", "ended_at")
"""What names a time that has passed."""


def short_times(source: str) -> list[str]:
    """Return where a source lets a short time decide, with the lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.timeout":
            if not is_more_than_usual(node.args):
                found.append(f"line {node.lineno}: a limit of its own; see tests/timeouts.py")
        elif isinstance(node, ast.keyword) and node.arg in {"timeout", "timeout_s"}:
            if is_short(node.value):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Compare) and is_bounded(node):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def is_more_than_usual(limit: list[ast.expr]) -> bool:
    """Whether a limit is for what takes longer than any other test, and ends no other one early."""
    return (
        len(limit) == 1
        and isinstance(limit[0], ast.Constant)
        and isinstance(limit[0].value, int | float)
        and limit[0].value > USUAL_S
    )


def is_short(value: ast.expr) -> bool:
    """Whether a number is written there that is too small to tell a hang from a busy machine."""
    return (
        isinstance(value, ast.Constant)
        and isinstance(value.value, int | float)
        and value.value < PROMPT_TIMEOUT_S
    )


def is_bounded(compare: ast.Compare) -> bool:
    """Whether a time that has passed must stay below a short one."""
    sides = [compare.left, *compare.comparators]
    return any(
        isinstance(operator, ast.Lt | ast.LtE)
        and any(name in ast.unparse(left) for name in MEASURED)
        and is_short(right)
        for left, operator, right in zip(sides, compare.ops, sides[1:], strict=False)
    )


def test_no_short_time_decides() -> None:
    """What ends or hangs is told apart by ``tests.timeouts``, or by an event."""
    found = {str(s.relative_to(ROOT)): short_times(s.read_text(encoding="utf-8")) for s in SOURCES}
    assert not {source: times for source, times in found.items() if times}


@pytest.mark.parametrize(
    "source",
    [
        "pytestmark = pytest.mark.timeout(20)",
        "subprocess.run(call, timeout=60)",
        "assert refused.seconds < 10",
        "assert time.monotonic() - began < 5",
        "assert 0 <= took_s <= 4",
    ],
)
def test_a_short_time_is_found(source: str) -> None:
    """The check can fail."""
    assert short_times(source)
