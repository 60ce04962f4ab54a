"""The SLURM example under SLURM: preempted, requeued, and resumed on other nodes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.jobs._job import (
    AT,
    NOTICED,
    STEPS,
    Undisturbed,
    arguments,
    check_steps,
    count_event,
    read_lines,
    repeated_steps,
    start_process,
)
from tests.support.processes import HANG_TIMEOUT_S, free_port
from tests.support.ranks import ROOT, environment

DAEMONS = ("munged", "slurmctld", "slurmd")

SPOT, URGENT = "spot", "urgent"
"""Partitions of the same nodes; jobs of the second one preempt those of the first."""


def can_run_slurm() -> bool:
    """Return whether the daemons of Debian's slurm-wlm and munge can be started."""
    return os.geteuid() == 0 and all(shutil.which(name) for name in DAEMONS)


@dataclass
class SlurmCluster:
    """Running daemons, and commands that use them."""

    folder: Path
    nodes: int
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(
        self, *command: str, more: Mapping[str, str] | None = None, must_succeed: bool = True
    ) -> str:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**self.environment, **(more or {})},
            capture_output=True,
            text=True,
            timeout=HANG_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0 or not must_succeed, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def submit(self, *options: str, **environment: str) -> str:
        out = self.folder / "job-%j.out"
        return self.run("sbatch", "--parsable", f"--output={out}", *options, more=environment)

    def state(self, job: str) -> dict[str, str]:
        """Return SLURM's properties of a job: JobState, NumNodes, Restarts, ..."""
        words = self.run("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def output(self, job: str) -> str:
        path = self.folder / f"job-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_until(self, condition: Callable[[], bool], event: str, job: str) -> None:
        end = time.monotonic() + HANG_TIMEOUT_S
        while not condition():
            message = f"no {event}: {self.state(job)}\n{self.output(job)[-4000:]}"
            assert time.monotonic() < end, message
            time.sleep(0.2)

    def start(self) -> None:
        """Start the daemons in the foreground, so that they end with the test."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        files = [f"--{name}-file={munge / name}" for name in ("pid", "seed")]
        keys = [f"--key-file={key}", f"--socket={munge}/socket"]
        self._spawn(["munged", "--foreground", "--force", *keys, *files])
        (self.folder / "slurm.conf").write_text(self._configuration(munge / "socket"))
        self._spawn(["slurmctld", "-D", "-i"])
        for node in range(1, self.nodes + 1):
            (self.folder / f"spool-{self.name(node)}").mkdir()
            self._spawn(["slurmd", "-D", "-N", self.name(node)])

    @staticmethod
    def name(node: int) -> str:
        """Return a node's name, which is also its address, because Lightning connects to it."""
        return f"127.0.0.{node + 1}"

    def _configuration(self, munge: Path) -> str:
        ports = [free_port() for _ in range(self.nodes)]
        host = socket.gethostname()
        nodes = [
            f"NodeName={self.name(n)} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1"
            for n, port in enumerate(ports, 1)
        ]
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={free_port()}",
            "AuthType=auth/munge",
            f"AuthInfo=socket={munge},cred_expire=5",  # A requeued job waits this long.
            "SlurmUser=root",
            "SlurmdUser=root",
            f"StateSaveLocation={self.folder / 'state'}",
            f"SlurmdSpoolDir={self.folder}/spool-%n",
            f"SlurmctldPidFile={self.folder}/ctld.pid",
            f"SlurmdPidFile={self.folder}/slurmd-%n.pid",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "MpiDefault=none",
            "SelectType=select/linear",
            "SlurmdParameters=config_overrides",
            "ReturnToService=2",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            *nodes,
            f"PartitionName={SPOT} Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=120",
            f"PartitionName={URGENT} Nodes=ALL PriorityTier=10 PreemptMode=OFF",
        ]
        (self.folder / "state").mkdir()
        return "\n".join(lines) + "\n"

    def _spawn(self, command: list[str]) -> None:
        log = self.folder / f"daemon-{len(self.started)}.log"
        self.started.append(start_process(command, log, self.environment))

    def end(self) -> None:
        """Cancel all jobs, and end the daemons in reverse order."""
        self.run("scancel", "--user=root", "--full", must_succeed=False)
        time.sleep(1.0)  # Until slurmstepd has killed the tasks.
        for daemon in reversed(self.started):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@contextmanager
def slurm_cluster(nodes: int) -> Iterator[SlurmCluster]:
    """Run a cluster in a folder with a short path, because it contains sockets."""
    folder = Path(tempfile.mkdtemp(prefix="ez-slurm-"))
    cluster = SlurmCluster(folder, nodes)
    try:
        cluster.start()
        end = time.monotonic() + HANG_TIMEOUT_S
        info = ("sinfo", "--noheader", "--format=%D %t", f"--partition={SPOT}")
        while cluster.run(*info, must_succeed=False) != f"{nodes} idle":
            logs = [path.read_text(errors="replace")[-500:] for path in folder.glob("daemon-*.log")]
            assert time.monotonic() < end, logs
            time.sleep(0.2)
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(not can_run_slurm(), reason="slurm-wlm and munge are not installed"),
]

EXAMPLE = ROOT / "examples" / "slurm" / "train.sbatch"


def submit(cluster: SlurmCluster, run: Path, *options: str) -> str:
    """Submit the example to the preemptible partition; it waits after a step."""
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
    return any(line.is_step and line.step >= step for line in read_lines(run))


def assert_lossless(run: Path, undisturbed: Undisturbed) -> None:
    lines = read_lines(run)
    check_steps(lines, undisturbed)
    assert max(line.step for line in lines) == STEPS
    assert list(repeated_steps(lines).values()) == [0]


def wait_for_state(cluster: SlurmCluster, job: str, state: str) -> None:
    cluster.wait_until(lambda: cluster.state(job)["JobState"] == state, state, job)


def wait_for_notice(cluster: SlurmCluster, job: str, run: Path) -> None:
    """Wait until ranks have received a signal, and release them."""
    cluster.wait_until(lambda: NOTICED in cluster.output(job), "signal", job)
    (run / f"hold-{AT}").unlink()


def test_a_preempted_job_continues_on_two_of_three_nodes_without_loss(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with slurm_cluster(3) as cluster:
        job = submit(cluster, run, "--nodes=2-3")
        assert cluster.state(job)["NumNodes"] == "3"
        since = time.time()
        urgent = cluster.submit(f"--partition={URGENT}", "--nodes=1", "--wrap=sleep 600")
        wait_for_notice(cluster, job, run)
        # NumNodes may still be 3 for a moment after the job runs again.
        requeued = {"JobState": "RUNNING", "Restarts": "1", "NumNodes": "2"}
        cluster.wait_until(
            lambda: requeued.items() <= cluster.state(job).items(), "two nodes after a requeue", job
        )
        wait_for_state(cluster, job, "COMPLETED")
        assert cluster.state(urgent)["JobState"] == "RUNNING"
        printed = cluster.output(job)
    assert "This run will be preempted (rank 0: SIGTERM on" in printed
    assert "last-preempted.ckpt (saved on 3 devices with ZeRO-3) on 2 devices" in printed
    assert_lossless(run, undisturbed)
    count_event("a SLURM job is preempted", read_lines(run), since)


def test_a_job_requeues_itself_before_its_time_limit(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """`--signal` sends SIGUSR1 to all tasks of the step; here twice, after SIGCONT."""
    run = tmp_path / "run"
    with slurm_cluster(2) as cluster:
        job = submit(cluster, run, "--nodes=2")
        for name in ("CONT", "USR1", "USR1"):
            cluster.run("scancel", f"--signal={name}", job)
        wait_for_notice(cluster, job, run)
        wait_for_state(cluster, job, "COMPLETED")
        assert cluster.state(job)["Restarts"] == "1"
        assert "SIGUSR1" in cluster.output(job)
    assert_lossless(run, undisturbed)


def test_a_requeued_job_uses_a_node_that_is_free_again(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with slurm_cluster(3) as cluster:
        urgent = cluster.submit(f"--partition={URGENT}", "--nodes=1", "--wrap=sleep 600")
        wait_for_state(cluster, urgent, "RUNNING")
        job = submit(cluster, run, "--nodes=2-3")
        assert cluster.state(job)["NumNodes"] == "2"
        cluster.run("scancel", urgent)
        wait_for_state(cluster, urgent, "CANCELLED")
        since = time.time()
        cluster.run("scancel", "--signal=USR1", job)
        wait_for_notice(cluster, job, run)
        wait_for_state(cluster, job, "COMPLETED")
        assert cluster.state(job)["NumNodes"] == "3"
        assert cluster.state(job)["Restarts"] == "1"
        printed = cluster.output(job)
    assert "last-preempted.ckpt (saved on 2 devices with ZeRO-3) on 3 devices" in printed
    assert_lossless(run, undisturbed)
    count_event("a SLURM job gains a node", read_lines(run), since)
