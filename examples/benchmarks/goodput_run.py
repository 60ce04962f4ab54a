"""A run that is started, watched and killed, again and again."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

PATIENCE_S = 600
"""A run that has not come so far by then hangs."""

POLL_S = 0.05


@dataclass(frozen=True)
class RunSettings:
    """A run, whatever happens to it."""

    folder: Path
    """Of its checkpoints, and of what it notes."""

    interval_s: float | None
    """Seconds from save to save; None: nothing is saved."""

    ranks: int
    stage: int
    parameters: float
    batch: int
    async_save: bool

    @property
    def diary(self) -> Path:
        """A file of JSON lines: what has happened since the run was started the last time."""
        return self.folder / "diary.jsonl"


def be_rank(settings: RunSettings, rank: int, port: int) -> None:
    """Train until killed, in a process of its own."""
    from goodput_worker import train  # type: ignore[import-not-found]

    train(settings, rank, port, 2 * PATIENCE_S)


class Run:
    """A run that is started and killed again and again."""

    def __init__(self, context: Any, settings: RunSettings) -> None:
        self.context, self.settings = context, settings
        self.processes: list[Any] = []
        self.began = 0.0
        settings.folder.mkdir(parents=True)

    def start(self) -> None:
        """Start all ranks, from the last checkpoint on."""
        self.settings.diary.unlink(missing_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.began = time.monotonic()
        for rank in range(self.settings.ranks):
            arguments = (self.settings, rank, port)
            process = self.context.Process(target=be_rank, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)

    def kill(self) -> float:
        """Kill all ranks; return for how many seconds they were there."""
        for process in self.processes:
            process.kill()
        seconds = time.monotonic() - self.began
        for process in self.processes:
            process.join()
        self.processes.clear()
        return seconds

    def wait_until(self, deadline: float, over: Callable[[], bool] = lambda: False) -> bool:
        """Wait until it is over, or a time has come; return whether it is over.

        Raises:
            SystemExit: a rank has ended by itself.
        """
        while not over():
            if (left := deadline - time.monotonic()) <= 0:
                return False
            if wait([process.sentinel for process in self.processes], timeout=min(left, POLL_S)):
                log = (self.settings.folder / "rank-0.log").read_text(errors="replace")
                sys.exit(f"a rank has ended by itself; the end of rank 0's log:\n{log[-4000:]}")
        return True

    def events(self, kind: str) -> list[dict[str, float]]:
        """Return what was noted since the last start."""
        if not self.settings.diary.exists():
            return []
        lines = self.settings.diary.read_text().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["event"] == kind]

    def published_step(self) -> int:
        """Return the step of the checkpoint that the next start goes on from."""
        name = (self.settings.folder / "checkpoints" / "last.ckpt").resolve().stem
        return int(name.rpartition("=")[2])
