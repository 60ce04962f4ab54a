"""A pipe in the place of any file of a checkpoint holds nobody up: nobody would write into it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.storage.ownership import inspect_target
from lightning_elastic_zero.tools.conversion import convert_checkpoint
from lightning_elastic_zero.tools.verification import verify_checkpoint
from tests.foreign._fixtures import unpack
from tests.timeouts import PROMPT_TIMEOUT_S
from tests.tools._checkpoints import make_state, write_elastic


def ends(work: Callable[[], object]) -> bool:
    """Whether work ends, well or by an error of ours; a thread that does not is left behind."""

    def run() -> None:
        with suppress(ElasticZeroError):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PROMPT_TIMEOUT_S)
    return not thread.is_alive()


@pytest.mark.parametrize("kind", ["own", "zero3-ds0.19", "universal", "dcp"])
def test_no_pipe_is_waited_for(kind: str, tmp_path: Path) -> None:
    """Not in a load, nor where a save looks at what lies at its target."""
    whole = write_elastic(tmp_path / "own.ckpt", make_state())
    if kind in {"universal", "dcp"}:
        convert_checkpoint(whole, tmp_path / kind, kind)
        whole = tmp_path / kind
    elif kind != "own":
        whole = unpack(kind, tmp_path / kind).checkpoint
    files = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file())
    assert files
    for name in files:
        damaged = tmp_path / "damaged.ckpt"
        shutil.copytree(whole, damaged)
        (damaged / name).unlink()
        os.mkfifo(damaged / name)
        assert ends(partial(verify_checkpoint, damaged)), name
        assert ends(partial(inspect_target, damaged)), name
        shutil.rmtree(damaged)


def test_a_folder_in_a_files_place_leaves_nothing_open(tmp_path: Path) -> None:
    """What looks at a target again and again must not run out of open files."""
    target = write_elastic(tmp_path / "new.ckpt", make_state())
    (target / "manifest.json").unlink()
    (target / "manifest.json").mkdir()
    opened = Path("/proc/self/fd")
    before = len(list(opened.iterdir()))
    for _ in range(5):
        assert inspect_target(target).refusal_reason
    assert len(list(opened.iterdir())) == before


HOLD_LEASE = """
import fcntl, os, signal, sys, time
held = os.open(sys.argv[1], os.O_RDWR)
def give_back(*_):
    time.sleep(0.2)
    fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_UNLCK)
signal.signal(signal.SIGIO, give_back)
fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
sys.stdin.read()
"""
"""What a Samba server does with a file that its client has open: it gives it back when asked."""


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no leases")
@pytest.mark.parametrize("name", ["manifest.json", "shard"])
def test_a_file_that_is_leased_is_sound(name: str, tmp_path: Path) -> None:
    """It is had as soon as it is given back, and not taken for a damaged one."""
    path = write_elastic(tmp_path / "own.ckpt", make_state())
    file = path / name if name == "manifest.json" else next(path.rglob("*optim_states.pt"))
    command = [sys.executable, "-c", HOLD_LEASE, str(file)]
    for look in (_verified, _inspected):
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe) as holder:
            try:
                assert holder.stdout is not None
                assert holder.stdout.readline() == b"held\n"
                assert look(path) == ""
            finally:
                holder.send_signal(signal.SIGKILL)


def _verified(path: Path) -> str:
    return verify_checkpoint(path).problem


def _inspected(path: Path) -> str:
    return inspect_target(path).refusal_reason
