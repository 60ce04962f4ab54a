"""Runs on tensor ranks times data ranks, and their state by DeepSpeed's accessors and layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from tests.support.engines import OVERFLOW, QUICK_SCALER, Engine, forget_tensor_ranks, fp16_on_cpu
from tests.support.oracle import scaler_of

TOKENS, LENGTH, SAMPLES = 50, 6, 12
WIDTH, HEADS, INNER = 24, 6, 20


@dataclass(frozen=True)
class Grid:
    """A run on tensor ranks times data ranks."""

    tensor: int
    data: int
    stage: int = 1
    precision: str = "fp32"
    model: str = "llama"
    """``llama``, ``qwen2``, or ``fused``: layers with fused projections."""
    extra: tuple[str, ...] = ()
    """Options of the model, of ZeRO, and of the plan by which AutoTP cuts."""

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
        if "round-robin" in self.extra:
            zero["round_robin_gradients"] = True
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": SAMPLES // self.data,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        if self.precision != "fp32":
            scaler = QUICK_SCALER if self.precision == "fp16" else {}
            config[self.precision] = {"enabled": True, **scaler}
        if self.tensor > 1:
            config["tensor_parallel"] = {"autotp_size": self.tensor, **self._plan()}
        return config

    def _plan(self) -> dict[str, Any]:
        if "heuristics" in self.extra or "plan" in self.extra:
            return {}
        columns, rows = [spec("column", ".*[qkv]_proj"), spec("column", ".*(gate|up)_proj")], []
        rows = [spec("row", ".*o_proj"), spec("row", ".*down_proj")]
        if self.model == "fused":
            columns = [spec("column", ".*qkv_proj", [[WIDTH, WIDTH // 2, WIDTH // 2], -1], 0)]
            columns.append(spec("column", ".*gate_up_proj", [2, -1], 0))
        elif "view" in self.extra:
            columns, rows = [spec("column", ".*up_proj", [2, -1, WIDTH], 1)], []
        elif "lora" in self.extra:
            columns.append(spec("column", r".*q_proj\.(whole|out)"))
            rows.append(spec("row", r".*o_proj\.(whole|into)"))
        elif "row-head" in self.extra:
            rows.append(spec("row", "lm_head"))
        else:
            return {"preset_model": self.model}
        rules = {"use_default_specs": False, "layer_specs": [*columns, *rows]}
        return {"partition_config": rules}


def spec(kind: str, layer: str, shape: Sequence[Any] = (), dimension: int = 0) -> dict[str, Any]:
    """Return a layer spec of AutoTP."""
    parts = {"shape": [*shape], "partition_dim": dimension} if shape else {}
    return {"patterns": [rf"{layer}\.weight$"], "partition_type": kind, **parts}


class DecoderLayer(nn.Module):
    """A layer with fused projections, which AutoTP's heuristics know by the name of the class."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.parts = WIDTH, heads * WIDTH // HEADS, heads * WIDTH // HEADS
        self.qkv_proj, self.o_proj = nn.Linear(WIDTH, sum(self.parts)), nn.Linear(WIDTH, WIDTH)
        self.gate_up_proj, self.down_proj = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.qkv_proj(x)
        sizes = [part * fused.shape[-1] // sum(self.parts) for part in self.parts]
        of_heads = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in fused.split(sizes, -1))
        queries, *pair = of_heads
        keys, values = (t.repeat_interleave(self.parts[0] // self.parts[1], 1) for t in pair)
        seen = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.o_proj(seen.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return torch.as_tensor(x + self.down_proj(silu(gate) * up))


class FusedModel(nn.Module):
    """Fused queries, keys and values, and a fused gate; AutoTP reads its ``config``."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            num_attention_heads=HEADS, num_key_value_heads=heads, hidden_size=WIDTH
        )
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.layers, self.norm = nn.ModuleList([DecoderLayer(heads)]), nn.LayerNorm(WIDTH)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x = self.layers[0](self.embed(input_ids))
        scores = self.head(self.norm(x))[:, :-1].float()
        return SimpleNamespace(loss=cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten()))


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank addition.

    AutoTP does not look into PEFT's layers, because they have a ``weight``.
    """

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole
        self.into, self.out = (nn.Linear(*sizes, bias=False) for sizes in ((WIDTH, 2), (2, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.whole(x) + self.out(self.into(x)))


def language_model(grid: Grid, seed: int) -> nn.Module:
    """Return a model with three key-value heads, of which two ranks have two and one."""
    import transformers

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": TOKENS,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 3,
        "tie_word_embeddings": "tied" in grid.extra,
    }
    if "biases" in grid.extra:
        sizes |= {"attention_bias": True, "mlp_bias": True}
    kinds: dict[str, Any] = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)),
        "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)),
        # The heuristics know parts of other sizes than a third only with two heads.
        "fused": partial(FusedModel, 2 if "heuristics" in grid.extra else 3),
    }
    model: nn.Module = kinds[grid.model]()
    model.register_buffer("seen", torch.tensor(float(seed)))
    if "frozen" in grid.extra:
        model.get_submodule("model.layers.0.mlp.up_proj").requires_grad_(requires_grad=False)
    if "lora" in grid.extra:
        model.requires_grad_(requires_grad=False)
        attention: Any = model.get_submodule("model.layers.0.self_attn")
        attention.q_proj, attention.o_proj = Adapted(attention.q_proj), Adapted(attention.o_proj)
    return model


@contextmanager
def engine_on(grid: Grid, seed: int, **options: Any) -> Iterator[Engine]:
    """Make an engine; reset DeepSpeed's global state at the end. ``options`` are of its config."""
    import deepspeed

    model = language_model(grid, seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    with fp16_on_cpu() if grid.precision == "fp16" else nullcontext():
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(trained, lr=0.01),
            config={**grid.config(), **options},
            dist_init_required=False,
        )
        try:
            yield engine
        finally:
            engine.destroy()
            forget_tensor_ranks()


def train_on(engine: Engine, grid: Grid, first: int, last: int) -> list[float]:
    """Train on this data rank's part of the batch; in fp16, one step in four overflows."""
    losses, size = [], SAMPLES // grid.data
    at = distributed.get_rank() // grid.tensor
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, TOKENS, (SAMPLES, LENGTH), generator=generator)
        mine = tokens[at * size : (at + 1) * size]
        loss = engine(input_ids=mine, labels=mine).loss
        overflows = grid.precision == "fp16" and step % 4 == 1
        engine.backward(loss * OVERFLOW if overflows else loss)
        engine.step()
        distributed.all_reduce(total := loss.detach().clone())
        losses.append(float(total) / grid.world)
    return losses


# -- the state, by DeepSpeed's accessors and the classes of layers ---------------------------------

COLUMN = {"LinearLayer", "VocabParallelLinear", "VocabParallelEmbedding"}
ROW = {"LinearAllreduce", "LinearAllreduceWithReplicatedInput", "HiddenParallelEmbedding"}
FUSED = {"SubParamLinearLayer", "fused_LinearLayer", "GateUpPack_LinearLayer"}


def whole_state(engine: Engine, grid: Grid) -> dict[str, torch.Tensor]:
    """Return all masters and states whole, and the module's buffers and scalars. Collective."""
    found: dict[str, torch.Tensor] = {}
    seen: set[nn.Parameter] = set()
    for module_name, module in engine.module.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            name, kind = f"{module_name}.{leaf}", type(module).__name__
            cut = {**dict.fromkeys(COLUMN | FUSED, 0), **dict.fromkeys(ROW, 1)}.get(kind)
            cut = None if kind in ROW and leaf == "bias" else cut
            parts = _fused_parts(grid, module_name) if kind in FUSED else (1,)
            for key, shard in _shards(engine, parameter).items():
                found[f"{key}/{name}"] = _joined(shard, cut, parts, grid)
    found |= {f"buffer/{name}": b.detach().clone() for name, b in engine.module.named_buffers()}
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    steps = {float(state["step"]) for state in inner.state.values() if "step" in state}
    scaler = scaler_of(engine)
    scalars = {
        "steps": engine.global_steps,
        "skipped": engine.skipped_steps,
        "step of Adam": steps.pop() if len(steps) == 1 else -1.0,
        "loss scale": getattr(scaler, "cur_scale", 1.0),
    }
    return found | {name: torch.tensor(float(value)) for name, value in scalars.items()}


def _fused_parts(grid: Grid, name: str) -> tuple[int, ...]:
    """Return the proportions of the layers that are fused."""
    if not name.endswith("qkv_proj"):
        return 1, 1
    return (3, 1, 1) if "heuristics" in grid.extra else (2, 1, 1)


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


def _joined(
    shard: torch.Tensor, dimension: int | None, parts: tuple[int, ...], grid: Grid
) -> torch.Tensor:
    """Return the tensor ranks' shards as one tensor; copies must be equal."""
    held: list[Any] = [None] * grid.world
    distributed.all_gather_object(held, shard)
    first = held[: grid.tensor]
    if grid.tensor > 1 and dimension is not None:
        units = [each.shape[dimension] // sum(parts) for each in first]
        split = [
            each.split([part * unit for part in parts], dimension)
            for each, unit in zip(first, units, strict=True)
        ]
        return torch.cat([piece for part in zip(*split, strict=True) for piece in part], dimension)
    assert all(torch.equal(each, shard) for each in first)
    return shard
