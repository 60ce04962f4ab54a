"""The environment of a selftest: releases, devices, file system."""

from __future__ import annotations

import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.core.requirements import version_of
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.selftest.worlds import Worlds
from lightning_elastic_zero.storage.paths import real_path
from lightning_elastic_zero.tools.report import format_bytes

MOUNTS = Path("/proc/self/mountinfo")

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
"""File systems that no machine's end outlives."""

_CUDA = "cuda"
"""The kind of device on which Lightning's strategy runs, and a selftest; ROCm is called so."""

_MOST_NAMES = 4

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What all ranks found."""

    directory: Path
    """As it was named; absolute."""
    device: str
    """``"cpu"`` or ``"cuda"``."""
    device_names: tuple[str, ...]
    hosts: int
    launched: int
    """Ranks that a launcher started; 0: none did."""
    worlds: Worlds
    file_system: tuple[str, str]
    """Its type and mount options; empty where the system does not tell."""

    @property
    def in_memory(self) -> bool:
        """Whether the file system is one that no machine's end outlives."""
        return self.file_system[0] in IN_MEMORY

    def described(self) -> dict[str, str]:
        """Return it as the report has it."""
        by = f"{self.launched} ranks by a launcher" if self.launched else "one process, alone"
        names = "; ".join(self.device_names[:_MOST_NAMES])
        real = real_path(self.directory)
        kind, options = self.file_system
        free_bytes = shutil.disk_usage(self.directory).free
        system = f"{kind} ({options})" if kind else "unknown"
        return {
            **releases(),
            "devices": f"{self.device}: {names}",
            "hosts": str(self.hosts),
            "started as": by,
            "ranks": f"{self.worlds.saves} save, {self.worlds.loads} load, {self.worlds.returns} "
            "load what those saved",
            "directory": str(self.directory) + ("" if real == self.directory else f" -> {real}"),
            "file system": f"{system}, {format_bytes(free_bytes)} free",
        }


def device_kind() -> str:
    """Return what DeepSpeed will use, ``"cuda"`` or ``"cpu"``, without touching a device.

    Raises:
        UnsupportedError: ``DS_ACCELERATOR`` asks for another one.
    """
    told = os.environ.get("DS_ACCELERATOR", "")
    cards = _cards()
    found = told or (_CUDA if cards is not None and cards.is_available() else "cpu")
    if found not in {"cpu", _CUDA}:
        msg = (
            f"DS_ACCELERATOR={found} is set: selftest knows cuda and cpu; set one of them, or none"
        )
        raise UnsupportedError(msg)
    if found == _CUDA and not _card_count():
        msg = "DS_ACCELERATOR=cuda is set, but torch sees no GPU here: unset it to test on CPU"
        raise UnsupportedError(msg)
    return found


def gpu_count(kind: str) -> int:
    """Return how many GPUs this machine has for DeepSpeed: none where it uses processors."""
    return _card_count() if kind == _CUDA else 0


def _cards() -> Any:
    """Return torch's module of the GPUs; None where it was built for other devices, or for none."""
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:
        return None  # torch 2.6; later releases return None where they were built for none.
    if accelerator is None or accelerator.type != _CUDA:
        return None
    return torch.get_device_module(accelerator)


def _card_count() -> int:
    """Return how many GPUs torch sees."""
    cards = _cards()
    return 0 if cards is None else int(cards.device_count())


def releases() -> dict[str, str]:
    """Return the installed releases, as the report names them."""
    packages = {
        "lightning_elastic_zero": "lightning-elastic-zero",
        "torch": "torch",
        "DeepSpeed": "deepspeed",
        "Lightning": "lightning",
    }
    found = {title: version_of(name) or "not installed" for title, name in packages.items()}
    found["torch"] = f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    return {**found, "Python": platform.python_version(), "system": system}


def device_name(kind: str, index: int) -> str:
    """Return the name of a device: a GPU's, or how many processors there are.

    Raises:
        UnsupportedError: there is no such GPU.
    """
    if kind == "cpu":
        return f"CPU, {os.cpu_count()} processors"
    seen = _card_count()
    if index >= seen:
        msg = (
            f"LOCAL_RANK={index}, but torch sees {seen} GPUs on {platform.node()}: start as many "
            "ranks on a host as each of them sees GPUs; CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', '(not set)')} may hide some"
        )
        raise UnsupportedError(msg)
    properties = _cards().get_device_properties(index)
    return f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"


def file_system(directory: Path) -> tuple[str, str]:
    """Return the type of the file system that a directory is on, and its mount options.

    Links are followed. Both are empty where the system does not tell.
    """
    real = real_path(directory)
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "", ""
    best: tuple[int, str, str] = (-1, "", "")
    for line in lines:
        fields, _, rest = line.partition(" - ")
        point = Path(_OCTAL.sub(lambda m: chr(int(m[1], 8)), fields.split()[4]))
        if real.is_relative_to(point) and len(point.parts) >= best[0]:
            best = (len(point.parts), rest.split()[0], fields.split()[5])
    return best[1], best[2]
