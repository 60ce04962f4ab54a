"""Mutants that no test can or need notice, each with the reason."""

from __future__ import annotations

SURVIVORS = {
    (
        "layout.py: for (fragment, runs), transfer in zip(unfinished, transfers, strict=True)"
        "  ->  False"
    ): ("equivalent: one list is made from the other in the line above"),
    ("layout.py: raise CheckpointFormatError(_not_once(wanted, reached))  ->  pass"): (
        "in _extent: computing `reached` walks the runs, which raises the same error first "
        "wherever they do not tile"
    ),
    (
        "layout.py: reached = max((t.stop for t in _fill(wanted, held)), "
        "default=wanted.start)  ->  min"
    ): ("the walk raises before there is a largest one; see the line below it"),
    (
        "partition.py: for i in range(max(bisect_right(starts, first) - 1, 0), len(starts)):  ->  2"
    ): (
        "begins one parameter earlier, which has no element in the partition: a step more, "
        "the same fragments"
    ),
    (
        "partition.py: for i in range(max(bisect_right(starts, first) - 1, 0), len(starts)):"
        "  ->  min"
    ): ("begins at the first parameter: more steps, the same fragments"),
}
"""By file and change, as ``python -m tests.mutation`` prints them."""
