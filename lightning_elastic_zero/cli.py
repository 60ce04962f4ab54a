"""The command ``lightning-elastic-zero``: a thin layer over ``tools`` and ``selftest``.

Exit codes: 0, success or a positive answer; 1, a negative answer (damaged, different); 2, the
question could not be answered. A verb imports its modules when it runs: torch alone takes a second.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveFloat

from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.requirements import own_version
from lightning_elastic_zero.tools.shell_completion import SHELLS, completion_script
from lightning_elastic_zero.tools.terminal import show

if TYPE_CHECKING:
    from lightning_elastic_zero.selftest.report import SelftestReport
    from lightning_elastic_zero.tools.progress_line import ProgressLine

YES, NO, FAILED = 0, 1, 2
_THREADS = "threads; 0: one per processor"


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit code."""
    verb = ""
    try:
        given = _parser().parse_args(None if args is None else list(args))
        verb = given.verb
        return _VERBS[verb][1](given[verb])
    except ElasticZeroError as error:
        _show_error(f"lightning-elastic-zero {verb}:", str(error))
    except KeyboardInterrupt:
        _show_error(f"lightning-elastic-zero {verb}:", "interrupted")
    except BrokenPipeError:  # `| head` has closed the pipe.
        sys.stderr.close()
    return FAILED


def _show_error(where: str, why: str) -> None:
    show(f"{where} {why}", sys.stderr, error=where)


class _PrintCompletion(argparse.Action):
    """Prints a completion script and exits."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: object, values: object, *__: object
    ) -> None:
        try:
            print(completion_script(parser, str(values)), flush=True)
        except ModuleNotFoundError as error:
            parser.exit(FAILED, f"{error}: install shtab to print completion scripts\n")
        parser.exit(YES)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="lightning-elastic-zero",
        description="Inspect, verify, compare and convert checkpoints of every kind that the "
        "library reads, without a GPU or process group, and test saving and loading on a machine.",
        version=own_version(),
        default_env=False,
    )
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=SHELLS,
        default=argparse.SUPPRESS,
        dest=argparse.SUPPRESS,
        help="print the completion script of a shell",
    )
    verbs = parser.add_subcommands(dest="verb", required=True)
    for name, (add, _, about) in _VERBS.items():
        inner = ArgumentParser(description=about, default_env=False)
        add(inner)
        verbs.add_subcommand(name, inner, help=about)
    return parser


# -- inspect ---------------------------------------------------------------------------------------


def _add_inspect(parser: ArgumentParser) -> None:
    parser.add_argument("path", type=str, help="checkpoint: a directory or a file")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--parameters", action="store_true", help="print a row per parameter")
    parser.add_argument(
        "--filter", type=str, default="*", help="select parameters by name: '*.bias'"
    )
    parser.add_argument(
        "--sort",
        choices=("model", "name", "size", "dtype"),
        default="model",
        help="order of parameters",
    )
    parser.add_argument(
        "--tree", type=int, default=0, help="print the modules as a tree of this depth"
    )
    parser.add_argument("--files", action="store_true", help="print a row per file")


def _inspect(args: Namespace) -> int:
    from lightning_elastic_zero.tools import rendering
    from lightning_elastic_zero.tools.inspection import inspect_checkpoint

    report = inspect_checkpoint(args.path)
    chosen = rendering.select(report.parameters, args.filter, args.sort)
    if args.json:
        kept = {p.name for p in chosen}
        plain = report.to_plain()
        plain["parameters"] = [p for p in plain["parameters"] if p["name"] in kept]
        print(json.dumps(plain, indent=1))
        return YES
    lines = [*rendering.summary_lines(report), *rendering.group_lines(report)]
    if args.tree:
        lines += rendering.tree_lines(chosen, args.tree)
    if args.parameters or args.filter != "*":
        lines += rendering.parameter_lines(chosen)
    if args.files:
        lines += rendering.file_lines(report)
    for line in lines:
        show(line, sys.stdout)
    return YES


# -- verify ----------------------------------------------------------------------------------------


def _add_verify(parser: ArgumentParser) -> None:
    parser.add_argument("paths", type=str, nargs="*", help="checkpoints", default=[])
    parser.add_argument(
        "--newest-sound",
        type=str,
        default="",
        help="print the newest intact checkpoint in this folder",
    )
    parser.add_argument("--threads", type=NonNegativeInt, default=0, help=_THREADS)


def _verify(args: Namespace) -> int:
    from lightning_elastic_zero.tools.rendering import verdict
    from lightning_elastic_zero.tools.verification import newest_sound_checkpoint, verify_checkpoint

    if bool(args.paths) == bool(args.newest_sound):
        _show_error("verify:", "expected checkpoints or --newest-sound FOLDER")
        return FAILED
    if args.newest_sound:
        with _progress("verifying") as line:
            found = newest_sound_checkpoint(
                args.newest_sound,
                threads=args.threads,
                on_bytes=line,
                on_verified=lambda v: show(verdict(v), sys.stderr),
            )
        if found is None:
            print(f"no intact checkpoint in {args.newest_sound}", file=sys.stderr)
            return NO
        print(found)
        return YES
    code = YES
    for path in args.paths:
        try:
            with _progress("verifying") as line:
                verified = verify_checkpoint(path, threads=args.threads, on_bytes=line)
        except ElasticZeroError as error:
            _show_error(f"{path}:", str(error))
            code = FAILED
            continue
        show(verdict(verified), sys.stdout if verified.is_sound else sys.stderr)
        if verified.note:
            print(f"{path}: {verified.note}", file=sys.stderr)
        code = max(code, YES if verified.is_sound else NO)
    return code


def _progress(doing: str) -> ProgressLine:
    from lightning_elastic_zero.tools.progress_line import ProgressLine

    return ProgressLine(doing)


# -- fingerprint -----------------------------------------------------------------------------------


def _add_fingerprint(parser: ArgumentParser) -> None:
    parser.add_argument("paths", type=str, nargs="+", help="checkpoints")
    parser.add_argument("--tensors", action="store_true", help="print the checksum of each tensor")
    parser.add_argument("--threads", type=NonNegativeInt, default=0, help=_THREADS)


def _fingerprint(args: Namespace) -> int:
    from lightning_elastic_zero.tools.fingerprint import (
        fingerprint_checkpoint,
        recorded_fingerprint,
        tensor_fingerprints,
    )

    answer = YES
    for path in args.paths:
        try:
            with _progress("reading") as line:
                number = fingerprint_checkpoint(path, threads=args.threads, on_bytes=line)
            recorded = recorded_fingerprint(path)
        except ElasticZeroError as error:
            _show_error(f"{path}:", str(error))
            answer = FAILED
            continue
        print(f"{number}  {path}")
        if recorded:
            is_same = recorded == str(number)
            answer = answer if is_same else max(answer, NO)
            print(
                "  equals the recorded fingerprint"
                if is_same
                else f"  recorded by the save: {recorded}"
            )
        if args.tensors:
            for (name, key), text in tensor_fingerprints(path).items():
                print(f"  {text}  {name}{f': {key}' if key else ''}")
    return answer


# -- diff ------------------------------------------------------------------------------------------


def _add_diff(parser: ArgumentParser) -> None:
    parser.add_argument("first", type=str, help="checkpoint")
    parser.add_argument("second", type=str, help="checkpoint to compare with")
    parser.add_argument("--weights-only", action="store_true", help="skip the optimizer")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _diff(args: Namespace) -> int:
    from dataclasses import asdict

    from lightning_elastic_zero.tools.differences import diff_checkpoints

    with _progress("comparing") as line:
        found = diff_checkpoints(
            args.first, args.second, weights_only=args.weights_only, on_bytes=line
        )
    if args.json:
        print(json.dumps(asdict(found), indent=1))
        return YES if found.is_same else NO
    for side, names in ((args.first, found.only_in_first), (args.second, found.only_in_second)):
        for name in names:
            print(f"only in {side}: {name}")
    for what, before, after in found.values:
        print(f"{what}: {before} and {after}")
    for t in found.tensors:
        key = f": {t.key}" if t.key else ""
        print(
            f"{t.name}{key}: {t.differing} of {t.elements} elements differ, by at most "
            f"{t.largest:.3g} (relative {t.largest_relative:.3g})"
            f"{f'; {t.change}' if t.change else ''}"
        )
    print(f"{found.compared} tensors compared: {'equal' if found.is_same else 'different'}")
    return YES if found.is_same else NO


# -- convert ---------------------------------------------------------------------------------------

# Repeated here: the modules that write them import torch.
_TARGETS = ("fp32", "bf16", "safetensors", "lightning", "universal", "dcp", "elastic", "adapter")
_RENAMED = "OLD=NEW: prefixes (model.= old.=new.) or patterns ('*.gamma=*.weight')"
_DTYPES = ("fp32", "bf16", "fp16")


def _add_convert(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=str, help="checkpoint of any kind")
    add("target", type=str, help="output path, which must not exist")
    add("--to", choices=_TARGETS, required=True, help="output format")
    add("--include", type=str, nargs="+", default=[], help="patterns of weights to include")
    add("--exclude", type=str, nargs="+", default=[], help="patterns of weights to exclude")
    add("--rename", type=str, nargs="+", default=[], help=_RENAMED)
    buffers = "patterns of buffers, in sources that do not distinguish them from frozen weights"
    add("--buffers", type=str, nargs="+", default=[], help=buffers)
    add("--dtype", choices=_DTYPES, help="dtype of weights; default: as stored")
    add(
        "--optimizer",
        choices=("auto", "yes", "no"),
        default="auto",
        help="include the optimizer state",
    )
    add(
        "--max-shard-gb", type=PositiveFloat, default=5.0, help="maximum size of a safetensors file"
    )
    add("--adapter-config", type=str, default="", help="PEFT's adapter_config.json")
    add("--adapter-name", type=str, default="default", help="name of the adapter in the model")
    add("--allow-pickle", action="store_true", help="build any Python object; this can run code")


def _convert(args: Namespace) -> int:
    from lightning_elastic_zero.tools.conversion import ConvertOptions, convert_checkpoint
    from lightning_elastic_zero.tools.progress_line import format_bytes

    if wrong := [pair for pair in args.rename if "=" not in pair]:
        _show_error("convert:", f"--rename {wrong[0]}: expected OLD=NEW")
        return FAILED
    olds = [pair.partition("=")[0] for pair in args.rename]
    if len(set(olds)) < len(olds):
        twice = next(old for old in olds if olds.count(old) > 1)
        _show_error("convert:", f"--rename has two values for {twice!r}: give one")
        return FAILED
    options = ConvertOptions(
        include=args.include,
        exclude=args.exclude,
        rename=dict(pair.split("=", 1) for pair in args.rename),
        buffers=args.buffers,
        dtype=args.dtype,
        optimizer={"yes": True, "no": False}.get(args.optimizer),
        max_shard_bytes=int(args.max_shard_gb * 1e9),
        adapter_config=args.adapter_config or None,
        adapter_name=args.adapter_name,
        allow_pickle=args.allow_pickle,
    )
    with _progress("writing") as line:
        done = convert_checkpoint(args.source, args.target, args.to, options, on_bytes=line)
        rate = line.throughput()
    print(f"{done.target}: {format_bytes(done.bytes)} of a {done.kind}, at {rate}")
    if done.lacks:
        print(f"missing in the source: {', '.join(done.lacks)}", file=sys.stderr)
    if done.lost:
        print(f"{args.to} cannot hold, and lacks: {', '.join(done.lost)}", file=sys.stderr)
    return YES


# -- plan ------------------------------------------------------------------------------------------

_STAGES = ("0", "1", "2", "3")


def _add_plan(parser: ArgumentParser) -> None:
    parser.add_argument("path", type=str, help="checkpoint of any kind")
    parser.add_argument("--devices", type=int, required=True, help="data-parallel ranks")
    parser.add_argument("--stage", choices=_STAGES, required=True, help="ZeRO stage")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _plan(args: Namespace) -> int:
    from dataclasses import asdict

    from lightning_elastic_zero.tools.rendering import plan_lines
    from lightning_elastic_zero.tools.resume_plan import plan_resume

    plan = plan_resume(args.path, args.devices, int(args.stage))
    print(json.dumps(asdict(plan), indent=1) if args.json else "\n".join(plan_lines(plan)))
    return YES if plan.is_possible else NO


# -- selftest --------------------------------------------------------------------------------------


def _add_selftest(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--dir", type=str, required=True, help="folder in which runs will save")
    add("--json", action="store_true", help="print everything as JSON")
    add(
        "--timeout",
        type=PositiveFloat,
        default=600.0,
        help="timeout of each world of processes, in seconds",
    )


def _selftest(args: Namespace) -> int:
    from lightning_elastic_zero.selftest.report import report_lines
    from lightning_elastic_zero.selftest.run import reports_here, run_selftest

    speaks = reports_here()

    def on_phase(text: str) -> None:
        if speaks and sys.stderr.isatty():
            print(f"selftest: {text}", file=sys.stderr)

    def on_report(report: SelftestReport) -> None:
        lines = [json.dumps(report.to_plain(), indent=1)] if args.json else report_lines(report)
        print("\n".join(lines), flush=True)
        for sentence in report.failures():
            print(sentence, file=sys.stderr)

    world_s = args.timeout
    report = run_selftest(args.dir, world_timeout_s=world_s, on_phase=on_phase, on_report=on_report)
    return YES if report.holds else NO


_VERBS = {
    "inspect": (_add_inspect, _inspect, "show what a checkpoint contains"),
    "verify": (_add_verify, _verify, "check every byte and tensor of checkpoints"),
    "fingerprint": (
        _add_fingerprint,
        _fingerprint,
        "print a checksum that does not depend on the sharding",
    ),
    "diff": (_add_diff, _diff, "compare two checkpoints"),
    "convert": (_add_convert, _convert, "write a checkpoint for other software"),
    "plan": (_add_plan, _plan, "predict bytes and memory of a resume, and problems"),
    "selftest": (
        _add_selftest,
        _selftest,
        "check saving and loading on this machine",
    ),
}
