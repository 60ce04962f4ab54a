"""Every place that can remove, replace or overwrite anything, and the test that shows it harmless.

What this library did not write is never removed. The table is the rule: a new call of this kind is
refused until it has a row, and each row names a test that puts somebody else's files in the way.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_elastic_zero"

REMOVING = {
    "unlink", "rmdir", "remove", "removedirs", "rmtree", "rename", "renames", "replace", "move",
    "copy", "copy2", "copyfile", "copytree", "copymode", "truncate", "ftruncate", "write_text",
    "write_bytes", "touch", "symlink_to", "hardlink_to", "symlink", "link", "extractall",
    "exchange_names", "TemporaryDirectory", "NamedTemporaryFile",
}  # fmt: skip
"""Methods and functions that can end a file, a name or a content, whatever they are called on."""

HARMLESS = {"copy", "replace", "remove", "move", "link"}
"""Names that strings, dicts, lists and tensors have too: see ``is_harmless``."""

NOT_OURS = "tests/core/test_not_ours.py"

PLACES: dict[tuple[str, str, str], str] = {}
"""Where (file, function, call), and which test shows that somebody else's files survive it."""


def calls() -> Iterator[tuple[str, str, str]]:
    """Yield every call in the package that can remove or replace something on disk."""
    for source in sorted(PACKAGE.rglob("*.py")):
        where = source.relative_to(PACKAGE).as_posix()
        yield from ((where, *found) for found in _calls_in(ast.parse(source.read_text()), ""))


def _calls_in(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node.name
    if isinstance(node, ast.Attribute) and node.attr in REMOVING and not _is_harmless(node):
        yield function, ast.unparse(node)
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name.split(".")[-1] == "open" and _may_write(node):
            yield function, f"{name} to write"
        if isinstance(node.func, ast.Name) and name in REMOVING - HARMLESS:
            yield function, name
    for child in ast.iter_child_nodes(node):
        yield from _calls_in(child, function)


def _is_harmless(node: ast.Attribute) -> bool:
    return False


def _may_write(call: ast.Call) -> bool:
    """Whether an ``open`` is not plainly one for reading."""
    given = [*call.args, *(k.value for k in call.keywords)]
    texts = [a.value for a in given if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return any(set(text) & set("wax+") and set(text) <= set("rwaxbt+U") for text in texts)


if __name__ == "__main__":
    for row in calls():
        print(row)
