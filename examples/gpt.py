"""A small character GPT, and the source text of Python's own standard library to learn from.

Both are ordinary Lightning classes: nothing in here knows that a run may change its device count.
They follow three rules that such a run needs, whatever saves its checkpoints:

- the global batch is fixed, and each device takes its share of it;
- the learning rate follows steps that are given, not steps that Lightning counts per device;
- there is no dropout, since random numbers are drawn per device.
"""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Batch = tuple[Tensor, Tensor]
"""Characters of shape ``(batch, block_size)`` and, in the same shape, the ones that follow them."""

MODULES = (
    "argparse", "ast", "base64", "bdb", "bisect", "calendar", "cmd", "codecs", "configparser",
    "contextlib", "copy", "csv", "dataclasses", "difflib", "dis", "doctest", "enum", "filecmp",
    "fileinput", "fnmatch", "fractions", "functools", "getopt", "gettext", "gzip", "heapq",
    "inspect", "ipaddress", "locale", "mailbox", "optparse", "pdb", "pickle", "platform",
    "plistlib", "pprint", "random", "sched", "selectors", "shelve", "shutil", "smtplib", "socket",
    "statistics", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit",
    "tokenize", "trace", "traceback", "types", "uuid", "warnings", "weakref", "zipapp",
)  # fmt: skip
"""What is read, in this order: modules that every supported Python has, each as one file."""


class Embedding(nn.Embedding):
    """A table of vectors that start small, as GPT's do."""

    def reset_parameters(self) -> None:
        """Draw the weights while the module is built: afterwards ZeRO-3 has cut them up."""
        nn.init.normal_(self.weight, std=0.02)


class Block(nn.Module):
    """One transformer layer: attention to what came before, then a small network per character."""

    def __init__(self, n_head: int, n_embd: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.norm_1 = nn.LayerNorm(n_embd)
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)
        self.norm_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, block_size, n_embd)`` to the same shape."""
        x = x + self.attend(self.norm_1(x))
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out

    def attend(self, x: Tensor) -> Tensor:
        """Mix each position with the ones before it."""
        # Three tensors of shape (batch, n_head, block_size, n_embd / n_head).
        heads = (part.unflatten(-1, (self.n_head, -1)) for part in self.qkv(x).chunk(3, dim=-1))
        q, k, v = (part.transpose(1, 2) for part in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class Decoder(nn.Module):
    """The network itself; its output layer is tied to its character table."""

    def __init__(
        self, vocab_size: int, block_size: int, n_layer: int, n_head: int, n_embd: int
    ) -> None:
        super().__init__()
        self.characters = Embedding(vocab_size, n_embd)
        self.positions = Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*(Block(n_head, n_embd) for _ in range(n_layer)))
        self.norm = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        # Tied: one parameter with two names. It is saved once, and restored under both.
        self.head.weight = self.characters.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map characters ``(batch, block_size)`` to logits ``(batch, block_size, vocab_size)``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.characters(tokens) + self.positions(places))
        logits: Tensor = self.head(self.norm(x))
        return logits


class GPT(L.LightningModule):
    """Learns to predict the next character.

    Args:
        vocab_size: How many different characters there are.

        block_size: The longest text that the model sees at once, in characters.

        n_layer: Transformer layers.

        n_head: Attention heads per layer; they divide ``n_embd``.

        n_embd: Width of the model.

        lr: The highest learning rate, reached after ``warmup_steps``.

        weight_decay: For matrices; biases and normalisation have none.

        warmup_steps: Optimizer steps in which the learning rate rises.

        total_steps: Optimizer steps at which the learning rate has fallen to a tenth of ``lr``.
            Given, and not asked of ``trainer.estimated_stepping_batches``, which depends on the
            device count: a resumed run stays on its curve.
    """

    def __init__(
        self,
        vocab_size: int,
        block_size: int = 64,
        n_layer: int = 2,
        n_head: int = 4,
        n_embd: int = 256,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 10,
        total_steps: int = 96,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.size = (vocab_size, block_size, n_layer, n_head, n_embd)
        self.lr, self.weight_decay = lr, weight_decay
        self.warmup_steps, self.total_steps = warmup_steps, total_steps
        self.decoder: Decoder | None = None

    def configure_model(self) -> None:
        """Build the network: in this hook ZeRO-3 cuts each weight up as soon as it is made."""
        if self.decoder is None:  # Lightning calls this once for fit and again for validate
            self.decoder = Decoder(*self.size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map characters ``(batch, block_size)`` to logits ``(batch, block_size, vocab_size)``."""
        if self.decoder is None:
            raise RuntimeError("the Trainer calls configure_model first")
        logits: Tensor = self.decoder(tokens)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Give the mean loss of this device's share of the global batch."""
        loss = self.loss(batch)
        # sync_dist: all shares have the same size, so this is the loss of the global batch.
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Measure the loss on text that is not trained on."""
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def loss(self, batch: Batch) -> Tensor:
        """Compare the logits, in fp32 also where the model is bf16, with what follows."""
        tokens, following = batch
        return F.cross_entropy(self(tokens).float().flatten(0, 1), following.flatten())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Use AdamW with two parameter groups, warm-up and a cosine."""
        decay: list[nn.Parameter] = []
        no_decay: list[nn.Parameter] = []
        for name, parameter in self.named_parameters():
            # By name: a weight that ZeRO-3 has cut up does not show its shape.
            plain = name.endswith("bias") or "norm" in name
            (no_decay if plain else decay).append(parameter)
        optimizer = torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": self.weight_decay},
                {"params": no_decay, "weight_decay": 0.0},
            ],
            lr=self.lr,
            betas=(0.9, 0.95),
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.lr_factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def lr_factor(self, step: int) -> float:
        """Rise to 1 in ``warmup_steps``, then fall to 0.1 at ``total_steps`` along a cosine."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


class Windows(Dataset[Batch]):
    """Windows of ``block_size`` characters, spread evenly over a text of shape ``(length,)``."""

    def __init__(self, text: Tensor, samples: int, block_size: int) -> None:
        self.text, self.samples, self.block_size = text, samples, block_size

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Batch:
        start = index * (len(self.text) - self.block_size - 1) // self.samples
        window = self.text[start : start + self.block_size + 1]
        return window[:-1], window[1:]


class StdlibText(L.LightningDataModule):
    """The source text of Python's standard library, character by character; nothing is downloaded.

    The global batch is what is given, and each device takes its share. So with Lightning's own
    distributed sampler step k of an epoch sees the same samples on every device count.

    Args:
        global_batch_size: Samples per optimizer step, over all devices. 48 can be shared by 1, 2,
            3, 4, 6, 8, 12 and 16 of them.

        block_size: Characters per sample.

        samples_per_epoch: Samples of the training text; the global batch divides them.

        val_samples: Samples of the last tenth of the text, which is not trained on.
    """

    def __init__(
        self,
        global_batch_size: int = 48,
        block_size: int = 64,
        samples_per_epoch: int = 1152,
        val_samples: int = 96,
    ) -> None:
        super().__init__()
        for samples in (samples_per_epoch, val_samples):
            if samples % global_batch_size:
                # The last batch of an epoch would hold other samples on another device count.
                raise ValueError(f"{samples} samples are no multiple of {global_batch_size=}")
        self.global_batch_size = global_batch_size
        text, self.alphabet = read_stdlib()
        border = len(text) * 9 // 10
        self.train_windows = Windows(text[:border], samples_per_epoch, block_size)
        self.val_windows = Windows(text[border:], val_samples, block_size)

    @property
    def vocab_size(self) -> int:
        """How many different characters occur."""
        return len(self.alphabet)

    @property
    def device_batch_size(self) -> int:
        """One device's share of the global batch."""
        world_size = 1 if self.trainer is None else self.trainer.world_size
        share, rest = divmod(self.global_batch_size, world_size)
        if rest:
            raise ValueError(
                f"{world_size} devices cannot share global_batch_size={self.global_batch_size} "
                f"equally: use a number of devices that divides it"
            )
        return share

    def train_dataloader(self) -> DataLoader[Batch]:
        """Shuffled; on several devices Lightning puts its distributed sampler in."""
        return DataLoader(self.train_windows, batch_size=self.device_batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """In order."""
        return DataLoader(self.val_windows, batch_size=self.device_batch_size)


def read_stdlib() -> tuple[Tensor, str]:
    """Read the text as numbers of shape ``(length,)``, and the alphabet that they count through."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    # A few names in comments are not ASCII; without them the alphabet is that of code.
    source = "".join((folder / f"{name}.py").read_text("ascii", "ignore") for name in MODULES)
    codes = torch.frombuffer(bytearray(source, "ascii"), dtype=torch.uint8)
    alphabet, text = torch.unique(codes, return_inverse=True)
    return text, "".join(map(chr, alphabet.tolist()))
