from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from lightning_elastic_zero.core.manifest import (
    DIGEST_FIELD,
    FORMAT_VERSION,
    FileEntry,
    Group,
    Manifest,
    Parameter,
    StateKey,
    TrainingProgress,
    Writer,
    dump_with_digest,
    manifest_from_json,
)
from lightning_elastic_zero.core.partition import FlatBuffer
from lightning_elastic_zero.data_progress.batches import BatchPlan, DataProgress, Position
from lightning_elastic_zero.data_progress.sampler import ElasticSampler
from lightning_elastic_zero.formats import deepspeed_files as constants
from lightning_elastic_zero.storage.checksums import CHUNK_BYTES

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")

TABLES = [Manifest, Parameter, StateKey, Group, FlatBuffer, FileEntry, TrainingProgress, Writer]


def examples() -> list[str]:
    """Return the page's examples of JSON."""
    return re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_every_field_is_on_the_page(table: type) -> None:
    """Nothing is written into a manifest that the page does not tell of."""
    lacking = [field.name for field in fields(table) if f"`{field.name}`" not in PAGE]
    assert not lacking


def test_every_field_of_the_place_in_the_data_is_on_the_page() -> None:
    """What ``progress.sampler`` holds is told, and so is the fingerprint of a loader."""
    record = DataProgress(
        Position(0, 0), global_step=0, global_batch_size=None, accumulate=1, world_size=1
    )
    fingerprint = ElasticSampler(range(1), BatchPlan(1, 1, 1), rank=0).describe()
    section = PAGE.partition("(`progress.sampler`)")[2].partition("**Writer**")[0]
    lacking = [name for name in (*record.to_plain(), *fingerprint) if f"`{name}`" not in section]
    assert not lacking


def test_the_example_is_a_manifest() -> None:
    """The page's manifest, its white space as it was, is read and says what the page says."""
    content = json.loads(examples()[0])
    manifest = manifest_from_json(dump_with_digest(content), "docs/format.md")
    assert (manifest.stage, manifest.world_size) == (3, 2)
    assert json.loads(manifest.to_json()) == content
    for entry in manifest.files:
        assert f"| `{DIGEST_FIELD}` |" in PAGE
        assert Path(entry.name).name in PAGE.partition("## manifest.json")[0]


def test_the_pages_numbers_and_names_are_those_of_the_code() -> None:
    """Version, chunk size, and the names of files and entries."""
    assert f"| `format_version` | {FORMAT_VERSION} |" in PAGE
    assert json.loads(examples()[1])["chunk_bytes"] == CHUNK_BYTES
    entries = (constants.OURS, constants.OPTIMIZER, constants.STATES, constants.FROZEN)
    for name in (
        *entries,
        constants.FP32_STAGE_3,
        constants.FP32_STAGE_1_2,
        constants.CLIENT_OBJECTS,
    ):
        assert name in PAGE
