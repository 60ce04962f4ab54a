"""``verify``: each kind of damage is found and named, and reading never hangs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_elastic_zero.core.manifest import manifest_from_json
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.save_files import optimizer_file
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    ElasticZeroError,
)
from lightning_elastic_zero.formats.deepspeed_files import is_deepspeed
from lightning_elastic_zero.formats.newest import checkpoints_in, newest_first
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.integrations.engines import find_checkpoint
from lightning_elastic_zero.storage.own_files import inspect_target
from lightning_elastic_zero.storage.paths import AnyPath
from lightning_elastic_zero.tools.conversion import convert_checkpoint
from lightning_elastic_zero.tools.fingerprint import fingerprint_checkpoint
from lightning_elastic_zero.tools.inspection import inspect_checkpoint
from lightning_elastic_zero.tools.selection import ConvertOptions
from lightning_elastic_zero.tools.verification import newest_sound_checkpoint, verify_checkpoint
from tests.support.foreign_checkpoints import unpack
from tests.support.plain_checkpoints import make_state, manifest_of, write_elastic
from tests.support.processes import finishes

Run = Callable[..., tuple[int, str, str]]


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def middle_of_the_largest_record(path: Path) -> int:
    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda record: record.file_size)
    header = path.read_bytes()[record.header_offset :][:30]
    sizes = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return record.header_offset + 30 + sizes + record.file_size // 2


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("stage", "world_size"), [(2, 2), (3, 3)])
def test_a_sound_checkpoint_is_read_once(
    stage: int, world_size: int, threads: int, tmp_path: Path, run: Run
) -> None:
    path = write_elastic(tmp_path / "a.ckpt", make_state(), stage, world_size)
    reported: list[int] = []
    found = verify_checkpoint(path, threads=threads, progress=Progress(show=reported.append))
    assert found.is_sound
    files = sum(f.stat().st_size for f in path.rglob("*.pt"))
    assert found.bytes == files == sum(reported)
    code, out, _ = run("verify", path, path)
    assert code == 0
    assert out.count("intact: lightning_elastic_zero checkpoint of step 3") == 2


def shard_of(path: Path, rank: int) -> Path:
    return next(path.rglob(f"*_rank_{rank}_*_optim_states.pt"))


def _change_manifest(path: Path) -> None:
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"stage": 2', '"stage": 1'))


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (
            lambda p: os.truncate(shard_of(p, 1), shard_of(p, 1).stat().st_size - 1),
            " bytes, expected ",
        ),
        (lambda p: flip(shard_of(p, 1), 1500), "optim_states.pt"),
        (lambda p: shard_of(p, 0).unlink(), "cannot be read"),
        (lambda p: Path(f"{shard_of(p, 0)}.sums").unlink(), "sums"),
        (_change_manifest, "digest"),
    ],
    ids=["cut short", "flipped", "lost", "lost sums", "changed manifest"],
)
def test_each_damage_is_named(
    damage: Callable[[Path], None], word: str, tmp_path: Path, run: Run
) -> None:
    path = write_elastic(tmp_path / "a.ckpt", make_state())
    sound = shutil.copytree(path, tmp_path / "b.ckpt")
    damage(path)
    found = verify_checkpoint(path)
    assert not found.is_sound
    assert word in found.problem
    code, out, err = run("verify", path, sound)
    assert code == 1
    assert f"{path}: DAMAGED" in err
    assert f"{sound}: intact" in out


def test_missing_paths_and_the_inside_of_a_checkpoint_are_usage_errors(
    source: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    for check in (verify_checkpoint, inspect_checkpoint):
        with pytest.raises(CheckpointNotFoundError):
            check(tmp_path / "none")
    refused("verify", tmp_path, "--newest-sound", tmp_path)
    assert f"is inside a checkpoint. Pass {source}" in refused("verify", source / "checkpoint")


@pytest.mark.parametrize("name", ["zero2-ds0.19", "zero3-ds0.19", "bf16-ds0.19", "universal1"])
def test_checkpoints_of_other_software_are_sound(name: str, tmp_path: Path) -> None:
    path = unpack(name, tmp_path).checkpoint
    found = verify_checkpoint(path)
    assert found.problem == ""
    assert found.compared_masters == (name != "zero3-ds0.19")
    shard = max(path.rglob("*exp_avg.pt" if name == "universal1" else "*optim_states.pt"))
    flip(shard, middle_of_the_largest_record(shard))
    assert not verify_checkpoint(path).is_sound


@pytest.mark.parametrize(
    "name", ["zero2-ds0.19", "zero3-ds0.19", "lightning2", "universal3", "own"]
)
def test_a_missing_latest_is_reported_but_sound(name: str, tmp_path: Path, run: Run) -> None:
    if name == "own":
        path = write_elastic(tmp_path / "a.ckpt", make_state())
    else:
        path = unpack(name, tmp_path).checkpoint
        path = path.parent if is_deepspeed(path) else path
    named = path / ("latest_universal" if "universal" in name else "latest")
    (tag,) = (p.name for p in path.iterdir() if p.is_dir())
    named.write_text(tag)
    assert (verify_checkpoint(path).note, inspect_checkpoint(path).note) == ("", "")
    if name == "own":  # For others, the tag is unknown then.
        named.write_text("another")
        note = verify_checkpoint(path).note
        assert f"no file {named.name} names the tag {tag!r}" in note
        assert f"write {tag} into {named}" in note
    named.unlink()
    for tool in (verify_checkpoint, inspect_checkpoint):
        note = tool(path).note
        assert f"no file {named.name} names the tag {tag!r}" in note
        assert f"write {tag} into {named}" in note
    code, out, err = run("verify", path)
    assert (code, note in err) == (0, True)
    assert f"{path}: intact" in out
    code, out, _ = run("inspect", path)
    assert (code, note in out) == (0, True)
    assert json.loads(run("inspect", path, "--json")[1])["note"] == note
    if name != "own":
        assert verify_checkpoint(path / tag).note == ""  # The path selects the tag.


def test_the_missing_model_file_is_named_for_both_stages(tmp_path: Path) -> None:
    path = unpack("zero2-ds0.19", tmp_path).checkpoint
    (model,) = path.rglob("*_model_states.pt")
    model.unlink()
    problem = verify_checkpoint(path).problem
    assert f"{model.name} (of ZeRO-1/2) or zero_pp_rank_0_mp_rank_00_model_states.pt" in problem


def _recut(path: Path, change: int) -> None:
    manifest = manifest_from_json((path / "manifest.json").read_text(), "here")
    first, *others = manifest.buffers
    moved = replace(first, partition_numel=first.partition_numel + change)
    text = replace(manifest, buffers=(moved, *others)).to_json()
    (path / "manifest.json").write_text(text)


@pytest.mark.parametrize("change", [-3, 5])
def test_pieces_that_do_not_tile_are_found(change: int, tmp_path: Path) -> None:
    path = write_elastic(tmp_path / "a.ckpt", make_state(), 2, 3)
    assert verify_checkpoint(path).is_sound
    _recut(path, change)
    assert verify_checkpoint(path).problem


def _move_chunk(rows: int, path: Path) -> None:
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    entry = metadata.state_dict_metadata["model.w"]
    assert isinstance(entry, TensorStorageMetadata)
    was = entry.chunks[1]
    now = replace(was, offsets=torch.Size([was.offsets[0] + rows, 0]))
    entry.chunks[1] = now
    data = {
        (replace(i, offset=now.offsets) if i.offset == was.offsets and i.fqn == "model.w" else i): v
        for i, v in metadata.storage_data.items()
    }
    (path / ".metadata").write_bytes(pickle.dumps(replace(metadata, storage_data=data)))


@pytest.mark.parametrize("rows", [-1, 1])
def test_chunks_that_do_not_tile_are_found(rows: int, tmp_path: Path) -> None:
    torch.save({"w": torch.randn(5, 1 << 21)}, tmp_path / "w.pt")
    convert_checkpoint(tmp_path / "w.pt", tmp_path / "dcp", "dcp")
    assert verify_checkpoint(tmp_path / "dcp").is_sound
    _move_chunk(rows, tmp_path / "dcp")
    assert "do not contain each of its elements once" in verify_checkpoint(tmp_path / "dcp").problem


@pytest.mark.parametrize("name", ["zero2-ds0.19", "bf16-ds0.18"])
def test_masters_at_wrong_offsets_are_found(name: str, tmp_path: Path) -> None:
    """Single weights that differ may have been changed in place."""
    path = unpack(name, tmp_path).checkpoint
    assert verify_checkpoint(path).compared_masters
    shard = min(path.rglob("*_optim_states.pt"))
    tree = torch.load(shard, weights_only=False)
    masters = tree["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data
    masters.view(-1)[0] += 1
    torch.save(tree, shard)
    found = verify_checkpoint(path)
    assert found.is_sound
    assert not found.compared_masters
    assert "changed them in place" in found.note
    masters.copy_(masters.roll(1))
    torch.save(tree, shard)
    assert "do not round to" in verify_checkpoint(path).problem


def test_single_files_are_verified(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(100.0)}, tmp_path / "w.ckpt")
    assert verify_checkpoint(tmp_path / "w.ckpt").is_sound
    data = (tmp_path / "w.ckpt").read_bytes()
    flip(tmp_path / "w.ckpt", data.index(torch.arange(100.0).numpy().tobytes()) + 40)
    assert "CRC-32" in verify_checkpoint(tmp_path / "w.ckpt").problem


def test_the_newest_sound_checkpoint(tmp_path: Path, run: Run) -> None:
    state = make_state()
    for number, name in enumerate(("a.ckpt", "b.ckpt", "c.ckpt", ".hidden.ckpt")):
        path = write_elastic(tmp_path / name, state)
        os.utime(path / "manifest.json", (1000 + number, 1000 + number))
    (tmp_path / "last.ckpt").symlink_to("b.ckpt")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    flip(next((tmp_path / "c.ckpt").rglob("*_optim_states.pt")), 1500)
    newest = newest_first(dict.fromkeys(checkpoints_in(tmp_path), 0))
    assert newest == [tmp_path / name for name in ("c.ckpt", "b.ckpt", "a.ckpt")]
    seen: list[str] = []
    found = newest_sound_checkpoint(tmp_path, on_verified=lambda v: seen.append(Path(v.path).name))
    assert found == tmp_path / "b.ckpt"
    assert seen == ["c.ckpt", "b.ckpt"]
    code, out, err = run("verify", "--newest-sound", tmp_path)
    assert (code, out.strip()) == (0, str(tmp_path / "b.ckpt"))
    assert "c.ckpt: DAMAGED" in err
    assert run("verify", "--newest-sound", tmp_path / "none")[0] == 2


def test_saves_below_a_folder_count_if_its_callback_made_them(tmp_path: Path) -> None:
    """Others may be those of other runs."""
    nested, other = "epoch=0-val/loss=1.ckpt", "other/run.ckpt"
    for name, dirpath in ((nested, tmp_path), (other, tmp_path / "other")):
        callback = {"dirpath": str(dirpath), "best_model_path": str(tmp_path / name)}
        state = replace(make_state(), client={"callbacks": {"ModelCheckpoint": callback}})
        write_elastic(tmp_path / name, state)
    assert checkpoints_in(tmp_path) == {tmp_path / nested}
    assert checkpoints_in(tmp_path / "other") == {tmp_path / other}


def test_steps_decide_between_checkpoints_of_one_time(tmp_path: Path) -> None:
    """Object stores count in seconds."""
    steps: dict[AnyPath, int] = {}
    for name, step, time_s in (("a", 9, 1000), ("b", 5, 1000), ("c", 7, 1001)):
        steps[write_elastic(tmp_path / name, make_state())] = step
        os.utime(tmp_path / name / "manifest.json", (time_s, time_s))
    assert [path.name for path in newest_first(steps)] == ["c", "a", "b"]


def test_steps_decide_between_sound_checkpoints_of_one_time(tmp_path: Path) -> None:
    for step in (9, 10):
        progress = replace(manifest_of(make_state(), 2, 2).progress, global_steps=step)
        path = write_elastic(tmp_path / f"step={step}.ckpt", make_state(), progress=progress)
        os.utime(path / "manifest.json", (1000, 1000))
    assert newest_sound_checkpoint(tmp_path) == tmp_path / "step=10.ckpt"


def test_a_folder_of_two_checkpoints_is_not_called_sound(tmp_path: Path) -> None:
    """A script without elastic() has saved there later: either of the two may be meant."""
    older = write_elastic(tmp_path / "a", make_state())
    mixed = write_elastic(tmp_path / "b", make_state())
    torch.save({"module": {}}, mixed / "mp_rank_00_model_states.pt")
    problems: list[str] = []
    newest = newest_sound_checkpoint(tmp_path, on_verified=lambda v: problems.append(v.problem))
    assert newest == older
    assert "files that DeepSpeed saved there" in problems[0]


def test_a_checkpoint_without_checksums_is_not_called_sound(tmp_path: Path, run: Run) -> None:
    source = write_elastic(tmp_path / "runs" / "a.ckpt", make_state())
    other = without_checksums(tmp_path / "runs" / "b.ckpt")
    code, out, _ = run("verify", other)
    assert code == 3
    assert "NOT verified" in out
    assert "no checksums: b.ckpt" in out
    assert "intact" not in out
    assert newest_sound_checkpoint(tmp_path / "runs") == source
    assert run("verify", source, other)[0] == 3
    flip(next(source.rglob("*_optim_states.pt")), 1500)
    assert run("verify", source, other)[0] == 1


@pytest.mark.parametrize("to", ["fp32", "bf16", "lightning", "universal"])
def test_a_flipped_bit_in_an_export_is_found(to: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "export.ckpt"
    options = ConvertOptions(optimizer=True) if to == "lightning" else None
    convert_checkpoint(source, target, to, options)
    files = [target] if target.is_file() else sorted(target.rglob("*.pt"))
    found = verify_checkpoint(target)
    assert (found.problem, found.unverified) == ("", ())
    assert 0 < found.bytes < sum(file.stat().st_size for file in files)
    for file in files:
        at = middle_of_the_largest_record(file)
        flip(file, at)
        assert f"{file.name}" in verify_checkpoint(target).problem
        flip(file, at)
    assert not verify_checkpoint(target).problem


def without_checksums(path: Path) -> Path:
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        torch.save({"state_dict": {"w": torch.ones(100)}, "global_step": 3}, path)
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    return path


@pytest.mark.parametrize("tree", [[1, 2], {"a": {"b": "x"}}, None])
def test_only_a_cut_or_flipped_file_without_checksums_is_damaged(
    tree: object, tmp_path: Path, run: Run
) -> None:
    """A valid file with other content is a usage error."""
    path = tmp_path / "x.pt"
    if tree is None:
        without_checksums(path)
    else:
        torch.save(tree, path)
    code, _, err = run("verify", path)
    assert code == (3 if tree is None else 2)
    assert "DAMAGED" not in err
    start = b"state_dict" if tree is None else b"\x80\x02"
    flip(path, path.read_bytes().index(start) + 4)  # in its pickle
    code, _, err = run("verify", path)
    assert code == 1
    assert "DAMAGED" in err


def test_no_intact_checkpoint_exits_with_1(tmp_path: Path, run: Run) -> None:
    code, out, err = run("verify", "--newest-sound", tmp_path)
    assert (code, out) == (1, "")
    assert "no intact checkpoint" in err


def test_newest_sound_above_the_folder_of_checkpoints_names_it(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "logs" / "version_1" / "checkpoints"
    write_elastic(folder / "a.ckpt", make_state())
    for above in (folder.parent, tmp_path / "logs"):
        code, _, err = run("verify", "--newest-sound", above)
        assert code == 1
        assert f"did you mean {folder}, which contains checkpoints?" in err


def test_files_of_other_programs_are_not_damaged(tmp_path: Path, run: Run, source: Path) -> None:
    np.savez(tmp_path / "arrays.npz", x=np.ones(3))
    (tmp_path / "list.pkl").write_bytes(pickle.dumps([1], protocol=2))
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text('{"name": "app"}')
    assert run("convert", source, tmp_path / "weights", "--to", "safetensors")[0] == 0
    weights = tmp_path / "weights" / "model.safetensors"
    for path in (tmp_path / "arrays.npz", tmp_path / "list.pkl", tmp_path / "app"):
        code, _, err = run("verify", path)
        assert code == 2, err
    for path in (weights, weights.parent):
        for verb in ("verify", "inspect"):
            code, _, err = run(verb, path)
            assert code == 2
            assert "model.safetensors contains weights for from_pretrained" in err
            assert "is not a file of torch.save" not in err


def quietly(call: Callable[[Path], object], path: Path) -> None:
    with suppress(ElasticZeroError):
        call(path)


@pytest.mark.parametrize("kind", ["own", "zero3-ds0.19", "universal", "dcp"])
def test_pipes_do_not_block(kind: str, tmp_path: Path) -> None:
    intact = write_elastic(tmp_path / "own.ckpt", make_state())
    if kind in {"universal", "dcp"}:
        convert_checkpoint(intact, tmp_path / kind, kind)
        intact = tmp_path / kind
    elif kind != "own":
        intact = unpack(kind, tmp_path / kind).checkpoint
    files = sorted(p.relative_to(intact) for p in intact.rglob("*") if p.is_file())
    assert files
    for name in files:
        damaged = tmp_path / "damaged.ckpt"
        shutil.copytree(intact, damaged)
        (damaged / name).unlink()
        os.mkfifo(damaged / name)
        for call in (verify_checkpoint, inspect_target):
            assert finishes(partial(quietly, call, damaged)), name
        shutil.rmtree(damaged)


def test_a_folder_in_a_files_place_leaves_no_open_file(tmp_path: Path) -> None:
    target = write_elastic(tmp_path / "new.ckpt", make_state())
    (target / "manifest.json").unlink()
    (target / "manifest.json").mkdir()
    opened = Path("/proc/self/fd")
    before = len(list(opened.iterdir()))
    for _ in range(5):
        assert inspect_target(target).refusal_reason
    assert len(list(opened.iterdir())) == before


HOLD_LEASE = """
import fcntl, os, signal, sys, time
held = os.open(sys.argv[1], os.O_RDWR)
def release(*_):
    time.sleep(0.2)
    fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_UNLCK)
signal.signal(signal.SIGIO, release)
fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
sys.stdin.read()
"""
"""Like a Samba server, hold a file that a client has open, and release it on request."""


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no leases")
@pytest.mark.parametrize("name", ["manifest.json", "shard"])
def test_a_leased_file_is_sound(name: str, tmp_path: Path) -> None:
    path = write_elastic(tmp_path / "own.ckpt", make_state())
    file = path / name if name == "manifest.json" else next(path.rglob("*optim_states.pt"))
    command = [sys.executable, "-c", HOLD_LEASE, str(file)]
    checks = ((verify_checkpoint, "problem"), (inspect_target, "refusal_reason"))
    for check, problem in checks:
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe) as holder:
            try:
                assert holder.stdout is not None
                assert holder.stdout.readline() == b"held\n"
                assert getattr(check(path), problem) == ""
            finally:
                holder.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(("stage", "world_size"), [(1, 2), (2, 24)])
def test_scalars_are_read_from_files_that_a_rank_reads_anyway(
    stage: int, world_size: int, tmp_path: Path
) -> None:
    state = make_state()
    folder = write_elastic(tmp_path / "x.ckpt", state, stage, world_size)
    opened_others = 0
    for rank in range(world_size):
        with closing(open_checkpoint(folder)) as source:
            layout = source.layout()
            held = {fragment.buffer for fragment in layout.on_rank(rank)}
            source.check([rank] if held else [], [])
            for names in state.groups:
                at = next(iter(layout.covering(names[0], 0, 1)))
                assert source.scalars(at) == {"step": state.step}
                opened = {name for name in source.files._open if "optim" in name}
                mine, other = (optimizer_file(r, "bf16") for r in (rank, at.rank))
                opened_others += not held
                assert opened == {mine if held else other}
                source.files.close()
    assert bool(opened_others) == (world_size > 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 10**9}, "saved by 1000000000 ranks, but its manifest lists 3 files"),
        ({"world_size": 10**18}, "but its manifest lists 3 files"),
        ({"module_buffers": ("unknown",)}, "lacks the buffer unknown"),
    ],
    ids=repr,
)
def test_an_edited_manifest_is_refused_promptly(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_elastic(tmp_path / "a.ckpt", make_state())
    manifest = path / "manifest.json"
    edited = replace(manifest_from_json(manifest.read_text(), ""), **change)
    manifest.write_text(edited.to_json())
    with pytest.raises(CheckpointFormatError, match=message):
        fingerprint_checkpoint(path)
    assert message in verify_checkpoint(path).problem


@pytest.mark.parametrize(
    "latest",
    [b"x" * 300, b"x/" * 5000, b"a\0b", b"\xff", b"../..", b""],
    ids=["long", "deep", "zero", "not UTF-8", "outside", "empty"],
)
def test_latest_is_not_needed(latest: bytes, tmp_path: Path) -> None:
    path = write_elastic(tmp_path / "a.ckpt", make_state())
    (path / "latest").write_bytes(latest)
    assert verify_checkpoint(path).is_sound
    assert find_checkpoint(path, None) == str(path)
    (tmp_path / "latest").write_bytes(latest)
    with pytest.raises(CheckpointFormatError, match=r"latest names the tag .{0,300}, which"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["zero2-ds0.19", "zero3-ds0.19"])
def test_a_stock_checkpoint_of_a_billion_ranks_is_refused_promptly(
    name: str, tmp_path: Path
) -> None:
    path = unpack(name, tmp_path).checkpoint
    for file in path.rglob("*_model_states.pt"):
        torch.save({**torch.load(file, weights_only=False), "dp_world_size": 10**9}, file)
    with pytest.raises(CheckpointCorruptedError, match=r"is of 1000000000 ranks, .* files of \d\."):
        fingerprint_checkpoint(path)
    assert "is incomplete" in verify_checkpoint(path).problem


def test_damage_is_decided_after_all_parameters(tmp_path: Path) -> None:
    """The first weights that differ, of a norm layer, may not resemble their masters."""
    path = unpack("zero2-ds0.19", tmp_path).checkpoint
    (model,) = path.rglob("*model_states.pt")
    tree = torch.load(model, weights_only=False)
    tree["module"]["a.weight"].normal_()
    tree["module"]["b.weight"] *= 0.5
    tree["module"]["b.bias"] *= 0.5
    torch.save(tree, model)
    found = verify_checkpoint(path)
    assert found.is_sound, found.problem
    assert "changed them in place" in found.note
