"""A run that is started, watched and killed repeatedly."""

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
"""A run without progress for this long counts as hanging."""

POLL_S = 0.05


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run, equal in all of its starts."""

    folder: Path
    """Folder of its checkpoints and its event log."""

    interval_s: float | None
    """Seconds between saves; None: do not save."""

    ranks: int
    stage: int
    parameters: float
    batch: int
    async_save: bool

    @property
    def event_log(self) -> Path:
        """Path of a file of JSON lines: the events since the last start of the run."""
        return self.folder / "events.jsonl"


def be_rank(settings: RunSettings, rank: int, port: int) -> None:
    """Train until killed, in an own process."""
    from goodput_worker import train  # type: ignore[import-not-found]

    train(settings, rank, port, 2 * PATIENCE_S)


class Run:
    """A run that is started and killed repeatedly."""

    def __init__(self, context: Any, settings: RunSettings) -> None:
        self.context, self.settings = context, settings
        self.processes: list[Any] = []
        self.began = 0.0
        settings.folder.mkdir(parents=True)

    def start(self) -> None:
        """Start all ranks from the last checkpoint."""
        self.settings.event_log.unlink(missing_ok=True)
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
        """Kill all ranks; return the seconds since their start."""
        for process in self.processes:
            process.kill()
        seconds = time.monotonic() - self.began
        for process in self.processes:
            process.join()
        self.processes.clear()
        return seconds

    def wait_until(self, deadline: float, is_met: Callable[[], bool] = lambda: False) -> bool:
        """Wait for a condition until a deadline; return whether it is met.

        Raises:
            SystemExit: a rank has ended by itself.
        """
        while not is_met():
            if (remaining_s := deadline - time.monotonic()) <= 0:
                return False
            if wait(
                [process.sentinel for process in self.processes], timeout=min(remaining_s, POLL_S)
            ):
                log = (self.settings.folder / "rank-0.log").read_text(errors="replace")
                sys.exit(f"a rank has ended by itself; the end of rank 0's log:\n{log[-4000:]}")
        return True

    def events(self, kind: str) -> list[dict[str, float]]:
        """Return the events of a kind since the last start."""
        if not self.settings.event_log.exists():
            return []
        lines = self.settings.event_log.read_text().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["event"] == kind]

    def published_step(self) -> int:
        """Return the step of the checkpoint from which the next start resumes."""
        name = (self.settings.folder / "checkpoints" / "last.ckpt").resolve().stem
        return int(name.rpartition("=")[2])
