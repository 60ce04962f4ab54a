"""The public names are those of docs/api.rst, so that a new one is a deliberate decision."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lightning_elastic_zero
from lightning_elastic_zero import errors
from tests.house import _fresh_processes

PAGE = (Path(__file__).parents[2] / "docs" / "api.rst").read_text(encoding="utf-8")
NAMED = re.findall(r"^\.\. [\w:]+:: lightning_elastic_zero\.(\w+)$", PAGE, re.MULTILINE)
PUBLIC = set(NAMED)

RunFresh = Callable[[str], str]


@pytest.fixture(scope="module")
def run_fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFresh]:
    folder = tmp_path_factory.mktemp("fresh")
    with subprocess.Popen(
        [sys.executable, _fresh_processes.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as forks:
        assert forks.stdin is not None
        assert forks.stdout is not None
        while forks.stdout.readline() not in {"ready\n", ""}:
            pass  # DeepSpeed prints lines when it is imported.

        def run(program: str) -> str:
            assert forks.stdin is not None
            assert forks.stdout is not None
            path = folder / str(len(list(folder.iterdir())))
            forks.stdin.write(json.dumps([program, str(path)]) + "\n")
            forks.stdin.flush()
            status = forks.stdout.readline()
            assert status == "0\n", path.with_suffix(".err").read_text()
            return path.with_suffix(".out").read_text().strip()

        yield run
        forks.stdin.close()


def test_the_public_names_are_those_of_the_api_page() -> None:
    assert sorted(NAMED) == sorted(lightning_elastic_zero.__all__)


def test_every_error_is_public_and_derives_from_one_class() -> None:
    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass)]
    own = [value for value in classes if value.__module__ == errors.__name__]
    assert all(issubclass(value, errors.ElasticZeroError) for value in own)
    assert {value.__name__ for value in own} <= PUBLIC


@pytest.mark.parametrize("function", ["save_checkpoint", "load_checkpoint"])
def test_returned_types_are_public(function: str) -> None:
    returned = inspect.signature(getattr(lightning_elastic_zero, function)).return_annotation
    assert returned in PUBLIC


def test_every_public_name_is_an_attribute() -> None:
    available = {name for name in PUBLIC if getattr(lightning_elastic_zero, name) is not None}
    assert available == PUBLIC & set(dir(lightning_elastic_zero))


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ElasticStrategy'"):
        getattr(lightning_elastic_zero, "ElasticStrategy")  # noqa: B009 (mypy sees the other form)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "registry"),
    [
        ("ElasticDeepSpeedStrategy", "lightning.pytorch.strategies.StrategyRegistry"),
        ("ElasticDeepSpeedFabricStrategy", "lightning.fabric.strategies.STRATEGY_REGISTRY"),
    ],
)
def test_the_import_of_a_strategy_registers_its_names(
    name: str, registry: str, run_fresh: RunFresh
) -> None:
    program = (
        "import sys, lightning_elastic_zero\n"
        "assert 'lightning' not in sys.modules\n"
        f"from lightning_elastic_zero import {name}\n"
        "import lightning.fabric, lightning.pytorch\n"
        f"print(type({registry}.get('elastic_deepspeed_stage_3')) is {name})"
    )
    assert run_fresh(program).splitlines()[-1] == "True"


@pytest.mark.long
@pytest.mark.parametrize("module", ["trainer.resume", "trainer.strategy"])
def test_modules_that_import_lightning_can_be_imported_first(
    module: str, run_fresh: RunFresh
) -> None:
    run_fresh(f"import lightning_elastic_zero.{module}")


@pytest.mark.long
def test_pytorch_lightning_is_refused_with_the_right_import(run_fresh: RunFresh) -> None:
    program = (
        "import pytorch_lightning, lightning_elastic_zero as ez\n"
        "strategy = ez.ElasticDeepSpeedStrategy()\n"
        "try:\n"
        "    pytorch_lightning.Trainer(strategy=strategy, accelerator='cpu', logger=False)\n"
        "except ValueError as error:\n"
        "    print('error', str(error).replace(chr(10), ' '))"
    )
    (error,) = [line for line in run_fresh(program).splitlines() if line.startswith("error")]
    assert "for lightning.pytorch.Trainer" in error


@pytest.mark.long
def test_the_trainer_accepts_every_registered_name(run_fresh: RunFresh) -> None:
    program = (
        "import lightning_elastic_zero as ez\n"
        "ez.ElasticDeepSpeedStrategy\n"
        "import lightning.pytorch as pl\n"
        "names = ('', '_stage_1', '_stage_2', '_stage_3', '_stage_2_offload', '_stage_3_offload')\n"
        "for stage in names:\n"
        "    name = 'elastic_deepspeed' + stage\n"
        "    trainer = pl.Trainer(accelerator='cpu', devices=2, strategy=name)\n"
        "    assert type(trainer.strategy) is ez.ElasticDeepSpeedStrategy, name"
    )
    run_fresh(program)


def test_fields_of_public_records_are_documented() -> None:
    public = [getattr(lightning_elastic_zero, name) for name in lightning_elastic_zero.__all__]
    classes = [value for value in public if inspect.isclass(value)]
    for record in filter(dataclasses.is_dataclass, classes):
        (node,) = ast.parse(inspect.getsource(record)).body
        assert isinstance(node, ast.ClassDef)
        fields = [
            (field.target.id, following)
            for field, following in itertools.pairwise([*node.body, None])
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        ]
        bare = [name for name, text in fields if not isinstance(text, ast.Expr)]
        assert not bare, f"{record.__name__}: {bare}"
