"""Messages between ranks in the job's key-value store.

The keys of a session::

    beat/<rank>            what a rank last said of itself, counted up with every sign of life
    roll                   the ranks that have a beat, each appended once
    <seq>/step             kind and name of a step, set by the first rank that comes to it
    <seq>/report/<rank>    a result or a failure, where there is one
    <seq>/done, /failed    how many ranks have reported, and how many of them a failure
    <seq>/verdict          set once, by rank 0, or by a rank that has given up rank 0 or the step

No key stays behind once every rank has come to a later step.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import astuple, dataclass
from typing import Any

from lightning_elastic_zero.errors import error_class
from lightning_elastic_zero.processes import ProcessKey
from lightning_elastic_zero.text import format_by_rank

MOST_BYTES = 8 * 1024 * 1024
"""A TCPStore drops the connection of a client that sends a longer value."""

_LONG_BYTES = 16 * 1024
_MOST_CHARACTERS = 4000

MISMATCH = "mismatch"
"""Type of the report of a rank that came to a step under another name."""

DECIDED_BY_LEADER = "judged"
"""Entry of a verdict that is rank 0's own: it reads no report of the step any more."""


ROLL = "roll"
"""The key of the ranks that have said something: one look shows all of them."""


def roll_entry(rank: int) -> str:
    """Return what a rank appends to the roll."""
    return f"{rank},"


def ranks_on_roll(text: bytes) -> set[int]:
    """Return the ranks that have appended their entries."""
    return {int(rank) for rank in text.split(b",") if rank}


def pack(data: object) -> str:
    """Return plain data as text for the store.

    Raises:
        TypeError: it is not plain data.
        ValueError: it is too long for the store.
    """
    text = json.dumps(data)
    if len(text) > _LONG_BYTES:
        text = "z" + base64.b64encode(zlib.compress(text.encode(), 1)).decode()
    if len(text) > MOST_BYTES:
        msg = f"the result has {len(text)} bytes when packed, the store takes {MOST_BYTES} at most"
        raise ValueError(msg)
    return text


def unpack(held: bytes) -> Any:  # noqa: ANN401 - any plain data
    """Return the plain data of a text in the store."""
    return json.loads(zlib.decompress(base64.b64decode(held[1:])) if held[:1] == b"z" else held)


def failure_report(error: BaseException) -> dict[str, str]:
    """Return an error as plain data, with the nearest class that other ranks know."""
    mro = type(error).__mro__
    known = (cls.__name__ for cls in mro if error_class(cls.__name__) is cls)
    message = str(error)[:_MOST_CHARACTERS]
    return {
        "error": next(known, "RanksError"),
        "type": type(error).__name__,
        "message": message,
    }


def mismatch_report() -> dict[str, str]:
    """Return the report of a rank that came to a step under another name than the first one."""
    return {"error": "RanksError", "type": MISMATCH, "message": ""}


def lost_ranks_failure(name: str, lost: dict[int, str], world_size: int) -> dict[str, str]:
    """Return the verdict on a step that waits for ranks that will not come."""
    message = f"step {name!r} cannot be finished without {format_by_rank(lost, world_size)}"
    return {"error": "RanksError", "message": message}


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a rank last said of itself."""

    count: int
    """How many times it has said something."""

    seq: int
    """The step it came to last, 0 before its first one."""

    kind: str
    name: str

    activity: str
    """``working`` or ``waiting`` in that step, ``done`` with it, ``gone`` although the
    others have finished it, or ``closed``."""

    work_count: int
    """How often it has shown progress."""

    process: ProcessKey
    """Where it runs: who is on the same machine can ask the system for it."""

    def packed(self) -> str:
        """Return it as text for the store."""
        return pack(astuple(self))

    @classmethod
    def unpacked(cls, held: bytes) -> Heartbeat:
        """Read it from the store."""
        count, seq, kind, name, activity, work_count, process = unpack(held)
        return cls(count, seq, kind, name, activity, work_count, ProcessKey(*process))

    def last_seen(self) -> str:
        """Return where the rank was."""
        if self.seq == 0:
            return "last seen before its first step"
        where = {"working": "at work in", "waiting": "waiting in"}.get(self.activity, "after")
        return f"last seen {where} step {self.name!r}"
