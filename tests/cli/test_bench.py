"""`bench run`, `plan` and `verify`."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.process import Run


def test_a_bench_run_prints_tables_or_json_and_writes_what_it_prints(
    run: Run, tiny_gguf: Path, suite: Path, tmp_path: Path
):
    common = ("--model", tiny_gguf, "--suite", suite, "--max-tokens", 20, "--rounds", 1)
    out = tmp_path / "result.json"
    out.write_text("older")
    found = run("bench", "run", *common, "--drafter", "suffix", "--json", "--output", out)
    assert found.returncode == 0, found.stderr
    value = json.loads(found.stdout)
    assert value["summary"]["same_tokens"]
    assert json.loads(out.read_text()) == value
    assert {path.name for path in tmp_path.iterdir()} <= {"result.json", "suite.jsonl", "hub"}
    text = run("bench", "run", *common).stdout
    assert "the drafters' tokens equal plain decoding's" in text


def test_a_plan_prints_tables_or_json(run: Run, tiny_gguf: Path):
    value = json.loads(run("plan", "--model", tiny_gguf, "--json").stdout)
    assert all(compared["holds"] for compared in value["exactness"].values())
    assert "break-even" in run("plan", "--model", tiny_gguf).stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--drafter", "sufix"), "no drafter is called 'sufix'; did you mean suffix?"),
        (("--policy", "best"), "policy is 'best'"),
        (("--output", "/no/such/folder/x.json"), "cannot write /no/such/folder/x.json"),
        (("--output", "/"), "cannot write /"),
        (("--suite", "/"), "cannot read /"),
        (("--threads", "0"), "argument --threads: "),
    ],
)
def test_a_mistake_in_a_bench_run_is_found_before_anything_is_measured(
    options: tuple[str, ...], reason: str, mistake: Any, tiny_gguf: Path, suite: Path
):
    options = options if "--suite" in options else ("--suite", str(suite), *options)
    assert reason in mistake("bench", "run", "--model", tiny_gguf, *options)
