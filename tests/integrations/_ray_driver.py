"""Ray Train's loop with a plain engine: python tests/integrations/_ray_driver.py FOLDER.

The first run is Ray's DeepSpeed template, with a temporary folder per worker; the second saves into
one folder below the run's storage; the third resumes from there with another number of workers.
``FOLDER/result.json`` contains the results.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import (
    Checkpoint,
    CheckpointUploadMode,
    RunConfig,
    ScalingConfig,
    get_context,
    report,
)
from ray.train.torch import TorchConfig, TorchTrainer

from lightning_elastic_zero import elastic
from tests.integrations._engine_programs import initialize, train_steps
from tests.integrations._hf_programs import state_of


def template(config: dict[str, Any]) -> None:
    """Save like Ray's template."""
    engine = elastic(initialize(3))
    train_steps(engine, config["steps"])
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        dist.barrier()
        report({"step": engine.global_steps}, checkpoint=Checkpoint.from_directory(folder))


def shared(config: dict[str, Any]) -> None:
    """Resume, train and save like the page."""
    engine = elastic(initialize(3))
    if config["resume"]:
        engine.load_checkpoint(config["resume"])
    state = state_of(engine) if config["resume"] else {}
    train_steps(engine, config["steps"])
    trained = state_of(engine)
    if dist.get_rank() == 0:
        torch.save({"first": state, "last": trained}, config["states"])
    storage = get_context().get_storage()
    folder = f"{storage.experiment_fs_path}/step_{engine.global_steps}"
    engine.save_checkpoint(folder)
    checkpoint = Checkpoint(folder, storage.storage_filesystem)
    mode = CheckpointUploadMode.NO_UPLOAD
    report({"step": engine.global_steps}, checkpoint=checkpoint, checkpoint_upload_mode=mode)


def run(loop: Any, folder: Path, name: str, workers: int, **config: Any) -> Any:
    """Run a loop on some workers."""
    return TorchTrainer(
        loop,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name=name, storage_path=str(folder)),
    ).fit()


def main() -> None:
    """Run all three."""
    folder = Path(sys.argv[1])
    ray.init(num_cpus=3, include_dashboard=False, _temp_dir=sys.argv[2])
    found: dict[str, Any] = {}
    try:
        run(template, folder, "template", 2, steps=1)
    except Exception as error:  # noqa: BLE001 (the test checks it)
        found["template"] = f"{type(error).__name__}: {error}"
    first = run(shared, folder, "two", 2, steps=2, resume="", states=f"{folder}/two.pt")
    resume = first.checkpoint.path
    then = run(shared, folder, "three", 3, steps=1, resume=resume, states=f"{folder}/three.pt")
    found |= {"saved": resume, "resumed": then.checkpoint.path, "metrics": then.metrics}
    (folder / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
