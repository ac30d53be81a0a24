"""The scripts in `examples/`: each runs, with the tiny model in place of the one that it names."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.runtime.load import load
from support.tiny import write_tiny
from support.waiting import PATIENCE

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.name != "11_ray.py")
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


def test_the_examples_are_ten_and_the_api_page_lists_them():
    page = (FOLDER.parent / "docs" / "api.md").read_text(encoding="utf-8")
    assert [script.name[:2] for script in EXAMPLES] == [f"{n:02}" for n in range(1, 11)]
    assert [script.name for script in EXAMPLES if f"`{script.name}`" not in page] == []


@pytest.mark.soak
def test_a_data_set_is_answered_by_two_actors_and_after_a_stop_the_rest_of_it(
    tiny_gguf: Path, cache: Path, tmp_path: Path
):
    pytest.importorskip("ray", reason="ray[data] is not installed")
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers"
    script = (
        "import ray, runpy; ray.init(num_cpus=4); "
        f"runpy.run_path({str(FOLDER / '11_ray.py')!r}, run_name='__main__')"
    )
    words = [str(prompts), str(answers), "--model", str(tiny_gguf)]
    for count, said in ((20, "0 are answered, 20 are left"), (40, "20 are answered, 20 are left")):
        lines = [json.dumps({"prompt": f"number {number}"}) for number in range(count)]
        prompts.write_text("\n".join(lines))
        done = subprocess.run(
            [sys.executable, "-c", script, *words],
            capture_output=True,
            text=True,
            timeout=4 * PATIENCE,
            check=True,
        )
        assert said in done.stdout
    lines = [line for path in answers.glob("*.json") for line in path.read_text().splitlines()]
    texts = {row["prompt"]: row["text"] for row in map(json.loads, lines)}
    with load(tiny_gguf) as model:
        alone = {
            prompt: model.generate(prompt, max_tokens=100, temperature=0).text for prompt in texts
        }
    assert len(texts) == 40
    assert texts == alone
