"""Private names of Lightning are listed, checked by ``setup()``, and each used in one file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.trainer import lightning as internals
from lightning_elastic_zero.trainer.lightning import NOT_CHECKED, PRIVATE_NAMES, RESUME_END
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

ROOT = Path(__file__).parents[2] / "lightning_elastic_zero"
LIGHTNING_MODULES = ("trainer",)
"""Packages that may use Lightning's private names."""

SOURCES = sorted(
    source
    for source in ROOT.rglob("*.py")
    if source.relative_to(ROOT).parts[0].removesuffix(".py") in LIGHTNING_MODULES
    and source.name != "schedulers.py"  # torch's names
)
LISTS = {"PRIVATE_NAMES", "NOT_CHECKED", "RESUME_END"}
OF_STRATEGIES = {*PRIVATE_NAMES["DeepSpeedStrategy"].split()}
KNOWN = {name for names in PRIVATE_NAMES.values() for name in names.split()} | {*NOT_CHECKED}
PRIVATE = re.compile(r"_[A-Za-z]\w*")
DOTTED = re.compile(r"_?[A-Za-z]\w*(\._?[A-Za-z]\w*)*")


def is_private(name: str) -> bool:
    return PRIVATE.fullmatch(name) is not None


def own_names(tree: ast.AST) -> set[str]:
    defined = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    stored = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }
    return {name for name in defined | stored if is_private(name)}


@cache
def own() -> set[str]:
    return {name for source in SOURCES for name in own_names(ast.parse(source.read_text()))}


INHERITED = {name for name in dir(DeepSpeedStrategy()) if is_private(name)}


def texts_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or node in docstrings:
            continue
        if isinstance(node.value, str):
            yield node.lineno, node.value


@cache
def used_in(source: Path) -> list[tuple[int, str]]:
    return list(used_by(tree_of(source)))


def used_by(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            of = ast.unparse(node.value)
            mine = of in {"self", "cls", "super()"} and node.attr not in INHERITED
            if not mine:
                yield node.lineno, node.attr
        elif isinstance(node, ast.FunctionDef) and node.name in INHERITED:
            yield node.lineno, node.name
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, a.name) for a in node.names if is_private(a.name))
    for line, text in texts_of(tree):
        parts = text.split(".") if DOTTED.fullmatch(text) else ()
        if any(is_private(part) for part in parts):
            yield line, text


def tree_of(source: Path) -> ast.Module:
    tree = ast.parse(source.read_text())
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.AnnAssign | ast.Assign) and LISTS & names_bound_by(node))
    ]
    return tree


def names_bound_by(node: ast.AnnAssign | ast.Assign) -> set[str]:
    targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
    return {ast.unparse(target) for target in targets}


def test_private_names_are_listed() -> None:
    unknown = [
        f"{source.relative_to(ROOT)}, line {line}: {name}"
        for source in SOURCES
        for line, name in used_in(source)
        if name not in KNOWN and name not in own() - INHERITED
    ]
    assert not unknown, f"list it in trainer/lightning.py: {unknown}"


def test_each_private_name_is_used_in_one_file() -> None:
    """A name that several files need is behind a function of trainer/lightning.py."""
    files: dict[str, set[str]] = {}
    for source in SOURCES:
        for _, name in used_in(source):
            # Only the strategy itself can override and call the names of its parent.
            if name in KNOWN and is_private(name) and name not in OF_STRATEGIES:
                files.setdefault(name, set()).add(source.name)
    shared = {name: sorted(names) for name, names in files.items() if len(names) > 1}
    assert not shared, f"move the access to a function of trainer/lightning.py: {shared}"


def test_listed_names_are_used() -> None:
    used = {name for source in SOURCES for _, name in used_in(source)}
    # ``trainer.lightning`` itself looks up the name of the barrier there.
    assert {name for name in KNOWN if is_private(name)} - used <= {"_checkpoint_connector"}
    assert RESUME_END not in used


@pytest.mark.parametrize("owner", PRIVATE_NAMES)
def test_a_missing_name_is_refused_at_setup(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(
        accelerator="cpu", strategy=ElasticDeepSpeedStrategy(), devices=1, logger=False
    )
    internals.check_lightning_release(trainer)
    monkeypatch.setitem(PRIVATE_NAMES, owner, f"{PRIVATE_NAMES[owner]} _gone")
    with pytest.raises(UnsupportedError, match=f"has no _gone in {owner}"):
        internals.check_lightning_release(trainer)


def test_a_renamed_barrier_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this barrier, ranks that resumed from different checkpoints would not be detected."""
    trainer = Trainer(
        accelerator="cpu", strategy=ElasticDeepSpeedStrategy(), devices=1, logger=False
    )
    monkeypatch.setattr(internals, "RESUME_END", "_CheckpointConnector.resumed")
    with pytest.raises(UnsupportedError, match="has no barrier"):
        internals.check_lightning_release(trainer)
