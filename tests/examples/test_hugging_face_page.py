"""The page on Hugging Face runs unchanged."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.examples.test_stories import run_page

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ON_CPU = """
import os
if "LOCAL_RANK" in os.environ:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)
"""
"""accelerate has no DeepSpeed on CPU ranks; nothing else is changed."""


@pytest.mark.engine
@pytest.mark.long
def test_the_page_runs_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks train, three continue, and the weights are exported."""
    patch, folder = tmp_path / "patch", tmp_path / "page"
    patch.mkdir()
    folder.mkdir()
    (patch / "sitecustomize.py").write_text(ON_CPU)
    monkeypatch.setenv("PYTHONPATH", f"{patch}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    output = run_page("hugging-face.md", folder)
    assert re.search(r"\b3 (ranks|devices)\b|world size\W+3", output)
    state = json.loads((folder / "run" / "checkpoint-16" / "trainer_state.json").read_text())
    steps = [entry["step"] for entry in state["log_history"] if "loss" in entry]
    assert steps == [*range(1, 17)]
    assert list((folder / "run" / "weights").iterdir())
