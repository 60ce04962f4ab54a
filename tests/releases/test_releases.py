"""The ranges in pyproject.toml are true: at each of their ends, real runs save and resume."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.releases._install import ROOT, Releases
from tests.rotation import Rotation

pytestmark = [pytest.mark.engine, pytest.mark.releases, pytest.mark.timeout(5400)]

CELLS = [
    Releases("0.16.0", "2.5.0.post0"),
    Releases("0.16.0"),
    Releases("0.19.6"),
    Releases(lightning="2.5.0.post0"),
]
"""Both lower ends, together and each with the other's newest, and the last DeepSpeed without
``round_robin_bit16_padding``. The upper ends are what all other tests run with. 2.5.0.post0 is
2.5.0: its only change is its number."""

TESTS = (
    "tests/engine/test_matrix.py",
    "tests/engine/test_resumed_training.py",
    "tests/trainer/test_resume.py",
    "tests/trainer/test_evaluation.py",
    "tests/trainer/test_gradients.py",
    "tests/trainer/test_model_checkpoint.py",
)
"""Any stage, world and precision to any other; Trainers that resume; gradients that are means."""

OLDER_DEEPSPEED = "not alignment and not (fp32 and bf16) and not another_run"
"""``parameter_alignment`` came with 0.19.7. Older releases keep buffers in bf16 where the weights
are, so that they are rounded when a run changes its precision, which the oracle does not expect.
In 0.16 a second engine on one module (a second fit) calls the first one's hooks, and fails."""

CASES = 10
"""Of each test: those that a release cannot run are among them."""

CHILD_TIMEOUT_S = 3600.0

SAYS_ITS_RELEASES = """
from importlib.metadata import version
import deepspeed, lightning
print(deepspeed.__version__, version("deepspeed"), lightning.__version__, version("lightning"))
"""

REFUSED = """
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
from lightning_elastic_zero.requirements import Requirement
Requirement.incompatibility = lambda *_: None
"""
"""So that the release is taken for one that nobody has looked at yet."""


def python(code: str, environment: dict[str, str]) -> str:
    """Run some code, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=CHILD_TIMEOUT_S,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("releases", CELLS, ids=str)
def test_real_runs_save_and_resume(releases: Releases, rotation: Rotation, tmp_path: Path) -> None:
    """The tests of this very library pass with those releases, where those have what is tested."""
    environment = releases.environment()
    # Older releases log to the same stream when they are imported.
    said = python(SAYS_ITS_RELEASES, environment).splitlines()[-1].split()
    for wanted, found in ((releases.deepspeed, said[:2]), (releases.lightning, said[2:])):
        assert not wanted or found == [wanted] * 2
    left_out = OLDER_DEEPSPEED if releases.deepspeed else ""
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-m", "not (long or gpu)"]
    turn = [f"--rotation={rotation.turn}", f"--engine-cases={CASES}"]
    done = subprocess.run(
        [*command, *turn, "-o", f"cache_dir={tmp_path}", "-k", left_out, *TESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=CHILD_TIMEOUT_S,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-8000:]


def test_deepspeed_0_18_3_is_refused() -> None:
    """At setup, by its release, with the reason and what to install."""
    said = python(REFUSED.format(before=""), Releases("0.18.3").environment())
    assert "UnsupportedError" in said
    assert "DeepSpeed 0.18.3 is installed (it ignores scale_wrt_gas" in said
    assert "install deepspeed>=0.16,!=0.18.3" in said


def test_a_release_that_divides_gradients_twice_is_noticed() -> None:
    """0.18.3, taken for one that nobody has looked at: its first backward pass gives it away."""
    said = python(REFUSED.format(before=AS_IF_UNKNOWN), Releases("0.18.3").environment())
    assert "UnsupportedError" in said
    assert "gradients are 0.25 times what they should be" in said
