"""Unsupported configurations are refused at setup, by name and with a remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_elastic_zero.api import load_checkpoint, save_checkpoint
from tests.support.engines import class_of
from tests.support.fits import SMALL_BUCKETS, elastic, quiet_trainer
from tests.support.outcome import error_text
from tests.support.processes import HANG_TIMEOUT_S
from tests.support.ranks import ForkServer, Pools

pytestmark = pytest.mark.engine

HEADING = "UnsupportedError: lightning_elastic_zero cannot save and resume this run:\n"
EVALUATION_HEADING = (
    "UnsupportedError: lightning_elastic_zero cannot evaluate this model: its weights can be "
    "neither loaded nor saved:\n"
)
UNTESTED = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
NOT_ALLOWED = {"zero_allow_untested_optimizer": False}
"""The default, with which DeepSpeed would ask for that option before this library refuses."""
WIDTH, HIDDEN = 8, 600


def ltd() -> dict[str, Any]:
    routing = {"enabled": True, "random_ltd": {"enabled": True}}
    return {"data_efficiency": {"enabled": True, "data_routing": routing}}


def curriculum() -> dict[str, Any]:
    learning = {"enabled": True, "curriculum_metrics": {"length": {}}}
    sampling = {"enabled": True, "curriculum_learning": learning}
    return {"data_efficiency": {"enabled": True, "data_sampling": sampling}}


LOCO = {"err_beta": 0.8, "reset_T": 1024}


def compression() -> dict[str, Any]:
    method = {"shared_parameters": {"enabled": True, "schedule_offset": 2}, "different_groups": {}}
    off: dict[str, Any] = {"shared_parameters": {}, "different_groups": {}}
    return {"compression_training": {"row_pruning": off, "sparse_pruning": method}}


@dataclass(frozen=True)
class Refused:
    """A Trainer's run that is refused in `setup`."""

    sentence: str
    stage: Any = 2
    config: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "torch.optim.AdamW"
    layers: str = "linear"
    groups: int = 1
    precision: Any = "32-true"
    verb: str = "fit"
    """The called method of the Trainer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the strategy, instead of a config."""


def zero(**options: object) -> dict[str, Any]:
    return {"zero_optimization": options}


def made_by_deepspeed(name: str) -> dict[str, Any]:
    """Return a config with which DeepSpeed creates the optimizer."""
    return {"optimizer": {"type": name, "params": {"lr": 0.01}}}


class LARS(torch.optim.SGD):
    """A user's optimizer with the name of an algorithm that needs full weights."""


LBFGS = (
    "the optimizer LBFGS: its step requires a closure, which ZeRO does not pass; use Adam or AdamW"
)
SPARSE = (
    "the optimizer SparseAdam: it requires sparse gradients, and ZeRO's are dense; use Adam or "
    "AdamW"
)
MUON = (
    "the optimizer torch.optim.Muon in ZeRO: it requires whole matrices, which ZeRO partitions; "
    'use stage 0, or DeepSpeed\'s Muon ("optimizer": {"type": "Muon"} in its config)'
)
STRANGER = (
    "parameter group 0 of the optimizer has 1 parameters that the module lacks, with the shapes "
    "(7,): register them in the module, or remove them from the optimizer"
)
NVME = (
    "zero_optimization.offload_param.device = nvme: weights in files cannot be saved or "
    "restored; offload weights to cpu instead"
)
ADAFACTOR = (
    "the optimizer Adafactor in stage 0: it keeps factors of each matrix, which cannot be "
    "partitioned for another number of devices; use stage 1, 2 or 3"
)
ON_CPU = {"device": "cpu"}

BY_TRAINER = {
    "a stage in quotes": Refused(
        "zero_optimization.stage: '2', expected 0, 1, 2 or 3 without quotes",
        "2",
    ),
    "weights in files": Refused(
        NVME, 3, zero(offload_param={"device": "nvme", "nvme_path": "/nowhere"})
    ),
    "weights in files by options of the strategy": Refused(
        NVME, 3, options={"offload_parameters": True, "offload_params_device": "nvme"}
    ),
    "SuperOffload": Refused(
        "zero_optimization.offload_optimizer.super_offload: another process owns the optimizer, "
        "and its state is not accessible; remove the option: offload_optimizer to cpu works "
        "without it",
        3,
        zero(offload_optimizer={**ON_CPU, "super_offload": True}),
    ),
    "ZenFlow": Refused(
        "zero_optimization.zenflow: a second optimizer steps the largest gradients, and its "
        "state is not accessible; remove the option: offload_optimizer to cpu works without it",
        2,
        zero(offload_optimizer=ON_CPU, zenflow={"topk_ratio": 0.1}),
    ),
    "quantized frozen weights": Refused(
        "zero_optimization.zero_quantized_nontrainable_weights: frozen weights would be integers "
        "with separate scales; remove the option",
        3,
        zero(zero_quantized_nontrainable_weights=True),
    ),
    "AutoEP": Refused(
        "expert_parallel.enabled: expert parallelism, in which each rank has only some of the "
        "experts; remove the option: all ranks then have all experts, and ZeRO-3 partitions "
        "their weights",
        2,
        {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    ),
    "layers of experts": Refused(
        "mixture-of-experts layers of DeepSpeed: expert parallelism, in which each rank has only "
        "some of the experts; use layers with all experts on all ranks, such as those of "
        "transformers: ZeRO-3 partitions their weights",
        layers="experts",
    ),
    "sequences by a mesh": Refused(
        "sequence_parallel_size and data_parallel_size: ZeRO would partition over the data ranks "
        "only, and sequence ranks would hold copies; remove them. With a plain engine, configure "
        "sequence parallelism with an mpu: deepspeed.runtime.sequence_parallel.parallel_state_sp",
        2,
        {"sequence_parallel_size": 2, "data_parallel_size": 1},
    ),
    "random-LTD": Refused(
        "data_efficiency.data_routing.random_ltd: the state of its scheduler would be lost; "
        "remove the option",
        2,
        ltd(),
    ),
    "compression": Refused(
        "compression_training: the step of its schedules would be lost; remove the option, which "
        "DeepSpeed 0.19.8 does not have",
        2,
        compression(),
    ),
    "LoCo": Refused(
        "zero_optimization.zeropp_loco_param: its error feedback would be lost; remove the "
        "option, which DeepSpeed 0.19.8 does not have",
        3,
        zero(zero_quantized_gradients=True, zeropp_loco_param=LOCO),
    ),
    "a curriculum": Refused(
        "data_efficiency.data_sampling.curriculum_learning: the state of its data sampler would "
        "be lost; remove the option, and order the data in your own sampler",
        2,
        curriculum(),
    ),
    **{
        name: Refused(
            f"the optimizer {kind}: its state differs between ranks; use Adam or AdamW",
            stage,
            made_by_deepspeed(kind),
        )
        for name, kind, stage in (
            ("1-bit Adam", "OnebitAdam", 0),
            ("1-bit LAMB", "OnebitLamb", 0),
            ("0/1 Adam", "ZeroOneAdam", 2),
        )
    },
    "LAMB": Refused(
        "the optimizer FusedLamb: its update depends on how the parameters are partitioned; use "
        "stage 0, or Adam or AdamW",
        2,
        made_by_deepspeed("Lamb"),
    ),
    "LARS": Refused(
        "the optimizer LARS: its update depends on how the parameters are partitioned; use stage "
        "0, or Adam or AdamW",
        optimizer=f"{__name__}.LARS",
    ),
    "LBFGS": Refused(LBFGS, optimizer="torch.optim.LBFGS"),
    "LBFGS of a config without an option for it": Refused(
        LBFGS, 1, NOT_ALLOWED, "torch.optim.LBFGS"
    ),
    "LBFGS by its name": Refused(LBFGS, 2, made_by_deepspeed("LBFGS")),
    "SparseAdam": Refused(SPARSE, 3, optimizer="torch.optim.SparseAdam"),
    "Adafactor in stage 0": Refused(ADAFACTOR, 0, optimizer="torch.optim.Adafactor"),
    "Adafactor in stage 0 and bf16": Refused(
        ADAFACTOR, 0, optimizer="torch.optim.Adafactor", precision="bf16-mixed"
    ),
    "a parameter that the module lacks": Refused(STRANGER, 3, layers="a stranger"),
    "an empty group with a scheduler": Refused(
        "parameter group 2 of the optimizer is empty: DeepSpeed removes it, and the learning-rate "
        "scheduler then has one rate too many; create groups with parameters only",
        3,
        groups=3,
    ),
    "a frozen group": Refused(
        "parameter group 1 of the optimizer has frozen parameters only (2), which ZeRO-2 does not "
        "support; pass only parameters that require a gradient to the optimizer. To train a group "
        "later, use lr=0 until then",
        layers="a frozen one",
        groups=2,
    ),
    "Adagrad of two groups": Refused(
        "Adagrad with 2 parameter groups: DeepSpeed merges them into 1 at initialization; put "
        "all parameters into one group",
        optimizer="torch.optim.Adagrad",
        groups=2,
    ),
}
"""Refused with all releases of DeepSpeed, also those that lack a feature."""

NEWER = {"torch.optim.Muon": Refused(MUON, optimizer="torch.optim.Muon", layers="matrices")}
"""Optimizers that older releases lack: torch's Muon came with 2.9."""


def quantized(optimizer: str, stage: int = 2) -> Refused:
    """Return the case of an optimizer with a quantized state."""
    package, _, name = optimizer.partition(".optim.")
    return Refused(
        f"the optimizer {package}.{name}: its state is quantized in blocks of the flat "
        "buffer, which cannot be repartitioned bit for bit; use one with 16 or 32 bits",
        stage,
        optimizer=optimizer,
    )


EVALUATED = {
    "layers of experts": replace(BY_TRAINER["layers of experts"], verb="validate"),
    "weights in files": replace(BY_TRAINER["weights in files"], verb="test"),
    "quantized frozen weights": replace(BY_TRAINER["quantized frozen weights"], verb="predict"),
}
"""Also refused for evaluations: their weights are incomplete, or are not plain tensors."""

OF_OTHER_PACKAGES = {
    "torchao": {
        case.optimizer: case
        for case in (
            quantized("torchao.optim.AdamW8bit"),
            quantized("torchao.optim.Adam8bit", 0),
            quantized("torchao.optim.AdamW4bit", 3),
            quantized("torchao.optim.AdamWFp8", 1),
        )
    },
    "bitsandbytes": {
        f"{case.optimizer} in stage {case.stage}": case
        for case in (
            quantized("bitsandbytes.optim.AdamW8bit"),
            quantized("bitsandbytes.optim.PagedAdamW8bit", 3),
            quantized("bitsandbytes.optim.Lion8bit", 0),
            Refused(
                "the optimizer bitsandbytes.LAMB: its update depends on the norm of a whole "
                "parameter, which ZeRO partitions; use Adam or AdamW",
                optimizer="bitsandbytes.optim.LAMB",
            ),
            Refused(
                "the optimizer bitsandbytes.LAMB in stage 0: its state unorm_vec is neither "
                "element-wise nor a scalar; use Adam or AdamW",
                0,
                optimizer="bitsandbytes.optim.LAMB",
            ),
            Refused(
                "the optimizer bitsandbytes.AdEMAMix: it keeps two moments of a parameter in one "
                "tensor, which cannot be partitioned; use Adam or AdamW",
                optimizer="bitsandbytes.optim.AdEMAMix",
            ),
        )
    },
}
"""Cases by the package that they need."""


class Net(pl.LightningModule):
    """Two layers, or DeepSpeed's experts, and an optimizer of any class."""

    def __init__(self, case: Refused) -> None:
        super().__init__()
        self.case = case

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        bias = self.case.layers != "matrices"
        into, out = nn.Linear(WIDTH, HIDDEN, bias=bias), nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.net = nn.Sequential(into, out)
        out.requires_grad_(self.case.layers != "a frozen one")
        if self.case.layers == "experts":
            from deepspeed.moe.layer import MoE

            self.experts = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=2)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x = batch[0].to(next(self.net.parameters()).dtype)
        return torch.as_tensor(self.net(x).float().pow(2).mean())

    validation_step = test_step = training_step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.net(x))

    def configure_optimizers(self) -> Any:
        if "optimizer" in self.case.config:
            return None
        groups: list[dict[str, Any]] = [{"params": [*self.parameters()]}]
        if self.case.layers == "experts":
            from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

            groups = split_params_into_different_moe_groups_for_optimizer(
                {"params": groups[0]["params"], "name": "all"}
            )
        if self.case.layers == "a stranger":
            groups[0]["params"].append(nn.Parameter(torch.ones(7)))
        if self.case.groups > 1:
            all_of_them = groups[0]["params"]
            groups = [{"params": all_of_them[:2]}, {"params": all_of_them[2:]}]
            groups += [{"params": []}] * (self.case.groups - 2)
        optimizer = class_of(self.case.optimizer)(groups, lr=0.01)
        if self.case.groups < 3:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(8, WIDTH)), batch_size=2)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def error_of_trainer(root: str, case: Refused) -> str:
    """Run a case; return the error, and the number of steps before it."""
    warnings.simplefilter("ignore")
    options = dict(case.config)
    options["zero_optimization"] = {
        "stage": case.stage,
        **SMALL_BUCKETS,
        **options.get("zero_optimization", {}),
    }
    strategy = elastic(stage=case.stage, **case.options)
    if not case.options:
        strategy = elastic(config=UNTESTED | options)
    saves = ModelCheckpoint(f"{root}/saves")
    trainer = quiet_trainer(strategy, saves, max_epochs=1, precision=case.precision)
    error = error_text(lambda: getattr(trainer, case.verb)(Net(case)))
    return f"{error} (after {trainer.global_step} steps)"


def errors_of_trainers(root: str, cases: Mapping[str, Refused]) -> dict[str, str]:
    """Run all cases in one process."""
    return {name: error_of_trainer(root, case) for name, case in cases.items()}


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def engine(model: nn.Module, stage: int = 1, **options: Any) -> Any:
    """Make an engine with AdamW; other options than those of `initialize` go to the config."""
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
    from deepspeed.pipe import PipelineModule

    return engine(PipelineModule([*layers()], num_stages=2, loss_fn=nn.MSELoss()), 0)


def auto_tp() -> Any:
    rules = [{"patterns": [r".*\.weight$"], "partition_type": "column"}]
    section = {"autotp_size": 2, "partition_config": {"layer_specs": rules}}
    own = {"type": "Adafactor", "params": {"lr": 0.01}}
    return engine(layers(), tensor_parallel=section, optimizer=own)


class TwoModelRanks:
    """An mpu like Megatron's, in which all ranks have slices of one model."""

    def __init__(self) -> None:
        rank, world = distributed.get_rank(), distributed.get_world_size()
        single = [distributed.new_group([each]) for each in range(world)]
        self.model, self.data = distributed.new_group([*range(world)]), single[rank]

    def __getattr__(self, name: str) -> Callable[[], Any]:
        """Return a function that returns a group, its size, or this rank's number in it."""
        if not name.startswith("get_"):
            raise AttributeError(name)
        group = self.data if "data_parallel" in name else self.model
        if name.endswith("_group"):
            return lambda: group
        query = distributed.get_world_size if name.endswith("_size") else distributed.get_rank
        return lambda: query(group)


def tensor_parallel_by_mpu() -> Any:
    return engine(layers(), mpu=TwoModelRanks())


def expert_layers() -> Any:
    from deepspeed.moe.layer import MoE

    return engine(nn.Sequential(MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=2)), 0)


def sequences_by_a_mesh() -> Any:
    return engine(layers(), mesh_param=(1, 2), train_micro_batch_size_per_gpu=1, train_batch_size=1)


def late_group() -> Any:
    """Make an engine, and add a layer to its optimizer."""
    model = nn.Sequential(layers(), layers())
    made = engine(model, 2, trained=[*model[0].parameters()])
    made.optimizer.optimizer.add_param_group({"params": [*model[1].parameters()]})
    return made


def stranger() -> Any:
    model = layers()
    return engine(model, 0, trained=[*model.parameters(), nn.Parameter(torch.ones(7))])


def two_types(stage: int = 0) -> Any:
    """Make an engine with a parameter group for each type of weights."""
    model = layers()
    model[1].to(torch.bfloat16)
    return engine(model, stage, trained=[{"params": [*each.parameters()]} for each in model])


def sharded_linear() -> Any:
    """Make an engine with DeepSpeed's LoRA layer, which shards its frozen weight over ranks."""
    from deepspeed.linear import LoRAConfig, OptimizedLinear

    sharded = LoRAConfig(lora_r=2, base_weight_sharding=2)
    layer = OptimizedLinear(WIDTH, WIDTH, lora_config=sharded, dtype=torch.float32)
    trained = [p for p in layer.parameters() if p.requires_grad]
    return engine(nn.Sequential(layer), 2, trained=trained)


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


def with_curriculum() -> Any:
    return engine(layers(), **curriculum())


def with_removed_options() -> Any:
    """Return an engine with what older releases of DeepSpeed keep for two options."""
    made = engine(layers(), 3)
    methods = {"sparse_pruning": {"enabled": True}, "row_pruning": {"enabled": False}}
    made.compression_scheduler = SimpleNamespace(different_compression_methods=methods)
    made.optimizer.zeropp_loco_param = LOCO
    return made


KNOWN_WRAPPERS = (
    "torch.optim.Optimizer (stage 0 in fp32); FP16_Optimizer (stage 0 in bf16 or fp16, with "
    "FusedAdam); FP16_UnfusedOptimizer (stage 0 in bf16 or fp16); DeepSpeedZeroOptimizer (ZeRO-1 "
    "and ZeRO-2); BF16_Optimizer (ZeRO-1 in bf16 with fp32 gradient accumulation); "
    "DeepSpeedZeroOptimizer_Stage3 (ZeRO-3)"
)


def refused(make: Callable[[], Any], *reasons: str) -> tuple[Callable[[], Any], tuple[str, ...]]:
    return make, reasons


BY_SAVE = {
    "a parameter that the module lacks": refused(stranger, STRANGER),
    "weights of two types": refused(
        two_types,
        "trained weights of the types bfloat16 and float32 in stage 0: use one type, or ZeRO-1 "
        "with a separate parameter group for each type",
    ),
    "a PipelineModule": refused(
        pipeline,
        "a PipelineModule: pipeline parallelism, in which each rank has only some of the layers; "
        "use a plain torch.nn.Module: ZeRO-3 partitions its weights",
    ),
    "AutoTP with an optimizer of whole parameters": refused(
        auto_tp,
        "the optimizer Adafactor with tensor parallelism: its update depends on whole parameters, "
        "of which each tensor rank has a part; use Adam or AdamW",
    ),
    "an mpu of Megatron's": refused(
        tensor_parallel_by_mpu,
        "tensor or model parallelism by your own mpu, or by an earlier engine of this process: use "
        "DeepSpeed's AutoTP (tensor_parallel.autotp_size), and a process for each number of tensor "
        "ranks",
    ),
    "sequences by a mesh": refused(
        sequences_by_a_mesh,
        "ZeRO over 1 of 2 ranks, as with sequence parallelism by a device mesh (mesh_param): its "
        "sequence ranks hold copies. Pass an mpu to deepspeed.initialize with all ranks in "
        "get_sequence_data_parallel_group "
        "(deepspeed.runtime.sequence_parallel.parallel_state_sp), so that ZeRO partitions over "
        "all of them",
    ),
    "a group added later": refused(
        late_group,
        "parameter group 1 was added to the optimizer after DeepSpeed was initialized, so it is "
        "not partitioned: create all groups at the start, with lr=0 until they are trained",
    ),
    "layers of experts": refused(expert_layers, BY_TRAINER["layers of experts"].sentence),
    "sharded base weights": refused(
        sharded_linear,
        "deepspeed.linear.LoRAConfig.base_weight_sharding > 1: each rank has only a part of some "
        "frozen weights; set it to 1: ZeRO-3 partitions them too",
    ),
    "ZenFlow": refused(
        zenflow,
        "the optimizer wrapper ZenFlowZeroOptimizerSequential; supported are "
        f"{KNOWN_WRAPPERS}. Remove the option that selects it, or install a release of DeepSpeed "
        "that this library was tested with",
        BY_TRAINER["ZenFlow"].sentence,
    ),
    "random-LTD": refused(random_ltd, BY_TRAINER["random-LTD"].sentence),
    "options that 0.19.8 lacks": refused(
        with_removed_options, BY_TRAINER["LoCo"].sentence, BY_TRAINER["compression"].sentence
    ),
    "a curriculum": refused(with_curriculum, BY_TRAINER["a curriculum"].sentence),
}
"""Functions that make an engine, with the reasons for its refusal."""


def error_of_save(case: str, path: str) -> str:
    warnings.simplefilter("ignore")
    make, _ = BY_SAVE[case]
    made = make()
    return error_text(lambda: save_checkpoint(made, path))


def resume_two_types(path: str) -> bool:
    """Save and load in ZeRO-1; return whether the weights are those of the saved run."""
    saved, loaded = two_types(1), two_types(1)
    for each in (saved, loaded):
        hidden = each.module[0](torch.randn(1, WIDTH)).bfloat16()
        each.backward(each.module[1](hidden).float().sum())
        each.step()
    weights = [[p.clone() for p in each.module.parameters()] for each in (saved, loaded)]
    save_checkpoint(saved, path)
    load_checkpoint(loaded, path)
    restored = zip(loaded.module.parameters(), *weights, strict=True)
    return all(torch.equal(p, was) and not torch.equal(p, own) for p, was, own in restored)


def refuse_all(
    worlds: Pools, folder: Path, cases: Mapping[str, Refused], heading: str = HEADING
) -> None:
    """Fail unless each rank raises exactly the sentence before a step, and writes nothing."""
    for errors in worlds.run(2, partial(errors_of_trainers, str(folder), cases), HANG_TIMEOUT_S):
        expected = {
            name: f"{heading}  - {case.sentence} (after 0 steps)" for name, case in cases.items()
        }
        assert errors == expected
    assert not list(folder.iterdir())


def test_unsupported_trainers_are_refused_in_setup_with_one_sentence(
    worlds: Pools, tmp_path: Path
) -> None:
    refuse_all(worlds, tmp_path, BY_TRAINER)


def test_evaluations_of_unreadable_weights_are_refused(worlds: Pools, tmp_path: Path) -> None:
    refuse_all(worlds, tmp_path, EVALUATED, EVALUATION_HEADING)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch's Muon came with 2.9")
def test_newer_optimizers_are_refused(worlds: Pools, tmp_path: Path) -> None:
    refuse_all(worlds, tmp_path, NEWER)


@pytest.mark.cases(2)
@pytest.mark.parametrize("package", OF_OTHER_PACKAGES)
def test_quantized_optimizers_are_refused_by_name_and_package(
    package: str, worlds: Pools, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    refuse_all(worlds, tmp_path, OF_OTHER_PACKAGES[package])


@pytest.mark.long
@pytest.mark.cases(2)
@pytest.mark.parametrize("case", BY_SAVE)
def test_unsupported_engines_are_refused_at_their_first_save(
    case: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    pools = Pools(fork_server)  # New processes, because DeepSpeed keeps its groups.
    try:
        messages = pools.run(2, partial(error_of_save, case, str(tmp_path / "never.ckpt")))
    finally:
        pools.close()
    reasons = "".join(f"\n  - {reason}" for reason in BY_SAVE[case][1])
    for message in messages:
        heading, _, found = message.partition(":\n")
        assert heading.startswith("UnsupportedError: step 'save: look at the engine at step 0'")
        assert heading.endswith("lightning_elastic_zero cannot save and resume this run")
        assert f"\n{found}" == reasons
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_weights_of_two_types_resume_in_zero_1(worlds: Pools, tmp_path: Path) -> None:
    """The remedy for stage 0 with ``two_types``."""
    assert worlds.run(2, partial(resume_two_types, str(tmp_path / "saved.ckpt"))) == [True, True]
