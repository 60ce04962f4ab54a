"""Runs tests on a changed file: each time in a process forked from one that has imported the rest.

Nothing is written: the forked process is given the changed text when it imports the file. What is
dear to import (torch, pytest, DeepSpeed) is there before; this package never is.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, SourceFileLoader
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import CodeType
from typing import Any

from tests.mutation._operators import Mutant
from tests.timeouts import HANG_TIMEOUT_S

EXAMPLES = 20
"""Of each Hypothesis test. They are not made smaller: that one fails is enough."""

MOST_CPU_S = 120
"""Of one process: who computes for longer does not come to an end, and is noticed by that."""

MOST_BYTES = 8 << 30
"""Of one process: a changed size may be one that no machine has."""

_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Case:
    """One change of one file, or none, and the tests that are to notice it."""

    package: Path
    file: str
    source: str
    tests: tuple[str, ...]
    mutant: Mutant | None = None

    @property
    def key(self) -> str:
        """What the table of survivors calls it."""
        return f"{self.file}: {self.mutant.name() if self.mutant else 'as it is'}"

    @property
    def module(self) -> str:
        """The file's name as a module."""
        return ".".join([self.package.name, *Path(self.file).with_suffix("").parts])

    def unchanged(self) -> Case:
        """Return the same file without a change."""
        return replace(self, mutant=None)

    def text(self) -> str:
        """Return the file's text with the change."""
        return self.mutant.applied_to(self.source) if self.mutant else self.source


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests said of a case."""

    case: Case
    survived: bool
    noticed_by: str

    def __str__(self) -> str:
        line = self.case.mutant.line if self.case.mutant else 0
        how = "SURVIVED" if self.survived else "noticed "
        return f"{how}  {self.case.file}:{line}  {self.case.key}  {self.noticed_by}"


def import_for_tests() -> None:
    """Import what the tests need but not this package, for all processes that are forked."""
    for module in ("hypothesis", "numpy", "pytest", "torch.utils.data", "xxhash"):
        importlib.import_module(module)


def import_for_ranks() -> None:
    """Import what ranks need beside that."""
    from tests.engine import _fork_server
    from tests.engine._worker_pool import environment

    os.environ.update(environment())
    torch: Any = importlib.import_module("torch")
    torch.use_deterministic_algorithms(mode=True)  # which imports the compiler
    torch.use_deterministic_algorithms(mode=False)
    for module in ("deepspeed", *_fork_server.IMPORTED):
        if not module.startswith("lightning_elastic_zero"):
            with suppress(ModuleNotFoundError):  # Not in each release.
                importlib.import_module(module)


def outcomes(cases: Sequence[Case], jobs: int) -> Iterator[Outcome]:
    """Run the cases, ``jobs`` at a time, and yield what came of each as it ends."""
    waiting = list(reversed(cases))
    running: dict[int, tuple[Case, ForkProcess, Connection, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            case = waiting.pop()
            ours, theirs = _FORK.Pipe(duplex=False)
            process = _FORK.Process(target=_run, args=(case, theirs))
            process.start()
            theirs.close()
            running[process.sentinel] = (case, process, ours, time.monotonic() + HANG_TIMEOUT_S)
        wait(list(running), min(end for *_, end in running.values()) - time.monotonic())
        for sentinel, (case, process, ours, end) in list(running.items()):
            if process.is_alive() and time.monotonic() < end:
                continue
            assert process.pid
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and whoever it has started
            process.join()
            del running[sentinel]
            yield _outcome(case, ours)


def _outcome(case: Case, connection: Connection) -> Outcome:
    try:
        status, by = connection.recv()
    except EOFError:
        return Outcome(case, survived=False, noticed_by="no end, or no memory")
    finally:
        connection.close()
    # Tests that passed, tests that failed, and tests that could not be imported.
    assert status in {0, 1, 2}, f"pytest exits with {status} for {case.key}: {by}"
    return Outcome(case, survived=status == 0, noticed_by=by)


class _Noticed:
    """A plugin of pytest: takes the settings of this check, and keeps what failed first."""

    by = ""

    def pytest_sessionstart(self) -> None:
        """Replace the profile that the tests' conftest has chosen."""
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile(
            "mutants",
            max_examples=EXAMPLES,
            phases=phases,
            deadline=None,
            database=None,
            derandomize=True,
        )
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401 (pytest's, imported late)
        self._keep(report)

    def pytest_collectreport(self, report: Any) -> None:  # noqa: ANN401
        self._keep(report)

    def _keep(self, report: Any) -> None:  # noqa: ANN401
        if report.failed and not self.by:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.by = f"{report.nodeid}: {crash.message.splitlines()[0] if crash else ''}"


def _run(case: Case, connection: Connection) -> None:
    """Run a case's tests in this process, which was forked for it."""
    import pytest

    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    assert not [name for name in sys.modules if name.split(".")[0] == case.package.name]
    sys.meta_path.insert(0, _Finder(case))
    if "deepspeed" in sys.modules:
        _fork_ranks_from_here()
    noticed = _Noticed()
    # Without pytest's own messages of assertions, nothing has to be imported by its own way.
    options = ["-x", "-q", "--assert=plain", "-o", "cache_dir=.cache/mutants"]
    if not any("::" in test for test in case.tests):  # Those named one by one run, however long.
        options += ["-m", "not (long or gpu or releases)"]
    status = pytest.main([*options, *case.tests], plugins=[noticed])
    connection.send((int(status), noticed.by))


class _Finder:
    """Finds the one changed module."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return where a module is, if it is the one; see ``sys.meta_path``."""
        if name != self._case.module:
            return None
        file = str(self._case.package / self._case.file)
        loader = _Loader(name, file, self._case.text())
        return importlib.util.spec_from_file_location(name, file, loader=loader)


class _Loader(SourceFileLoader):
    """Loads a module from the text that it is given."""

    def __init__(self, name: str, file: str, text: str) -> None:
        super().__init__(name, file)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        """Compile the text, whatever has been compiled of the file before."""
        return compile(self._text, self.path, "exec")


def _fork_ranks_from_here() -> None:
    """Make ranks be forked from a fork of this process, which has imported what they need."""
    from tests.engine import _fork_server, _worker_pool

    def start_process(server: _worker_pool.ForkServer) -> Connection:
        """Do what ``ForkServer`` does, in a fork where that starts a process."""
        folder = Path(server._folder.name)
        with _worker_pool.listening(folder / "nursery") as listener:
            pid = os.fork()
            if not pid:
                try:
                    warnings.resetwarnings()  # pytest's make errors of them.
                    _fork_server.main(str(folder))
                finally:
                    os._exit(0)
            server._connection = _worker_pool._accept(listener)
            assert server._connection.recv() == pid
        return server._connection

    server_class: Any = _worker_pool.ForkServer
    server_class._start_process = start_process
