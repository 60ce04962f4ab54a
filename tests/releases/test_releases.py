"""The ranges in pyproject.toml are true: with releases all over them, real runs save and resume."""

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
from tests.releases._core_matrix import TESTS, left_out
from tests.releases._install import ROOT, EnvironmentUnavailableError, environment, preceding
from tests.support.tables import RELEASES

pytestmark = [pytest.mark.engine, pytest.mark.releases, pytest.mark.timeout(10_800)]

CHILD_TIMEOUT_S = 7200.0

SAYS_ITS_RELEASES = """
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
"""A fit with accumulation."""

AS_IF_UNKNOWN = """
from lightning_elastic_zero.core.requirements import Requirement
Requirement.incompatibility = lambda *_: None
"""
"""So that the release is taken for one that nobody has looked at yet."""


def of(cell: Cell) -> dict[str, str]:
    """Return a cell's environment; skip, and count it, where a machine cannot have it."""
    try:
        return environment(cell)
    except EnvironmentUnavailableError as error:
        RELEASES.count(str(cell), "not to be had here")
        pytest.skip(str(error))


def run(cell: Cell, *arguments: str) -> str:
    """Run a cell's Python, and return what it printed; what hangs is killed with all it started.

    Raises:
        AssertionError: it failed.
    """
    variables = of(cell)
    return run_python(f"{variables['VIRTUAL_ENV']}/bin/python", arguments, variables)


def run_python(python: str, arguments: Iterable[str], variables: dict[str, str]) -> str:
    """Run a Python; see ``run``."""
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
    """The tests of this very library pass with those releases, where those have what is tested."""
    # Older releases log to the same stream when they are imported.
    python, torch, *packages = json.loads(run(cell, "-c", SAYS_ITS_RELEASES).splitlines()[-1])
    assert python.startswith(f"{cell.base.python}.")
    assert torch.partition("+")[0] == cell.base.torch
    assert packages == [cell.deepspeed] * 2 + [cell.lightning] * 2
    said = run(
        cell,
        *("-m", "pytest", "-q", "-W", "ignore", "-m", "not (long or gpu)", "-p", "no:xdist"),
        *("-o", f"cache_dir={tmp_path}"),
        *("-k", left_out(cell)),
        *TESTS,
    )
    count_outcomes(str(cell), said)


def count_outcomes(cell: str, said: str) -> None:
    """Note for the table how many tests passed."""
    for outcome in ("passed", "skipped"):
        if found := re.search(rf"(\d+) {outcome}\b", said.splitlines()[-1]):
            RELEASES.count(cell, f"tests {outcome}", int(found[1]))


@pytest.mark.parametrize("cell", HUGGING_FACE)
def test_hugging_face_resumes(cell: str, tmp_path: Path) -> None:
    """The tests of the Trainer and of accelerate pass with both ends of the releases."""
    tests = [f"tests/integrations/test_{name}.py" for name in ("trainer", "accelerate")]
    options = ["-q", "-W", "ignore", "-m", "not (long or gpu)", "-p", "no:xdist"]
    said = run_python(
        sys.executable,
        ["-m", "pytest", *options, "-o", f"cache_dir={tmp_path}", *tests],
        preceding(cell, HUGGING_FACE[cell]),
    )
    count_outcomes(cell, said)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_lost_name_is_refused_at_setup(cell: Cell) -> None:
    """By what was lost and the releases that have it, before any step; without loss it trains."""
    said = json.loads(run(cell, "-m", "tests.releases._lost_names").splitlines()[-1])
    assert said["none"] == {"raised": "nothing was raised", "steps": 1}
    for title, found, install in (
        ("Lightning", cell.lightning, "install lightning>=2.5,!=2.6.2,!=2.6.3; 2.6.6 is"),
        ("DeepSpeed", cell.deepspeed, f"install {DEEPSPEED}; 0.19.8 is"),
    ):
        assert said[title]["steps"] == 0
        raised = said[title]["raised"]
        assert raised.startswith("UnsupportedError: ")
        lost = "a_name_that_no_release_has"
        assert f"{title} {found} has no {lost}" in raised
        assert install in raised
    RELEASES.count(str(cell), "lost names refused", 2)


BOTH_WAYS = [pair for one, other in EXCHANGES for pair in ((one, other), (other, one))]


@pytest.mark.parametrize(
    ("source", "target"), BOTH_WAYS, ids=[f"{one}-in-{other}" for one, other in BOTH_WAYS]
)
def test_a_checkpoint_of_one_release_resumes_under_another(
    source: Cell, target: Cell, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Engines and Trainers hold what the other release's held, bit for bit, and train on."""
    of(source), of(target)
    folder = tmp_path_factory.getbasetemp() / f"left by {source}"
    if not folder.exists():
        folder.mkdir()
        run(source, "-m", "tests.releases._exchange", "save", str(folder))
    said = run(target, "-m", "tests.releases._exchange", "resume", str(folder))
    compared = json.loads(said.splitlines()[-1])["tensors"]
    assert compared > 0
    RELEASES.count(str(source), "resumed elsewhere")
    RELEASES.count(str(target), "resumed here")


def test_deepspeed_0_18_3_is_refused() -> None:
    """At setup, by its release, with the reason and what to install."""
    said = run(REFUSED, "-W", "ignore", "-c", FIT.format(before=""))
    assert "UnsupportedError" in said
    assert "DeepSpeed 0.18.3 is installed (it ignores scale_wrt_gas" in said
    assert "install deepspeed>=0.16,!=0.17.6,!=0.18.0,!=0.18.1,!=0.18.2,!=0.18.3" in said


def test_a_release_that_divides_gradients_twice_is_noticed() -> None:
    """0.18.3, taken for one that nobody has looked at: its first backward pass gives it away."""
    said = run(REFUSED, "-W", "ignore", "-c", FIT.format(before=AS_IF_UNKNOWN))
    assert "UnsupportedError" in said
    assert "gradients are 0.25 times what they should be" in said
