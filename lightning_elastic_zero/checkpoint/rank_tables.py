"""How ranks compare what each of them has with what rank 0 has, whatever the size of the model.

The tables of a run grow with its parameters, and a thousand ranks ask one store. So rank 0 sends a
digest of each table, and lays the tables themselves into the directory that it has just made on
the disk that all ranks share: a rank reads one of them where its own is another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from lightning_elastic_zero.storage import TABLE_PREFIX, await_shared, write_shared

DIGESTS = "digests"

Tables = Mapping[str, Any]
"""Plain data by the names of the tables; never changed."""


def table_digests(tables: Tables) -> dict[str, str]:
    """Return a digest of each table, of the same length for any."""
    return {name: _digest(_text(table)) for name, table in tables.items()}


def write_tables(directory: Path, tables: Tables) -> None:
    """Lay rank 0's tables into a directory, until ``remove_shared``.

    Raises:
        SaveError: they could not be written.
    """
    for name, table in tables.items():
        write_shared(directory, f"{TABLE_PREFIX}{name}", _text(table))


class RankZeroTables(Mapping[str, Any]):
    """Rank 0's tables, to a rank that has its own: read where those differ, and only then."""

    def __init__(self, sent: Mapping[str, str], own: Tables, directory: Path) -> None:
        """Hold what is needed to compare.

        Args:
            sent: rank 0's digests.
            own: this rank's tables.
            directory: where rank 0's lie.
        """
        self._sent = sent
        self.own = own
        self._directory = directory
        self._digests = table_digests(own)
        self._read: dict[str, Any] = {}

    def is_same(self, name: str) -> bool:
        """Return whether this rank's table is rank 0's."""
        return self._sent[name] == self._digests[name]

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 (plain data)
        """Return rank 0's table.

        Raises:
            SaveError: it cannot be read, or is not what rank 0 has written.
        """
        if self.is_same(name):
            return self.own[name]
        if name not in self._read:
            data = await_shared(
                self._directory,
                f"{TABLE_PREFIX}{name}",
                lambda data: _digest(data) == self._sent[name],
            )
            self._read[name] = json.loads(data)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the tables' names."""
        return iter(self._sent)

    def __len__(self) -> int:
        """Return how many tables there are."""
        return len(self._sent)


def _text(table: object) -> bytes:
    return json.dumps(table).encode()


def _digest(text: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(text)
