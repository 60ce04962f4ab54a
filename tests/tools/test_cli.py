"""The command line: imports, output streams, colours and exit codes."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO
from uuid import uuid4

import pytest
import torch

import lightning_elastic_zero
from lightning_elastic_zero.cli import main
from lightning_elastic_zero.core import progress as core_progress
from lightning_elastic_zero.tools import report, verification
from tests.support.foreign_checkpoints import unpack
from tests.support.plain_checkpoints import make_state, write_elastic
from tests.support.processes import HANG_TIMEOUT_S, output_of
from tests.support.ranks import ROOT

Run = Callable[..., tuple[int, str, str]]

VERBS = ("inspect", "verify", "fingerprint", "diff", "convert", "selftest")

END = "the end"

HELP = """
import sys
from lightning_elastic_zero.cli import main
try:
    main({args})
except SystemExit as error:
    assert not error.code, error.code
print(*sorted({{"torch", "numpy", "lightning", "deepspeed"}} & set(sys.modules)), "loaded")
"""


def test_help_and_version_do_not_import_torch() -> None:
    for args in [["--help"], ["inspect", "--help"], ["--version"]]:
        command = (sys.executable, "-c", HELP.format(args=args))
        assert output_of(command, ROOT, os.environ).splitlines()[-1] == "loaded"


def test_the_module_is_the_command_and_describes_every_verb(run: Run) -> None:
    command = (sys.executable, "-m", "lightning_elastic_zero", "--version")
    assert lightning_elastic_zero.__version__ in output_of(command, ROOT, os.environ)
    code, out, _ = run("--help")
    assert code == 0
    for verb in VERBS:
        assert f" {verb} " in out


def test_a_wrong_command_line_exits_with_2(refused: Callable[..., str]) -> None:
    for args in ([], ["unknown"], ["inspect"]):
        assert "usage" in refused(*args)


def test_exit_codes_and_streams_are_those_of_the_page(tmp_path: Path, run: Run) -> None:
    page = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
    table = page.partition("## Exit codes")[2].partition("\n## ")[0]
    path = write_elastic(tmp_path / "a.ckpt", make_state())
    other = write_elastic(tmp_path / "b.ckpt", make_state(), 3, 1)
    damaged = write_elastic(tmp_path / "c.ckpt", make_state())
    next(damaged.rglob("*_optim_states.pt")).unlink()
    (tmp_path / "empty").mkdir()
    unchecked = tmp_path / "unchecked.pt"
    torch.serialization.set_crc32_options(compute_crc32=False)
    torch.save({"weight": torch.ones(3)}, unchecked)
    torch.serialization.set_crc32_options(compute_crc32=True)
    calls: dict[int, list[tuple[object, ...]]] = {
        0: [
            ("inspect", path),
            ("verify", path, other),
            ("fingerprint", path, other),
            ("diff", path, other, "--weights-only"),
            ("convert", path, tmp_path / "w.pt", "--to", "fp32"),
        ],
        1: [
            ("verify", damaged),
            ("verify", "--newest-sound", tmp_path / "empty"),
            ("diff", path, tmp_path / "w.pt"),
        ],
        2: [
            *((verb, tmp_path / "none") for verb in ("inspect", "verify", "fingerprint")),
            ("diff", path, tmp_path / "none"),
            ("convert", path, tmp_path / "w.pt", "--to", "fp32"),
            ("verify",),
            ("inspect", path, "--colour"),
        ],
        3: [("verify", unchecked)],
    }
    assert re.findall(r"^\| (\d) \|", table, re.MULTILINE) == [str(code) for code in calls]
    for wanted, lines in calls.items():
        for words in lines:
            code, out, err = run(*words)
            assert code == wanted, (words, err)
            if words[0] == "diff" and wanted == 1:
                assert out, words  # Differences are the requested output.
                assert not err, words
            else:
                assert bool(out) == (wanted in {0, 3}), words
                assert bool(err) != bool(out), words


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """Yield a stream that is a terminal, and a function that reads what the terminal shows."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with os.fdopen(theirs, "w") as stream:

        def shown() -> str:
            stream.write(END)
            stream.flush()
            read = ""
            while not read.endswith(END):
                read += os.read(ours, 4096).decode()
            return read.removesuffix(END)

        yield stream, shown
    os.close(ours)


@pytest.mark.parametrize("refused", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_only_terminals_get_colours(
    refused: dict[str, str],
    terminal: tuple[TextIO, Callable[[], str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    run: Run,
) -> None:
    path = write_elastic(tmp_path / ("long" * 40) / "a.ckpt", make_state())
    next(path.rglob("*_optim_states.pt")).unlink()
    stream, shown = terminal
    for verb, name in (("inspect", "stdout"), ("verify", "stderr")):
        code, out, err = run(verb, path)
        plain = out + err
        assert "\x1b" not in plain
        with monkeypatch.context() as patch:
            for key, value in refused.items():
                patch.setenv(key, value)
            patch.setattr(sys, name, stream)
            assert main([verb, str(path)]) == code
            colored = shown().replace("\r\n", "\n")
        assert ("\x1b[" in colored) == (not refused)
        assert re.sub(r"\x1b\[[\d;]*m", "", colored) == plain


def test_progress_appears_on_terminals_after_two_seconds(
    terminal: tuple[TextIO, Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, shown = terminal
    for on_terminal, quiet_s, seen in ((True, 60.0, False), (True, 0.0, True), (False, 0.0, False)):
        monkeypatch.setattr(core_progress, "QUIET_S", quiet_s)
        monkeypatch.setattr(sys, "stderr", stream if on_terminal else io.StringIO())
        with report.show_progress("verifying") as progress:
            progress.advance(2_000_000)
            progress.advance(500_000)
        assert not isinstance(sys.stderr, io.StringIO) or not sys.stderr.getvalue()
        text = shown()
        assert bool(text) == seen
        assert ("Verifying a checkpoint" in text and "MB" in text) == seen
        assert not text.rpartition("\r")[0].rpartition("\r")[2].strip()  # removed at the end


COMPLETE = """
source "./$1"
COMP_WORDS=("${@:2}")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_shtab_lightning_elastic_zero "${COMP_WORDS[0]}" "${COMP_WORDS[COMP_CWORD]}" ""
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ver"], {"verify"}),
        (["inspect", "--fi"], {"--filter", "--files"}),
        (["convert", "x", "y", "--to", "ad"], {"adapter"}),
        (["verify", "--newest-sound", "some-ch"], {"some-checkpoint"}),
        (["selftest", "--dir", "some-ch"], {"some-checkpoint"}),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_bash_completes_verbs_options_and_paths(
    words: list[str], offered: set[str], tmp_path: Path, run: Run
) -> None:
    code, script, err = run("--print-completion", "bash")
    assert (code, err) == (0, "")
    assert all(verb in script for verb in VERBS)
    (tmp_path / "script").write_text(script, encoding="utf-8")
    (tmp_path / "some-checkpoint").mkdir()
    bash = ("bash", "--norc", "-c", COMPLETE, "bash", "script", "lightning-elastic-zero", *words)
    assert set(output_of(bash, tmp_path, os.environ).split()) == offered
    assert run("--print-completion", "ksh")[0] == 2


def test_a_missing_path_exits_with_2_and_damage_with_1(tmp_path: Path, run: Run) -> None:
    good = tmp_path / "run" / "good.ckpt"
    good.parent.mkdir()
    write_elastic(good, make_state())
    (tmp_path / "train.py").write_text("import torch\n")
    for path in (tmp_path / "train.py", good.parent, tmp_path, ""):
        assert run("verify", str(path))[0] == 2, path
    (good / "manifest.json").write_text("{")
    assert run("verify", str(good))[0] == 1
    cut = tmp_path / "cut.pt"
    cut.write_bytes(b"PK\x03\x04")
    assert run("verify", str(cut))[0] == 1


STREAMS = """
import os, sys
from lightning_elastic_zero import cli
from lightning_elastic_zero.tools import report, verification

def redirect(case):
    if case == "closed stdout":
        os.close(1)
        sys.stdout = None
    elif case == "closed stderr":
        os.close(2)
        sys.stderr = None
    elif case == "full disk":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    elif case == "closed pipe":
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 1)

for verb, case in {cases}:
    if not os.fork():
        redirect(case)
        sys.exit(cli.main([verb, {path!r}]))
    print("exit code", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.mark.long
def test_unusable_streams_do_not_exit_with_1(source: Path) -> None:
    """A closed pipe ends the command as SIGPIPE does."""
    wanted = {
        ("inspect", "closed stdout"): 2,
        ("inspect", "closed stderr"): 0,
        ("inspect", "full disk"): 2,
        ("inspect", "closed pipe"): 141,
        ("verify", "closed pipe"): 141,
    }
    code = STREAMS.format(cases=[*wanted], path=str(source))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_TIMEOUT_S,
    )
    assert [*map(int, re.findall(r"exit code (\d+)", done.stdout))] == [*wanted.values()]
    closed, full = done.stderr.splitlines()
    assert "inspect: stdout is closed: redirect it" in closed
    assert full.endswith("No space left on device")


def test_an_unexpected_error_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    """Exit code 1, the interpreter's, would mean damage."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(verification, "verify_checkpoint", fail)
    assert "Traceback" in refused("verify", "x")


def test_paths_and_stores_that_cannot_be_used_exit_with_2(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    pytest.importorskip("obstore")
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/none.json")
    for path, message in (
        ("a\0b", "contains a NUL character"),
        (f"az://{uuid4()}/x", "Account must be specified"),
        (f"gs://{uuid4()}/x", "/none.json"),
        ("s3://no bucket/x", "invalid domain character"),
    ):
        for verb in ("verify", "inspect"):
            assert message in refused(verb, path)
    assert "Account" in refused("verify", "--newest-sound", f"az://{uuid4()}/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "minio:9000")
    error = refused("inspect", f"s3://{uuid4()}/x")
    assert "AWS_ENDPOINT_URL=minio:9000: expected a URL that begins with https://" in error


def test_one_missing_checkpoint_does_not_hide_the_others(
    source: Path, tmp_path: Path, run: Run
) -> None:
    for verb, message in (("fingerprint", f"  {source}\n"), ("verify", "a.ckpt: intact")):
        code, out, error = run(verb, tmp_path / "not there", source)
        assert code == 2
        assert message in out
        assert "not there" in error


def test_a_conversion_does_not_change_its_source(
    source: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    before = sorted(source.rglob("*"))
    (tmp_path / "link").symlink_to(source)
    for target in (source / "out.pt", tmp_path / "link" / "out.pt"):
        assert "is inside the checkpoint" in refused("convert", source, target, "--to", "fp32")
    assert sorted(source.rglob("*")) == before
    (tmp_path / "circle").symlink_to("circle")
    error = refused("convert", source, tmp_path / "circle", "--to", "fp32")
    assert "exists, and is not overwritten" in error


@pytest.fixture
def forbidden(tmp_path: Path) -> Iterator[Path]:
    path = write_elastic(tmp_path / "forbidden.ckpt", make_state())
    inner = tmp_path / "forbidden.ckpt" / "checkpoint"
    user, mode = os.geteuid(), path.stat().st_mode
    path.chmod(0)
    if not user:  # Root may read everything, and owns the parent folders.
        os.seteuid(65534)
    yield path
    if not user:
        os.seteuid(user)
    path.chmod(mode)
    assert inner.is_dir()


@pytest.mark.parametrize("verb", ["inspect", "verify", "diff", "fingerprint"])
def test_missing_permissions_exit_with_2_and_a_sentence(
    verb: str, forbidden: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    more = [str(forbidden)] if verb == "diff" else []
    error = refused(verb, forbidden, *more)
    assert f"{forbidden} cannot be read: " in error
    assert ": Permission denied" in error
    error = refused(verb, tmp_path / ("x" * 300), *more)
    assert "Permission denied" in error or "File name too long" in error


def test_an_unreadable_folder_does_not_hide_an_intact_checkpoint(run: Run) -> None:
    """It is the newest candidate, and is named as it is."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:  # Other users cannot enter tmp_path.
        folder = Path(name)
        folder.chmod(0o755)
        intact = write_elastic(folder / "intact.ckpt", make_state())
        os.utime(intact / "manifest.json", (1, 1))
        os.utime(intact / "latest", (1, 1))
        forbidden = write_elastic(folder / "forbidden.ckpt", make_state())
        forbidden.chmod(0)
        if not user:  # Root may read everything.
            os.seteuid(65534)
        try:
            code, out, error = run("verify", "--newest-sound", folder)
        finally:
            os.seteuid(user)
            forbidden.chmod(0o755)
    assert (code, out.strip()) == (0, str(intact))
    assert f"{forbidden} cannot be read: {forbidden}: Permission denied" in error


@pytest.mark.parametrize("verb", [("selftest", "--dir", ""), ("verify", "--newest-sound", "")])
def test_an_empty_path_is_refused(verb: tuple[str, ...], refused: Callable[..., str]) -> None:
    assert "is empty, perhaps from an unset variable: pass a folder" in refused(*verb)


@pytest.mark.parametrize("name", ["zero2-ds0.19", "own"])
def test_a_file_of_a_checkpoint_is_a_usage_error(
    name: str, tmp_path: Path, run: Run, refused: Callable[..., str]
) -> None:
    own = name == "own"
    path = write_elastic(tmp_path / "a", make_state()) if own else unpack(name, tmp_path).checkpoint
    for file in sorted(path.rglob("*.pt")):
        for verb in ("inspect", "verify"):
            assert "pass the checkpoint's directory" in refused(verb, file)
    file.write_bytes(file.read_bytes()[:-100])
    code, _, err = run("verify", path)
    assert code == 1
    assert own or "is damaged, truncated or not a file of torch.save" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "{folder}"],
        ["verify", "{folder}"],
        ["fingerprint", "{folder}"],
        ["diff", "{folder}", "{folder}/global_step10"],
        ["convert", "{folder}", "{folder}/weights", "--to", "safetensors"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_folder_of_transformers_trainer_is_read(
    arguments: list[str], run: Run, tmp_path: Path
) -> None:
    folder = folder_of_transformers(tmp_path, 10)
    code, _, err = run(*(argument.format(folder=folder) for argument in arguments))
    assert (code, err) == (0, ""), err


def test_objects_need_allow_pickle_of_every_verb(
    tmp_path: Path, run: Run, refused: Callable[..., str]
) -> None:
    path = tmp_path / "odd.ckpt"
    weights = {"weight": torch.ones(3)}
    torch.save({"state_dict": weights, "hyper_parameters": Namespace(lr=1)}, path)
    for verb, *options in (
        ("inspect",),
        ("verify",),
        ("fingerprint", "--tensors"),
        ("diff", path),
        ("convert", tmp_path / "out", "--to", "safetensors"),
    ):
        error = refused(verb, path, *options)
        assert "argparse.Namespace" in error
        assert "--allow-pickle on the command line" in error
        code, out, error = run(verb, path, *options, "--allow-pickle")
        assert code == 0, error
        assert out


def test_newest_sound_finds_folders_of_transformers_trainer(run: Run, tmp_path: Path) -> None:
    for step in (5, 10):
        folder_of_transformers(tmp_path, step)
    newest = tmp_path / "checkpoint-10"
    shard = max((newest / "global_step10" / "checkpoint").glob("*optim_states.pt"))
    shard.write_bytes(shard.read_bytes()[:-1])
    code, out, _ = run("verify", "--newest-sound", str(tmp_path))
    assert (code, out.strip()) == (0, str(tmp_path / "checkpoint-5"))


def folder_of_transformers(root: Path, step: int) -> Path:
    folder = root / f"checkpoint-{step}"
    write_elastic(folder / f"global_step{step}", make_state(), 2, 2)
    (folder / "latest").write_text(f"global_step{step}/checkpoint")
    return folder
