"""Environments with other releases: one per cell, and a shared one per interpreter and torch."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.releases._cells import COMPILED, Base, Cell
from tests.releases._interpreters import interpreter

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "releases"
INSTALL_TIMEOUT_S = 3600.0

TOOLS = (
    # DeepSpeed is built from source and imports torch, so it is built without build isolation.
    *("setuptools<81", "wheel", "ninja", "hatchling", "editables"),
    *("pytest>=8.2", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100"),
    *("psutil>=5.9", "numpy>=1.24"),
)
"""Packages that build the packages under test and run the tests, in any release."""

PATCHES = (
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
"""Fixes of later DeepSpeed releases that CPU ranks need: file, original text, fixed text.

Before 0.19.8, ZeRO-3 waits only for the last gather, but gloo's gathers complete in any order, so
that ranks sometimes train on weights of the previous step. 0.18.9 gathers the weights of ZeRO-1/2
into a buffer that is part of an autograd graph, which gloo refuses since torch 2.13. Both failures
occur with any strategy.
"""


BUILD_OPERATORS = """
from deepspeed.accelerator import get_accelerator
for name in ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "AsyncIOBuilder"):
    builder = get_accelerator().create_op_builder(name)
    if name != "AsyncIOBuilder" or builder.is_compatible():  # It needs libaio.
        builder.load()
"""
"""Compiles the operators of CPU ranks in advance, which takes a minute each."""


class EnvironmentUnavailableError(Exception):
    """The machine lacks the interpreter, or the package index lacks a torch build for it."""


def environment(cell: Cell) -> dict[str, str]:
    """Install a cell if necessary; return environment variables that select its Python.

    Raises:
        EnvironmentUnavailableError: the interpreter or its torch is not available.
        AssertionError: pip could not install DeepSpeed, Lightning and this library together.
    """
    folder = FOLDER / str(cell)
    with _locked():
        if not (folder / ".installed").is_file():
            _install(cell, folder)
    return _variables(folder, compiles=cell in COMPILED)


def preceding(name: str, packages: tuple[str, ...]) -> dict[str, str]:
    """Install packages into a folder if necessary; return variables that put it first on the path.

    Raises:
        CalledProcessError: pip could not install the packages.
    """
    folder = FOLDER / name
    with _locked():
        if not (folder / ".installed").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            options = [*os.environ.get("PIP_ARGS", "").split(), "--target", str(folder)]
            subprocess.run([*command, *options, *packages], check=True, timeout=INSTALL_TIMEOUT_S)
            (folder / ".installed").touch()
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def _variables(folder: Path, *, compiles: bool = False) -> dict[str, str]:
    """Return the environment variables of processes in an environment."""
    return {
        **{key: value for key, value in os.environ.items() if key != "PYTHONHOME"},
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "VIRTUAL_ENV": str(folder),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        # Releases that share a folder of compiled operators overwrite each other's. Without a
        # compiler, operators are not built, which takes minutes; most cells do without them.
        "TORCH_EXTENSIONS_DIR": str(folder / ".torch_extensions"),
        **({} if compiles else {"CXX": "false"}),
    }


def _install(cell: Cell, folder: Path) -> None:
    """Create a cell; pip resolves its releases together with this library's ranges."""
    shared = _base(cell.base)
    _new(folder, cell.base.python)
    # The shared packages follow those of the cell, which may have other releases of them. Their
    # .pth files are processed too; one provides setuptools' distutils for Python 3.12.
    line = f"import site; site.addsitedir({str(_packages(shared))!r})\n"
    (_packages(folder) / "base.pth").write_text(line, encoding="utf-8")
    deepspeed = f"deepspeed=={cell.deepspeed}"
    pins = [f"torch=={cell.base.torch}", *([deepspeed] if cell.promised else [])]
    pins += [f"{package}=={cell.lightning}" for package in ("lightning", "pytorch-lightning")]
    error = _pip(folder, "--no-build-isolation", *pins, "-e", str(ROOT))
    if not cell.promised:
        error = error or _pip(folder, "--no-build-isolation", "--no-deps", deepspeed)
    assert not error, f"pip cannot install {deepspeed} {' '.join(pins)} with this library:\n{error}"
    _patch(_packages(folder))
    if cell in COMPILED:
        command = [str(folder / "bin" / "python"), "-c", BUILD_OPERATORS]
        variables = _variables(folder, compiles=True)
        subprocess.run(command, env=variables, check=True, timeout=INSTALL_TIMEOUT_S)
    (folder / ".installed").touch()


def _base(base: Base) -> Path:
    """Return an environment with torch and the tools, created if necessary.

    Raises:
        EnvironmentUnavailableError: the interpreter or its torch is not available.
    """
    folder = FOLDER / str(base)
    if not (folder / ".installed").is_file():
        _new(folder, base.python)
        # Tests import only a part of these gigabytes, which Python compiles on import.
        if error := _pip(folder, "--no-compile", f"torch=={base.torch}", *TOOLS):
            shutil.rmtree(folder)
            msg = f"pip found no torch {base.torch} for Python {base.python}: {_reason(error)}"
            raise EnvironmentUnavailableError(msg)
        # With triton, older releases of DeepSpeed require a GPU driver at import. Its metadata
        # stays, because pip would otherwise install it in each cell.
        shutil.rmtree(_packages(folder) / "triton", ignore_errors=True)
        (folder / ".installed").touch()
    return folder


def _new(folder: Path, version: str) -> None:
    """Create an empty environment; replace an incomplete one.

    Raises:
        EnvironmentUnavailableError: the interpreter is missing.
    """
    python = interpreter(version)
    if python is None:
        msg = f"Python {version} was not found: neither python{version} on PATH nor in pyenv"
        raise EnvironmentUnavailableError(msg)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True, timeout=INSTALL_TIMEOUT_S)


def _packages(folder: Path) -> Path:
    (found,) = folder.glob("lib/python3.*/site-packages")
    return found


def _pip(folder: Path, *arguments: str) -> str:
    """Install; return the output of pip if it failed, otherwise an empty text."""
    command = [str(folder / "bin" / "python"), "-m", "pip", "install"]
    options = ["--quiet", "--disable-pip-version-check", *os.environ.get("PIP_ARGS", "").split()]
    done = subprocess.run(
        [*command, *options, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_TIMEOUT_S,
        env={**_variables(folder), "PYTHONPATH": "", "DS_BUILD_OPS": "0"},
    )
    return f"{done.stdout}{done.stderr}" or "no output" if done.returncode else ""


def _reason(output: str) -> str:
    """Return pip's error lines."""
    lines = [line for line in output.splitlines() if line.startswith("ERROR:")]
    return " ".join(lines)[:500] or output[-500:]


def _patch(packages: Path) -> None:
    """Apply ``PATCHES`` to an installed DeepSpeed, if it has the original text."""
    for name, original, fixed in PATCHES:
        source = packages / "deepspeed" / "runtime" / "zero" / name
        text = source.read_text(encoding="utf-8")
        source.write_text(text.replace(original, fixed), encoding="utf-8")


@contextmanager
def _locked() -> Iterator[None]:
    """Allow only one session at a time to install."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
