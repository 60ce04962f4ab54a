"""Docstrings of the package are plain technical English, in one dialect."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2] / "lightning_elastic_zero"
FIGURATIVE = {"Come", "Forget", "Give", "Have", "Lay", "Let", "Say", "Tell", "Understand"}
"""First words that have a plain one: Return, Report, Make, Parse, Discard, Enter, Place."""

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def first_lines(text: str) -> dict[int, str]:
    """Return the first line of each docstring in a source, by the line on which it begins."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            found[node.body[0].lineno] = docstring.splitlines()[0]
    return found


def violations(text: str) -> dict[int, str]:
    """Return the first lines that begin with a figurative verb, or with "Return whether"."""
    return {
        number: line
        for number, line in first_lines(text).items()
        if line.split()[0] in FIGURATIVE or line.startswith("Return whether")
    }


def test_docstrings_begin_with_a_plain_word() -> None:
    """No docstring begins with a figurative verb, and predicates begin with "Whether"."""
    wrong = {
        f"{source.relative_to(ROOT)}:{number}": line
        for source in sorted(ROOT.rglob("*.py"))
        for number, line in violations(source.read_text(encoding="utf-8")).items()
    }
    assert wrong == {}


def test_a_figurative_docstring_is_found() -> None:
    """The search finds them in modules, classes and functions, and leaves others alone."""
    text = '''"""Tell it."""
class A:
    """Have it."""
    def f(self):
        """Return whether it is."""
    async def g(self):
        """Whether they tell it."""
'''
    assert list(violations(text)) == [1, 3, 5]
