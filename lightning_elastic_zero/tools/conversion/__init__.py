"""``convert``: a checkpoint of any kind, written as other software reads it.

One module for each family of targets. All stream: what is held is a chunk of one tensor, whatever
the model's size. All are published whole, in one step, where nothing was before.
"""

from __future__ import annotations

from lightning_elastic_zero.tools.conversion.convert import (
    TARGETS,
    Conversion,
    convert_checkpoint,
)
from lightning_elastic_zero.tools.conversion.selection import ConvertOptions

__all__ = ["TARGETS", "Conversion", "ConvertOptions", "convert_checkpoint"]
