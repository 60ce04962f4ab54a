"""Only one module names CUDA; all others use device-independent interfaces."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lightning_elastic_zero"
SEAM = PACKAGE / "checkpoint" / "streams.py"

BY_NAME = {"get_device_module", "getattr", "import_module", "__import__"}
"""Functions that return a module by name."""


def cuda_names(text: str) -> list[str]:
    """Return the uses of ``torch.cuda`` (also by a text) and ``is_cuda`` in a program."""
    if "cuda" not in text:
        return []
    tree = ast.parse(text)
    constants = {name for node in ast.walk(tree) for name in _bound_to_cuda(node)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and (
            _is_attribute_of_cuda(node) or _gets_cuda_by_name(node, constants)
        ):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Import):
            found += [f"{node.lineno}: {a.name}" for a in node.names if _is_in_cuda(a.name)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            found += [f"{node.lineno}: {name}" for name in names if _is_in_cuda(name)]
    return found


def _is_attribute_of_cuda(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    return node.attr == "is_cuda" or ast.unparse(node).startswith("torch.cuda")


def _is_in_cuda(name: str) -> bool:
    return name == "torch.cuda" or name.startswith("torch.cuda.")


def _is_cuda_text(node: ast.AST | None) -> bool:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    return node.value.removeprefix("torch.").partition(":")[0].partition(".")[0] == "cuda"


def _bound_to_cuda(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Assign | ast.AnnAssign) and _is_cuda_text(node.value):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [ast.unparse(target) for target in targets]
    return []


def _gets_cuda_by_name(node: ast.AST, constants: set[str]) -> bool:
    if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] not in BY_NAME:
        return False
    args = [*node.args, *(keyword.value for keyword in node.keywords)]
    parts = [part for value in args for part in ast.walk(value)]
    return any(_is_cuda_text(part) or ast.unparse(part) in constants for part in parts)


def test_one_module_names_cuda() -> None:
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
        'torch.get_device_module("cuda")',
        'torch.get_device_module(torch.device("cuda:0"))',
        'torch.get_device_module(device="cuda")',
        'from torch import get_device_module\nget_device_module("cuda")',
        '_CUDA = "cuda"\ndef cards(): return torch.get_device_module(_CUDA)',
        '_CUDA: str = "cuda"\nx = torch.get_device_module(_CUDA).device_count()',
        'getattr(torch, "cuda")',
        'importlib.import_module("torch.cuda")',
    ],
)
def test_each_use_of_cuda_is_found(text: str) -> None:
    assert cuda_names(text)


@pytest.mark.parametrize(
    "text",
    [
        "torch.get_device_module(torch.accelerator.current_accelerator())",
        "torch.get_device_module(accelerator)",
        'device = "cuda" if given else "cpu"',
        'getattr(torch, "accelerator")',
    ],
)
def test_names_for_any_device_are_allowed(text: str) -> None:
    assert not cuda_names(text)
