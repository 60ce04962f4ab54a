"""What all tests share: the ranks that they run on, and which cases run now."""

from __future__ import annotations

import random
import signal
from collections import defaultdict
from collections.abc import Iterator
from hashlib import sha256
from operator import itemgetter
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.support.devices import DEVICE, KINDS, chosen_device
from tests.support.processes import remove_shared_memory
from tests.support.ranks import ForkServer, Pools
from tests.support.tables import TABLES

ASKED_FOR = ("essential", "long", "gpu", "releases")
"""Markers of cases that are not counted among those of which only some run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that say how much is tried, and on which device."""
    group = parser.getgroup("long tests")
    group.addoption("--fuzz-cases", type=int, default=2_000, help="of each reader, in test-long")
    group.addoption("--kills", type=int, default=2, help="at each step of a save, in test-long")
    group.addoption("--corruptions", type=int, default=800, help="of each stage, in test-long")
    group.addoption("--exits", type=int, default=30, help="worlds that end, in test-long")
    group.addoption("--pr-8031", help="folder in which DeepSpeed pull request 8031 is installed")
    group.addoption("--hf-upstream", help="folder with the sources of transformers and accelerate")
    group = parser.getgroup("devices")
    group.addoption(
        "--device", choices=KINDS, help="of tests marked device (DS_ACCELERATOR, or what there is)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Find out what device there is; let Hypothesis try the same examples always, unless seeded."""
    config.stash[DEVICE] = chosen_device(config.getoption("--device"))
    fixed = config.getoption("--hypothesis-seed") is None
    settings.register_profile("tests", derandomize=fixed, database=None)
    settings.load_profile("tests")


def pytest_report_header(config: pytest.Config) -> str:
    """Return what repeats this run's random choices."""
    seed = config.getoption("--hypothesis-seed")
    drawn = "fixed" if seed is None else f"--hypothesis-seed={seed}"
    return f"device: {config.stash[DEVICE]}; random choices: {drawn}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long the cases beyond those that run in ``make test``, before ``-m`` selects.

    Which of them run depends on their names alone. Tests of one file with the same parameters run
    the same cases, so that they share fixtures.
    """
    tests: dict[str, list[tuple[str, pytest.Item]]] = defaultdict(list)
    for item in items:
        if not any(map(item.get_closest_marker, ASKED_FOR)):
            test, _, case = item.nodeid.partition("[")
            place = sha256(f"{test.partition('::')[0]} {case}".encode()).hexdigest()
            tests[test].append((place, item))
    for cases in tests.values():
        # Of a test that says nothing, all.
        count = _count(cases[0][1]) or len(cases)
        for _, beyond in sorted(cases, key=itemgetter(0))[count:]:
            beyond.add_marker(pytest.mark.long)
    # Where processes run tests side by side, each takes one file after another: those that take
    # long come first, so that no process begins with one of them at the end.
    items.sort(key=_place_of_folder)


def _count(test: pytest.Item) -> int | None:
    """Return how many cases of a test run in ``make test``, where not all do."""
    if marker := test.get_closest_marker("cases"):
        return int(marker.args[0])
    return 1 if test.get_closest_marker("engine") else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what processors do not have; draw the same numbers, whatever ran before a test."""
    torch.manual_seed(_seed(item.config))
    random.seed(_seed(item.config))
    if item.config.stash[DEVICE] == "cpu" and item.get_closest_marker("gpu"):
        pytest.skip("only a CUDA device has what it looks at")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts of this process to the one that shows them; remove what killed ranks left."""
    remove_shared_memory()
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["tables"] = [table.rows for table in TABLES]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add what a process has counted that ran a part of the tests."""
    for table, rows in zip(
        TABLES, getattr(node, "workeroutput", {}).get("tables", ()), strict=False
    ):
        table.add(rows)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what was tried, and what came of it."""
    for table in filter(lambda table: table.rows, TABLES):
        terminalreporter.section(table.title)
        for line in table.lines():
            terminalreporter.write_line(line)


LONG_FIRST = (
    "faults",
    "elastic",
    "trainer",
    "examples",
    "dist",
    "budget",
    "devices",
    "engine",
    "foreign",
    "releases",
)


def _place_of_folder(item: pytest.Item) -> int:
    """Return where the folder of a test stands in the order of tests."""
    folder = item.path.parent.name
    return LONG_FIRST.index(folder) if folder in LONG_FIRST else len(LONG_FIRST)


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """Return what a test's random choices are drawn from."""
    return _seed(pytestconfig)


def _seed(config: pytest.Config) -> int:
    return int(config.getoption("--hypothesis-seed") or 0)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Yield what all ranks are forked from."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def pools(fork_server: ForkServer) -> Iterator[Pools]:
    """Yield the worlds of ranks in which plain engines run."""
    started = Pools(fork_server)
    yield started
    started.close()


@pytest.fixture(scope="session")
def worlds(fork_server: ForkServer) -> Iterator[Pools]:
    """Yield the worlds of ranks in which Trainers run, one after another."""
    started = Pools(fork_server)
    yield started
    started.close()


@pytest.fixture(scope="module", autouse=True)
def no_memory_of_killed_ranks() -> Iterator[None]:
    """Remove it after each file: many kills would fill the memory before the session ends."""
    yield
    remove_shared_memory()


@pytest.fixture(scope="session", autouse=True)
def interrupts_are_heard() -> None:
    """Make SIGINT interrupt: what runs in the background of a shell, as CI may, ignores it.

    So would all processes that tests start, where they send it to themselves.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
