import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import verify as command
from paceline.cli.models import exactness_of, exactness_text
from paceline.decoding.types import Block
from paceline.engines import EngineSettings, open_engine
from paceline.engines.exact import CONDITIONS
from paceline.errors import InvalidRequest
from paceline.models import list_models
from paceline.runtime.model import Model
from paceline.storage.report import Report
from paceline.verify import checks
from support.faulty import FaultyEngine, by_block_length, by_company, other_picks_when_drafting
from support.reports import report_of


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [case for case in checks.verify_cases() if case.policy == "fixed"][:8]
    monkeypatch.setattr(checks, "verify_cases", lambda _: chosen)


def verified(model: Model, suite: Path, **options: Any) -> Report:
    return report_of(command.verify, lambda *_, **__: model, suite=suite, drafters=[], **options)


@pytest.mark.usefixtures("few_cases")
def test_verify_passes_for_an_exact_model(model: Model, suite_file: Path):
    report = verified(model, suite_file, max_tokens=20)
    assert report.passed
    assert report.value["exact"] is True
    assert report.value["answers_compared"] == 1 + 2 + 1 + 3 + 1 + 5 + 1 + 8
    assert json.loads(json.dumps(report.value))["model"] == model.files.name
    assert "is exact on this machine: rows are independent" in report.text
    assert "0 differ" in report.text


@pytest.mark.usefixtures("few_cases")
def test_a_quick_verification_samples_and_estimates_the_whole(
    model: Model, suite_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(command, "_QUICK_ROWS_SECONDS", 0)
    monkeypatch.setattr(command, "_QUICK_SECONDS", 0)
    report = verified(model, suite_file, max_tokens=5, quick=True)
    assert report.passed
    assert report.value["parts"]["contexts"]["done"] == 1
    assert report.value["parts"]["combinations"]["of"] == 8
    last = report.text.splitlines()[-1]
    assert "1 of 3 contexts and 1 of 8 combinations were compared; all of them take about" in last
    with pytest.raises(InvalidRequest, match="magic"):
        report_of(command.verify, lambda *_, **__: pytest.fail("loaded"), drafters=["magic"])


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize("change", [by_block_length, other_picks_when_drafting])
def test_verify_fails_for_an_inexact_model(change: Any, model: Model, suite_file: Path):
    broken = Model(model.files, FaultyEngine(model.engine, change))
    report = verified(broken, suite_file, max_tokens=60)
    assert not report.passed
    assert report.value["exact"] is False
    assert "is NOT exact on this machine" in report.text
    assert report.value["rows_differing"] > 0


def test_a_model_measured_as_inexact_is_never_reported_exact(model: Model):
    broken = Model(model.files, FaultyEngine(model.engine, by_block_length))
    found = broken.generate("Hello", max_tokens=3, drafter="suffix")
    assert not found.exact
    assert found.as_dict()["exactness"]["block_length"]["differing_rate"] > 0
    plain = broken.without_history().generate("Hello", max_tokens=3, drafter="none")
    assert (plain.exact, plain.exactness) == (True, {})


def test_the_exact_field_depends_on_the_responses_conditions(model: Model):
    broken = Model(model.files, FaultyEngine(model.engine, by_company))
    alone = broken.without_history().generate("Hello", max_tokens=3, drafter="suffix")
    assert alone.exact, "no other sequence is in its calls"
    assert alone.exactness.keys() == {"block_length"}
    chat = broken.conversation()
    for turn, conditions in enumerate(({"block_length"}, {"block_length", "prefix_cache"})):
        stream = chat.send("and", max_tokens=3, drafter="suffix")
        for _ in stream:
            pass
        assert stream.result.exactness.keys() == conditions, turn
        assert stream.result.exact
    chat.close()
    shared = broken.generate(["one", "two", "three"], max_tokens=9, drafter="none")
    assert not any(result.exact for result in shared)
    for result in shared:
        assert {name for name, each in result.exactness.items() if not each.holds} == {"batch"}


def test_a_full_cache_compares_nothing_and_claims_nothing(model: Model):
    settings = EngineSettings(cache_tokens=96)
    engine = open_engine("llamacpp", model.files.path, model.files.context_length, settings)
    small = Model(model.files, FaultyEngine(engine, nothing))  # described as no other
    held = engine.open()
    engine.step([(held, Block([5] * 90, 0, prefill=True))])
    held.commit(90)
    assert small._exactness.comparisons({"prefix_cache"}) is None
    held.close()
    assert small._exactness.comparisons({"prefix_cache"}) is not None


def nothing(*_: object) -> None:
    """No fault."""


def test_models_lists_the_measured_exactness(model: Model):
    model.exactness_report()
    (listed,) = [each for each in list_models() if each.name == model.files.name]
    found = exactness_of(listed)
    assert any(each["conditions"].keys() == {*CONDITIONS} for each in found)
    engine = {"engine": "llamacpp", "min_rows": "2"}
    holds = {"engine": engine, "conditions": {"batch": {"holds": True}}}
    broken = {"engine": engine, "conditions": {"prefix_cache": {"holds": False}}}
    single = {**broken, "engine": {**engine, "min_rows": "1"}}
    assert exactness_text([holds, single]) == "yes"
    assert exactness_text([holds, broken]) == "not with another prefix cache"
    assert exactness_text([single]) == exactness_text([]) == "not measured"
