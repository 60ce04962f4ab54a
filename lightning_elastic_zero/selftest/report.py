"""The report, as a table that can be pasted into an issue; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal
from unicodedata import combining, east_asian_width

Result = Literal["holds", "FAILS", "does without", "measured", "not checked"]
"""How a check ended: ``does without`` is what the library needs less, and has another way for."""

_MOST_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class Row:
    """One check."""

    what: str
    result: Result
    details: str = ""
    """What was found; of ``FAILS`` a whole sentence, of ``not checked`` the reason."""


@dataclass(frozen=True, slots=True)
class SelftestReport:
    """Result of ``run_selftest``."""

    setting: Mapping[str, str]
    """Environment: releases, devices, file system."""
    rows: tuple[Row, ...]

    @property
    def holds(self) -> bool:
        """Whether no check failed and at least one was made."""
        results = {row.result for row in self.rows}
        return "FAILS" not in results and "holds" in results

    def count(self, result: Result) -> int:
        """Return the number of checks with this result."""
        return sum(row.result == result for row in self.rows)

    def verdict(self) -> str:
        """Return a summary in one sentence."""
        unchecked = self.count("not checked")
        rest = f"; {unchecked} not checked" if unchecked else ""
        if self.holds:
            return f"holds here: {self.count('holds')} checks{rest}"
        return f"DOES NOT HOLD here: {self.count('FAILS')} of the checks failed{rest}"

    def failures(self) -> list[str]:
        """Return a sentence for each failed check."""
        return [f"{row.what}: {row.details}" for row in self.rows if row.result == "FAILS"]

    def to_plain(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "holds": self.holds,
            "setting": dict(self.setting),
            "rows": [asdict(row) for row in self.rows],
        }


def report_lines(report: SelftestReport) -> Iterator[str]:
    """Yield the report as Markdown that reads well as plain text too."""
    yield f"### lightning-elastic-zero selftest: {report.verdict()}"
    yield ""
    yield from _table(("here", ""), [*report.setting.items()])
    yield ""
    rows = [(row.what, row.result, row.details) for row in report.rows]
    yield from _table(("check", "result", "details"), rows)


def shorten(text: str) -> str:
    """Return a text as one line of some length: errors are long, and have several."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 3]}..."


def _table(head: tuple[str, ...], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    cells = [[_cell(text) for text in row] for row in (head, *rows)]
    # The last column is as wide as it is: sentences would fill all others' lines with blanks.
    widths = [max(_columns(row[at]) for row in cells) for at in range(len(head) - 1)]
    for index, row in enumerate(cells):
        padded = [
            text + " " * (width - _columns(text)) for text, width in zip(row, widths, strict=False)
        ]
        yield f"| {' | '.join([*padded, row[-1]])} |"
        if not index:
            yield f"|{'|'.join('-' * (width + 2) for width in (*widths, max(len(row[-1]), 1)))}|"


def _cell(text: str) -> str:
    """Return a text that stays in its cell, with what Markdown would read as its end escaped."""
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in shorten(text)
    )
    return "".join(f"\\{char}" if char in "\\|" else char for char in shown)


def _columns(text: str) -> int:
    """Return how many columns a text takes in a terminal."""
    return sum(
        0 if combining(char) else 2 if east_asian_width(char) in "FW" else 1 for char in text
    )
