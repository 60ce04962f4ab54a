"""Tensor parallelism (AutoTP): any number of tensor and data ranks restores on any other."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed, nn

from lightning_elastic_zero import (
    convert_checkpoint,
    diff_checkpoints,
    fingerprint_checkpoint,
    inspect_checkpoint,
    verify_checkpoint,
)
from lightning_elastic_zero.engine.tensor_parallel import unfit_release
from tests.engine._tensor_grids import (
    SAMPLES,
    Grid,
    engine_on,
    language_model,
    train_on,
    whole_state,
)
from tests.support.outcome import captured_log, error_text
from tests.support.ranks import ForkServer, Pools

pytestmark = pytest.mark.engine

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
"""Of losses, whose sums have another order on other ranks."""


def continued_on(grid: Grid, path: str, *, saves: bool) -> dict[str, Any]:
    """Train and save, also by DeepSpeed, or load into another run; return the state and losses."""
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    with engine_on(grid, 0 if saves else 7) as engine:
        train_on(engine, grid, *((0, 2) if saves else (100, 101)))
        progress = None
        if not saves:
            progress = load_checkpoint(engine, path).manifest.progress
        # DeepSpeed's accessors are wrong with round-robin gradients.
        held = {} if "round-robin" in grid.extra else whole_state(engine, grid)
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
HEURISTICS: dict[str, Any] = {"model": "fused", "extra": ("heuristics",)}
"""AutoTP knows the fused layers by their names."""
VOCABULARY: dict[str, Any] = {"extra": ("tied", "plan")}
"""The plan of transformers cuts a tied embedding along the vocabulary."""
LAYERS: list[tuple[int, dict[str, Any]]] = [
    *((stage, {"model": "fused"}) for stage in range(4)),
    *((stage, {"extra": ("lora",)}) for stage in range(4)),
    *((stage, VOCABULARY) for stage in (1, 3)),
]
QUICK = (TWO_BY_TWO, Grid(3, 1, 3))
MATRIX = [
    (Grid(1, 2, 2), Grid(2, 1, 3)),
    *(
        (Grid(2, 2, stage), target)
        for stage in range(4)
        for target in (Grid(1, 3, 3 - stage), Grid(2, 1, stage), Grid(3, 1, stage))
    ),
    *((Grid(1, 3, stage), Grid(2, 2, 3 - stage)) for stage in range(4)),
    *(
        (Grid(2, 2, stage, precision), Grid(3, 1, 3 - stage, precision))
        for stage in range(4)
        for precision in ("bf16", "fp16")
    ),
    (Grid(1, 2, 2, "fp16"), Grid(2, 1, 1, "fp16")),
    *(
        (Grid(2, 2, stage, **options), Grid(*ranks, stage, **options))
        for stage, options in LAYERS
        for ranks in ((3, 1), (1, 2))
    ),
    *(
        (Grid(2, 2, stage, model=model, extra=extra), Grid(3, 1, stage, model=model, extra=extra))
        for stage, model, extra in (
            (1, "llama", ("tied",)),
            (2, "llama", ("tied", "row-head")),
            (2, "qwen2", ()),
            (2, "llama", ("biases",)),
            (2, "llama", ("offload",)),
            (3, "llama", ("offload",)),
            (1, "llama", ("frozen",)),
            (3, "llama", ("frozen",)),
        )
    ),
    (Grid(2, 2, 2, **HEURISTICS), Grid(1, 2, 3, **HEURISTICS)),
]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(*QUICK, marks=pytest.mark.essential),
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


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2])
def test_round_robin_gradients_restore_on_others(
    stage: int, saved_on: Callable[[Grid], Saved], pools: Pools
) -> None:
    """They train the same weights; other ranks step them."""
    plain = saved_on(Grid(2, 2, stage))
    taken_in_turn = saved_on(Grid(2, 2, stage, extra=("round-robin",)))
    target = Grid(3, 1, stage)
    found = pools.run(3, partial(continued_on, target, taken_in_turn.path, saves=False))[0]
    assert not [
        n for n, t in plain.result["state"].items() if not torch.equal(t, found["state"][n])
    ]
    turned = Grid(1, 2, stage, extra=("round-robin",))
    back = pools.run(2, partial(continued_on, turned, plain.path, saves=False))[0]
    assert back["losses"] == pytest.approx(plain.result["losses"], rel=TOLERANCE["fp32"])


def convert_by_deepspeed(stock: str, universal: str, *, strict: bool) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    kept = {"keep_temp_folder": False, "strict": strict, "inject_missing_state": False}
    main(Namespace(input_folder=stock, output_folder=universal, **workers, **kept))


def loaded_by_deepspeed(grid: Grid, folder: Path) -> dict[str, torch.Tensor]:
    """Load a Universal Checkpoint by DeepSpeed's own code; return masters and states."""
    with engine_on(grid, 7, checkpoint={"load_universal": True}) as engine:
        train_on(engine, grid, 100, 101)
        engine.load_checkpoint(str(folder.parent), tag=folder.name)
        return whole_state(engine, grid)


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Grid(2, 2, 1), Grid(3, 1, 1)),
        (Grid(2, 2, 1), Grid(1, 3, 2)),
        (Grid(2, 2, 3), Grid(3, 1, 3)),
        (Grid(3, 1, 3), Grid(2, 2, 3)),
        (Grid(2, 2, 1, "bf16"), Grid(1, 2, 1, "bf16")),
        (Grid(2, 2, 2, "fp16"), Grid(3, 1, 2, "fp16")),
        (Grid(2, 2, 2, **VOCABULARY), Grid(3, 1, 2, **VOCABULARY)),
        (Grid(2, 2, 1, model="fused"), Grid(3, 1, 2, model="fused")),
        (Grid(2, 2, 3, model="fused"), Grid(1, 2, 3, model="fused")),
        (Grid(2, 2, 2, **HEURISTICS), Grid(1, 2, 2, **HEURISTICS)),
        (Grid(2, 2, 1, extra=("lora",)), Grid(3, 1, 1, extra=("lora",))),
        (Grid(2, 2, 3, extra=("lora",)), Grid(3, 1, 3, extra=("lora",))),
        (Grid(2, 2, 2, extra=("biases",)), Grid(3, 1, 2, extra=("biases",))),
    ],
    ids=str,
)
def test_deepspeeds_universal_checkpoints_restore_the_same(
    source: Grid,
    target: Grid,
    saved_on: Callable[[Grid], Saved],
    pools: Pools,
    tmp_path: Path,
) -> None:
    """DeepSpeed 0.19.8 converts frozen weights with ``--no_strict`` only."""
    stock = f"{saved_on(source).path}-stock/tag"
    folder, strict = tmp_path / "universal", "lora" not in source.extra
    pools.run(1, partial(convert_by_deepspeed, stock, str(folder), strict=strict))
    theirs = pools.run(target.world, partial(loaded_by_deepspeed, target, folder))[0]
    ours = pools.run(target.world, partial(continued_on, target, stock, saves=False))[0]["state"]
    tensors = [name for name in ours if name.startswith(("master/", "exp_avg"))]
    assert len(tensors) >= 12
    assert not [name for name in tensors if not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize("damage", ["missing", "exchanged"])
@pytest.mark.parametrize("kind", ["optim", "model"])
def test_missing_and_exchanged_files_of_deepspeed_are_named(
    kind: str, damage: str, saved_on: Callable[[Grid], Saved], tmp_path: Path
) -> None:
    stock = Path(f"{saved_on(TWO_BY_TWO).path}-stock") / "tag"
    folder = Path(shutil.copytree(stock, tmp_path / "tag"))
    one, other = (max(folder.glob(f"*mp_rank_0{rank}_{kind}_states.pt")) for rank in (0, 1))
    if damage == "missing":
        other.unlink()
        reason = "is missing"
    else:
        one.rename(kept := tmp_path / "kept")
        other.rename(one)
        kept.rename(other)
        reason = "and renamed. Copy the files of this tag again, each under its own name"
    problem = verify_checkpoint(folder).problem
    assert (other if damage == "missing" else one).name in problem
    assert reason in problem


def save_two_steps(grid: Grid, folder: str) -> None:
    """Let DeepSpeed save two steps of a run."""
    with engine_on(grid, 0) as engine:
        for step, tag in enumerate(("old", "new")):
            train_on(engine, grid, 2 * step, 2 * step + 2)
            engine.save_checkpoint(folder, tag)


def failed_load(grid: Grid, path: str) -> str:
    from lightning_elastic_zero.api import load_checkpoint

    with engine_on(grid, 7) as engine:
        return error_text(lambda: load_checkpoint(engine, path))


@pytest.mark.long
@pytest.mark.parametrize(("stage", "precision"), [(2, "bf16"), (3, "fp32")])
def test_an_old_file_of_another_tensor_rank_is_refused(
    stage: int, precision: str, pools: Pools, tmp_path: Path
) -> None:
    """A kill while DeepSpeed writes a tag again leaves one."""
    grid = Grid(2, 1, stage, precision)
    pools.run(2, partial(save_two_steps, grid, str(tmp_path)))
    (old,) = tmp_path.glob("old/*mp_rank_01_optim_states.pt")
    shutil.copy(old, tmp_path / "new")
    assert "Resume from another checkpoint" in verify_checkpoint(tmp_path / "new").problem
    for text in pools.run(2, partial(failed_load, grid, str(tmp_path / "new"))):
        assert "Resume from another checkpoint" in text


@pytest.mark.parametrize("writer", ["this library", "DeepSpeed"])
def test_tools_put_whole_parameters_together(
    writer: str, saved_on: Callable[[Grid], Saved], tmp_path: Path
) -> None:
    saved = saved_on(TWO_BY_TWO)
    path = saved.path if writer == "this library" else f"{saved.path}-stock/tag"
    masters = {
        name.removeprefix("master/"): tensor
        for name, tensor in saved.result["state"].items()
        if name.startswith("master/")
    }
    manifest = inspect_checkpoint(path).manifest
    assert manifest.tensor_parallel.size == 2
    shapes = {name: tuple(tensor.shape) for name, tensor in masters.items()}
    assert {p.name: p.shape for p in manifest.parameters} == shapes
    assert verify_checkpoint(path).problem == ""
    convert_checkpoint(path, tmp_path / "weights.pt", "fp32")
    convert_checkpoint(path, tmp_path / "folder", "safetensors")
    for weights in (
        torch.load(tmp_path / "weights.pt", weights_only=True),
        load_file(tmp_path / "folder" / "model.safetensors"),
    ):
        assert not [name for name in masters if not torch.equal(weights[name], masters[name])]
    for target in ("universal", "dcp"):
        convert_checkpoint(path, tmp_path / target, target)
        assert fingerprint_checkpoint(tmp_path / target) == fingerprint_checkpoint(saved.path)
        differences = diff_checkpoints(path, tmp_path / target)
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


def drifted_by_deepspeed(grid: Grid, path: str) -> None:
    """Train the last norm by other gradients on tensor rank 1, and save by DeepSpeed."""
    with engine_on(grid, 0) as engine:
        if distributed.get_rank():
            engine.module.get_parameter("model.norm.weight").register_hook(torch.neg)
        train_on(engine, grid, 0, 1)
        engine.save_checkpoint(path, "tag")


def warnings_of_a_load(grid: Grid, path: str) -> list[str]:
    from lightning_elastic_zero.api import load_checkpoint

    with engine_on(grid, 7) as engine, captured_log("lightning_elastic_zero") as logs:
        load_checkpoint(engine, path)
    return logs


@pytest.mark.parametrize(
    ("stage", "precision", "targets"),
    [
        (2, "bf16", [Grid(1, 1, 2, "bf16")]),
        pytest.param(3, "fp32", [Grid(1, 2), Grid(2, 1), Grid(3, 1)], marks=pytest.mark.long),
    ],
)
def test_copies_of_deepspeed_that_drifted_apart_are_named(
    stage: int, precision: str, targets: list[Grid], pools: Pools, tmp_path: Path
) -> None:
    pools.run(2, partial(drifted_by_deepspeed, Grid(2, 1, stage, precision), str(tmp_path)))
    path = str(tmp_path / "tag")
    for target in targets:
        first, *others = pools.run(target.world, partial(warnings_of_a_load, target, path))
        (warning,) = (text for text in first if "copies" in text)
        assert f"{path}: Every tensor rank trains model.norm.weight for itself" in warning
        assert not [text for texts in others for text in texts if "copies" in text]
    verified = verify_checkpoint(path)
    assert not verified.problem
    assert "copies of model.norm.weight that differ between tensor ranks" in verified.note
    (lost,) = convert_checkpoint(path, tmp_path / "weights.pt", "fp32").lost
    assert lost.startswith("copies of model.norm.weight that differ between tensor ranks")


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


class YuanLayer(nn.Module):
    """Yuan's names, and three heads for each tensor rank: two ranks get one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.v_proj, self.o_proj = nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False)


class Lamb(torch.optim.SGD):
    """A user's optimizer with the name of an algorithm that needs norms of whole weights."""


OF_WHOLE_WEIGHTS = "with tensor parallelism: its update depends on whole parameters"
UNFIT = {
    "zero.Init": "tensor parallelism with zero.Init: ZeRO-3 partitions weights that are not cut",
    "sequences": "tensor parallelism with sequence parallelism: use one of them",
    "experts": "mixture-of-experts layers of DeepSpeed: expert parallelism",
    "heads": "v_proj.weight with tensor parallelism: Yuan shared-QK tensor parallelism selects",
    "Muon": f"the optimizer MuonWithAuxAdam {OF_WHOLE_WEIGHTS}",
    "Adafactor": f"the optimizer Adafactor {OF_WHOLE_WEIGHTS}",
    "Lamb": f"the optimizer Lamb {OF_WHOLE_WEIGHTS}",
}


def unfit_on(kind: str, path: str) -> str:
    """Make an engine that cannot be saved; return the error of its first save."""
    import deepspeed
    from deepspeed.moe.layer import MoE

    from lightning_elastic_zero.api import save_checkpoint

    stage, extra = (
        {"zero.Init": 3, "experts": 0, "Lamb": 0}.get(kind, 1),
        ("heuristics",) * (kind == "heads"),
    )
    grid = Grid(2, 1, stage, model="fused", extra=extra)
    config = grid.config()
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=kind == "zero.Init"):
        model: Any = language_model(grid, 0)
    if kind == "experts":
        model.experts = MoE(24, nn.Linear(24, 24), num_experts=2)
    if kind == "heads":
        model.config.num_key_value_heads = 6
        model.layers = nn.ModuleList([YuanLayer()])
    if kind in ("Muon", "Adafactor"):
        config["optimizer"] = {"type": kind, "params": {"lr": 0.01}}
    parameters = [*model.parameters()]
    optimizer = None if "optimizer" in config else torch.optim.AdamW(parameters)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameters,
        optimizer=Lamb(parameters, lr=0.01) if kind == "Lamb" else optimizer,
        config=config,
        mesh_param=(1, 2) if kind == "sequences" else None,
        dist_init_required=False,
    )
    return error_text(lambda: save_checkpoint(engine, path))


@pytest.mark.parametrize("kind", UNFIT)
def test_what_tensor_ranks_cannot_have_is_refused(
    kind: str, own_pools: Pools, tmp_path: Path
) -> None:
    for text in own_pools.run(2, partial(unfit_on, kind, str(tmp_path / "a"))):
        assert UNFIT[kind] in text
    assert not list(tmp_path.iterdir())


def test_older_releases_are_refused_by_name() -> None:
    (text,) = unfit_release("0.19.7")
    assert "tensor parallelism under DeepSpeed 0.19.7" in text
    assert "install 0.19.8" in text
    assert not [*unfit_release("0.19.8")]


def stock_on(grid: Grid, folder: str) -> None:
    with engine_on(grid, 0) as engine:
        engine.save_checkpoint(folder, tag="tag")


@pytest.mark.long
def test_a_view_in_a_checkpoint_of_deepspeed_is_refused(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, partial(stock_on, Grid(2, 1, extra=("view",)), str(tmp_path)))
    text = error_text(lambda: inspect_checkpoint(tmp_path / "tag"))
    assert "up_proj.weight cannot be read: its layer spec views it in other dimensions" in text
