"""Hyperparameters that differ between the shards of one save: ranks that drifted apart."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_elastic_zero.tensor_state import canonical_repr
from lightning_elastic_zero.text import format_ranks

MAX_SHOWN = 4
"""Hyperparameters in a message; the rest is counted."""

log = logging.getLogger(__name__)

Groups = Sequence[Mapping[str, Any]]


class HyperparameterDifferences:
    """Each rank's hyperparameters beside the first one's."""

    def __init__(self, first: Groups, where: str) -> None:
        """Keep the first rank's; ``where`` is for messages."""
        self._where = where
        self._first = self._texts(0, first)
        self._values: dict[tuple[int, str], dict[str, list[int]]] = {}

    def compare(self, rank: int, groups: Groups) -> tuple[str, str]:
        """Note which values differ; give the names of both sides' hyperparameters, which may not.

        Args:
            rank: whose they are.
            groups: the hyperparameters of each of its parameter groups.
        """
        mine = self._texts(rank, groups)
        names = [repr([sorted(group) for group in held]) for held in (mine, self._first)]
        if names[0] == names[1]:
            for index, group in enumerate(mine):
                for key, value in group.items():
                    if value != self._first[index][key]:
                        of_value = self._values.setdefault((index, key), {})
                        of_value.setdefault(value, []).append(rank)
        return names[0], names[1]

    def summary(self) -> str:
        """Describe group, name and values of what differs; nothing where all is alike."""
        differences = []
        for (group, key), of_value in sorted(self._values.items()):
            values = [f"{value} on {format_ranks(ranks)}" for value, ranks in of_value.items()]
            others = ", ".join(values)
            differences.append(
                f"{key} of parameter group {group} is {self._first[group][key]} on rank 0, {others}"
            )
        more = [f"{len(differences) - MAX_SHOWN} more"] if len(differences) > MAX_SHOWN else []
        return "; ".join(differences[:MAX_SHOWN] + more)

    def warn(self) -> None:
        """Warn of which values differ, and what a resume makes of it."""
        if summary := self.summary():
            log.warning(
                "%s: the ranks did not train with the same hyperparameters when this was saved: "
                "%s. Each stepped its part of the weights with its own. A resume gives rank 0's "
                "to every rank. A scheduler that steps on a metric needs the same value on all "
                "ranks: self.log(..., sync_dist=True).",
                self._where,
                summary,
            )

    def _texts(self, rank: int, groups: Groups) -> list[dict[str, str]]:
        what = f"{self._where}: a hyperparameter of rank {rank}"
        return [{key: canonical_repr(value, what) for key, value in g.items()} for g in groups]
