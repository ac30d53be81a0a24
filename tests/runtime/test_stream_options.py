"""Options of a stream: logprobs, min_tokens, predictions."""

from dataclasses import replace

import pytest

from paceline.errors import InvalidRequest
from paceline.options import Options
from paceline.runtime.model import Model

PROMPT = "the rain in the"


def test_logprobs_come_with_the_answer_and_the_prompt_and_each_step(model: Model):
    options: Options = {"raw": True, "max_tokens": 9, "ignore_eos": True, "logprobs": 3}
    with model.stream(PROMPT, drafter="suffix", prompt_logprobs=True, **options) as stream:
        steps = [*stream]
    answer = stream.result
    assert [one.token for one in answer.logprobs] == answer.token_ids
    assert [one for step in steps for one in step.logprobs] == stream.logprobs == answer.logprobs
    assert answer.prompt_logprobs[0] is None
    of_prompt = [one for one in answer.prompt_logprobs if one]
    assert [one.token for one in of_prompt] == model.tokens(PROMPT, raw=True)[1:]
    for one in answer.logprobs:
        assert one.top[0] == (one.token, one.logprob)  # it is greedy
        assert len(one.top) == len(one.top_texts) == 3
        assert one.logprob <= 0
        assert one.text == one.top_texts[0] != ""
    plain = model.generate(PROMPT, drafter="none", **options)
    assert plain.logprobs == answer.logprobs
    assert plain.prompt_logprobs == model.generate("the", max_tokens=3).logprobs == []


def test_an_answer_does_not_end_before_min_tokens(model: Model):
    plain = model.generate(PROMPT, max_tokens=8, ignore_eos=True, drafter="none")
    first = plain.token_ids[0]
    files = replace(model.files, facts=replace(model.files.facts, stop_token_ids=(first,)))
    ends = Model(files, model.engine)
    assert ends.generate(PROMPT, max_tokens=8).token_ids == [first]
    assert len(ends.generate(PROMPT, max_tokens=8, min_tokens=5).token_ids) >= 5


def test_a_prediction_saves_calls_and_changes_nothing(model: Model):
    options: Options = {"max_tokens": 30, "ignore_eos": True}
    plain = model.generate(PROMPT, drafter="none", **options)
    prediction, policy = plain.token_ids, {"policy": "fixed", "max_block": 10}
    for drafter in ("auto", "prediction"):
        answer = model.generate(PROMPT, drafter=drafter, prediction=prediction, **options, **policy)
        assert answer.token_ids == plain.token_ids
        assert answer.stats.accepted_by["prediction"] > 20
        assert answer.stats.steps < 5
    assert answer.drafter == "prediction"
    off = model.generate(PROMPT, max_tokens=5, prediction=prediction, drafter="none")
    assert off.stats.drafted == 0


def test_the_drafter_prediction_without_a_prediction_is_rejected(model: Model):
    with pytest.raises(InvalidRequest, match=r"drafter suffix\+prediction needs a prediction"):
        model.generate(PROMPT, drafter="suffix+prediction")
