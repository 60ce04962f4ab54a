"""What a directory must support, found by trying it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from lightning_elastic_zero.checkpoint.directory_check import (
    EXCHANGE,
    LINKS,
    RENAME,
    SYNC_FILE,
    SYNC_NAMES,
    Capability,
    probe_capabilities,
    scratch_folder,
)
from tests.support.processes import HANG_TIMEOUT_S, output_of
from tests.support.ranks import ROOT

PREFIX = "zero-test-"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library that makes calls to a disk fail."""
    return compiled(Path(__file__).with_name("bad_disk.c"), tmp_path_factory.mktemp("bad"))


def compiled(source: Path, folder: Path) -> Path:
    """Compile a library for LD_PRELOAD from C; skip without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("a library for LD_PRELOAD needs a C compiler")
    library = folder / f"{source.stem}.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=HANG_TIMEOUT_S)
    return library


def bad_disk(library: Path, directory: Path, refused: Mapping[str, int]) -> dict[str, str]:
    """Return the environment of a process for which calls fail below a directory."""
    calls = ",".join(f"{call}={number}" for call, number in refused.items())
    return {"LD_PRELOAD": str(library), "BAD_DISK": str(directory), "BAD_CALLS": calls}


PROBE = """
import json, sys
from pathlib import Path
from lightning_elastic_zero.checkpoint.directory_check import probe_capabilities
rows = probe_capabilities(Path(sys.argv[1]))
print(json.dumps([[row.what, row.outcome, row.details] for row in rows]))
"""


@pytest.mark.parametrize(
    ("call", "number", "what", "result"),
    [
        ("rename", errno.EIO, RENAME, "FAILS"),
        ("symlink", errno.EIO, LINKS, "FAILS"),
        ("fsync", errno.EIO, SYNC_FILE, "FAILS"),
        ("renameat2", errno.EIO, EXCHANGE, "FAILS"),
        ("symlink", errno.EPERM, LINKS, "does without"),
        ("renameat2", errno.EINVAL, EXCHANGE, "does without"),
    ],
)
def test_a_failing_call_fails_its_row_and_a_missing_one_is_worked_around(
    call: str, number: int, what: str, result: str, library: Path, tmp_path: Path
) -> None:
    refused = bad_disk(library, tmp_path, {call: number})
    rows = [
        Capability(*row)
        for row in json.loads(
            output_of((sys.executable, "-c", PROBE, str(tmp_path)), ROOT, {**os.environ, **refused})
        )
    ]
    found = {row.what: row for row in rows}
    assert found[what].outcome == result
    assert found[what].details
    if result == "FAILS":
        assert os.strerror(number) in found[what].details
    by_fsync = {SYNC_NAMES, LINKS} if call == "fsync" else {LINKS} if call == "rename" else set()
    assert {row.what for row in rows if row.outcome != "holds"} <= {what, *by_fsync}


def test_a_good_directory_holds(tmp_path: Path) -> None:
    rows = {found.what: found.outcome for found in probe_capabilities(tmp_path)}
    assert "FAILS" not in rows.values()
    assert rows[RENAME] == "holds"


def test_a_users_files_are_kept(tmp_path: Path) -> None:
    theirs = {name: tmp_path / name for name in ("file", "last.ckpt", f"{PREFIX}mine")}
    for name, path in theirs.items():
        path.write_text(name)
    before = sorted(tmp_path.rglob("*"))
    with scratch_folder(tmp_path, PREFIX) as folder:
        probe_capabilities(folder)
        assert set(tmp_path.iterdir()) == {folder, *theirs.values()}
    assert sorted(tmp_path.rglob("*")) == before
    assert {path.read_text() for path in theirs.values()} == set(theirs)
