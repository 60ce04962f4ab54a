"""Room for the copies of background saves, on hosts and in containers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lightning_elastic_zero.core.memory import Demand, Pool, find_shortage, memory_pools

GB = 1_000_000_000
HOST = Pool("boot", "the host one", 100 * GB)
OTHER = Pool("other", "the host two", 40 * GB)
JOB = Pool("boot job", "the cgroup /job of one", 30 * GB)


def test_the_demands_of_a_host_are_added_up() -> None:
    of_rank = Demand(30 * GB, [HOST])
    assert not find_shortage([])
    assert not find_shortage([of_rank] * 3)
    assert find_shortage([of_rank] * 4) == (
        "the host one has 100.0 GB of free memory, and copies of the state of its 4 ranks need "
        "120.0 GB"
    )
    # Nine tenths may be used.
    assert find_shortage([of_rank, of_rank, Demand(31 * GB, [HOST])])


def test_every_pool_must_have_room() -> None:
    free = Demand(30 * GB, [HOST])
    assert not find_shortage([free, Demand(20 * GB, [HOST, JOB]), Demand(30 * GB, [OTHER])])
    assert find_shortage([free, Demand(30 * GB, [HOST, JOB])]).startswith("the cgroup /job of one")
    assert find_shortage([free, Demand(39 * GB, [OTHER])]).startswith("the host two has 40.0 GB")


def test_ranks_that_look_at_different_times_agree_on_the_least() -> None:
    later = replace(HOST, free_bytes=50 * GB)
    assert not find_shortage([Demand(20 * GB, [HOST]), Demand(20 * GB, [later])])
    assert find_shortage([Demand(20 * GB, [HOST]), Demand(30 * GB, [later])])


def test_a_demand_round_trips_as_plain_data() -> None:
    demand = Demand(7, [HOST, JOB])
    assert Demand.from_plain(demand.to_plain()) == demand


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Write what the system shows of itself, with 50 MB of free memory."""
    held = {
        "proc/meminfo": "MemTotal: 99999 kB\nMemAvailable:   50000 kB\nHugePages_Total: 0\n",
        "proc/sys/kernel/random/boot_id": "b007\n",
        "proc/self/cgroup": groups,
        **files,
    }
    for name, text in held.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "proc/self/ns").mkdir()
    (root / "proc/self/ns/cgroup").symlink_to("cgroup:[1]")
    return root


def found(root: Path) -> dict[str, int]:
    return {pool.key: pool.free_bytes for pool in memory_pools(root)}


def test_limits_of_cgroups_of_version_2(tmp_path: Path) -> None:
    """Each level that has one; files in memory can be dropped."""
    stat = "anon 1\ninactive_file 20\nactive_file 10\n"
    job, task = "sys/fs/cgroup/job", "sys/fs/cgroup/job/task"
    files = {
        f"{job}/memory.max": "1000\n",
        f"{job}/memory.current": "500\n",
        f"{job}/memory.stat": stat,
        f"{task}/memory.max": "max\n",
        f"{task}/memory.current": "500\n",
        f"{task}/memory.stat": stat,
    }
    root = system(tmp_path, "0::/job/task\n", files)
    assert found(root) == {"b007": 50000 * 1024, "b007 cgroup:[1] /job": 530}


def test_limits_of_cgroups_of_version_1(tmp_path: Path) -> None:
    """A container sees its own group as the root; without a limit the number is huge."""
    folder = "sys/fs/cgroup/memory"
    files = {
        f"{folder}/memory.limit_in_bytes": "1000\n",
        f"{folder}/memory.usage_in_bytes": "500\n",
        f"{folder}/memory.stat": "total_inactive_file 20\ntotal_active_file 10\n",
    }
    root = system(tmp_path, "8:pids:/x\n4:cpu,memory:/docker/a1\n0::/\n", files)
    assert found(root) == {"b007": 50000 * 1024, "b007 cgroup:[1] /docker/a1": 530}
    (root / folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert found(root) == {"b007": 50000 * 1024}


def test_a_system_that_does_not_tell_has_no_pools(tmp_path: Path) -> None:
    assert memory_pools(tmp_path) == []
    assert memory_pools()
