import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main
from paceline.errors import InvalidRequest
from paceline.models import ModelFiles
from paceline.runtime.model import Model
from paceline.storage.report import Report
from paceline_lab.bench.ab_test import PLAIN
from paceline_lab.bench.record import parse_record
from paceline_lab.cli import simulate as command
from paceline_lab.cli.options import ComparisonArguments
from support.reports import report_of

AROUND = [1, 2, 3, 4, 5, 6]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    entries = [
        {"id": "round", "kind": "code", "prompt": AROUND * 2, "answer": AROUND * 5},
        {"id": "new", "kind": "chat", "prompt": [7, 8], "answer": [20, 21, 22, 23, 24]},
        {"id": "short", "kind": "chat", "prompt": [7, 8], "answer": [20]},
    ]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in entries))
    return path


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("a model was opened")


def simulated(texts: Path, *, cost: str = "1=2,5=3", **options: Any) -> Report:
    compared = {"drafters": ["ngram"], "policies": ["fixed:5"], "blocks": [], **options}
    comparison = ComparisonArguments(**compared)
    return report_of(command.simulate, never, texts=[texts], comparison=comparison, cost=cost)


def test_outputs_slower_than_plain_decoding_are_counted(texts: Path):
    (found,) = simulated(texts, cost="1=2,5=30").value["summary"].values()
    assert (found["slower"], found["expected_worst"] < 1) == (1, True), "the others have no draft"


def test_a_simulation_report_has_figures_per_kind_and_in_total(texts: Path):
    report = simulated(texts, drafters=["ngram", "suffix"])
    record = parse_record(json.loads(json.dumps(report.value)), "this")
    assert record.kind == "simulate"
    assert record.contenders == [PLAIN, "ngram, fixed 5", "suffix, fixed 5"]
    plain, ngram, _ = record.rows[:3]
    assert ngram.measures["tokens_per_step"] == [pytest.approx(29 / 6)]
    assert ngram.measures["ratio"] == [pytest.approx(58 / 17.75)]
    assert (ngram.counts["steps"], ngram.counts["drafted_at"]) == (6, [6, 6, 6, 5])
    assert (plain.counts["steps"], plain.measures["decode_seconds"]) == (29, [pytest.approx(0.058)])
    assert record.settings["cost"]["milliseconds"] == {"1": 2.0, "5": 3.0}
    found = record.summary["ngram, fixed 5"]
    assert (found["passes"], found["tokens"]) == (10, 33)
    assert found["ideal"] == pytest.approx(3.3)
    assert found["expected"] == pytest.approx((58 + 8) / (17.75 + 8))
    assert (found["expected_worst"], found["slower"]) == (1.0, 0)
    assert found["accepted_by_place"] == [1.0] * 4
    assert "3 texts, 36 tokens of answers" in report.text
    titles = [title for title, _, _ in report.tables]
    assert len(titles) == 3
    for _, head, rows in report.tables:
        assert rows
        assert all(len(row) == len(head) for row in rows)


def test_texts_are_listed_per_kind(texts: Path):
    with texts.open("a") as file:  # as many texts as another kind has
        file.write(json.dumps({"kind": "math", "prompt": [7, 8], "answer": [20, 21]}) + "\n")
    record = parse_record(simulated(texts).value, "this")
    assert [(row.case, row.kind, row.contender) for row in record.rows] == [
        ("1 texts of code", "code", PLAIN),
        ("1 texts of code", "code", "ngram, fixed 5"),
        ("2 texts of chat", "chat", PLAIN),
        ("2 texts of chat", "chat", "ngram, fixed 5"),
        ("1 texts of math", "math", PLAIN),
        ("1 texts of math", "math", "ngram, fixed 5"),
    ]
    assert [row.facts["tokens"] for row in record.rows] == [30, 30, 6, 6, 2, 2]


def test_simulating_a_table_needs_no_model(texts: Path, toy_table: Path):
    report = simulated(texts, drafters=[f"table:{toy_table}"])
    record = parse_record(report.value, "this")
    assert record.contenders[1] == f"table:{toy_table.name}, fixed 5"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafters": ["suffix+mtp"]}, "needs a model's hidden states or calls"),
        ({"drafters": ["model:other"]}, "cannot be simulated"),
        ({"drafters": ["table"]}, "no table ships with any"),
        ({"cost": "nowhere.json"}, "expected here, zaya, phi-4-mini"),
        ({"cost": "1="}, "expected .*milliseconds by rows"),
        ({"cost": "1=-3"}, "expected .*milliseconds by rows"),
    ],
)
def test_unsupported_drafters_are_rejected_in_simulation(texts: Path, options: Any, message: str):
    with pytest.raises(InvalidRequest, match=message) as raised:
        simulated(texts, **options)
    assert "\n" not in str(raised.value)


def run(*arguments: object) -> int:
    return main([str(each) for each in arguments])


def test_the_simulate_command_prints_a_report(
    texts: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out.json"
    common = ("bench", "simulate", "--texts", texts, "--cost", "zaya", "--quiet")
    assert run(*common, "--drafter", "suffix", "--block", 5, "--output", out) == 0
    printed = capsys.readouterr().out
    assert "suffix, fixed 5" in printed
    assert "extrapolated beyond 4 rows (blocks have up to 5)" in " ".join(printed.split())
    assert "by position" in printed
    record = parse_record(json.loads(out.read_text()), "out")
    assert record.command.startswith("paceline")
    assert run(*common, "--drafter", "suffix", "--json") == 0
    assert parse_record(json.loads(capsys.readouterr().out), "this").kind == "simulate"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "needs --texts FILE"),
        (("--texts", "nowhere.jsonl", "--cost", "zaya"), "cannot read nowhere.jsonl"),
    ],
)
def test_simulate_errors_are_one_line(
    arguments: tuple[str, ...], message: str, cache: Path, capsys: pytest.CaptureFixture[str]
):
    assert run("bench", "simulate", *arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_simulation_uses_the_models_costs_on_this_machine(
    texts: Path,
    cache: Path,
    tiny_files: ModelFiles,
    tiny_gguf: Path,
    tiny_model: Model,
    capsys: pytest.CaptureFixture[str],
):
    words = ("bench", "simulate", "--texts", texts, "--model", tiny_gguf, "--json")
    assert run(*words, "--drafter", "suffix") == 0
    record = parse_record(json.loads(capsys.readouterr().out), "this")
    assert record.settings["cost"]["name"] == "here"
    assert len(record.settings["cost"]["milliseconds"]) > 3
