from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.processes import HANG_TIMEOUT_S
from tests.support.ranks import ROOT, ForkServer
from tests.support.slow_disk import SlowDisk
from tests.support.small_checkpoints import SHARD, fill, manifest_of


def test_unused_shared_memory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of our ports are removed at once, those of launchers a minute later."""
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path)
    mine = processes.free_port()
    name = "deepspeed_allreduce_buffer_0_10.0.0.1_{}_0"
    old, used, new, own = (tmp_path / name.format(p) for p in (40000, 40001, 40002, mine))
    other = tmp_path / "somebody_elses_40003_0"
    for path in (old, used, new, own, other):
        path.write_bytes(bytes(mmap.PAGESIZE))
    for path in (old, used, other):
        os.utime(path, (time.time() - 100.0,) * 2)
    with used.open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE):
        processes.remove_shared_memory()
        assert {*tmp_path.iterdir()} == {used, new, other}
    processes.remove_shared_memory()
    assert not used.exists()


REPOSITORY = Path(__file__).parents[2]

MB = 1 << 20

PROGRAM = """
import sys
from pathlib import Path
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.storage import disk_checkpoints as copying
from lightning_elastic_zero.storage.file_write import ChecksummedWriter

from tests.support.processes import HANG_TIMEOUT_S

method, folder, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
calls = 0
def report():
    global calls
    calls += 1
progress = Progress(report)
if method == "write":
    with ChecksummedWriter(folder, "shard.pt", progress) as file:
        for _ in range(4):
            file.write(bytes(size // 4))
        file.finish("5a7e")
else:
    copying.copy_checkpoint(folder.parent / "source", folder / "copy", progress)
print(calls)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the slow disk replaces functions of glibc")
@pytest.mark.parametrize("method", ["write", "copy"])
def test_no_call_waits_for_much_of_a_slow_disk(method: str, tmp_path: Path) -> None:
    """While 24 MiB are written or copied, each call waits for at most 1 MiB and reports it."""
    disk = SlowDisk(tmp_path, 32 * MB)
    text = "0" * (24 * MB)
    fill(tmp_path / "source", text, published=False)
    (tmp_path / "source" / "manifest.json").write_text(manifest_of({SHARD: text}))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, method, str(disk.folder), str(24 * MB)],
        env={**os.environ, **disk.environment, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    waits = disk.waits()
    assert sum(waits) >= 24 * MB
    assert max(waits) <= MB
    assert int(done.stdout) >= len([wait for wait in waits if wait == MB])


REUSED = """
import os, signal, sys, time
from tests.support import fork_server as server
signal.signal(signal.SIGCHLD, server._reap)
if not (probe := os.fork()):
    os._exit(7)
# Statuses of ended processes, for the next ids, and for the ids after a wrap-around.
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


def test_a_reused_process_id_has_no_status_yet(tmp_path: Path) -> None:
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


@pytest.mark.long
def test_a_session_may_end_before_the_fork_server_is_ready(tmp_path: Path) -> None:
    """A worker of pytest-xdist without tests on ranks ends early; the others need the server."""
    first, second = (ForkServer(shared=tmp_path / "server") for _ in range(2))
    first.begin()
    second.begin()
    second.close()
    try:
        for _ in range(2):  # The server may answer once before it looks at the second session.
            first.import_modules("json")
    finally:
        first.close()
