"""All names of DeepSpeed that the library uses are listed in ``engine.deepspeed``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from lightning_elastic_zero.engine.deepspeed import NAMES, UNCHECKED
from lightning_elastic_zero.engine.loss_scale import SCALE_FIELDS
from tests.engine._name_tables import CHECKED, CHECKED_WITHOUT_OPTIMIZER

ROOT = Path(__file__).parents[2] / "lightning_elastic_zero"
SOURCES = sorted(
    [
        ROOT / "api.py",
        *(ROOT / "engine").glob("*.py"),
        ROOT / "selftest.py",
        *(ROOT / "trainer").glob("*.py"),
    ]
)
"""Files in which ``engine`` is DeepSpeed's engine; in other files it is a ``LiveEngine``."""

KNOWN = {
    *UNCHECKED,
    *(name for table in NAMES.values() for names in table.values() for name in names.split()),
}

DEEPSPEEDS_OWN = (
    *("engine", "_engine", "optimizer", "_optimizer", "module_of(optimizer)"),
    *("optimizer_swapper", "swapper", "builder"),
)
"""Names of variables that hold an engine, an optimizer wrapper, its module, its swapper or an
operator builder."""

OTHERS = {
    "at_step": "of this library's LiveEngine",
    "backward": "documented: selftest_engine",
    "destroy": "documented: selftest_engine",
    "device": "documented: selftest_engine",
    "param_groups": "of torch's optimizers",
    "state": "of torch's optimizers",
    "step": "documented: selftest_engine",
}
"""Attributes of these variables that all releases have."""

PRIVATE = re.compile(r"_[A-Za-z]\w*")
INTERNALS = ROOT / "engine" / "deepspeed.py"
"""The only file that may use private names of DeepSpeed."""

TORCHS_OWN = {
    "_buffers",
    "_load_from_state_dict",
    "_load_state_dict_pre_hooks",
    "_non_persistent_buffers_set",
    "_post_accumulate_grad_hooks",
    "_version",
}
"""Private names of torch that ``engine`` uses, of modules and parameters."""

BY_NAME = {"delattr", "getattr", "hasattr", "setattr"}

ON_PARAMETERS = ("_hp_mapping", "ds_", "optim_fragment")
"""Prefixes of attributes that DeepSpeed adds to parameters."""


def holder(node: ast.expr) -> str:
    """Return the last name of an expression: ``optimizer`` of ``engine.optimizer``."""
    return ast.unparse(node).rpartition(".")[2]


def used_in(source: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Attribute):
            if holder(node.value) in DEEPSPEEDS_OWN or node.attr.startswith(ON_PARAMETERS):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            of, name = node.args[:2]
            if isinstance(name, ast.Constant) and (
                holder(of) in DEEPSPEEDS_OWN or str(name.value).startswith(ON_PARAMETERS)
            ):
                yield node.lineno, str(name.value)


def test_names_of_deepspeed_are_listed() -> None:
    found = [(source, *use) for source in SOURCES for use in used_in(source)]
    assert len(found) > len(KNOWN)
    unknown = [
        f"{source.relative_to(ROOT)}, line {line}: {name}"
        for source, line, name in found
        if name not in KNOWN and name not in OTHERS
    ]
    assert not unknown, f"list it in NAMES of engine/deepspeed.py: {unknown}"


def attributes_in(tree: ast.AST) -> Iterator[tuple[int, ast.expr, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=of, attr=name):
                yield node.lineno, of, name
            case ast.Call(func=ast.Name(id=function), args=[of, ast.Constant(value=str(name)), *_]):
                if function in BY_NAME:
                    yield node.lineno, of, name


def private_in(source: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source.read_text())
    if source == INTERNALS:  # without the tables that list the names
        tree.body = [node for node in tree.body if not isinstance(node, ast.AnnAssign | ast.Assign)]
    in_engine = source.parent.name == "engine"
    for line, of, name in attributes_in(tree):
        foreign = in_engine and ast.unparse(of) not in {"self", "cls", "super()"}
        deepspeeds = name in KNOWN or foreign or holder(of) in DEEPSPEEDS_OWN
        if PRIVATE.fullmatch(name) and deepspeeds and name not in TORCHS_OWN:
            yield line, name
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(name)) if name in KNOWN and node not in docstrings:
                if PRIVATE.fullmatch(name):
                    yield node.lineno, name


def test_private_names_are_used_in_one_file() -> None:
    found = {
        f"{name}, line {line}: {private}"
        for source in SOURCES
        for name in [str(source.relative_to(ROOT))]
        for line, private in private_in(source)
        if source != INTERNALS
    }
    assert not found, f"move the access to a function of engine/deepspeed.py: {sorted(found)}"
    listed = {name for name in KNOWN if PRIVATE.fullmatch(name)}
    assert {name for _, name in private_in(INTERNALS)} == listed


def test_listed_names_are_used() -> None:
    lines = "\n".join(source.read_text() for source in SOURCES)
    words = [
        node.value
        for node in ast.walk(ast.parse((ROOT / "engine" / "buffers.py").read_text()))
        if isinstance(node, ast.Constant)
    ]
    unused = [
        name
        for name in sorted(KNOWN)
        if lines.count(f".{name}") == 0 and lines.count(f'"{name}"') < 1 and name not in words
    ]
    assert not unused


def test_loss_scale_fields_include_that_of_old_wrappers() -> None:
    """Wrappers of releases without ``loss_scale_config`` always have ``cur_scale``."""
    assert NAMES["an optimizer without loss_scale_config"] == {"": "cur_scale"}
    assert "cur_scale" in SCALE_FIELDS


def test_each_object_is_checked_with_an_engine() -> None:
    engines = [*CHECKED.values(), *CHECKED_WITHOUT_OPTIMIZER.values()]
    checked = {title for titles in engines for title in titles}
    operators = {"deepspeed.ops", "the accelerator", "an operator's builder"}
    older = {"BF16_Optimizer without zero_grad", "an optimizer without loss_scale_config"}
    assert checked == NAMES.keys() - operators - older
