"""The Kubernetes manifests follow the schemas of their APIs."""

from __future__ import annotations

import venv
from pathlib import Path

import pytest

from lightning_elastic_zero.trainer.preemption import EXIT_CODE
from tests.examples import _check_manifests
from tests.support.processes import output_of
from tests.support.ranks import ROOT, environment

EXAMPLES = ROOT / "examples" / "kubernetes"
SCHEMAS = ("kubernetes-validate", "kubeflow-trainer-api", "pyyaml")


@pytest.mark.long
def test_manifests_follow_their_schemas(tmp_path: Path) -> None:
    """No field is unknown, missing or of another type. The test installs the packages."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    output_of((python, "-m", "pip", "install", "--quiet", *SCHEMAS), tmp_path, environment())
    program = Path(_check_manifests.__file__)
    manifests = (EXAMPLES / "job.yaml", EXAMPLES / "trainjob.yaml")
    assert "both are known" in output_of((python, program, *manifests), tmp_path, environment())


def test_the_job_ignores_the_exit_code_of_the_callback() -> None:
    """An exit code that is not ignored counts as a failure; a few preemptions would end the Job."""
    assert f"values: [{EXIT_CODE}]" in (EXAMPLES / "job.yaml").read_text()
    script = (ROOT / "examples" / "slurm" / "train.sbatch").read_text()
    assert f'[ "$code" -eq {EXIT_CODE} ]' in script
