"""Models as people build them: transformers', with adapters, checkpointed, compiled, of images."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.utils import parametrizations

from tests.support.engines import GLOBAL_BATCH, Engine, Setup

TOKENS, LENGTH = 40, 6
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def gpt2(**options: Any) -> nn.Module:
    """Make a tiny GPT-2, whose head is its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(vocab_size=TOKENS, n_positions=8, n_embd=16, n_layer=2, n_head=2, **options)
    )
    return model


def llama(**options: Any) -> nn.Module:
    """Make a tiny Llama with tied embeddings and grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS,
            intermediate_size=24,
            num_key_value_heads=1,
            tie_word_embeddings=True,
            **SIZES,
            **options,
        )
    )
    return model


def mixtral() -> nn.Module:
    """Make a tiny mixture of experts, all of which are on every rank."""
    from transformers import MixtralConfig, MixtralForCausalLM

    model: nn.Module = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=TOKENS,
            intermediate_size=16,
            num_key_value_heads=1,
            num_local_experts=3,
            num_experts_per_tok=2,
            **SIZES,
        )
    )
    return model


def lora() -> nn.Module:
    """Make adapters on a frozen Llama."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model: nn.Module = get_peft_model(llama(), config)
    return model


def checkpointed() -> nn.Module:
    """Make a GPT-2 that computes its activations again, as transformers does it."""
    model = gpt2(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


class Layers(nn.Module):
    """Linear layers by name, one of which a wrapper may be put around."""

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
        """Return a score for each token."""
        h = self.embedding(x)
        if self.recomputed:
            from deepspeed.runtime.activation_checkpointing import checkpointing

            h = checkpointing.non_reentrant_checkpoint(self.inner, h)
        else:
            h = self.inner(h)
        scores: torch.Tensor = self.head(h)
        return scores


def normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Make layers whose weights are computed from other parameters, and from buffers."""
    model = Layers()
    model.inner[0], model.inner[2] = norm(model.inner[0]), norm(model.inner[2])
    return model


class Images(nn.Module):
    """Convolutions with BatchNorm, behind a frozen one; see ``in_channels_last``."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Conv2d(3, 5, 3, padding=1).requires_grad_(requires_grad=False)
        self.conv = nn.Conv2d(5, 7, 3, padding=1)
        self.norm = nn.BatchNorm2d(7)
        self.last = nn.Linear(7, TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score for each class."""
        found = torch.relu(self.norm(self.conv(self.frozen(x)))).mean((2, 3))
        return torch.as_tensor(self.last(found))


def in_channels_last(engine: Engine, setup: ModelSetup) -> None:
    """Partition frozen weights otherwise, which DeepSpeed does not take before it has started."""
    if setup.kind == "images" and setup.zero != "3":
        engine.module.frozen.to(memory_format=torch.channels_last)
        assert not engine.module.frozen.weight.is_contiguous()


KINDS: dict[str, Any] = {
    "gpt2": gpt2,
    "llama": llama,
    "mixtral": mixtral,
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
class ModelSetup(Setup):
    """A run of one of these models."""

    kind: str = "gpt2"

    def model(self, seed: int) -> nn.Module:  # type: ignore[override]
        """Make the model."""
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries among themselves
            model: nn.Module = KINDS[self.kind]()
        return model

    def twin(self) -> ModelSetup:
        """Return the setup that lays its flat buffers out in the same way."""
        return replace(self, optimizer="SGD")

    @property
    def buffers_kept(self) -> tuple[str, ...]:
        """Names of the persistent buffers."""
        model = self.model(0)
        return tuple(name for name, _ in model.named_buffers() if name in model.state_dict())


def train_model(engine: Engine, setup: ModelSetup, first: int, last: int) -> list[float]:
    """Train steps ``[first, last)``, whose data depend on nothing but step and rank."""
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
    engine: Engine, setup: ModelSetup, tokens: torch.Tensor, pictures: torch.Tensor
) -> torch.Tensor:
    if setup.kind == "images":
        pictures = pictures.contiguous(memory_format=torch.channels_last)
        return nn.functional.cross_entropy(engine(pictures).float(), tokens[:, 0])
    if setup.kind in ("gpt2", "llama", "mixtral", "lora", "transformers' checkpointing"):
        loss: torch.Tensor = engine(input_ids=tokens, labels=tokens).loss
        return loss
    scores = engine(tokens).float()
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())
