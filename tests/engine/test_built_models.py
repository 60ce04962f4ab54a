"""Models of common libraries are restored on another number of devices, bit for bit."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.utils import parametrizations

from tests.support.checkpoints import compare_states
from tests.support.engines import GLOBAL_BATCH, Engine, EngineCase, engine_of
from tests.support.oracle import Dump, differences, dump, expected_in
from tests.support.ranks import Pools

TOKENS, LENGTH = 40, 6
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT2_SIZES = {"n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}


def of_transformers(name: str, **options: Any) -> nn.Module:
    """Make a tiny model: GPT-2 with a tied head, others with grouped queries."""
    import transformers

    is_gpt2 = name == "GPT2"
    kind = "GPT2LMHeadModel" if is_gpt2 else f"{name}ForCausalLM"
    sizes = GPT2_SIZES if is_gpt2 else {**SIZES, "num_key_value_heads": 1}
    config = getattr(transformers, f"{name}Config")(vocab_size=TOKENS, **sizes, **options)
    model: nn.Module = getattr(transformers, kind)(config)
    return model


def llama() -> nn.Module:
    return of_transformers("Llama", intermediate_size=24, tie_word_embeddings=True)


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model: nn.Module = get_peft_model(llama(), config)
    return model


def checkpointed() -> nn.Module:
    """Make a GPT-2 with the activation checkpointing of transformers."""
    model = of_transformers("GPT2", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


class Layers(nn.Module):
    def __init__(self, wrapper: str = "") -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.inner = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))
        self.register_buffer("seen", torch.zeros(3))
        self.head = nn.Linear(16, TOKENS)
        self.recomputed = wrapper == "deepspeed"
        if wrapper == "compile":
            self.inner = torch.compile(self.inner, backend="eager")  # type: ignore[assignment]
        if wrapper == "torch":
            from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

            self.inner = checkpoint_wrapper.checkpoint_wrapper(self.inner)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        if self.recomputed:
            from deepspeed.runtime.activation_checkpointing import checkpointing

            h = checkpointing.non_reentrant_checkpoint(self.inner, h)
        else:
            h = self.inner(h)
        scores: torch.Tensor = self.head(h)
        return scores


def normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Make layers whose weights are computed from other parameters and from buffers."""
    model = Layers()
    model.inner[0], model.inner[2] = norm(model.inner[0]), norm(model.inner[2])
    return model


class Images(nn.Module):
    """Convolutions with BatchNorm, after a frozen one; see ``in_channels_last``."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Conv2d(3, 5, 3, padding=1).requires_grad_(requires_grad=False)
        self.conv = nn.Conv2d(5, 7, 3, padding=1)
        self.norm = nn.BatchNorm2d(7)
        self.last = nn.Linear(7, TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.relu(self.norm(self.conv(self.frozen(x)))).mean((2, 3))
        return torch.as_tensor(self.last(found))


def in_channels_last(engine: Engine, setup: EngineCase) -> None:
    """Change the memory order of frozen weights, which ZeRO-3 accepts only before its setup."""
    if kind_of(setup) == "images" and setup.zero != "3":
        engine.module.frozen.to(memory_format=torch.channels_last)
        assert not engine.module.frozen.weight.is_contiguous()


EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
"""Each rank has all experts."""

BUILDERS: dict[str, Any] = {
    "gpt2": partial(of_transformers, "GPT2"),
    "llama": llama,
    "mixtral": partial(of_transformers, "Mixtral", intermediate_size=16, **EXPERTS),
    "lora": lora,
    "transformers' checkpointing": checkpointed,
    "plain": Layers,
    "compiled layer": lambda: Layers("compile"),
    "torch's checkpointing": lambda: Layers("torch"),
    "DeepSpeed's checkpointing": lambda: Layers("deepspeed"),
    "compiled": lambda: torch.compile(Layers(), backend="eager"),
    "weight norm": lambda: normed(parametrizations.weight_norm),
    "weight norm by hooks": lambda: normed(nn.utils.weight_norm),
    "spectral norm": lambda: normed(parametrizations.spectral_norm),
    "spectral norm by hooks": lambda: normed(nn.utils.spectral_norm),
    "images": Images,
}


@dataclass(frozen=True)
class Built:
    """Creates a model of ``BUILDERS``."""

    kind: str

    def __call__(self, _: EngineCase, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # between the libraries
            model: nn.Module = BUILDERS[self.kind]()
        return model


def kind_of(case: EngineCase) -> str:
    assert isinstance(case.net, Built)
    return case.net.kind


def train_model(engine: Engine, setup: EngineCase, first: int, last: int) -> list[float]:
    """Train steps ``[first, last)`` on data that depend only on step and rank."""
    rank, losses = distributed.get_rank(), []
    size = GLOBAL_BATCH // setup.world
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(0, TOKENS, (GLOBAL_BATCH, LENGTH), generator=generator)
        pictures = torch.randn(GLOBAL_BATCH, 3, 4, 4, generator=generator)
        mine = slice(rank * size, (rank + 1) * size)
        loss = _loss(engine, setup, tokens[mine], pictures[mine].to(setup.dtype))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def _loss(
    engine: Engine, setup: EngineCase, tokens: torch.Tensor, pictures: torch.Tensor
) -> torch.Tensor:
    if kind_of(setup) == "images":
        pictures = pictures.contiguous(memory_format=torch.channels_last)
        return nn.functional.cross_entropy(engine(pictures).float(), tokens[:, 0])
    if kind_of(setup) in ("gpt2", "llama", "mixtral", "lora", "transformers' checkpointing"):
        loss: torch.Tensor = engine(input_ids=tokens, labels=tokens).loss
        return loss
    scores = engine(tokens).float()
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())


pytestmark = pytest.mark.engine

NEEDS = {
    **dict.fromkeys(("gpt2", "llama", "mixtral", "transformers' checkpointing"), "transformers"),
    "lora": "peft",
}
WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")


def saved_dump(setup: EngineCase, path: str, options: Mapping[str, Any]) -> Dump | None:
    from lightning_elastic_zero.api import save_checkpoint

    with engine_of(setup, 0) as engine:
        in_channels_last(engine, setup)
        train_model(engine, setup, 0, 2)
        held = dump(engine, setup)
        save_checkpoint(engine, path, **options)
    return held


def loaded_dumps(setup: EngineCase, path: str) -> tuple[Dump, Dump, list[float]] | None:
    """Load into a run with another seed, and train; return the state before and after the load."""
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 7, tilt=3.0) as engine:
        in_channels_last(engine, setup)
        train_model(engine, setup, 100, 101)
        before = dump(engine, setup)
        load_checkpoint(engine, path)
        after = dump(engine, setup)
        losses = train_model(engine, setup, 2, 3)
    return None if before is None or after is None else (before, after, losses)


def unwrapped(held: Dump) -> Dump:
    """Return a dump with the names that layers have without wrappers."""
    return {WRAPPERS.sub("", key): value for key, value in held.items()}


def resumed(
    pools: Pools, source: EngineCase, target: EngineCase, path: Path, **options: Any
) -> tuple[Dump, Dump, Dump]:
    """Return the expected state, and the state before and after a load."""
    for setup in (source, target):
        if module := NEEDS.get(kind_of(setup)):
            pytest.importorskip(module)
    held = pools.run(source.world, partial(saved_dump, source, str(path / "a.ckpt"), options))[0]
    found = pools.run(target.world, partial(loaded_dumps, target, str(path / "a.ckpt")))[0]
    assert held is not None
    assert found is not None
    before, after, losses = found
    assert all(torch.isfinite(torch.tensor(losses)))
    wanted = unwrapped(expected_in(held, source, replace(target, net=source.net)))
    return wanted, unwrapped(before), unwrapped(after)


KINDS = (
    "gpt2",
    "llama",
    "mixtral",
    "lora",
    "images",
    "weight norm",
    "weight norm by hooks",
    "spectral norm",
    "spectral norm by hooks",
    "transformers' checkpointing",
    "DeepSpeed's checkpointing",
)
STAGES = [("2", 2, "3", 3, "fp32"), ("3", 3, "2", 2, "bf16")]


@pytest.mark.long
@pytest.mark.parametrize(("zero", "world", "then", "on", "precision"), STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_built_models_are_restored_on_other_devices_and_stages(
    kind: str,
    zero: str,
    world: int,
    then: str,
    on: int,
    precision: str,
    pools: Pools,
    tmp_path: Path,
) -> None:
    if kind == "DeepSpeed's checkpointing":  # Its recomputation does not gather ZeRO-3's weights.
        zero, then = zero.replace("3", "1"), then.replace("3", "1")
    # Their buffers stay fp32 in a bf16 engine, which torch's own kernels do not accept.
    precision = "fp32" if kind == "images" or kind.startswith("spectral") else precision
    source = EngineCase(world, zero, precision, net=Built(kind))
    target = EngineCase(on, then, precision, net=Built(kind))
    wanted, before, after = resumed(pools, source, target, tmp_path)
    compare_states(wanted, after).assert_same()
    assert differences(wanted, before)


@pytest.mark.long
@pytest.mark.parametrize("other", ["compiled layer", "compiled", "torch's checkpointing"])
@pytest.mark.parametrize("back", [False, True])
def test_wrappers_do_not_change_the_names_of_layers(
    other: str, back: bool, pools: Pools, tmp_path: Path
) -> None:
    """Compiled layers run in ZeRO-1/2, since DeepSpeed's hooks of ZeRO-3 fail on them."""
    plain, wrapped = EngineCase(3, "3", net=Built("plain")), EngineCase(2, "2", net=Built(other))
    source, target = (wrapped, plain) if back else (plain, wrapped)
    wanted, _, after = resumed(pools, source, target, tmp_path)
    compare_states(wanted, after).assert_same()
    assert any("inner.0.weight" in key for key in after)


@pytest.mark.long
@pytest.mark.parametrize(("zero", "world", "then", "on", "precision"), STAGES)
def test_adapters_saved_alone_are_restored_on_the_models_own_base(
    zero: str, world: int, then: str, on: int, precision: str, pools: Pools, tmp_path: Path
) -> None:
    source = EngineCase(world, zero, precision, net=Built("lora"))
    target = EngineCase(on, then, precision, net=Built("lora"))
    wanted, before, after = resumed(pools, source, target, tmp_path, exclude_frozen_parameters=True)
    own = {key: value for key, value in before.items() if key.startswith("frozen/")}
    assert own
    compare_states({**wanted, **own}, after).assert_same()
    written = sum(path.stat().st_size for path in (tmp_path / "a.ckpt").rglob("*model_states.pt"))
    base = sum(value.nbytes for value in own.values())
    assert written < base * (2 if zero == "2" else 1) + 100_000
