import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import commands, verify
from paceline.bench.compare import PLAIN, SINGLE_ROW
from paceline.engines.measure import ROWS
from paceline.errors import InvalidRequest
from paceline.models import QUIET, Progress
from paceline.runtime import Model
from support.faulty import FaultyEngine, by_block_length, other_picks_when_drafting


def bench(model: Model, suite: Path, **options: Any) -> commands.Report:
    settings: dict[str, Any] = {
        "kinds": [],
        "per_kind": None,
        "drafters": ["suffix"],
        "policy": "fixed",
        "rounds": 1,
        "max_tokens": 30,
        "progress": QUIET,
    }
    return commands.bench_run(lambda _: model, suite=suite, **{**settings, **options})


def test_a_run_reports_every_contender_on_every_prompt(model: Model, suite_file: Path):
    asked: list[int] = []

    def load(rows: int) -> Model:
        asked.append(rows)
        return model

    stream = StringIO()
    report = commands.bench_run(
        load,
        suite=suite_file,
        kinds=["chat"],
        per_kind=1,
        drafters=["suffix", "ngram"],
        policy="fixed",
        rounds=2,
        max_tokens=10,
        progress=Progress(stream),
    )
    assert asked == [2, 1], "a model of each kind, once"
    assert report.passed
    value = json.loads(json.dumps(report.value))
    assert value["same_tokens"] is True
    assert [row["contender"] for row in value["rows"]] == [PLAIN, SINGLE_ROW, "suffix", "ngram"]
    assert (value["rounds"], value["max_tokens"], value["prompts"]) == (2, 10, 1)
    assert value["engine"]["engine"] == "openvino"
    assert len(value["suite_sha256"]) == 64
    assert "1/1 one:" in stream.getvalue()
    by_kind, by_prompt = report.tables
    assert by_kind[1] == ["kind", SINGLE_ROW, "suffix", "ngram"]
    assert [row[0] for row in by_kind[2]] == ["chat", "all", "worst prompt", "all, against 1 row"]
    assert len(by_prompt[2]) == 4
    for _, head, rows in report.tables:
        assert all(len(row) == len(head) for row in rows)


def test_a_run_with_other_tokens_does_not_pass(model: Model, suite_file: Path):
    liar = Model(model.files, FaultyEngine(model.engine, other_picks_when_drafting))
    report = bench(liar, suite_file, max_tokens=60)
    assert not report.passed
    assert report.value["same_tokens"] is False
    assert "NO" in {row[-1] for row in report.tables[1][2]}


def test_single_row_decoding_may_have_other_tokens(model: Model, suite_file: Path):
    class Other(Model):
        pass

    other = Other(model.files, FaultyEngine(model.engine, lambda rows, *_: rows.__imul__(-1)))
    report = commands.bench_run(
        lambda rows: model if rows == 2 else other,
        suite=suite_file,
        kinds=[],
        per_kind=1,
        drafters=["suffix"],
        policy="auto",
        rounds=1,
        max_tokens=10,
        progress=QUIET,
    )
    assert report.passed
    same = {row["contender"]: row["same_tokens"] for row in report.value["rows"]}
    assert same == {PLAIN: True, SINGLE_ROW: False, "suffix": True}


def test_a_wrong_kind_drafter_or_policy_is_refused(model: Model, suite_file: Path):
    for options in ({"kinds": ["poem"]}, {"drafters": ["magic"]}, {"policy": "best"}):
        with pytest.raises(InvalidRequest):
            bench(model, suite_file, **options)


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [case for case in verify.cases(whole=False) if case.policy == "fixed"][:8]
    monkeypatch.setattr(commands, "cases", lambda **_: chosen)


@pytest.mark.usefixtures("few_cases")
def test_verify_passes_where_the_promise_is_kept(model: Model, suite_file: Path):
    report = commands.verify(
        lambda: model, suite=suite_file, max_tokens=20, whole=False, drafters=[], progress=QUIET
    )
    assert report.passed
    assert report.value["exact"] is True
    assert report.value["answers_compared"] == 1 + 2 + 1 + 3 + 1 + 5 + 1 + 8
    assert json.loads(json.dumps(report.value))["model"] == model.files.name
    assert "is exact here: rows are independent" in report.text
    assert "0 differ" in report.text


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize("change", [by_block_length, other_picks_when_drafting])
def test_verify_fails_where_the_promise_is_broken(change: Any, model: Model, suite_file: Path):
    broken = Model(model.files, FaultyEngine(model.engine, change))
    report = commands.verify(
        lambda: broken, suite=suite_file, max_tokens=60, whole=False, drafters=[], progress=QUIET
    )
    assert not report.passed
    assert report.value["exact"] is False
    assert "is NOT exact here" in report.text
    assert report.value["rows_differing"] > 0


def test_a_model_measured_not_to_keep_it_promises_nothing(model: Model):
    broken = Model(model.files, FaultyEngine(model.engine, by_block_length))
    assert not broken.generate("Hello", max_tokens=3, drafter="suffix").exact
    assert broken.generate("Hello", max_tokens=3, drafter="none").exact


def test_a_plan_has_this_machine_and_the_experiment(model: Model):
    report = commands.plan(model, again=False)
    value = json.loads(json.dumps(report.value))
    assert [row["rows"] for row in value["rows"]] == [*ROWS[1:]]
    assert value["row_invariant"] is True
    assert value["plain_milliseconds"] > 0
    assert value["zaya"]["best"]["1.0"] == {"rows": 1, "speed_up": 1.0}
    here, zaya = report.tables
    assert model.files.name in here[0]
    assert zaya[2][0][3] == "never"
    for _, head, rows in report.tables:
        assert all(len(row) == len(head) for row in rows)
