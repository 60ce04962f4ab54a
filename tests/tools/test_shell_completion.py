"""Shells complete the command line when TAB is pressed: they run on a terminal, with keys typed."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select

import pytest

from tests.timeouts import HANG_TIMEOUT_S

Run = Callable[..., tuple[int, str, str]]

SHOW = "lightning-elastic-zero() { printf '<%s>' \"$@\"; echo '<END'\\>; }; echo READ'Y'\n"
"""In the command's place: prints its arguments. What is echoed of a line is not what it prints."""

START = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], f"source ./script; {SHOW}"),
    "zsh": (
        ["zsh", "-f", "-i"],
        f"fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D; {SHOW}",
    ),
}

TYPED = {
    "inspect run/epoch=0-step=2\t": "<inspect><run/epoch=0-step=240.ckpt>",
    "verify oth\tx": "<verify><other/x>",
    "diff other som\t": "<diff><other><some dir/>",
    "plan other --stage 3 --dev\t2": "<plan><other><--stage><3><--devices><2>",
    "convert a b --dtype bf\t": "<convert><a><b><--dtype><bf16>",
    "convert a b --to univ\t--optimizer ye\t": "<convert><a><b><--to><universal><--optimizer><yes>",
    "verify --newest-sound oth\t": "<verify><--newest-sound><other/>",
    "selftest --dir oth\t": "<selftest><--dir><other/>",
    "convert a b --to=univ\t": "<convert><a><b><--to=universal>",
    "plan --stage=3 oth\t": "<plan><--stage=3><other/>",
    "inspect other --sort=si\t": "<inspect><other><--sort=size>",
}
"""Keys, and the arguments that the command gets by them."""

OF_BASH = {
    # Readline cuts words at this character; zsh does not, and offers both checkpoints.
    "inspect run/e\t1\t": "<inspect><run/epoch=0-step=12.ckpt/>",
}


@contextmanager
def shell_on_a_terminal(name: str, folder: Path) -> Iterator[Callable[[str, str], str]]:
    """Start a shell; yield what types keys into it and returns what it prints up to a word."""
    keys, there = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PS1": "> "}
    process = subprocess.Popen(
        START[name][0],
        stdin=there,
        stdout=there,
        stderr=there,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )
    os.close(there)

    def type_keys(text: str, end: str) -> str:
        os.write(keys, text.encode())
        shown = ""
        while end not in shown:
            assert select([keys], [], [], HANG_TIMEOUT_S)[0], f"{name} hangs: {shown!r}"
            shown += os.read(keys, 65536).decode()
        return shown

    try:
        yield type_keys
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(keys)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_tab_completes(shell: str, tmp_path: Path, run: Run) -> None:
    """Verbs, options, every closed set of values, and paths with the characters that names have."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    code, script, _ = run("--print-completion", shell)
    assert code == 0
    (tmp_path / ("script" if shell == "bash" else "_lightning-elastic-zero")).write_text(script)
    steps = ["run/epoch=0-step=12.ckpt", "run/epoch=0-step=240.ckpt"]
    for name in [*steps, "some dir", "other"]:
        (tmp_path / name).mkdir(parents=True)
    table = TYPED | (OF_BASH if shell == "bash" else {})
    with shell_on_a_terminal(shell, tmp_path) as type_keys:
        type_keys(START[shell][1], "READY")
        got = {}
        for keys in table:
            shown = type_keys(f"lightning-elastic-zero {keys}\n", "<END>")
            got[keys] = "<" + shown.rpartition("<END>")[0].rpartition("\n<")[2]
            if shell == "zsh":  # It puts = behind the name of an option that takes a value.
                got[keys] = got[keys].replace("<--devices=2>", "<--devices><2>")
    # zsh takes the slash away that it has put behind a folder where the word ends.
    slash = "" if shell == "zsh" else "/"
    assert got == {keys: args.replace("/>", f"{slash}>") for keys, args in table.items()}


def test_values_of_every_closed_set_are_offered(run: Run) -> None:
    """What help shows in braces is in the script, of every verb."""
    script = run("--print-completion", "bash")[1]
    for verb in ("inspect", "verify", "fingerprint", "diff", "convert", "plan", "selftest"):
        for word in run(verb, "--help")[1].replace("[", " ").split():
            if word.startswith("{"):
                values = word.strip("{}]").replace(",", " ")
                assert f"_choices=({values})" in script, (verb, values)
