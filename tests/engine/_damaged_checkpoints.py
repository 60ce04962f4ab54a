"""Kinds of damage to a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path


def copied(path: str, folder: Path) -> Path:
    return Path(shutil.copytree(path, folder / "damaged.ckpt"))


def last_shard(checkpoint: Path) -> Path:
    return max(checkpoint.glob("checkpoint/*_optim_states.pt"))


def lose_shard(checkpoint: Path) -> str:
    """Delete a rank's file; return the text that the error must contain."""
    shard = last_shard(checkpoint)
    shard.unlink()
    return shard.name


def truncate_shard(checkpoint: Path) -> str:
    shard = last_shard(checkpoint)
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])
    return shard.name


def flip_bit(checkpoint: Path) -> str:
    """Change one bit in the middle of a rank's file, among its tensors."""
    shard = last_shard(checkpoint)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(bytes(data))
    return shard.name


def lose_manifest(checkpoint: Path) -> str:
    """Delete the manifest, the mark of a complete checkpoint."""
    (checkpoint / "manifest.json").unlink()
    return checkpoint.name


def cut_manifest(checkpoint: Path) -> str:
    manifest = checkpoint / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text[: len(text) // 2])
    return "manifest.json"
