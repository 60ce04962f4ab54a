"""Writers of other checkpoints: Lightning with DDP, FSDP2 or one device; FSDP2 over gloo.

Each stores its state in memory at the save, in the terms of the oracle. Nothing here may import
``lightning_elastic_zero``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from tests.support.engines import (
    BUFFERS,
    Engine,
    Net,
    batch,
    group_members,
    make_optimizer,
    trained,
)
from tests.support.oracle import Dump

STEPS = 3

Change = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    path: str
    """Path of its checkpoint. Its state is stored next to it."""
    world: int = 1
    grouping: str = "two"
    optimizer: str = "AdamW"
    dtype: str = "float32"
    everything: bool = True
    """Each parameter gets a gradient. If False, ``never`` has none, and no optimizer state."""
    steps: int = STEPS
    named: bool = False
    """Whether the optimizer is given ``named_parameters()``."""

    @property
    def truth_path(self) -> str:
        return f"{self.path}.truth"


def loss_of(model: nn.Module, run: Run, step: int, rank: int) -> torch.Tensor:
    x, y = batch(step, rank, run.world)
    loss: torch.Tensor = (model(x).float() - y).pow(2).mean()
    never = model.get_parameter("never")
    return loss + 0 * never.float().sum() if run.everything else loss


def full_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a full copy of a tensor; FSDP2's are gathered. Collective."""
    gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return torch.as_tensor(gathered.detach().clone())


def held(model: nn.Module, optimizer: torch.optim.Optimizer, run: Run) -> Dump:
    """Return the state of a run as ZeRO engines hold it: low precision is widened. Collective.

    Args:
        model: a model with tied and frozen weights, and buffers.
        optimizer: its optimizer.
        run: the trained run.
    """
    found: Dump = {}
    names = {p: name for name, p in trained(model).items()}
    for name, parameter in model.named_parameters():
        kind = "weight" if parameter.requires_grad else "frozen"
        found[f"{kind}/{name}"] = full_copy(parameter)
        if parameter.requires_grad:
            found[f"master/{name}"] = full_copy(parameter).float()
    for owner, state in optimizer.state.items():
        named = names[owner]  # type: ignore[index]
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                found[f"{key}/{named}"] = full_copy(value).float()
            else:
                scalar = full_copy(value) if isinstance(value, torch.Tensor) else value
                found[f"scalar/{key}/{named}"] = repr(scalar)
    for index, group in enumerate(optimizer.param_groups):
        fields = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        found.update({f"group/{index}/{k}": repr(v) for k, v in fields.items()})
    counters = {"global_steps": run.steps, "global_samples": 0, "skipped_steps": 0}
    found.update({f"counter/{key}": repr(value) for key, value in counters.items()})
    buffers = dict(model.named_buffers())
    found.update({f"buffer/0/{name}": full_copy(buffers[name]) for name in BUFFERS})
    return found


def keep(found: Dump, run: Run) -> None:
    if distributed.get_rank() == 0:
        torch.save(found, run.truth_path)
    distributed.barrier()


def make(run: Run) -> Net:
    """Make the model; buffers stay in fp32."""
    model = Net(0)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, run.dtype))
    return model


# -- Lightning ----------------------------------------------------------------------------------


def fit_lightning(run: Run, *, weights_only: bool = False, sharded: str = "") -> None:
    """Fit with a real Trainer, and save. Collective.

    Args:
        run: the run to train.
        weights_only: save no optimizer.
        sharded: use ModelParallelStrategy and FSDP2, and save a ``directory`` or a ``file``;
            otherwise use DDP, or one device.
    """
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader

    class Lit(Net, pl.LightningModule):
        def training_step(self, step: int, _: int) -> torch.Tensor:
            return loss_of(self, run, step, distributed.get_rank())

        def train_dataloader(self) -> Any:
            return DataLoader(range(run.steps), batch_size=None)  # type: ignore[arg-type]

        def configure_model(self) -> None:
            if sharded and self.device_mesh is not None:
                mesh = self.device_mesh["data_parallel"]
                fully_shard(self.a, mesh=mesh)
                fully_shard(self, mesh=mesh)

        def configure_optimizers(self) -> Engine:
            return make_optimizer(run.optimizer, group_members(self, run.grouping), 1.0)

        def on_train_end(self) -> None:
            if sharded:
                share_buffers(self)
            optimizer = self.optimizers()
            assert isinstance(optimizer, pl.core.optimizer.LightningOptimizer)
            keep(held(self, optimizer.optimizer, run), run)

    warnings.simplefilter("ignore")
    plain = "ddp" if run.world > 1 else "auto"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=run.world,
        strategy=ModelParallelStrategy(
            run.world, 1, save_distributed_checkpoint=sharded == "directory"
        )
        if sharded
        else plain,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Lit(0))
    trainer.save_checkpoint(run.path, weights_only=weights_only)


# -- plain torch --------------------------------------------------------------------------------


def train_alone(run: Run) -> tuple[Net, torch.optim.Optimizer]:
    """Train one rank without Lightning; return the state."""
    model = make(run)
    members: list[Any] = group_members(model, run.grouping)
    if run.named:
        names = {p: name for name, p in model.named_parameters()}
        members = [[(names[p], p) for p in group] for group in members]
    optimizer = make_optimizer(run.optimizer, members, 1.0)
    steps(model, optimizer, run, 0)
    keep(held(model, optimizer, run), run)
    return model, optimizer


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, run: Run, rank: int) -> None:
    for step in range(run.steps):
        loss_of(model, run, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def lightning_rest(run: Run) -> dict[str, Any]:
    return {
        "epoch": 1,
        "global_step": run.steps,
        "pytorch-lightning_version": "2.6.6",
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {},
        "lr_schedulers": [],
    }


def save_alone(
    run: Run, change: Callable[[dict[str, Any], nn.Module], object] | None = None
) -> None:
    """Save in the layout of Lightning's files; ``change`` can edit the file before."""
    model, optimizer = train_alone(run)
    tree = {
        **lightning_rest(run),
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
    }
    if change is not None:
        change(tree, model)
    torch.save(tree, run.path)


# -- FSDP2 --------------------------------------------------------------------------------------


def train_fsdp(run: Run) -> tuple[Net, torch.optim.Optimizer]:
    """Train with fully sharded parameters; return the state. Collective."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make(run)
    mesh = init_device_mesh("cpu", (run.world,))
    fully_shard(model.a, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(run.optimizer, group_members(model, run.grouping), 1.0)
    steps(model, optimizer, run, distributed.get_rank())
    share_buffers(model)
    keep(held(model, optimizer, run), run)
    return model, optimizer


def share_buffers(model: nn.Module) -> None:
    """Give all ranks the buffers of rank 0, since torch saves those of any rank. Collective."""
    for buffer in model.buffers():
        distributed.broadcast(buffer, 0)


def state_dicts(
    model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return torch's own state dicts of a sharded run. Collective."""
    from torch.distributed.checkpoint import state_dict as library

    chosen = library.StateDictOptions(cpu_offload=True, **options)
    return (
        dict(library.get_model_state_dict(model, options=chosen)),
        dict(library.get_optimizer_state_dict(model, optimizer, options=chosen)),
    )


def save_fsdp_full(run: Run) -> None:
    """Save one file with the optimizer state as torch returns it, keyed by name. Collective."""
    model, optimizer = train_fsdp(run)
    weights, state = state_dicts(model, optimizer, full_state_dict=True)
    if distributed.get_rank() == 0:
        tree = {"state_dict": weights, "optimizer_states": [state]}
        torch.save({**lightning_rest(run), **tree}, run.path)
    distributed.barrier()


LAYOUTS = {
    "fsdp": ("model", "optimizer_0"),
    "plain": ("model", "optim"),
    "flattened": ("model", "optim"),
    "app": ("app", "app"),
}
"""Names of the subtrees of the model and the optimizer."""


def save_sharded(run: Run, layout: str) -> None:
    """Save a directory in a layout of Lightning, torch or torch's tutorial. Collective.

    Lightning's FSDPStrategy needs a GPU, so its layout is assembled here.

    Args:
        run: the run to train.
        layout: one of ``LAYOUTS``, or ``model parallel``, which Lightning itself writes.
    """
    if layout == "model parallel":
        fit_lightning(run, sharded="directory")
        return
    from torch.distributed import checkpoint as dcp

    model, optimizer = train_fsdp(run)
    flattened = layout == "flattened"
    weights, state = state_dicts(model, optimizer, flatten_optimizer_state_dict=flattened)
    of_model, of_optimizer = LAYOUTS[layout]
    tree: dict[str, Any] = {of_model: weights, of_optimizer: state}
    if layout == "app":
        tree = {"app": {"model": weights, "optim": state}}
    lightning = layout == "fsdp"
    if not lightning:
        tree["epoch"] = 1
    dcp.save(tree, checkpoint_id=run.path)  # type: ignore[attr-defined]
    if lightning and distributed.get_rank() == 0:
        torch.save(lightning_rest(run), Path(run.path) / "meta.pt")
    distributed.barrier()


def save_columns(run: Run) -> None:
    """Save matrices that are sharded by columns, as in tensor parallelism. Collective."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model, optimizer = train_alone(run)
    mesh = init_device_mesh("cpu", (run.world,))

    def cut(value: Any) -> Any:
        matrix = isinstance(value, torch.Tensor) and value.ndim > 1
        return distribute_tensor(value.detach(), mesh, [Shard(1)]) if matrix else value

    names = {p: name for name, p in model.named_parameters()}
    state = {
        names[p]: {key: cut(value) for key, value in held_by.items()}  # type: ignore[index]
        for p, held_by in optimizer.state.items()
    }
    groups = [{**g, "params": [names[p] for p in g["params"]]} for g in optimizer.param_groups]
    weights = {name: cut(tensor) for name, tensor in model.state_dict().items()}
    tree = {"net": weights, "adam": {"state": state, "param_groups": groups}}
    dcp.save(tree, checkpoint_id=run.path)  # type: ignore[attr-defined]


def save_tree(run: Run, make_tree: Callable[[Net, torch.optim.Optimizer], dict[str, Any]]) -> None:
    from torch.distributed import checkpoint as dcp

    tree = make_tree(*train_alone(run))
    dcp.save(tree, checkpoint_id=run.path, no_dist=True)  # type: ignore[attr-defined]
