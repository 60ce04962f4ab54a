"""What is told of a process is its own status, also where its id was another's before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.processes import HANG_TIMEOUT_S
from tests.support.ranks import ROOT

REUSED = """
import os, signal, sys, time
from tests.support import fork_server as server
signal.signal(signal.SIGCHLD, server._reap)
if not (probe := os.fork()):
    os._exit(7)
# As left by processes that ended: the next ids, and those after the largest one.
ids = [*range(probe, probe + 20_000), *range(2, 20_000)]
server._STATUSES.update(dict.fromkeys(ids, 7))
read, write = os.pipe()
pid = server._fork_program(server.ProgramRequest(b"", ".", os.devnull, os.devnull))
if not pid:
    os.close(write)
    os.read(read, 1)
    os._exit(3)
print(server._STATUSES.get(pid))
os.close(write)
while server._STATUSES.get(pid) is None:
    time.sleep(0.01)
print(server._STATUSES[pid])
pid = server._fork_program(server.ProgramRequest(b"", ".", os.devnull, os.devnull))
if not pid:
    os._exit(4)
while server._STATUSES.get(pid) is None:
    time.sleep(0.01)
print(server._STATUSES[pid])
"""


def test_a_process_id_that_was_anothers_has_no_status_yet(tmp_path: Path) -> None:
    """Ids come again, after 32,768 processes of a whole machine; one that ends at once is told."""
    done = subprocess.run(
        [sys.executable, "-c", REUSED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_TIMEOUT_S,
    )
    assert (done.returncode, done.stdout) == (0, "None\n3\n4\n"), done.stderr
