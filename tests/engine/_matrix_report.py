"""What the matrix has tried, for the table at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.engine._save_load_programs import StateComparison


@dataclass
class Row:
    """One line of the table."""

    cases: int = 0
    tensors: int = 0
    differing_tensors: int = 0
    differing_bits: int = 0


@dataclass
class MatrixReport:
    """Counts by kind of case."""

    rows: dict[str, Row] = field(default_factory=dict)

    def count(self, kind: str, verdict: StateComparison) -> None:
        """Add a case."""
        row = self.rows.setdefault(kind, Row())
        row.cases += 1
        row.tensors += verdict.tensors
        row.differing_tensors += len(verdict.differing) + len(verdict.unrounded)
        row.differing_bits += sum(max(bits, 1) for bits in verdict.differing.values())

    def table(self) -> Iterator[str]:
        """Yield the lines of the table."""
        columns = ("cases", "tensors compared", "differing", "differing bits")
        yield f"{'':<16}" + "".join(f"{c:>18}" for c in columns)
        for kind, row in self.rows.items():
            values = (row.cases, row.tensors, row.differing_tensors, row.differing_bits)
            yield f"{kind:<16}" + "".join(f"{v:>18,}" for v in values)
