"""Checkpoints of every kind that the library reads, and what is none, for tests of every verb."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from lightning_elastic_zero.formats.dumps import describe_dumps
from lightning_elastic_zero.tools.conversion import convert_checkpoint
from lightning_elastic_zero.tools.weight_files import ConvertOptions
from tests.foreign._fixtures import names, unpack
from tests.support.plain_checkpoints import make_state, write_elastic
from tests.tools._other_software import trained

Make = Callable[[Path], Path]


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint, and what it does not have."""

    name: str
    make: Make
    """Writes one into a folder; returns its path."""
    reported: str
    """What ``inspect`` calls it."""
    optimizer: bool = True
    """It holds the state of an optimizer, and says whose it is."""
    hyperparameters: bool = True
    """It holds those of the parameter groups."""
    trained: bool = True
    """It says which weights are trained."""
    states: bool = True
    """The optimizer had taken a step."""
    ambiguous: bool = False
    """It holds an optimizer's state, and does not say whose it is."""


@dataclass(frozen=True)
class Stranger:
    """What is no checkpoint that can be read, and what is said of it."""

    name: str
    make: Make
    said: str
    code: int = 2
    """That ``verify`` returns."""


# -- what other software wrote -------------------------------------------------------------------


def _fixture(name: str, folder: Path) -> Path:
    fixture = unpack(name, folder)
    if name.startswith("dumps"):
        describe_dumps(fixture.checkpoint, fixture.setup.model(fixture.setup_steps))
    return fixture.checkpoint


def _fixture_kind(name: str) -> Kind:
    # Where both are in one folder, the file latest names the stock one.
    universal = name.startswith("universal") and name != "universal-beside"
    dumps = name.startswith("dumps")
    reported = "Universal" if universal else "dumps" if dumps else "DeepSpeed"
    told, stepped = not name.startswith("elastic"), name != "unstepped"
    return Kind(name, partial(_fixture, name), reported, hyperparameters=told, states=stepped)


# -- this library's, and what convert writes -----------------------------------------------------


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


def _saved(tree: object, folder: Path, **options: bool) -> Path:
    torch.save(tree, folder / "file.pt", **options)
    return folder / "file.pt"


def _plain(folder: Path) -> Path:
    return _saved(_model()[0].state_dict(), folder)


def _legacy(folder: Path) -> Path:
    weights = _model()[0].state_dict()
    return _saved(weights, folder, _use_new_zipfile_serialization=False)


def _ddp(folder: Path) -> Path:
    return _saved({f"module.{n}": t for n, t in _model()[0].state_dict().items()}, folder)


def _lightning(optimizers: int, folder: Path) -> Path:
    model, optimizer = _model()
    states = [optimizer.state_dict()] * optimizers
    about = {"epoch": 1, "global_step": 1, "pytorch-lightning_version": "2.5.0"}
    return _saved({"state_dict": model.state_dict(), "optimizer_states": states, **about}, folder)


def _dcp(flat: bool, with_optimizer: bool, folder: Path) -> Path:
    model, optimizer = _model()
    tree = model.state_dict() if flat else {"model": model.state_dict(), "epoch": 3}
    if with_optimizer:
        tree["optimizer"] = optimizer.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It tells that there is no process group.
        save_dcp(tree, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def _lightning_dcp(folder: Path) -> Path:
    """Return a directory as Lightning's FSDP and ModelParallel strategies write them."""
    model, optimizer = _model()
    tree = {"model": model.state_dict(), "optimizer_0": optimizer.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_dcp(tree, checkpoint_id=folder / "dcp", no_dist=True)
    about = {"epoch": 1, "global_step": 1, "pytorch-lightning_version": "2.5.0"}
    torch.save(about, folder / "dcp" / "meta.pt")
    return folder / "dcp"


_alone = {"optimizer": False, "trained": False, "states": False}
_FILE, _DCP, _OURS = "single file", "torch.distributed.checkpoint", "lightning_elastic_zero"

FOREIGN = [_fixture_kind(name) for name in names() if name != "universal-corrupt"]
"""What DeepSpeed, Lightning, transformers and accelerate wrote, and dumps, described."""

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
    Kind("state dict", _plain, _FILE, **_alone),
    Kind("state dict before zips", _legacy, _FILE, **_alone),
    Kind("state dict of DDP", _ddp, _FILE, **_alone),
    Kind("Lightning", partial(_lightning, 1), _FILE),
    Kind("Lightning, two optimizers", partial(_lightning, 2), _FILE, **_alone, ambiguous=True),
    Kind("dcp", partial(_dcp, False, True), _DCP),
    Kind("dcp of Lightning", _lightning_dcp, _DCP),
    Kind("dcp weights", partial(_dcp, False, False), _DCP, **_alone),
    Kind("dcp flat", partial(_dcp, True, False), _DCP, **_alone),
]


# -- what is none --------------------------------------------------------------------------------


def _corrupt(folder: Path) -> Path:
    return unpack("universal-corrupt", folder).checkpoint


def _undescribed(folder: Path) -> Path:
    return unpack("dumps2", folder).checkpoint


def _model_and_optimizer(first: str, second: str, folder: Path) -> Path:
    model, optimizer = _model()
    return _saved({first: model.state_dict(), second: optimizer.state_dict()}, folder)


def _optimizer_alone(folder: Path) -> Path:
    return _saved(_model()[1].state_dict(), folder)


def _whole_module(folder: Path) -> Path:
    return _saved(_model()[0], folder)


def _empty_folder(folder: Path) -> Path:
    return folder


def _missing(folder: Path) -> Path:
    return folder / "missing"


def _text(folder: Path) -> Path:
    (folder / "notes").write_text("some words")
    return folder / "notes"


def _empty_file(folder: Path) -> Path:
    (folder / "empty.pt").touch()
    return folder / "empty.pt"


def _safetensors_file(folder: Path) -> Path:
    save_file(_model()[0].state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


STRANGERS = [
    Stranger("corrupt universal", _corrupt, "do not round to", code=1),
    Stranger("dumps that nobody has described", _undescribed, "describe_dumps"),
    Stranger("model", partial(_model_and_optimizer, "model", "optimizer"), "['model']"),
    Stranger(
        "model_state_dict",
        partial(_model_and_optimizer, "model_state_dict", "optimizer_state_dict"),
        "['model_state_dict']",
    ),
    Stranger("optimizer alone", _optimizer_alone, "its entries are 'param_groups', 'state'"),
    Stranger("whole module", _whole_module, "torch.nn.modules.container.Sequential"),
    Stranger("empty dict", partial(_saved, {}), "its entries are none"),
    Stranger("empty folder", _empty_folder, "it is empty"),
    Stranger("nothing", _missing, "there is no checkpoint at"),
    Stranger("text", _text, "is no file of torch.save"),
    Stranger("empty file", _empty_file, "is empty", code=1),
    Stranger("safetensors file", _safetensors_file, "is no file of torch.save"),
    Stranger("safetensors", partial(_converted, "safetensors", None), "is not a checkpoint of"),
]
