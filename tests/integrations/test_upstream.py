"""Tests of transformers and accelerate that pass with DeepSpeed also pass with ``elastic``.

``--hf-upstream=FOLDER`` names a folder with the sources of both, as ``FOLDER/accelerate`` and
``FOLDER/transformers``, for the releases that are installed. Their tests need ``parameterized``,
``datasets``, ``evaluate`` and ``optuna``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITES = {
    "accelerate": "tests/deepspeed",
    "transformers": "tests/trainer/distributed/test_trainer_distributed_deepspeed.py",
}

NEEDS_MORE = (
    "nvme or ulysses or zoo or NonTrainer or performance or peak_memory or lr_scheduler or "
    "zero3_integration"
)
"""Tests that hang or fail without a GPU's libraries, or that need models of the hub."""

DIFFERENT = {
    "test_save_checkpoints": "files are in global_step5/checkpoint",
}
"""Tests of transformers that pass without ``elastic`` only, and why."""


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("package", SUITES)
def test_tests_that_pass_with_deepspeed_pass_with_elastic(
    package: str, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """Each test, in the same environment, once without ``elastic`` and once with it."""
    sources = pytestconfig.getoption("--hf-upstream")
    if sources is None:
        pytest.skip("needs --hf-upstream, the sources of transformers and accelerate")
    folder = Path(sources).resolve() / package
    stock = passed(folder, SUITES[package], tmp_path, elastic=False)
    assert stock
    lost = stock - passed(folder, SUITES[package], tmp_path, elastic=True)
    assert {test for test in lost if not test.split("::")[-1].startswith(tuple(DIFFERENT))} == set()


def passed(folder: Path, tests: str, temporary: Path, *, elastic: bool) -> set[str]:
    """Return the names of tests that pass."""
    here = Path(__file__).parent
    paths = [str(folder), str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    options = ["-p", "upstream_plugin", "-p", "no:cacheprovider", "-W", "ignore", "-q", "-rA"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *options, "--tb=no", "-c", os.devnull),
            *(f"--rootdir={folder}", "-k", f"not ({NEEDS_MORE})", tests),
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "UPSTREAM_ELASTIC": str(int(elastic)),
            "HF_HUB_OFFLINE": "1",
            "RUN_SLOW": "1",
            "TMPDIR": str(temporary),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return set(re.findall(r"^PASSED (\S+)", done.stdout, flags=re.MULTILINE))
