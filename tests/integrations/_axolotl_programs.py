"""Programs of ranks with a plugin that axolotl has loaded."""

from __future__ import annotations

from dataclasses import replace

from axolotl.integrations.base import PluginManager
from axolotl.utils.dict import DictDefault

from tests.integrations._hf_programs import Run, TrainerCase, make_trainer, train_to_end

PLUGIN = "lightning_elastic_zero.integrations.axolotl.ElasticPlugin"


def train(case: TrainerCase) -> Run:
    """Run a Trainer that was passed to axolotl's plugins like axolotl's own."""
    run = Run()
    trainer = make_trainer(replace(case, bound=False), run)
    plugins = PluginManager.get_instance()
    plugins.register(PLUGIN)
    plugins.post_trainer_create(DictDefault({}), trainer)
    return train_to_end(trainer, case, run)
