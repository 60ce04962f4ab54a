"""ZeRO-3 with Ray Train's elastic scaling: the run continues as workers leave and join.

    python examples/ray_train.py                      # on this machine
    python examples/ray_train.py --address auto       # on a Ray cluster, with a shared --storage

Lines marked with ``# elastic:`` are added or changed by users of Lightning on Ray Train.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import ray
from gpt import GPT, StdlibText
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.lightning import RayLightningEnvironment
from ray.train.torch import TorchTrainer

from lightning_elastic_zero.integrations.ray import RayCheckpointReport

# elastic: instead of Ray's RayDeepSpeedStrategy and RayTrainReportCallback
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

SEED = 1
GLOBAL_BATCH_SIZE = 48  # samples per optimizer step, over all workers
SETTINGS = {"max_epochs": 4, "save_every": 12, "model": {}, "data": {"block_size": 64}}


def make_trainer(settings: dict[str, Any], *more: Callback) -> L.Trainer:
    # elastic: checkpoints are in the run's folder of Ray's storage, and Ray deletes them
    run_dir = get_context().get_storage().experiment_fs_path
    checkpoints = ModelCheckpoint(
        dirpath=f"{run_dir}/checkpoints",
        save_top_k=-1,
        save_last="link",
        every_n_train_steps=settings["save_every"],
        enable_version_counter=False,
    )
    return L.Trainer(
        strategy=ElasticDeepSpeedStrategy(stage=3, global_batch_size=GLOBAL_BATCH_SIZE),
        plugins=[RayLightningEnvironment()],
        callbacks=[checkpoints, RayCheckpointReport(), *more],
        logger=TensorBoardLogger(run_dir, name=None, version=""),
        max_epochs=settings["max_epochs"],
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
    )


def train(settings: dict[str, Any]) -> None:
    """Run on each worker, again in each new world."""
    L.seed_everything(SEED)
    data = StdlibText(**settings["data"])
    model = GPT(data.vocab_size, settings["data"]["block_size"], **settings["model"])
    # elastic: the newest published checkpoint, of any number of workers; if none exists, step 0
    make_trainer(settings).fit(model, data, ckpt_path="last")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--address", help="of a Ray cluster; by default one is started here")
    parser.add_argument("--storage", default="runs/ray", help="on a disk that all nodes share")
    parser.add_argument("--workers", type=int, nargs=2, default=(1, 4), help="minimum and maximum")
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    arguments = parser.parse_args()
    ray.init(address=arguments.address)
    result = TorchTrainer(
        train,
        train_loop_config=SETTINGS,
        scaling_config=ScalingConfig(num_workers=tuple(arguments.workers), use_gpu=arguments.gpu),
        run_config=RunConfig(
            name="gpt",  # the same name continues the same run
            storage_path=str(Path(arguments.storage).absolute()),
            failure_config=FailureConfig(max_failures=100),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    print(result.metrics, result.checkpoint)


if __name__ == "__main__":
    main()
