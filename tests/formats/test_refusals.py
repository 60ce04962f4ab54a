"""Mixtures, damage and unsupported checkpoints are refused by name, before anything is loaded.

Everything here runs in plain processes, without DeepSpeed. The checkpoints are real ones of other
software, each with one defect.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    ElasticZeroError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.tools.conversion import convert_checkpoint
from lightning_elastic_zero.tools.verification import verify_checkpoint
from tests.formats._read_whole import read_whole
from tests.support.foreign_checkpoints import unpack
from tests.support.processes import HANG_TIMEOUT_S

MODEL = "mp_rank_00_model_states.pt"
SEED = 20261121


class Custom:
    """A class that a user may have put into the trainer's state."""

    value = 3


def tag_of(path: Path) -> Path:
    """Return the folder that ``latest`` names."""
    return path / (path / "latest").read_text().strip()


def shard(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    tree = torch.load(path, weights_only=False)
    change(tree)
    torch.save(tree, path)


def set_rate(rate: float, tree: dict[str, Any]) -> None:
    inside = tree["optimizer_state_dict"]
    states = inside.get("optimizer_state_dict") or inside["base_optimizer_state"]
    states["param_groups"][0]["lr"] = rate


class TestMixtures:
    def test_missing_ranks_are_all_named(self, tmp_path: Path) -> None:
        """The error names each file that a rank must have written."""
        path = unpack("zero3-ds0.19", tmp_path).checkpoint
        tag = tag_of(path)
        (tag / shard(1)).unlink()
        (tag / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
        with pytest.raises(CheckpointCorruptedError, match=r"rank_1_.*model.*rank_1_.*optim"):
            read_whole(path)

    def test_model_files_alone_are_incomplete(self, tmp_path: Path) -> None:
        path = unpack("zero2-ds0.19", tmp_path).checkpoint
        for rank in range(3):
            (tag_of(path) / shard(rank)).unlink()
        with pytest.raises(CheckpointCorruptedError, match="bf16_zero_pp_rank_0"):
            read_whole(path)

    def test_two_stages_in_one_folder_are_two_runs(self, tmp_path: Path) -> None:
        three = unpack("zero3-ds0.19", tmp_path / "3").checkpoint
        two = unpack("zero2-ds0.19", tmp_path / "2").checkpoint
        shutil.copy(tag_of(two) / MODEL, tag_of(three))
        with pytest.raises(CheckpointFormatError, match="two runs"):
            read_whole(three)

    def test_a_shard_of_another_step_is_refused(self, tmp_path: Path) -> None:
        path = unpack("two-tags", tmp_path).checkpoint
        shutil.copy(path / "step5" / shard(1), path / "step3" / shard(1))
        with pytest.raises(CheckpointFormatError, match=r"rank_1_mp.*other steps"):
            read_whole(path)

    def test_masters_that_do_not_round_to_the_weights_are_refused(self, tmp_path: Path) -> None:
        path = unpack("two-tags", tmp_path).checkpoint
        shutil.copy(path / "step5" / MODEL, path / "step3" / MODEL)
        with pytest.raises(CheckpointCorruptedError, match="do not round"):
            read_whole(path)

    def test_swapped_shards_are_refused(self, tmp_path: Path) -> None:
        path = unpack("universal-beside", tmp_path).checkpoint
        swap(*(tag_of(path) / shard(rank) for rank in (0, 1)))
        with pytest.raises(CheckpointFormatError, match=r"rank_0_.* was saved as .*rank_1_"):
            read_whole(path)

    @pytest.mark.parametrize("kind", ["optim", "model"])
    def test_swapped_shards_of_zero_3_are_refused(self, kind: str, tmp_path: Path) -> None:
        """ZeRO-3 has no weights to compare with, but each file records its name."""
        path = unpack("zero3-ds0.16", tmp_path).checkpoint
        swap(*sorted(tag_of(path).glob(f"*{kind}_states.pt")))
        with pytest.raises(CheckpointFormatError, match=r"rank_\d_.* was saved as .*rank_\d_"):
            read_whole(path)

    @pytest.mark.parametrize("name", ["zero2-ds0.19", "zero3-ds0.19"])
    def test_a_shard_with_another_loss_scale_is_refused(self, name: str, tmp_path: Path) -> None:
        """Ranks agree on overflows, so their loss scales are equal."""
        path = unpack(name, tmp_path).checkpoint

        def rescale(tree: dict[str, Any]) -> None:
            tree["optimizer_state_dict"]["loss_scaler"].cur_scale = 2.0

        edit(tag_of(path) / shard(1), rescale)
        with pytest.raises(CheckpointFormatError, match=r"rank_1_mp.*loss scaler"):
            read_whole(path)

    @pytest.mark.parametrize("name", ["zero2-ds0.19", "zero3-ds0.19", "bf16-ds0.18"])
    def test_drifted_rates_cause_a_warning(
        self, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = unpack(name, tmp_path).checkpoint
        before = read_whole(path)
        assert not caplog.messages
        edit(tag_of(path) / shard(1), partial(set_rate, 0.25))
        with closing(open_checkpoint(path)) as source:
            assert source.manifest.groups[0].hyperparameters["lr"] != 0.25
        assert_same(before, read_whole(path))
        (warning,) = caplog.messages
        assert re.search(r"lr of parameter group 0 is 0\.001 on rank 0, 0\.25 on rank 1", warning)

    def test_drifted_rates_without_step_counts_are_refused(self, tmp_path: Path) -> None:
        """In ZeRO-3, the shards could be those of two saves, which only step counts show."""
        path = unpack("momentum", tmp_path).checkpoint
        edit(tag_of(path) / shard(1), partial(set_rate, 0.25))
        with pytest.raises(CheckpointFormatError, match=r"0\.25 on rank 1; .* no step counters"):
            read_whole(path)

    def test_a_shard_of_another_world_size_is_refused(self, tmp_path: Path) -> None:
        path = unpack("zero2-ds0.19", tmp_path / "3").checkpoint
        other = unpack("round-robin", tmp_path / "2").checkpoint
        shutil.copy(tag_of(other) / shard(1), tag_of(path) / shard(1))
        with pytest.raises(CheckpointFormatError, match="number of ranks"):
            read_whole(path)

    def test_zero_3_model_files_of_two_steps_are_refused(self, tmp_path: Path) -> None:
        path = unpack("zero3-ds0.19", tmp_path).checkpoint
        name = "zero_pp_rank_1_mp_rank_00_model_states.pt"
        edit(tag_of(path) / name, lambda tree: tree.update(global_steps=2))
        with pytest.raises(CheckpointFormatError, match=r"rank_1_.*step counters"):
            read_whole(path)

    def test_corrupt_conversions_are_refused(self, tmp_path: Path) -> None:
        """ds_to_universal corrupts round-robin gradients."""
        path = unpack("universal-corrupt", tmp_path).checkpoint
        with pytest.raises(CheckpointCorruptedError, match="round_robin_gradients"):
            read_whole(path)

    @pytest.mark.cases(1)
    @pytest.mark.parametrize("name", ["universal3", "universal3-two", "universal3-ds0.16"])
    def test_files_of_two_conversions_are_refused(self, name: str, tmp_path: Path) -> None:
        """In ZeRO-3 they contain no steps, and the model files no weights to compare with."""
        tag = unpack(name, tmp_path).checkpoint / "step3_universal"
        before = read_whole(tag)
        for file in ("a.bias/fp32.pt", "one/fp32.pt", "embedding.weight/exp_avg_sq.pt"):
            kept = (tag / "zero" / file).read_bytes()
            edit(tag / "zero" / file, lambda tensor: tensor.data.view(-1)[:1].add_(0.5))
            with pytest.raises(CheckpointCorruptedError, match=rf"zero/{file} .*two conversions"):
                read_whole(tag)
            assert "two conversions" in verify_checkpoint(tag).problem
            (tag / "zero" / file).write_bytes(kept)
        assert_same(before, read_whole(tag))

    def test_a_conversion_with_model_files_of_another_step_is_refused(self, tmp_path: Path) -> None:
        tag = unpack("universal3", tmp_path).checkpoint / "step3_universal"
        for file in tag.glob("*_model_states.pt"):
            edit(file, lambda tree: tree.update(global_steps=5))
        problem = verify_checkpoint(tag).problem
        assert re.search(r"of step 5 .*has taken 3 steps \(zero/optimizer_state\.pt\)", problem)

    def test_missing_files_of_a_conversion_are_named(self, tmp_path: Path) -> None:
        path = unpack("universal2", tmp_path).checkpoint
        folder = path / "step3_universal" / "zero"
        (folder / "a.bias" / "exp_avg.pt").unlink()
        with pytest.raises(CheckpointCorruptedError, match=r"a\.bias/exp_avg\.pt"):
            read_whole(path)
        shutil.rmtree(folder / "one")
        with pytest.raises(CheckpointCorruptedError, match=r"zero/one/fp32\.pt"):
            read_whole(path)


@pytest.mark.parametrize("name", ["zero2-ds0.19", "zero3-ds0.19"])
def test_entries_that_are_neither_parameters_nor_buffers_are_reported(
    name: str, tmp_path: Path
) -> None:
    """Classes of quantized layers add their scales to the state dict."""
    path = unpack(name, tmp_path).checkpoint
    with closing(open_checkpoint(path)) as reader:
        assert reader.info.unread == ()
    scale = {"frozen.weight_scale": torch.ones(5), "frozen.extra._extra_state": torch.ones(5)}
    for file in tag_of(path).glob("*model_states.pt"):
        edit(file, lambda tree: tree["module"].update(scale))
    with closing(open_checkpoint(path)) as reader:
        assert reader.info.unread == ("frozen.weight_scale",)
    found = convert_checkpoint(path, tmp_path / "weights", "fp32")
    text = "entries of state_dict that are neither parameters nor buffers (frozen.weight_scale)"
    assert text in found.lost


class TestTags:
    def test_a_missing_latest_tag_is_not_replaced(self, tmp_path: Path) -> None:
        path = unpack("two-tags", tmp_path).checkpoint
        shutil.rmtree(path / "step3")
        with pytest.raises(CheckpointFormatError, match=r"'step3'.*found step5"):
            read_whole(path)

    def test_several_tags_without_latest_are_refused(self, tmp_path: Path) -> None:
        path = unpack("two-tags", tmp_path).checkpoint
        (path / "latest").unlink()
        with pytest.raises(CheckpointFormatError, match=r"step3, step5.*pass the folder"):
            read_whole(path)
        assert read_whole(path / "step5")

    def test_shards_of_a_larger_world_are_ignored(self, tmp_path: Path) -> None:
        path = unpack("stale3", tmp_path).checkpoint
        before = read_whole(path)
        stale = [p for p in tag_of(path).iterdir() if "rank_2_" in p.name]
        assert len(stale) == 2
        for file in stale:
            file.write_bytes(b"no torch file")
        assert_same(before, read_whole(path))


class TestDamage:
    @pytest.mark.cases(2)
    @pytest.mark.filterwarnings("ignore:TypedStorage:UserWarning")  # a flipped class name
    @pytest.mark.parametrize("name", ["zero2-ds0.19", "zero3-ds0.19", "bf16-ds0.19", "universal3"])
    def test_flipped_bits_are_never_loaded(self, name: str, tmp_path: Path) -> None:
        """Each flipped bit is refused, unless nothing reads the bytes that contain it."""
        path = unpack(name, tmp_path).checkpoint
        before = read_whole(path)
        files = sorted(p for p in path.rglob("*.pt") if p.stat().st_size)
        rng = random.Random(SEED)
        refused = 0
        for _ in range(40):
            file = rng.choice(files)
            data = bytearray(file.read_bytes())
            at = rng.randrange(len(data))
            data[at] ^= 1 << rng.randrange(8)
            kept = file.read_bytes()
            file.write_bytes(data)
            try:
                found = read_whole(path)
            except ElasticZeroError:
                refused += 1
            else:
                assert_same(before, found)
            file.write_bytes(kept)
        assert refused > 0

    def test_cut_files_are_named(self, tmp_path: Path) -> None:
        path = unpack("zero2-ds0.19", tmp_path).checkpoint
        file = tag_of(path) / shard(2)
        file.write_bytes(file.read_bytes()[:-1000])
        with pytest.raises(ElasticZeroError, match="rank_2_"):
            read_whole(path)

    def test_an_empty_file_is_named(self, tmp_path: Path) -> None:
        path = unpack("zero2-ds0.19", tmp_path).checkpoint
        (tag_of(path) / shard(1)).write_bytes(b"")
        with pytest.raises(ElasticZeroError, match="rank_1_"):
            read_whole(path)

    @pytest.mark.parametrize(
        "entry", ["param_shapes", "dp_world_size", "buffer_names", "module", "ds_config"]
    )
    def test_missing_entries_are_refused_or_unused(self, entry: str, tmp_path: Path) -> None:
        path = unpack("zero3-ds0.19", tmp_path).checkpoint
        before = read_whole(path)
        for name in (f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 1)):
            edit(tag_of(path) / name, lambda tree: tree.pop(entry))
        try:
            found = read_whole(path)
        except ElasticZeroError:
            return
        assert entry == "ds_config"
        assert_same(before, found)


class TestTrust:
    def test_classes_are_refused_by_name_unless_allowed(self, tmp_path: Path) -> None:
        path = unpack("zero2-ds0.19", tmp_path).checkpoint
        edit(tag_of(path) / MODEL, lambda tree: tree.update(mine=Custom()))
        with pytest.raises(UnsupportedError, match=r"test_refusals\.Custom.*allow_pickle=True"):
            read_whole(path)
        assert read_whole(path, allow_pickle=True)

    @pytest.mark.long
    def test_reading_needs_no_deepspeed(self, tmp_path: Path) -> None:
        path = unpack("zero2-ds0.19", tmp_path).checkpoint
        program = (
            "import sys; sys.modules['deepspeed'] = None; sys.modules['lightning'] = None\n"
            "from pathlib import Path\n"
            "from tests.formats._read_whole import read_whole\n"
            f"assert len(read_whole(Path({str(path)!r}))) > 20\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            timeout=HANG_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()


class TestOtherRuns:
    def test_tensor_parallel_checkpoints_are_refused(self, tmp_path: Path) -> None:
        path = unpack("zero2-ds0.19", tmp_path).checkpoint
        shutil.copy(tag_of(path) / MODEL, tag_of(path) / "mp_rank_01_model_states.pt")
        with pytest.raises(UnsupportedError, match="mp_rank_01"):
            read_whole(path)

    def test_checkpoints_without_zero_are_refused(self, tmp_path: Path) -> None:
        path = unpack("zero2-ds0.19", tmp_path).checkpoint
        edit(tag_of(path) / MODEL, lambda tree: tree.update(param_shapes=None))
        with pytest.raises(CheckpointFormatError, match="without ZeRO"):
            read_whole(path)

    def test_masters_offloaded_to_nvme_are_refused(self, tmp_path: Path) -> None:
        path = unpack("zero3-ds0.19", tmp_path).checkpoint

        def empty(tree: dict[str, Any]) -> None:
            flats = tree["optimizer_state_dict"]["fp32_flat_groups"]
            tree["optimizer_state_dict"]["fp32_flat_groups"] = [torch.empty(0) for _ in flats]

        for rank in (0, 1):
            edit(tag_of(path) / shard(rank), empty)
        with pytest.raises(UnsupportedError, match="NVMe"):
            read_whole(path)

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"", "is empty: "),
            (b"i1\n.", r"it begins with b'i1"),
            (b"PK\x03\x04", "torch.save"),
        ],
    )
    def test_unreadable_files_are_refused_with_a_reason(
        self, content: bytes, reason: str, tmp_path: Path
    ) -> None:
        (tmp_path / "last.ckpt").write_bytes(content)
        with pytest.raises(CheckpointFormatError, match=reason):
            read_whole(tmp_path / "last.ckpt")

    def test_the_error_lists_the_checkpoints_in_a_folder(self, tmp_path: Path) -> None:
        names = ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]
        (tmp_path / "run").mkdir()
        for name in names:
            unpack("lightning2", tmp_path / name).checkpoint.rename(tmp_path / "run" / name)
        with pytest.raises(
            CheckpointFormatError, match="format: it contains the checkpoints " + ", ".join(names)
        ):
            read_whole(tmp_path / "run")
        with pytest.raises(CheckpointNotFoundError, match="contains the checkpoints epoch"):
            read_whole(tmp_path / "run" / "best.ckpt")
        for number in range(2, 6):
            (tmp_path / "run" / f"epoch={number}.ckpt").touch()
        with pytest.raises(CheckpointNotFoundError, match=r"epoch=5\.ckpt and 1 more$"):
            read_whole(tmp_path / "run" / "best.ckpt")
        with pytest.raises(CheckpointNotFoundError, match="runs does not exist either"):
            read_whole(tmp_path / "runs" / "last.ckpt")
        (tmp_path / "none").mkdir()
        with pytest.raises(CheckpointNotFoundError, match="none contains no checkpoints"):
            read_whole(tmp_path / "none" / "last.ckpt")

    @pytest.mark.parametrize("content", [b"", b"{}", b"PK\x03\x04"])
    def test_a_folder_without_a_checkpoint_is_refused(self, content: bytes, tmp_path: Path) -> None:
        with pytest.raises(CheckpointFormatError, match="format: it is empty"):
            read_whole(tmp_path)
        (tmp_path / "some.pt").write_bytes(content)
        with pytest.raises(CheckpointFormatError, match=r"format: it contains some\.pt"):
            read_whole(tmp_path)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert torch.equal(
            tensor.view(-1).view(torch.uint8), other[key].view(-1).view(torch.uint8)
        ), key
