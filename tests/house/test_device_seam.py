"""One module names CUDA; all others use torch's interface for any device, or DeepSpeed's."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lightning_elastic_zero"
SEAM = PACKAGE / "checkpoint" / "device_streams.py"


def cuda_names(text: str) -> list[str]:
    """Return where a program names ``torch.cuda``, or asks a tensor whether it is CUDA's."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and (
            node.attr == "is_cuda" or ast.unparse(node).startswith("torch.cuda")
        ):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Import):
            found += [f"{node.lineno}: {a.name}" for a in node.names if _is_cudas(a.name)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            found += [f"{node.lineno}: {name}" for name in names if _is_cudas(name)]
    return found


def _is_cudas(name: str) -> bool:
    return name == "torch.cuda" or name.startswith("torch.cuda.")


def test_one_module_names_cuda() -> None:
    """So that ROCm, XPU, NPU and HPU go the way that CUDA goes."""
    files = [path for path in PACKAGE.rglob("*.py") if path != SEAM]
    assert len(files) > 100
    named = {str(p.relative_to(PACKAGE)): cuda_names(p.read_text(encoding="utf-8")) for p in files}
    assert not {path: where for path, where in named.items() if where}
    assert cuda_names(SEAM.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "text",
    [
        "torch.cuda.set_device(0)",
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import Event",
        "x = t.is_cuda",
    ],
)
def test_each_way_to_name_it_is_found(text: str) -> None:
    """Imported or not."""
    assert cuda_names(text)
