"""``convert``: each result contains the state, and other software reads it."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_elastic_zero.cli import _TARGETS as CLI_TARGETS
from lightning_elastic_zero.core import manifest
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.tensors import plain
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointMismatchError,
    SaveError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.reader import EXTRA_STATES, OPTIMIZER_STATE
from lightning_elastic_zero.tools.conversion import TARGETS, convert_checkpoint
from lightning_elastic_zero.tools.differences import diff_checkpoints
from lightning_elastic_zero.tools.fingerprint import fingerprint_checkpoint
from lightning_elastic_zero.tools.inspection import inspect_checkpoint
from lightning_elastic_zero.tools.selection import ConvertOptions
from lightning_elastic_zero.tools.to_adapter import adapter_key
from lightning_elastic_zero.tools.verification import verify_checkpoint
from lightning_elastic_zero.tools.view import open_view
from tests.support.bits import bitwise_repr
from tests.support.foreign_checkpoints import unpack
from tests.support.plain_checkpoints import WholeState, make_state, write_dcp, write_elastic
from tests.support.ranks import Pools
from tests.support.small_checkpoints import names_in
from tests.tools import _other_software
from tests.tools._other_software import trained

Run = Callable[..., tuple[int, str, str]]
Refused = Callable[..., str]


def weights_of(state: WholeState) -> dict[str, torch.Tensor]:
    return {**state.masters, **state.frozen, **state.buffers}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("stage", "world_size"),
    [
        (2, 3),
        pytest.param(1, 1, marks=pytest.mark.long),
        pytest.param(3, 4, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("to", ["universal", "dcp", "lightning"])
def test_a_conversion_and_back_keeps_the_fingerprint(
    to: str, stage: int, world_size: int, tmp_path: Path
) -> None:
    source = write_elastic(tmp_path / "a.ckpt", make_state(), stage, world_size)
    wanted = fingerprint_checkpoint(source)
    there, back = tmp_path / "there.ckpt", tmp_path / "back.ckpt"
    convert_checkpoint(source, there, to, ConvertOptions(optimizer=True))
    assert fingerprint_checkpoint(there) == wanted
    assert verify_checkpoint(there).is_sound
    convert_checkpoint(there, back, "dcp", ConvertOptions(buffers=["mean"]))
    assert fingerprint_checkpoint(back) == wanted
    assert verify_checkpoint(back).is_sound


@pytest.mark.parametrize("to", ["fp32", "bf16"])
def test_a_single_file_of_weights(to: str, tmp_path: Path) -> None:
    """Tied names share memory; buffers keep their types."""
    fixture = unpack("zero3-ds0.19", tmp_path / "unpacked")
    convert_checkpoint(fixture.checkpoint, tmp_path / "w.pt", to)
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[to]
    truth = fixture.truth()
    held = {k.split("/", 1)[1]: v for k, v in truth.items() if k.startswith(("master/", "frozen/"))}
    buffers = {k.split("/", 2)[2]: v for k, v in truth.items() if k.startswith("buffer/0/")}
    wanted = {**{n: t.to(dtype) for n, t in held.items()}, **buffers}
    wanted["head.weight"] = wanted["embedding.weight"]
    assert_same(found, wanted)
    tied = found["head.weight"], found["embedding.weight"]
    assert tied[0].data_ptr() == tied[1].data_ptr()
    assert names_in(tmp_path) == ["unpacked", "w.pt"]


@pytest.mark.parametrize("to", ["fp32", "bf16", "lightning", "dcp", "universal"])
def test_tied_names_of_a_single_file_are_converted(to: str, tmp_path: Path) -> None:
    model = torch.nn.ModuleDict(
        {"embedding": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)}
    )
    model["head"].weight = model["embedding"].weight
    optimizer = _other_software.trained(model)
    weights = model.state_dict()
    tree = {"state_dict": weights, "optimizer_states": [optimizer.state_dict()]}
    torch.save(tree, tmp_path / "a.ckpt")
    first, other = weights
    there = tmp_path / "there"
    convert_checkpoint(tmp_path / "a.ckpt", there, to)
    if to in ("fp32", "bf16", "lightning"):
        found = torch.load(there, weights_only=True)
        found = found["state_dict"] if to == "lightning" else found
        assert list(found) == [first, other]
        assert found[first].data_ptr() == found[other].data_ptr()
        assert torch.equal(found[first], weights[first].to(found[first].dtype))
    else:
        with open_view(there) as checkpoint:
            names = checkpoint.manifest.names()
        assert sorted(names) == sorted([first, other])
    (row,) = inspect_checkpoint(tmp_path / "a.ckpt").manifest.parameters
    assert row.aliases == (other,)


@pytest.mark.parametrize("to", ["fp32", "lightning", "dcp", "safetensors"])
def test_a_tied_weight_is_written_under_its_selected_names(to: str, tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    tied = {"shared.weight": weight, "encoder.embed.weight": weight, "head.weight": weight}
    torch.save({"state_dict": tied}, tmp_path / "a.ckpt")
    first, second, third = tied
    cases = (
        (ConvertOptions(include=["encoder.*"]), [second]),
        (ConvertOptions(exclude=["shared.*"]), [second, third]),
        (ConvertOptions(exclude=["head.*"]), [first, second]),
    )
    for number, (options, wanted) in enumerate(cases):
        there = tmp_path / f"{number}"
        convert_checkpoint(tmp_path / "a.ckpt", there, to, options)
        if to == "safetensors":  # Its readers tie the other names again.
            assert list(load_file(there / "model.safetensors")) == wanted[:1]
            continue
        rows = inspect_checkpoint(there).manifest.parameters
        assert sorted(name for p in rows for name in (p.name, *p.aliases)) == sorted(wanted)


@pytest.mark.parametrize("to", ["fp32", "bf16", "lightning", "dcp", "safetensors"])
def test_named_buffers_are_not_rounded(to: str, tmp_path: Path) -> None:
    odd = torch.rand(6, dtype=torch.float64)
    tree = {"w": torch.randn(3, 2), "mean": odd, "unnamed": odd.clone(), "count": torch.tensor(3)}
    torch.save(tree, tmp_path / "a.pt")
    dtype = None if to in ("fp32", "bf16") else "bf16"
    options = ConvertOptions(dtype=dtype, buffers=["mean"])
    there = tmp_path / "there"
    convert_checkpoint(tmp_path / "a.pt", there, to, options)
    rounded = torch.float32 if to == "fp32" else torch.bfloat16
    wanted = {n: t.to(rounded) if n in ("w", "unnamed") else t for n, t in tree.items()}
    path = there / "model.safetensors" if to == "safetensors" else there
    found: Any
    with open_view(path) if to == "dcp" else nullcontext() as checkpoint:
        if checkpoint:
            entries = [(e, list(checkpoint.chunks(e))) for e in checkpoint.weights()]
            found = {e.name: torch.cat(parts).view(e.shape) for e, parts in entries}
        else:
            found = load_file(path) if to == "safetensors" else torch.load(path)
    if to == "lightning":
        found = found["state_dict"]
    assert_same(found, wanted)


def test_the_models_configuration_of_a_trainers_folder_is_copied(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    write_elastic(folder / "global_step3", make_state(), 2, 2)
    config = b'{"architectures": ["GPT2LMHeadModel"]}'
    (folder / "config.json").write_bytes(config)
    convert_checkpoint(folder / "global_step3", tmp_path / "other", "safetensors")
    assert names_in(tmp_path / "other") == ["model.safetensors"]  # not of a Trainer

    (folder / "trainer_state.json").write_text("{}")
    convert_checkpoint(folder / "global_step3", tmp_path / "hf", "safetensors")
    assert (tmp_path / "hf" / "config.json").read_bytes() == config


def test_safetensors_in_one_file_or_shards(tmp_path: Path) -> None:
    state = make_state()
    source = write_elastic(tmp_path / "a.ckpt", state, 3, 3)
    convert_checkpoint(source, tmp_path / "one", "safetensors")
    assert names_in(tmp_path / "one") == ["model.safetensors"]
    assert_same(load_file(tmp_path / "one" / "model.safetensors"), weights_of(state))
    options = ConvertOptions(max_shard_bytes=400, optimizer=True)
    convert_checkpoint(source, tmp_path / "many", "safetensors", options)
    for stem in ("model", "optimizer"):
        index = json.loads((tmp_path / "many" / f"{stem}.safetensors.index.json").read_text())
        files = set(index["weight_map"].values())
        assert len(files) > 1
        found = {n: t for f in files for n, t in load_file(tmp_path / "many" / f).items()}
        assert found.keys() == index["weight_map"].keys()
        if stem == "model":
            assert_same(found, weights_of(state))
    assert_same(
        {n: t for n, t in found.items() if not n.endswith(".step")},
        {f"state.{n}.{k}": t for n, its in state.states.items() for k, t in its.items()},
    )
    assert float(found["state.scale.step"]) == 3.0
    groups = json.loads((tmp_path / "many" / "optimizer.json").read_text())["param_groups"]
    assert [g["lr"] for g in groups] == [1e-3, 5e-4]
    assert [tuple(g["params"]) for g in groups] == list(state.groups)


def test_patterns_select_new_names_and_buffers_are_not_cast(
    tmp_path: Path, run: Run, refused: Refused
) -> None:
    state = make_state()
    source = write_elastic(tmp_path / "a.ckpt", state)
    code, out, err = run(
        *("convert", source, tmp_path / "s", "--to", "safetensors", "--dtype", "bf16"),
        *("--rename", "layers.=blocks.", "--exclude", "*.bias", "head.*"),
    )
    assert (code, err) == (0, "")
    assert f"{tmp_path / 's'}: " in out
    with safe_open(tmp_path / "s" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    wanted = {
        "blocks.0.weight": state.masters["layers.0.weight"].bfloat16(),
        "blocks.1.weight": state.masters["layers.1.weight"].bfloat16(),
        "scale": state.masters["scale"].bfloat16(),
        "frozen.weight": state.frozen["frozen.weight"],
        **state.buffers,
    }
    assert_same(found, wanted)
    to = ("convert", source, tmp_path / "t", "--to", "fp32")
    assert "select none of its weights" in refused(*to, "--include", "mean", "--exclude", "mean")
    for pattern in (("--include", "mean", "haed.*"), ("--exclude", "head")):
        message = refused(*to, *pattern)
        assert f"{pattern[-1]} matches none of its weights" in message
    refused(*to, "--rename", "a")
    assert not (tmp_path / "t").exists()


def test_patterns_rename(tmp_path: Path, run: Run, refused: Refused) -> None:
    state = make_state()
    source = write_elastic(tmp_path / "a.ckpt", state, 3, 2)
    patterns = ("layers.*.weight=h.*.kernel", "*.bias=*.offset", "head.=", "mean=running.mean")
    options = ("--to", "dcp", "--rename", *patterns)
    assert run("convert", source, tmp_path / "b.ckpt", *options)[0] == 0
    with open_view(source) as old, open_view(tmp_path / "b.ckpt") as new:
        held = {e.name: torch.cat(list(new.chunks(e))) for e in new.weights()}
        moments = {e.name for e in new.states()}
        was = {e.name: torch.cat(list(old.chunks(e))) for e in old.weights()}
    names = {
        **{f"layers.{i}.weight": f"h.{i}.kernel" for i in range(2)},
        **{f"layers.{i}.bias": f"layers.{i}.offset" for i in range(2)},
        "head.weight": "weight",
        "mean": "running.mean",
    }
    assert_same(held, {names.get(name, name): tensor for name, tensor in was.items()})
    assert moments == {names.get(name, name) for name in state.masters}
    for wrong, message in (
        (("layers.*.*=x.*",), "both sides need the same number of"),
        (("layers.*.weight=same*", "layers.*.bias=same*"), "to 'same0'"),
        (("*.gamma=*.weight",), "matches no name in the checkpoint"),
        (("scale=",), "turns 'scale' into an empty name"),
        (("scale=a", "scale=b"), "two values for 'scale'"),
    ):
        assert message in refused(
            "convert", source, tmp_path / "c", "--to", "fp32", "--rename", *wrong
        )
    assert names_in(tmp_path) == ["a.ckpt", "b.ckpt"]


HELD_BY = {
    "weights that the save left out (left.weight)": set(),
    "extra states of modules (a._extra_state)": {"lightning"},
    "optimizer state 'global'": {"fp32", "lightning"},
    "values of 'd' that differ between ranks": {"fp32", "universal"},
    "d": {"fp32", "safetensors", "lightning", "dcp"},
    "the loss scale": {"fp32"},
    "the state of the engine's learning rate scheduler": {"fp32", "universal"},
    "the trainer's state and counters (a resume begins at step 0, not 3)": {
        *("fp32", "lightning", "universal"),
    },
}
"""The targets for which each part of the state does not count as lost."""


@pytest.mark.parametrize("to", ["fp32", "safetensors", "lightning", "universal", "dcp"])
def test_lost_state_is_reported(to: str, tmp_path: Path) -> None:
    state = make_state()
    scheduler = {"last_epoch": 3}
    state.engine = {"loss_scaler": {"cur_scale": 256.0}, "lr_scheduler": scheduler}
    state.client |= {OPTIMIZER_STATE: {"global": {"k": 1}}, EXTRA_STATES: {"a._extra_state": 5}}
    state.scalars, state.own = {"d": 0.5}, ({"d": 0.5}, {"d": 0.25})
    kinds = (manifest.SCALARS,)
    source = write_elastic(tmp_path / "a.ckpt", state, excluded=("left.weight",), rank_state=kinds)
    options = ConvertOptions(optimizer=None if to == "fp32" else True)
    found = convert_checkpoint(source, tmp_path / "b", to, options)
    assert {*found.lacks, *found.lost} == {part for part, of in HELD_BY.items() if to not in of}
    if to == "universal":
        model = torch.load(next((tmp_path / "b").rglob("mp_rank*")), weights_only=False)
        assert model["lr_scheduler"] == scheduler


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_lost_state_of_a_sharded_directory_is_reported(to: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = trained(model)
    tree = {
        "model": {**model.state_dict(), "_extra_state": {"k": 5}},
        "optimizer": optimizer.state_dict(),
        "step": 7,
    }
    write_dcp(tmp_path / "a", tree)
    found = convert_checkpoint(tmp_path / "a", tmp_path / "b", to, ConvertOptions(optimizer=True))
    extra, trainer = "extra states of modules (_extra_state)", "the trainer's state and counters"
    assert found.lost == (extra, trainer)


def test_lost_scalar_states_are_reported(tmp_path: Path, run: Run) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.NAdam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tree = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    torch.save(tree, tmp_path / "a.ckpt")
    code, _, error = run("convert", tmp_path / "a.ckpt", tmp_path / "u", "--to", "universal")
    assert code == 0
    assert "not supported by universal, and lost: mu_product\n" in error
    assert not list((tmp_path / "u").rglob("mu_product*"))
    code, _, error = run("convert", tmp_path / "a.ckpt", tmp_path / "d", "--to", "dcp")
    assert (code, "mu_product" in error) == (0, False)
    assert fingerprint_checkpoint(tmp_path / "d") == fingerprint_checkpoint(tmp_path / "a.ckpt")


def test_lost_counters_are_reported(source: Path, tmp_path: Path, run: Run) -> None:
    steps = inspect_checkpoint(source).manifest.progress.global_steps
    code, _, error = run("convert", source, tmp_path / "d", "--to", "dcp")
    assert (code, steps > 0) == (0, True)
    assert f"(a resume begins at step 0, not {steps})" in error
    assert "a resume begins" not in run("convert", source, tmp_path / "u", "--to", "universal")[2]


@pytest.mark.parametrize("size", ["0", "-1"])
def test_impossible_targets_are_refused_in_one_line(
    size: str, source: Path, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "file").write_text("mine")
    for to in ("fp32", "safetensors", "universal", "dcp"):
        for target in ("", tmp_path / "file" / "below"):
            error = refused("convert", source, target, "--to", to)
            assert error.count("\n") == 1, error
            assert "room" not in error
            if target:
                assert f"{target}: {tmp_path / 'file'} is a file, not a directory" in error
                assert "Choose another path" in error
    refused("convert", source, tmp_path / "out", "--to", "safetensors", "--max-shard-gb", size)
    assert names_in(tmp_path) == ["a.ckpt", "file"]


def test_the_command_lists_all_targets() -> None:
    assert tuple(TARGETS) == CLI_TARGETS


@pytest.mark.parametrize("to", [t for t in TARGETS if t != "adapter"])
def test_nothing_is_overwritten_and_nothing_left(to: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "target"
    target.parent.mkdir()
    target.write_text("mine")
    with pytest.raises(SaveError, match="exists, and is not overwritten"):
        convert_checkpoint(source, target, to)
    assert target.read_text() == "mine"
    target.unlink()
    shard = next(source.rglob("*_rank_1_*_optim_states.pt"))
    data = bytearray(shard.read_bytes())
    at = data.index(b"data/1") + 500
    data[at] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointCorruptedError):
        convert_checkpoint(source, target, to)
    assert names_in(target.parent) == []


def test_a_file_that_appears_at_the_target_stays(source: Path, tmp_path: Path) -> None:
    for to in ("fp32", "safetensors"):
        target = tmp_path / f"{to}.out"

        def create_target(_: int, target: Path = target) -> None:
            target.write_text("mine")

        with pytest.raises(SaveError):
            convert_checkpoint(source, target, to, progress=Progress(show=create_target))
        assert target.read_text() == "mine"
    assert not list(tmp_path.glob(".zero-export-*"))


def test_a_checkpoint_of_ours_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    other = write_elastic(tmp_path / "b.ckpt", make_state(), 3, 3)
    for target in (source, other):
        before = (target / "manifest.json").read_bytes()
        with pytest.raises(SaveError, match="exists, and is not overwritten"):
            convert_checkpoint(source, target, "universal")
        assert (target / "manifest.json").read_bytes() == before
    target = tmp_path / "c.ckpt"

    def create_target(_: int) -> None:
        if other.exists():
            other.rename(target)

    with pytest.raises(SaveError, match="exists, and is not overwritten"):
        convert_checkpoint(source, target, "universal", progress=Progress(show=create_target))
    assert (target / "manifest.json").read_bytes() == before
    assert names_in(tmp_path) == ["a.ckpt", "c.ckpt"]


def test_missing_parts_are_named(tmp_path: Path) -> None:
    source = write_elastic(tmp_path / "a.ckpt", make_state(), weights_only=True)
    full = write_elastic(tmp_path / "b.ckpt", make_state())
    for path, to, options, error, words in (
        (source, "universal", ConvertOptions(), CheckpointMismatchError, "it contains none"),
        (full, "universal", ConvertOptions(include=["a"]), UnsupportedError, "the whole state"),
        (full, "adapter", ConvertOptions(), CheckpointMismatchError, "lora_alpha"),
    ):
        with pytest.raises(error, match=words):
            convert_checkpoint(path, tmp_path / "out", to, options)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    options = ConvertOptions(adapter_config=str(tmp_path))
    with pytest.raises(CheckpointMismatchError, match="no weights of an adapter"):
        convert_checkpoint(full, tmp_path / "out", "adapter", options)
    with pytest.raises(UnsupportedError, match="fp64"):
        ConvertOptions(dtype="fp64")
    assert not (tmp_path / "out").exists()


def test_adapter_names_are_those_of_peft() -> None:
    base = "base_model.model.layers.0.q_proj"
    names = {
        f"model.{base}.lora_A.default.weight": ("default", f"{base}.lora_A.weight"),
        f"{base}.lora_embedding_A.other": ("other", f"{base}.lora_embedding_A"),
        "net.base_model.model.head.modules_to_save.default.bias": (
            "default",
            "base_model.model.head.bias",
        ),
        f"{base}.ia3_l.default": ("default", f"{base}.ia3_l"),
        f"{base}.lora_magnitude_vector.default.weight": (
            "default",
            f"{base}.lora_magnitude_vector",
        ),
        f"{base}.base_layer.weight": ("", ""),
        "lora_A.default.weight": ("", ""),
    }
    assert {name: adapter_key(name) for name in names} == names


def test_an_adapter_gets_its_own_configuration(tmp_path: Path) -> None:
    """PEFT saves adapters with other names in folders next to the default one's file."""
    shapes = {f"base_model.model.x.lora_A.{name}.weight": (2, 3) for name in ("default", "other")}
    source = write_elastic(tmp_path / "a.ckpt", make_state(dict(shapes)))
    configs = {"default": '{"peft_type": "LORA", "r": 2}', "other": '{"peft_type": "LORA", "r": 8}'}
    (tmp_path / "adapter_config.json").write_text(configs["default"])
    options = ConvertOptions(adapter_name="other")
    with pytest.raises(CheckpointMismatchError, match="lora_alpha"):
        convert_checkpoint(source, tmp_path / "other-out", "adapter", options)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "adapter_config.json").write_text(configs["other"])
    for name, config in configs.items():
        out = tmp_path / f"{name}-out"
        convert_checkpoint(source, out, "adapter", ConvertOptions(adapter_name=name))
        assert (out / "adapter_config.json").read_text() == config


def test_trained_weights_outside_an_adapter_are_refused_by_name(tmp_path: Path) -> None:
    layer = "base_model.model.layers.0"
    shapes = {
        f"{layer}.lora_A.default.weight": (2, 3),
        f"{layer}.lora_A.other.weight": (2, 3),
        "base_model.model.head.modules_to_save.other.weight": (2,),
        f"{layer}.base_layer.bias": (3,),
        "base_model.model.token_adapter.trainable_tokens_delta.default": (2, 3),
        "value_head.weight": (3,),
    }
    source = write_elastic(tmp_path / "a.ckpt", make_state(dict(shapes)))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    options = ConvertOptions(adapter_config=str(tmp_path))
    with pytest.raises(CheckpointMismatchError) as raised:
        convert_checkpoint(source, tmp_path / "out", "adapter", options)
    named = [name for name in shapes if name in str(raised.value)]
    assert named == [f"{layer}.base_layer.bias", "value_head.weight"]
    assert "call its save_pretrained" in str(raised.value)
    assert not (tmp_path / "out").exists()
    options = replace(options, exclude=named)
    convert_checkpoint(source, tmp_path / "out", "adapter", options)
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    tokens = "base_model.model.token_adapter.trainable_tokens_delta"
    assert sorted(found) == [f"{layer}.lora_A.weight", tokens]


def test_an_adapter_with_parts_that_the_save_left_out_is_refused(tmp_path: Path) -> None:
    """PEFT would load it, and initialize the missing parts anew."""
    layer = "base_model.model.layers.0"
    frozen = f"{layer}.lora_A.default.weight"
    state = make_state({f"{layer}.lora_B.{name}.weight": (3, 2) for name in ("default", "other")})
    state.frozen = {frozen: torch.ones(2, 3)}
    source = write_elastic(tmp_path / "a.ckpt", state, excluded=(frozen,))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    options = ConvertOptions(adapter_config=str(tmp_path))
    with pytest.raises(CheckpointMismatchError, match=f"the save left out {frozen}.* 'default'"):
        convert_checkpoint(source, tmp_path / "out", "adapter", options)
    for each in (replace(options, adapter_name="other"), replace(options, include=["*lora_B*"])):
        convert_checkpoint(source, tmp_path / each.adapter_name, "adapter", each)


# Warnings of PEFT and transformers about each other.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("kind", "options"),
    [*_other_software.PEFT_KINDS.items(), ("LoraConfig", {"r": 4, "bias": "lora_only"})],
)
def test_an_adapter_is_written_as_peft_writes_it(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """With its configuration next to the checkpoint, as Hugging Face's Trainer saves it."""
    _other_software.check_peft_kind(kind, options, tmp_path)


@pytest.mark.parametrize("world_size", [1, 2])
def test_buffers_of_stage_0_are_known(world_size: int, tmp_path: Path) -> None:
    state = make_state()
    state.frozen["codes"] = torch.arange(6)
    source = write_elastic(tmp_path / "a.ckpt", state, 0, world_size)
    with open_view(source) as checkpoint:
        assert [p.name for p in checkpoint.manifest.frozen] == ["frozen.weight", "codes"]
        assert checkpoint.manifest.module_buffers == ("mean", "count")


@pytest.mark.parametrize(
    ("to", "optimizer"), [("fp32", "yes"), ("bf16", "yes"), ("adapter", "yes"), ("universal", "no")]
)
def test_unsupported_optimizer_options_are_refused(
    to: str, optimizer: str, source: Path, tmp_path: Path, refused: Refused
) -> None:
    error = refused("convert", source, tmp_path / "out", "--to", to, "--optimizer", optimizer)
    assert f"--optimizer {optimizer}" in error
    assert "safetensors" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["dcp", "lightning", "safetensors"])
@pytest.mark.parametrize(
    "patterns",
    [ConvertOptions(include=["layers.*"]), ConvertOptions(exclude=["layers.*"])],
    ids=["include", "exclude"],
)
def test_patterns_and_optimizer_states_are_refused_together(
    to: str, patterns: ConvertOptions, source: Path, tmp_path: Path
) -> None:
    chosen = replace(patterns, optimizer=None if to == "dcp" else True)
    with pytest.raises(UnsupportedError, match=r"--optimizer no"):
        convert_checkpoint(source, tmp_path / "out", to, chosen)
    assert not (tmp_path / "out").exists()
    convert_checkpoint(source, tmp_path / "out", to, replace(chosen, optimizer=False))


@pytest.mark.engine
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "program",
    [
        *(_other_software.with_transformers, _other_software.with_peft, _other_software.with_fsdp2),
        *(_other_software.with_lightning, _other_software.with_deepspeed_2),
        _other_software.with_deepspeed_3,
    ],
    ids=lambda program: program.__name__,
)
def test_other_software_loads_the_result(
    program: Callable[[str], None], pools: Pools, tmp_path: Path
) -> None:
    pools.run(1, partial(program, str(tmp_path)))


@pytest.mark.engine
@pytest.mark.cases(1)
@pytest.mark.parametrize(("stage", "later"), [(2, 3), (3, 2)])
def test_lightnings_own_strategy_continues_from_a_universal_checkpoint(
    stage: int, later: int, pools: Pools, tmp_path: Path
) -> None:
    """At another stage and device count. DeepSpeed's loader ignores buffers and frozen weights.

    In ZeRO-3, it gives all groups the hyperparameters of the first.
    """
    folder = str(tmp_path)
    saved, rates = pools.run(2, partial(_other_software.save_for_lightning, folder, stage))[0]
    program = partial(_other_software.resume_in_lightning, folder, later)
    loaded, found, state, step = pools.run(1, program)[0]
    same = {name for name, digest in saved.items() if loaded[name] == digest}
    layers = {
        f"{layer}.{kind}" for layer in ("first", "norm", "last") for kind in ("weight", "bias")
    }
    assert same - {"norm.num_batches_tracked"} == layers  # The layer never counts.
    assert step == 3
    assert state == {"rank": 0, "common": [1, 2.5, "three"]}
    assert found == (rates[:1] * 2 if later == 3 else rates)


def test_a_name_with_a_slash_is_refused_by_universal(
    tmp_path: Path, run: Run, refused: Refused
) -> None:
    source = write_elastic(tmp_path / "a.ckpt", make_state({"a/b.weight": (4, 3), "b": (2,)}))
    error = refused("convert", source, tmp_path / "u", "--to", "universal")
    assert "contains a slash" in error
    assert "--rename" in error
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
    renamed = (source, tmp_path / "u", "--to", "universal", "--rename", "a/b=short.")
    assert run("convert", *renamed)[0] == 0
    assert run("convert", source, tmp_path / "d", "--to", "dcp")[0] == 0


def test_steps_of_a_group_skip_an_empty_first_parameter(tmp_path: Path) -> None:
    state = make_state({"empty": (0,), "a": (4, 3), "b": (2,)})
    source = write_elastic(tmp_path / "a.ckpt", replace(state, groups=(("empty", "a"), ("b",))))
    convert_checkpoint(source, tmp_path / "dcp", "dcp")
    with open_view(tmp_path / "dcp") as found:
        assert found.scalars("a") == found.scalars("b") == {"step": torch.tensor(state.step)}


@pytest.mark.parametrize(("to", "dtype"), [("fp32", "bf16"), ("bf16", "fp16"), ("bf16", "fp32")])
def test_a_dtype_that_contradicts_the_target_is_refused(
    to: str, dtype: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=f"{to} contains weights in .*dtype={dtype}"):
        convert_checkpoint(source, tmp_path / "b", to, ConvertOptions(dtype=dtype))
    convert_checkpoint(source, tmp_path / "b", to, ConvertOptions(dtype=to))


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
def test_numbers_that_would_become_infinite_are_refused(
    value: float,
    dtype: torch.dtype,
    options: tuple[str, ...],
    tmp_path: Path,
    run: Run,
    refused: Refused,
) -> None:
    weights = {"a": torch.ones(3, dtype=dtype), "b": torch.ones(5, 1 << 20, dtype=dtype)}
    weights["b"][4, 77] = value
    torch.save(weights, tmp_path / "w.pt")
    err = refused("convert", tmp_path / "w.pt", tmp_path / "out", *options)
    assert "b has the value" in err
    assert f"{weights['b'][4, 77].item():.6g}" in err
    assert "would become infinite" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w.pt"]
    # A weight that is excluded, or was infinite before, is not refused.
    assert run("convert", tmp_path / "w.pt", tmp_path / "out", *options, "--exclude", "b")[0] == 0
    weights["b"][4, 77] = float("inf")
    weights["b"][3, 5] = float("nan")
    torch.save(weights, tmp_path / "inf.pt")
    assert run("convert", tmp_path / "inf.pt", tmp_path / "infinite", *options)[0] == 0


@pytest.mark.parametrize("back", ["dcp", "universal", "lightning"])
def test_ties_survive_a_dcp_directory(back: str, tmp_path: Path) -> None:
    source = unpack("zero3-ds0.19", tmp_path / "unpacked").checkpoint
    wanted = fingerprint_checkpoint(source)
    tied = {p.name: p.aliases for p in inspect_checkpoint(source).manifest.parameters if p.aliases}
    assert tied
    convert_checkpoint(source, tmp_path / "dcp", "dcp")
    convert_checkpoint(tmp_path / "dcp", tmp_path / "back", back, ConvertOptions(optimizer=True))
    for path in (tmp_path / "dcp", tmp_path / "back"):
        assert verify_checkpoint(path).is_sound
        found = {
            p.name: p.aliases for p in inspect_checkpoint(path).manifest.parameters if p.aliases
        }
        assert found == tied
    assert fingerprint_checkpoint(tmp_path / "dcp").optimizer == wanted.optimizer
    assert fingerprint_checkpoint(tmp_path / "dcp") == wanted


def test_torch_reads_both_names_of_a_tie(tmp_path: Path) -> None:
    large = torch.randn(300, 100)
    torch.save({"a": large, "b": large, "c": torch.ones(2)}, tmp_path / "w.pt")
    convert_checkpoint(tmp_path / "w.pt", tmp_path / "dcp", "dcp")
    size = sum(f.stat().st_size for f in (tmp_path / "dcp").glob("*.distcp"))
    assert large.nbytes < size < 1.5 * large.nbytes
    tree = {"model": {"a": torch.zeros(300, 100), "b": torch.zeros(300, 100)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns that there is no process group.
        load(tree, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(tree["model"]["a"], large)
    assert torch.equal(tree["model"]["b"], large)


def _channels_last(tree: Any) -> Any:
    """Return a tree whose image weights have the channels_last memory format."""
    if isinstance(tree, torch.Tensor):
        return tree.to(memory_format=torch.channels_last) if tree.dim() == 4 else tree
    if isinstance(tree, dict):
        return {key: _channels_last(value) for key, value in tree.items()}
    return [_channels_last(value) for value in tree] if isinstance(tree, list) else tree


def test_channels_last_does_not_change_the_state(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(6, 8, 3), nn.Conv2d(8, 4, 5))
    usual = {"optimizer_states": [trained(model).state_dict()], "state_dict": model.state_dict()}
    tree = _channels_last(usual)
    for name, saved in (("usual", usual), ("last", tree)):
        path = tmp_path / f"{name}.ckpt"
        torch.save(saved, path)
    assert not tree["state_dict"]["0.weight"].is_contiguous()
    assert not tree["optimizer_states"][0]["state"][0]["exp_avg"].is_contiguous()
    number = fingerprint_checkpoint(tmp_path / "last.ckpt")
    assert number.optimizer
    assert number == fingerprint_checkpoint(tmp_path / "usual.ckpt")
    for to in ("dcp", "universal", "lightning"):
        out = tmp_path / to
        convert_checkpoint(tmp_path / "last.ckpt", out, to, ConvertOptions(optimizer=True))
        assert fingerprint_checkpoint(out).optimizer == number.optimizer
        assert verify_checkpoint(out).is_sound
    convert_checkpoint(tmp_path / "last.ckpt", tmp_path / "w.pt", "fp32")
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    for name, tensor in tree["state_dict"].items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


def test_a_transposed_view_is_not_a_tie(tmp_path: Path) -> None:
    square = torch.randn(5, 5)
    torch.save({"a": square, "b": square.t()}, tmp_path / "w.pt")
    assert not any(p.aliases for p in inspect_checkpoint(tmp_path / "w.pt").manifest.parameters)
    convert_checkpoint(tmp_path / "w.pt", tmp_path / "out.pt", "fp32")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(found["a"], square)
    assert torch.equal(found["b"], square.t())


def test_masters_are_rounded_only_as_asked(tmp_path: Path, run: Run, refused: Refused) -> None:
    state = make_state()
    state.masters["scale"].fill_(LARGEST)
    source = write_elastic(tmp_path / "a.ckpt", state)
    assert run("convert", source, tmp_path / "w", "--to", "fp32")[0] == 0
    assert torch.load(tmp_path / "w", weights_only=True)["scale"] == LARGEST
    err = refused("convert", source, tmp_path / "x", "--to", "bf16")
    assert "scale has the value 3.40282e+38" in err


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
"""Scalar states that narrower types would change."""

RATES = {
    "lr": torch.tensor(0.1),
    "betas": (torch.tensor(0.9, dtype=torch.float64), 0.999),
    "nested": [{"count": torch.tensor(3)}],
}
"""Tensors as hyperparameters, as capturable optimizers have them."""


def _scalars(path: Path) -> dict[str, str]:
    with open_view(path) as view:
        held = view.scalars("layers.0.weight")
        return {key: bitwise_repr(held[key]) for key in SCALARS if key in held}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("to", ["dcp", "lightning"])
def test_scalars_keep_type_and_value(to: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Numbers, None and 0-d tensors, with any default dtype."""
    rates = {key: plain(value, key) for key, value in RATES.items() if key != "lr"}
    state = replace(make_state(), scalars=SCALARS, hyperparameters=rates)
    state.client[OPTIMIZER_STATE] = {"global": dict(SCALARS)}
    source = write_elastic(tmp_path / "a.ckpt", state)
    options = ConvertOptions(optimizer=True, buffers=["mean"])
    with default_dtype(dtype):
        found = convert_checkpoint(source, tmp_path / to, to, options)
        convert_checkpoint(tmp_path / to, tmp_path / "back.ckpt", "lightning", options)
    wanted = {key: bitwise_repr(value) for key, value in SCALARS.items()}
    assert _scalars(source) == _scalars(tmp_path / to) == _scalars(tmp_path / "back.ckpt") == wanted
    assert not any(key in text for key in SCALARS for text in found.lost)
    with open_view(tmp_path / "back.ckpt") as view:
        of_all = view.reader.optimizer_state()
        assert bitwise_repr(of_all) == bitwise_repr({} if to == "dcp" else {"global": SCALARS})
        assert ("optimizer state 'global'" in found.lost) == (to == "dcp")
        held = view.manifest.groups[0].hyperparameters
        assert {key: held[key] for key in rates} == rates


def test_a_tensor_as_rate_is_written_as_a_tensor(tmp_path: Path) -> None:
    rates = {key: plain(value, key) for key, value in RATES.items() if key != "lr"}
    source = write_elastic(tmp_path / "a.ckpt", replace(make_state(), hyperparameters=rates))
    for to in ("lightning", "universal"):
        convert_checkpoint(source, tmp_path / to, to, ConvertOptions(optimizer=True))
    saved = torch.load(tmp_path / "lightning", weights_only=True)["optimizer_states"][0]
    zero = tmp_path / "universal" / "checkpoint" / "zero"
    for group in (
        saved["param_groups"][0],
        torch.load(zero / "optimizer_state.pt", weights_only=True)["param_groups"][0],
    ):
        for key in rates:
            assert bitwise_repr(group[key]) == bitwise_repr(RATES[key])


def test_a_safetensors_folder_has_every_scalar(tmp_path: Path) -> None:
    source = write_elastic(tmp_path / "a.ckpt", replace(make_state(), scalars=SCALARS))
    convert_checkpoint(source, tmp_path / "s", "safetensors", ConvertOptions(optimizer=True))
    tensors = load_file(tmp_path / "s" / "optimizer.safetensors")
    numbers = json.loads((tmp_path / "s" / "optimizer.json").read_text())["state"]
    for name in ("layers.0.weight", "scale"):
        held = {k: numbers[name].get(k, tensors.get(f"state.{name}.{k}")) for k in SCALARS}
        assert bitwise_repr(held) == bitwise_repr(SCALARS)


_STATES = ("exp_avg", "exp_avg_sq")


def _write_dcp(
    folder: Path, steps: dict[str, float | None], sizes: dict[str, int], **more: Any
) -> Path:
    """Write parameters with these steps. None: no step, except that of the group in ``more``."""
    state = {
        name: {
            **{key: torch.rand(sizes.get(name, 3)) for key in _STATES},
            **({} if step is None else {"step": torch.tensor(float(step))}),
        }
        for name, step in steps.items()
    }
    group = {"params": list(steps), "lr": 0.1, **more}
    tree = {
        "model": {name: torch.rand(sizes.get(name, 3)) for name in steps},
        "optimizer": {"state": state, "param_groups": [group]},
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(tree, checkpoint_id=folder, no_dist=True)  # type: ignore[attr-defined]
    return folder


def _steps(path: Path) -> dict[str, object]:
    with open_view(path) as view:
        found = {p.name: view.scalars(p.name).get("step") for p in view.manifest.optimized}
    return {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in found.items()}


_GROUPS = [
    (("empty", "a"), ("b",)),
    (("a", "empty"), ("b",)),
    (("b",), ("empty", "a")),
    (("empty", "nil", "a"), ("b",)),
]


_TARGETS = ("universal", "dcp", "lightning")
# A single file stores states by position, which would be ambiguous here and is refused.
_AMBIGUOUS = ("lightning", _GROUPS[2])


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("to", "groups"),
    [(to, groups) for to in _TARGETS for groups in _GROUPS if (to, groups) != _AMBIGUOUS],
)
def test_empty_parameters_take_no_state_or_dtype_from_their_group(
    to: str, groups: tuple[tuple[str, ...], ...], tmp_path: Path
) -> None:
    names = [name for names in groups for name in names]
    sizes = {"empty": (0,), "nil": (2, 0), "a": (4, 3), "b": (2,)}
    state = replace(make_state({name: sizes[name] for name in names}), groups=groups)
    source = write_elastic(tmp_path / "a.ckpt", state)
    there, back = tmp_path / "there.ckpt", tmp_path / "back.ckpt"
    convert_checkpoint(source, there, to, ConvertOptions(optimizer=True))
    convert_checkpoint(there, back, "dcp", ConvertOptions(buffers=["mean"]))
    for found in (there, back):
        assert _steps(found) == dict.fromkeys(names, 3.0)
        assert diff_checkpoints(source, found).tensors == ()
        assert fingerprint_checkpoint(found) == fingerprint_checkpoint(source)
        assert verify_checkpoint(found).is_sound
        with open_view(found) as view:
            assert view.manifest.master_dtype == "float32"
            assert {key.dtype for g in view.manifest.groups for key in g.state} == {"float32"}


def test_every_member_of_a_universal_checkpoint_has_its_step(tmp_path: Path) -> None:
    """DeepSpeed compares the steps of all members, and fails if one has none."""
    groups = (("empty", "a"), ("b",))
    state = replace(make_state({"empty": (0,), "a": (4, 3), "b": (2,)}), groups=groups)
    source = write_elastic(tmp_path / "a.ckpt", state)
    convert_checkpoint(source, tmp_path / "u", "universal")
    zero = tmp_path / "u" / "checkpoint" / "zero"
    for name in ("empty", "a", "b"):
        assert torch.load(zero / name / "step.pt") == 3
        assert torch.load(zero / name / "fp32.pt")["param"].dtype == torch.float32
    shared = torch.load(zero / "optimizer_state.pt")
    assert shared["optimizer_state_dict"]["state"][0]["step"] == 3
    # Other software, and earlier versions, list no files.
    (zero / "empty" / "step.pt").unlink()
    del shared["elastic_zero"]
    torch.save(shared, zero / "optimizer_state.pt")
    assert _steps(tmp_path / "u") == {"empty": 3.0, "a": 3.0, "b": 3.0}


def test_several_steps_in_a_group_are_refused_by_universal(tmp_path: Path) -> None:
    source = _write_dcp(tmp_path / "dcp", {"a": 3, "b": 5, "c": 3}, {})
    with pytest.raises(UnsupportedError, match=r"3.0 of a, 5.0 of b.* one step per group"):
        convert_checkpoint(source, tmp_path / "u", "universal")
    assert not (tmp_path / "u").exists()
    convert_checkpoint(source, tmp_path / "own", "lightning", ConvertOptions(optimizer=True))
    assert _steps(tmp_path / "own") == {"a": 3.0, "b": 5.0, "c": 3.0}


def test_a_universal_checkpoint_with_several_steps_is_refused(tmp_path: Path) -> None:
    source = _write_dcp(tmp_path / "dcp", {"a": 3, "b": 3}, {})
    convert_checkpoint(source, tmp_path / "u", "universal")
    assert verify_checkpoint(tmp_path / "u").is_sound
    torch.save(torch.tensor(5.0), tmp_path / "u" / "checkpoint" / "zero" / "b" / "step.pt")
    found = verify_checkpoint(tmp_path / "u")
    assert not found.is_sound
    assert "3.0 of a, and 5.0 of b" in found.problem


@pytest.mark.parametrize("more", [{}, {"n_averaged": torch.tensor(3)}])
def test_one_of_several_models_is_not_chosen_silently(
    more: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    weights = {"a": torch.ones(3), "b": torch.ones(2)}
    source = write_dcp(tmp_path / "dcp", {"ema": {**weights, **more}, "model": weights})
    with pytest.raises(CheckpointMismatchError, match=r"several models \(ema, model\)") as raised:
        convert_checkpoint(source, tmp_path / "w.pt", "fp32")
    assert "['model']" in str(raised.value)
    assert not (tmp_path / "w.pt").exists()
    with pytest.raises(CheckpointMismatchError, match=r"several models \(ema, model\)"):
        fingerprint_checkpoint(source)
    assert "several models (ema, model)" in inspect_checkpoint(source).doubts[0]
    assert verify_checkpoint(source).is_sound
    larger = write_dcp(tmp_path / "larger", {"ema": {"a": weights["a"]}, "model": weights})
    convert_checkpoint(larger, tmp_path / "w.pt", "fp32")
    assert torch.load(tmp_path / "w.pt").keys() == weights.keys()


@pytest.mark.parametrize("step", [math.nan, math.inf])
def test_an_invalid_step_is_refused_by_name(step: float, tmp_path: Path) -> None:
    source = _write_dcp(tmp_path / "dcp", {"a": 3, "b": step}, {})
    with pytest.raises(CheckpointFormatError, match=f"'step' of b is {step}"):
        convert_checkpoint(source, tmp_path / "target", "universal")
    assert not (tmp_path / "target").exists()
    convert_checkpoint(source, tmp_path / "w.pt", "fp32")


@pytest.mark.parametrize("step", [7, 7.0, torch.tensor(7)])
def test_steps_counted_by_the_group_are_read(step: float | torch.Tensor, tmp_path: Path) -> None:
    source = _write_dcp(tmp_path / "dcp", {"a": None, "b": None}, {}, step=step)
    convert_checkpoint(source, tmp_path / "u", "universal")
    assert torch.load(tmp_path / "u" / "checkpoint" / "zero" / "b" / "step.pt") == 7


def test_an_invalid_step_of_a_group_is_refused(tmp_path: Path) -> None:
    source = _write_dcp(tmp_path / "nan", {"a": None, "b": None}, {}, step=math.nan)
    with pytest.raises(CheckpointFormatError, match="'step' of a is nan"):
        convert_checkpoint(source, tmp_path / "u", "universal")
    named = _write_dcp(tmp_path / "named", {"a": None, "b": None}, {}, step="cosine")
    convert_checkpoint(named, tmp_path / "u", "universal")
    assert _steps(tmp_path / "u") == {"a": None, "b": None}


def test_the_masters_dtype_skips_empty_parameters(tmp_path: Path) -> None:
    source = _write_dcp(tmp_path / "dcp", {"a": 3, "b": 3}, {"a": 0})
    convert_checkpoint(source, tmp_path / "own", "lightning", ConvertOptions(optimizer=True))
    with open_view(tmp_path / "own") as view:
        assert view.manifest.master_dtype == "float32"
    assert _steps(tmp_path / "own") == {"a": 3.0, "b": 3.0}
