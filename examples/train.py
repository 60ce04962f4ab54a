"""Train a small GPT with ZeRO on any number of devices, stop it, resume on another number.

    python examples/train.py --devices 4
    python examples/train.py --devices 2 --ckpt_path last

Lines marked with ``# elastic:`` are added or changed by DeepSpeed users.
"""

from __future__ import annotations

import argparse
import warnings

import lightning as L
from gpt import GPT, StdlibText
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

# elastic: instead of Lightning's DeepSpeedStrategy
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

RUN_DIR = "runs/train"  # checkpoints and TensorBoard's files
SEED = 1
GLOBAL_BATCH_SIZE = 48  # samples per optimizer step, over all devices
BATCH_SIZE = 12  # largest micro-batch of a device
MAX_EPOCHS = 4
BLOCK_SIZE = 64  # characters per sample


# DeepSpeed calls functions that torch has renamed: a warning per process, step and call.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--accelerator", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--devices", type=int, default=1, help="may differ when resuming")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="may differ too")
    parser.add_argument("--max_epochs", type=int, default=MAX_EPOCHS)
    parser.add_argument("--ckpt_path", help='"last" or the path of a checkpoint')
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    L.seed_everything(SEED)
    data = StdlibText(BATCH_SIZE, BLOCK_SIZE)
    model = GPT(data.vocab_size, BLOCK_SIZE)

    # elastic: a fixed dirpath, so that the next run finds "last" on any number of devices
    checkpoints = ModelCheckpoint(
        dirpath=f"{RUN_DIR}/checkpoints",
        monitor="step",
        mode="max",
        save_top_k=2,
        save_last="link",
        every_n_train_steps=12,  # optimizer steps; a run can resume in the middle of an epoch
        enable_version_counter=False,  # otherwise Lightning starts a last-v1.ckpt after each resume
    )
    # elastic: the strategy; gradient accumulation keeps the samples of a step on any device count
    strategy = ElasticDeepSpeedStrategy(stage=arguments.stage, global_batch_size=GLOBAL_BATCH_SIZE)
    trainer = L.Trainer(
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        strategy=strategy,
        max_epochs=arguments.max_epochs,
        gradient_clip_val=1.0,
        callbacks=[checkpoints],
        logger=TensorBoardLogger(RUN_DIR, name=None, version=""),
        log_every_n_steps=1,
        num_sanity_val_steps=0,
    )
    # elastic: no conversion; 2 devices read the checkpoint that 4 devices saved
    trainer.fit(model, data, ckpt_path=arguments.ckpt_path)


if __name__ == "__main__":
    main()
