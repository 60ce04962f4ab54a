"""Environments with other releases: one per cell, beside one per interpreter and torch."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.releases._cells import Base, Cell
from tests.releases._interpreters import interpreter

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "releases"
INSTALL_TIMEOUT_S = 3600.0

TOOLS = (
    # DeepSpeed is built from source and asks for torch meanwhile, so that it is built beside it.
    *("setuptools<81", "wheel", "ninja", "hatchling", "editables"),
    *("pytest>=8.2", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100"),
    *("psutil>=5.9", "numpy>=1.24"),
)
"""What builds the packages under test, and what runs the tests; of any release."""

MENDED = (
    (
        "partition_parameters.py",
        "launch_handles[-1].wait()",
        "[handle.wait() for handle in launch_handles]",
    ),
    (
        "stage_1_and_2.py",
        "self.bit16_groups_flat.append(flattened_buffer)",
        "self.bit16_groups_flat.append(flattened_buffer.detach())",
    ),
)
"""Files of DeepSpeed's ZeRO, and what later releases have mended in them, for CPU ranks' sake.

Before 0.19.8, ZeRO-3 waits for the last gather only, but gloo's end in any order: now and then
ranks train on weights of the step before. 0.18.9 gathers ZeRO-1/2's weights into a buffer that is
part of an autograd graph, which gloo refuses since torch 2.13, at the first step. Both with any
strategy.
"""


class EnvironmentUnavailableError(Exception):
    """A machine lacks an interpreter, or its package index a build of torch for it."""


def environment(cell: Cell) -> dict[str, str]:
    """Install a cell, unless it is, and return the environment in which its Python is found first.

    Raises:
        EnvironmentUnavailableError: the interpreter or its torch cannot be had here.
        AssertionError: pip could not install DeepSpeed, Lightning or this library beside it.
    """
    folder = FOLDER / str(cell)
    with _alone():
        if not (folder / ".installed").is_file():
            _install(cell, folder)
    return _variables(folder)


def preceding(name: str, packages: tuple[str, ...]) -> dict[str, str]:
    """Install packages into a folder, unless they are, and return how this Python finds them first.

    Raises:
        AssertionError: pip could not install them.
    """
    folder = FOLDER / name
    with _alone():
        if not (folder / ".installed").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            options = [*os.environ.get("PIP_ARGS", "").split(), "--target", str(folder)]
            subprocess.run([*command, *options, *packages], check=True, timeout=INSTALL_TIMEOUT_S)
            (folder / ".installed").touch()
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def _variables(folder: Path) -> dict[str, str]:
    """Return what processes of an environment are given."""
    return {
        **{key: value for key, value in os.environ.items() if key != "PYTHONHOME"},
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "VIRTUAL_ENV": str(folder),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        # Two releases that share a folder of compiled operators build over each other; and nothing
        # is compiled, which takes minutes: ranks do without, as on machines without a compiler.
        "TORCH_EXTENSIONS_DIR": str(folder / ".torch_extensions"),
        "CXX": "false",
    }


def _install(cell: Cell, folder: Path) -> None:
    """Make a cell: pip resolves its releases together with this library's own ranges."""
    shared = _base(cell.base)
    _new(folder, cell.base.python)
    # Found after the cell's own, so that what pip has to have in another release is the cell's;
    # with its own .pth files, one of which is setuptools' distutils for Python 3.12.
    line = f"import site; site.addsitedir({str(_packages(shared))!r})\n"
    (_packages(folder) / "base.pth").write_text(line, encoding="utf-8")
    deepspeed = f"deepspeed=={cell.deepspeed}"
    pins = [f"torch=={cell.base.torch}", *([deepspeed] if cell.promised else [])]
    pins += [f"{package}=={cell.lightning}" for package in ("lightning", "pytorch-lightning")]
    said = _pip(folder, "--no-build-isolation", *pins, "-e", str(ROOT))
    if not cell.promised:
        said = said or _pip(folder, "--no-build-isolation", "--no-deps", deepspeed)
    assert not said, f"pip cannot install {deepspeed} {' '.join(pins)} with this library:\n{said}"
    _mend(_packages(folder))
    (folder / ".installed").touch()


def _base(base: Base) -> Path:
    """Return an environment that has torch and what runs tests.

    Raises:
        EnvironmentUnavailableError: the interpreter or its torch cannot be had here.
    """
    folder = FOLDER / str(base)
    if not (folder / ".installed").is_file():
        _new(folder, base.python)
        # Gigabytes, of which tests import a part: that is compiled when it is.
        if said := _pip(folder, "--no-compile", f"torch=={base.torch}", *TOOLS):
            shutil.rmtree(folder)
            msg = f"pip has no torch {base.torch} for Python {base.python} here: {_reason(said)}"
            raise EnvironmentUnavailableError(msg)
        # Where there is triton, older releases of DeepSpeed ask for a GPU's driver at import. It
        # stays known to pip, which would install it in each cell otherwise.
        shutil.rmtree(_packages(folder) / "triton", ignore_errors=True)
        (folder / ".installed").touch()
    return folder


def _new(folder: Path, version: str) -> None:
    """Make an empty environment, instead of one whose making was interrupted.

    Raises:
        EnvironmentUnavailableError: there is no such interpreter.
    """
    python = interpreter(version)
    if python is None:
        msg = f"no Python {version}: neither python{version} on PATH nor pyenv has it"
        raise EnvironmentUnavailableError(msg)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True, timeout=INSTALL_TIMEOUT_S)


def _packages(folder: Path) -> Path:
    """Return where an environment has its packages."""
    (found,) = folder.glob("lib/python3.*/site-packages")
    return found


def _pip(folder: Path, *what: str) -> str:
    """Install, and return what pip says where it cannot; nothing where it can."""
    command = [str(folder / "bin" / "python"), "-m", "pip", "install"]
    options = ["--quiet", "--disable-pip-version-check", *os.environ.get("PIP_ARGS", "").split()]
    done = subprocess.run(
        [*command, *options, *what],
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_TIMEOUT_S,
        env={**_variables(folder), "PYTHONPATH": "", "DS_BUILD_OPS": "0"},
    )
    return f"{done.stdout}{done.stderr}" or "no reason" if done.returncode else ""


def _reason(said: str) -> str:
    """Return the line of pip's that says why."""
    lines = [line for line in said.splitlines() if line.startswith("ERROR:")]
    return " ".join(lines)[:500] or said[-500:]


def _mend(packages: Path) -> None:
    """Change in DeepSpeed what does not work on CPU ranks, where it is as it was."""
    for name, was, mended in MENDED:
        source = packages / "deepspeed" / "runtime" / "zero" / name
        text = source.read_text(encoding="utf-8")
        source.write_text(text.replace(was, mended), encoding="utf-8")


@contextmanager
def _alone() -> Iterator[None]:
    """Allow one session at a time to install."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
