"""One rank of a world: what a starter's process runs."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback

from lightning_elastic_zero.selftest import rank_tasks
from lightning_elastic_zero.selftest.worker_protocol import Request, Sender

_STARTER_IS_GONE = 70


def main(asked: int, told: int) -> None:
    """Do what a request asks for, and end this process.

    It ends at once, without the interpreter's end: all is told by then, and a process group in
    which a rank was killed need not come to an end of its own.

    Args:
        asked: descriptor of the file with the request.
        told: descriptor of the file for what is to be told.
    """
    threading.Thread(target=_end_with_starter, daemon=True).start()
    status = 0
    try:
        with os.fdopen(asked, "rb") as file:
            request = Request(**json.loads(file.read()))
        sender = Sender(told, int(os.environ["RANK"]))
        rank_tasks.TASKS[request.task](request, sender)
        sender.finished()
    except BaseException:  # noqa: BLE001 - its last words are what the starter shows
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_with_starter() -> None:
    """End this process when its starter ends, however that does."""
    sys.stdin.buffer.read()
    os._exit(_STARTER_IS_GONE)
