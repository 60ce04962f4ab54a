"""A plugin for axolotl: ``lightning_elastic_zero.integrations.axolotl.ElasticPlugin``."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from lightning_elastic_zero.integrations.huggingface import elastic


class ElasticPlugin(BasePlugin):
    """Makes the Trainer that axolotl creates elastic."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:  # noqa: ARG002 (axolotl's)
        """Bind the Trainer; called by axolotl on every rank."""
        elastic(trainer)
