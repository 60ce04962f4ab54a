"""A small character GPT, and the source text of Python's standard library as training data.

Both are ordinary Lightning classes: nothing here depends on this library or the device count.
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
"""Characters of shape ``(batch, block_size)``, and the next characters in the same shape."""

MODULES = (
    "argparse", "ast", "base64", "bdb", "bisect", "calendar", "cmd", "codecs", "configparser",
    "contextlib", "copy", "csv", "dataclasses", "difflib", "dis", "doctest", "enum", "filecmp",
    "fileinput", "fnmatch", "fractions", "functools", "getopt", "gettext", "gzip", "heapq",
    "inspect", "ipaddress", "locale", "mailbox", "optparse", "pdb", "pickle", "platform",
    "plistlib", "pprint", "random", "sched", "selectors", "shelve", "shutil", "smtplib", "socket",
    "statistics", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit",
    "tokenize", "trace", "traceback", "types", "uuid", "warnings", "weakref", "zipapp",
)  # fmt: skip
"""The training text, in this order: single-file modules of every supported Python."""


class Embedding(nn.Embedding):
    """A table of vectors with small initial values, like GPT's."""

    def reset_parameters(self) -> None:
        """Draw the weights while the module is built: afterwards ZeRO-3 has partitioned them."""
        nn.init.normal_(self.weight, std=0.02)


class Block(nn.Module):
    """One transformer layer: attention to earlier positions, then an MLP per character."""

    def __init__(self, n_head: int, n_embd: int, dropout: float) -> None:
        super().__init__()
        self.n_head = n_head
        self.norm_1 = nn.LayerNorm(n_embd)
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)
        self.norm_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, block_size, n_embd)`` to the same shape."""
        x = x + self.dropout(self.attend(self.norm_1(x)))
        out: Tensor = x + self.dropout(self.mlp(self.norm_2(x)))
        return out

    def attend(self, x: Tensor) -> Tensor:
        """Mix each position with the previous ones."""
        # Three tensors of shape (batch, n_head, block_size, n_embd / n_head).
        heads = (part.unflatten(-1, (self.n_head, -1)) for part in self.qkv(x).chunk(3, dim=-1))
        q, k, v = (part.transpose(1, 2) for part in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class Decoder(nn.Module):
    """The network; its output layer is tied to its character table."""

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        n_layer: int,
        n_head: int,
        n_embd: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.characters = Embedding(vocab_size, n_embd)
        self.positions = Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*(Block(n_head, n_embd, dropout) for _ in range(n_layer)))
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
        vocab_size: number of different characters.
        block_size: longest input of the model, in characters.
        n_layer: number of transformer layers.
        n_head: number of attention heads per layer; divides ``n_embd``.
        n_embd: width of the model.
        dropout: dropout of each layer's output in training.
        lr: the highest learning rate, reached after ``warmup_steps``.
        weight_decay: for matrices; biases and normalisation have none.
        warmup_steps: optimizer steps of the warm-up. Then the learning rate falls to a tenth of
            ``lr`` at the end of the run.
    """

    def __init__(
        self,
        vocab_size: int,
        block_size: int = 64,
        n_layer: int = 2,
        n_head: int = 4,
        n_embd: int = 256,
        dropout: float = 0.1,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 10,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.size = (vocab_size, block_size, n_layer, n_head, n_embd, dropout)
        self.lr, self.weight_decay, self.warmup_steps = lr, weight_decay, warmup_steps
        self.total_steps = 1
        self.decoder: Decoder | None = None
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        """Build the network: in this hook ZeRO-3 partitions each weight as soon as it is made."""
        if self.decoder is None:  # Lightning calls this once for fit and again for validate
            self.decoder = Decoder(*self.size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map characters ``(batch, block_size)`` to logits ``(batch, block_size, vocab_size)``."""
        if self.decoder is None:
            raise RuntimeError("the Trainer calls configure_model first")
        logits: Tensor = self.decoder(tokens)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of a micro-batch."""
        loss = self.loss(batch)
        # The logged value is the mean over the micro-batches of the step so far, and over the
        # devices. At the optimizer step this is the loss of the global batch on any number of
        # devices.
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.losses.clear()
        self.losses.append(loss.detach())
        self.log("train_loss", torch.stack(self.losses).mean(), prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Measure the loss on text that is not used for training."""
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross entropy; logits are compared in fp32, also if the model is bf16."""
        tokens, following = batch
        return F.cross_entropy(self(tokens).float().flatten(0, 1), following.flatten())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Use AdamW with two parameter groups, a warm-up and a cosine schedule."""
        # With the strategy's global_batch_size, the same number on any number of devices.
        self.total_steps = int(self.trainer.estimated_stepping_batches)
        decay: list[nn.Parameter] = []
        no_decay: list[nn.Parameter] = []
        for name, parameter in self.named_parameters():
            # By name: a weight that ZeRO-3 has partitioned does not have its shape.
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
        """Rise to 1 in ``warmup_steps``, then fall along a cosine to 0.1 at ``total_steps``."""
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
    """The source text of Python's standard library as characters; nothing is downloaded.

    Args:
        batch_size: the largest micro-batch of a device. The strategy's ``global_batch_size`` sets
            the number of samples in an optimizer step.
        block_size: characters per sample.
        samples_per_epoch: samples of the training text. 1140 make 23 steps of 48 samples, and a
            24th of 36, which is filled up.
        val_samples: samples of the last tenth of the text, which is not used for training.
    """

    def __init__(
        self,
        batch_size: int = 12,
        block_size: int = 64,
        samples_per_epoch: int = 1140,
        val_samples: int = 96,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        text, self.alphabet = read_stdlib()
        border = len(text) * 9 // 10
        self.train_windows = Windows(text[:border], samples_per_epoch, block_size)
        self.val_windows = Windows(text[border:], val_samples, block_size)

    @property
    def vocab_size(self) -> int:
        """Number of different characters."""
        return len(self.alphabet)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Shuffled; the strategy distributes the samples."""
        return DataLoader(self.train_windows, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """In order."""
        return DataLoader(self.val_windows, batch_size=self.batch_size)


def read_stdlib() -> tuple[Tensor, str]:
    """Return the text as character indices of shape ``(length,)``, and their alphabet."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    # Some names in comments are not ASCII; they are dropped to keep the alphabet small.
    source = "".join((folder / f"{name}.py").read_text("ascii", "ignore") for name in MODULES)
    codes = torch.frombuffer(bytearray(source, "ascii"), dtype=torch.uint8)
    alphabet, text = torch.unique(codes, return_inverse=True)
    return text, "".join(map(chr, alphabet.tolist()))
