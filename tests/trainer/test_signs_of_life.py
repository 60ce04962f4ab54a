"""Signs of life for other machines during saves."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deepspeed import comm

from lightning_elastic_zero.api import save_checkpoint
from lightning_elastic_zero.storage import ownership
from lightning_elastic_zero.storage.folder import Folder
from tests.support.ranks import Pools
from tests.trainer import _failure_cases

pytestmark = pytest.mark.engine


def watch(root: str) -> bool:
    """Save to a file system that shows the directory late; return whether its note was touched."""
    engine, opened, touched = _failure_cases.engine(), Path(root, "open"), threading.Event()

    def see_late(*args: Any) -> None:
        assert wait_for(opened.exists)
        await_left(*args)

    def look() -> None:
        try:
            # The file exists before its text is written.
            assert wait_for(lambda: any(map(Path.read_text, Path(root).glob(".zero-owner-*"))))
            (note,) = Path(root).glob(".zero-owner-*")
            assert json.loads(note.read_text())["target"]
            os.utime(note, (0, 0))
            if wait_for(lambda: note.stat().st_mtime > 0):
                touched.set()
        finally:
            opened.touch()

    await_left = Folder.await_left
    Folder.await_left = see_late  # type: ignore[method-assign,assignment]
    ownership.TOUCH_INTERVAL_S, heartbeat_interval_s = (
        0.05,
        ownership.TOUCH_INTERVAL_S,
    )
    watcher = threading.Thread(target=look)
    try:
        if comm.get_rank() == 0:
            watcher.start()
        save_checkpoint(engine, f"{root}/a.ckpt")
    finally:
        Folder.await_left = await_left  # type: ignore[method-assign]
        ownership.TOUCH_INTERVAL_S = heartbeat_interval_s
        if comm.get_rank() == 0:
            watcher.join()
    return touched.is_set()


def wait_for(condition: Callable[[], bool], timeout_s: float = 40.0) -> bool:
    end_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.01)
    return condition()


def test_rank_0_touches_its_note_while_ranks_wait_for_a_slow_disk(
    worlds: Pools, tmp_path: Path
) -> None:
    assert worlds.run(2, partial(watch, str(tmp_path)))[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "open"]
