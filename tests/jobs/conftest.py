"""The undisturbed run, with which the jobs of all launchers are compared."""

from __future__ import annotations

from functools import partial

import pytest

from tests.jobs._job import EXAMPLE, Undisturbed, arguments, read_lines, steps_of
from tests.support.cli_programs import run_cli
from tests.support.launch import output_of_forked
from tests.support.processes import free_port
from tests.support.ranks import ForkServer


@pytest.fixture(scope="session")
def undisturbed(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return the steps of an undisturbed run on one device, without torchrun."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = ["fit", "--config", str(EXAMPLE / "fit.yaml"), *arguments(folder)]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    output_of_forked(fork_server, folder, partial(run_cli, command, folder, meeting))
    return {number: step for (_, number), step in steps_of(read_lines(folder)).items()}
