"""Tensor parallelism by DeepSpeed's AutoTP: the cuts of parameters, and the refused runs.

A rank is ``data rank * tensor ranks + tensor rank``. DeepSpeed 0.19.8 describes on each parameter
of a layer that it has cut which elements each tensor rank has; all other parameters are copies.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from lightning_elastic_zero.core.autotp import autotp_cut
from lightning_elastic_zero.core.cuts import Cut
from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.core.manifest import STAGE_WEIGHTS
from lightning_elastic_zero.core.requirements import DEEPSPEED
from lightning_elastic_zero.engine.addresses import full_shape, parameter_names
from lightning_elastic_zero.engine.deepspeed import cut_by_autotp

SECTION, SIZE = "tensor_parallel", "autotp_size"
"""Section of DeepSpeed's config, and its number of tensor ranks."""

FIRST_RELEASE = "0.19.8"
"""The first release that describes cuts."""

ZERO_INIT = (
    "tensor parallelism with zero.Init: ZeRO-3 partitions weights that are not cut over the tensor "
    "ranks too. Create the model without zero.Init (Lightning: in __init__, not in "
    "configure_model; transformers: without an HfDeepSpeedConfig)"
)

WHOLE_PARAMETERS = {"adafactor", "fusedlamb", "lamb", "lars", "muon", "muonwithauxadam"}
"""Optimizers whose updates depend on norms or factors of whole parameters, in lower case."""


def configured_size(config: Mapping[str, Any]) -> int:
    """Return the number of tensor ranks in DeepSpeed's config; 1 without tensor parallelism."""
    return max(int((config.get(SECTION) or {}).get(SIZE) or 1), 1)


def grid_in(config: Mapping[str, Any] | None, devices: int) -> RankGrid:
    """Return the data ranks and tensor ranks of devices by DeepSpeed's config."""
    tensor = configured_size(config or {})
    return RankGrid(devices // tensor, tensor)


def tensor_ranks(engine: Any) -> int:
    """Return the number of tensor ranks; 1 without tensor parallelism."""
    return int(engine.mp_world_size)


def engine_grid(engine: Any) -> RankGrid:
    """Return the ranks over which ZeRO partitions the state, and the tensor ranks of each."""
    return RankGrid(int(engine.seq_dp_world_size), tensor_ranks(engine))


def is_cut(module: torch.nn.Module) -> bool:
    """Whether an engine has cut layers of a module, which it does not undo."""
    return any(cut_by_autotp(parameter) for parameter in module.parameters())


def remove_input_check(engine: Any) -> None:
    """Remove AutoTP's comparison of the first inputs, which fails for batches in containers."""
    if (handle := getattr(engine, "first_dataloader_check", None)) is not None:
        handle.remove()
        engine.first_dataloader_check = None


def evaluation_engine(module: torch.nn.Module, config: Mapping[str, Any], device: int) -> Any:
    """Return an engine without an optimizer, with tensor parallelism as in training.

    Lightning creates its engines for evaluations without it.
    """
    import deepspeed

    sections = ["fp16", "bf16", SECTION]
    if (config.get("zero_optimization") or {}).get("stage") == STAGE_WEIGHTS:
        sections += ["zero_allow_untested_optimizer", "zero_optimization"]
    used = {key: config[key] for key in sections if key in config}
    engine, *_ = deepspeed.initialize(
        args=Namespace(device_rank=device),
        config={"train_micro_batch_size_per_gpu": 1, **used},
        model=module,
        model_parameters=[],
        dist_init_required=False,
    )
    return engine


def tensor_group(engine: Any) -> Any:
    """Return the process group of the tensor ranks of this data rank."""
    return engine.mpu.get_tensor_model_parallel_group()


def samples_overcount(engine: Any) -> int:
    """Return how many times DeepSpeed counts each sample: tensor ranks are data ranks to it."""
    ranks = tensor_ranks(engine)
    if ranks == 1:
        return 1
    accumulated = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
    true = accumulated * int(engine.seq_dp_world_size)
    return max(int(engine.train_batch_size()) // true, 1)


def global_batch(engine: Any) -> int:
    """Return the samples of an optimizer step, each of which counts once."""
    return int(engine.train_batch_size()) // samples_overcount(engine)


def unfit_release(release: str) -> Iterator[str]:
    """Yield the reason to refuse tensor parallelism under a release of DeepSpeed."""
    if not DEEPSPEED.is_at_least(release, FIRST_RELEASE):
        yield (
            f"tensor parallelism under DeepSpeed {release}, which does not describe how it cuts "
            f"weights: install {FIRST_RELEASE}"
        )


def unfit_run(engine: Any, release: str) -> Iterator[str]:
    """Yield the reasons to refuse an engine with several tensor ranks."""
    size, data_ranks = tensor_ranks(engine), int(engine.seq_dp_world_size)
    if reasons := [*unfit_release(release)]:
        yield from reasons
        return
    if engine.autotp_size() != size:
        yield (
            "tensor or model parallelism by your own mpu, or by an earlier engine of this process: "
            "use DeepSpeed's AutoTP (tensor_parallel.autotp_size), and a process for each number "
            "of tensor ranks"
        )
        return
    if engine.sequence_parallel_size != 1:
        yield (
            "tensor parallelism with sequence parallelism: use one of them. Both would train on "
            "the same group of ranks, of which one has parts of weights and the other of sequences"
        )
        return
    tensor_rank = distributed.get_rank(tensor_group(engine))
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    if size * data_ranks != ranks or rank % size != tensor_rank:
        yield (
            f"{size} tensor ranks and {data_ranks} data ranks of {ranks} ranks: tensor ranks must "
            "be neighbours, and other kinds of parallelism be off"
        )
    names = parameter_names(engine.module)
    partitioned = [p for p in names if hasattr(p, "ds_process_group")]
    if any(distributed.get_world_size(p.ds_process_group) != data_ranks for p in partitioned):
        yield ZERO_INIT
    kinds = {
        type(o).__name__ for o in (engine.optimizer, getattr(engine.optimizer, "optimizer", 0))
    }
    if found := sorted(kind for kind in kinds if kind.lower() in WHOLE_PARAMETERS):
        yield (
            f"the optimizer {found[0]} with tensor parallelism: its update depends on whole "
            "parameters, of which each tensor rank has a part; use Adam or AdamW"
        )
    unfit = [*_unfit_cuts(names, size)]
    yield from unfit or _unfit_shapes(names, size, tensor_rank)


def cuts_of(
    names: Mapping[torch.nn.Parameter, Sequence[str]], size: int
) -> dict[torch.nn.Parameter, tuple[Cut, tuple[int, ...]]]:
    """Return the cuts of parameters with their whole shapes; copies are left out.

    Raises ValueError for a layout that is not a cut (``unfit_run``).
    """
    found = {}
    for parameter, of_parameter in names.items():
        about = cut_by_autotp(parameter)
        if about and (cut := autotp_cut(of_parameter[0], about, size)):
            found[parameter] = cut
    return found


def _unfit_shapes(
    names: Mapping[torch.nn.Parameter, Sequence[str]], size: int, tensor_rank: int
) -> Iterator[str]:
    """Yield the shards that have another shape than DeepSpeed describes."""
    for parameter, (cut, whole) in cuts_of(names, size).items():
        shape, described = full_shape(parameter), cut.shape_on(tensor_rank, size, whole)
        if shape != described:
            yield (
                f"{cut.name}, whose shard has the shape {shape}, but is described as a part "
                f"{described} of {whole}: use a layer spec of AutoTP without shape, or with as "
                "many dimensions as the weight has"
            )


def _unfit_cuts(names: Mapping[torch.nn.Parameter, Sequence[str]], size: int) -> Iterator[str]:
    """Yield the reasons to refuse the layouts of parameters."""
    described = 0
    for parameter, of_parameter in names.items():
        if (about := cut_by_autotp(parameter)) is None:
            continue
        described += 1
        try:
            autotp_cut(of_parameter[0], about, size)
        except ValueError as error:
            yield f"{of_parameter[0]} with tensor parallelism: {error}"
    if not described:
        yield (
            "tensor parallelism without a layer that DeepSpeed has cut: use "
            "tensor_parallel.autotp_size with a model that AutoTP knows"
        )
