"""A small model with everything that checkpoints of ZeRO runs lose."""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY, WIDTH, HIDDEN = 50, 33, 65
GLOBAL_BATCH = 24  # Divides by 1, 2, 3, 4 and 8 ranks.

UNTRAINED = "never"
BUFFERS = (
    "bn.running_mean",
    "bn.running_var",
    "bn.num_batches_tracked",
    "average",
    "seen",
)
"""The persistent ones; ``scratch`` is not."""

ODD_BUFFERS = {
    "reshaped": (torch.full((1,), 0.1), torch.full((2, 2), 300)),
    "narrow": (torch.full((HIDDEN,), 0.1, dtype=torch.float16), torch.tensor(3, dtype=torch.uint8)),
    "integer": (torch.full((HIDDEN,), 3), torch.tensor(data=True)),
}
"""Kinds of ``average`` and ``seen`` that do not fit those that a model has otherwise."""


class Norm(nn.BatchNorm1d):
    """BatchNorm in fp32: DeepSpeed casts parameters to bf16; buffers too, before release 0.19."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Normalise, and count the batch."""
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, var = self.running_mean.float(), self.running_var.float()
        found = nn.functional.batch_norm(
            input.float(),
            mean,
            var,
            self.weight.float(),
            self.bias.float(),
            training=self.training,
        )
        if self.training and mean is not self.running_mean:
            self.running_mean.copy_(mean)
            self.running_var.copy_(var)
        return found.to(input.dtype)


class Net(nn.Module):
    """Tied, frozen, buffered, one-element, never used and, where asked for, empty parameters.

    Args:
        seed: everything is drawn from it.
        empty: with a parameter of no elements.
        renamed: ``b`` is called ``c``.
        hidden: size of the inner layer.
        buffers: a key of ``ODD_BUFFERS``: two buffers of other shapes or types, which stay.
        thawed: the layer ``frozen`` is trained, and ``a`` is frozen.
    """

    def __init__(
        self,
        seed: int,
        *,
        empty: bool = False,
        renamed: bool = False,
        hidden: int = HIDDEN,
        buffers: str = "",
        thawed: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.a = nn.Linear(WIDTH, hidden)
        self.bn = Norm(hidden)
        self.frozen = nn.Linear(hidden, hidden)
        self.output = "c" if renamed else "b"
        self.add_module(self.output, nn.Linear(hidden, WIDTH))
        self.one = nn.Parameter(torch.randn(1))
        self.never = nn.Parameter(torch.randn(7))
        if empty:
            self.empty = nn.Parameter(torch.empty(0))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.average: torch.Tensor
        self.seen: torch.Tensor
        self.buffers_are = buffers
        average, seen = ODD_BUFFERS.get(buffers, (torch.randn(hidden), torch.tensor(seed)))
        self.register_buffer("average", average.clone())
        self.register_buffer("seen", seen.clone())
        self.register_buffer("scratch", torch.full((3,), float(seed)), persistent=False)
        self.frozen.requires_grad_(thawed)
        self.a.requires_grad_(not thawed)
        for tensor in (self.bn.weight, self.bn.bias, self.bn.running_mean):
            nn.init.normal_(tensor)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one row of scores per token."""
        h = self.bn(torch.relu(self.a(self.embedding(x))))
        if self.training and not self.buffers_are:
            with torch.no_grad():
                self.average.lerp_(h.detach().float().mean(0).to(self.average.dtype), 0.25)
                self.seen.add_(x.numel())
        h = self.get_submodule(self.output)(h + self.frozen(h))
        scores: torch.Tensor = self.head(h) * self.one
        return scores


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's part of a step's global batch, which is the same for any world."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randint(0, VOCABULARY, (GLOBAL_BATCH,), generator=generator)
    y = torch.randn(GLOBAL_BATCH, VOCABULARY, generator=generator)
    size = GLOBAL_BATCH // world
    return x[rank * size : (rank + 1) * size], y[rank * size : (rank + 1) * size]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that an optimizer is given, by name, in the module's order."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def group_members(model: nn.Module, grouping: str) -> list[list[nn.Parameter]]:
    """Return the members of each parameter group; those of "every" have the frozen ones too."""
    parameters = list(trained(model).values())
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    new = [p for name, p in trained(model).items() if name.startswith(("c.", "frozen."))]
    old = [[p for p in ps if all(p is not n for n in new)] for ps in (matrices, vectors)]
    biases = [p for name, p in trained(model).items() if name.endswith("bias")]
    others = [p for name, p in trained(model).items() if not name.endswith("bias")]
    return {
        "one": [parameters],
        "two": [matrices, vectors],
        "swapped": [vectors, matrices],
        "reversed": [matrices[::-1], vectors[::-1]],
        "every": [list(model.parameters())],
        "every two": [list(model.parameters())[:4], list(model.parameters())[4:]],
        "three": [matrices, vectors[:3], vectors[3:]],
        "biases": [others, biases],
        "new apart": [*old, new],
    }[grouping]
