"""Other releases of DeepSpeed and Lightning, in folders that stand before what is installed."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "releases"
INSTALL_TIMEOUT_S = 1200.0
BUILD_TIMEOUT_S = 1800.0

BUILD = """
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("ShareMemCommBuilder").load()
"""
"""Compiles what CPU ranks load, in one process: ranks that each began it would wait for another."""

WAITS_FOR_ONE = "launch_handles[-1].wait()"
WAITS_FOR_ALL = "[handle.wait() for handle in launch_handles]"


@dataclass(frozen=True)
class Releases:
    """A release of each; what is installed, where none is named."""

    deepspeed: str = ""
    lightning: str = ""

    def __str__(self) -> str:
        named = (("deepspeed", self.deepspeed), ("lightning", self.lightning))
        return "-".join(f"{package}-{release}" for package, release in named if release)

    def environment(self) -> dict[str, str]:
        """Install what is named, and return the environment in which it is found first.

        Raises:
            AssertionError: pip could not install it.
        """
        folders = []
        if self.deepspeed:
            folders.append(_installed(f"deepspeed=={self.deepspeed}"))
        if self.lightning:
            pins = (f"{p}=={self.lightning}" for p in ("lightning", "pytorch-lightning"))
            folders.append(_installed(*pins))
        before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        found = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([*map(str, folders), str(ROOT), *filter(None, before)]),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        if self.deepspeed:
            # Two releases that share a folder of compiled operators build over each other.
            found["TORCH_EXTENSIONS_DIR"] = str(folders[0] / ".torch_extensions")
            _build(folders[0], found)
        return found


def _installed(*pins: str) -> Path:
    """Return a folder with packages as pip installs them, beside the torch that is there."""
    folder = FOLDER / pins[0].replace("==", "-")
    with _alone(folder):
        if not (folder / ".installed").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            _pip(folder, pins)
            _wait_for_all_gathers(folder)
            (folder / ".installed").touch()
    return folder


def _wait_for_all_gathers(folder: Path) -> None:
    """Mend what 0.19.8 mended: ZeRO-3 waits for the last gather only, but gloo's end in any order.

    Before it, CPU ranks now and then train on weights of the step before, with any strategy.
    """
    source = folder / "deepspeed" / "runtime" / "zero" / "partition_parameters.py"
    if source.is_file():
        text = source.read_text(encoding="utf-8")
        source.write_text(text.replace(WAITS_FOR_ONE, WAITS_FOR_ALL), encoding="utf-8")


def _pip(folder: Path, pins: tuple[str, ...]) -> None:
    """Install; DeepSpeed is built from source, and asks for torch while it is."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *options]
    done = subprocess.run(
        [*command, *os.environ.get("PIP_ARGS", "").split(), *pins],
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_TIMEOUT_S,
        env={**os.environ, "DS_BUILD_OPS": "0"},
    )
    said = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert done.returncode == 0, f"pip cannot install {' '.join(pins)} from its index:\n{said}"


def _build(folder: Path, environment: dict[str, str]) -> None:
    """Compile a release's operator, unless it is; without a compiler ranks do without it."""
    with _alone(folder):
        if (folder / ".built").is_file():
            return
        shutil.rmtree(folder / ".torch_extensions", ignore_errors=True)
        (folder / ".torch_extensions").mkdir()
        done = subprocess.run(
            [sys.executable, "-c", BUILD],
            capture_output=True,
            check=False,
            timeout=BUILD_TIMEOUT_S,
            env=environment,
        )
        if done.returncode == 0:
            (folder / ".built").touch()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one session at a time make a folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
