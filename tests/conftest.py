"""What all tests share: the ranks that they run on, and which cases run now."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from tests.devices._device_ranks import DEVICE, KINDS, chosen_device
from tests.engine._worker_pool import ForkServer, Pools
from tests.ports import remove_shared_memory
from tests.rotation import Rotation, parts_of, turn_of_commit
from tests.tables import TABLES

ROTATION = pytest.StashKey[Rotation]()
NOT_ROTATING = ("essential", "long", "gpu", "releases")
"""Markers of cases that run where they are asked for, whosever turn it is."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that repeat a turn of the rotation, and that run a part of the tests."""
    group = parser.getgroup("rotation")
    group.addoption("--rotation", type=int, help="the turn of the cases that rotate")
    group.addoption(
        "--engine-cases", type=int, default=1, help="in a turn, of a test marked engine (1)"
    )
    group.addoption("--fuzz-cases", type=int, default=2_000, help="of each reader, in test-long")
    group.addoption("--kills", type=int, default=2, help="at each step of a save, in test-long")
    group.addoption("--corruptions", type=int, default=800, help="of each stage, in test-long")
    group.addoption("--exits", type=int, default=30, help="worlds that end, in test-long")
    group.addoption("--part", help="of the tests selected: 2/4, or commit/4 for the turn's")
    group = parser.getgroup("devices")
    group.addoption(
        "--device", choices=KINDS, help="of tests marked device (DS_ACCELERATOR, or what there is)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Find out whose turn it is, and what device there is."""
    config.stash[DEVICE] = chosen_device(config.getoption("--device"))
    turn = config.getoption("--rotation")
    config.stash[ROTATION] = Rotation(turn_of_commit() if turn is None else turn)


def pytest_report_header(config: pytest.Config) -> str:
    """Return what repeats this run's choice of cases."""
    rotation, wanted = config.stash[ROTATION], config.getoption("--part")
    line = f"device: {config.stash[DEVICE]}; cases that rotate: --rotation={rotation.turn}"
    if wanted:
        part, parts = rotation.part_of(wanted)
        line += f" --part={part + 1}/{parts}"
    return line


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Mark what rotates as drawn or long, before ``-m`` selects; then take a part of it."""
    rotation = config.stash[ROTATION]
    for count, cases in _rotating(items, config.getoption("--engine-cases")):
        # By their parameters: tests of the same scenarios draw the same ones.
        names = [case.nodeid.partition("[")[2] for case in cases]
        drawn = rotation.chosen(names, count)
        for case, name in zip(cases, names, strict=True):
            case.add_marker(pytest.mark.drawn if name in drawn else pytest.mark.long)
    for count, tests in _groups_of_tests(items):
        now = rotation.chosen([*tests], count)
        for name, cases in tests.items():
            for case in cases:
                case.add_marker(pytest.mark.drawn if name in now else pytest.mark.long)
    # Where processes run tests side by side, each takes one file after another: those that take
    # long come first, so that no process begins with one of them at the end.
    items.sort(key=_place_of_folder)
    yield
    if wanted := config.getoption("--part"):
        part, parts = rotation.part_of(wanted)
        dealt = parts_of([_test_of(item) for item in items], parts)
        others = [item for item, place in zip(items, dealt, strict=True) if place != part]
        items[:] = [item for item, place in zip(items, dealt, strict=True) if place == part]
        config.hook.pytest_deselected(items=others)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what processors do not have."""
    if item.config.stash[DEVICE] == "cpu" and item.get_closest_marker("gpu"):
        pytest.skip("only a CUDA device has what it looks at")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts of this process to the one that shows them; remove what killed ranks left."""
    remove_shared_memory()
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["tables"] = [table.rows for table in TABLES]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:  # noqa: ANN401 - pytest-xdist has no types
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


def _rotating(
    items: list[pytest.Item], engine_cases: int
) -> Iterator[tuple[int, list[pytest.Item]]]:
    """Yield the groups of cases of which only so many run in a turn."""
    groups: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    counts: dict[tuple[str, str], int] = {}
    for item in items:
        marker = item.get_closest_marker("rotating")
        if marker is None and item.get_closest_marker("engine"):
            marker = pytest.mark.rotating(engine_cases).mark
        if marker is None or any(map(item.get_closest_marker, NOT_ROTATING)):
            continue
        group = (_test_of(item), _value_of(item, marker.kwargs.get("per")))
        groups[group].append(item)
        counts[group] = marker.args[0]
    yield from (
        (counts[group], cases) for group, cases in groups.items() if len(cases) > counts[group]
    )


def _groups_of_tests(
    items: list[pytest.Item],
) -> Iterator[tuple[int, dict[str, list[pytest.Item]]]]:
    """Yield the groups of tests of which only so many run in a turn: their cases by test."""
    groups: dict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    counts: dict[str, int] = {}
    for item in items:
        marker = item.get_closest_marker("rotating_tests")
        if marker is None or any(map(item.get_closest_marker, NOT_ROTATING)):
            continue
        group = marker.kwargs.get("group") or str(item.path)
        groups[group][_test_of(item)].append(item)
        counts[group] = marker.args[0]
    yield from ((counts[group], tests) for group, tests in groups.items())


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


def _test_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _value_of(item: pytest.Item, parameter: str | None) -> str:
    """Return the value of a parameter, as a text."""
    if parameter is None:
        return ""
    assert isinstance(item, pytest.Function)
    return str(item.callspec.params[parameter])


@pytest.fixture(scope="session")
def rotation(pytestconfig: pytest.Config) -> Rotation:
    """Return the turn, where a test chooses by itself."""
    return pytestconfig.stash[ROTATION]


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
