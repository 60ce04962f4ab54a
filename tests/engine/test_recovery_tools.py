"""The tools that people have turn our checkpoints into plain fp32 weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import Saved
from tests.support.engines import BUFFERS, Setup
from tests.support.oracle import same_bits
from tests.support.processes import HANG_TIMEOUT_S
from tests.support.ranks import Pools, environment

pytestmark = pytest.mark.engine

RUNS = (
    Setup(2, "1", empty=True),
    Setup(3, "1", "bf16", alignment=True),
    Setup(3, "2", "bf16", round_robin=True),
    Setup(2, "2", offload=True),
    Setup(3, "3", sub_group=700),
    Setup(4, "3", "bf16"),
    Setup(3, "B", "bf16"),
    Setup(3, "0", empty=True),
    Setup(2, "0", "bf16"),
)


def expected(saved: Saved) -> dict[str, torch.Tensor]:
    """Return what the oracle had found in the run that saved, in a state dict's words."""
    held = saved.dump()
    masters = {k.removeprefix("master/"): v for k, v in held.items() if k.startswith("master/")}
    frozen = {k.removeprefix("frozen/"): v for k, v in held.items() if k.startswith("frozen/")}
    empty = {k.removeprefix("weight/"): v for k, v in held.items() if "/empty" in k}
    buffers = {name: held[f"buffer/0/{name}"] for name in BUFFERS}
    tied = {"head.weight": masters["embedding.weight"]}
    return {**empty, **frozen, **buffers, **masters, **tied}


def assert_exact(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Fail unless names, types and values are the same."""
    assert found.keys() == wanted.keys()
    assert not [name for name, w in wanted.items() if not same_bits(found[name], w)]


def recovered(path: str, *, exclude_frozen: bool) -> dict[str, Any]:
    """Run DeepSpeed's function (in a rank: this process does not import DeepSpeed)."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(path, exclude_frozen_parameters=exclude_frozen)
    return dict(found)


def converted(path: str, output: str) -> dict[str, Any]:
    """Run Lightning's function, and give what its file holds too."""
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    found: dict[str, Any] = convert_zero_checkpoint_to_fp32_state_dict(path, output)
    return found


@pytest.mark.parametrize("setup", RUNS, ids=str)
def test_deepspeed_recovers_weights(
    setup: Setup, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """Masters, frozen and tied weights and buffers, at every stage; frozen ones on demand."""
    saved = saved_by(setup)
    wanted = expected(saved)
    program = partial(recovered, saved.path, exclude_frozen=False)
    assert_exact(pools.run(1, program)[0], wanted)
    program = partial(recovered, saved.path, exclude_frozen=True)
    left_out = ("frozen.weight", "frozen.bias", "empty")
    trained = {name: tensor for name, tensor in wanted.items() if name not in left_out}
    assert_exact(pools.run(1, program)[0], trained)


@pytest.mark.long
@pytest.mark.parametrize("setup", RUNS, ids=str)
def test_lightning_recovers_weights(
    setup: Setup, pools: Pools, saved_by: Callable[..., Saved], tmp_path: Path
) -> None:
    """Its function gives the same, with the client state beside it, and writes it down."""
    saved = saved_by(setup)
    output = tmp_path / "weights.pt"
    found = pools.run(1, partial(converted, saved.path, str(output)))[0]
    assert_exact(found["state_dict"], expected(saved))
    assert_exact(torch.load(output, weights_only=False)["state_dict"], expected(saved))


@pytest.mark.skipif(find_spec("huggingface_hub") is None, reason="the script asks for it")
@pytest.mark.parametrize("setup", [RUNS[1], RUNS[4], RUNS[6]], ids=str)
def test_the_script_inside_recovers_weights(
    setup: Setup, saved_by: Callable[..., Saved], tmp_path: Path
) -> None:
    """``python zero_to_fp32.py . output``, run inside the checkpoint."""
    saved = saved_by(setup)
    command = [sys.executable, "zero_to_fp32.py", ".", str(tmp_path)]
    ran = subprocess.run(
        command,
        cwd=saved.path,
        env=environment(),
        capture_output=True,
        timeout=HANG_TIMEOUT_S,
        check=False,
    )
    output = tmp_path / "pytorch_model.bin"
    assert output.exists(), ran.stderr.decode()
    found = torch.load(output, weights_only=True)
    # It writes a tied weight under one of its names, and frozen weights in fp32.
    tied = found.get("head.weight", found.get("embedding.weight"))
    wanted = {n: t.float() if "frozen" in n else t for n, t in expected(saved).items()}
    assert_exact({**found, "head.weight": tied, "embedding.weight": tied}, wanted)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"weights_only": True}, {"save_module_weights": True}])
@pytest.mark.parametrize("setup", RUNS, ids=str)
def test_every_file_is_plain(
    setup: Setup, options: dict[str, bool], saved_by: Callable[..., Saved]
) -> None:
    """Every file loads with ``weights_only=True``, by whoever has torch alone."""
    saved = saved_by(setup, **options)
    files = sorted(Path(saved.path).rglob("*.pt"))
    assert sum(f.name.endswith("_optim_states.pt") for f in files) == setup.world
    assert sum(f.name.endswith("_model_states.pt") for f in files) >= 1
    for path in files:
        assert isinstance(torch.load(path, weights_only=True), dict)


@pytest.mark.long
@pytest.mark.parametrize("setup", [RUNS[2], RUNS[6]], ids=str)
def test_module_weights_can_be_kept(setup: Setup, saved_by: Callable[..., Saved]) -> None:
    """They stand in the model file as forward uses them, and are left out otherwise."""
    kept, lean = saved_by(setup, save_module_weights=True), saved_by(setup)
    held = kept.dump()
    names = [k.removeprefix("weight/") for k in held if k.startswith("weight/")]
    modules = [
        torch.load(Path(s.path, "checkpoint/mp_rank_00_model_states.pt"), weights_only=True)
        for s in (kept, lean)
    ]
    assert all(same_bits(modules[0]["module"][n], held[f"weight/{n}"]) for n in names)
    assert not set(names) & modules[1]["module"].keys()
