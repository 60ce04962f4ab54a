"""Checkpoints by other software, with the state of the engines that wrote them."""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.engines import EngineCase
from tests.support.oracle import Dump

DATA = Path(__file__).parents[1] / "formats" / "data"


@dataclass(frozen=True)
class Fixture:
    folder: Path
    setup: EngineCase
    """The setup of the run that wrote it."""
    about: dict[str, Any]

    @property
    def setup_steps(self) -> int:
        """Steps that the run had trained at the save."""
        return int(self.about["steps"])

    @property
    def checkpoint(self) -> Path:
        """The path to resume from."""
        return self.folder / str(self.about.get("path", "checkpoint"))

    def truth(self) -> Dump:
        found: Dump = torch.load(self.folder / "truth.pt", weights_only=True)
        return found

    def later(self) -> Dump:
        """Return the state of the engine at its second save, which only one row has."""
        found: Dump = torch.load(self.folder / "later.pt", weights_only=True)
        return found


def names() -> list[str]:
    return sorted(path.name.removesuffix(".tar.xz") for path in DATA.glob("*.tar.xz"))


def unpack(name: str, folder: Path) -> Fixture:
    """Unpack a fixture into an empty folder."""
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    about = json.loads((folder / "about.json").read_text())
    return Fixture(folder, EngineCase(**about["setup"]), about)
