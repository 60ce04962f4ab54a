"""Small wrong changes to a source file, each of which a test should notice."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
"""Each as it is written, and what it becomes."""

ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Mod: "//",
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a file: the text from ``start`` to ``stop`` becomes ``replacement``."""

    start: int
    """Offset in characters."""
    stop: int
    line: int
    replacement: str
    source_line: str

    def name(self) -> str:
        """Return what identifies the change while lines above it move."""
        return f"{self.source_line.strip()}  ->  {self.replacement}"

    def applied_to(self, source: str) -> str:
        """Return the changed file."""
        return source[: self.start] + self.replacement + source[self.stop :]


class _Source:
    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))

    def offset(self, line: int, column_bytes: int) -> int:
        """Return the offset in characters of a position as ``ast`` gives it, in UTF-8 bytes."""
        prefix = self.lines[line - 1].encode()[:column_bytes].decode()
        return self._starts[line - 1] + len(prefix)

    def mutant(self, node: ast.expr | ast.stmt, replacement: str) -> Mutant:
        """Return the change of a whole node."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.offset(node.lineno, node.col_offset)
        stop = self.offset(node.end_lineno, node.end_col_offset)
        return Mutant(start, stop, node.lineno, replacement, self.lines[node.lineno - 1])

    def code(self, node: ast.AST) -> str:
        """Return a node's own text."""
        return ast.get_source_segment(self.text, node) or ""


def mutants_of(text: str) -> list[Mutant]:
    """Return every change of one file, in the order of its lines.

    Messages, annotations and docstrings are left alone: no test is to hold them.
    """
    source = _Source(text)
    found = {m for node in _code(ast.parse(text)) for m in _changes(node, source)}
    return sorted(found, key=lambda m: (m.start, m.stop, m.replacement))


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run, without texts, annotations and what type checkers read."""
    if isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field in {"annotation", "returns", "decorator_list"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child)


def _changes(node: ast.AST, source: _Source) -> Iterator[Mutant]:
    if isinstance(node, ast.stmt):
        yield from _of_statement(node, source)
    elif isinstance(node, ast.Compare | ast.BinOp | ast.BoolOp | ast.UnaryOp):
        yield from _of_operator(node, source)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield source.mutant(node, str(not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield source.mutant(node, str(node.value + 1))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield source.mutant(node.func, CALLS[node.func.id])


def _of_statement(node: ast.stmt, source: _Source) -> Iterator[Mutant]:
    """Leave out what raises or is called for its effect; turn a plain condition round."""
    if isinstance(node, ast.Raise) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield source.mutant(node, "pass")
    elif isinstance(node, ast.If):
        test = node.test
        if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield source.mutant(test, f"not ({source.code(test)})")


def _of_operator(
    node: ast.Compare | ast.BinOp | ast.BoolOp | ast.UnaryOp, source: _Source
) -> Iterator[Mutant]:
    """Exchange an operator for its neighbour."""
    match node:
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            parts = [source.code(left)]
            for op, right in zip(ops, comparators, strict=True):
                parts += [COMPARISONS[type(op)][0], source.code(right)]
            for place, op in enumerate(ops):
                changed = [*parts]
                changed[2 * place + 1] = COMPARISONS[type(op)][1]
                yield source.mutant(node, " ".join(changed))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            operands = [
                f"({source.code(part)})" if isinstance(part, ast.BinOp) else source.code(part)
                for part in (left, right)
            ]
            yield source.mutant(node, f" {ARITHMETIC[type(op)]} ".join(operands))
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            yield source.mutant(node, f"({word.join(f'({source.code(v)})' for v in values)})")
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield source.mutant(node, f"bool({source.code(operand)})")
