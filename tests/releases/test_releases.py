"""Real runs save and resume with releases from all of the ranges in pyproject.toml."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from lightning_elastic_zero.core.requirements import DEEPSPEED
from tests.releases._cells import CELLS, EXCHANGES, HUGGING_FACE, REFUSED, Cell
from tests.releases._core_matrix import TESTS, deselection
from tests.releases._install import ROOT, EnvironmentUnavailableError, environment, preceding
from tests.support.tables import RELEASES

pytestmark = [pytest.mark.engine, pytest.mark.releases, pytest.mark.timeout(10_800)]

CHILD_TIMEOUT_S = 7200.0

PRINT_RELEASES = """
import json, platform
from importlib.metadata import version
import deepspeed, lightning, torch
print(json.dumps([
    platform.python_version(), torch.__version__, deepspeed.__version__, version("deepspeed"),
    lightning.__version__, version("lightning"),
]))
"""

FIT = """
import lightning.pytorch as pl, torch
from torch.utils.data import DataLoader
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning_elastic_zero import ElasticDeepSpeedStrategy
{before}
trainer = pl.Trainer(
    accelerator="cpu", devices=1, strategy=ElasticDeepSpeedStrategy(stage=2), max_steps=1,
    accumulate_grad_batches=4, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
loader = DataLoader(RandomDataset(32, 8), batch_size=1)
try:
    trainer.fit(BoringModel(), loader)
except Exception as error:
    print(type(error).__name__, error)
else:
    print("nothing was raised")
"""
"""A fit with gradient accumulation."""

ACCEPT_ALL_RELEASES = """
from lightning_elastic_zero.core.requirements import Requirement
Requirement.incompatibility = lambda *_: None
"""
"""Disables the check of releases, as if the release were not known to be bad."""


def of(cell: Cell) -> dict[str, str]:
    """Return a cell's environment variables; count the cell and skip if it is unavailable."""
    try:
        return environment(cell)
    except EnvironmentUnavailableError as error:
        RELEASES.count(str(cell), "not available here")
        pytest.skip(str(error))


def run(cell: Cell, *arguments: str) -> str:
    """Run a cell's Python; return its output. On a timeout, kill it with its child processes.

    Raises:
        AssertionError: the process failed.
    """
    variables = of(cell)
    return run_python(f"{variables['VIRTUAL_ENV']}/bin/python", arguments, variables)


def run_python(python: str, arguments: Iterable[str], variables: dict[str, str]) -> str:
    """Run a Python, as ``run`` does."""
    process = subprocess.Popen(
        [python, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=CHILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, f"{stdout[-12_000:]}\n{stderr[-4_000:]}"
    return stdout


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_core_matrix_passes(cell: Cell, tmp_path: Path) -> None:
    """The core tests pass with the cell's releases, except tests of unsupported features."""
    # Older releases print log lines to stdout on import.
    python, torch, *packages = json.loads(run(cell, "-c", PRINT_RELEASES).splitlines()[-1])
    assert python.startswith(f"{cell.base.python}.")
    assert torch.partition("+")[0] == cell.base.torch
    assert packages == [cell.deepspeed] * 2 + [cell.lightning] * 2
    output = run(
        cell,
        *("-m", "pytest", "-q", "-W", "ignore", "-m", "not (long or gpu)", "-p", "no:xdist"),
        *("-o", f"cache_dir={tmp_path}"),
        *("-k", deselection(cell)),
        *TESTS,
    )
    count_outcomes(str(cell), output)


def count_outcomes(cell: str, output: str) -> None:
    """Add the numbers of passed and skipped tests to the table."""
    for outcome in ("passed", "skipped"):
        if found := re.search(rf"(\d+) {outcome}\b", output.splitlines()[-1]):
            RELEASES.count(cell, f"tests {outcome}", int(found[1]))


@pytest.mark.parametrize("cell", HUGGING_FACE)
def test_hugging_face_resumes(cell: str, tmp_path: Path) -> None:
    """The tests of the Trainer and of accelerate pass with the oldest and newest releases."""
    tests = [f"tests/integrations/test_{name}.py" for name in ("trainer", "accelerate")]
    options = ["-q", "-W", "ignore", "-m", "not (long or gpu)", "-p", "no:xdist"]
    output = run_python(
        sys.executable,
        ["-m", "pytest", *options, "-o", f"cache_dir={tmp_path}", *tests],
        preceding(cell, HUGGING_FACE[cell]),
    )
    count_outcomes(cell, output)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_missing_name_is_refused_at_setup(cell: Cell) -> None:
    """The error names it, and releases that have it, before the first step."""
    results = json.loads(run(cell, "-m", "tests.releases._lost_names").splitlines()[-1])
    assert results["none"] == {"raised": "nothing was raised", "steps": 1}
    for title, found, install in (
        ("Lightning", cell.lightning, "install lightning>=2.5,!=2.6.2,!=2.6.3; 2.6.6 is"),
        ("DeepSpeed", cell.deepspeed, f"install {DEEPSPEED}; 0.19.8 is"),
    ):
        assert results[title]["steps"] == 0
        raised = results[title]["raised"]
        assert raised.startswith("UnsupportedError: ")
        lost = "a_name_that_no_release_has"
        assert f"{title} {found} has no {lost}" in raised
        assert install in raised
    RELEASES.count(str(cell), "missing names refused", 2)


BOTH_DIRECTIONS = [pair for one, other in EXCHANGES for pair in ((one, other), (other, one))]


@pytest.mark.parametrize(
    ("source", "target"),
    BOTH_DIRECTIONS,
    ids=[f"{one}-in-{other}" for one, other in BOTH_DIRECTIONS],
)
def test_a_checkpoint_of_one_release_resumes_under_another(
    source: Cell, target: Cell, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Engines and Trainers restore the other release's state bitwise, and continue training."""
    of(source), of(target)
    folder = tmp_path_factory.getbasetemp() / f"saved by {source}"
    if not folder.exists():
        folder.mkdir()
        run(source, "-m", "tests.releases._exchange", "save", str(folder))
    output = run(target, "-m", "tests.releases._exchange", "resume", str(folder))
    compared = json.loads(output.splitlines()[-1])["tensors"]
    assert compared > 0
    RELEASES.count(str(source), "resumed elsewhere")
    RELEASES.count(str(target), "resumed here")


def test_deepspeed_0_18_3_is_refused() -> None:
    """The error at setup names the release, the reason and the remedy."""
    output = run(REFUSED, "-W", "ignore", "-c", FIT.format(before=""))
    assert "UnsupportedError" in output
    assert "DeepSpeed 0.18.3 is installed (it ignores scale_wrt_gas" in output
    assert "install deepspeed>=0.16,!=0.17.6,!=0.18.0,!=0.18.1,!=0.18.2,!=0.18.3" in output


def test_a_release_that_divides_gradients_twice_is_detected() -> None:
    """If the check of releases accepts 0.18.3, its first backward pass is refused."""
    output = run(REFUSED, "-W", "ignore", "-c", FIT.format(before=ACCEPT_ALL_RELEASES))
    assert "UnsupportedError" in output
    assert "gradients are 0.25 times their correct value" in output
