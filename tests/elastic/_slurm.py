"""A SLURM cluster of several nodes on one machine, with daemons, keys and ports of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.processes import HANG_TIMEOUT_S, free_port
from tests.support.ranks import ROOT

DAEMONS = ("munged", "slurmctld", "slurmd")

SPOT, URGENT = "spot", "urgent"
"""Partitions of the same nodes: jobs of the second one preempt those of the first one."""


def can_run_slurm() -> bool:
    """Whether Debian's slurm-wlm and munge are installed, and may be started."""
    return os.geteuid() == 0 and all(shutil.which(name) for name in DAEMONS)


@dataclass
class SlurmCluster:
    """Daemons that run, and the commands that talk to them."""

    folder: Path
    nodes: int
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Return what its commands need."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, **more: str) -> str:
        """Run one of SLURM's commands; return what it printed."""
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            timeout=HANG_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def run_quietly(self, *command: str) -> str:
        """Return what a command printed, whether it succeeded or not."""
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=HANG_TIMEOUT_S,
            check=False,
        )
        return done.stdout.strip()

    def submit(self, *options: str, **environment: str) -> str:
        """Submit a job; return its number."""
        out = self.folder / "job-%j.out"
        return self.run("sbatch", "--parsable", f"--output={out}", *options, **environment)

    def state(self, job: str) -> dict[str, str]:
        """Return what SLURM says of a job, by name: JobState, NumNodes, Restarts, ..."""
        words = self.run("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def output(self, job: str) -> str:
        """Return what a job has printed."""
        path = self.folder / f"job-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_until(self, found: Callable[[], bool], what: str, job: str) -> None:
        """Wait for something that a job does."""
        end = time.monotonic() + HANG_TIMEOUT_S
        while not found():
            told = f"{what}: {self.state(job)}\n{self.output(job)[-4000:]}"
            assert time.monotonic() < end, told
            time.sleep(0.2)

    def start(self) -> None:
        """Start the daemons, in the foreground, so that they end with the test."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        files = [f"--{what}-file={munge / what}" for what in ("pid", "seed")]
        keys = [f"--key-file={key}", f"--socket={munge}/socket"]
        self._spawn(["munged", "--foreground", "--force", *keys, *files])
        (self.folder / "slurm.conf").write_text(self._configuration(munge / "socket"))
        self._spawn(["slurmctld", "-D", "-i"])
        for node in range(1, self.nodes + 1):
            (self.folder / f"spool-{self.name(node)}").mkdir()
            self._spawn(["slurmd", "-D", "-N", self.name(node)])

    @staticmethod
    def name(node: int) -> str:
        """Return a node's name, which is its address too: Lightning connects to the first one."""
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
            f"AuthInfo=socket={munge},cred_expire=5",  # a requeued job waits for so long
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
        with (self.folder / f"daemon-{len(self.started)}.log").open("wb") as log:
            self.started.append(
                subprocess.Popen(
                    command,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def end(self) -> None:
        """Cancel what runs, and end the daemons, the last one first."""
        subprocess.run(
            ["scancel", "--user=root", "--full"],
            env=self.environment,
            timeout=HANG_TIMEOUT_S,
            check=False,
        )
        time.sleep(1.0)  # slurmstepd kills the tasks
        for daemon in reversed(self.started):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@contextmanager
def slurm_cluster(nodes: int) -> Iterator[SlurmCluster]:
    """Run a cluster within, in a folder with a short name: it has sockets."""
    folder = Path(tempfile.mkdtemp(prefix="ez-slurm-"))
    cluster = SlurmCluster(folder, nodes)
    try:
        cluster.start()
        end = time.monotonic() + HANG_TIMEOUT_S
        while cluster.run_quietly(
            "sinfo", "--noheader", "--format=%D %t", f"--partition={SPOT}"
        ) != (f"{nodes} idle"):
            logs = [path.read_text(errors="replace")[-500:] for path in folder.glob("daemon-*.log")]
            assert time.monotonic() < end, logs
            time.sleep(0.2)
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)
