"""`bench run`, as the command line calls it."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

from paceline.models import Progress
from paceline.runtime.model import Model
from paceline_lab.bench.ab_test import PLAIN, SINGLE_ROW
from paceline_lab.bench.record import parse_record
from support.bench import bench
from support.faulty import FaultyEngine, other_picks_when_drafting


def test_a_run_reports_every_contender_on_every_prompt(model: Model, suite_file: Path):
    asked: list[int] = []

    def load(*_: Any, min_rows: int, **__: Any) -> Model:
        asked.append(min_rows)
        return model

    stream = StringIO()
    report = bench(
        model,
        suite_file,
        load=load,
        limit=1,
        rounds=2,
        max_tokens=10,
        drafter=["suffix", "ngram"],
        progress=Progress(stream),
    )
    assert asked == [2, 1], "a model of each kind, once"
    assert report.passed
    record = parse_record(json.loads(json.dumps(report.value)), "it")
    assert record.kind == "run"
    assert record.summary["same_tokens"] is True
    assert [row.contender for row in record.rows] == [PLAIN, SINGLE_ROW, "suffix", "ngram"]
    assert record.settings == {
        "drafters": ["suffix", "ngram"],
        "policy": "fixed",
        "rounds": 2,
        "max_tokens": 10,
        "prompts": 1,
        "limit": 1,
    }
    assert record.engine is not None
    assert record.engine["engine"] == "llamacpp"
    assert record.model == {"name": model.files.name, "fingerprint": model.files.fingerprint}
    assert len(record.suite_sha256 or "") == 64
    assert "1/1 one:" in stream.getvalue()
    single, *_, by_prompt = report.tables
    assert single[0].startswith(f"{SINGLE_ROW}, by kind")
    assert [row[0] for row in single[2]] == ["chat", "all"]
    assert len(by_prompt[2]) == 4
    for _, head, rows in report.tables:
        assert all(len(row) == len(head) for row in rows)


def test_sampled_responses_match_plain_decoding_with_the_same_seed(model: Model, suite_file: Path):
    def answers_of_plain(**sampling: Any) -> list[list[int]]:
        report = bench(model, suite_file, **sampling)
        assert report.passed, "a drafter changed a token"
        settings = report.value["settings"]
        assert {name: settings.get(name) for name in sampling} == sampling
        rows = [row for row in report.value["rows"] if row["contender"] == PLAIN]
        return [row["facts"]["token_ids"] for row in rows]

    greedy, sampled, other = (
        answers_of_plain(**sampling)
        for sampling in ({}, {"temperature": 1.5, "seed": 7}, {"temperature": 1.5, "seed": 8})
    )
    assert greedy != sampled != other


def test_a_run_with_different_tokens_fails(model: Model, suite_file: Path):
    liar = Model(model.files, FaultyEngine(model.engine, other_picks_when_drafting))
    report = bench(liar, suite_file, max_tokens=60)
    assert not report.passed
    assert report.value["summary"]["same_tokens"] is False
    assert "NO" in {row[-1] for row in report.tables[-1][2]}
