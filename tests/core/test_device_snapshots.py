"""Background saves of a state on a device, through torch's interface for any device."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elastic_zero.checkpoint import snapshot
from lightning_elastic_zero.checkpoint import streams as device_streams
from lightning_elastic_zero.checkpoint.save import ShardContents
from lightning_elastic_zero.core.tensors import is_on_device
from tests.core import _late_device
from tests.support.plain_checkpoints import make_state, manifest_of, rank_state
from tests.support.ranks import ROOT, environment

TIMEOUT_S = 250


def run_case(case: str, where: str, folder: Path, status: int = 0) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.core._device_snapshot_programs",
        case,
        where,
        str(folder),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment("cuda" if where.startswith("cuda") else "cpu"),
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == status, done.stderr.decode()


@pytest.fixture(scope="session")
def late_device() -> str:
    """Compile the simulated device, which takes half a minute the first time."""
    try:
        return str(_late_device.build())
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_the_writer_waits_for_small_copies_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def recorded(module: Any, name: str) -> None:
        call = getattr(module, name)

        def at_once(*args: Any) -> Any:
            made.append(name)
            return call(*args)

        monkeypatch.setattr(module, name, at_once)

    recorded(snapshot, "_with_copies")
    recorded(snapshot, "copy_plain_data")
    recorded(snapshot, "UncopiedTensors")
    state = make_state()
    manifest = manifest_of(state, 2, 2)
    contents = ShardContents(tmp_path, manifest, rank_state(state, manifest, 0), state.client)
    snapshotter = snapshot.Snapshotter(0)
    snapshotter.take(contents, 0)
    snapshotter.close()
    assert {*made} == {"_with_copies", "copy_plain_data", "UncopiedTensors"}
    assert made[-1] == "UncopiedTensors"


@pytest.mark.long
@pytest.mark.parametrize("case", ["copies", "offload", "scalars", "randomness", "restore"])
def test_a_state_on_a_device(case: str, late_device: str, tmp_path: Path) -> None:
    """Each case runs in its own process, since a process has one accelerator."""
    run_case(case, late_device, tmp_path)


@pytest.mark.long
def test_a_host_read_of_device_memory_ends_the_process(late_device: str, tmp_path: Path) -> None:
    run_case("unreadable", late_device, tmp_path, status=-signal.SIGSEGV)
    assert not (tmp_path / "was read").exists()


@pytest.mark.long
def test_the_writer_works_on_its_ranks_device(late_device: str, tmp_path: Path) -> None:
    """Device 0 is never used, and no file contains a device name."""
    run_case("write", late_device, tmp_path)
    for name in ("copied", "live"):
        files = sorted((tmp_path / f"{name}.ckpt").rglob("*.pt"))
        assert len(files) == 3
        for path in files:
            assert b"late" not in path.read_bytes()
            torch.load(path, weights_only=True)


def test_events_of_cuda_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.Event`` ignores ``blocking``, and a waiting thread would spin."""
    made: list[dict[str, Any]] = []

    class FakeEvent:
        def __init__(self, **options: Any) -> None:
            made.append(options)

        def record(self) -> None:
            made[-1]["recorded"] = True

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    device_streams.record_event(torch.device("cuda", 1))
    assert made == [{"blocking": True, "recorded": True}]


def test_without_an_accelerator_cuda_is_not_initialised() -> None:
    before = torch.cuda.is_initialized()
    if not before:
        assert device_streams.current_device() is None
    device_streams.use_device(None)
    assert torch.cuda.is_initialized() == before
    assert not is_on_device(torch.zeros(1))
    assert not is_on_device(torch.zeros(1, device="meta"))
