"""Tensor parallelism (AutoTP): any number of tensor and data ranks restores on any other."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from lightning_elastic_zero import (
    convert_checkpoint,
    diff_checkpoints,
    fingerprint_checkpoint,
    inspect_checkpoint,
    verify_checkpoint,
)
from tests.support.engines import Engine, forget_tensor_ranks
from tests.support.outcome import captured_log, error_text
from tests.support.ranks import ForkServer, Pools

pytestmark = pytest.mark.engine

TOKENS, LENGTH, SAMPLES = 48, 6, 12

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Of losses, whose sums have another order on other ranks."""


@dataclass(frozen=True)
class Grid:
    """A run on tensor ranks times data ranks."""

    tensor: int
    data: int
    stage: int = 1
    precision: str = "fp32"
    model: str = "llama"
    extra: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = f"TP{self.tensor}xDP{self.data}-{self.stage}-{self.precision}-{self.model}"
        return "-".join((name, *self.extra))

    @property
    def world(self) -> int:
        return self.tensor * self.data

    def config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "stage3_param_persistence_threshold": 0}
        zero["reduce_bucket_size"] = 10_000  # the default is filled with NaN, 2 GB in each step
        if "offload" in self.extra:
            zero["offload_optimizer"] = {"device": "cpu"}
        if "sub-groups" in self.extra:
            zero["sub_group_size"] = 300
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": SAMPLES // self.data,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        if self.precision != "fp32":
            config[self.precision] = {"enabled": True}
        if self.tensor > 1:
            config["tensor_parallel"] = {"autotp_size": self.tensor, "preset_model": self.model}
        if {"fused", "view"} & {*self.extra}:
            spec: dict[str, Any] = {"patterns": [".*up_proj.weight$"], "partition_type": "column"}
            fused = {"shape": [2, -1], "partition_dim": 0}
            spec |= fused if "fused" in self.extra else {"shape": [2, -1, 24], "partition_dim": 1}
            rules = {"use_default_specs": False, "layer_specs": [spec]}
            config["tensor_parallel"]["partition_config"] = rules
        return config


def language_model(grid: Grid, seed: int) -> nn.Module:
    """Return a model with three key-value heads, of which two ranks have two and one."""
    import transformers

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": TOKENS,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "tie_word_embeddings": "tied" in grid.extra,
    }
    kinds = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
        "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config),
    }
    kind, config = kinds[grid.model]
    if "biases" in grid.extra:
        sizes |= {"attention_bias": True, "mlp_bias": True}
    model: nn.Module = kind(config(**sizes))
    model.register_buffer("seen", torch.tensor(float(seed)))
    model.get_submodule("model.layers.0.mlp.up_proj").requires_grad_("frozen" not in grid.extra)
    return model


@contextmanager
def engine_on(grid: Grid, seed: int) -> Iterator[Engine]:
    """Make an engine; reset DeepSpeed's global state at the end."""
    import deepspeed

    model = language_model(grid, seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=grid.config(), dist_init_required=False
    )
    try:
        yield engine
    finally:
        engine.destroy()
        forget_tensor_ranks()


def train_on(engine: Engine, grid: Grid, first: int, last: int) -> list[float]:
    """Train on this data rank's part of the batch."""
    losses, size = [], SAMPLES // grid.data
    at = distributed.get_rank() // grid.tensor
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, TOKENS, (SAMPLES, LENGTH), generator=generator)
        mine = tokens[at * size : (at + 1) * size]
        logits = engine(input_ids=mine).logits
        scores = logits[:, :-1].flatten(0, 1).float()
        loss = nn.functional.cross_entropy(scores, mine[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        distributed.all_reduce(total := loss.detach().clone())
        losses.append(float(total) / grid.world)
    return losses


# -- the state, by DeepSpeed's accessors and the classes of layers ---------------------------------

COLUMN = {"LinearLayer", "VocabParallelLinear", "VocabParallelEmbedding"}
ROW = {"LinearAllreduce", "LmHeadLinearAllreduce"}


def whole_state(engine: Engine, grid: Grid) -> dict[str, torch.Tensor]:
    """Return all masters and states whole, and the module's buffers. Collective."""
    found: dict[str, torch.Tensor] = {}
    seen: set[nn.Parameter] = set()
    for module_name, module in engine.module.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            name, kind = f"{module_name}.{leaf}", type(module).__name__
            cut = {**dict.fromkeys(COLUMN, 0), **dict.fromkeys(ROW, 1)}.get(kind)
            cut = None if kind in ROW and leaf == "bias" else cut
            for key, shard in _shards(engine, parameter).items():
                found[f"{key}/{name}"] = _joined(shard, cut, grid)
    found |= {f"buffer/{name}": b.detach().clone() for name, b in engine.module.named_buffers()}
    found["steps"] = torch.tensor(engine.global_steps)
    return found


def _shards(engine: Engine, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """Return the master and the states of this tensor rank's shard, whole over data ranks."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    keys = ("exp_avg", "exp_avg_sq")
    if not parameter.requires_grad:
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            return {"frozen": parameter.detach().clone()}
    if engine.zero_optimization_stage():
        found = {"master": safe_get_full_fp32_param(parameter)}
        found |= {key: safe_get_full_optimizer_state(parameter, key) for key in keys}
        return {key: value.clone() for key, value in found.items() if value is not None}
    stepped = parameter
    for low, high in zip(
        getattr(engine.optimizer, "fp16_groups", []),
        getattr(engine.optimizer, "fp32_groups", []),
        strict=True,
    ):
        stepped = next((h for w, h in zip(low, high, strict=True) if w is parameter), stepped)
    states = {key: inner.state[stepped][key].clone() for key in keys}
    return {"master": stepped.detach().clone(), **states}


def _joined(shard: torch.Tensor, dimension: int | None, grid: Grid) -> torch.Tensor:
    """Return the tensor ranks' shards as one tensor; copies must be equal."""
    held: list[Any] = [None] * grid.world
    distributed.all_gather_object(held, shard)
    first = held[: grid.tensor]
    if grid.tensor > 1 and dimension is not None:
        return torch.cat(first, dimension)
    assert all(torch.equal(each, shard) for each in first)
    return shard


def continued_on(grid: Grid, path: str, *, saves: bool) -> dict[str, Any]:
    """Train and save, also by DeepSpeed, or load into another run; return the state and losses."""
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    with engine_on(grid, 0 if saves else 7) as engine:
        train_on(engine, grid, *((0, 2) if saves else (100, 101)))
        progress = None
        if not saves:
            progress = load_checkpoint(engine, path).manifest.progress
        held = whole_state(engine, grid)
        if saves:
            save_checkpoint(engine, path)
            if grid.stage:
                engine.save_checkpoint(f"{path}-stock", "tag")
        losses = train_on(engine, grid, 2, 4)
        samples = engine.global_samples
    return {"state": held, "losses": losses, "progress": progress, "samples": samples}


@pytest.fixture(scope="module")
def pools(fork_server: ForkServer) -> Iterator[Pools]:
    """Yield worlds that are forked after the imports of models, which take each rank seconds."""
    fork_server.import_modules(
        "transformers.models.llama.modeling_llama", "deepspeed.module_inject"
    )
    started = Pools(fork_server)
    yield started
    started.close()


@dataclass(frozen=True)
class Saved:
    path: str
    result: dict[str, Any]


@pytest.fixture(scope="module")
def saved_on(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Grid], Saved]:
    """Return a function that trains and saves on a grid, once."""

    @cache
    def saved(grid: Grid) -> Saved:
        path = str(tmp_path_factory.mktemp("saved") / "step-2")
        return Saved(path, pools.run(grid.world, partial(continued_on, grid, path, saves=True))[0])

    return saved


TWO_BY_TWO = Grid(2, 2, 1)
QUICK = [(TWO_BY_TWO, Grid(3, 1, 3)), (Grid(1, 2, 2), Grid(2, 1, 3))]
MATRIX = [
    *(
        (Grid(2, 2, stage), target)
        for stage in range(4)
        for target in (Grid(1, 3, 3 - stage), Grid(2, 1, stage), Grid(3, 1, stage))
    ),
    *((Grid(1, 3, stage), Grid(2, 2, 3 - stage)) for stage in range(4)),
    (Grid(2, 2, 1, "bf16"), Grid(3, 1, 1, "bf16")),
    (Grid(2, 2, 0, "bf16"), Grid(1, 2, 1, "bf16")),
    *(
        (Grid(2, 2, stage, model=model, extra=extra), Grid(3, 1, stage, model=model, extra=extra))
        for stage, model, extra in (
            (1, "llama", ("tied",)),
            (2, "qwen2", ()),
            (2, "llama", ("offload",)),
            (3, "llama", ("offload",)),
            (1, "llama", ("frozen",)),
            (3, "llama", ("frozen",)),
            (2, "llama", ("biases",)),
        )
    ),
]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *(pytest.param(*pair, marks=pytest.mark.essential) for pair in QUICK),
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in MATRIX),
    ],
    ids=str,
)
def test_tensor_and_data_ranks_restore_on_others(
    source: Grid, target: Grid, saved_on: Callable[[Grid], Saved], pools: Pools
) -> None:
    saved = saved_on(source)
    found = pools.run(target.world, partial(continued_on, target, saved.path, saves=False))[0]
    one, other = saved.result["state"], found["state"]
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]
    assert found["losses"] == pytest.approx(saved.result["losses"], rel=TOLERANCE[source.precision])
    assert found["progress"].global_batch_size == SAMPLES
    assert found["progress"].global_samples == 2 * SAMPLES
    counted = target.tensor * (2 + 2) * SAMPLES  # DeepSpeed takes tensor ranks for data ranks.
    assert found["samples"] == counted


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(TWO_BY_TWO, Grid(1, 2, 2), marks=pytest.mark.essential),
        pytest.param(Grid(2, 2, 3), Grid(3, 1, 1), marks=pytest.mark.long),
        pytest.param(Grid(2, 2, 2), Grid(2, 1, 3), marks=pytest.mark.long),
        pytest.param(Grid(2, 2, 1, "bf16"), Grid(1, 2, 1, "bf16"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_checkpoints_of_deepspeed_restore_on_other_tensor_ranks(
    source: Grid, target: Grid, saved_on: Callable[[Grid], Saved], pools: Pools
) -> None:
    saved = saved_on(source)
    stock = f"{saved.path}-stock/tag"
    assert verify_checkpoint(stock).problem == ""
    found = pools.run(target.world, partial(continued_on, target, stock, saves=False))[0]
    one, other = saved.result["state"], found["state"]
    assert not [name for name in one if not torch.equal(one[name], other[name])]
    assert found["progress"].global_batch_size == SAMPLES
    assert found["progress"].global_samples == 2 * SAMPLES


@pytest.mark.parametrize("kind", ["optim", "model"])
def test_a_missing_file_of_deepspeeds_tensor_rank_is_named(
    kind: str, saved_on: Callable[[Grid], Saved], tmp_path: Path
) -> None:
    stock = Path(f"{saved_on(TWO_BY_TWO).path}-stock") / "tag"
    folder = Path(shutil.copytree(stock, tmp_path / "tag"))
    (missing,) = (
        p for p in folder.glob(f"*mp_rank_01_{kind}_states.pt") if "rank_0_" not in p.name
    )
    missing.unlink()
    problem = verify_checkpoint(folder).problem
    assert missing.name in problem
    assert "is missing" in problem


def test_tools_put_whole_parameters_together(
    saved_on: Callable[[Grid], Saved], tmp_path: Path
) -> None:
    saved = saved_on(TWO_BY_TWO)
    masters = {
        name.removeprefix("master/"): tensor
        for name, tensor in saved.result["state"].items()
        if name.startswith("master/")
    }
    assert inspect_checkpoint(saved.path).manifest.tensor_parallel.size == 2
    assert verify_checkpoint(saved.path).problem == ""
    convert_checkpoint(saved.path, tmp_path / "weights.pt", "fp32")
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert not [name for name in masters if not torch.equal(weights[name], masters[name])]
    convert_checkpoint(saved.path, tmp_path / "universal", "universal")
    assert fingerprint_checkpoint(tmp_path / "universal") == fingerprint_checkpoint(saved.path)
    differences = diff_checkpoints(saved.path, tmp_path / "universal")
    assert differences.compared > len(masters)
    assert not differences.tensors


@pytest.mark.parametrize("damage", ["missing", "exchanged"])
def test_missing_and_exchanged_files_are_named(
    damage: str, saved_on: Callable[[Grid], Saved], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved_on(TWO_BY_TWO).path, tmp_path / "step-2"))
    one, other = (
        folder / "checkpoint" / f"zero_pp_rank_0_mp_rank_0{rank}_optim_states.pt" for rank in (0, 1)
    )
    if damage == "missing":
        other.unlink()
    else:
        for suffix in ("", ".sums"):
            pair = [Path(f"{path}{suffix}") for path in (one, other)]
            texts = [path.read_bytes() for path in pair]
            for path, text in zip(pair, reversed(texts), strict=True):
                path.write_bytes(text)
    named = [path.name in verify_checkpoint(folder).problem for path in (one, other)]
    assert named == ([False, True] if damage == "missing" else [True, False])


def drifted_on(grid: Grid, path: str) -> tuple[list[str], float]:
    """Save with other weights on tensor rank 1, and load; return warnings and a weight."""
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    rank = distributed.get_rank()
    with engine_on(grid, 0) as engine:
        train_on(engine, grid, 0, 1)
        norm = engine.module.get_parameter("model.norm.weight")
        with torch.no_grad():
            norm.fill_(2.0 + rank)
        with captured_log("lightning_elastic_zero") as logs:
            save_checkpoint(engine, path)
        with torch.no_grad():
            norm.fill_(0.0)
        load_checkpoint(engine, path)
        return logs, float(norm.detach()[0])


def test_copies_that_drifted_apart_are_named_and_kept(pools: Pools, tmp_path: Path) -> None:
    found = pools.run(2, partial(drifted_on, Grid(2, 1, 0), str(tmp_path / "a")))
    (warning,) = found[0][0]
    assert "Every tensor rank trains model.norm.weight for itself" in warning
    assert [weight for _, weight in found] == [2.0, 3.0]


def warnings_on(grid: Grid, path: str) -> list[str]:
    from lightning_elastic_zero.api import save_checkpoint

    with engine_on(grid, 0) as engine:
        train_on(engine, grid, 0, 4)
        with captured_log("lightning_elastic_zero") as logs:
            save_checkpoint(engine, path)
        return logs


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
def test_uneven_cuts_do_not_make_copies_differ(stage: int, pools: Pools, tmp_path: Path) -> None:
    call = partial(warnings_on, Grid(2, 3, stage), str(tmp_path / "a"))
    assert pools.run(6, call)[0] == []


def measured_on(grid: Grid, path: str) -> list[float]:
    """Save with a measurement of each rank's part as optimizer state; return those restored."""
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    with engine_on(grid, 0) as engine:
        train_on(engine, grid, 0, 1)
        states = engine.optimizer.optimizer.state
        for state in states.values():
            state["norm"] = float(distributed.get_rank())
        save_checkpoint(engine, path)
        for state in states.values():
            state["norm"] = -1.0
        load_checkpoint(engine, path)
        return [state["norm"] for state in states.values()]


@pytest.mark.essential
def test_each_rank_gets_back_its_own_measurements(pools: Pools, tmp_path: Path) -> None:
    call = partial(measured_on, TWO_BY_TWO, str(tmp_path / "a"))
    assert pools.run(4, call) == [[0.0], [1.0], [2.0], [3.0]]


def fused_on(grid: Grid, path: str) -> tuple[int, ...]:
    """Save a layer that consists of two; return the shape of its shard."""
    from lightning_elastic_zero.api import save_checkpoint

    with engine_on(grid, 0) as engine:
        save_checkpoint(engine, path)
        return tuple(engine.module.get_parameter("model.layers.0.mlp.up_proj.weight").shape)


@pytest.mark.long
def test_fused_layers_are_put_together(pools: Pools, tmp_path: Path) -> None:
    grid = Grid(2, 1, extra=("fused",))
    assert pools.run(2, partial(fused_on, grid, str(tmp_path / "a"))) == [(10, 24)] * 2
    (cut,) = inspect_checkpoint(tmp_path / "a").manifest.tensor_parallel.cuts
    assert cut.widths == (5, 5, 5, 5)
    convert_checkpoint(tmp_path / "a", tmp_path / "weights.pt", "fp32")
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    expected = language_model(grid, 0).state_dict()
    assert not [name for name in expected if not torch.equal(weights[name], expected[name])]


def refusal_on(grid: Grid, path: str) -> str:
    from lightning_elastic_zero.api import save_checkpoint

    with engine_on(grid, 0) as engine:
        return error_text(lambda: save_checkpoint(engine, path))


@pytest.mark.long
@pytest.mark.parametrize(
    ("grid", "reason"),
    [
        (Grid(4, 1), "of 4 tensor ranks, some have none of its elements"),
        (
            Grid(2, 1, 3, extra=("sub-groups",)),
            "because their shards have other sizes: increase zero_optimization.sub_group_size",
        ),
        (
            Grid(2, 1, extra=("view",)),
            "up_proj.weight, whose shard has the shape (10, 24), but is described as a part (2, 5,",
        ),
    ],
    ids=str,
)
def test_shards_that_cannot_be_described_are_refused(
    grid: Grid, reason: str, pools: Pools, tmp_path: Path
) -> None:
    text = pools.run(grid.world, partial(refusal_on, grid, str(tmp_path / "a")))[0]
    assert reason in text
    assert not list(tmp_path.iterdir())


def stock_on(grid: Grid, folder: str) -> None:
    with engine_on(grid, 0) as engine:
        engine.save_checkpoint(folder, tag="tag")


@pytest.mark.long
def test_a_view_in_a_checkpoint_of_deepspeed_is_refused(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, partial(stock_on, Grid(2, 1, extra=("view",)), str(tmp_path)))
    text = error_text(lambda: inspect_checkpoint(tmp_path / "tag"))
    assert "up_proj.weight cannot be read: its layer spec views it in other dimensions" in text
