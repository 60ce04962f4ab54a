"""What all tests share: the ranks that they run on, and which cases run now."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.engine._worker_pool import ForkServer, Pools
from tests.rotation import Rotation, parts_of, turn_of_commit

ROTATION = pytest.StashKey[Rotation]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a turn of the rotation be repeated, and a part of the tests be run."""
    group = parser.getgroup("rotation")
    group.addoption("--rotation", type=int, help="the turn of the cases that rotate")
    group.addoption(
        "--engine-cases", type=int, default=2, help="in a turn, of a test marked engine (2)"
    )
    group.addoption("--fuzz-cases", type=int, default=5_000, help="of each reader, in test-long")
    group.addoption("--part", help="of the tests selected: 2/4, or commit/4 for the turn's")


def pytest_configure(config: pytest.Config) -> None:
    """Find out whose turn it is."""
    turn = config.getoption("--rotation")
    config.stash[ROTATION] = Rotation(turn_of_commit() if turn is None else turn)


def pytest_report_header(config: pytest.Config) -> str:
    """Return what repeats this run's choice of cases."""
    rotation, wanted = config.stash[ROTATION], config.getoption("--part")
    line = f"cases that rotate: --rotation={rotation.turn}"
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
    yield
    if wanted := config.getoption("--part"):
        part, parts = rotation.part_of(wanted)
        dealt = parts_of([_test_of(item) for item in items], parts)
        others = [item for item, place in zip(items, dealt, strict=True) if place != part]
        items[:] = [item for item, place in zip(items, dealt, strict=True) if place == part]
        config.hook.pytest_deselected(items=others)


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
        if marker is None or any(map(item.get_closest_marker, ("essential", "long", "gpu"))):
            continue
        group = (_test_of(item), _value_of(item, marker.kwargs.get("per")))
        groups[group].append(item)
        counts[group] = marker.args[0]
    yield from (
        (counts[group], cases) for group, cases in groups.items() if len(cases) > counts[group]
    )


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


@pytest.fixture(scope="session", autouse=True)
def interrupts_are_heard() -> None:
    """Let SIGINT interrupt: what runs in the background of a shell, as CI may, ignores it.

    So would all processes that tests start, where they send it to themselves.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
