import json
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import commands, verify
from paceline.engines.measure import ROWS
from paceline.models import QUIET
from paceline.runtime import Model
from support.faulty import FaultyEngine, by_block_length, other_picks_when_drafting


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
