"""The driver of a Ray job: the example with a small model and the recorder.

    python tests/jobs/_ray_driver.py ADDRESS FOLDER

Its result is written to ``FOLDER/result.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import lightning as L
import ray
from gpt import GPT, StdlibText
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray_train import SEED, make_trainer

from tests.jobs._job import EPOCHS, SAMPLES, SAVE_EVERY
from tests.jobs.recorder import Recorder

NAME, KEPT = "run", 2


def train(config: dict[str, str]) -> None:
    """Train on each worker, with the settings of `_job.arguments`."""
    L.seed_everything(SEED)
    data = StdlibText(samples_per_epoch=SAMPLES)
    model = GPT(data.vocab_size, n_layer=1, n_embd=32, dropout=0.0, warmup_steps=10, lr=1e-3)
    settings = {"max_epochs": EPOCHS, "save_every": SAVE_EVERY}
    trainer = make_trainer(settings, Recorder(config["folder"]))
    trainer.limit_val_batches = 0
    trainer.fit(model, data, ckpt_path="last")


def main() -> None:
    """Run the job, and write Ray's result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    ray.init(address=arguments.address, _node_ip_address=arguments.address.partition(":")[0])
    trainer: Any = TorchTrainer(
        train,
        train_loop_config={"folder": str(arguments.folder)},
        scaling_config=ScalingConfig(num_workers=(1, 4), elastic_resize_monitor_interval_s=5),
        run_config=RunConfig(
            name=NAME,
            storage_path=str(arguments.folder),
            failure_config=FailureConfig(max_failures=10),
            checkpoint_config=CheckpointConfig(num_to_keep=KEPT),
        ),
    )
    result = trainer.fit()
    found = {
        "metrics": result.metrics,
        "checkpoint": result.checkpoint.path,
        "kept": {kept.path: metrics["step"] for kept, metrics in result.best_checkpoints},
    }
    (arguments.folder / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
