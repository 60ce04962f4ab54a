"""The line of progress: on a terminal, and only for work that takes longer than two seconds."""

from __future__ import annotations

import io
import os
import pty
from collections.abc import Callable
from functools import partial

import pytest

from lightning_elastic_zero.display_timer import DisplayTimer
from lightning_elastic_zero.tools import progress_line
from lightning_elastic_zero.tools.progress_line import ProgressLine


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that lines go by."""
    made = Clock()
    monkeypatch.setattr(progress_line, "DisplayTimer", partial(DisplayTimer, made))
    return made


def on_terminal(work: Callable[[ProgressLine], None]) -> str:
    """Return what a terminal was sent by a line while some work was done."""
    ours, theirs = pty.openpty()
    try:
        with os.fdopen(theirs, "w") as stream:
            with ProgressLine("verifying", 4_000_000, stream) as line:
                work(line)
            stream.write("END")
            stream.flush()
            read = ""
            while not read.endswith("END"):
                read += os.read(ours, 4096).decode()
    finally:
        os.close(ours)
    return read.removesuffix("END")


def test_long_work_on_a_terminal(clock: Clock) -> None:
    """Nothing for two seconds; then what was done, of how much and how fast; in the end nothing."""

    def work(line: ProgressLine) -> None:
        line(1_000_000)
        clock.now_s += 1.9
        line(500_000)
        clock.now_s += 0.6
        line(500_000)
        line(500_000)  # Too soon for another one.
        clock.now_s += 2.5
        line(500_000)

    shown = on_terminal(work).split("\r")
    texts = [text.rstrip() for text in shown if text.strip()]
    assert texts == [
        "verifying: 2.0 MB of 4.0 MB, 800.0 kB/s",
        "verifying: 3.0 MB of 4.0 MB, 600.0 kB/s",
    ]
    assert len(shown[-2]) == len(texts[-1])  # It is overwritten by spaces.
    assert not shown[-2].strip()
    assert shown[-1] == ""


def test_short_work_shows_nothing(clock: Clock) -> None:
    """Not one byte."""

    def work(line: ProgressLine) -> None:
        for _ in range(19):
            clock.now_s += 0.1
            line(1000)

    assert on_terminal(work) == ""


def test_where_there_is_no_terminal(clock: Clock) -> None:
    """A file or a pipe gets nothing, however long the work is."""
    stream = io.StringIO()
    with ProgressLine("verifying", 0, stream) as line:
        clock.now_s += 100
        line(1000)
    assert stream.getvalue() == ""
    assert line.done_bytes == 1000
    assert line.throughput() == "10 B/s"
