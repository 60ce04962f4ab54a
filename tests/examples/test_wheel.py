"""The wheel of ``make wheel``: its content, and that the description's code runs from it."""

from __future__ import annotations

import os
import re
import sys
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.processes import output_of

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
NAME = "lightning-elastic-zero"
PACKAGE = ROOT / "lightning_elastic_zero"
EXTRAS = ("matplotlib", "tensorboard", "pytest", "hypothesis")
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def run(*command: str | Path, folder: Path) -> str:
    """Run a command like a user without this source tree; return its output."""
    source = {"PYTHONPATH", "PYTHONWARNINGS", "MASTER_PORT"}
    inherited = {key: value for key, value in os.environ.items() if key not in source}
    tools = os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", "")])
    cpu = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    # The torch of another environment has another path: its operators would be rebuilt over those
    # of this one, and other runs would wait.
    own = {"PATH": tools, "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    return output_of(command, folder, {**inherited, **cpu, **own})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel of this source tree, built like ``make wheel``."""
    dist = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", dist, ROOT)
    run(*build, folder=dist)
    (built,) = dist.glob("*.whl")
    return built


def test_the_wheel_contains_only_the_package(wheel: Path) -> None:
    """It contains every module and ``py.typed``, but no test, example or cache."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py")}
    assert names == modules | {"lightning_elastic_zero/py.typed"}


def test_a_package_index_accepts_it(wheel: Path) -> None:
    """``twine check`` renders the long description without a warning."""
    assert "PASSED" in run(
        sys.executable, "-m", "twine", "check", "--strict", wheel, folder=wheel.parent
    )


def wanted_by(requirements: list[str], extras: set[str]) -> list[Requirement]:
    """Return the requirements that apply here, with some extras."""
    return [
        wanted
        for wanted in map(Requirement, requirements)
        if wanted.marker is None
        or any(wanted.marker.evaluate({"extra": extra}) for extra in extras or {""})
    ]


def needed(requirements: list[str]) -> dict[str, Distribution]:
    """Return the installed distributions that a wheel requires, directly or indirectly."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    queue = wanted_by(requirements, set())
    while queue:
        wanted = queue.pop()
        key = (canonicalize_name(wanted.name), str(sorted(wanted.extras)))
        if key in seen:
            continue
        seen.add(key)
        found[key[0]] = have = distribution(wanted.name)
        assert wanted.specifier.contains(have.version, prereleases=True), wanted
        queue += wanted_by(have.requires or [], wanted.extras)
    return found


def empty_environment(folder: Path, wheel: Path) -> Path:
    """Make an environment with a wheel and its requirements without extras; return its Python.

    The requirements are links to the distributions that are installed here.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", wheel, folder=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (own,) = site.glob("lightning_elastic_zero-*.dist-info")
    for dist in needed(Distribution.at(own).requires or []).values():
        for top in {path.parts[0] for path in dist.files or []}:
            link = site / top
            if top not in {"..", "__pycache__"} and link.suffix != ".pth" and not link.exists():
                link.symlink_to(Path(str(dist.locate_file(top))))
    return python


@pytest.mark.engine
def test_the_code_of_the_description_runs_from_it(wheel: Path, tmp_path: Path) -> None:
    """The lines run on two devices, and again with another number, which resumes the run."""
    lines, *_ = CODE.findall((ROOT / "docs" / "description.md").read_text())
    assert len([line for line in lines.splitlines() if line]) == 8
    python = empty_environment(tmp_path / "env", wheel)
    folder = tmp_path / "work"
    folder.mkdir()

    looked = (
        "import importlib.util as u, lightning_elastic_zero as z; "
        f"print(z.__file__, z.__version__, [n for n in {EXTRAS} if u.find_spec(n)])"
    )
    where = run(python, "-c", looked, folder=folder)
    assert where.startswith(str(tmp_path / "env"))
    assert where.endswith(f" {distribution(NAME).version} []\n")

    (folder / "first.py").write_text(lines)
    first = run(python, "first.py", folder=folder)
    assert "No checkpoint was loaded: training starts from step 0." in first
    changed = lines.replace("devices=2, max_epochs=4", "devices=1, max_epochs=5")
    assert changed != lines
    (folder / "second.py").write_text(changed)
    second = run(python, "second.py", folder=folder)
    assert "(saved on 2 devices with ZeRO-3) on 1 device" in second
    assert "Global batch of 48: 1 device" in second
    assert [path.name for path in (folder / "checkpoints").glob("last*")] == ["last.ckpt"]
