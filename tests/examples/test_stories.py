"""Pages of docs/ whose blocks are run unchanged, in order.

A Python block that begins with ``# name.py`` is that file. Any other Python block is a program, and
a shell block is a script. Each must succeed.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file

from tests.support.forked_python import forked_programs
from tests.support.processes import output_of
from tests.support.ranks import ForkServer, environment

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"# (\w+\.py)\n")

Weights = dict[str, torch.Tensor]


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Return the language and the text of each block of a page in docs/."""
    return BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))


def run_page(page: str, folder: Path, programs: Path | None = None) -> str:
    """Run a page in a folder; return its whole output.

    Args:
        page: its name.
        folder: the folder in which it runs.
        programs: a folder of programs that precede those on ``PATH``.
    """
    outputs = []
    # An error of a block is reported with the output of its ranks.
    env = {**environment(), "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    if programs:
        env["PATH"] = os.pathsep.join([str(programs), env["PATH"]])
    for language, text in blocks_of(page):
        if named := NAME.match(text) if language == "python" else None:
            (folder / named[1]).write_text(text, encoding="utf-8")
            continue
        python = [str(programs / "python") if programs else sys.executable, "-c", text]
        shell = ["bash", "-euo", "pipefail", "-c", text]
        outputs.append(output_of(python if language == "python" else shell, folder, env))
    return "\n".join(outputs)


def deepspeeds_weights(checkpoint: Path) -> Weights:
    """Return the masters from DeepSpeed's own converter, which shares no code with this library."""
    found: Weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    return {name: tensor.clone() for name, tensor in found.items()}


def assert_same(found: Weights, wanted: Weights) -> None:
    """Assert that names, types and bits are equal."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def check_started(folder: Path, output: str) -> None:
    """Both runs of the page resumed on one device, at the step that the page states."""
    assert re.search(r"saved on 2 devices with ZeRO-3\) on 1 device at step 4, epoch 1\b", output)
    assert (folder / "checkpoints" / "last.ckpt").exists()
    assert sorted(path.name for path in (folder / "engine").iterdir()) == ["step-3", "step-6"]


def check_node(folder: Path, output: str) -> None:
    """The ranks changed from 3 to 2 to 3 at the steps of the page, and the loss decreased."""
    assert "rank 2 is gone" in output
    assert "last.ckpt: intact: " in output
    assert re.search(r"saved on 3 devices with ZeRO-3\) on 2 devices at step 15, epoch 1\b", output)
    assert re.search(r"saved on 2 devices with ZeRO-3\) on 3 devices at step 30, epoch 3\b", output)
    rows = []
    for path in sorted((folder / "run").rglob("metrics.csv")):
        with path.open(encoding="utf-8") as file:
            rows.append([int(row["step"]) for row in csv.DictReader(file)])
    assert [steps[0] for steps in rows] == [0, 15, 30]
    assert rows[0][-1] < 17
    assert rows[1] == list(range(15, 30))
    assert rows[2] == list(range(30, 40))


def check_old(folder: Path, output: str) -> None:
    """DeepSpeed's converter returns the weights of the old files, until training continues."""
    wanted = deepspeeds_weights(folder / "old")
    assert_same(deepspeeds_weights(folder / "resumed-from-old"), wanted)
    later = deepspeeds_weights(folder / "continued-from-old")
    assert not any(torch.equal(later[name], tensor) for name, tensor in wanted.items())
    single = torch.load(folder / "ddp.ckpt", weights_only=True)["state_dict"]
    assert_same(deepspeeds_weights(folder / "resumed-from-ddp.ckpt"), single)
    assert output.count("tensors compared: equal") == 2
    assert "ZeRO-3 on 2 devices" in output


def check_weights(folder: Path, output: str) -> None:
    """Every result has the masters of DeepSpeed's converter, bit for bit or rounded once."""
    wanted = deepspeeds_weights(folder / "run.ckpt")
    assert_same(torch.load(folder / "weights.pt", weights_only=True), wanted)
    rounded = {name: tensor.bfloat16() for name, tensor in wanted.items()}
    assert_same(torch.load(folder / "weights-bf16.pt", weights_only=True), rounded)
    file = load_file(folder / "hf" / "model.safetensors")
    assert_same({f"model.{name}": tensor for name, tensor in file.items()}, wanted)
    lightning = torch.load(folder / "model.ckpt", weights_only=True)
    assert_same(lightning["state_dict"], wanted)
    assert lightning["hyper_parameters"] == {"width": 32}
    half = load_file(folder / "attention" / "model.safetensors")
    attention = {n: t.half() for n, t in wanted.items() if ".self_attn." in n}
    assert_same(half, attention)
    assert output.count("/s\n") >= 4
    loaded = output_of((sys.executable, "-c", LOADED, *sorted(wanted)), folder, environment())
    assert "the same" in loaded.splitlines()


LOADED = """
import sys, torch
from lm import LM
from transformers import LlamaForCausalLM
wanted = torch.load("weights.pt", weights_only=True)
found = [LM.load_from_checkpoint("model.ckpt").state_dict()]
hf = LlamaForCausalLM.from_pretrained("hf").state_dict()
found.append({f"model.{name}": tensor for name, tensor in hf.items()})
for each in found:
    assert sorted(each) == sorted(wanted) == sys.argv[1:], sorted(each)
    assert all(torch.equal(each[name], wanted[name]) for name in wanted)
print("the same")
"""


def check_nodes(folder: Path, output: str) -> None:
    """Second runs resumed the last step of the first ones, and old checkpoints are deleted."""
    assert re.search(
        r"Loaded node://\S+ \(saved on 2 devices with ZeRO-3\) on 1 device at step 5\b", output
    )
    kept = {"epoch=0-step=7.ckpt", "epoch=0-step=8.ckpt", "last.ckpt"}
    assert {path.name for path in (folder / "run").glob("*.ckpt")} == kept
    assert "local/step-5 at step 5" in output
    assert sorted(path.name for path in (folder / "local").glob("step-*")) == ["step-8"]


def check_shards(folder: Path, output: str) -> None:
    """The second runs went on where the first ones had ended, and weights were converted."""
    saved = "saved on 4 devices (2 tensor ranks) with ZeRO-2"
    assert f"({saved}) on 2 devices at step 4, epoch 0" in output
    assert "Global batch of 8: 2 data ranks x 1 micro-batch of 4 samples" in output
    steps = [int(step) for step in re.findall(r"^step (\d): loss", output, re.MULTILINE)]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert "4 devices (2 tensor ranks)" in output
    weights = torch.load(folder / "weights.pt", weights_only=True)
    assert weights["model.layers.1.mlp.down_proj.weight"].shape == (32, 64)
    state = json.loads((folder / "long" / "checkpoint-12" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"]] == [*range(1, 13)]
    assert f"({saved}) on 2 devices at step 3, 8 samples per step" in output
    assert "gradients by 1 instead of 2" in output


STORIES: dict[str, Callable[[Path, str], None]] = {
    "getting-started.md": check_started,
    "my-node-is-gone.md": check_node,
    "no-shared-disk.md": check_nodes,
    "i-have-an-old-checkpoint.md": check_old,
    "tensor-parallelism.md": check_shards,
    "i-want-the-weights-out.md": check_weights,
}


@pytest.mark.long
@pytest.mark.parametrize("page", STORIES)
def test_a_story_runs_unchanged(page: str, fork_server: ForkServer, tmp_path: Path) -> None:
    """Every block of the page succeeds, and its claims hold."""
    folder = tmp_path / "story"
    folder.mkdir()
    with forked_programs(fork_server, tmp_path / "programs") as programs:
        output = run_page(page, folder, programs)
        STORIES[page](folder, output)


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("page", STORIES)
def test_a_story_runs_without_help(page: str, tmp_path: Path) -> None:
    """Also if every program is started from a user's shell."""
    STORIES[page](tmp_path, run_page(page, tmp_path))


@pytest.mark.parametrize("page", STORIES)
def test_no_block_of_a_story_is_skipped(page: str) -> None:
    """No block has another language or an indentation that would exclude it."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(blocks_of(page)) > 0
