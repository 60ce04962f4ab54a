"""Values on their way: what a type cannot hold, ties, and elements in another order."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_elastic_zero.core.tensors import plain
from lightning_elastic_zero.formats.reader import OPTIMIZER_STATE
from lightning_elastic_zero.tools.conversion import convert_checkpoint
from lightning_elastic_zero.tools.fingerprint import fingerprint_checkpoint
from lightning_elastic_zero.tools.inspection import inspect_checkpoint
from lightning_elastic_zero.tools.verification import verify_checkpoint
from lightning_elastic_zero.tools.view import open_view
from lightning_elastic_zero.tools.weight_files import ConvertOptions
from tests.core.bitwise_repr import bitwise_repr
from tests.foreign._fixtures import unpack
from tests.tools._checkpoints import make_state, write_elastic
from tests.tools._other_software import trained

Run = Callable[..., tuple[int, str, str]]

LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("value", "dtype", "options"),
    [
        (1e300, torch.float64, ("--to", "fp32")),
        (-1e300, torch.float64, ("--to", "bf16")),
        (LARGEST, torch.float32, ("--to", "bf16")),
        (7e4, torch.float32, ("--to", "safetensors", "--dtype", "fp16")),
        (7e4, torch.float32, ("--to", "lightning", "--dtype", "fp16")),
        (7e4, torch.bfloat16, ("--to", "dcp", "--dtype", "fp16", "--optimizer", "no")),
    ],
    ids=str,
)
def test_no_number_becomes_infinite(
    value: float, dtype: torch.dtype, options: tuple[str, ...], tmp_path: Path, run: Run
) -> None:
    """It is refused by its name and value, wherever it is, and nothing is written."""
    weights = {"a": torch.ones(3, dtype=dtype), "b": torch.ones(5, 1 << 20, dtype=dtype)}
    weights["b"][4, 77] = value
    torch.save(weights, tmp_path / "w.pt")
    code, out, err = run("convert", tmp_path / "w.pt", tmp_path / "out", *options)
    assert (code, out) == (2, "")
    assert "b has the value" in err
    assert f"{weights['b'][4, 77].item():.6g}" in err
    assert "would become infinite" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w.pt"]
    # Where it is left out, or was infinite before, there is nothing to be refused.
    assert run("convert", tmp_path / "w.pt", tmp_path / "out", *options, "--exclude", "b")[0] == 0
    weights["b"][4, 77] = float("inf")
    weights["b"][3, 5] = float("nan")
    torch.save(weights, tmp_path / "inf.pt")
    assert run("convert", tmp_path / "inf.pt", tmp_path / "infinite", *options)[0] == 0


@pytest.mark.parametrize("back", ["elastic", "dcp", "universal", "lightning"])
def test_a_tie_goes_through_a_dcp_directory(back: str, tmp_path: Path) -> None:
    """Both names mean the same bytes there: the tie, and the number of the state, come back."""
    source = unpack("zero3-ds0.19", tmp_path / "unpacked").checkpoint
    wanted = fingerprint_checkpoint(source)
    tied = {p.name: p.aliases for p in inspect_checkpoint(source).parameters if p.aliases}
    assert tied
    convert_checkpoint(source, tmp_path / "dcp", "dcp")
    convert_checkpoint(tmp_path / "dcp", tmp_path / "back", back, ConvertOptions(optimizer=True))
    for path in (tmp_path / "dcp", tmp_path / "back"):
        assert verify_checkpoint(path).is_sound
        found = {p.name: p.aliases for p in inspect_checkpoint(path).parameters if p.aliases}
        assert found == tied
    assert fingerprint_checkpoint(tmp_path / "dcp").optimizer == wanted.optimizer
    assert fingerprint_checkpoint(tmp_path / "dcp") == wanted


def test_torchs_own_code_reads_both_names_of_a_tie(tmp_path: Path) -> None:
    """It gives each name the values, though they lie there once."""
    large = torch.randn(300, 100)
    torch.save({"a": large, "b": large, "c": torch.ones(2)}, tmp_path / "w.pt")
    convert_checkpoint(tmp_path / "w.pt", tmp_path / "dcp", "dcp")
    size = sum(f.stat().st_size for f in (tmp_path / "dcp").glob("*.distcp"))
    assert large.nbytes < size < 1.5 * large.nbytes
    tree = {"model": {"a": torch.zeros(300, 100), "b": torch.zeros(300, 100)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It tells that there is no process group.
        load(tree, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(tree["model"]["a"], large)
    assert torch.equal(tree["model"]["b"], large)


def _channels_last(tree: Any) -> Any:
    """Return a tree whose images of weights lie as training in that memory format has them."""
    if isinstance(tree, torch.Tensor):
        return tree.to(memory_format=torch.channels_last) if tree.dim() == 4 else tree
    if isinstance(tree, dict):
        return {key: _channels_last(value) for key, value in tree.items()}
    return [_channels_last(value) for value in tree] if isinstance(tree, list) else tree


@pytest.mark.parametrize("legacy", [False, True])
def test_channels_last(legacy: bool, tmp_path: Path) -> None:
    """A file of a model in this memory format has the state of one in torch's usual format."""
    model = nn.Sequential(nn.Conv2d(6, 8, 3), nn.Conv2d(8, 4, 5))
    usual = {"optimizer_states": [trained(model).state_dict()], "state_dict": model.state_dict()}
    tree = _channels_last(usual)
    for name, saved in (("usual", usual), ("last", tree)):
        path = tmp_path / f"{name}.ckpt"
        torch.save(saved, path, _use_new_zipfile_serialization=not legacy)
    assert not tree["state_dict"]["0.weight"].is_contiguous()
    assert not tree["optimizer_states"][0]["state"][0]["exp_avg"].is_contiguous()
    number = fingerprint_checkpoint(tmp_path / "last.ckpt")
    assert number.optimizer
    assert number == fingerprint_checkpoint(tmp_path / "usual.ckpt")
    for to in ("elastic", "dcp", "universal", "lightning"):
        out = tmp_path / to
        convert_checkpoint(tmp_path / "last.ckpt", out, to, ConvertOptions(optimizer=True))
        assert fingerprint_checkpoint(out).optimizer == number.optimizer
        assert verify_checkpoint(out).is_sound
    convert_checkpoint(tmp_path / "last.ckpt", tmp_path / "w.pt", "fp32")
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    for name, tensor in tree["state_dict"].items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


def test_two_ways_to_look_at_one_storage_are_no_tie(tmp_path: Path) -> None:
    """A square matrix and its transpose share their place, and are two weights."""
    square = torch.randn(5, 5)
    torch.save({"a": square, "b": square.t()}, tmp_path / "w.pt")
    assert not any(p.aliases for p in inspect_checkpoint(tmp_path / "w.pt").parameters)
    convert_checkpoint(tmp_path / "w.pt", tmp_path / "out.pt", "fp32")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(found["a"], square)
    assert torch.equal(found["b"], square.t())


def test_an_own_checkpoint_is_rounded_only_as_asked(tmp_path: Path, run: Run) -> None:
    """The check of the range is of what is cast: masters as they are stored pass as they are."""
    state = make_state()
    state.masters["scale"].fill_(LARGEST)
    source = write_elastic(tmp_path / "a.ckpt", state)
    assert run("convert", source, tmp_path / "w", "--to", "fp32")[0] == 0
    assert torch.load(tmp_path / "w", weights_only=True)["scale"] == LARGEST
    code, _, err = run("convert", source, tmp_path / "x", "--to", "bf16")
    assert (code, "scale has the value 3.40282e+38" in err) == (2, True)


SCALARS: dict[str, Any] = {
    "seen": 246913578,
    "large": 2**70 + 1,
    "rate": 0.1,
    "small": 5e-324,
    "flag": True,
    "nothing": None,
    "nan": float("nan"),
    "double": torch.tensor(0.1, dtype=torch.float64),
    "long": torch.tensor(2**62 + 1),
    "half": torch.tensor(1.5, dtype=torch.bfloat16),
}
"""What optimizers keep as one value, which narrower types would change."""

RATES = {
    "lr": torch.tensor(0.1),
    "betas": (torch.tensor(0.9, dtype=torch.float64), 0.999),
    "nested": [{"count": torch.tensor(3)}],
}
"""Hyperparameters that are tensors, as capturable optimizers have them."""


def _scalars(path: Path) -> dict[str, str]:
    with open_view(path) as view:
        held = view.scalars("layers.0.weight")
        return {key: bitwise_repr(held[key]) for key in SCALARS if key in held}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the type of new tensors, as a training script may have done."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("to", ["dcp", "lightning", "elastic"])
def test_scalars_keep_type_and_value(to: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Numbers, None and 0-d tensors come back the same, whatever the default type of tensors."""
    rates = {key: plain(value, key) for key, value in RATES.items() if key != "lr"}
    state = replace(make_state(), scalars=SCALARS, hyperparameters=rates)
    state.client[OPTIMIZER_STATE] = {"global": dict(SCALARS)}
    source = write_elastic(tmp_path / "a.ckpt", state)
    options = ConvertOptions(optimizer=True, buffers=["mean"])
    with default_dtype(dtype):
        found = convert_checkpoint(source, tmp_path / to, to, options)
        convert_checkpoint(tmp_path / to, tmp_path / "back.ckpt", "elastic", options)
    wanted = {key: bitwise_repr(value) for key, value in SCALARS.items()}
    assert _scalars(source) == _scalars(tmp_path / to) == _scalars(tmp_path / "back.ckpt") == wanted
    assert not any(key in text for key in SCALARS for text in found.lost)
    with open_view(tmp_path / "back.ckpt") as view:
        of_all = view.reader.optimizer_state()
        assert bitwise_repr(of_all) == bitwise_repr({} if to == "dcp" else {"global": SCALARS})
        assert ("optimizer state 'global'" in found.lost) == (to == "dcp")
        held = view.manifest.groups[0].hyperparameters
        assert {key: held[key] for key in rates} == rates


def test_other_software_finds_tensors_as_rates(tmp_path: Path) -> None:
    """A rate that was a tensor is one in what other software reads, not this library's tag."""
    rates = {key: plain(value, key) for key, value in RATES.items() if key != "lr"}
    source = write_elastic(tmp_path / "a.ckpt", replace(make_state(), hyperparameters=rates))
    for to in ("lightning", "universal"):
        convert_checkpoint(source, tmp_path / to, to, ConvertOptions(optimizer=True))
    saved = torch.load(tmp_path / "lightning", weights_only=True)["optimizer_states"][0]
    zero = tmp_path / "universal" / "universal" / "zero"
    for group in (
        saved["param_groups"][0],
        torch.load(zero / "optimizer_state.pt", weights_only=True)["param_groups"][0],
    ):
        for key in rates:
            assert bitwise_repr(group[key]) == bitwise_repr(RATES[key])


def test_a_folder_of_safetensors_holds_every_scalar(tmp_path: Path) -> None:
    """Tensors are in its files; Python's own numbers, and None, in its JSON, as they are."""
    source = write_elastic(tmp_path / "a.ckpt", replace(make_state(), scalars=SCALARS))
    convert_checkpoint(source, tmp_path / "s", "safetensors", ConvertOptions(optimizer=True))
    tensors = load_file(tmp_path / "s" / "optimizer.safetensors")
    numbers = json.loads((tmp_path / "s" / "optimizer.json").read_text())["state"]
    for name in ("layers.0.weight", "scale"):
        held = {k: numbers[name].get(k, tensors.get(f"state.{name}.{k}")) for k in SCALARS}
        assert bitwise_repr(held) == bitwise_repr(SCALARS)
