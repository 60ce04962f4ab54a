"""Every command with every kind of checkpoint: the right answer or a clear error."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from lightning_elastic_zero.formats.dumps import describe_dumps
from lightning_elastic_zero.formats.reader import WEIGHT
from lightning_elastic_zero.tools.conversion import TARGETS, convert_checkpoint
from lightning_elastic_zero.tools.fingerprint import fingerprint_checkpoint
from lightning_elastic_zero.tools.selection import ConvertOptions
from lightning_elastic_zero.tools.view import OpenCheckpoint, open_view
from tests.support.foreign_checkpoints import names, unpack
from tests.support.plain_checkpoints import make_state, write_elastic
from tests.tools._other_software import trained

Make = Callable[[Path], Path]


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint, and the parts that it contains."""

    name: str
    make: Make
    """Writes a checkpoint into a folder; returns its path."""
    reported: str
    """The name that ``inspect`` reports."""
    optimizer: bool = True
    """Whether it has optimizer state of known parameters."""
    trained: bool = True
    """Whether it records which weights are trained."""
    states: bool = True
    """Whether the optimizer had taken a step."""
    ambiguous: bool = False
    """Whether it has optimizer state of unknown parameters."""


@dataclass(frozen=True)
class Unreadable:
    """Something that is not a readable checkpoint, and the expected error."""

    name: str
    make: Make
    message: str
    code: int = 2
    """The exit code of ``verify``."""


# -- checkpoints by other software ----------------------------------------------------------------


def _fixture(name: str, folder: Path) -> Path:
    fixture = unpack(name, folder)
    if name.startswith("dumps"):
        describe_dumps(fixture.checkpoint, fixture.setup.model(fixture.setup_steps))
    return fixture.checkpoint


def _fixture_kind(name: str) -> Kind:
    # If a folder has both, the file latest names the stock one.
    universal = name.startswith("universal") and name != "universal-beside"
    dumps = name.startswith("dumps")
    reported = "Universal" if universal else "dumps" if dumps else "DeepSpeed"
    return Kind(name, partial(_fixture, name), reported, states=name != "unstepped")


# -- checkpoints of this library, and converted ones ----------------------------------------------


def _own(stage: int, world_size: int, folder: Path) -> Path:
    return write_elastic(folder / "own.ckpt", make_state(), stage, world_size)


def _own_weights(folder: Path) -> Path:
    return write_elastic(folder / "own.ckpt", make_state(), 3, 2, weights_only=True)


def _converted(to: str, optimizer: bool | None, folder: Path) -> Path:
    source = _own(2, 3, folder)
    convert_checkpoint(source, folder / "converted", to, ConvertOptions(optimizer=optimizer))
    shutil.rmtree(source)
    return folder / "converted"


# -- plain torch ---------------------------------------------------------------------------------


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, trained(model)


_ABOUT = {"epoch": 1, "global_step": 2, "pytorch-lightning_version": "2.5.0"}


def _saved(tree: object, folder: Path) -> Path:
    torch.save(tree, folder / "file.pt")
    return folder / "file.pt"


def _weights(prefix: str = "") -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in _model()[0].state_dict().items()}


def _without_crc32(folder: Path) -> Path:
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        return _saved(_weights(), folder)
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)


def _old_format(folder: Path) -> Path:
    torch.save(_weights(), folder / "file.pt", _use_new_zipfile_serialization=False)
    return folder / "file.pt"


def _lightning(optimizers: int, folder: Path) -> Path:
    model, optimizer = _model()
    states = [optimizer.state_dict()] * optimizers
    return _saved({"state_dict": model.state_dict(), "optimizer_states": states, **_ABOUT}, folder)


def _dcp(flat: bool, with_optimizer: bool, folder: Path) -> Path:
    model, optimizer = _model()
    tree = model.state_dict() if flat else {"model": model.state_dict(), "epoch": 3}
    if with_optimizer:
        tree["optimizer"] = optimizer.state_dict()
    return _saved_dcp(tree, folder)


def _saved_dcp(tree: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # There is no process group.
        save_dcp(tree, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def _lightning_dcp(folder: Path) -> Path:
    """Return a directory as Lightning's FSDP and ModelParallel strategies write it."""
    model, optimizer = _model()
    tree = {"model": model.state_dict(), "optimizer_0": optimizer.state_dict()}
    torch.save(_ABOUT, _saved_dcp(tree, folder) / "meta.pt")
    return folder / "dcp"


_alone = {"optimizer": False, "trained": False, "states": False}
_FILE, _DCP, _OURS = "single file", "torch.distributed.checkpoint", "lightning_elastic_zero"

FOREIGN = [_fixture_kind(name) for name in names() if name != "universal-corrupt"]
"""Checkpoints by DeepSpeed, Lightning, transformers and accelerate, and described dumps."""

KINDS = [
    *(
        Kind(f"own ZeRO-{stage} x {ranks}", partial(_own, stage, ranks), _OURS)
        for stage, ranks in ((0, 1), (0, 2), (1, 2), (2, 3), (3, 2))
    ),
    Kind("own weights", _own_weights, _OURS, optimizer=False, states=False),
    Kind("converted universal", partial(_converted, "universal", None), "Universal"),
    Kind("converted dcp", partial(_converted, "dcp", True), _DCP),
    Kind("converted lightning", partial(_converted, "lightning", True), _FILE),
    Kind("converted dcp weights", partial(_converted, "dcp", False), _DCP, **_alone),
    Kind("converted lightning weights", partial(_converted, "lightning", False), _FILE, **_alone),
    Kind("converted fp32", partial(_converted, "fp32", None), _FILE, **_alone),
    Kind("converted bf16", partial(_converted, "bf16", None), _FILE, **_alone),
    Kind("state dict", lambda folder: _saved(_weights(), folder), _FILE, **_alone),
    Kind("state dict without CRC-32", _without_crc32, _FILE, **_alone),
    Kind("state dict of DDP", lambda folder: _saved(_weights("module."), folder), _FILE, **_alone),
    Kind("Lightning", partial(_lightning, 1), _FILE),
    Kind("Lightning, two optimizers", partial(_lightning, 2), _FILE, **_alone, ambiguous=True),
    Kind("dcp", partial(_dcp, False, True), _DCP),
    Kind("dcp of Lightning", _lightning_dcp, _DCP),
    Kind("dcp weights", partial(_dcp, False, False), _DCP, **_alone),
    Kind("dcp flat", partial(_dcp, True, False), _DCP, **_alone),
]


# -- anything else -------------------------------------------------------------------------------


def _model_and_optimizer(first: str, second: str, folder: Path) -> Path:
    model, optimizer = _model()
    return _saved({first: model.state_dict(), second: optimizer.state_dict()}, folder)


def _text(folder: Path) -> Path:
    (folder / "notes").write_text("some words")
    return folder / "notes"


def _empty_file(folder: Path) -> Path:
    (folder / "empty.pt").touch()
    return folder / "empty.pt"


def _safetensors_file(folder: Path) -> Path:
    save_file(_model()[0].state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


UNREADABLE = [
    Unreadable("corrupt universal", partial(_fixture, "universal-corrupt"), "round to", code=1),
    Unreadable(
        "dumps without description", lambda f: unpack("dumps2", f).checkpoint, "describe_dumps"
    ),
    Unreadable("model", partial(_model_and_optimizer, "model", "optimizer"), "['model']"),
    Unreadable(
        "model_state_dict",
        partial(_model_and_optimizer, "model_state_dict", "optimizer_state_dict"),
        "['model_state_dict']",
    ),
    Unreadable(
        "optimizer alone",
        lambda folder: _saved(_model()[1].state_dict(), folder),
        "its entries are 'param_groups', 'state'",
    ),
    Unreadable(
        "whole module", lambda f: _saved(_model()[0], f), "torch.nn.modules.container.Sequential"
    ),
    Unreadable("empty dict", partial(_saved, {}), "its entries are none"),
    Unreadable("empty folder", lambda folder: folder, "it is empty"),
    Unreadable("nothing", lambda folder: folder / "missing", "there is no checkpoint at"),
    Unreadable("text", _text, "is not a file of torch.save"),
    Unreadable("torch before 1.6", _old_format, "has the file format of torch before 1.6"),
    Unreadable("empty file", _empty_file, "is empty", code=1),
    Unreadable("safetensors file", _safetensors_file, "contains weights for from_pretrained"),
    Unreadable("safetensors", partial(_converted, "safetensors", None), "is not a checkpoint of"),
]


Run = Callable[..., tuple[int, str, str]]

WITH_STATE = {"universal", "dcp"}
"""Targets that contain optimizer state by default."""


def names_of(kind: Kind | Unreadable) -> str:
    return kind.name


def weights_in(checkpoint: OpenCheckpoint) -> dict[str, torch.Tensor]:
    return {
        name: torch.cat([torch.empty(0, dtype=checkpoint.dtype(e)), *checkpoint.chunks(e)])
        for e in checkpoint.weights()
        for name in (e.name, *checkpoint.aliases(e))
    }


def numbers(out: str) -> tuple[str, str]:
    weights, _, optimizer = out.split(maxsplit=1)[0].partition("-")
    return weights, optimizer


def refused(kind: Kind, to: str) -> str:
    if to == "adapter":
        return "lora_alpha"
    if (to == "universal" and not kind.optimizer) or (to == "dcp" and kind.ambiguous):
        return "its optimizer state cannot be converted"
    return ""


def intact_code(kind: Kind) -> int:
    """Return the exit code of ``verify``."""
    return 3 if kind.name == "state dict without CRC-32" else 0


def check_reports(kind: Kind, path: Path, run: Run) -> None:
    code, out, err = run("inspect", path)
    assert (code, err) == (0, "")
    code, out, err = run("inspect", path, "--json", "--parameters", "--files")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert kind.reported in report["kind"]
    assert bool(report["manifest"]["groups"]) == kind.trained
    with open_view(path) as checkpoint:
        assert [p["name"] for p in report["manifest"]["parameters"]] == [
            entry.name for entry in checkpoint.weights() if entry.role != "buffer"
        ]
    code, out, _ = run("verify", path)
    assert code == intact_code(kind)
    assert (": intact: " if code == 0 else "NOT verified") in out
    assert run("diff", path, path)[::2] == (0, "")


def check_written(to: str, path: Path, target: Path, run: Run) -> None:
    if to in WITH_STATE or to == "lightning":
        source, found = (numbers(run("fingerprint", p)[1]) for p in (path, target))
        assert found[0] == source[0]
        assert found[1] == (source[1] if to in WITH_STATE else "none")
        assert run("verify", target)[0] == 0
        options = () if to in WITH_STATE else ("--weights-only",)
        code, out, _ = run("diff", path, target, *options)
        differing = [line for line in out.splitlines() if "elements differ" in line]
        assert not differing, (code, out)
        return
    if to == "safetensors":
        found_tensors = load_file(target / "model.safetensors")
    else:
        found_tensors = torch.load(target, weights_only=True)
    with open_view(path) as checkpoint:
        wanted = weights_in(checkpoint)
        roles = {entry.name: entry.role for entry in checkpoint.weights()}
    once = {n for n in wanted if n in roles}
    assert set(found_tensors) == (once if to == "safetensors" else set(wanted))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(to)
    for name, tensor in found_tensors.items():
        values = wanted[name]
        if dtype and values.is_floating_point() and roles.get(name) != "buffer":
            values = values.to(dtype)
        assert tensor.dtype == values.dtype, name
        assert torch.equal(tensor.flatten(), values), name


def check_kind(kind: Kind, tmp_path: Path, run: Run) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    path = kind.make(source)
    check_reports(kind, path, run)
    code, output, err = run("fingerprint", path, "--tensors")
    assert (code, err) == (0, "")
    assert (numbers(output)[1] != "none") == kind.states
    with open_view(path) as checkpoint:
        tensors = sum(1 for e in checkpoint.weights() if e.numel and e.key == WEIGHT)
        tensors += sum(1 for e in checkpoint.states() if e.numel) if kind.states else 0
    lines = [line for line in output.splitlines() if line.startswith("  ") and "save" not in line]
    assert len(lines) == tensors
    for to in TARGETS:
        code, output, err = run("convert", path, out / to, "--to", to)
        if why := refused(kind, to):
            assert (code, output) == (2, ""), to
            assert why in err
            assert str(path) in err
        else:
            assert code == 0, (to, err)
            assert output.startswith(str(out / to))
            check_written(to, path, out / to, run)
    wanted = sorted(to for to in TARGETS if not refused(kind, to))
    assert sorted(p.name for p in out.iterdir()) == wanted


@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", [*KINDS, *FOREIGN], ids=names_of)
def test_every_verb_reads_each_kind(kind: Kind, tmp_path: Path, run: Run) -> None:
    check_kind(kind, tmp_path, run)


def test_every_verb_reads_buffers_that_are_views(tmp_path: Path, run: Run) -> None:
    column = torch.arange(12.0).reshape(3, 4)[1:2, 2]
    state = make_state()
    state.buffers["column"] = column
    name, own = "lightning_elastic_zero", "own.ckpt"
    kind = Kind("views", lambda folder: write_elastic(folder / own, state), name)
    assert column.stride() == (4,)
    check_kind(kind, tmp_path, run)
    state.buffers["column"] = torch.tensor([6.0])
    same = write_elastic(tmp_path / "same", state)
    path = tmp_path / "source" / own
    assert run("diff", path, same)[0] == 0
    first, other = (run("fingerprint", p)[1].split()[0] for p in (path, same))
    assert first == other


@pytest.mark.parametrize("unreadable", UNREADABLE, ids=names_of)
def test_unreadable_paths_are_refused_in_a_sentence(
    unreadable: Unreadable, tmp_path: Path, run: Run
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    path = unreadable.make(source)
    readable_metadata = unreadable.name == "corrupt universal"  # Only the masters show the damage.
    calls = [
        *((to, ("convert", path, tmp_path / to, "--to", to)) for to in TARGETS if to != "adapter"),
        ("fingerprint", ("fingerprint", path)),
        ("diff", ("diff", path, path)),
        *([] if readable_metadata else [("inspect", ("inspect", path))]),
    ]
    for name, words in calls:
        code, out, err = run(*map(str, words))
        assert (code, out) == (2, ""), name
        assert unreadable.message in err, name
        assert err.count("\n") == 1, name
    code, out, err = run("verify", path)
    assert (code, out) == (unreadable.code, "")
    assert unreadable.message in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


HARMLESS = re.compile(
    # The tag, if there is only one.
    r"(.*/)?latest|latest_universal"
    # Files of accelerate and of the transformers trainer, next to DeepSpeed's.
    r"|scheduler\.(bin|pt)|random_states_\d+\.pkl|rng_state_\d+\.pth|training_args\.bin"
    r"|trainer_state\.json|model\.safetensors|zero_to_fp32\.py"
    # Buffers, frozen weights and second names are loaded from the model file.
    r"|step3_universal/zero/(average|seen|bn\.(running_\w+|num_\w+)|frozen\.\w+|head\.weight)/fp32\.pt"
)
"""Names, relative to the checkpoint, of files that the state does not need."""


def _without_each(path: Path) -> Iterator[Path]:
    away = path.parent / "away"
    for file in [p for p in sorted(path.rglob("*")) if p.is_file()] if path.is_dir() else [path]:
        file.rename(away)
        yield file
        away.rename(file)


# Folders that also contain another checkpoint, or files of a larger world.
NOT_ALONE = {"universal-beside", "two-tags", "stale2", "stale3"}
ALONE = [kind for kind in FOREIGN if kind.name not in NOT_ALONE]


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", [*KINDS, *ALONE], ids=names_of)
def test_a_missing_file_is_named(kind: Kind, tmp_path: Path, run: Run) -> None:
    path = kind.make(tmp_path)
    assert run("verify", path)[0] == intact_code(kind)
    before = fingerprint_checkpoint(path)
    for file in _without_each(path):
        code, out, err = run("verify", path)
        below = file.relative_to(path.parent if path.is_file() else path).as_posix()
        if HARMLESS.fullmatch(below):
            assert code == intact_code(kind), (below, err)
            assert fingerprint_checkpoint(path) == before, below
            assert run("inspect", path)[0] == 0, below
        elif file == path:
            assert (code, out) == (2, "")
            assert f"there is no checkpoint at {path}" in err
        elif file.name == "elastic_dumps.json":
            assert (code, out) == (2, "")  # Dumps without a description are not a checkpoint.
            assert "call describe_dumps first" in err
        else:
            assert (code, out) == (1, ""), (below, err)
            assert "DAMAGED" in err
            assert file.name in err, below
            # Of files with equal names, the right one.
            assert file.parent.name in err or not below.startswith("zero/"), (below, err)
            assert re.search("missing|cannot be read", err), err
    assert fingerprint_checkpoint(path) == before
