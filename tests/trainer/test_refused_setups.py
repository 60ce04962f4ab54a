"""Unsupported configurations are refused at setup, by name and with a remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from lightning_elastic_zero.api import save_checkpoint
from tests.support.fits import SMALL_BUCKETS
from tests.support.outcome import error_text
from tests.support.processes import HANG_TIMEOUT_S
from tests.support.ranks import ForkServer, Pools
from tests.trainer._refused_setups import (
    BY_TRAINER,
    EVALUATED,
    EVALUATION_HEADING,
    HEADING,
    NEWER,
    OF_OTHER_PACKAGES,
    ON_CPU,
    STRANGER,
    UNTESTED,
    WIDTH,
    Refused,
    ltd,
    said_of_all,
)

TENSOR = (
    "tensor or model parallelism over 2 ranks, in which each has a slice of a weight; remove it: "
    "ZeRO-3 partitions the weights too"
)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def engine(model: nn.Module, stage: int = 1, **options: Any) -> Any:
    """Make an engine on AdamW; unknown keywords of `initialize` go to the config."""
    import deepspeed

    ranks = {"mpu": options.pop("mpu", None), "mesh_param": options.pop("mesh_param", None)}
    zero = {"stage": stage, **SMALL_BUCKETS, **options.pop("zero_optimization", {})}
    trained = options.pop("trained", None) or [*model.parameters()]
    config = {"train_batch_size": 2, **UNTESTED, "zero_optimization": zero, **options}
    optimizer = None if "optimizer" in config else torch.optim.AdamW(trained, lr=0.01)
    made, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=trained, config=config, **ranks
    )
    return made


def pipeline() -> Any:
    """Make an engine of two stages of a pipeline."""
    from deepspeed.pipe import PipelineModule

    return engine(PipelineModule([*layers()], num_stages=2, loss_fn=nn.MSELoss()), 0)


def auto_tp() -> Any:
    """Make an engine whose layers AutoTP has cut."""
    rules = [{"patterns": [r".*\.weight$"], "partition_type": "column"}]
    section = {"autotp_size": 2, "partition_config": {"layer_specs": rules}}
    return engine(layers(), tensor_parallel=section)


class TwoModelRanks:
    """An mpu as Megatron's: all ranks have slices of one model."""

    def __init__(self) -> None:
        rank, world = distributed.get_rank(), distributed.get_world_size()
        alone = [distributed.new_group([each]) for each in range(world)]
        self.model, self.data = distributed.new_group([*range(world)]), alone[rank]

    def __getattr__(self, name: str) -> Callable[[], Any]:
        """Return a function that returns a group, its size, or this rank's place in it."""
        if not name.startswith("get_"):
            raise AttributeError(name)
        group = self.data if "data_parallel" in name else self.model
        if name.endswith("_group"):
            return lambda: group
        of = distributed.get_world_size if name.endswith("_size") else distributed.get_rank
        return lambda: of(group)


def tensor_parallel_by_mpu() -> Any:
    """Make an engine whose model is cut by the user."""
    return engine(layers(), mpu=TwoModelRanks())


def expert_layers() -> Any:
    """Make an engine with a layer of two experts, one on each rank."""
    from deepspeed.moe.layer import MoE

    return engine(nn.Sequential(MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=2)), 0)


def sequences_by_a_mesh() -> Any:
    """Make an engine whose two ranks have parts of one sequence."""
    return engine(layers(), mesh_param=(1, 2), train_micro_batch_size_per_gpu=1, train_batch_size=1)


def late_group() -> Any:
    """Make an engine, and give its optimizer another layer."""
    model = nn.Sequential(layers(), layers())
    made = engine(model, 2, trained=[*model[0].parameters()])
    made.optimizer.optimizer.add_param_group({"params": [*model[1].parameters()]})
    return made


def stranger() -> Any:
    """Make an engine whose optimizer has a parameter that the module lacks."""
    model = layers()
    return engine(model, 0, trained=[*model.parameters(), nn.Parameter(torch.ones(7))])


def two_types() -> Any:
    """Make an engine with weights of two types in one group."""
    model = layers()
    model[1].to(torch.bfloat16)
    return engine(model, 0)


def zenflow() -> Any:
    steps = {"select_strategy": "step", "select_interval": 2, "update_interval": 1}
    options = {"offload_optimizer": ON_CPU, "zenflow": {"topk_ratio": 0.1, **steps}}
    own = {"type": "AdamW", "params": {"lr": 0.01}}
    return engine(layers(), 2, zero_optimization=options, optimizer=own)


def random_ltd() -> Any:
    section = ltd()
    section["data_efficiency"]["data_routing"]["random_ltd"] |= {
        "total_layer_num": 2,
        "random_ltd_layer_num": 1,
        "random_ltd_layer_id": [0],
        "model_mask_name": None,
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": 1,
            "max_value": 4,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 1, "seq_per_step": 1},
        },
    }
    return engine(layers(), 1, **section)


KNOWN_WRAPPERS = (
    "torch.optim.Optimizer (stage 0 in fp32); FP16_Optimizer (stage 0 in bf16 or fp16, with "
    "FusedAdam); FP16_UnfusedOptimizer (stage 0 in bf16 or fp16); DeepSpeedZeroOptimizer (ZeRO-1 "
    "and ZeRO-2); BF16_Optimizer (ZeRO-1 in bf16 with fp32 gradient accumulation); "
    "DeepSpeedZeroOptimizer_Stage3 (ZeRO-3)"
)


def told(make: Callable[[], Any], *reasons: str) -> tuple[Callable[[], Any], tuple[str, ...]]:
    """Return functions that make engines, with the reasons to refuse them."""
    return make, reasons


BY_SAVE = {
    "a parameter that the module lacks": told(stranger, STRANGER),
    "weights of two types": told(
        two_types,
        "parameter group 0 has weights of the types bfloat16 and float32: use a separate "
        "parameter group for each type",
    ),
    "a PipelineModule": told(
        pipeline,
        "a PipelineModule: pipeline parallelism, in which each rank has only some of the layers; "
        "use a plain torch.nn.Module: ZeRO-3 partitions its weights",
    ),
    "AutoTP": told(auto_tp, TENSOR),
    "an mpu of Megatron's": told(tensor_parallel_by_mpu, TENSOR),
    "sequences by a mesh": told(
        sequences_by_a_mesh,
        "ZeRO over 1 of 2 ranks, as with sequence parallelism by a device mesh (mesh_param): its "
        "sequence ranks hold copies. Pass an mpu to deepspeed.initialize with all ranks in "
        "get_sequence_data_parallel_group "
        "(deepspeed.runtime.sequence_parallel.parallel_state_sp), so that ZeRO partitions over "
        "all of them",
    ),
    "a group added later": told(
        late_group,
        "parameter group 1 was added to the optimizer after DeepSpeed was initialized, so it is "
        "not partitioned: create all groups at the start, with lr=0 until they are trained",
    ),
    "layers of experts": told(expert_layers, BY_TRAINER["layers of experts"].sentence),
    "ZenFlow": told(
        zenflow,
        "the optimizer wrapper ZenFlowZeroOptimizerSequential; supported are "
        f"{KNOWN_WRAPPERS}. Remove the option that selects it, or install a release of DeepSpeed "
        "that this library was tested with",
        BY_TRAINER["ZenFlow"].sentence,
    ),
    "random-LTD": told(random_ltd, BY_TRAINER["random-LTD"].sentence),
}
"""What makes an engine, and the reasons for which it is refused."""


def said_by_save(case: str, path: str) -> str:
    warnings.simplefilter("ignore")
    make, _ = BY_SAVE[case]
    made = make()
    return error_text(lambda: save_checkpoint(made, path))


def refuse_all(
    worlds: Pools, folder: Path, cases: Mapping[str, Refused], heading: str = HEADING
) -> None:
    """Fail unless each rank raises the sentence alone, before a step, and nothing is written."""
    for said in worlds.run(2, partial(said_of_all, str(folder), cases), HANG_TIMEOUT_S):
        wanted = {
            name: f"{heading}  - {case.sentence} (after 0 steps)" for name, case in cases.items()
        }
        assert said == wanted
    assert not list(folder.iterdir())


@pytest.mark.engine
def test_unsupported_trainers_are_refused_in_setup_by_one_sentence(
    worlds: Pools, tmp_path: Path
) -> None:
    refuse_all(worlds, tmp_path, BY_TRAINER)


@pytest.mark.engine
def test_evaluations_of_unreadable_weights_are_refused(worlds: Pools, tmp_path: Path) -> None:
    refuse_all(worlds, tmp_path, EVALUATED, EVALUATION_HEADING)


@pytest.mark.engine
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch's Muon came with 2.9")
def test_newer_optimizers_are_refused(worlds: Pools, tmp_path: Path) -> None:
    refuse_all(worlds, tmp_path, NEWER)


@pytest.mark.engine
@pytest.mark.cases(2)
@pytest.mark.parametrize("package", OF_OTHER_PACKAGES)
def test_optimizers_with_few_bits_are_refused_by_name_and_package(
    package: str, worlds: Pools, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    refuse_all(worlds, tmp_path, OF_OTHER_PACKAGES[package])


@pytest.mark.engine
@pytest.mark.cases(2)
@pytest.mark.parametrize("case", BY_SAVE)
def test_unsupported_engines_are_refused_at_their_first_save(
    case: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    own = Pools(fork_server)  # DeepSpeed keeps its groups for the process.
    try:
        messages = own.run(2, partial(said_by_save, case, str(tmp_path / "never.ckpt")))
    finally:
        own.close()
    reasons = "".join(f"\n  - {reason}" for reason in BY_SAVE[case][1])
    for message in messages:
        heading, _, found = message.partition(":\n")
        assert heading.startswith("UnsupportedError: step 'save: look at the engine at step 0'")
        assert heading.endswith("lightning_elastic_zero cannot save and resume this run")
        assert f"\n{found}" == reasons
    assert not list(tmp_path.iterdir())
