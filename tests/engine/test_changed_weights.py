"""Weights or masters that user code changed in place: a checkpoint has both."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elastic_zero.tools.conversion import convert_checkpoint
from lightning_elastic_zero.tools.selection import ConvertOptions
from lightning_elastic_zero.tools.verification import verify_checkpoint
from tests.support.checkpoints import STEPS, Saved, evaluated_weights, save
from tests.support.engines import Engine, EngineCase, batch, engine_of, inner_of, train, trained
from tests.support.late_saves import save_late
from tests.support.oracle import Dump, differences, dump, expected_in, unrounded
from tests.support.outcome import captured_log
from tests.support.ranks import Pools, skip_without

pytestmark = pytest.mark.engine

SCHEDULE_FREE = "schedulefree.AdamWScheduleFree"


class Lookahead(torch.optim.SGD):
    """An optimizer with slow weights, to which ``sync`` moves its weights for an evaluation.

    In ZeRO-3, ``eval()`` of ``schedulefree`` finds no weights between steps.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("slow", p.clone()).lerp_(p, 0.5)

    @torch.no_grad()
    def sync(self) -> None:
        for p, state in self.state.items():
            p.copy_(state["slow"])


LOOKAHEAD = f"{Lookahead.__module__}.{Lookahead.__name__}"


def gathered(engine: Engine) -> Any:
    """Return a context with the whole weights, which writes changes of rank 0 back."""
    import deepspeed

    return deepspeed.zero.GatheredParameters([*trained(engine.module).values()], modifier_rank=0)


@torch.no_grad()
def clamp(engine: Engine) -> None:
    with gathered(engine):
        for parameter in trained(engine.module).values():
            parameter.clamp_(-0.1, 0.1)


def swap(engine: Engine) -> None:
    """Put other tensors into the module, as averaging callbacks do."""
    for parameter in trained(engine.module).values():
        parameter.data = parameter.data * 0.75


def evaluate(engine: Engine) -> None:
    inner_of(engine).eval()


def sync(engine: Engine) -> None:
    inner_of(engine).sync()


def set_train(engine: Engine) -> None:
    if hasattr(inner_of(engine), "train"):
        inner_of(engine).train()


@dataclass(frozen=True)
class Change:
    setup: EngineCase
    change: Callable[[Engine], None]
    stock: str = ""
    """Folder for a save by DeepSpeed; empty: none."""

    def __str__(self) -> str:
        return f"{self.change.__name__}-{self.setup}"


CHANGES = [
    Change(EngineCase(2, "2", "bf16"), clamp),
    Change(EngineCase(2, "3", sub_group=700, persistence=0), clamp),
    Change(EngineCase(2, "1", optimizer=SCHEDULE_FREE), evaluate),
    Change(EngineCase(3, "3", optimizer=LOOKAHEAD, sub_group=700), sync),
    Change(EngineCase(2, "2", offload=True, optimizer="CPUAdam"), clamp),
    Change(EngineCase(2, "2", "bf16", optimizer=LOOKAHEAD), sync),
    Change(EngineCase(2, "3", "bf16", offloaded_weights=True, persistence=0), clamp),
    Change(EngineCase(2, "3", "bf16", nvme="plain", sub_group=1500, persistence=0), clamp),
    Change(EngineCase(2, "B", "bf16"), clamp),
    Change(EngineCase(2, "2", "fp16"), clamp),
    Change(EngineCase(2, "0", "bf16"), clamp),
]


def train_change_and_save(of: Change, saved: Saved) -> Any:
    with engine_of(of.setup, 0) as engine:
        set_train(engine)
        train(engine, of.setup, 0, STEPS)
        of.change(engine)
        save(engine, saved)
        if of.stock:
            engine.save_checkpoint(of.stock, tag="tag")
        set_train(engine)
        losses = train(engine, of.setup, STEPS, STEPS + 3)
        return losses, dump(engine, of.setup)


def resume(setup: EngineCase, saved: Saved) -> Any:
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 7, tilt=3.0) as engine:
        set_train(engine)
        train(engine, setup, 100, 101)
        load_checkpoint(engine, saved.path)
        found = dump(engine, setup)
        set_train(engine)
        losses = train(engine, setup, STEPS, STEPS + 3)
        return found, losses, dump(engine, setup)


def expected(saved: Saved, target: EngineCase) -> Dump:
    held = saved.dump()
    weights = {k: v.to(target.dtype) for k, v in held.items() if k.startswith("weight/")}
    return expected_in(held, saved.setup, target) | weights


@pytest.mark.parametrize("of", CHANGES, ids=str)
def test_a_resume_restores_masters_and_weights_and_continues_bit_for_bit(
    of: Change, pools: Pools, tmp_path: Path
) -> None:
    if of.setup.nvme:
        skip_without("AsyncIOBuilder", pools)
    saved = Saved(of.setup, str(tmp_path / "changed.ckpt"))
    losses, after = pools.run(of.setup.world, partial(train_change_and_save, of, saved))[0]
    assert unrounded(saved.dump())
    manifest = json.loads((tmp_path / "changed.ckpt/manifest.json").read_text())
    assert manifest["rank_state"].count("module_weights") == 1
    found = pools.run(of.setup.world, partial(resume, of.setup, saved))
    assert not differences(expected(saved, of.setup), found[0][0])
    assert found[0][1] == losses
    assert not differences(after, found[0][2])


def save_a_snapshot(setup: EngineCase, path: str, change: Callable[[Engine], None] | None) -> Any:
    """Change the weights, take a snapshot, change them again, then write the snapshot."""
    from lightning_elastic_zero.checkpoint.save import collect, write_shards
    from lightning_elastic_zero.checkpoint.snapshot import Snapshotter
    from lightning_elastic_zero.checkpoint.types import SaveRequest
    from lightning_elastic_zero.coordination.ranks import connect_ranks
    from lightning_elastic_zero.engine.live import LiveEngine

    with engine_of(setup, 0) as engine, closing(connect_ranks()) as ranks:
        train(engine, setup, 0, STEPS)
        if change is not None:
            change(engine)
        wanted = dump(engine, setup)
        contents = collect(SaveRequest(LiveEngine(engine), path), ranks.rank)
        snapshotter = Snapshotter()
        snapshot = snapshotter.take(contents)
        clamp(engine)
        train(engine, setup, STEPS, STEPS + 1)
        snapshot.wait()
        write_shards(snapshot.contents, ranks)
        snapshotter.close()
        return wanted


@pytest.mark.parametrize("change", [None, clamp], ids=["none", "clamp"])
@pytest.mark.parametrize(
    "setup",
    [
        EngineCase(2, "2", "bf16"),
        pytest.param(EngineCase(2, "3", persistence=0), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_snapshot_has_the_weights_of_its_time(
    setup: EngineCase, change: Callable[[Engine], None] | None, pools: Pools, tmp_path: Path
) -> None:
    """The writer compares weights with masters while training goes on."""
    path = tmp_path / "snapshot.ckpt"
    wanted = pools.run(2, partial(save_a_snapshot, setup, str(path), change))[0]
    kept = json.loads((path / "manifest.json").read_text())["rank_state"]
    assert ("module_weights" in kept) == (change is not None)
    found = pools.run(2, partial(resume, setup, Saved(setup, str(path))))
    assert not differences(wanted, found[0][0])


def evaluate_and_save_late(saved: Saved) -> None:
    with engine_of(saved.setup, 0) as engine:
        set_train(engine)
        train(engine, saved.setup, 0, STEPS)
        evaluate(engine)
        save_late(engine, saved, then=set_train)


def test_a_background_save_from_a_device_precedes_a_change_of_mode(
    pools: Pools, tmp_path: Path
) -> None:
    """``train()`` moves the masters before the next step, which waits for the copies."""
    saved = Saved(EngineCase(2, "1", optimizer=SCHEDULE_FREE), str(tmp_path / "averaged.ckpt"))
    pools.run(2, partial(evaluate_and_save_late, saved))


def saved_state_of_ranks(setup: EngineCase, folder: str) -> list[list[str]]:
    """Save before the first step, after steps, a load and an evaluation; return rank_state."""
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    paths = [Path(folder) / str(n) for n in range(5)]
    with engine_of(setup, 0) as engine:
        for step, path in enumerate(paths[:3]):
            save_checkpoint(engine, path)
            train(engine, setup, step, step + 1)
        load_checkpoint(engine, paths[2])
        save_checkpoint(engine, paths[3])
        engine.eval()
        engine(batch(0, engine.global_rank, setup.world)[0])
        save_checkpoint(engine, paths[4])
    return [json.loads((path / "manifest.json").read_text())["rank_state"] for path in paths]


@pytest.mark.parametrize(
    "setup",
    [
        EngineCase(2, "3", "bf16", hpz=2, persistence=0),
        EngineCase(2, "3", "fp16", sub_group=700),
        EngineCase(2, "2", "fp16", offload=True, optimizer="CPUAdam"),
        EngineCase(2, "3", offload=True, ratio=0.5, optimizer="CPUAdam", sub_group=700),
        EngineCase(2, "1", autocast=True),
        EngineCase(2, "2", "bf16", bf16_masters=True),
        EngineCase(2, "0", "fp16"),
    ],
    ids=str,
)
def test_an_ordinary_save_has_no_other_weights(
    setup: EngineCase, pools: Pools, tmp_path: Path
) -> None:
    """In fp16, a step is skipped because of an overflow."""
    if setup.offload:
        skip_without("CPUAdamBuilder", pools)
    for saves in pools.run(2, partial(saved_state_of_ranks, setup, str(tmp_path))):
        assert not any("module_weights" in kept for kept in saves)


def clamp_gathered(setup: EngineCase, path: str) -> tuple[Any, Any]:
    """Clamp weights that ZeRO-3 keeps gathered between steps, without telling DeepSpeed."""
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, STEPS)
        weight = engine.module.bn.weight.data.clamp_(-0.1, 0.1).clone()
        save_checkpoint(engine, path)
        wanted = weight.tolist(), train(engine, setup, STEPS, STEPS + 3)
    with engine_of(setup, 7) as engine:
        load_checkpoint(engine, path)
        weight = engine.module.bn.weight.data.clone()
        return wanted, (weight.tolist(), train(engine, setup, STEPS, STEPS + 3))


def test_a_gathered_weight_of_zero_3_is_restored(pools: Pools, tmp_path: Path) -> None:
    for wanted, found in pools.run(
        2, partial(clamp_gathered, EngineCase(2, "3"), f"{tmp_path}/c.ckpt")
    ):
        assert found == wanted


def clamp_frozen(setup: EngineCase, path: str) -> tuple[list[float], list[float]]:
    """Clamp a frozen weight in a gathered form, save and load it."""
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, STEPS)
        wanted = engine.module.frozen.bias.data.clamp_(-0.1, 0.1).tolist()
        save_checkpoint(engine, path)
    with engine_of(setup, 7) as engine:
        load_checkpoint(engine, path)
        return wanted, engine.module.frozen.bias.data.tolist()


def save_after_forward(setup: EngineCase, path: str) -> tuple[list[float], list[float]]:
    """Save and load before the first step; return a frozen weight before and after."""
    from deepspeed import zero

    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    def frozen(engine: Engine) -> list[float]:
        with zero.GatheredParameters([engine.module.frozen.weight]):
            return list(engine.module.frozen.weight.data.ravel().tolist())

    with engine_of(setup, 0) as engine:
        wanted = frozen(engine)
        engine.eval()
        with torch.no_grad():
            for _ in range(2):  # After the first one, weights are partitioned again.
                engine(batch(0, engine.global_rank, setup.world)[0])
        save_checkpoint(engine, path)
    with engine_of(setup, 7) as engine:
        load_checkpoint(engine, path)
        return wanted, frozen(engine)


def test_a_frozen_weight_is_not_rounded_as_forward_reads_it(pools: Pools, tmp_path: Path) -> None:
    call = partial(save_after_forward, EngineCase(2, "3", autocast=True), f"{tmp_path}/c.ckpt")
    for wanted, found in pools.run(2, call):
        assert wanted == found != []


def test_a_gathered_frozen_weight_of_zero_3_is_restored(pools: Pools, tmp_path: Path) -> None:
    call = partial(clamp_frozen, EngineCase(2, "3"), f"{tmp_path}/c.ckpt")
    for wanted, found in pools.run(2, call):
        assert wanted == found != []


def loaded(setup: EngineCase, saved: Saved, options: dict[str, Any]) -> Dump:
    """Return the state after a load; empty on ranks other than 0."""
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 7, tilt=3.0) as engine:
        load_checkpoint(engine, saved.path, **options)
        return dump(engine, setup) or {}


@pytest.fixture(
    scope="module",
    params=[clamp, pytest.param(swap, marks=pytest.mark.long)],
    ids=lambda change: change.__name__,
)
def changed(
    request: pytest.FixtureRequest, pools: Pools, tmp_path_factory: pytest.TempPathFactory
) -> Saved:
    setup = EngineCase(2, "2", "bf16")
    folder = tmp_path_factory.mktemp("changed")
    saved = Saved(setup, str(folder / "a.ckpt"))
    change = Change(setup, request.param, str(folder / "stock"))
    pools.run(2, partial(train_change_and_save, change, saved))
    return saved


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "target",
    [
        EngineCase(3, "3", "bf16", sub_group=700),
        EngineCase(1, "1", "bf16"),
        EngineCase(3, "0", "bf16"),
        EngineCase(3, "B", "bf16"),
        EngineCase(1, "3", "bf16", persistence=0, offload=True, optimizer="CPUAdam"),
    ],
    ids=str,
)
def test_both_are_restored_on_other_counts_and_stages(
    target: EngineCase, changed: Saved, pools: Pools
) -> None:
    found = pools.run(target.world, partial(loaded, target, changed, {}))[0]
    wanted = expected(changed, target)
    keys = [key for key in wanted if key.startswith(("master/", "weight/", "exp_avg"))]
    assert not differences({k: wanted[k] for k in keys}, {k: found[k] for k in keys})


def stock_of(saved: Saved) -> Saved:
    """Return DeepSpeed's save of the same state."""
    stock = Saved(saved.setup, str(Path(saved.path).with_name("stock")))
    Path(stock.dump_path).write_bytes(Path(saved.dump_path).read_bytes())
    return stock


@pytest.mark.parametrize(
    "target", [EngineCase(2, "2", "bf16"), EngineCase(3, "3", "bf16", sub_group=700)], ids=str
)
def test_stock_files_load_with_one_warning_and_verify(
    target: EngineCase, changed: Saved, pools: Pools
) -> None:
    stock = stock_of(changed)
    found = pools.run(target.world, partial(loaded_with_warnings, target, stock))
    wanted = expected(stock, target)
    keys = [key for key in wanted if key.startswith(("master/", "weight/", "exp_avg"))]
    assert not differences({k: wanted[k] for k in keys}, {k: found[0][0][k] for k in keys})
    assert [len(warned) for _, warned in found] == [1, *[0] * (target.world - 1)]
    assert "User code had changed them" in found[0][1][0]
    assert verify_checkpoint(stock.path).is_sound


def loaded_with_warnings(setup: EngineCase, saved: Saved) -> tuple[Dump, list[str]]:
    with captured_log("lightning_elastic_zero", logging.WARNING) as logged:
        found = loaded(setup, saved, {})
    return found, [text for text in logged if "not its masters" in text]


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_exports_without_optimizer_have_the_weights(
    kind: str, changed: Saved, tmp_path: Path
) -> None:
    """Exports with the optimizer's state have its masters, and name the loss."""
    source = changed.path if kind == "ours" else stock_of(changed).path
    held = changed.dump()
    convert_checkpoint(source, tmp_path / "w.pt", "fp32")
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    whole = ConvertOptions(optimizer=True)
    lost = convert_checkpoint(source, tmp_path / "l.ckpt", "lightning", whole).lost
    masters = torch.load(tmp_path / "l.ckpt", weights_only=True)["state_dict"]
    assert "changed in place" in "".join(lost)
    for key, weight in held.items():
        if key.startswith("weight/"):
            name = key.removeprefix("weight/")
            assert torch.equal(weights[name].bfloat16(), weight), name
            assert torch.equal(masters[name], held[f"master/{name}"]), name


def test_stage_0_in_fp32_continues_from_the_masters(changed: Saved, pools: Pools) -> None:
    """It has no other weights."""
    found = pools.run(2, partial(loaded, EngineCase(2, "0"), changed, {}))[0]
    wanted = {k: v for k, v in changed.dump().items() if k.startswith("master/")}
    assert not differences(wanted, {k: found[k] for k in wanted})
    assert not unrounded(found)


def test_an_evaluation_and_a_fresh_optimizer_use_the_weights(changed: Saved, pools: Pools) -> None:
    """The masters of weights that were not changed keep their precision."""
    held, fresh = changed.dump(), {"load_optimizer_state": False}
    wanted = {k: v for k, v in held.items() if k.startswith("weight/")}
    for setup in (EngineCase(3, "0", "bf16"), EngineCase(2, "3", "bf16")):
        of_ranks = pools.run(setup.world, partial(evaluated_weights, setup, changed))
        assert all(weights[key] == w.tolist() for weights in of_ranks for key, w in wanted.items())
    found = pools.run(3, partial(loaded, EngineCase(3, "3"), changed, fresh))[0]
    for key, weight in wanted.items():
        master = held[key.replace("weight/", "master/")]
        kept = master.bfloat16() == weight
        assert torch.equal(found[key], torch.where(kept, master, weight.float())), key


def save_stock(setup: EngineCase, folder: str, change: Callable[[Engine], None]) -> Dump:
    """Save by DeepSpeed after each of two steps."""
    with engine_of(setup, 0) as engine:
        for step in range(2):
            train(engine, setup, step, step + 1)
            change(engine)
            engine.save_checkpoint(f"{folder}/{step}", tag="tag")
        return dump(engine, setup) or {}


@torch.no_grad()
def clamp_last(engine: Engine) -> None:
    engine.module.b.bias.clamp_(-0.05, 0.05)


def unchanged(engine: Engine) -> None:
    del engine


def test_the_warning_is_of_all_ranks(pools: Pools, tmp_path: Path) -> None:
    """The weights that differ may be those of other ranks than rank 0."""
    setup = EngineCase(2, "2", "bf16")
    pools.run(2, partial(save_stock, setup, str(tmp_path), clamp_last))
    (_, warned), *_ = pools.run(
        2, partial(loaded_with_warnings, setup, Saved(setup, f"{tmp_path}/1"))
    )
    assert len(warned) == 1
    assert "b.bias" in warned[0]
    assert "Both are restored" in warned[0]


def refusal_and_weights(setup: EngineCase, path: str) -> tuple[str, Dump]:
    from lightning_elastic_zero.api import load_checkpoint
    from lightning_elastic_zero.errors import ElasticZeroError

    with engine_of(setup, 7, tilt=3.0) as engine:
        with pytest.raises(ElasticZeroError) as raised:
            load_checkpoint(engine, path)
        load_checkpoint(engine, path, load_optimizer_state=False)
        return str(raised.value), dump(engine, setup) or {}


def test_stock_files_without_step_counts_resume_with_a_fresh_optimizer_only(
    pools: Pools, tmp_path: Path
) -> None:
    """A save that is killed while it overwrites a tag leaves files of two steps.

    The model file has the whole weights of one step.
    """
    setup = EngineCase(2, "2", "bf16", optimizer="Momentum")
    held = pools.run(2, partial(save_stock, setup, str(tmp_path), unchanged))[0]
    (model,) = (tmp_path / "1/tag").glob("*model_states.pt")
    (tmp_path / "0/tag" / model.name).write_bytes(model.read_bytes())
    found = pools.run(2, partial(refusal_and_weights, setup, str(tmp_path / "0")))
    assert all("load_optimizer_state=False" in message for message, _ in found)
    weights = {key: weight for key, weight in held.items() if key.startswith("weight/")}
    assert not differences(weights, {key: found[0][1][key] for key in weights})
