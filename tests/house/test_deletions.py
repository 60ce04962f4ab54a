"""Every call that can remove, replace or overwrite a file has a test that shows it is safe."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_elastic_zero"

REMOVING = {
    *("unlink", "rmdir", "remove", "removedirs", "rmtree", "rename", "renames", "replace", "move"),
    *("copy", "copy2", "copyfile", "copytree", "copyfileobj", "truncate", "ftruncate", "touch"),
    *("write_text", "write_bytes", "symlink_to", "hardlink_to", "symlink", "link", "link_to"),
    *("exchange_names", "renameat2", "extract", "extractall", "NamedTemporaryFile"),
    *("TemporaryDirectory", "memmap", "tofile", "O_TRUNC", "O_WRONLY", "O_RDWR"),
}
"""Names of functions and flags that can remove or change files, on any object."""

RACES = "tests/storage/test_user_files.py::TestRaces::"
DELETING = "tests/storage/test_user_files.py::TestDeleting::"
LEFT = "tests/storage/test_user_files.py::TestLeftovers::"
PLANTED = LEFT + "test_a_link_planted_during_the_removal_is_not_followed"
LINKS = "tests/storage/test_user_files.py::TestLinks::"
NEW_FILES = "tests/storage/test_files.py::TestChecksummedWriter::test_a_file_is_never_overwritten"
LATEST_FILE = "tests/storage/test_files.py::TestReplaceDurably::test_only_the_named_file_changes"
TAKEN = RACES + "test_a_name_taken_during_the_save_is_refused"
EXPORTS = "tests/tools/test_conversion.py::test_nothing_is_overwritten_and_"
KILLED_EXPORT = (
    "tests/tools/test_conversion_processes.py::test_a_foreign_file_in_a_killed_conversion_is_kept"
)
CAME_TO_EXPORT = "tests/tools/test_conversion.py::test_a_file_that_appears_at_the_target_stays"
DIRECTORY = "tests/checkpoint/test_directory_check.py::test_a_users_files_are_kept"
SELFTEST = "tests/tools/test_selftest.py::test_selftest_holds"
CAME = RACES + "test_a_directory_with_a_new_file_is_kept"

NODES = "tests/storage/test_node_store.py::"
ON_NODES = NODES + "test_files_of_users_stay"
OF_TRAINERS = "tests/integrations/test_node_folders.py::test_a_lost_node_costs_no_step"
UNFINISHED = NODES + "TestFolder::test_what_was_being_written_is_removed"

PLACES: dict[tuple[str, str, str], str] = {
    # -- saving
    ("storage/disk_checkpoints.py", "exchange_into_place", "new.replace"): LINKS
    + "test_a_link_does_not_replace_foreign_files",
    ("storage/disk_checkpoints.py", "exchange_into_place", "exchange_names"): TAKEN,
    ("storage/disk_checkpoints.py", "exchange_into_place", "target.rename"): CAME,
    ("storage/disk_checkpoints.py", "exchange_into_place", "new.rename"): LINKS
    + "test_a_directory_with_a_new_file_is_kept",
    ("storage/disk_checkpoints.py", "rename_if_free", "path.rename"): (
        "tests/storage/test_staging.py::TestInterrupted::test_an_interrupt_leaves_the_old_or_the_new_checkpoint"
    ),
    ("storage/disk_checkpoints.py", "_remove_owner_file", "self._owner_path.unlink"): (
        RACES + "test_abandoning_leaves_foreign_files"
    ),
    ("storage/disk_checkpoints.py", "exchange_names", "renameat2"): TAKEN,
    (
        "storage/disk_checkpoints.py",
        "exchange_names",
        "ctypes.CDLL(None, use_errno=True).renameat2",
    ): TAKEN,
    ("storage/disk_folder.py", "_remove_left", "(self.path / name).unlink"): (
        RACES + "test_files_for_other_ranks_are_made_and_removed_by_name"
    ),
    ("storage/disk_folder.py", "leave", "path.touch"): (
        RACES + "test_files_for_other_ranks_are_made_and_removed_by_name"
    ),
    ("storage/file_write.py", "__init__", "os.O_WRONLY"): NEW_FILES,
    ("storage/file_write.py", "write_durably", "path.open to write"): NEW_FILES,
    # `latest` is a pointer file by DeepSpeed's convention; the checkpoint that it names stays.
    ("storage/file_write.py", "replace_durably", "new.replace"): LATEST_FILE,
    ("storage/file_write.py", "replace_durably", "new.unlink"): LATEST_FILE,
    # -- exports, under a hidden random name
    ("storage/exports.py", "publish", "self.path.rename"): CAME_TO_EXPORT,
    ("storage/exports.py", "remove", "self._owner_path.unlink"): KILLED_EXPORT,
    ("storage/exports.py", "__init__", "self.remove"): EXPORTS + "nothing_left",
    ("storage/exports.py", "staged_export", "export.remove"): EXPORTS + "nothing_left",
    ("storage/exports.py", "_name_file", "target.hardlink_to"): CAME_TO_EXPORT,
    ("storage/exports.py", "_name_file", "file.rename"): CAME_TO_EXPORT,
    # -- deleting
    # The only removals inside directories; all others remove one name, and no link behind it.
    ("storage/own_files.py", "remove_files", "folder.rmdir"): PLANTED,
    ("storage/own_files.py", "_remove_below", "os.unlink"): PLANTED,
    ("storage/own_files.py", "_remove_below", "os.rmdir"): (
        DELETING + "test_a_file_added_during_deletion_stays"
    ),
    ("storage/disk_folder.py", "delete", "path.unlink"): DELETING
    + "test_retention_skips_foreign_files_and_warns_once",
    ("storage/disk_folder.py", "delete", "renamed.rename"): (
        DELETING + "test_a_file_added_before_the_rename_is_restored"
    ),
    ("storage/own_files.py", "rename_for_deletion", "path.rename"): (
        DELETING + "test_a_file_added_before_the_rename_is_restored"
    ),
    ("storage/own_files.py", "remove_hidden", "path.unlink"): LEFT
    + "test_files_and_links_with_a_hidden_name_are_kept",
    ("storage/own_files.py", "_keep_under_visible_name", "path.rename"): (
        LEFT + "test_a_users_file_in_a_replaced_checkpoint_becomes_visible"
    ),
    ("trainer/strategy.py", "remove_checkpoint", "self.checkpoint_manager.remove"): (
        "tests/trainer/test_unowned_files.py::test_top_k_keeps_a_checkpoint_with_a_users_file"
    ),
    # -- leftovers of kills
    ("trainer/model_checkpoint.py", "_delete_leftovers", "self._manager.remove"): (
        "tests/trainer/test_nodes.py::test_a_lost_node_costs_no_step"
    ),
    ("storage/disk_checkpoints.py", "_remove_by_id", "owner_file.unlink"): (
        LEFT + "test_a_users_file_under_a_hidden_name_is_kept"
    ),
    ("storage/disk_checkpoints.py", "_put_back", "hidden.rename"): (
        LEFT + "test_repair_replaces_nothing"
    ),
    ("storage/ownership.py", "filesystem_time_s", "probe.touch"): (
        LEFT + "test_the_clock_probe_does_not_replace_a_file"
    ),
    ("storage/ownership.py", "filesystem_time_s", "probe.unlink"): (
        LEFT + "test_the_clock_probe_does_not_replace_a_file"
    ),
    ("trainer/checkpoint_io.py", "stop", "Path(made).rmdir"): (
        "tests/trainer/test_directory_check.py::test_a_missing_checkpoint_leaves_no_trace"
    ),
    # -- on the nodes of a job, in a folder of this user alone
    ("storage/node_files.py", "_create", "os.O_WRONLY"): ON_NODES,
    ("storage/node_files.py", "_remove_empty", "os.rmdir"): ON_NODES,
    ("storage/node_files.py", "_write", "os.fdopen to write"): ON_NODES,
    ("storage/node_files.py", "_write", "os.rename"): ON_NODES,
    ("storage/node_files.py", "_write", "os.unlink"): UNFINISHED,
    ("storage/node_files.py", "part", "os.O_WRONLY"): ON_NODES,
    ("storage/node_files.py", "part", "os.unlink"): UNFINISHED,
    ("storage/node_files.py", "delete", "os.unlink"): ON_NODES,
    ("storage/node_files.py", "delete_unfinished", "os.unlink"): UNFINISHED,
    ("storage/node_files.py", "end_parts", "os.rename"): ON_NODES,
    ("storage/node_files.py", "locked", "os.O_WRONLY"): ON_NODES,
    ("storage/node_files.py", "unmark", "path.unlink"): ON_NODES,
    ("integrations/engines.py", "save", "self._manager.remove"): OF_TRAINERS,
    ("integrations/node_folders.py", "_mark", "(folder / _MARK).symlink_to"): OF_TRAINERS,
    # -- links
    ("trainer/checkpoint_io.py", "_link", "self._manager.link"): (
        LINKS + "test_a_link_does_not_replace_foreign_files"
    ),
    ("checkpoint/manager.py", "make", "self._queue.link"): (
        LINKS + "test_a_link_does_not_replace_foreign_files"
    ),
    ("integrations/engines.py", "save", "self._manager.link"): LATEST_FILE,
    ("storage/disk_checkpoints.py", "_make_link", "new.symlink_to"): LINKS
    + "test_a_link_does_not_replace_foreign_files",
    # -- in a folder that this process creates under a unique name
    ("checkpoint/directory_check.py", "_remove", "shutil.rmtree"): DIRECTORY,
    ("selftest.py", "_run_rank", "os.O_WRONLY"): SELFTEST,
}
"""Maps file, function and call to the test that shows that foreign files survive."""

NOT_ON_DISK = {
    ("cli.py", "_convert", "args.rename"),
    ("cli.py", "main", "Path(os.devnull).open to write"),
    ("tools/conversion.py", "convert_checkpoint", "options.rename"),
    ("api.py", "__post_init__", "self.rename"),
    ("api.py", "load_options", "self.rename"),
    ("core/options.py", "show", "field.replace"),
    ("core/options.py", "show", "own.replace"),
    ("trainer/loaders.py", "_copy_of", "copy.copy"),
    ("trainer/accumulation.py", "watch", "handle.remove"),
    ("core/tensors.py", "numpy_to_python", "copy.copy"),
    ("trainer/monitor.py", "teardown", "self._manager.listeners.remove"),
    (
        "integrations/ray.py",
        "teardown",
        "_strategy(trainer).checkpoint_manager.listeners.remove",
    ),
    ("engine/live.py", "remove", "handle.remove"),
    ("engine/tensor_parallel.py", "remove_input_check", "handle.remove"),
    ("engine/loss_scale.py", "ensure_scaled", "hook.remove"),
    ("core/tensors.py", "_with_copies", "copy.copy"),
    ("formats/client_state.py", "_plain_part", "copy.copy"),
    ("core/manifest.py", "dump_with_digest", "text.replace"),
    ("core/manifest.py", "dump_with_digest", "mark.replace"),
    ("core/manifest.py", "has_valid_digest", "text.replace"),
}
"""Calls with the same names on texts, objects and hooks."""


@cache
def calls() -> Counter[tuple[str, str, str]]:
    found: Counter[tuple[str, str, str]] = Counter()
    for source in sorted(PACKAGE.rglob("*.py")):
        where = source.relative_to(PACKAGE).as_posix()
        tree = ast.parse(source.read_text(encoding="utf-8"))
        found.update((where, *row) for row in calls_in(tree, ""))
    return found


def calls_in(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node.name
    match node:
        case ast.Attribute(attr=name) if name in REMOVING:
            yield function, ast.unparse(node)
        case ast.Call(func=ast.Name(id=name)) if name in REMOVING and name != "replace":
            yield function, name
        case (
            ast.Call(func=ast.Name(id="open" | "fdopen") as called)
            | ast.Call(func=ast.Attribute(attr="open" | "fdopen") as called)
        ):
            if may_write(node):
                yield function, f"{ast.unparse(called)} to write"
    for child in ast.iter_child_nodes(node):
        yield from calls_in(child, function)


def may_write(call: ast.Call) -> bool:
    args = [*call.args, *(keyword.value for keyword in call.keywords)]
    texts = [a.value for a in args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return any(set(text) & set("wax+") and set(text) <= set("rwaxbt+") for text in texts)


def test_every_call_is_in_the_table() -> None:
    unknown = set(calls()) - set(PLACES) - NOT_ON_DISK
    assert not unknown, f"add to PLACES, with the test that shows that users' files stay: {unknown}"
    removed = (set(PLACES) | NOT_ON_DISK) - set(calls())
    assert not removed, f"remove these rows, whose calls do not exist: {removed}"


@cache
def tree_of(source: str) -> ast.Module:
    return ast.parse((ROOT / source).read_text(encoding="utf-8"))


def test_every_row_names_a_test() -> None:
    for test in sorted(set(PLACES.values())):
        source, *names = test.split("::")
        tree: ast.AST = tree_of(source)
        for name in names:
            inner = [
                node
                for node in ast.iter_child_nodes(tree)
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
            ]
            assert inner, f"{source} has no {name}"
            tree = inner[0]
