"""Time how one rank plans its reads of a 70-billion-parameter model, from 1024 ranks on 768.

    python examples/benchmarks/plan.py

Nothing is read and no process is started: a plan is made of integers. What is measured is all that
a rank does before its first read: it parses a manifest with its table of 3072 files, lays out what
is held and what is wanted, plans each run, and looks up each file.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

from lightning_elastic_zero.layout import Transfer, plan_transfers
from lightning_elastic_zero.manifest import (
    FileEntry,
    Group,
    Manifest,
    Parameter,
    StateKey,
    manifest_from_json,
)
from lightning_elastic_zero.partition import FlatBuffer, layout_of, partition_numel, sub_groups

SAVED_ON = 1024
RESUMED_ON = 768
CASES = [(2, 2), (2, 3), (3, 2), (3, 3)]  # stage of the save, stage of the resume
ROUNDS = 5

LAYERS, HIDDEN, KEYS, FEED_FORWARD, VOCABULARY = 80, 8192, 1024, 28672, 128256  # Llama 3 70B
SUB_GROUP_NUMEL = 20_000_000  # small, so that there are several
ADAMW = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class Plan:
    """What one rank is going to read, and what it took to know."""

    transfers: list[Transfer]
    files: set[str]
    seconds: float
    peak_bytes: int


def parameters() -> tuple[Parameter, ...]:
    """Give the model's table: matrices in a group with weight decay, norms in one without."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.self_attn.q_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{layer}.self_attn.k_proj.weight"] = (KEYS, HIDDEN)
        shapes[f"{layer}.self_attn.v_proj.weight"] = (KEYS, HIDDEN)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (FEED_FORWARD, HIDDEN)
        shapes[f"{layer}.mlp.up_proj.weight"] = (FEED_FORWARD, HIDDEN)
        shapes[f"{layer}.mlp.down_proj.weight"] = (HIDDEN, FEED_FORWARD)
        shapes[f"{layer}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (HIDDEN,)
    shapes["model.norm.weight"] = (HIDDEN,)
    shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return tuple(
        Parameter(name, shape, "bfloat16", int(len(shape) == 1)) for name, shape in shapes.items()
    )


def flat_buffers(table: tuple[Parameter, ...], stage: int, ranks: int) -> list[FlatBuffer]:
    """Lay the parameters out as ZeRO does: a buffer per group, or sub-groups of them."""
    buffers = []
    for group in (0, 1):
        names = tuple(p.name for p in table if p.group == group)
        numels = tuple(p.numel for p in table if p.group == group)
        if stage == 3:
            for members in sub_groups(numels, ranks, SUB_GROUP_NUMEL):
                in_it = tuple(names[i] for i in members), tuple(numels[i] for i in members)
                buffers.append(FlatBuffer(group, *in_it))
        else:
            size = partition_numel(numels, (), ranks)
            buffers.append(FlatBuffer(group, names, numels, (), size))
    return buffers


def manifest_text(stage: int, ranks: int) -> str:
    """Write the manifest that such a run leaves, with three files of each rank."""
    table = parameters()
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
    """Name a rank's file."""
    return f"checkpoint/bf16_zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"


def plan_reads(text: str, stage: int, ranks: int, rank: int) -> tuple[list[Transfer], set[str]]:
    """Do what a rank does before its first read."""
    manifest = manifest_from_json(text, "manifest.json")
    buffers = flat_buffers(manifest.parameters, stage, ranks)
    wanted = layout_of(stage, buffers, ranks).on_rank(rank)
    transfers = plan_transfers(wanted, manifest.layout())
    files = {entry.name: entry for entry in manifest.files}  # as the reader has them
    return transfers, {files[file_of(t.source_rank)].name for t in transfers}


def measured(saved_stage: int, stage: int, rank: int, rounds: int = 1) -> Plan:
    """Plan one rank's reads, several times for the time and once for the memory."""
    text = manifest_text(saved_stage, SAVED_ON)

    def plan() -> tuple[list[Transfer], set[str]]:
        return plan_reads(text, stage, RESUMED_ON, rank)

    seconds = min(_seconds(plan) for _ in range(rounds))
    gc.collect()
    tracemalloc.start()
    try:
        transfers, files = plan()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return Plan(transfers, files, seconds, peak_bytes)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    table = parameters()
    total = sum(p.numel for p in table)
    text_bytes = len(manifest_text(3, SAVED_ON))
    print(f"{len(table)} parameters with {total / 1e9:.1f} billion elements")
    print(f"manifest.json of {SAVED_ON} ranks: {text_bytes / 1e6:.2f} MB")
    print(f"one rank of {RESUMED_ON}, best of {ROUNDS} rounds, the slowest of three ranks:\n")
    print("stages    seconds   peak MB   transfers   source ranks")
    for saved_stage, stage in CASES:
        plans = [
            measured(saved_stage, stage, rank, ROUNDS)
            for rank in (0, RESUMED_ON // 2, RESUMED_ON - 1)
        ]
        slowest = max(plans, key=lambda plan: plan.seconds)
        peak_mb = max(plan.peak_bytes for plan in plans) / 1e6
        print(
            f"{saved_stage} to {stage}  {slowest.seconds:9.3f} {peak_mb:9.1f} "
            f"{len(slowest.transfers):11} {len(slowest.files):14}"
        )


if __name__ == "__main__":
    main()
