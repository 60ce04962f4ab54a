"""Process identities: a process is not mistaken for another with the same id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_elastic_zero.core import process_state
from lightning_elastic_zero.core.process_state import ProcessKey, ProcessState, machine, start_time
from lightning_elastic_zero.storage.ownership import DEAD_AFTER_S, ProcessIdentity
from tests.support.processes import PROMPT_TIMEOUT_S, wait_until

pytestmark = pytest.mark.skipif(
    start_time(os.getpid()) is None, reason="this system does not report start times of processes"
)


def test_states_of_a_process() -> None:
    """A zombie, for which no process has waited yet, has ended and is dead."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    try:
        pid, started = child.pid, start_time(child.pid) or ""
        key = replace(ProcessKey.of_this_process(), pid=pid, started=started)
        identity = replace(ProcessIdentity.of_this_process("a"), pid=pid, started=started)
        assert key.state() is ProcessState.RUNNING
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: key.state() is ProcessState.STOPPED)
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: key.state() is ProcessState.RUNNING)
        assert not identity.is_dead()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: key.state() is ProcessState.ENDED)
        wait_until(identity.is_dead)
    finally:
        child.kill()
        child.wait(PROMPT_TIMEOUT_S)
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
def test_processes_of_other_machines_have_an_unknown_state(change: dict[str, str]) -> None:
    state = replace(ProcessKey.of_this_process(), **change).state()  # type: ignore[arg-type]
    assert state is ProcessState.UNKNOWN


def test_without_a_start_time_the_age_of_the_file_decides() -> None:
    identity = replace(ProcessIdentity.of_this_process("a"), started="")
    assert not identity.is_dead()
    assert not identity.is_dead(DEAD_AFTER_S)
    assert identity.is_dead(DEAD_AFTER_S + 1.0)


def test_process_ids_of_another_namespace_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_state, "_sees_itself", lambda: False)
    identity = ProcessIdentity.of_this_process("a")
    assert identity.started == ""
    assert not identity.is_dead()
    assert not replace(identity, started="1").is_dead()


@pytest.mark.parametrize("text", [b"[" * 200_000, b"{}", b'{"target": "../a"}', b"\xff", b""])
def test_an_invalid_identity_is_ignored(text: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "owner.json").write_bytes(text)
    assert ProcessIdentity.read(path) is None
