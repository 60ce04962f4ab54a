"""The split of a global batch into ranks and their micro-batches. Pure arithmetic.

With ``G`` samples per optimizer step on ``W`` ranks, rank ``r`` takes samples ``r``, ``r + W``,
``r + 2W``, ... of the step's block, in ``A`` micro-batches. DeepSpeed gives the mean of the ranks'
gradients, and each rank's gradient is a sum over its micro-batches. So a micro-batch of ``n``
samples, whose loss is the mean over them, counts with ``n * W / G``, and the gradient is the mean
over the global batch, whatever the split.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_elastic_zero.errors import UnsupportedError

MOST_SMALLER = 2
"""Equal micro-batches may be so many times smaller than what fits; then unequal ones are meant."""

LISTED_COUNTS = 12
"""How many device counts an error message names."""


def ceil_div(count: int, size: int) -> int:
    """Return how many parts of at most ``size`` make up ``count``."""
    return -(-count // size)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How the samples of one optimizer step are spread."""

    global_batch_size: int
    """Samples per optimizer step, over all ranks: ``G``."""
    world_size: int
    """Data-parallel ranks: ``W``."""
    accumulate: int
    """Micro-batches of each rank per optimizer step: ``A``."""

    @property
    def is_even(self) -> bool:
        """Whether all micro-batches of all ranks have one size."""
        return self.global_batch_size % (self.world_size * self.accumulate) == 0

    @property
    def largest_micro_batch(self) -> int:
        """Samples in the largest micro-batch of any rank."""
        return ceil_div(ceil_div(self.global_batch_size, self.world_size), self.accumulate)

    def samples_of(self, rank: int) -> int:
        """Return a rank's samples per optimizer step."""
        return len(range(rank, self.global_batch_size, self.world_size))

    def micro_batches_of(self, rank: int) -> tuple[int, ...]:
        """Return the sizes of a rank's micro-batches, in order: they differ by one at most."""
        size, larger = divmod(self.samples_of(rank), self.accumulate)
        return (size + 1,) * larger + (size,) * (self.accumulate - larger)

    def loss_weight(self, rank: int, micro_batch: int) -> float:
        """Return what a micro-batch's mean loss counts with, beside Lightning's ``1 / A``.

        1 where all micro-batches are equal, and exactly so.
        """
        if self.is_even:
            return 1.0
        size = self.micro_batches_of(rank)[micro_batch]
        return size * self.world_size * self.accumulate / self.global_batch_size


def plan_batches(
    global_batch_size: int, most_samples: int, world_size: int, *, allow_uneven: bool = False
) -> BatchPlan:
    """Cut a global batch into micro-batches that fit.

    Args:
        global_batch_size: samples per optimizer step, over all ranks.
        most_samples: of a micro-batch: the loader's ``batch_size``, which is what fits into memory.
        world_size: data-parallel ranks.
        allow_uneven: micro-batches may differ by one sample where equal ones do not come out.

    Raises:
        UnsupportedError: it cannot be cut so; the message names device counts that fit.
    """
    plan = _even_plan(global_batch_size, most_samples, world_size)
    if plan is None and allow_uneven and global_batch_size >= world_size:
        accumulate = ceil_div(ceil_div(global_batch_size, world_size), most_samples)
        uneven = BatchPlan(global_batch_size, world_size, accumulate)
        plan = uneven if uneven.samples_of(world_size - 1) >= accumulate else None
    if plan is None:
        raise UnsupportedError(
            _refusal(global_batch_size, most_samples, world_size, allow_uneven=allow_uneven)
        )
    return plan


def _even_plan(global_batch_size: int, most_samples: int, world_size: int) -> BatchPlan | None:
    """Return the plan of the fewest equal micro-batches, if one is not too wasteful."""
    of_rank, rest = divmod(global_batch_size, world_size)
    if rest or not of_rank:
        return None
    fewest = ceil_div(of_rank, most_samples)
    for accumulate in range(fewest, min(MOST_SMALLER * fewest, of_rank) + 1):
        if of_rank % accumulate == 0:
            return BatchPlan(global_batch_size, world_size, accumulate)
    return None


def _refusal(
    global_batch_size: int, most_samples: int, world_size: int, *, allow_uneven: bool
) -> str:
    """Return why a global batch cannot be cut, and what helps."""
    counts = [
        count
        for count in range(1, global_batch_size + 1)
        if _even_plan(global_batch_size, most_samples, count)
    ]
    # The nearest ones: nobody on 64 devices wants to hear of 1.
    near = sorted(sorted(counts, key=lambda count: abs(count - world_size))[:LISTED_COUNTS])
    listed = ", ".join(map(str, near)) or "none"
    # Otherwise no batch_size helps.
    divides = global_batch_size % world_size == 0
    change = ", or change the loader's batch_size" if divides else ""
    hint = "" if allow_uneven else "; or pass allow_uneven_batches=True"
    return (
        f"global_batch_size={global_batch_size} cannot be shared by {world_size} devices in equal "
        f"micro-batches of at most {most_samples} samples (the loader's batch_size). Device counts "
        f"that fit: {listed}. Use one of them{change}{hint}"
    )
