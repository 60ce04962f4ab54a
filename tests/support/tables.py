"""Tables of results, shown at the end of a run and copied to docs/results.md by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass
class Table:
    title: str
    columns: tuple[str, ...]
    rows: dict[str, dict[str, int]] = field(default_factory=dict)

    def count(self, row: str, column: str, by: int = 1) -> None:
        cells = self.rows.setdefault(row, dict.fromkeys(self.columns, 0))
        cells[column] += by

    def total(self, column: str) -> int:
        return sum(cells[column] for cells in self.rows.values())

    def add(self, rows: Mapping[str, Mapping[str, int]]) -> None:
        for row, cells in rows.items():
            for column, value in cells.items():
                self.count(row, column, value)

    def lines(self) -> Iterator[str]:
        if not self.rows:
            return
        yield f"| | {' | '.join(self.columns)} |"
        yield f"|---|{'---:|' * len(self.columns)}"
        for name, cells in self.rows.items():
            yield f"| {name} | {' | '.join(f'{cells[c]:,}' for c in self.columns)} |"
        sums = " | ".join(f"{self.total(c):,}" for c in self.columns)
        yield f"| **all** | {sums} |"


CORRUPTIONS = Table(
    "corruptions, read in one process", ("tried", "refused", "harmless", "undetected", "unnamed")
)
LOADS = Table(
    "corruptions, loaded by ranks", ("tried", "refused by all ranks", "harmless", "silent")
)
KILLS = Table(
    "kills while saving",
    (
        *("tried", "landed", "checkpoints checked", "not loadable", "restarts", "not restarted"),
        *("silent errors", "last-good losses", "links to nothing"),
    ),
)
FAULTS = Table(
    "faults of disks and ranks while saving",
    ("tried", "raised on all ranks", "last good sound", "training intact", "next save sound"),
)
MATRIX = Table(
    "state saved on N devices, restored on M",
    ("cases", "tensors compared", "differing", "differing bits"),
)
ELASTIC = Table(
    "jobs that lose and gain nodes", ("tried", "repeated steps", "seconds to the next step")
)
RELEASES = Table(
    "other releases of dependencies",
    (
        *("tests passed", "tests skipped", "missing names refused", "resumed here"),
        *("resumed elsewhere", "not available here"),
    ),
)
STALLS = Table(
    "stall of training by a background save, compared with a copy from device to host",
    ("MiB", "µs of stall", "µs of a copy"),
)
STORE_FAULTS = Table(
    "requests to an object store that fail",
    (
        *("tried", "succeeded", "raised", "old one kept", "new one published", "silent errors"),
        *("lost checkpoints", "objects of others", "not saved again", "leftovers"),
    ),
)
TABLES = (MATRIX, CORRUPTIONS, LOADS, KILLS, FAULTS, ELASTIC, RELEASES, STALLS, STORE_FAULTS)
