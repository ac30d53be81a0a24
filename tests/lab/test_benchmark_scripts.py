"""Scripts of benchmarks/: each is named by a document, and is started by a test on a small input.

Those that read records, files or rows are started where those are tested.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.engines.llamacpp.native import NativeModel
from support import mlx
from support.llamacpp import library
from support.packages import missing
from support.process import python
from support.scripts import BENCHMARKS, ROOT, script
from support.tiny import write_tiny


def tiny(folder: Path) -> Path:
    return write_tiny(folder / "tiny.gguf", fields={"llama.context_length": 4096})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny(tmp_path)


def run(script: str, model: Path, *options: object) -> str:
    path = BENCHMARKS / f"{script}.py"
    return python(path, *options, env={"PACELINE_MODEL": str(model)}, timeout=None).stdout


@pytest.mark.usefixtures("cache")
def test_time_to_first_token_is_measured_next_to_the_engines_prefill(model: Path, tmp_path: Path):
    output = tmp_path / "found.json"
    run("first_token", model, "--rounds", 1, "--tokens", 40, "--output", output)
    found = json.loads(output.read_text())
    assert found["first_token_seconds"] > 0
    assert found["start_seconds"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_server_throughput_is_measured_with_equal_texts(
    model: Path, tmp_path: Path, suite_file: Path
):
    output = tmp_path / "found.json"
    options = ("--rounds", 1, "--max-tokens", 4, "--suite", suite_file, "--output", output)
    run("serving_throughput", model, *options)
    found = json.loads(output.read_text())
    assert {*found["same_texts_as_paceline none, 1"].values()} == {3}


def dflash_float16(folder: Path) -> tuple[str, ...]:
    from support.dflash import tiny_config, write_checkpoint

    mlx.needs()
    target, drafter = mlx.checkpoint(folder / "target", "llama"), folder / "drafter"
    (target / "chat_template.jinja").write_text("{{ messages[0].content }}")
    sizes = {"vocab_size": mlx.VOCAB, "mask_token_id": mlx.VOCAB - 1}
    write_checkpoint(drafter, tiny_config(**sizes))
    (folder / "asked").write_text(json.dumps({"turns": ["t3 t4 t5"]}))
    artifact = folder / "artifact"
    options = ["--target", target, "--weights", "f16", "--slots", "64", "--output", artifact]
    python("-m", "paceline", "convert", drafter, "--to", "coreml", *options)
    return str(drafter), str(target), str(folder / "asked"), "--artifact", str(artifact)


def zaya_lesson(_: Path) -> tuple[str, ...]:
    return "--layers", "1", "--tokens", "9"


def mlx_thresholds(folder: Path) -> tuple[str, ...]:
    checkpoint = mlx.checkpoint(folder / "mlx", "llama", max_position_embeddings=1100)
    return "--model", str(checkpoint)


def python_batch(folder: Path) -> tuple[str, ...]:
    return "--model", str(tiny(folder)), "--prompts", "2", "--tokens", "4", "--rounds", "1"


def batch_file(folder: Path) -> tuple[str, ...]:
    turns = ["a document " * 400] * 5 + [f"question {number}" for number in range(140)]
    lines = (json.dumps({"turns": [turn]}) + "\n" for turn in turns)
    (folder / "questions.jsonl").write_text("".join(lines))
    options = ("--questions", "2", "--characters", "300", "--sample", "2")
    return str(folder / "questions.jsonl"), "--model", str(tiny(folder)), *options


def soak(folder: Path) -> tuple[str, ...]:
    options = ("--seconds", "6", "--warm-up", "0", "--clients", "2", "--tolerance", "1")
    return *options, "--", "--model", str(tiny(folder))


def compare_checkouts(folder: Path) -> tuple[str, ...]:
    options = ("--rounds", "1", "--prompts", "2", "--max-tokens", "4")
    return str(ROOT), str(ROOT), "--model", str(tiny(folder)), *options


def document_questions(folder: Path) -> tuple[str, ...]:
    return "--model", str(tiny(folder)), "--characters", "900"


def servers(folder: Path) -> tuple[str, ...]:
    (folder / "asked").write_text("".join(f'{{"turns": ["t{n}"]}}\n' for n in range(3)))
    asked = ("--suite", str(folder / "asked"), "--limit", "2", "--max-tokens", "4")
    paths = (
        "--model",
        str(tiny(folder)),
        "--work",
        str(folder),
        "--output",
        str(folder / "found.json"),
    )
    return *asked, *paths, "--only", "paceline, --parallel 8"


REPORTS = [
    pytest.param("ahead_costs", lambda _: (), "plain 27.0"),
    pytest.param("compare_checkouts", compare_checkouts, '"rounds_with_differing_tokens": 0'),
    pytest.param("batch_file", batch_file, '"differing": 0'),
    pytest.param("document_questions", document_questions, '"differing": 0'),
    pytest.param(
        "dflash_float16", dflash_float16, "105 of 105 drafts are", marks=pytest.mark.coreml
    ),
    pytest.param("head_policy", lambda _: (), "chain        1.10 1.73"),
    pytest.param("python_batch", python_batch, '"equal": "2 of 2"'),
    pytest.param("native_drafts", lambda _: ("DFlash",), "0 of 420 are others"),
    pytest.param("servers", servers, "plain | 0 of 2 | 0 of 2 | 0 of 2 | 0 of 8 | - | 0 |"),
    pytest.param("soak", soak, "0 faults"),
    pytest.param("zaya_lesson", zaya_lesson, "experts 88.1 %", marks=pytest.mark.coreml),
    pytest.param("mlx_thresholds", mlx_thresholds, '"differing": 0', marks=pytest.mark.mlx),
]
"""Script, its arguments in a folder, and what it prints."""


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("name", "arguments", "expected"), REPORTS)
def test_each_benchmark_script_prints_a_report(
    name: str, arguments: Callable[[Path], tuple[str, ...]], expected: str, tmp_path: Path
):
    if packages := missing(PACKAGES.get(name, "")):
        pytest.skip(f"needs {', '.join(packages)}")
    assert expected in run(name, tmp_path, *arguments(tmp_path))


def test_llama_cpps_own_server_prints_its_address(model: Path):
    if missing("llama.cpp"):
        pytest.skip("needs xllamacpp")
    command = [sys.executable, str(BENCHMARKS / "llama_server.py"), str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("http://127.0.0.1:")
        server.kill()


PACKAGES = {
    "dflash_float16": "coreml",
    "mlx_thresholds": "mlx",
    "native_drafts": "llama.cpp",
    "zaya_lesson": "coreml",
}


def test_every_benchmark_script_is_documented_and_tested():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/*.sh")]
    documents = "".join(map(Path.read_text, [*pages, BENCHMARKS / "README.md"]))
    tests = "".join(map(Path.read_text, (ROOT / "tests").rglob("*.py")))
    for path in BENCHMARKS.glob("*.py"):
        assert path.stem in documents, f"{path.name} is named by no document"
        names = (f'"{path.stem}"', f'"{path.name}"')
        assert any(name in tests for name in names), f"{path.name} is started by no test"


def test_a_server_for_libraries_names_them(model: Path):
    assert "{mistralrs,openvino}" in run("library_server", model, "--help")


CLIENTS = (
    *("agent_commands", "agent_sdks", "llama_benchy", "llm_command", "lm_evaluation_harness"),
    *("schemathesis_fuzz", "schemathesis_router"),
)
"""They install clients from a package index, so no further than this."""


@pytest.mark.parametrize("name", CLIENTS)
def test_client_scripts_print_their_usage(name: str, model: Path):
    assert "usage" in run(f"clients/{name}", model, "--help")


gpu_rows: Any = script("gpu_rows")
random_gguf: Any = script("random_gguf")


def test_q8_rows_are_one_class_on_the_cpu_alone_and_batched(tmp_path: Path):
    library("llama.cpp")
    path = tmp_path / "random.gguf"
    shape = random_gguf.Shape(2, 256, 512, 4, 2, 64, 700, 512)
    random_gguf.write_random(path, shape, "Q8_0")
    device = gpu_rows.Device(0)
    model = NativeModel(device, path)
    alone, together = gpu_rows.measure(device, model, "q8_0:f16", [40])
    model.close()
    assert device.names()
    assert alone["classes"] == ["1-16, 32"]
    assert alone["by_position"] == {40: ["1-16, 32"]}
    assert alone["repeats"] == []
    assert alone["mixed"] == {"1-16, 32": 0}
    for result in together["together"]:
        differences = {name: count for name, count in result.items() if "differ" in name}
        assert not any(differences.values()), result
