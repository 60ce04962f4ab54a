"""Train the same GPT from YAML files, with LightningCLI.

    python examples/cli.py fit --config configs/zero3.yaml --trainer.devices 4
    python examples/cli.py fit --config configs/zero3.yaml --trainer.devices 2 --ckpt_path last

Lines marked with ``# elastic:`` make a run resumable on another device count.
"""

from __future__ import annotations

import warnings

from gpt import GPT, StdlibText
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

# elastic: lets YAML and the command line name the strategy, also as elastic_deepspeed_stage_3
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy  # noqa: F401

# DeepSpeed calls functions that torch has renamed: a warning per process, step and call.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


class TextCLI(LightningCLI):
    """LightningCLI that derives the model's size from the data."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link options that must be equal; interpolation would not follow an override."""
        parser.link_arguments("data.block_size", "model.block_size")
        parser.link_arguments("data.vocab_size", "model.vocab_size", apply_on="instantiate")

    def before_instantiate_classes(self) -> None:
        """Save the config of fit as fit.yaml, and so on: a later validate does not overwrite it."""
        self.save_config_kwargs["config_filename"] = f"{self.subcommand}.yaml"


def main() -> None:
    """Parse, build and run."""
    TextCLI(
        GPT,
        StdlibText,
        parser_kwargs={"parser_mode": "omegaconf"},
        seed_everything_default=1,
        auto_configure_optimizers=False,  # the model has its own
        # elastic: the resumed run overwrites the config of the previous one, instead of stopping
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()
