"""The options of the tests, the selection and order of their cases, and tables of results."""

from __future__ import annotations

import gc
from collections import defaultdict
from hashlib import sha256
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import settings

from tests.support.devices import DEVICE, KINDS, SHARED, chosen_device
from tests.support.processes import remove_shared_memory
from tests.support.tables import TABLES

ASKED_FOR = ("essential", "long", "gpu", "releases")
"""Cases with these markers are not subject to the limits of ``engine`` and ``cases``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for the number of random cases and for the device."""
    group = parser.getgroup("long tests")
    group.addoption("--fuzz-cases", type=int, default=2_000, help="per reader, in test-long")
    group.addoption("--kills", type=int, default=2, help="per step of a save, in test-long")
    group.addoption("--corruptions", type=int, default=800, help="per ZeRO stage, in test-long")
    group.addoption("--exits", type=int, default=30, help="worlds that exit, in test-long")
    group.addoption("--pr-8031", help="folder with an installation of DeepSpeed pull request 8031")
    group.addoption("--hf-upstream", help="folder with the sources of transformers and accelerate")
    group = parser.getgroup("devices")
    group.addoption(
        "--device",
        choices=KINDS,
        help="device of tests marked device (default: DS_ACCELERATOR, else cuda if available)",
    )
    group.addoption(
        "--share-gpu",
        action="store_true",
        help="run the ranks of tests marked device on one GPU, over gloo instead of NCCL",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the device; make Hypothesis generate the same examples each time, unless seeded."""
    gc.disable()  # Imports free nothing; collections take a tenth of their time.
    if hasattr(config, "workerinput") or not config.getoption("tx", None):
        # The controller of pytest-xdist runs no test: it would import torch before its workers do.
        config.pluginmanager.import_plugin("tests.support.fixtures")
    config.stash[DEVICE] = chosen_device(config.getoption("--device"))
    config.stash[SHARED] = config.getoption("--share-gpu")
    unseeded = config.getoption("--hypothesis-seed") is None
    settings.register_profile(
        "tests",
        derandomize=unseeded,
        database=None,
        deadline=None,  # Other processes may use the CPU.
        max_examples=25 if unseeded else 100,
    )
    settings.load_profile("tests")


def pytest_report_header(config: pytest.Config) -> str:
    """Report the device, and the option that repeats this run's random choices."""
    seed = config.getoption("--hypothesis-seed")
    choices = "fixed" if seed is None else f"--hypothesis-seed={seed}"
    return f"device: {config.stash[DEVICE]}; random choices: {choices}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that ``make test`` does not run as ``long``, before ``-m`` selects.

    The selection depends on the names of files and cases only. Tests of one file with the same
    parameters run the same cases, so that they share fixtures.
    """
    tests: dict[str, list[tuple[str, pytest.Item]]] = defaultdict(list)
    for item in items:
        if not any(map(item.get_closest_marker, ASKED_FOR)):
            test, _, case = item.nodeid.partition("[")
            digest = sha256(f"{item.path.stem} {case}".encode()).hexdigest()
            tests[test].append((digest, item))
    for cases in tests.values():
        count = _count(cases[0][1]) or len(cases)
        for _, excess in sorted(cases, key=itemgetter(0))[count:]:
            excess.add_marker(pytest.mark.long)
    # pytest-xdist gives each worker one file after another. Slow files come first, so that no
    # worker starts one at the end; only those without ranks run while the fork server imports.
    items.sort(key=_folder_order)


def pytest_collection_finish() -> None:
    """Exempt the imported modules and the items from collections, which take seconds otherwise."""
    gc.freeze()
    gc.enable()


def _count(test: pytest.Item) -> int | None:
    """Return how many cases of a test run in ``make test``, or None for all."""
    if marker := test.get_closest_marker("cases"):
        return int(marker.args[0])
    return 1 if test.get_closest_marker("engine") else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send this worker's tables to the controller; remove shared memory of killed ranks."""
    remove_shared_memory()
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["tables"] = [table.rows for table in TABLES]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the tables of a worker."""
    for table, rows in zip(
        TABLES, getattr(node, "workeroutput", {}).get("tables", ()), strict=False
    ):
        table.add(rows)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the tables of results."""
    for table in filter(lambda table: table.rows, TABLES):
        terminalreporter.section(table.title)
        for line in table.lines():
            terminalreporter.write_line(line)


ORDER = (
    "house",
    "test_store_faults",
    "checkpoint",
    "jobs",
    "trainer",
    "examples",
    "coordination",
    "engine",
    "formats",
    "releases",
    "integrations",
    "storage",
    "tools",
)


def _folder_order(item: pytest.Item) -> int:
    names = {item.path.stem, item.path.parent.name}
    return min((ORDER.index(name) for name in names.intersection(ORDER)), default=len(ORDER))
