"""The cost profile of a large model: no first token waits for it, and it gets whole by parts."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.engines.base import StepResult
from paceline.engines.invariance import BLOCK_LENGTH, CHUNKED_PREFILL, CONDITIONS, PREFIX_CACHE
from paceline.engines.llamacpp.engine import LlamaCppEngine
from paceline.engines.profile import is_whole, known_profile, mark_outdated, store_profile
from paceline.engines.profile_parts import PRIOR, measure_part
from paceline.errors import CacheFull
from paceline.models import Progress
from paceline.options import GREEDY, Options
from paceline.runtime import profile
from paceline.runtime.model import Model
from paceline.runtime.stream import run_together
from support.plain import PROMPTS
from support.toy import ToyEngine

PROMPT = "the rain in the rain in the rain in the"
ANSWER: Options = {**GREEDY, "max_tokens": 24, "ignore_eos": True}


class Calls(list[int]):
    """Rows of each call of the engine."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found, step = Calls(), LlamaCppEngine.step

    def watched(self: Any, work: Any) -> StepResult:
        found.append(sum(len(block.tokens) for _, block in work))
        return step(self, work)

    monkeypatch.setattr(LlamaCppEngine, "step", watched)
    return found


@pytest.fixture
def folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; where profiles are stored in it."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "empty"))
    return tmp_path / "empty" / "measurements"


def large(model: Model, said: StringIO | None = None) -> Model:
    """The tiny model, as if it were large; a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "_LARGE_BYTES", 0)
        return Model(model.files, model.engine, progress=Progress(said or StringIO()))


LENGTHS = [6, 12, 18, 60]
"""Of answers to `PROMPTS`, so that they end one after the other."""


def alone(model: Model) -> list[list[int]]:
    return [
        model.generate(prompt, drafter="none", **{**ANSWER, "max_tokens": most}).token_ids
        for prompt, most in zip(PROMPTS, LENGTHS, strict=True)
    ]


def together(model: Model, drafter: str) -> list[list[int]]:
    """The same answers, made in the same calls."""
    streams = [
        model.stream(prompt, drafter=drafter, **{**ANSWER, "max_tokens": most})
        for prompt, most in zip(PROMPTS, LENGTHS, strict=True)
    ]
    run_together(streams)
    return [stream.result.token_ids for stream in streams]


@pytest.mark.usefixtures("folder")
def test_the_first_token_of_a_large_model_waits_for_no_measurement(model: Model, calls: Calls):
    said = StringIO()
    stream = large(model, said).stream(PROMPT, drafter="suffix", **ANSWER)
    before = len(calls)
    steps = iter(stream)
    assert next(steps).tokens
    prompt = stream.count - len(stream.answer)
    assert sum(calls) <= prompt + 1, "the prompt alone was read"
    assert before == 0
    while len(stream.answer) < 12:
        next(steps)
    assert len(calls) <= 12, "and drafts were verified"
    stream.close()
    assert said.getvalue() == ""


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("drafter", ["suffix", "ngram:min=1"])
def test_the_first_answer_is_exact_and_says_so(drafter: str, model: Model):
    plain = model.generate(PROMPT, drafter="none", **ANSWER).token_ids
    found = large(model).generate(PROMPT, drafter=drafter, **ANSWER)
    assert found.token_ids == plain
    assert found.exact
    assert found.exactness.keys() == {BLOCK_LENGTH}
    assert found.exactness[BLOCK_LENGTH].rows == 31


def test_what_one_process_measured_is_used_and_completed_by_the_next(
    model: Model, folder: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(profile, "_SHARE", 0.0)
    large(model).generate(PROMPT, drafter="suffix", **ANSWER)
    found, outdated = known_profile(model.engine, model.files.fingerprint, folder)
    assert found is not None
    assert (found.rounds, outdated) == (1, "")
    assert not is_whole(found, model.engine)
    next_one = large(model)
    assert next_one._profile.costs() == found.cost
    free, compared = model.engine.free_slots, set[int]()
    monkeypatch.setattr(profile, "_SHARE", 1000.0)
    calls.clear()
    next_one.generate(PROMPT, drafter="suffix", **ANSWER)
    whole, _ = known_profile(model.engine, model.files.fingerprint, folder)
    assert whole is not None
    assert is_whole(whole, model.engine)
    assert (whole.rounds, whole.compared.keys()) == (3, {*CONDITIONS})
    assert model.engine.free_slots == free
    assert not compared
    calls.clear()
    assert large(model).profile == whole, "it needs no further measurement"
    assert calls == []


@pytest.mark.usefixtures("folder")
def test_the_conditions_of_an_answer_are_measured_first(model: Model):
    found = large(model)
    measured = found._profile.compared([PREFIX_CACHE, CHUNKED_PREFILL])
    assert measured is not None
    assert measured.keys() == {PREFIX_CACHE, CHUNKED_PREFILL}
    assert all(each.holds for each in measured.values())


@pytest.mark.usefixtures("folder")
def test_without_slots_a_large_model_is_not_measured(model: Model, monkeypatch: pytest.MonkeyPatch):
    found, step = large(model), LlamaCppEngine.step

    def full(*_: object) -> StepResult:
        raise CacheFull("no room")

    monkeypatch.setattr(LlamaCppEngine, "step", full)
    assert found._profile.compared([BLOCK_LENGTH]) is None
    monkeypatch.setattr(LlamaCppEngine, "step", step)
    assert found._profile.compared([BLOCK_LENGTH]) is not None


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("drafter", ["suffix", "ngram:min=1"])
def test_a_measurement_after_an_answer_changes_no_answer_of_the_same_call(
    drafter: str, model: Model, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(profile, "_SHARE", 1000.0)  # parts are measured after each answer
    assert together(large(model), drafter) == alone(model)


# -- outdated profiles -----------------------------------------------------------------------------


def answer_of(seconds: float, rows: int = 2, count: int = 64) -> Any:
    """An answer whose calls each took this long."""
    stats = SimpleNamespace(prefill_seconds=0.0, decode_seconds=0.0)
    return SimpleNamespace(calls=[(rows, 64, seconds)] * count, failed=False, stats=stats)


@pytest.fixture(params=["large", "small"])
def outdated(request: pytest.FixtureRequest, model: Model, folder: Path) -> Model:
    """A model whose stored profile was found to be outdated by an earlier process."""
    Model(model.files, model.engine).measure_profile()
    assert mark_outdated(model.engine, model.files.fingerprint, folder, "calls are slow")
    if request.param == "large":
        return large(model)
    return Model(model.files, model.engine, progress=Progress(StringIO()))


def reason(model: Model, folder: Path) -> str:
    return known_profile(model.engine, model.files.fingerprint, folder)[1]


def test_an_outdated_profile_is_used_for_the_first_token(
    outdated: Model, folder: Path, calls: Calls
):
    stream = outdated.stream(PROMPT, drafter="suffix", **ANSWER)
    next(stream)
    assert max(calls) == sum(calls), "the prompt alone was read"
    assert reason(outdated, folder) == "calls are slow"
    stream.close()


@pytest.mark.parametrize("drafter", ["suffix", "ngram:min=1"])
def test_measuring_again_after_an_answer_changes_no_answer_of_the_same_call(
    drafter: str, outdated: Model, model: Model
):
    expected = alone(model)
    assert together(outdated, drafter) == expected


def test_a_profile_that_answers_agree_with_is_not_outdated(
    outdated: Model, folder: Path, calls: Calls
):
    cost = outdated._profile.costs()
    outdated._profile.learn(answer_of(1.2 * cost.at_context(0)(2)))
    assert reason(outdated, folder) == ""
    assert calls == []


@pytest.mark.parametrize("ratio", [0.1, 5.0])
def test_a_profile_that_answers_contradict_is_measured_after_one(
    ratio: float, outdated: Model, folder: Path, calls: Calls
):
    cost = outdated._profile.costs()
    outdated._profile.learn(answer_of(ratio * cost.at_context(0)(2)), shared=True)
    assert calls == [], "not between the calls of others"
    outdated._profile.learn(answer_of(ratio * cost.at_context(0)(2)))
    assert calls
    assert reason(outdated, folder) == ""
    assert outdated._profile.costs() != cost


# -- parts -----------------------------------------------------------------------------------------


def test_parts_of_a_small_cache_end(monkeypatch: pytest.MonkeyPatch):
    engine = ToyEngine(context_length=64, cache_blocks=4, block_size=8)
    found = measure_part(engine, None)
    for _ in range(12):
        last, found = found, measure_part(engine, found)
        if found is last:
            break
    assert found is last
    assert engine.free_slots == 32


def test_the_prior_makes_drafts_dearer_than_they_are():
    assert [PRIOR(rows) for rows in (1, 2, 8, 16)] == [1.0, 1.25, 2.75, 4.75]


# -- costs in use ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [False, True])
def test_answers_correct_the_costs_that_the_next_process_reads(
    model: Model, folder: Path, fixed: bool
):
    # Timings of a busy machine need not grow with T, and a cost table smooths them.
    seconds = {rows: 1e-3 * (1 + rows / 8) for rows in model.profile.seconds}
    even = replace(model.profile, seconds=seconds, deep_seconds={}, corrections={})
    store_profile(model.engine, model.files.fingerprint, folder, even)
    used = Model(model.files, model.engine)
    cost = used.profile.cost
    if fixed:
        used.fix_costs()
    dear = [(1, 64, cost(1)), (8, 64, cost(8) * 1.5)] * 16
    stats = SimpleNamespace(prefill_seconds=0.0, decode_seconds=0.0)
    answer: Any = SimpleNamespace(calls=dear, failed=False, stats=stats)
    for _ in range(20):
        used.fresh()._profile.learn(answer)
    for each in (used, used.fresh(), Model(model.files, model.engine)):
        assert each.profile.cost(1) == cost(1)
        assert each.profile.cost(8) == pytest.approx(cost(8) * (1.0 if fixed else 1.5), rel=0.09)
