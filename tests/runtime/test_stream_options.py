"""Options of a stream: logprobs, min_tokens, predictions."""

from dataclasses import replace

import pytest

from paceline.errors import InvalidRequest
from paceline.options import Options
from paceline.runtime.model import Model


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_logprobs_come_with_the_answer_and_the_prompt(drafter: str, model: Model):
    found = model.generate(
        "the rain in the",
        raw=True,
        max_tokens=9,
        drafter=drafter,
        logprobs=3,
        prompt_logprobs=True,
    )
    assert [each.token for each in found.logprobs] == found.token_ids
    prompt = model.tokens("the rain in the", raw=True)
    assert found.prompt_logprobs[0] is None
    assert [each.token for each in found.prompt_logprobs[1:] if each] == prompt[1:]
    for each in found.logprobs:
        assert each.top[0] == (each.token, each.logprob)  # it is greedy
        assert len(each.top) == 3
        assert each.logprob <= 0
    plain = model.generate("the rain in the", raw=True, max_tokens=9, drafter="none", logprobs=3)
    assert plain.logprobs == found.logprobs


def test_logprobs_of_the_steps_are_those_of_the_stream_and_the_result(model: Model):
    options: Options = {"max_tokens": 9, "drafter": "suffix", "logprobs": 2}
    with model.stream("the rain in the", **options) as stream:
        steps = [*stream]
    found = [each for step in steps for each in step.logprobs]
    assert found == stream.logprobs == stream.result.logprobs
    assert [each.token for each in found] == stream.answer


def test_logprobs_are_recorded_only_on_request(model: Model):
    found = model.generate("the", max_tokens=3)
    assert found.logprobs == found.prompt_logprobs == []


def test_an_answer_does_not_end_before_min_tokens(model: Model):
    plain = model.generate("the rain", max_tokens=8, ignore_eos=True, drafter="none")
    first = plain.token_ids[0]
    files = replace(model.files, facts=replace(model.files.facts, stop_token_ids=(first,)))
    ends = Model(files, model.engine)
    assert ends.generate("the rain", max_tokens=8).token_ids == [first]
    assert len(ends.generate("the rain", max_tokens=8, min_tokens=5).token_ids) >= 5


def test_a_prediction_saves_calls_and_changes_nothing(model: Model):
    plain = model.generate("the rain", max_tokens=30, ignore_eos=True, drafter="none")
    predicted = model.generate(
        "the rain",
        max_tokens=30,
        ignore_eos=True,
        prediction=plain.token_ids,
        policy="fixed",
        max_block=10,
    )
    assert predicted.token_ids == plain.token_ids
    assert predicted.stats.accepted_by["prediction"] > 20
    assert predicted.stats.steps < 5


def test_a_prediction_can_be_the_only_drafter(model: Model):
    plain = model.generate("the rain", max_tokens=40, drafter="none")
    found = model.generate(
        "the rain", max_tokens=40, prediction=plain.token_ids, drafter="prediction"
    )
    assert found.token_ids == plain.token_ids
    assert found.drafter == "prediction"
    assert found.stats.drafted_by.keys() == {"prediction"}


def test_the_drafter_prediction_without_a_prediction_is_rejected(model: Model):
    with pytest.raises(InvalidRequest, match=r"drafter suffix\+prediction needs a prediction"):
        model.generate("the rain", drafter="suffix+prediction")


def test_a_prediction_is_ignored_without_drafting(model: Model):
    found = model.generate("the rain", max_tokens=5, prediction=[1, 2, 3], drafter="none")
    assert found.stats.drafted == 0
