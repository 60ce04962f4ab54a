"""The tests that are run in each cell, but for what its release of DeepSpeed does not have."""

from __future__ import annotations

from packaging.version import Version

from tests.releases._cells import Cell

TESTS = (
    "tests/engine/test_matrix.py",
    "tests/engine/test_resumed_training.py",
    "tests/trainer/test_resume.py",
    "tests/trainer/test_gradients.py",
    "tests/trainer/test_evaluation.py::test_any_ranks_find_the_same",
    "tests/trainer/test_model_checkpoint.py::test_exactly_the_expected_checkpoints_are_kept",
    "tests/trainer/test_model_checkpoint.py::test_last_saved_on_fewer_ranks_has_no_old_shards",
    "tests/trainer/test_model_checkpoint.py::test_top_k_keeps_the_checkpoint_resumed_from",
    "tests/engine/test_lost_names.py",
    "tests/trainer/test_directory_check.py",
    "tests/trainer/test_preemption.py",
    "tests/trainer/test_async_save.py::test_a_background_save_equals_a_blocking_save",
    "tests/core/test_device_snapshots.py::test_without_an_accelerator_cuda_is_not_initialised",
    "tests/core/test_background.py",
)
"""Any stage, world and precision to any other; Trainers that resume, keep and evaluate; gradients
that are means; and what asks for more of a release: each name that is checked at setup, signals,
saves behind training, streams, mapped memory. Of each, the cases of ``make test``.
"""

LACKING = {
    "0.16.4": ("nvme",),
    "0.16.9": ("contiguous_False",),
    "0.18.4": ("autocast",),
    "0.18.9": ("muon_in_memory",),
    "0.19.7": ("alignment", "(fp32 and bf16)", "narrower_masters"),
}
"""By the release that brought what they need: words of the tests that are left out before it.

Offload to NVMe is refused before 0.16.4. An engine of 0.16.0 (0.16.9 can) that has no contiguous
gradients cannot be destroyed, as tests do. ``torch_autocast`` has its scaler in every stage since
0.18.4, ZeRO-3 Muon's momentum in memory since 0.18.9. ``parameter_alignment`` came with 0.19.7.
Older releases keep buffers in bf16 where the weights are, so that they are rounded when a run
changes its precision, which the oracle does not expect; masters in bf16 came after 0.17.5.
"""


def left_out(cell: Cell) -> str:
    """Return what ``pytest -k`` is told of a cell."""
    release = Version(cell.deepspeed)
    words = [word for since, ws in LACKING.items() if release < Version(since) for word in ws]
    return " and ".join(f"not {word}" for word in words)
