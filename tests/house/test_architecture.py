"""The import rules of CONTRIBUTING.md, and further rules defined below."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.processes import output_of

PACKAGE = "lightning_elastic_zero"
ROOT = Path(__file__).parents[2] / PACKAGE

LAZY_INIT = "__init__"
"""Provides every public name, but imports only the modules in EAGER on import."""

_PAGE = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
_ROWS = re.findall(r"^\| `(\w+)` \| (.*)\|$", _PAGE, re.MULTILINE)
MAY_IMPORT = {module: set(re.findall(r"`(\w+)`", names)) for module, names in _ROWS}
"""Other modules or packages that each module or package may import."""

EAGER = MAY_IMPORT.pop(LAZY_INIT)

STANDARD_LIBRARY_ONLY = (
    *("errors.py", "core/cuts.py", "core/grid.py", "core/layout.py", "core/partition.py"),
    "core/manifest.py",
)
"""Files that may import only the standard library and each other."""

ONLY_IN: dict[str, set[str]] = {
    "deepspeed": {"engine"},
    "lightning": {"trainer", "integrations"},
    "pytorch_lightning": set(),
    "torch.distributed": {"coordination", "engine"},
    # Used in one process, without a process group, to read and write its own files.
    "torch.distributed.checkpoint": {"formats"},
}
"""The modules that may import each package; the longest matching name counts."""

NO_COMMUNICATION = {"engine": {"get_global_rank", "get_rank", "get_world_size"}}
"""Functions of torch.distributed that modules without collectives may use."""

DEEPSPEED_COLLECTIVES = {
    ("engine/buffers.py", "all_gather"),
    ("engine/buffers.py", "broadcast"),
    ("engine/muon.py", "all_gather"),
}
"""Permitted collectives: they gather partitions in DeepSpeed's own groups, as its optimizers do."""

RESOLVES_PATHS = {"absolute", "abspath", "realpath", "resolve"}
"""Functions that make a path absolute or resolve links; their results differ slightly."""

OWN_READERS = {
    *("storage/paths.py", "storage/own_files.py"),  # folders in the latter
    *("core/memory.py", "core/process_state.py"),  # /proc and /sys
    *("coordination/ranks.py", "trainer/monitor.py"),  # /proc
    *("checkpoint/file_queue.py", "checkpoint/save.py", "trainer/launch.py"),  # installed programs
    *("checkpoint/directory_check.py", "selftest.py"),  # a folder that they have made
    *("storage/node_files.py", "storage/node_store.py"),  # without following links
    *("storage/file_write.py", "core/requirements.py"),  # new files; metadata of packages
}
"""Files that open files themselves. Others call ``storage.paths``, which refuses pipes."""

LOADS_WITHOUT: dict[str, set[str]] = {
    PACKAGE: {"lightning", "deepspeed", "torch"},
    f"{PACKAGE}.core.layout": {"lightning", "deepspeed", "torch"},
    f"{PACKAGE}.core.manifest": {"lightning", "deepspeed", "torch"},
    f"{PACKAGE}.core.partition": {"lightning", "deepspeed", "torch"},
    f"{PACKAGE}.formats.open": {"lightning", "deepspeed"},
    f"{PACKAGE}.formats.dumps": {"lightning", "deepspeed"},
    f"{PACKAGE}.checkpoint.save": {"lightning", "deepspeed"},
    f"{PACKAGE}.cli": {"lightning", "deepspeed", "torch"},
    f"{PACKAGE}.tools.verification": {"lightning", "deepspeed"},
    f"{PACKAGE}.tools.conversion": {"lightning", "deepspeed"},
}
"""Packages that importing a module must not load."""

SOURCES = sorted(ROOT.rglob("*.py"))


def unit_of(source: Path) -> str:
    first = source.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def unit_of_name(dotted: str) -> str:
    _, _, rest = dotted.partition(".")
    first = rest.split(".")[0]
    is_module = (ROOT / first).is_dir() or (ROOT / f"{first}.py").is_file()
    return first if first and is_module else LAZY_INIT


def assert_in_each_source(wrong_in: Callable[[Path], object], *units: str) -> None:
    wrong = {
        str(source.relative_to(ROOT)): found
        for source in SOURCES
        if not units or unit_of(source) in units
        if (found := wrong_in(source))
    }
    assert not wrong, wrong


@cache
def tree_of(source: Path) -> ast.Module:
    return ast.parse(source.read_text(encoding="utf-8"), filename=str(source))


@cache
def nodes_of(source: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(source)))


def names_imported(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names):
            yield from (f"{module}.{alias.name}" for alias in names)
        case ast.Call(
            func=ast.Attribute(attr="import_module" | "__import__")
            | ast.Name(id="import_module" | "__import__"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            yield name
        case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
            yield "torch.distributed"


@cache
def imports_of(source: Path) -> list[tuple[int, str]]:
    return [
        (node.lineno, name)
        for node in nodes_of(source)
        if isinstance(node, ast.stmt | ast.expr)
        for name in names_imported(node)
    ]


def is_or_is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def runs_at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes that run on import: not those of functions and TYPE_CHECKING blocks."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending.extend(node.orelse)
            continue
        yield node
        pending.extend(ast.iter_child_nodes(node))


def test_folders_of_tests_mirror_the_package() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    folders = {path.parent.name for path in (ROOT.parent / "tests").glob("*/*.py")}
    assert folders - packages == {"house", "examples", "jobs", "releases", "support"}
    assert folders >= packages


def test_the_table_has_no_cycle() -> None:
    order = list(graphlib.TopologicalSorter(MAY_IMPORT).static_order())
    assert set(order) == set(MAY_IMPORT)


def test_every_module_has_a_row() -> None:
    units = {unit_of(source) for source in SOURCES} - {LAZY_INIT}
    assert units == set(MAY_IMPORT), (
        f"The table of CONTRIBUTING.md lacks the modules {sorted(units - set(MAY_IMPORT))} of "
        f"{PACKAGE}, and lists missing ones: {sorted(set(MAY_IMPORT) - units)}. Add a row with the "
        "permitted imports of a new module, and describe the module above the table."
    )


def test_imports_follow_the_table() -> None:
    def wrong_in(source: Path) -> list[str]:
        unit = unit_of(source)
        allowed = {*MAY_IMPORT[unit], unit}
        return [
            f"line {line}: {name} ({unit} may import only {sorted(allowed)})"
            for line, name in imports_of(source)
            if is_or_is_in(name, PACKAGE) and unit_of_name(name) not in allowed
        ]

    assert_in_each_source(wrong_in, *MAY_IMPORT)


def test_imports_are_absolute() -> None:
    assert_in_each_source(
        lambda source: [
            f"line {node.lineno}: a relative import"
            for node in nodes_of(source)
            if isinstance(node, ast.ImportFrom) and node.level
        ]
    )


def test_third_party_imports_follow_the_table() -> None:
    assert_in_each_source(
        lambda source: [
            f"line {line}: {name} (only in {sorted(ONLY_IN[rule]) or 'no module'})"
            for line, name in imports_of(source)
            for rule in [max((r for r in ONLY_IN if is_or_is_in(name, r)), key=len, default="")]
            if rule and unit_of(source) not in ONLY_IN[rule]
        ],
        *MAY_IMPORT,
    )


def test_only_coordination_uses_collectives() -> None:
    def wrong_in(source: Path) -> set[str]:
        imported_by_name = {
            name.removeprefix("torch.distributed.")
            for _, name in imports_of(source)
            if name.startswith("torch.distributed.")
        }
        used = {
            node.attr
            for node in nodes_of(source)
            if isinstance(node, ast.Attribute)
            and ast.unparse(node.value) in {"distributed", "dist", "torch.distributed"}
        }
        return (imported_by_name | used) - NO_COMMUNICATION[unit_of(source)]

    assert_in_each_source(wrong_in, *NO_COMMUNICATION)


def test_collectives_of_deepspeed_are_listed() -> None:
    def used_in(source: Path) -> set[tuple[str, str]]:
        by_name = {name for _, name in imports_of(source) if name.startswith("deepspeed.comm.")}
        used = {
            node.attr
            for node in nodes_of(source)
            if isinstance(node, ast.Attribute)
            and ast.unparse(node.value) in {"comm", "deepspeed.comm"}
        }
        name = str(source.relative_to(ROOT))
        return {(name, called) for called in by_name | (used - {"get_rank", "get_world_size"})}

    assert {found for source in SOURCES for found in used_in(source)} == DEEPSPEED_COLLECTIVES


def test_paths_are_made_absolute_in_one_file() -> None:
    uses = {
        f"{source.relative_to(ROOT)}, line {line}: {name}"
        for source in SOURCES
        for line, name in [
            *((n.lineno, n.attr) for n in nodes_of(source) if isinstance(n, ast.Attribute)),
            *((line, name.rpartition(".")[2]) for line, name in imports_of(source)),
        ]
        if name in RESOLVES_PATHS
    }
    elsewhere = {use for use in uses if not use.startswith("storage/paths.py")}
    assert not elsewhere, f"call check_local_path or real_path of storage: {sorted(elsewhere)}"
    assert uses


def test_files_are_opened_in_one_file() -> None:
    readers = {
        f"{name}, line {node.lineno}: {ast.unparse(node)}"
        for source in SOURCES
        if (name := source.relative_to(ROOT).as_posix()) not in OWN_READERS
        for node in nodes_of(source)
        if isinstance(node, ast.Call) and opens_to_read(node)
    }
    assert not readers, f"call read_file or open_file, which never wait: {sorted(readers)}"


def opens_to_read(call: ast.Call) -> bool:
    match call:
        case ast.Call(func=ast.Name("open") | ast.Attribute(value=ast.Name("os"), attr="open")):
            return True
        case ast.Call(func=ast.Attribute(attr="open"), args=[ast.Constant(str(mode))]):
            return "r" in mode
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in {"read_bytes", "read_text"} or (name, call.args) == ("open", [])
    return False


def test_the_core_is_pure() -> None:
    core = {PACKAGE, *sys.stdlib_module_names}
    wrong = [
        f"{name}, line {line}: {imported}"
        for name in STANDARD_LIBRARY_ONLY
        for line, imported in imports_of(ROOT / name)
        if imported.split(".")[0] not in core
        or (
            is_or_is_in(imported, PACKAGE)
            and not any(
                is_or_is_in(imported, f"{PACKAGE}.{other.removesuffix('.py').replace('/', '.')}")
                for other in STANDARD_LIBRARY_ONLY
            )
        )
    ]
    assert not wrong, wrong


def test_package_init_is_lazy() -> None:
    imported = {
        unit_of_name(name)
        for node in runs_at_import(tree_of(ROOT / "__init__.py"))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in names_imported(node)
        if is_or_is_in(name, PACKAGE)
    }
    assert imported <= EAGER


@pytest.mark.long
def test_importing_loads_no_more_than_needed() -> None:
    """One process imports the modules in order, starting with the most restricted ones."""
    order = sorted(LOADS_WITHOUT, key=lambda module: -len(LOADS_WITHOUT[module]))
    program = "".join(f"import sys, {m}; print('{m}', *sys.modules)\n" for m in order)
    printed = output_of((sys.executable, "-c", program), ROOT.parent, os.environ)
    loaded = {line.split()[0]: set(line.split()[1:]) for line in printed.splitlines()}
    assert list(loaded) == order
    assert not {
        m: LOADS_WITHOUT[m] & names for m, names in loaded.items() if LOADS_WITHOUT[m] & names
    }
