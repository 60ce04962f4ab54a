"""Process identities: a process is not mistaken for another with the same id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_elastic_zero.core import processes
from lightning_elastic_zero.core.processes import ProcessKey, ProcessState, machine, start_time
from lightning_elastic_zero.storage.owners import DEAD_AFTER_S, ProcessIdentity
from tests.support.processes import PROMPT_TIMEOUT_S

WAIT_S = 20.0

pytestmark = pytest.mark.skipif(
    start_time(os.getpid()) is None, reason="this system does not tell when a process has started"
)


def wait_for(found: Callable[[], ProcessState], wanted: ProcessState) -> None:
    end = time.monotonic() + WAIT_S
    while found() is not wanted:
        assert time.monotonic() < end, found()
        time.sleep(0.01)


def test_states_of_a_process() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
    )
    try:
        key = replace(
            ProcessKey.of_this_process(), pid=child.pid, started=start_time(child.pid) or ""
        )
        assert key.state() is ProcessState.RUNNING
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(key.state, ProcessState.STOPPED)
        os.kill(child.pid, signal.SIGCONT)
        wait_for(key.state, ProcessState.RUNNING)
        os.kill(child.pid, signal.SIGKILL)
        wait_for(key.state, ProcessState.ENDED)
    finally:
        child.kill()
        child.wait(WAIT_S)
    assert key.state() is ProcessState.ENDED


def test_this_process_runs() -> None:
    key = ProcessKey.of_this_process()
    assert key == ProcessKey.of_this_process()
    assert key.pid == os.getpid()
    assert len(machine().split(" ")) >= 2
    assert key.state() is ProcessState.RUNNING


def test_a_reused_process_id_is_another_process() -> None:
    key = ProcessKey.of_this_process()
    assert replace(key, started=str(int(key.started) - 1)).state() is ProcessState.ENDED


@pytest.mark.parametrize("change", [{"machine": "another"}, {"started": ""}])
def test_nothing_is_known_of_other_machines(change: dict[str, str]) -> None:
    state = replace(ProcessKey.of_this_process(), **change).state()  # type: ignore[arg-type]
    assert state is ProcessState.UNKNOWN


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        started = start_time(child.pid)
        assert started is not None
        mine = ProcessIdentity.of_this_process("a")
        identity = replace(mine, pid=child.pid, started=started)
        assert not identity.is_dead()
        child.send_signal(signal.SIGKILL)
        end = time.monotonic() + PROMPT_TIMEOUT_S
        while not identity.is_dead():
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait(PROMPT_TIMEOUT_S)


def test_without_a_start_time_the_age_of_the_file_decides() -> None:
    identity = replace(ProcessIdentity.of_this_process("a"), started="")
    assert not identity.is_dead()
    assert not identity.is_dead(DEAD_AFTER_S)
    assert identity.is_dead(DEAD_AFTER_S + 1.0)


def test_process_ids_of_another_namespace_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_sees_itself", lambda: False)
    identity = ProcessIdentity.of_this_process("a")
    assert identity.started == ""
    assert not identity.is_dead()
    assert not replace(identity, started="1").is_dead()


@pytest.mark.parametrize("text", [b"[" * 200_000, b"{}", b'{"target": "../a"}', b"\xff", b""])
def test_an_invalid_identity_is_ignored(text: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "owner.json").write_bytes(text)
    assert ProcessIdentity.read(path) is None
