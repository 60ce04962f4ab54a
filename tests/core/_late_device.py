"""Four simulated devices, for machines without accelerators, in torch's own extension interface.

See ``_late_device.cpp``. Results for threads, streams and memory hold for CUDA as far as both
follow torch's interface; ``test_device_snapshots_gpu`` tests a real GPU.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import types
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("_late_device.cpp")
BUILD_TIMEOUT_S = 900


def build() -> Path:
    """Compile the device, once per checkout and release of torch; return the library's path.

    Raises:
        FileNotFoundError: there is no compiler.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        msg = "no C++ compiler"
        raise FileNotFoundError(msg)
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = ROOT / ".cache" / "late_device" / f"{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        home = Path(torch.__file__).parent
        command = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", str(SOURCE), "-o", str(made)]
        command += [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
        command += [f"-L{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
        subprocess.run(command, check=True, timeout=BUILD_TIMEOUT_S)
        made.replace(library)  # no process sees a partial file
    return library


def register(library: Path) -> None:
    torch.utils.rename_privateuse1_backend("late")  # type: ignore[attr-defined]
    torch.ops.load_library(library)
    torch.ops.late_device.register_hooks()
    states = {index: torch.zeros(4, dtype=torch.uint8) for index in range(4)}
    module = types.ModuleType("late")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 4,
        current_device=lambda: torch.accelerator.current_stream().device.index,
        get_rng_state=lambda device: states[device.index].clone(),
        set_rng_state=lambda state, device: states.__setitem__(device.index, state),
    )
    torch._register_device_module("late", module)


def contexts() -> list[int]:
    found: list[int] = torch.ops.late_device.contexts()
    return found
