"""The scripts in `examples/`, with the tiny model in place of theirs."""

import runpy
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.runtime.load import load
from support.tiny import write_tiny

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
POOLED = {"qwen3.pooling_type": 1}


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_an_example_runs(
    script: Path,
    tiny_gguf: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    models = []

    def load_tiny(_name: str = "", **options: Any) -> paceline.Model:
        path = tiny_gguf
        if options.get("embeddings"):
            path = write_tiny(tmp_path / "embedder.gguf", "qwen3", fields=POOLED)
        models.append(load(path, **{**options}))
        return models[-1]

    monkeypatch.setattr(paceline, "load", load_tiny)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert all("closed" in repr(model) for model in models)


def test_there_are_ten_examples_and_the_api_page_lists_them():
    page = (FOLDER.parent / "docs" / "api.md").read_text(encoding="utf-8")
    assert [script.name[:2] for script in EXAMPLES] == [f"{n:02}" for n in range(1, 11)]
    assert [script.name for script in EXAMPLES if f"`{script.name}`" not in page] == []
