"""A single stream: its tokens with any drafter, its end, its options, its prompt, its probes."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.decoding.types import FinishReason
from paceline.errors import InvalidRequest
from paceline.options import Options
from paceline.runtime.model import Model
from paceline.runtime.stream import MAX_UNREAD
from support.plain import PROMPT, SAMPLED, plain
from support.scheduling import free_slots

# -- one answer ------------------------------------------------------------------------------------


def test_accepted_drafts_save_forward_passes(model: Model):
    # This text soon repeats itself, so looking back must pay.
    alone, drafted = plain(model), plain(model, drafter="suffix", policy="fixed")
    assert alone.stats.steps == 59
    assert alone.stats.drafted == 0
    assert drafted.stats.steps < 40
    assert drafted.stats.accepted >= 20
    assert drafted.stats.drafted_by == {"suffix": drafted.stats.drafted}
    assert drafted.stats.accepted_by == {"suffix": drafted.stats.accepted}
    assert drafted.stats.tokens_per_step == 59 / drafted.stats.steps


def test_a_result_has_the_request_and_the_counters(model: Model):
    found = plain(model, max_tokens=5, drafter="auto", seed=9)
    assert found.prompt_tokens == len(model.tokens(PROMPT))
    assert found.completion_tokens == len(found.token_ids) == 5
    assert found.finish_reason == FinishReason.LENGTH
    assert found.engine == "llamacpp"
    assert found.drafter == "suffix", "what auto stands for"
    assert found.model == model.files.name
    assert found.seed == 9
    assert found.exact
    stats = found.stats
    assert stats.decode_seconds >= stats.verify_seconds > 0
    assert stats.first_token_seconds >= stats.prefill_seconds > 0
    assert stats.host_seconds >= stats.draft_seconds > 0


def test_a_stream_and_generate_return_the_same_tokens(model: Model):
    expected = plain(model, drafter="suffix")
    stream = model.stream(PROMPT, max_tokens=60, drafter="suffix")
    steps = [*stream]
    assert [token for step in steps for token in step.tokens] == expected.token_ids
    assert stream.result.token_ids == expected.token_ids
    assert stream.result.text == expected.text
    # What was held back comes with the result.
    assert expected.text.startswith("".join(step.text for step in steps))
    assert stream.tokens == model.tokens(PROMPT) + expected.token_ids
    stream.close()
    assert stream.result.finish_reason == FinishReason.LENGTH, "closing again does nothing"
    assert [*stream] == []


def test_closing_a_stream_early_frees_its_slots_and_keeps_the_partial_response(model: Model):
    free, expected = model.engine.free_slots, plain(model)
    with model.stream(PROMPT, drafter="none") as stream:
        for _ in range(10):
            next(stream)
        with pytest.raises(RuntimeError, match="iterate to its end, or close"):
            _ = stream.result
    assert free_slots(model) == free
    assert stream.result.finish_reason == FinishReason.CANCELLED
    count = len(stream.result.token_ids)
    assert 10 <= count <= 10 + MAX_UNREAD + 1, "the model is at most so far ahead of its reader"
    assert stream.result.token_ids == expected.token_ids[:count]
    assert expected.text.startswith(stream.result.text)


# -- when it ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "suffix", "ngram:min=1"])
def test_repetition_detection_stops_at_the_same_token(drafter: str, model: Model):
    loop: Options = {"logit_bias": {40: 100.0}, "max_tokens": 400, "repetition_detection": True}
    answer = model.generate("Hello", drafter=drafter, **loop)
    assert (answer.finish_reason, answer.token_ids) == (FinishReason.REPETITION, [40] * 256)
    rule = {"max_pattern_size": 2, "min_count": 5}
    answer = model.generate("Hello", drafter=drafter, **{**loop, "repetition_detection": rule})
    assert answer.token_ids == [40] * 5
    assert model.generate("Hello", min_tokens=300, **loop).completion_tokens == 300


def test_logprobs_are_in_each_step_and_in_the_result(model: Model):
    options: Options = {"max_tokens": 9, "ignore_eos": True, "logprobs": 3}
    with model.stream(PROMPT, drafter="suffix", **options) as stream:
        steps = [*stream]
    answer = stream.result
    assert [one.token for one in answer.logprobs] == answer.token_ids
    assert [one for step in steps for one in step.logprobs] == stream.logprobs == answer.logprobs
    assert model.generate(PROMPT, drafter="none", **options).logprobs == answer.logprobs


# -- options ---------------------------------------------------------------------------------------


def test_the_prediction_drafter_requires_a_prediction(model: Model):
    with pytest.raises(InvalidRequest, match=r"drafter suffix\+prediction needs a prediction"):
        model.generate(PROMPT, drafter="suffix+prediction")


# -- prompts ---------------------------------------------------------------------------------------


def test_a_prompt_may_be_text_messages_or_tokens(model: Model):
    tokens = model.tokens(PROMPT)
    messages = [{"role": "user", "content": PROMPT}]
    assert model.tokens(messages) == tokens
    assert model.files.tokenizer.decode(tokens) == f"user\n{PROMPT}\nassistant\n"
    expected = plain(model).token_ids
    assert plain(model, messages).token_ids == expected
    assert plain(model, tokens).token_ids == expected
    assert plain(model, tuple(tokens)).token_ids == expected


# -- history ---------------------------------------------------------------------------------------


def test_a_drafter_with_history_drafts_from_earlier_responses(model: Model):
    options: Any = {"drafter": "suffix:earlier", "policy": "fixed", **SAMPLED}
    first, second = plain(model, **options), plain(model, **options)
    assert second.token_ids == first.token_ids
    assert second.stats.accepted > first.stats.accepted
    assert second.stats.steps < first.stats.steps / 2
    other = plain(Model(model.files, model.engine), **options)
    assert other.stats.accepted == first.stats.accepted, "what one model heard another has not"


def test_a_probe_counts_and_changes_nothing(model: Model):
    without = plain(model, drafter="ngram:min=1", policy="fixed")
    found = plain(model, drafter="ngram:min=1", policy="fixed", probe="ngram+suffix")
    assert found.token_ids == without.token_ids
    assert found.stats.steps == without.stats.steps
    assert found.stats.drafted == without.stats.drafted
    assert without.stats.probe is None
    assert found.stats.probe is not None
    assert found.stats.probe.keys() == {"ngram", "suffix"}
    for seen in found.stats.probe.values():
        assert 0 < seen["accepted"] < seen["drafted"]
        assert 0 < seen["steps"] < 60


def test_costs_are_learned_from_response_forward_passes(model: Model):
    calls: list[tuple[int, int]] = []
    costs = SimpleNamespace(
        observe=lambda rows, context, seconds: calls.append((rows, context)),
        table=model.costs.table,
        store=lambda: None,
    )
    watched = model.without_history()
    watched.costs = cast("Any", costs)
    with watched.stream("Hello", max_tokens=20, drafter="none", temperature=0.0) as stream:
        steps = [step for step in stream if step.tokens]
    prompt = stream.result.prompt_tokens
    assert calls == [(1, prompt + at) for at in range(len(steps) - 1)]
