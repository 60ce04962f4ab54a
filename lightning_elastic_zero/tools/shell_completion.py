"""Scripts by which shells complete the command line, made from its parser by shtab."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "tcsh")

PATHS = ("path", "paths", "first", "second", "source", "target", "newest_sound", "adapter_config")
"""The arguments that are completed by the names of files and folders."""

FOLDER = "dir"
"""The argument that is completed by the names of folders."""

_WHOLE_WORDS = """
# bash cuts words at = and :, which names of checkpoints have (step=10.ckpt): they are joined again.
_whole_words__{function}() {{
  local -a joined=() words=()
  local rest=$COMP_LINE index=0 whole=0 begins word
  for word in "${{COMP_WORDS[@]}}"; do
    begins=${{rest#"${{rest%%[![:space:]]*}}"}}
    if (( ${{#joined[@]}} > 1 )) && [[ $begins == "$rest" ]]; then
      joined[${{#joined[@]}}-1]+=$word
    else
      joined+=("$word")
    fi
    rest=${{begins#"$word"}}
    (( index++ == COMP_CWORD )) && break
  done
  for word in "${{joined[@]}}"; do
    if [[ $word == --*=* ]]; then
      words+=("${{word%%=*}}" "${{word#*=}}")
    else
      words+=("$word")
    fi
  done
  whole=$(( ${{#words[@]}} - 1 ))
  word=${{words[whole]}}
  local COMP_WORDS=("${{words[@]}}") COMP_CWORD=$whole
  {function} "$1" "$word" "${{words[whole-1]}}"
  # What is offered replaces the part behind the last cut.
  local given=${{word%"${{word##*[=:]}}"}}
  COMPREPLY=("${{COMPREPLY[@]#"$given"}}")
}}
complete -o bashdefault -F _whole_words__{function} {command}
"""

_ZSH_OPTION_WITH_VALUE = re.compile(r'^( +"--[a-z-]+)(?=\[(?:[^]\\]|\\.)*\]:)', re.MULTILINE)
"""shtab offers ``--to ad`` alone; with ``=`` behind the name zsh takes ``--to=ad`` too."""


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return what a shell sources to complete a command line.

    Args:
        parser: the command's.
        shell: one of ``SHELLS``.

    Raises:
        ModuleNotFoundError: shtab is not installed.
    """
    # Imported here: no other command line needs it.
    import shtab  # noqa: PLC0415

    for action in _actions(parser):
        if action.dest == FOLDER:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.dest in PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    script = str(shtab.complete(parser, shell))
    if shell == "zsh":
        script = _ZSH_OPTION_WITH_VALUE.sub(r"\1=", script)
    if shell == "bash":
        function = f"_shtab_{parser.prog.replace('-', '_')}"
        script += _WHOLE_WORDS.format(function=function, command=parser.prog)
    return script


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its verbs."""
    for action in parser._actions:  # noqa: SLF001 (argparse lists them nowhere else)
        yield action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for inner in action.choices.values():
                yield from _actions(inner)
