"""Other software loads our conversions. Each function is run by one rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from lightning_elastic_zero.tools.conversion import convert_checkpoint
from lightning_elastic_zero.tools.fingerprint import fingerprint_checkpoint
from lightning_elastic_zero.tools.selection import ConvertOptions
from tests.support.engines import EngineCase, engine_of, group_members, make_optimizer, train
from tests.support.oracle import dump
from tests.support.plain_checkpoints import WholeState, write_elastic


def trained(model: nn.Module, steps: int = 2) -> torch.optim.AdamW:
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(steps):
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.randn_like(p)
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def state_of(model: nn.Module, prefix: str = "") -> WholeState:
    optimizer = trained(model)
    named = {f"{prefix}{n}": p for n, p in model.named_parameters()}
    own = {n: p for n, p in named.items() if p.requires_grad}
    states = {n: optimizer.state[p] for n, p in own.items()}
    fields = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    return WholeState(
        masters={n: p.detach().clone() for n, p in own.items()},
        states={n: {k: s[k] for k in ("exp_avg", "exp_avg_sq")} for n, s in states.items()},
        frozen={n: p.detach().clone() for n, p in named.items() if n not in own},
        buffers={
            f"{prefix}{n}": b for n, b in model.named_buffers() if f"{n}" in model.state_dict()
        },
        step=2.0,
        groups=(tuple(own),),
        rates=(1e-3,),
        hyperparameters=fields,
    )


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def tiny_llama(seed: int, **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        **options,
    )
    return LlamaForCausalLM(config)


def with_transformers(folder: str) -> None:
    """``from_pretrained`` reads the shards and their index, without Lightning's prefix."""
    from transformers import LlamaForCausalLM

    model = tiny_llama(0)
    source = write_elastic(Path(folder, "a.ckpt"), state_of(model, "model."), 3, 2)
    target = Path(folder, "hub")
    options = ConvertOptions(rename={"model.": ""}, max_shard_bytes=8000)
    convert_checkpoint(source, target, "safetensors", options)
    assert (target / "model.safetensors.index.json").is_file()
    model.config.save_pretrained(target)
    found = LlamaForCausalLM.from_pretrained(target)
    assert_same(found.state_dict(), model.state_dict())


def with_peft(folder: str) -> None:
    """``PeftModel.from_pretrained`` reads the adapter's folder, and the outputs are equal."""
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(
        r=4, lora_alpha=7, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]
    )
    model = get_peft_model(tiny_llama(1), config)
    source = write_elastic(Path(folder, "a.ckpt"), state_of(model, "model."), 2, 3)
    model.peft_config["default"].save_pretrained(str(Path(folder, "config")))
    target = Path(folder, "adapter")
    options = ConvertOptions(adapter_config=str(Path(folder, "config")))
    convert_checkpoint(source, target, "adapter", options)
    names = {path.name for path in target.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    found = PeftModel.from_pretrained(tiny_llama(1), target)
    assert_same(found.state_dict(), model.state_dict())
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(found.eval()(tokens).logits, model.eval()(tokens).logits)


def small_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


PEFT_KINDS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 4, "use_dora": True, "trainable_token_indices": [1, 5]},
    "IA3Config": {"feedforward_modules": ["down_proj"]},
    "LoHaConfig": {"r": 4},
    "LoKrConfig": {"r": 4},
    "OFTConfig": {"oft_block_size": 4, "bias": "oft_only"},
    "BOFTConfig": {"boft_block_size": 4},
    "LNTuningConfig": {"target_modules": ["input_layernorm"]},
    "TrainableTokensConfig": {"token_indices": [1, 5], "target_modules": ["embed_tokens"]},
    "PromptTuningConfig": {"num_virtual_tokens": 3},
}
"""PEFT's kinds of adapters that ``convert --to adapter`` recognises, with options."""


def check_peft_kind(kind: str, options: dict[str, Any], folder: Path) -> None:
    """Compare our folder with the one that PEFT saves from the same model."""
    import peft
    from safetensors.torch import load_file

    if kind != "PromptTuningConfig":
        options = {"target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(tiny_llama(1, attention_bias=True), config)
    source = write_elastic(folder / "step" / "a.ckpt", state_of(model, "model."), 2, 3)
    with torch.no_grad():
        model.save_pretrained(folder / "peft")
    (folder / "peft" / "adapter_config.json").rename(folder / "step" / "adapter_config.json")
    convert_checkpoint(source, folder / "ours", "adapter")
    wanted = load_file(folder / "peft" / "adapter_model.safetensors")
    assert_same(load_file(folder / "ours" / "adapter_model.safetensors"), wanted)
    found = peft.PeftModel.from_pretrained(tiny_llama(1, attention_bias=True), folder / "ours")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    theirs, ours = model.state_dict(), found.state_dict()
    assert_same({n: ours[n] for n in trained}, {n: theirs[n] for n in trained})


def with_fsdp2(folder: str) -> None:
    """FSDP2 loads the model, its states and hyperparameters; int steps become tensors."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    state = replace(state_of(small_model(0)), step=2)
    source = write_elastic(Path(folder, "a.ckpt"), state, 1, 3)
    convert_checkpoint(source, Path(folder, "dcp"), "dcp")
    model = small_model(1)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5.0)
    weights, states = get_state_dict(model, optimizer)
    tree: dict[str, Any] = {"model": weights, "optimizer": states}
    load(tree, checkpoint_id=Path(folder, "dcp"))
    set_state_dict(
        model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optimizer"]
    )
    found: dict[str, Any] = dict(weights)
    full = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}
    assert_same(full, {**state.masters, **state.buffers})
    assert optimizer.param_groups[0]["lr"] == 1e-3
    for name, parameter in model.named_parameters():
        held = optimizer.state[parameter]
        assert torch.equal(held["step"], torch.tensor(2.0))
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(held[key].full_tensor(), state.states[name][key])


def with_lightning(folder: str) -> None:
    """``load_from_checkpoint`` reads the file, and torch loads its optimizer state."""
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        def __init__(self, width: int, rate: float) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width))

    model = Model(6, 0.25)
    state = state_of(model)
    state.client = {
        "epoch": 1,
        "pytorch-lightning_version": metadata.version("lightning"),
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 6, "rate": 0.25},
        "loops": {"unknown": 1},
    }
    source = write_elastic(Path(folder, "a.ckpt"), state, 3, 2)
    convert_checkpoint(source, Path(folder, "weights.ckpt"), "lightning")
    found = Model.load_from_checkpoint(Path(folder, "weights.ckpt"))
    assert found.hparams == {"width": 6, "rate": 0.25}
    assert_same(found.state_dict(), model.state_dict())
    options = ConvertOptions(optimizer=True)
    convert_checkpoint(source, Path(folder, "whole.ckpt"), "lightning", options)
    tree = torch.load(Path(folder, "whole.ckpt"), weights_only=True)
    optimizer = torch.optim.AdamW(found.parameters(), lr=1.0)
    optimizer.load_state_dict(tree["optimizer_states"][0])
    steps = [held["step"] for held in optimizer.state.values()]
    assert len({step.data_ptr() for step in steps}) == len(steps)  # Each has its own memory.
    assert optimizer.param_groups[0]["lr"] == 1e-3
    for name, parameter in found.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], state.states[name]["exp_avg"])


def _save_engine(folder: str, setup: EngineCase) -> Any:
    from lightning_elastic_zero.api import save_checkpoint

    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, 3)
        engine.lr_scheduler = StepLR(engine.optimizer.optimizer, 5)
        engine.lr_scheduler.last_epoch = 7
        save_checkpoint(engine, Path(folder, "a.ckpt"), {"epoch": 3})
        wanted = dump(engine, setup)
    convert_checkpoint(Path(folder, "a.ckpt"), Path(folder, "universal"), "universal")
    number = fingerprint_checkpoint(Path(folder, "a.ckpt"))
    assert number == fingerprint_checkpoint(Path(folder, "universal"))
    return wanted


def _with_deepspeed(folder: str, zero: str) -> None:
    import deepspeed

    setup = EngineCase(1, zero, "bf16", grouping="one")
    wanted = _save_engine(folder, setup)
    model = setup.model(7)
    optimizer = make_optimizer("AdamW", group_members(model, setup.grouping), 3.0)
    config = {**setup.config(), "checkpoint": {"load_universal": True}}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=partial(StepLR, step_size=5),
        config=config,
        dist_init_required=False,
    )
    _, client = engine.load_checkpoint(str(Path(folder, "universal")))
    assert engine.lr_scheduler.last_epoch == 7
    assert client["epoch"] == 3
    assert engine.global_steps == 3
    found = dump(engine, setup)
    engine.destroy()
    assert found is not None
    kinds = ("master/", "exp_avg/", "exp_avg_sq/")
    tensors = {name: t for name, t in wanted.items() if name.startswith(kinds)}
    assert len(tensors) == 27
    assert_same({name: found[name] for name in tensors}, tensors)
    steps = {n: v for n, v in wanted.items() if n.startswith("scalar/step")}
    assert {n: found[n] for n in steps} == steps
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3]


def with_deepspeed_2(folder: str) -> None:
    _with_deepspeed(folder, "2")


def with_deepspeed_3(folder: str) -> None:
    _with_deepspeed(folder, "3")


def save_for_lightning(folder: str, stage: int) -> tuple[dict[str, str], list[float]]:
    """Train two steps, save and convert; return digests of the weights, and rates. Collective."""
    from tests.support.fits import FitCase

    case = FitCase(folder, stage, epochs=None, max_steps=2, checkpoint=None)
    trainer, net, data, recorder = case.make()
    trainer.fit(net, **data)
    trainer.save_checkpoint(Path(folder, "a.ckpt"))
    if trainer.is_global_zero:
        convert_checkpoint(Path(folder, "a.ckpt"), Path(folder, "universal"), "universal")
    return recorder.at_end, [group["lr"] for group in trainer.optimizers[0].param_groups]


def resume_in_lightning(folder: str, stage: int) -> tuple[dict[str, str], list[float], Any, int]:
    """Continue with Lightning's own strategy. Collective.

    Returns:
        Digests of the weights and rates at the start, the callback's state, and the last step.
    """
    from tests.support.fits import (
        SMALL_BUCKETS,
        Data,
        FitCase,
        RegressionNet,
        StockOnCPU,
        WeightRecorder,
        quiet_trainer,
    )

    config = {
        "zero_optimization": {"stage": stage, **SMALL_BUCKETS},
        "checkpoint": {"load_universal": True},
    }
    recorder = WeightRecorder(FitCase())
    trainer = quiet_trainer(StockOnCPU(config=config), recorder, max_steps=3)
    net = RegressionNet(seed=1)
    trainer.fit(net, Data(), ckpt_path=str(Path(folder, "universal")))
    return recorder.at_start, recorder.lrs, recorder.loaded, trainer.global_step
