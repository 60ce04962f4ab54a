"""Check Kubernetes manifests against their schemas, in an environment with their packages."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

RELEASE = "1.34"
"""The release of Kubernetes."""


def differences(given: Any, known: Any, where: str = "") -> list[str]:
    """Return the fields that a model does not know and has dropped."""
    if isinstance(given, dict):
        if not isinstance(known, dict):
            return [where]
        return [
            found
            for key, value in given.items()
            for found in differences(value, known.get(key), f"{where}.{key}")
        ]
    if isinstance(given, list):
        if not isinstance(known, list) or len(known) != len(given):
            return [where]
        pairs = zip(given, known, strict=True)
        return [f for i, (g, k) in enumerate(pairs) for f in differences(g, k, f"{where}[{i}]")]
    return [] if given == known else [where]


def main(job: str, train_job: str) -> None:
    """Check both manifests; raise an error for an unknown field."""
    yaml = importlib.import_module("yaml")
    validate = importlib.import_module("kubernetes_validate").validate
    models = importlib.import_module("kubeflow_trainer_api.models")
    validate(yaml.safe_load(Path(job).read_text()), RELEASE, strict=True)
    given = yaml.safe_load(Path(train_job).read_text())
    known = models.TrainerV1alpha1TrainJob.from_dict(given).to_dict()
    assert not (found := differences(given, known)), f"no fields of a TrainJob: {found}"
    print("both are known")


if __name__ == "__main__":
    main(*sys.argv[1:])
