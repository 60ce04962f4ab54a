"""Kinds of damage to a checkpoint's files, drawn at random from a seed."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from lightning_elastic_zero.core.manifest import dump_with_digest

MANIFEST = "manifest.json"
LARGEST_HOLE = 1 << 20


@dataclass(frozen=True)
class Damage:
    what: str
    file: str
    """Path relative to the checkpoint."""
    other: str = ""
    """Another changed file: the error may name either."""


Corruption: TypeAlias = "Callable[[Path, Path, random.Random], Damage]"
"""Takes the checkpoint to damage, another save of the same run, and a random generator."""


def files_of(checkpoint: Path) -> list[str]:
    found = (p for p in checkpoint.rglob("*") if p.is_file())
    return sorted(str(p.relative_to(checkpoint)) for p in found)


def _any(checkpoint: Path, draw: random.Random) -> str:
    """Return a file: data files and the manifest more often than files that readers do not use."""
    names = files_of(checkpoint)
    used = [n for n in names if n == MANIFEST or n.startswith("checkpoint/")]
    return draw.choice(used if draw.random() < 0.9 else names)


def _shards(checkpoint: Path, ending: str = ".pt") -> list[str]:
    return [n for n in files_of(checkpoint) if n.endswith(ending)]


def flipped_bit(checkpoint: Path, _: Path, draw: random.Random) -> Damage:
    name = _any(checkpoint, draw)
    data = bytearray((checkpoint / name).read_bytes())
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    (checkpoint / name).write_bytes(data)
    return Damage(f"bit {bit} flipped", name)


def zeroed_hole(checkpoint: Path, _: Path, draw: random.Random) -> Damage:
    """Fill a range with zeros, like a disk that lost a block."""
    name = _any(checkpoint, draw)
    data = bytearray((checkpoint / name).read_bytes())
    start = draw.randrange(len(data))
    stop = min(len(data), start + int(LARGEST_HOLE ** draw.random()))
    data[start:stop] = bytes(stop - start)
    (checkpoint / name).write_bytes(data)
    return Damage(f"[{start}, {stop}) zeroed", name)


def truncation(checkpoint: Path, _: Path, draw: random.Random) -> Damage:
    name = _any(checkpoint, draw)
    size = (checkpoint / name).stat().st_size
    to = draw.choice([0, size - 1, size + 1, draw.randrange(size), size + draw.randrange(1, 9999)])
    os.truncate(checkpoint / name, to)
    return Damage(f"{size} bytes made {to}", name)


def missing_file(checkpoint: Path, _: Path, draw: random.Random) -> Damage:
    name = _any(checkpoint, draw)
    (checkpoint / name).unlink()
    return Damage("lost", name)


def swapped_shards(checkpoint: Path, _: Path, draw: random.Random) -> Damage:
    """Swap two files, with or without their checksums."""
    one, other = draw.sample(_shards(checkpoint), 2)
    for ending in draw.choice([("",), ("", ".sums"), (".sums",)]):
        first, second = checkpoint / f"{one}{ending}", checkpoint / f"{other}{ending}"
        kept = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(kept)
    return Damage("swapped", one, other)


def shard_of_another_save(checkpoint: Path, other: Path, draw: random.Random) -> Damage:
    """Take a file of equal size from another save, with or without its checksum."""
    name = draw.choice(_shards(checkpoint))
    for ending in draw.choice([("",), ("", ".sums"), (".sums",)]):
        shutil.copyfile(other / f"{name}{ending}", checkpoint / f"{name}{ending}")
    return Damage("another save's", name)


def bytes_of_another_save(checkpoint: Path, other: Path, draw: random.Random) -> Damage:
    """Mix two saves in a file, like an interrupted copy over an older file."""
    name = draw.choice(_shards(checkpoint))
    mine, theirs = (checkpoint / name).read_bytes(), (other / name).read_bytes()
    at = draw.randrange(len(mine))
    (checkpoint / name).write_bytes(mine[:at] + theirs[at : len(mine)])
    return Damage(f"another save's from byte {at}", name)


def manifest_of_another_save(checkpoint: Path, other: Path, _: random.Random) -> Damage:
    shutil.copyfile(other / MANIFEST, checkpoint / MANIFEST)
    return Damage("another save's", MANIFEST)


def edited_manifest(checkpoint: Path, _: Path, draw: random.Random) -> Damage:
    """Change one value anywhere in the manifest, or remove it; keep the digest."""
    path = checkpoint / MANIFEST
    content = json.loads(path.read_text())
    where, key = draw.choice([p for p in _places(content) if p[1] != "digest"])
    old = where[key]
    if draw.random() < 0.2:
        del where[key]
    else:
        where[key] = _other_value(old, draw)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    return Damage(f"{key}: {old!r} edited", MANIFEST)


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        yield content, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _other_value(old: Any, draw: random.Random) -> Any:
    if isinstance(old, bool):
        return not old
    if isinstance(old, int | float):
        return old * 2 + 1
    if isinstance(old, str):
        return old[:-1] + draw.choice("0123456789abcdef-_") + "x"
    if isinstance(old, list):
        return [*old[1:], *old[:1]] if len(set(map(str, old))) > 1 else [*old, 1]
    return {} if old else [1]


def newer_version(checkpoint: Path, _: Path, draw: random.Random) -> Damage:
    """Claim a later version of the format, with or without a matching digest."""
    content = json.loads((checkpoint / MANIFEST).read_text())
    content["format_version"] = draw.randrange(3, 99)
    text = dump_with_digest(content) if draw.random() < 0.5 else json.dumps(content)
    (checkpoint / MANIFEST).write_text(text)
    return Damage(f"version {content['format_version']}", MANIFEST)


def another_step(checkpoint: Path, _: Path, draw: random.Random) -> Damage:
    """Claim another step, with a matching digest."""
    content = json.loads((checkpoint / MANIFEST).read_text())
    content["progress"]["global_steps"] += draw.randrange(1, 99)
    (checkpoint / MANIFEST).write_text(dump_with_digest(content))
    return Damage(f"of step {content['progress']['global_steps']}", MANIFEST, "of step")


def unreadable_file(checkpoint: Path, _: Path, draw: random.Random) -> Damage:
    """Replace a file by a link to itself, since root can read all other files."""
    name = _any(checkpoint, draw)
    (checkpoint / name).unlink()
    (checkpoint / name).symlink_to(Path(name).name)
    return Damage("cannot be opened", name)


def foreign_file(checkpoint: Path, _: Path, draw: random.Random) -> Damage:
    """Replace a file by a directory, a pipe, or other bytes of the same size."""
    name = _any(checkpoint, draw)
    path = checkpoint / name
    size = path.stat().st_size
    path.unlink()
    kind = draw.choice(["directory", "pipe", "bytes"])
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(draw.randbytes(size))
    return Damage(f"a {kind} in its place", name)


def foreign_folder(checkpoint: Path, _: Path, draw: random.Random) -> Damage:
    shutil.rmtree(checkpoint / "checkpoint")
    (checkpoint / "checkpoint").write_bytes(draw.randbytes(99))
    return Damage("a file in its place", "checkpoint")


def extra_file(checkpoint: Path, other: Path, draw: random.Random) -> Damage:
    """Add files that look like shards of a larger world, which readers must ignore."""
    name = draw.choice(_shards(checkpoint)).replace("rank_1", "rank_7").replace("_00_", "_03_")
    shutil.copyfile(other / draw.choice(_shards(other)), checkpoint / name)
    (checkpoint / draw.choice(["notes.txt", "checkpoint/.nfs01", "manifest.json~"])).touch()
    return Damage("extra", name)


KINDS: dict[str, tuple[Corruption, int]] = {
    "flipped bit": (flipped_bit, 40),
    "zeroed hole": (zeroed_hole, 15),
    "truncation": (truncation, 10),
    "missing file": (missing_file, 4),
    "swapped shards": (swapped_shards, 4),
    "shard of another save": (shard_of_another_save, 4),
    "bytes of another save": (bytes_of_another_save, 5),
    "manifest of another save": (manifest_of_another_save, 1),
    "edited manifest": (edited_manifest, 10),
    "newer version": (newer_version, 1),
    "another step": (another_step, 1),
    "unreadable file": (unreadable_file, 3),
    "foreign file": (foreign_file, 4),
    "foreign folder": (foreign_folder, 1),
    "extra file": (extra_file, 3),
}
"""Each kind, and its minimum number in a hundred corruptions."""
