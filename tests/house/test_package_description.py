from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_elastic_zero.api import ElasticOptions
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)[^)]*\)|<(?:img|a)[^>]*(?:src|href)=[\"']([^\"']+)")


def description() -> str:
    path: str
    (path,) = re.findall(r'^readme = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return (ROOT / path).read_text()


def test_links_of_the_description_are_absolute() -> None:
    links = [one or other for one, other in LINK.findall(description())]
    assert [link for link in links if not link.startswith("https://")] == []
    assert LINK.findall("see [a](docs/a.md)") == [("docs/a.md", "")]


def test_the_readme_starts_like_the_description() -> None:
    readme = (ROOT / "README.md").read_text()
    assert description().splitlines()[:3] == readme.splitlines()[:3]
    (diff,) = re.findall(r"```diff\n(.*?)```", readme, re.DOTALL)
    (code,) = CODE.findall(description())
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    assert added
    assert [line for line in added if line not in code.splitlines()] == []


def own_options() -> set[str]:
    """Return the strategy's options that neither its parent nor ``ElasticOptions`` has."""
    parents = inspect.signature(DeepSpeedStrategy.__init__).parameters
    own = inspect.signature(ElasticDeepSpeedStrategy.__init__).parameters.values()
    return {
        option.name
        for option in own
        if option.kind is option.KEYWORD_ONLY
        and option.name not in {*parents, *ElasticOptions.__dataclass_fields__}
    }


def test_every_option_is_described() -> None:
    text = inspect.getdoc(ElasticDeepSpeedStrategy) or ""
    arguments = text.partition("Args:\n")[2].partition("\nRaises:")[0]
    assert {*re.findall(r"^    (\w+) \(", arguments, re.MULTILINE)} == own_options()


PAGES = [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_between_pages_are_valid(page: Path) -> None:
    for one, other in LINK.findall(page.read_text()):
        link = one or other
        if link.startswith("https://"):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}
