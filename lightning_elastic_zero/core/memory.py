"""Whether the hosts of a job have memory for the copies of a background save.

The ranks of one host share its memory, those of one container or batch job its limit. Each rank
reports these as pools, and the demand on each pool is added up over all ranks.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_USABLE = 0.9
"""Part of the free memory that copies may use: training may need some more, too."""

_NO_LIMIT_BYTES = 1 << 60
"""A cgroup of version 1 without a limit has one of this order."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory that processes share."""

    key: str
    """Equal in two processes if they share the memory."""
    name: str
    """Host, and the cgroup with the limit."""
    free_bytes: int
    """Memory that is free, or contains files that the system can drop."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The memory that a rank is going to use."""

    size_bytes: int
    pools: Sequence[Pool]
    """All of them must have room for it."""

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, content: Mapping[str, Any]) -> Demand:
        """Read the result of ``to_plain``."""
        return cls(content["size_bytes"], [Pool(**pool) for pool in content["pools"]])


def find_shortage(demands: Sequence[Demand]) -> str:
    """Describe the first pool without room for the demands on it; empty if all have room."""
    of_pools: dict[str, list[tuple[Pool, int]]] = {}
    for demand in demands:
        for pool in demand.pools:
            of_pools.setdefault(pool.key, []).append((pool, demand.size_bytes))
    for parts in of_pools.values():
        free_bytes = min(pool.free_bytes for pool, _ in parts)
        wanted_bytes = sum(size_bytes for _, size_bytes in parts)
        if wanted_bytes > _USABLE * free_bytes:
            ranks = f"{len(parts)} ranks" if len(parts) > 1 else "rank"
            return (
                f"{parts[0][0].name} has {free_bytes / 1e9:.1f} GB of free memory, and copies of "
                f"the state of its {ranks} need {wanted_bytes / 1e9:.1f} GB"
            )
    return ""


def memory_pools(root: Path = Path("/")) -> list[Pool]:
    """Return the pools of this process; none if the system does not report them.

    ``root`` replaces the directory of ``/proc`` and ``/sys``.
    """
    host, pools = socket.gethostname(), list[Pool]()
    with suppress(OSError, ValueError, LookupError):
        # Containers of one host have own host names.
        boot = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
        free_bytes = 1024 * _numbers(root / "proc/meminfo")["MemAvailable:"]
        pools.append(Pool(boot, f"the host {host}", free_bytes))
        namespace = (root / "proc/self/ns/cgroup").readlink()
        pools += [
            Pool(f"{boot} {namespace} {group}", f"the cgroup {group} of {host}", free_bytes)
            for group, free_bytes in _limited_groups(root)
        ]
    return pools


def _limited_groups(root: Path) -> Iterator[tuple[str, int]]:
    """Yield this process's cgroups that have a limit, the innermost first, and their room."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            mount, limit, usage, kind = root / "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            mount, kind = root / "sys/fs/cgroup/memory", "total_"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inside = Path(group.lstrip("/"))
        # A container may see its own group as the root, and yet the path that the host uses.
        visible = [inside, *inside.parents] if (mount / inside).is_dir() else [Path()]
        for folder in (mount / each for each in visible):
            # The root has no such files, and without a limit the text is "max".
            with suppress(OSError, ValueError, LookupError):
                limit_bytes = int((folder / limit).read_text())
                kept = _numbers(folder / "memory.stat")
                files_bytes = kept[f"{kind}inactive_file"] + kept[f"{kind}active_file"]
                used_bytes = int((folder / usage).read_text()) - files_bytes
                if limit_bytes < _NO_LIMIT_BYTES:
                    name = group if len(visible) == 1 else f"/{folder.relative_to(mount)}"
                    yield name, limit_bytes - used_bytes


def _numbers(file: Path) -> dict[str, int]:
    """Return the number after the name in each line of a file."""
    return {name: int(number) for name, number, *_ in map(str.split, file.read_text().splitlines())}
