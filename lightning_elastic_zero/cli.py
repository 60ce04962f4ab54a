"""The command ``lightning-elastic-zero``: a thin layer over ``tools`` and ``selftest``.

It uses argparse, because jsonargparse has no options without values and no ``PATH...``. A verb
imports its modules when it runs, because torch alone takes a second.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import shtab

from lightning_elastic_zero.core.requirements import own_version
from lightning_elastic_zero.errors import ElasticZeroError

YES, NO, FAILED, UNVERIFIED = 0, 1, 2, 3
"""Exit codes: a positive answer, a negative answer, no answer, not damaged but not all verified."""

_BY_WEIGHT = (YES, UNVERIFIED, NO, FAILED)
"""Of several exit codes, the last in this order counts."""

CLOSED_PIPE = 141
"""Exit code after `| head`: that of a command that SIGPIPE ends."""

_PROG = "lightning-elastic-zero"

_LISTED = 10
"""Differences of each kind that ``diff`` prints without ``--all``."""


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit code."""
    if sys.stderr is None:  # Closed: no file that a command writes may take its place.
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 (until the exit)
    try:
        return _run(_parser().parse_args(args))
    except BrokenPipeError:
        return CLOSED_PIPE
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            try:
                stream.flush()
            except OSError:  # The interpreter would try again, and replace the exit code.
                with Path(os.devnull).open("w") as null:
                    os.dup2(null.fileno(), stream.fileno())


def _run(given: Namespace) -> int:
    where = f"{_PROG} {given.verb}:"
    if sys.stdout is None:
        _show_error(where, "stdout is closed: redirect it to a file or /dev/null")
        return FAILED
    try:
        code: int = given.run(given)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (ElasticZeroError, OSError) as error:
        _show_error(where, str(error))
    except KeyboardInterrupt:
        _show_error(where, "interrupted")
    except Exception:  # noqa: BLE001 (the interpreter's exit code would be a negative answer)
        traceback.print_exc()
    else:
        return code
    return FAILED


def _show_error(where: str, why: str) -> None:
    from lightning_elastic_zero.tools.report import show

    show(f"{where} {why}", sys.stderr, error=where)


def _count(text: str) -> int:
    if (value := int(text)) < 0:
        raise ValueError
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError
    return value


# In argparse's messages.
_count.__name__, _positive.__name__, _tolerance.__name__ = "number", "positive number", "number"


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=_PROG,
        description="Inspect, verify, compare and convert checkpoints of every kind that the "
        "library reads, without a GPU or process group, and test saving and loading on a machine.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {own_version()}")
    shtab.add_argument_to(
        parser, "--print-completion", help="print the completion script of a shell"
    )
    verbs = parser.add_subparsers(dest="verb", required=True)

    def add_verb(run: Callable[[Namespace], int], about: str) -> ArgumentParser:
        name = run.__name__.removeprefix("_")
        verb = verbs.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        verb.set_defaults(run=run)
        return verb

    def add_path(verb: ArgumentParser, name: str, about: str, **options: Any) -> None:
        folder = options.pop("folder", False)
        action = verb.add_argument(name, help=about, **options)
        action.complete = shtab.DIRECTORY if folder else shtab.FILE  # type: ignore[attr-defined]

    def add_json(verb: ArgumentParser) -> None:
        verb.add_argument("--json", action="store_true", help="print everything as JSON")

    def add_pickle(verb: ArgumentParser) -> None:
        about = "build any Python object; this can run code"
        verb.add_argument("--allow-pickle", action="store_true", help=about)

    def add_threads(verb: ArgumentParser) -> None:
        about = "number of threads (default: one per processor)"
        verb.add_argument("--threads", type=_count, default=0, help=about)

    verb = add_verb(_inspect, "show what a checkpoint contains")
    add_path(verb, "path", "checkpoint directory or file")
    add_json(verb)
    verb.add_argument("--parameters", action="store_true", help="print a row per parameter")
    verb.add_argument("--filter", default="*", help="select parameters by name: '*.bias'")
    verb.add_argument("--files", action="store_true", help="print a row per file")
    add_pickle(verb)

    verb = add_verb(_verify, "check every byte and tensor of checkpoints")
    add_path(verb, "paths", "checkpoints", nargs="*", metavar="path")
    about = "print the newest intact checkpoint in FOLDER"
    add_path(verb, "--newest-sound", about, metavar="FOLDER")
    add_threads(verb)
    add_pickle(verb)

    verb = add_verb(_fingerprint, "print a checksum that does not depend on the sharding")
    add_path(verb, "paths", "checkpoints", nargs="+", metavar="path")
    about = "print the checksum of each tensor"
    verb.add_argument("--tensors", action="store_true", help=about)
    add_threads(verb)
    add_pickle(verb)

    verb = add_verb(_diff, "compare two checkpoints")
    add_path(verb, "first", "checkpoint")
    add_path(verb, "second", "checkpoint to compare with")
    verb.add_argument("--weights-only", action="store_true", help="skip the optimizer")
    about = "tolerance of tensors, as a fraction of the larger value; dtypes are not compared then"
    verb.add_argument("--rtol", type=_tolerance, default=0.0, help=about)
    about = "the same, as an absolute value"
    verb.add_argument("--atol", type=_tolerance, default=0.0, help=about)
    about = f"print all differences, not the first {_LISTED} of each kind"
    verb.add_argument("--all", action="store_true", help=about)
    add_json(verb)
    add_pickle(verb)

    verb = add_verb(_convert, "write a checkpoint for other software")
    add_path(verb, "source", "checkpoint of any kind")
    add_path(verb, "target", "output path, which must not exist")
    verb.add_argument("--to", choices=_TARGETS, required=True, help="output format")
    for option, about in (
        ("--include", "patterns of weights to include"),
        ("--exclude", "patterns of weights to exclude"),
        ("--rename", "OLD=NEW: prefixes (model.= old.=new.) or patterns ('*.gamma=*.weight')"),
        ("--buffers", "patterns of buffers, for sources that store them like frozen weights"),
    ):
        verb.add_argument(option, nargs="+", default=[], help=about)
    about = "dtype of weights (default: as stored)"
    verb.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help=about)
    verb.add_argument(
        "--optimizer",
        choices=("auto", "yes", "no"),
        default="auto",
        help="include the optimizer state (default: if the output format is for resuming)",
    )
    about = "maximum size of a safetensors file in GB (default: 5)"
    verb.add_argument("--max-shard-gb", type=_positive, default=5.0, help=about)
    about = "PEFT's adapter_config.json (default: the one in or next to the checkpoint)"
    add_path(verb, "--adapter-config", about)
    about = "name of the adapter in the model (default: default)"
    verb.add_argument("--adapter-name", default="default", help=about)
    add_pickle(verb)

    verb = add_verb(_selftest, "check saving and loading on this machine")
    add_path(verb, "--dir", "folder in which runs will save", folder=True, required=True)
    about = "timeout of the saving and of the loading processes in seconds (default: 600)"
    verb.add_argument("--timeout", type=_positive, default=600.0, help=about)
    add_json(verb)
    return parser


# Repeated here, because the module that has it imports torch.
_TARGETS = ("fp32", "bf16", "safetensors", "lightning", "universal", "dcp", "adapter")


def _inspect(args: Namespace) -> int:
    from dataclasses import replace
    from fnmatch import fnmatchcase

    from lightning_elastic_zero.tools import report
    from lightning_elastic_zero.tools.inspection import inspect_checkpoint

    found = inspect_checkpoint(args.path, allow_pickle=args.allow_pickle)
    selected = [p for p in found.manifest.parameters if fnmatchcase(p.name, args.filter)]
    if args.json:
        found = replace(found, manifest=replace(found.manifest, parameters=tuple(selected)))
        print(json.dumps(found.to_plain(), indent=1))
        return YES
    lines = [*report.summary_lines(found)]
    if args.parameters or args.filter != "*":
        lines += report.parameter_lines(found.manifest, selected)
    if args.files:
        lines += report.file_lines(found)
    for line in lines:
        report.show(line, sys.stdout)
    return YES


def _verify(args: Namespace) -> int:
    from lightning_elastic_zero.tools.report import show, show_progress, verdict
    from lightning_elastic_zero.tools.verification import (
        Verification,
        folders_with_checkpoints,
        newest_sound_checkpoint,
        verify_checkpoint,
    )

    if bool(args.paths) == (args.newest_sound is not None):
        _show_error("verify:", "expected checkpoints or --newest-sound FOLDER")
        return FAILED
    if args.newest_sound is not None:
        seen = list[Verification]()

        def report(verified: Verification) -> None:
            seen.append(verified)
            show(verdict(verified), sys.stderr)

        with show_progress("verifying") as progress:
            found = newest_sound_checkpoint(
                args.newest_sound,
                threads=args.threads,
                progress=progress,
                allow_pickle=args.allow_pickle,
                on_verified=report,
            )
        if found is None:
            below = [] if seen else folders_with_checkpoints(args.newest_sound)
            hint = f"; did you mean {below[-1]}, which contains checkpoints?" if below else ""
            print(f"no intact checkpoint in {args.newest_sound}{hint}", file=sys.stderr)
            return NO
        print(found)
        return YES

    def verify(path: str) -> int:
        with show_progress("verifying") as progress:
            verified = verify_checkpoint(
                path, threads=args.threads, progress=progress, allow_pickle=args.allow_pickle
            )
        show(verdict(verified), sys.stdout if verified.is_sound else sys.stderr)
        if verified.note:
            print(f"{path}: {verified.note}", file=sys.stderr)
        if not verified.is_sound:
            return NO
        return UNVERIFIED if verified.unverified or verified.elsewhere else YES

    return _for_each(args.paths, verify)


def _for_each(paths: Sequence[str], work: Callable[[str], int]) -> int:
    """Do work on each path; return the weightiest exit code. Errors are printed."""
    code = YES
    for path in paths:
        try:
            code = max(code, work(path), key=_BY_WEIGHT.index)
        except BrokenPipeError:
            raise
        except (ElasticZeroError, OSError) as error:
            _show_error(f"{path}:", str(error))
            code = FAILED
    return code


def _fingerprint(args: Namespace) -> int:
    from lightning_elastic_zero.tools.fingerprint import fingerprint_checkpoint, tensor_fingerprints
    from lightning_elastic_zero.tools.report import show_progress

    def fingerprint(path: str) -> int:
        with show_progress("reading") as progress:
            found = fingerprint_checkpoint(
                path, threads=args.threads, progress=progress, allow_pickle=args.allow_pickle
            )
        print(f"{found}  {path}")
        if args.tensors:
            found_by_tensor = tensor_fingerprints(path, allow_pickle=args.allow_pickle)
            for (name, key), text in found_by_tensor.items():
                print(f"  {text}  {name}{f': {key}' if key else ''}")
        return YES

    return _for_each(args.paths, fingerprint)


def _diff(args: Namespace) -> int:
    from dataclasses import asdict

    from lightning_elastic_zero.tools.differences import diff_checkpoints
    from lightning_elastic_zero.tools.report import difference_lines, show_progress

    with show_progress("comparing") as progress:
        found = diff_checkpoints(
            args.first,
            args.second,
            weights_only=args.weights_only,
            rtol=args.rtol,
            atol=args.atol,
            progress=progress,
            allow_pickle=args.allow_pickle,
        )
    if args.json:
        print(json.dumps(asdict(found), indent=1))
        return YES if found.is_same else NO
    limit = None if args.all else _LISTED
    print("\n".join(difference_lines(found, args.first, args.second, limit)))
    return YES if found.is_same else NO


def _convert(args: Namespace) -> int:
    from lightning_elastic_zero.tools.conversion import convert_checkpoint
    from lightning_elastic_zero.tools.report import format_bytes, show_progress
    from lightning_elastic_zero.tools.selection import ConvertOptions

    if wrong := [pair for pair in args.rename if "=" not in pair]:
        _show_error("convert:", f"--rename {wrong[0]}: expected OLD=NEW")
        return FAILED
    olds = [pair.partition("=")[0] for pair in args.rename]
    if twice := [old for old in olds if olds.count(old) > 1]:
        _show_error("convert:", f"--rename has two values for {twice[0]!r}: give one")
        return FAILED
    options = ConvertOptions(
        include=args.include,
        exclude=args.exclude,
        rename=dict(pair.split("=", 1) for pair in args.rename),
        buffers=args.buffers,
        dtype=args.dtype,
        optimizer={"yes": True, "no": False}.get(args.optimizer),
        max_shard_bytes=int(args.max_shard_gb * 1e9),
        adapter_config=args.adapter_config,
        adapter_name=args.adapter_name,
        allow_pickle=args.allow_pickle,
    )
    began = time.monotonic()
    with show_progress("writing") as progress:
        done = convert_checkpoint(args.source, args.target, args.to, options, progress=progress)
    rate = format_bytes(done.bytes / max(time.monotonic() - began, 1e-9))
    print(f"{done.target}: {format_bytes(done.bytes)} of a {done.kind}, at {rate}/s")
    if done.lacks:
        print(f"missing in the source: {', '.join(done.lacks)}", file=sys.stderr)
    if done.lost:
        print(f"not supported by {args.to}, and lost: {', '.join(done.lost)}", file=sys.stderr)
    return YES


def _selftest(args: Namespace) -> int:
    from lightning_elastic_zero.selftest import run_selftest

    if sys.stderr.isatty():
        print("selftest: saving and loading; about a minute", file=sys.stderr)
    report = run_selftest(args.dir, timeout_s=args.timeout)
    lines = [json.dumps(report.to_plain(), indent=1)] if args.json else report.lines()
    print("\n".join(lines), flush=True)
    for sentence in report.failures():
        print(sentence, file=sys.stderr)
    return YES if report.holds else NO
