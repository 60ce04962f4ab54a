"""Time how one rank plans its reads: of large models, on growing clusters, on tensor ranks.

    python examples/benchmarks/plan.py

Nothing is read and no process is started: a plan consists of integers. Measured is all that a rank
does before its first read: it parses a manifest with its table of files, computes the saved and the
wanted layout, finds the source ranks of each fragment, and looks up each file. Runs are computed
while they are read, one source rank at a time; the memory includes those of the first two ranks.
With tensor ranks, only the plan is measured, with all its runs. Seconds are CPU time.
"""

from __future__ import annotations

import gc
import itertools
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lightning_elastic_zero.core.cuts import Cut
from lightning_elastic_zero.core.layout import (
    Fragment,
    Layout,
    Resharding,
    ShardedLayout,
    Sharding,
    Transfer,
    TransferPlan,
)
from lightning_elastic_zero.core.manifest import (
    FileEntry,
    Group,
    Manifest,
    Parameter,
    StateKey,
    manifest_from_json,
)
from lightning_elastic_zero.core.partition import FlatBuffer, zero_layout

SAVED_ON = 1024
RESUMED_ON = 768
FEW = 8  # ranks on which the wide model is resumed
WIDE = 50_000  # parameters of the wide model, of a million elements each
CASES = [(2, 2), (2, 3), (3, 2), (3, 3)]  # stage of the save, stage of the resume
ROUNDS = 5

LAYERS, HIDDEN, VOCABULARY = 80, 8192, 128256  # Llama 3 70B
GROWTH = [(16, 47, 2560), (256, 73, 8192), (4096, 130, 24576)]
"""Ranks, layers and width of models of about 244 million parameters per rank, up to a trillion."""
GRIDS = [(8, 8), (4, 16), (2, 32), (1, 64)]
"""Tensor and data ranks of Llama 3 70B: from the first to each, and back."""
SUB_GROUP = 200  # parameters; few, so that a model has several
ADAMW = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class Plan:
    """The reads of one rank, and the cost of planning them."""

    runs: TransferPlan
    files: set[str]
    seconds: float
    peak_bytes: int

    @property
    def transfers(self) -> list[Transfer]:
        """All runs at once; a load never has them all."""
        return [transfer for _, transfers in self.runs.by_rank() for transfer in transfers]


def wide_parameters(count: int = WIDE) -> tuple[Parameter, ...]:
    """Return the table of a model of many parameters, a tenth of them without weight decay."""
    return tuple(
        Parameter(f"model.layers.{i}.weight", (1000, 1000), "bfloat16", int(i % 10 == 0))
        for i in range(count)
    )


def parameters(layers: int = LAYERS, hidden: int = HIDDEN) -> tuple[Parameter, ...]:
    """Return a model's table: matrices in a group with weight decay, norms in one without."""
    keys, feed_forward = hidden // 8, hidden * 7 // 2
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.self_attn.q_proj.weight"] = (hidden, hidden)
        shapes[f"{layer}.self_attn.k_proj.weight"] = (keys, hidden)
        shapes[f"{layer}.self_attn.v_proj.weight"] = (keys, hidden)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (feed_forward, hidden)
        shapes[f"{layer}.mlp.up_proj.weight"] = (feed_forward, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, feed_forward)
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (VOCABULARY, hidden)
    return tuple(
        Parameter(name, shape, "bfloat16", int(len(shape) == 1)) for name, shape in shapes.items()
    )


def flat_buffers(table: tuple[Parameter, ...], stage: int, ranks: int) -> list[FlatBuffer]:
    """Return ZeRO's layout of the parameters: a buffer per group, or sub-groups."""
    buffers = []
    for group in (0, 1):
        names = tuple(p.name for p in table if p.group == group)
        numels = tuple(p.numel for p in table if p.group == group)
        if stage == 3:
            cuts = [slice(i, i + SUB_GROUP) for i in range(0, len(names), SUB_GROUP)]
            buffers += [FlatBuffer(group, names[cut], numels[cut]) for cut in cuts]
        else:
            size = -(-sum(numels) // ranks)
            buffers.append(FlatBuffer(group, names, numels, (), size))
    return buffers


def manifest_text(stage: int, ranks: int, table: tuple[Parameter, ...]) -> str:
    """Return the manifest of such a run, with three files of each rank."""
    state = tuple(StateKey(k, "scalar" if k == "step" else "elementwise", "float32") for k in ADAMW)
    names = [file_of(rank, kind) for rank in range(ranks) for kind in ("optim", "model", "rng")]
    manifest = Manifest(
        save_id="0" * 32,
        stage=stage,
        world_size=ranks,
        precision="bf16",
        master_dtype="float32",
        parameters=table,
        groups=tuple(
            Group(tuple(p.name for p in table if p.group == g), {"lr": 1e-4}, state) for g in (0, 1)
        ),
        buffers=tuple(flat_buffers(table, stage, ranks)),
        module_buffers=(),
        files=tuple(FileEntry(name, 10**9, "0" * 32) for name in names),
    )
    return manifest.to_json()


def file_of(rank: int, kind: str = "optim") -> str:
    """Return the name of a rank's file."""
    return f"checkpoint/bf16_zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"


def plan_reads(text: str, stage: int, ranks: int, rank: int) -> tuple[TransferPlan, set[str]]:
    """Plan reads like a rank before its first read."""
    manifest = manifest_from_json(text, "manifest.json")
    buffers = flat_buffers(manifest.parameters, stage, ranks)
    wanted = zero_layout(stage, buffers, ranks).on_rank(rank)
    plan = TransferPlan(wanted, manifest.layout())
    files = {entry.name: entry for entry in manifest.files}  # as the reader has them
    return plan, {files[file_of(rank)].name for rank in plan.ranks}


def measured(text: str, stage: int, ranks: int, rank: int, rounds: int = 1) -> Plan:
    """Plan one rank's reads, several times for the time and once for the memory."""
    seconds = min(_seconds(lambda: plan_reads(text, stage, ranks, rank)) for _ in range(rounds))
    gc.collect()
    tracemalloc.start()
    try:
        runs, files = plan_reads(text, stage, ranks, rank)
        for _ in itertools.islice(runs.by_rank(), 2):
            pass
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return Plan(runs, files, seconds, peak_bytes)


def sharding(tensor_ranks: int) -> Sharding:
    """Return AutoTP's cuts: of all matrices but the embedding and the head."""
    cuts = {}
    for p in parameters():
        if "_proj" in p.name and tensor_ranks > 1:
            dim = int("o_proj" in p.name or "down_proj" in p.name)
            cuts[p.name] = Cut(p.name, dim, (p.shape[dim] // tensor_ranks,) * tensor_ranks)
    return Sharding(tensor_ranks, cuts)


def layout_on(grid: tuple[int, int], stage: int) -> Layout:
    """Return the layout of Llama 3 70B on tensor and data ranks."""
    tensor_ranks, data_ranks = grid
    cuts, of_ranks = sharding(tensor_ranks).cuts, []
    for rank in range(tensor_ranks):
        table = tuple(
            replace(p, shape=cuts[p.name].shape_on(rank, tensor_ranks, p.shape))
            if p.name in cuts
            else p
            for p in parameters()
        )
        of_ranks.append(zero_layout(stage, flat_buffers(table, stage, data_ranks), data_ranks))
    return of_ranks[0] if tensor_ranks == 1 else ShardedLayout(of_ranks)


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    for table, ranks, rounds in ((parameters(), RESUMED_ON, ROUNDS), (wide_parameters(), FEW, 1)):
        _print_plans(table, SAVED_ON, ranks, rounds)
    print("a model and a cluster that grow together:\n")
    for ranks, layers, hidden in GROWTH:
        _print_plans(parameters(layers, hidden), ranks, ranks * 3 // 4, ROUNDS)
    _print_tensor_plans()


def _print_plans(table: tuple[Parameter, ...], saved_on: int, ranks: int, rounds: int) -> None:
    total = sum(p.numel for p in table)
    print(f"{len(table)} parameters with {total / 1e9:.1f} billion elements")
    print(f"manifest.json: {len(manifest_text(3, saved_on, table)) / 1e6:.2f} MB")
    print(f"{saved_on} ranks to {ranks}, best of {rounds} rounds, the most of three ranks:\n")
    print("stages    seconds   peak MB   transfers   source ranks")
    for saved_stage, stage in CASES:
        text = manifest_text(saved_stage, saved_on, table)
        plans = [measured(text, stage, ranks, rank, rounds) for rank in (0, ranks // 2, ranks - 1)]
        seconds = max(plan.seconds for plan in plans)
        peak_mb = max(plan.peak_bytes for plan in plans) / 1e6
        counts = [sum(len(found) for _, found in plan.runs.by_rank()) for plan in plans]
        files = max(len(plan.files) for plan in plans)
        print(
            f"{saved_stage} to {stage}  {seconds:9.3f} {peak_mb:9.1f} {max(counts):11} {files:14}"
        )
    print(flush=True)


def _count_transfers(wanted: Sequence[Fragment], held: Layout, resharding: Resharding) -> int:
    plan = TransferPlan(wanted, held, resharding)
    return sum(len(transfers) for _, transfers in plan.by_rank())


def _print_tensor_plans() -> None:
    shapes = {p.name: p.shape for p in parameters()}
    layouts = {(grid, stage): layout_on(grid, stage) for grid in GRIDS for stage in (2, 3)}
    first, *others = GRIDS
    print(f"tensor x data ranks, best of {ROUNDS} rounds, the most of four ranks:\n")
    print("stages  from    to       seconds   transfers")
    for saved_stage, stage in CASES:
        for saved, live in [(first, o) for o in GRIDS] + [(o, first) for o in others]:
            held, wanted = layouts[saved, saved_stage], layouts[live, stage]
            of_both = sharding(saved[0]), sharding(live[0])
            worst, most = 0.0, 0
            for rank in (0, 5, 31, 63):
                resharding = Resharding(*of_both, rank % live[0], shapes)
                plan = partial(_count_transfers, wanted.on_rank(rank), held, resharding)
                worst = max(worst, min(_seconds(plan) for _ in range(ROUNDS)))
                most = max(most, plan())
            grids = f"{saved[0]}x{saved[1]:<4}  {live[0]}x{live[1]:<4}"
            print(f"{saved_stage} to {stage}  {grids} {worst:9.3f} {most:11}")
    print(flush=True)


if __name__ == "__main__":
    main()
