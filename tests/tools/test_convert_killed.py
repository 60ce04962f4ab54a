"""A conversion that is killed publishes nothing, and what it left is removed by the next one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_elastic_zero.storage.leftovers import remove_leftovers
from lightning_elastic_zero.tools.conversion import convert_checkpoint
from lightning_elastic_zero.tools.fingerprint import fingerprint_checkpoint
from tests.core._checkpoints import names_in
from tests.timeouts import HANG_TIMEOUT_S
from tests.tools._checkpoints import make_state, write_elastic

CONVERT = """
import sys, threading
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.tools.conversion import convert_checkpoint
source, target, to = sys.argv[1:]

def stop(size_bytes):
    if size_bytes:
        print("writing", flush=True)
        threading.Event().wait()

convert_checkpoint(source, target, to, progress=Progress(show=stop))
"""


@contextmanager
def stopped_conversion(source: Path, target: Path, to: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that has written a part of a conversion, and stays there until it is ended.

    Yields:
        the process.
    """
    with subprocess.Popen(
        [sys.executable, "-c", CONVERT, source, target, to], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "writing\n"
            yield process
        finally:
            process.kill()
            process.wait(HANG_TIMEOUT_S)


def hidden(folder: Path) -> list[str]:
    """Return the hidden names in a folder."""
    return [path.name for path in sorted(folder.iterdir()) if path.name.startswith(".")]


@pytest.mark.cases(2)
@pytest.mark.parametrize("to", ["fp32", "safetensors", "lightning", "universal", "dcp", "elastic"])
def test_a_killed_conversion(to: str, tmp_path: Path) -> None:
    """Nothing is at its target; the next one removes its folder, but not while it lives."""
    source = write_elastic(tmp_path / "a.ckpt", make_state(), 3, 2)
    folder = tmp_path / "out"
    folder.mkdir()
    with stopped_conversion(source, folder / "target", to) as process:
        written = hidden(folder)
        assert len(written) == 2  # What is written, and who writes it.
        convert_checkpoint(source, folder / "other", "fp32")
        assert hidden(folder) == written
        process.kill()
        process.wait(HANG_TIMEOUT_S)
        assert hidden(folder) == written
        assert not (folder / "target").exists()
    convert_checkpoint(source, folder / "target", to)
    assert names_in(folder) == ["other", "target"]
    if to in {"universal", "dcp", "elastic"}:
        assert fingerprint_checkpoint(folder / "target") == fingerprint_checkpoint(source)


def test_somebody_elses_file_stays(tmp_path: Path) -> None:
    """A file in a killed conversion's folder that no conversion writes keeps all of it there."""
    source = write_elastic(tmp_path / "a.ckpt", make_state(), 3, 2)
    with stopped_conversion(source, tmp_path / "target", "safetensors"):
        (left,) = (path for path in tmp_path.glob(".zero-export-*") if path.is_dir())
    before = names_in(tmp_path)
    for stranger in (left / "notes.txt", left / "model.safetensors.bak"):
        stranger.write_text("mine")
        assert remove_leftovers(tmp_path) == []
        assert stranger.read_text() == "mine"
        assert names_in(tmp_path) == before
        stranger.unlink()
    assert remove_leftovers(tmp_path) == [left]
    assert names_in(tmp_path) == ["a.ckpt"]


def test_a_save_removes_it_too(tmp_path: Path) -> None:
    """What a conversion into a run's folder left goes with what killed saves leave there."""
    source = write_elastic(tmp_path / "a.ckpt", make_state(), 3, 2)
    with stopped_conversion(source, tmp_path / "target", "safetensors"):
        assert remove_leftovers(tmp_path) == []
    (mine := tmp_path / ".zero-export-mine.json").write_text("{}")
    (left,) = remove_leftovers(tmp_path)
    assert left.name.startswith(".zero-export-")
    assert names_in(tmp_path) == sorted([mine.name, "a.ckpt"])
