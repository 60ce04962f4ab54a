"""Ray Train's loop with a plain engine: saves into the run's storage, resumes on more workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tests.jobs.test_ray import SETTINGS, is_ray_installed
from tests.support.processes import HANG_TIMEOUT_S
from tests.support.ranks import ROOT, environment

DRIVER = Path(__file__).with_name("_ray_driver.py")


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.skipif(not is_ray_installed(), reason="the extra `ray` is not installed")
def test_workers_save_into_one_folder_and_resume(tmp_path: Path) -> None:
    """Two workers save and three resume, bit for bit; a temporary folder per worker is refused."""
    pytest.importorskip("transformers")
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as session:
        driver = subprocess.Popen(
            [sys.executable, str(DRIVER), str(tmp_path), session],
            cwd=ROOT,
            env={**environment(), **SETTINGS, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = driver.communicate(timeout=HANG_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(driver.pid, signal.SIGKILL)
            raise
    assert driver.returncode == 0, output.decode()[-8000:]
    found = json.loads((tmp_path / "result.json").read_text())
    assert "SaveError" in found["template"]
    assert "below RunConfig(storage_path=...) instead of a temporary one" in found["template"]
    assert found["saved"] == f"{tmp_path}/two/step_2"
    assert found["resumed"] == f"{tmp_path}/three/step_3"
    saved, resumed = (torch.load(tmp_path / f"{name}.pt") for name in ("two", "three"))
    assert saved["last"]
    for name, tensor in saved["last"].items():
        assert torch.equal(resumed["first"][name], tensor), name
