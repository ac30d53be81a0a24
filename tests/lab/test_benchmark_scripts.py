"""Scripts of benchmarks/ that start paceline themselves, on the tiny model: they run, and report.

Those that read records, files or rows are tested where those are: `spec_bench_table`,
`peers_table`, `random_gguf`, `gpu_rows`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.scripts import BENCHMARKS
from support.tiny import write_tiny


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny.gguf", fields={"llama.context_length": 4096})


def run(script: str, model: Path, *options: object) -> str:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{script}.py"), *map(str, options)],
        env={**os.environ, "PACELINE_MODEL": str(model)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.usefixtures("cache")
def test_first_token_is_measured_beside_the_engines_own_prefill(model: Path, tmp_path: Path):
    output = tmp_path / "found.json"
    run("first_token", model, "--rounds", 1, "--tokens", 40, "--output", output)
    found = json.loads(output.read_text())
    assert found["first_token_seconds"] > 0
    assert found["start_seconds"] > 0


@pytest.mark.usefixtures("cache")
def test_a_batch_in_python_gives_the_answers_of_single_calls(model: Path):
    options = ("--model", model, "--prompts", 2, "--tokens", 4, "--rounds", 1)
    assert json.loads(run("python_batch", model, *options))["equal"] == "2 of 2"


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_throughput_of_a_server_is_measured_with_equal_texts(
    model: Path, tmp_path: Path, suite_file: Path
):
    output = tmp_path / "found.json"
    options = ("--rounds", 1, "--max-tokens", 4, "--suite", suite_file, "--output", output)
    run("serving_throughput", model, *options)
    found = json.loads(output.read_text())
    assert {*found["same_texts_as_paceline none, 1"].values()} == {3}


@pytest.mark.parametrize("name", ["agent_commands", "lm_evaluation_harness", "schemathesis_fuzz"])
def test_scripts_of_clients_say_how_they_are_used(name: str, model: Path):
    assert "usage" in run(f"clients/{name}", model, "--help")
