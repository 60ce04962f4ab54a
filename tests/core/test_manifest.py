"""Manifests: round trips, validation, and the examples of the format page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_elastic_zero.core import save_files as constants
from lightning_elastic_zero.core.cuts import Cut
from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.core.layout import Fragment
from lightning_elastic_zero.core.manifest import (
    DIGEST_FIELD,
    FORMAT_VERSION,
    FileEntry,
    Group,
    Manifest,
    Parameter,
    Shard,
    StateKey,
    TensorParallel,
    TrainingProgress,
    Writer,
    dump_with_digest,
    manifest_from_json,
)
from lightning_elastic_zero.core.partition import FlatBuffer
from lightning_elastic_zero.core.save_files import CLIENT_OBJECTS
from lightning_elastic_zero.core.tensors import same_bits
from lightning_elastic_zero.data_progress.batches import BatchPlan
from lightning_elastic_zero.data_progress.position import (
    Consumed,
    DataPosition,
    LoaderRecord,
    Position,
    RunSettings,
)
from lightning_elastic_zero.data_progress.sampler import ElasticSampler
from lightning_elastic_zero.errors import CheckpointCorruptedError, CheckpointFormatError
from lightning_elastic_zero.storage.file_write import CHUNK_BYTES
from tests.support.bits import bitwise_repr
from tests.support.strategies import manifests, plain_values

WHERE = "runs/a.ckpt/manifest.json"

SMALL = Manifest(
    save_id="5a7e",
    stage=2,
    world_size=2,
    precision="bf16",
    master_dtype="float32",
    parameters=(
        Parameter("w", (2, 3), "bfloat16", 0, ("head.w",)),
        Parameter("frozen", (), "bfloat16", None),
    ),
    groups=(
        Group(
            names=("w",),
            hyperparameters={"lr": 0.001, "betas": (0.9, 0.95), "amsgrad": False, "tags": [None]},
            state=(StateKey("exp_avg", "elementwise", "float32"),),
        ),
    ),
    buffers=(FlatBuffer(0, ("w",), (6,), (), 4),),
    module_buffers=("bn.running_mean",),
    files=(FileEntry("checkpoint/mp_rank_00_model_states.pt", 12, "ab" * 16),),
    progress=TrainingProgress(3, 24, 0, 3, 1, 8, {}),
    writer=Writer("0.1.0", "2.13.0", "0.19.8", "2.6.6", "DeepSpeedZeroOptimizer", "AdamW"),
    excluded=("frozen",),
    rank_state=("buffers",),
    client_objects=("hyper_parameters.path",),
)

CONTENT: dict[str, Any] = {
    "buffers": [{"group": 0, "names": ["w"], "numels": [6], "paddings": [], "partition_numel": 4}],
    "client_objects": ["hyper_parameters.path"],
    "digest": "50275140cd928ff04fd68cfbce3ac4026afeabd17f6aede772afae36e4f33026",
    "excluded": ["frozen"],
    "files": [
        {
            "name": "checkpoint/mp_rank_00_model_states.pt",
            "size_bytes": 12,
            "sums_digest": "abababababababababababababababab",
        }
    ],
    "format": "lightning_elastic_zero",
    "format_version": 1,
    "groups": [
        {
            "hyperparameters": {
                "amsgrad": False,
                "betas": {"tuple": [0.9, 0.95]},
                "lr": 0.001,
                "tags": [None],
            },
            "names": ["w"],
            "state": [{"dtype": "float32", "kind": "elementwise", "name": "exp_avg"}],
        }
    ],
    "master_dtype": "float32",
    "module_buffers": ["bn.running_mean"],
    "parameters": [
        {"aliases": ["head.w"], "dtype": "bfloat16", "group": 0, "name": "w", "shape": [2, 3]},
        {"aliases": [], "dtype": "bfloat16", "group": None, "name": "frozen", "shape": []},
    ],
    "precision": "bf16",
    "progress": {
        "global_batch_size": 8,
        "global_samples": 24,
        "global_steps": 3,
        "gradient_accumulation_steps": 1,
        "micro_steps": 3,
        "sampler": {},
        "skipped_steps": 0,
    },
    "rank_state": ["buffers"],
    "save_id": "5a7e",
    "stage": 2,
    "weights_only": False,
    "world_size": 2,
    "writer": {
        "deepspeed": "0.19.8",
        "engine": "DeepSpeedZeroOptimizer",
        "library": "0.1.0",
        "lightning": "2.6.6",
        "optimizer": "AdamW",
        "torch": "2.13.0",
    },
}
GOLDEN = json.dumps(CONTENT, indent=1) + "\n"
"""The exact text, in this order, which must not change while the format version is 1."""

FIELDS = sorted(CONTENT.keys() - {"digest"})
"""The fields of a manifest, except for its digest, which has its own tests."""


def refusal(text: str) -> str:
    with pytest.raises(CheckpointFormatError) as caught:
        manifest_from_json(text, WHERE)
    return str(caught.value)


def edited(edit: Callable[[Any], object]) -> str:
    content = json.loads(GOLDEN)
    edit(content)
    return dump_with_digest(content)


class TestJson:
    def test_the_text_is_pinned(self) -> None:
        assert SMALL.to_json() == GOLDEN

    def test_the_golden_text_is_read(self) -> None:
        assert manifest_from_json(GOLDEN, WHERE) == SMALL

    @given(manifests())
    def test_any_manifest_round_trips(self, manifest: Manifest) -> None:
        read = manifest_from_json(manifest.to_json(), WHERE)
        assert bitwise_repr(asdict(read)) == bitwise_repr(asdict(manifest))

    @given(manifests())
    def test_the_text_does_not_depend_on_the_order_of_hyperparameters(
        self, manifest: Manifest
    ) -> None:
        group = manifest.groups[0]
        backwards = replace(
            group, hyperparameters=dict(reversed(list(group.hyperparameters.items())))
        )
        other = replace(manifest, groups=(backwards, *manifest.groups[1:]))
        assert other.to_json() == manifest.to_json()

    @pytest.mark.parametrize(
        "value",
        [
            *(math.inf, -math.inf, 1e-300, 5e-324, -0.0, 2**70, "0" * 64, {"tuple": 1}),
            *({"tuple": [1]}, {"dict": {}}, {"dict": {"tuple": (1,)}}, ({"tuple": ()},)),
        ],
        ids=repr,
    )
    def test_hyperparameters_round_trip(self, value: Any) -> None:
        """Extreme numbers, and values that look like the tag of a tuple or like the digest."""
        given = {"lr": value, "tuple": value, "digest": value}
        group = replace(SMALL.groups[0], hyperparameters=given)
        (read,) = manifest_from_json(replace(SMALL, groups=(group,)).to_json(), WHERE).groups
        assert {k: repr(v) for k, v in read.hyperparameters.items()} == dict.fromkeys(
            given, repr(value)
        )

    @given(st.dictionaries(st.text(), plain_values))
    def test_unknown_fields_are_ignored(self, extra: dict[str, Any]) -> None:
        def add(content: Any) -> None:
            tables = ("parameters", "buffers", "groups", "files")
            rows = [row for table in tables for row in content[table]]
            for row in [content, content["progress"], content["writer"], *rows]:
                row.update({f"later {key}": value for key, value in extra.items()})

        assert manifest_from_json(edited(add), WHERE) == SMALL

    def test_informative_fields_may_be_missing(self) -> None:
        text = edited(lambda c: (c["progress"].clear(), c["writer"].clear()))
        read = manifest_from_json(text, WHERE)
        assert read == replace(
            SMALL, progress=TrainingProgress(0, 0, 0, 0, 1, None, {}), writer=Writer()
        )


class TestProperties:
    def test_parameters_are_owned_frozen_or_excluded(self) -> None:
        assert [p.name for p in SMALL.optimized] == ["w"]
        assert SMALL.frozen == ()
        assert [p.name for p in replace(SMALL, excluded=()).frozen] == ["frozen"]

    def test_numel(self) -> None:
        assert [Parameter("w", s, "", 0).numel for s in [(), (2, 3), (2, 0)]] == [1, 6, 0]

    def test_layouts_of_frozen_weights(self) -> None:
        manifest = replace(SMALL, excluded=())
        assert [f.rank for f in manifest.layout().covering("w", 0, 6)] == [0, 1]
        manifest = replace(
            manifest, parameters=(Parameter("f", (4,), "bfloat16", None),), excluded=()
        )
        assert [f.rank for f in manifest.frozen_layout().covering("f", 0, 4)] == [0]
        cut = replace(manifest, stage=3).frozen_layout()
        assert [f.rank for f in cut.covering("f", 0, 4)] == [0, 1]


HELD = FlatBuffer(0, ("w",), (2,), (), 1)
SHARDED = replace(
    SMALL,
    buffers=(replace(HELD, numels=(4,), partition_numel=2),),
    tensor_parallel=TensorParallel(2, (Cut("w", 1, (1, 0, 1, 1)),), (Shard((HELD,)),)),
)
"""Tensor ranks with two of three columns and with one, in two fused parts."""


class TestTensorParallelism:
    def test_it_round_trips_as_version_2(self) -> None:
        assert json.loads(SMALL.to_json())["format_version"] == 1
        assert "tensor_parallel" not in json.loads(SMALL.to_json())
        assert json.loads(SHARDED.to_json())["format_version"] == 2
        assert manifest_from_json(SHARDED.to_json(), WHERE) == SHARDED

    def test_a_shard_is_a_manifest_of_its_own(self) -> None:
        shards = SHARDED.shards()
        assert [shard.parameters[0].shape for shard in shards] == [(2, 2), (2, 1)]
        assert [shard.layout().on_rank(1) for shard in shards] == [
            [Fragment("w", 2, 4, 1, 0, 0)],
            [Fragment("w", 1, 2, 1, 0, 0)],
        ]
        assert [f.rank for f in SHARDED.layout().covering("w", 0, 2, 1)] == [1, 3]
        assert SMALL.shards() == (SMALL,)

    @pytest.mark.parametrize(
        ("parallel", "reason"),
        [
            (replace(SHARDED.tensor_parallel, shards=()), "0 shards besides the first for 2"),
            (replace(SHARDED.tensor_parallel, cuts=(Cut("v", 0, (1, 1)),)), "v is cut, but is no"),
            (replace(SHARDED.tensor_parallel, cuts=(Cut("w", 1, (1, 1)),)), "is not cut into 2"),
            (replace(SHARDED.tensor_parallel, cuts=()), "the parameter table differ in w"),
            (
                replace(SHARDED.tensor_parallel, cuts=SHARDED.tensor_parallel.cuts * 2),
                "two cuts have the same name",
            ),
        ],
    )
    def test_contradictions_are_refused(self, parallel: TensorParallel, reason: str) -> None:
        wrong = replace(SHARDED, tensor_parallel=parallel)
        assert reason in refusal(wrong.to_json())


class TestDigest:
    @pytest.mark.parametrize(
        "edit",
        [
            lambda c: c["groups"][0]["hyperparameters"].update(lr=0.01),
            lambda c: c["groups"][0]["hyperparameters"]["betas"]["tuple"].reverse(),
            lambda c: c["groups"][0]["hyperparameters"].pop("amsgrad"),
            lambda c: c["progress"].update(global_steps=4),
            lambda c: c["module_buffers"].clear(),
            lambda c: c.update(save_id="5a7f"),
            lambda c: c.update(digest="0" * 64),
            lambda c: c.update(digest=None),
            lambda c: c.pop("digest"),
        ],
    )
    def test_an_edited_manifest_is_refused(self, edit: Callable[[Any], object]) -> None:
        content = json.loads(GOLDEN)
        edit(content)
        with pytest.raises(
            CheckpointCorruptedError, match=r"manifest\.json does not match its digest"
        ):
            manifest_from_json(json.dumps(content, indent=1, sort_keys=True) + "\n", WHERE)

    def test_a_flipped_bit_is_refused_anywhere(self) -> None:
        data = GOLDEN.encode()
        for index in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[index // 8] ^= 1 << index % 8
            with pytest.raises((CheckpointCorruptedError, CheckpointFormatError)):
                manifest_from_json(flipped.decode("latin-1"), WHERE)


NEWER = "this library reads up to 2: install a newer lightning_elastic_zero"


class TestRefusals:
    @pytest.mark.parametrize(
        "text", ["", "{", "null", "[]", "7", '"text"', "{}", '{"format": "other"}', "[" * 100_000]
    )
    def test_invalid_text_is_refused_with_the_file_name(self, text: str) -> None:
        assert refusal(text).startswith(f"{WHERE} is not ")

    def test_endless_nesting_is_refused(self) -> None:
        with pytest.raises(CheckpointFormatError, match="nested too deeply"):
            manifest_from_json("[" * 200_000, "manifest.json")

    def test_every_truncated_manifest_is_refused(self) -> None:
        for stop in range(len(GOLDEN) - 2):
            assert WHERE in refusal(GOLDEN[:stop])

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"format": "another"}, "is not a manifest of lightning_elastic_zero"),
            ({"format_version": 3}, f"has format version 3; {NEWER}"),
        ],
        ids=["format", "version"],
    )
    def test_another_format_or_version_is_refused(
        self, fields: dict[str, object], reason: str
    ) -> None:
        assert refusal(edited(lambda c: c.update(fields))) == f"{WHERE} {reason}"

    @pytest.mark.parametrize("version", [None, "1", 1.0, True, 0, -1, [1]])
    def test_an_unknown_version_is_damage(self, version: object) -> None:
        text = edited(lambda c: c.update(format_version=version))
        assert f"has the format version {version!r}" in refusal(text)

    @pytest.mark.parametrize("name", FIELDS)
    def test_a_missing_field_is_named(self, name: str) -> None:
        message = refusal(edited(lambda c: c.pop(name)))
        assert message.startswith(WHERE)
        assert name in message or name in {"format", "format_version"}

    def test_all_missing_fields_are_named(self) -> None:
        names = [name for name in FIELDS if not name.startswith("format")]
        message = refusal(edited(lambda c: [c.pop(name) for name in names]))
        assert ", ".join(map(repr, names)) in message

    @pytest.mark.parametrize("table", ["parameters", "groups", "buffers", "files"])
    def test_a_missing_column_is_named(self, table: str) -> None:
        for column in CONTENT[table][0].keys() - {"aliases", "paddings"}:
            message = refusal(edited(lambda c: c[table][0].pop(column)))  # noqa: B023 (called here)
            assert column in message or column == "partition_numel"

    @pytest.mark.parametrize("value", [None, 1.5, "text", {}, [1.5], {"a": 1}, [[1]], -7])
    @pytest.mark.parametrize(
        "path",
        [
            *((name,) for name in FIELDS),
            *(("parameters", 0, name) for name in ("name", "shape", "group", "aliases")),
            *(("groups", 0, name) for name in ("names", "hyperparameters", "state")),
            *(("buffers", 0, name) for name in ("group", "names", "numels", "partition_numel")),
            *(("files", 0, name) for name in ("name", "size_bytes", "sums_digest")),
            ("progress", "global_steps"),
            ("writer", "torch"),
        ],
        ids=lambda path: ".".join(map(str, path)),
    )
    def test_a_field_of_another_type_is_read_or_refused(
        self, path: tuple[str | int, ...], value: object
    ) -> None:
        content = json.loads(GOLDEN)
        row: Any = content
        for key in path[:-1]:
            row = row[key]
        original, row[path[-1]] = row[path[-1]], value
        try:
            manifest_from_json(dump_with_digest(content), WHERE)
        except CheckpointFormatError as error:
            message = str(error)
        else:
            message = WHERE if type(value) is type(original) or path[-1] == "group" else ""
        assert message.startswith(WHERE)

    def test_an_unknown_kind_of_optimizer_state_is_refused(self) -> None:
        message = refusal(edited(lambda c: c["groups"][0]["state"][0].update(kind="of rows")))
        assert "StateKey.kind is 'of rows'" in message

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (lambda c: c.update(stage=4), "ZeRO stage 4 on 2 devices"),
            (lambda c: c.update(world_size=0), "ZeRO stage 2 on 0 devices"),
            (lambda c: c["buffers"][0]["numels"].append(6), "without a size"),
            (lambda c: c["buffers"][0].update(numels=[5]), "parameter table differ in w"),
            (lambda c: c["buffers"][0].update(names=["v"]), "parameter table differ in v"),
            (lambda c: c["buffers"][0].update(group=1), "parameter table differ in w"),
            (lambda c: c["buffers"].pop(), "parameter table differ in w"),
            (lambda c: c["buffers"].append(c["buffers"][0]), "in two flat buffers: w"),
            (lambda c: c["buffers"][0].update(partition_numel=2), "do not fit into 2 partitions"),
            (lambda c: c["buffers"][0].update(paddings=[-1]), "negative number of elements"),
            (lambda c: c["parameters"][0].update(shape=[2, 4]), "parameter table differ in w"),
            (lambda c: c["parameters"][0].update(shape=[-2, -3]), "shape of w has a negative"),
            (lambda c: c["parameters"][1].update(shape=[2, -3]), "shape of frozen has a negative"),
            (lambda c: c["parameters"][1].update(group=0), "parameter table differ in frozen"),
            (lambda c: c["parameters"].append(c["parameters"][1]), "have the same name"),
            (lambda c: c["groups"][0]["names"].clear(), "differ in the members of groups"),
            (lambda c: c["groups"].append(c["groups"][0]), "differ in the members of groups"),
            (lambda c: c["groups"].insert(0, {**c["groups"][0], "names": []}), "in the members"),
            (lambda c: c["files"].append(c["files"][0]), "two files have the same name"),
            (lambda c: c.update(excluded=["w"]), "w is excluded, but is trained or a stored"),
        ],
    )
    def test_inconsistent_tables_are_refused(
        self, edit: Callable[[Any], object], message: str
    ) -> None:
        refused = refusal(edited(edit))
        assert refused.startswith(f"{WHERE} contradicts itself (")
        assert message in refused


class TestFileEntry:
    @pytest.mark.parametrize(
        "name", ["", ".", "..", "../a", "a/..", "a/../b", "/a", "./a", "a/", "a//b", "a\\b", "a\0b"]
    )
    def test_file_names_outside_the_directory_are_refused(self, name: str) -> None:
        with pytest.raises(CheckpointFormatError, match="invalid name of a file"):
            FileEntry(name, 1, "0" * 32)

    @pytest.mark.parametrize(
        ("size", "digest"), [(-1, "0" * 32), (0, "0" * 31), (0, "0" * 33), (0, "X" * 32)]
    )
    def test_impossible_numbers_are_refused(self, size: int, digest: str) -> None:
        with pytest.raises(CheckpointFormatError, match="invalid size"):
            FileEntry("a/b..c", size, digest)
        assert FileEntry("a/b..c", 0, "09afbc" + "0" * 26).size_bytes == 0


PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")

TABLES = [
    *(Manifest, Parameter, StateKey, Group, FlatBuffer, FileEntry, TrainingProgress, Writer),
    *(TensorParallel, Cut, Shard),
]


def examples() -> list[str]:
    return re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_every_field_is_on_the_page(table: type) -> None:
    lacking = [field.name for field in fields(table) if f"`{field.name}`" not in PAGE]
    assert not lacking


def test_every_field_of_the_sampler_is_on_the_page() -> None:
    record = DataPosition(Position(0, 0), 0, RunSettings(RankGrid(1), 1, None))
    loader = LoaderRecord(Consumed(0)).to_plain()
    order = ElasticSampler(range(1), BatchPlan(1, 1, 1), rank=0).describe()
    names = (*record.to_plain(), *loader, "samples", "passes", *order)
    section = PAGE.partition("(`progress.sampler`)")[2].partition("**Writer**")[0]
    lacking = [name for name in names if f"`{name}`" not in section]
    assert not lacking


def test_the_example_of_the_page_is_read() -> None:
    content = json.loads(examples()[0])
    manifest = manifest_from_json(dump_with_digest(content), "docs/format.md")
    assert (manifest.stage, manifest.world_size) == (3, 2)
    assert json.loads(manifest.to_json()) == content
    for entry in manifest.files:
        assert f"- `{DIGEST_FIELD}`: " in PAGE
        assert Path(entry.name).name in PAGE.partition("## manifest.json")[0]


def test_numbers_and_names_of_the_page_are_those_of_the_code() -> None:
    assert f"- `format_version`: 1, or {FORMAT_VERSION} with tensor parallelism\n" in PAGE
    assert json.loads(examples()[1])["chunk_bytes"] == CHUNK_BYTES
    for name in (
        *(constants.OURS, constants.OPTIMIZER, constants.STATES, constants.FROZEN),
        *(constants.FP32_STAGE_3, constants.FP32_STAGE_1_2, CLIENT_OBJECTS),
    ):
        assert name in PAGE


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(numel=st.integers(0, 40), changed=st.integers(0, 39), seed=st.integers(0, 9))
def test_the_fingerprint_depends_on_every_element(
    dtype: torch.dtype, numel: int, changed: int, seed: int
) -> None:
    torch.manual_seed(seed)
    one = torch.randint(0, 2, (numel,)).to(dtype)
    other = one.clone()
    assert same_bits(one, other)
    if numel:
        other[changed % numel] = 1 - other[changed % numel].to(torch.uint8)
        assert not same_bits(one, other)


def test_the_fingerprint_compares_bits() -> None:
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    weight = torch.nn.Parameter(torch.ones(3, 2))
    assert same_bits(weight[1:], torch.ones(2, 2))
