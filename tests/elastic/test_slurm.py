"""The SLURM example, run under SLURM: preempted, requeued, gone on elsewhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.elastic._job import STEPS, arguments
from tests.elastic._slurm import SPOT, URGENT, SlurmCluster, can_run_slurm, slurm_cluster
from tests.elastic._steps import (
    Undisturbed,
    check_steps,
    read_lines,
    seconds_to_next_step,
    steps_taken_again,
)
from tests.support.ranks import ROOT, environment
from tests.support.tables import ELASTIC

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(not can_run_slurm(), reason="slurm-wlm and munge are not installed"),
]

EXAMPLE = ROOT / "examples" / "slurm" / "train.sbatch"
AT = 12

AGREED = "all ranks stop after the same batch"
"""What rank 0 logs as soon as they have agreed."""


def submit(cluster: SlurmCluster, run: Path, *options: str) -> str:
    """Submit the example to nodes that may be preempted; it waits after a step."""
    run.mkdir()
    (run / f"hold-{AT}").touch()
    settings = {
        **environment(),
        "PYTHON": sys.executable,
        "RUN_DIR": str(run),
        "GLOO_SOCKET_IFNAME": "lo",
        "SLURM_CONF": cluster.environment["SLURM_CONF"],
    }
    command = (f"--partition={SPOT}", *options, str(EXAMPLE), *arguments(run))
    job = cluster.submit(*command, **settings)
    cluster.wait_until(lambda: at_step(run, AT), f"step {AT}", job)
    return job


def at_step(run: Path, step: int) -> bool:
    """Whether a rank has taken a step."""
    return any(line.is_step and line.step >= step for line in read_lines(run))


def test_a_preempted_job_goes_on_on_other_nodes(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """From three nodes to two, while an urgent job has the third: no step is lost or changed."""
    run = tmp_path / "run"
    with slurm_cluster(3) as cluster:
        job = submit(cluster, run, "--nodes=2-3")
        assert cluster.state(job)["NumNodes"] == "3"
        since = time.time()
        urgent = cluster.submit(f"--partition={URGENT}", "--nodes=1", "--wrap=sleep 600")
        cluster.wait_until(lambda: AGREED in cluster.output(job), "agreement", job)
        (run / f"hold-{AT}").unlink()
        # Seen once: it ran again, and three nodes stood there still.
        requeued = {"JobState": "RUNNING", "Restarts": "1", "NumNodes": "2"}
        cluster.wait_until(
            lambda: requeued.items() <= cluster.state(job).items(), "two nodes after a requeue", job
        )
        cluster.wait_until(lambda: cluster.state(job)["JobState"] == "COMPLETED", "end", job)
        assert cluster.state(urgent)["JobState"] == "RUNNING"
        printed = cluster.output(job)
    assert "This run will be preempted (rank 0: SIGTERM on" in printed
    assert "last-preempted.ckpt (saved on 3 devices with ZeRO-3) on 2 devices" in printed
    lines = read_lines(run)
    check_steps(lines, undisturbed)
    assert max(line.step for line in lines) == STEPS
    again = steps_taken_again(lines)
    assert list(again.values()) == [0]
    ELASTIC.count("a SLURM job is preempted", "tried")
    ELASTIC.count("a SLURM job is preempted", "steps taken again", 0)
    seconds = round(seconds_to_next_step(lines, since))
    ELASTIC.count("a SLURM job is preempted", "seconds to the next step", seconds)


def test_a_job_is_requeued_before_its_time_limit(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """SIGUSR1, as ``--signal`` sends it, to all tasks of the step; twice, and SIGCONT before."""
    run = tmp_path / "run"
    with slurm_cluster(2) as cluster:
        job = submit(cluster, run, "--nodes=2")
        for name in ("CONT", "USR1", "USR1"):
            cluster.run("scancel", f"--signal={name}", job)
        cluster.wait_until(lambda: AGREED in cluster.output(job), "agreement", job)
        (run / f"hold-{AT}").unlink()
        cluster.wait_until(lambda: cluster.state(job)["JobState"] == "COMPLETED", "end", job)
        assert cluster.state(job)["Restarts"] == "1"
        assert "SIGUSR1" in cluster.output(job)
    lines = read_lines(run)
    check_steps(lines, undisturbed)
    assert list(steps_taken_again(lines).values()) == [0]


def test_a_requeued_job_takes_a_node_that_is_free_again(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """From two nodes to three: an urgent job that had the third one has ended."""
    run = tmp_path / "run"
    with slurm_cluster(3) as cluster:
        urgent = cluster.submit(f"--partition={URGENT}", "--nodes=1", "--wrap=sleep 600")
        cluster.wait_until(lambda: cluster.state(urgent)["JobState"] == "RUNNING", "start", urgent)
        job = submit(cluster, run, "--nodes=2-3")
        assert cluster.state(job)["NumNodes"] == "2"
        cluster.run("scancel", urgent)
        cluster.wait_until(lambda: cluster.state(urgent)["JobState"] == "CANCELLED", "end", urgent)
        since = time.time()
        cluster.run("scancel", "--signal=USR1", job)
        cluster.wait_until(lambda: AGREED in cluster.output(job), "agreement", job)
        (run / f"hold-{AT}").unlink()
        cluster.wait_until(lambda: cluster.state(job)["JobState"] == "COMPLETED", "end", job)
        assert cluster.state(job)["NumNodes"] == "3"
        assert cluster.state(job)["Restarts"] == "1"
        printed = cluster.output(job)
    assert "last-preempted.ckpt (saved on 2 devices with ZeRO-3) on 3 devices" in printed
    lines = read_lines(run)
    check_steps(lines, undisturbed)
    assert max(line.step for line in lines) == STEPS
    assert list(steps_taken_again(lines).values()) == [0]
    ELASTIC.count("a SLURM job gains a node", "tried")
    ELASTIC.count("a SLURM job gains a node", "steps taken again", 0)
    seconds = round(seconds_to_next_step(lines, since))
    ELASTIC.count("a SLURM job gains a node", "seconds to the next step", seconds)
