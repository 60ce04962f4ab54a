"""Hand-made dumps of optimizer states, matched to parameters by their weights.

``flat_groups`` knows the places that a ZeRO stage allows, ``order_search`` finds the parameters
that lie there, ``weight_comparison`` compares masters with a model file, ``describe`` runs the
search.
"""

from __future__ import annotations

from lightning_elastic_zero.formats.dumps.describe import describe_dumps

__all__ = ["describe_dumps"]
