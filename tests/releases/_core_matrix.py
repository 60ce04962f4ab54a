"""The tests that run in each cell, except those that its release of DeepSpeed does not support."""

from __future__ import annotations

from packaging.version import Version

from tests.releases._cells import Cell

TESTS = (
    "tests/engine/test_matrix.py",
    "tests/engine/test_resumed_training.py",
    "tests/trainer/test_resume.py",
    "tests/trainer/test_gradients.py",
    "tests/trainer/test_evaluation.py::test_evaluations_on_any_number_of_ranks_are_equal",
    "tests/trainer/test_model_checkpoint.py::test_exactly_the_expected_checkpoints_are_kept",
    "tests/trainer/test_model_checkpoint.py::test_last_saved_on_fewer_ranks_has_no_old_shards",
    "tests/trainer/test_model_checkpoint.py::test_top_k_keeps_the_checkpoint_resumed_from",
    "tests/engine/test_lost_names.py",
    "tests/engine/test_installation.py",
    "tests/trainer/test_directory_check.py",
    "tests/trainer/test_preemption.py",
    "tests/trainer/test_async_save.py::test_a_background_save_equals_a_blocking_save",
    "tests/checkpoint/test_background.py",
)
"""Changes of stage, world size and precision; Trainers that resume, keep checkpoints and evaluate;
averaged gradients; and features that depend on the release: names that are checked at setup,
signals, background saves, streams, mapped memory. Of each test, the cases of ``make test`` run.
"""

MISSING = {
    "0.16.4": ("nvme",),
    "0.16.9": ("contiguous_False",),
    "0.18.4": ("autocast",),
    "0.18.9": ("muon_in_memory",),
    "0.19.7": ("alignment", "(fp32 and bf16)", "narrower_masters"),
}
"""Keys are the first releases that support a feature; values are words in the ids of its tests.

- 0.16.4: earlier releases refuse offload to NVMe.
- 0.16.9: an engine of 0.16.0 without contiguous gradients cannot be destroyed, which tests do.
- 0.18.4: ``torch_autocast`` has a scaler in every stage.
- 0.18.9: ZeRO-3 keeps Muon's momentum in memory.
- 0.19.7: ``parameter_alignment``. Releases before 0.19 cast buffers to bf16 with the weights, which
  rounds them when a run changes its precision; the oracle does not expect this. bf16 masters came
  after 0.17.5.
"""


def deselection(cell: Cell) -> str:
    """Return the ``pytest -k`` expression that deselects unsupported tests."""
    release = Version(cell.deepspeed)
    words = [word for since, ws in MISSING.items() if release < Version(since) for word in ws]
    return " and ".join(f"not {word}" for word in words)
