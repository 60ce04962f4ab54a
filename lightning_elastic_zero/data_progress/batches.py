"""The split of a global batch.

``BatchPlan`` divides the ``G`` samples of a step among ``W`` ranks: rank ``r`` takes samples ``r``,
``r + W``, ``r + 2W``, ... in ``A`` micro-batches. DeepSpeed averages the ranks' gradients, so a
micro-batch of ``n`` samples with a mean loss has the weight ``n * W / G``.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_elastic_zero.errors import UnsupportedError

MOST_SMALLER = 2
"""Equal micro-batches may need up to this factor more micro-batches than fit into memory."""

LISTED_COUNTS = 12
"""Number of device counts listed in an error message."""


def ceil_div(count: int, size: int) -> int:
    """Return ``count / size``, rounded up."""
    return -(-count // size)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How the samples of one optimizer step are divided among ranks and micro-batches."""

    global_batch_size: int
    """Samples per optimizer step, over all ranks: ``G``."""
    world_size: int
    """Data-parallel ranks: ``W``."""
    accumulate: int
    """Micro-batches of each rank per optimizer step: ``A``."""

    @property
    def is_even(self) -> bool:
        """Whether all micro-batches of all ranks have the same size."""
        return self.global_batch_size % (self.world_size * self.accumulate) == 0

    @property
    def largest_micro_batch(self) -> int:
        """Samples in the largest micro-batch of any rank."""
        return ceil_div(ceil_div(self.global_batch_size, self.world_size), self.accumulate)

    def samples_of(self, rank: int) -> int:
        """Return a rank's samples per optimizer step."""
        return len(range(rank, self.global_batch_size, self.world_size))

    def micro_batches_of(self, rank: int) -> tuple[int, ...]:
        """Return the sizes of a rank's micro-batches, in order; they differ by at most one."""
        size, larger = divmod(self.samples_of(rank), self.accumulate)
        return (size + 1,) * larger + (size,) * (self.accumulate - larger)

    def loss_weight(self, rank: int, micro_batch: int) -> float:
        """Return the weight of a micro-batch's mean loss, in addition to Lightning's ``1 / A``.

        Exactly 1.0 if all micro-batches are equal.
        """
        if self.is_even:
            return 1.0
        size = self.micro_batches_of(rank)[micro_batch]
        return size * self.world_size * self.accumulate / self.global_batch_size


def plan_batches(
    global_batch_size: int, most_samples: int, world_size: int, *, allow_uneven: bool = False
) -> BatchPlan:
    """Divide a global batch into micro-batches.

    Args:
        global_batch_size: Samples per optimizer step, over all ranks.
        most_samples: Largest micro-batch: the loader's ``batch_size``.
        world_size: Data-parallel ranks.
        allow_uneven: Micro-batches may differ by one sample if equal ones are impossible.

    Returns:
        The plan with the fewest micro-batches.

    Raises:
        UnsupportedError: It cannot be divided. The message lists device counts that fit.
    """
    plan = _even_plan(global_batch_size, most_samples, world_size)
    if plan is None and allow_uneven and global_batch_size >= world_size:
        accumulate = ceil_div(ceil_div(global_batch_size, world_size), most_samples)
        uneven = BatchPlan(global_batch_size, world_size, accumulate)
        plan = uneven if uneven.samples_of(world_size - 1) >= accumulate else None
    if plan is not None:
        return plan
    counts = [
        count
        for count in range(1, global_batch_size + 1)
        if _even_plan(global_batch_size, most_samples, count)
    ]
    # The nearest ones: on 64 devices, 1 is not a useful alternative.
    near = sorted(sorted(counts, key=lambda count: abs(count - world_size))[:LISTED_COUNTS])
    listed = ", ".join(map(str, near)) or "none"
    # Otherwise changing the batch_size does not help.
    divides = global_batch_size % world_size == 0
    change = ", or change the loader's batch_size" if divides else ""
    hint = "" if allow_uneven else "; or pass allow_uneven_batches=True"
    msg = (
        f"global_batch_size={global_batch_size} cannot be shared by {world_size} devices in equal "
        f"micro-batches of at most {most_samples} samples (the loader's batch_size). Device counts "
        f"that fit: {listed}. Use one of them{change}{hint}"
    )
    raise UnsupportedError(msg)


def _even_plan(global_batch_size: int, most_samples: int, world_size: int) -> BatchPlan | None:
    """Return the plan with the fewest equal micro-batches; None if they would be too small."""
    of_rank, rest = divmod(global_batch_size, world_size)
    if rest or not of_rank:
        return None
    fewest = ceil_div(of_rank, most_samples)
    for accumulate in range(fewest, min(MOST_SMALLER * fewest, of_rank) + 1):
        if of_rank % accumulate == 0:
            return BatchPlan(global_batch_size, world_size, accumulate)
    return None
