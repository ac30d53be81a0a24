"""`bench run`, `plan` and `verify`."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main
from paceline.cli.plan import cost_facts, costs_report
from paceline.decoding.costs import CostTable
from paceline.engines.costs import ROWS
from paceline.engines.exact import CONDITIONS
from paceline.runtime.model import Model
from support.process import Run


def test_a_bench_run_prints_tables_or_json_and_writes_the_same(
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
    assert [row["rows"] for row in value["rows"]] == [*ROWS[1:]]
    assert value["exactness"].keys() == {*CONDITIONS}
    assert all(compared["holds"] for compared in value["exactness"].values())
    short, whole = (run("plan", "--model", tiny_gguf, *more).stdout for more in ((), ("--all",)))
    assert ("break-even" in short, short.count("\n\n")) == (True, 1), "a line and a table"
    assert "bit for bit" in whole
    assert "bit for bit" not in short


def test_a_busy_machine_is_reported_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = ("bench", "run", "--suite", str(tmp_path / "missing"))
    for load, more in ((0.0, ()), (1e3, ()), (1e3, ("--quiet",))):
        monkeypatch.setattr("paceline_lab.cli.options.load_average", lambda load=load: load)
        assert main([*words, *more]) == 2
        said = capsys.readouterr().err
        assert ("busy: a load of 1000.0" in said) == (load > 0 and not more)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--drafter", "sufix"), "unknown drafter 'sufix'; did you mean suffix?"),
        (("--policy", "best"), "policy is 'best'"),
        (("--output", "/no/such/folder/x.json"), "cannot write /no/such/folder/x.json"),
        (("--output", "/"), "cannot write /"),
        (("--suite", "/"), "cannot read /"),
        (("--threads", "0"), "argument --threads: "),
    ],
)
def test_an_invalid_bench_run_is_rejected_before_measuring(
    options: tuple[str, ...], reason: str, mistake: Any, tiny_gguf: Path, suite: Path
):
    options = options if "--suite" in options else ("--suite", str(suite), *options)
    assert reason in mistake("bench", "run", "--model", tiny_gguf, *options)


def test_a_plan_has_a_second_table_if_long_contexts_cost_more(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    costs = CostTable({1: 0.01, 2: 0.012}, per_token={1: 1e-5, 2: 2e-5})
    monkeypatch.setattr(Model, "measured_costs", lambda _, again: costs)
    report = costs_report(model, measure=False)
    assert report.value["deep"]["context"] == 512
    assert "512 tokens" in report.tables[1][0]


def test_a_plan_has_a_row_per_measured_length_except_plain():
    free = cost_facts(CostTable({1: 0.01, 2: 0.01, 4: 0.01}))["rows"]
    dear = cost_facts(CostTable({1: 0.01, 2: 0.02, 4: 0.04}))["rows"]
    assert [(row["rows"], row["milliseconds"], row["ratio"]) for row in free] == [
        (2, 10, 1),
        (4, 10, 1),
    ]
    for row in free:  # any chance pays, and certainty brings all rows
        assert row["break_even"] == pytest.approx(0, abs=1e-9)
        assert row["speed_up"]["1.0"] == pytest.approx(row["rows"])
        gains = [*row["speed_up"].values()]
        assert gains == sorted(gains)
    for row in dear:  # only certainty breaks even
        assert row["break_even"] == pytest.approx(1)
        assert row["speed_up"]["0.5"] < 1
