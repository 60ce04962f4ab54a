"""The command line and its YAML, as the README shows them."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.examples._process import output_of

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SMALL = (
    "--data.samples_per_epoch=130",  # 3 steps of 48, of which the last is filled up
    "--model.n_embd=32",
    "--model.n_layer=1",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
)


CLI = ROOT / "examples" / "cli.py"
Printed = tuple[Path, dict[str, str]]


def cli(folder: Path, *arguments: str) -> str:
    """Run examples/cli.py in a folder of its own; return all that it printed."""
    return python(folder, str(CLI), *arguments)


def python(folder: Path, *arguments: str) -> str:
    """Run Python in a folder of its own, as the examples are run; return all that it printed."""
    environment = {
        "DS_ACCELERATOR": "cpu",
        **os.environ,
        "RUN_DIR": str(folder),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    return output_of([sys.executable, *arguments], folder, environment)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """Return what ``fit --print_config`` prints for each YAML: in one process, as it is slow."""
    folder = tmp_path_factory.mktemp("configs")
    runs = [["fit", "--config", str(config), "--print_config"] for config in CONFIGS]
    program = (
        "import contextlib, json, runpy, sys\n"
        f"sys.path.insert(0, {str(CLI.parent)!r})\n"
        "for arguments in json.loads(sys.argv[2]):\n"
        "    print('RUN', arguments[2])\n"
        "    sys.argv[1:] = [*arguments]\n"
        "    with contextlib.suppress(SystemExit):\n"
        f"        runpy.run_path({str(CLI)!r}, run_name='__main__')\n"
    )
    said = python(folder, "-c", program, "cli", json.dumps(runs))
    _, *parts = re.split(r"^RUN (.*)\n", said, flags=re.MULTILINE)
    return folder, dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_config_parses(config: Path, printed: Printed) -> None:
    """Each YAML is valid, names the strategy, and fixes the folder where "last" is looked for."""
    folder, said = printed
    assert "ElasticDeepSpeedStrategy" in said[str(config)]
    assert f"dirpath: {folder}/checkpoints" in said[str(config)]


@pytest.mark.engine
def test_resume_on_other_devices(tmp_path: Path) -> None:
    """`--trainer.devices 3 --ckpt_path last` goes on with a run of 2, over its saved config.

    The run of 2 stops in the middle of an epoch, and the run of 3 has the steps that it lacks.
    """
    every_2 = "--trainer.callbacks.init_args.every_n_train_steps=2"
    config = ["--config", str(ROOT / "configs" / "zero3.yaml"), *SMALL, every_2]
    said = cli(tmp_path, "fit", *config, "--trainer.devices=2", "--trainer.max_steps=4")
    assert "Global batch of 48: 2 devices x 2 micro-batches of 12 samples" in said
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert last.resolve().name == "epoch=1-step=4.ckpt"
    said = cli(tmp_path, "fit", *config, "--trainer.devices=3", "--ckpt_path=last")
    assert "Global batch of 48: 3 devices x 2 micro-batches of 8 samples" in said
    assert "saved on 2 devices with ZeRO-3) on 3 devices" in said
    assert last.resolve().name == "epoch=3-step=12.ckpt"
    assert (last / "manifest.json").is_file()
