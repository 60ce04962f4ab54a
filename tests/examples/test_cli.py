"""The examples' command line: configs, resume on other devices, logged events."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.cli_programs import CLI, print_config, run_cli
from tests.support.launch import output_of_forked
from tests.support.processes import free_port, output_of
from tests.support.ranks import ForkServer, environment


def checkpoint_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return the logged scalars of checkpoints in all runs of a folder: values by step, by name."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag.removeprefix("checkpoint/"): {e.step: e.value for e in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
        if tag.startswith("checkpoint/")
    }


ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SMALL = (
    "--data.samples_per_epoch=130",  # 3 steps of 48, of which the last is filled up
    "--model.n_embd=32",
    "--model.n_layer=1",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
)


def fit_on(fork_server: ForkServer, folder: Path, devices: int, *arguments: str) -> str:
    """Run ``fit`` on this many ranks, started as a launcher does; return the output of rank 0."""
    command = ["fit", *arguments, f"--trainer.devices={devices}"]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    calls = [
        partial(run_cli, command, folder, {**shared, "LOCAL_RANK": str(rank)})
        for rank in range(devices)
    ]
    return output_of_forked(fork_server, folder, *calls)


def fit_alone(folder: Path, devices: int, *arguments: str) -> str:
    """Run ``fit`` like a user, with other ranks started by Lightning; return the output of all."""
    command = [sys.executable, str(CLI), "fit", *arguments, f"--trainer.devices={devices}"]
    return output_of(command, folder, {**environment(), "RUN_DIR": str(folder)})


@pytest.mark.engine
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_config_parses(config: Path, fork_server: ForkServer, tmp_path: Path) -> None:
    """Each YAML is valid, names the strategy, and sets the folder in which "last" is found."""
    output = output_of_forked(fork_server, tmp_path, partial(print_config, config, tmp_path))
    assert "ElasticDeepSpeedStrategy" in output
    assert f"dirpath: {tmp_path}/checkpoints" in output


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize("launcher", ["forked", pytest.param("lightning", marks=pytest.mark.long)])
def test_resume_on_other_devices(launcher: str, fork_server: ForkServer, tmp_path: Path) -> None:
    """``--trainer.devices 3 --ckpt_path last`` continues a run of 2 from the middle of an epoch.

    CheckpointMonitor, named in the YAML, logs the saves of both runs and the load between them.
    """
    config = yaml.safe_load((ROOT / "configs" / "zero3.yaml").read_text())
    trainer = config["trainer"]
    trainer["callbacks"][0]["init_args"].update(every_n_train_steps=2, save_top_k=-1)
    trainer["callbacks"].append({"class_path": "lightning_elastic_zero.CheckpointMonitor"})
    (tmp_path / "monitored.yaml").write_text(yaml.safe_dump(config))
    fit = partial(fit_alone if launcher == "lightning" else partial(fit_on, fork_server), tmp_path)
    command = ["--config", str(tmp_path / "monitored.yaml"), *SMALL]
    output = fit(2, *command, "--trainer.max_steps=4")
    assert "Global batch of 48: 2 devices x 2 micro-batches of 12 samples" in output
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert last.resolve().name == "epoch=1-step=4.ckpt"
    output = fit(3, *command, "--ckpt_path=last")
    assert "Global batch of 48: 3 devices x 2 micro-batches of 8 samples" in output
    assert "saved on 2 devices with ZeRO-3) on 3 devices" in output
    assert last.resolve().name == "epoch=3-step=12.ckpt"
    assert (last / "manifest.json").is_file()
    logged = checkpoint_scalars(tmp_path)
    saved = {int(p.stem.rpartition("=")[2]): p for p in (tmp_path / "checkpoints").glob("*=*")}
    assert set(saved) == {2, 4, 6, 8, 10, 12}
    of_saves = ("stall_s", "s", "write_s", "publish_s", "bytes", "gb_per_s")
    of_loads = {"load_s", "load_bytes", "load_gb_per_s"}
    assert set(logged) == {f"save_{n}" for n in of_saves} | of_loads | {"host_memory_peak_bytes"}
    for name, values in logged.items():
        assert set(values) == ({4} if name in of_loads else set(saved)), name
        assert all(value > 0 for value in values.values()), name
    on_disk = {n: sum(f.stat().st_size for f in p.rglob("*.pt")) for n, p in saved.items()}
    assert logged["save_bytes"] == on_disk
