from typing import Any

import pytest

from paceline.decoding.stopping import DEFAULT, Repetition
from paceline.engines.costs import MAX_ROWS
from paceline.errors import InvalidRequest
from paceline.options import POLICIES, Options
from paceline.runtime.request import check


def test_the_default_options_are_greedy_up_to_the_context_limit():
    request = check({})
    assert request.sampling.greedy
    assert request.max_tokens is None
    assert request.stop == ()
    assert str(request.drafter) == "auto"
    assert (request.policy, request.max_block) == ("auto", MAX_ROWS)
    assert request.probe is None
    assert not request.raw


def test_every_option_reaches_the_request():
    request = check(
        {
            "max_tokens": 5,
            "temperature": 0.5,
            "top_k": 4,
            "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.3,
            "logit_bias": {7: -1.0},
            "seed": 11,
            "stop": ["a", "b"],
            "ignore_eos": True,
            "drafter": "ngram:min=2",
            "policy": "kelly",
            "max_block": 5,
            "probe": "suffix",
            "raw": True,
            "min_tokens": 3,
            "logprobs": 2,
            "prompt_logprobs": True,
            "prediction": [4, 5],
            "generation_config": "none",
            "repetition_detection": {"max_pattern_size": 9, "min_count": 3},
        }
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 4, 0.9)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, 0.3)
    assert (sampling.logit_bias, sampling.seed) == ({7: -1.0}, 11)
    assert request.stopping([1, 2]).stop_token_ids == frozenset()
    assert (request.max_tokens, request.stop) == (5, ("a", "b"))
    assert (str(request.drafter), request.policy, request.max_block) == ("ngram:min=2", "kelly", 5)
    assert (str(request.probe), request.raw) == ("suffix", True)
    assert request.stopping([1]).min_tokens == 3
    assert (request.logprobs, request.prompt_logprobs) == (2, True)
    assert request.prediction == [4, 5]
    assert request.stopping([1]).repetition == Repetition(9, 0, 3)


def test_repetition_detection_is_off_unless_it_is_asked_for():
    for off in (False, None, {}, {"max_pattern_size": 0, "min_pattern_size": 0, "min_count": 0}):
        assert check({"repetition_detection": off}).repetition is None
    assert check({}).repetition is None
    assert check({"repetition_detection": True}).repetition == DEFAULT


def test_an_unknown_option_is_named_with_the_nearest_one():
    options: Any = {"temprature": 1}
    with pytest.raises(InvalidRequest, match=r"'temprature'; did you mean temperature\?"):
        check(options)
    options = {"zzz": 1}
    with pytest.raises(InvalidRequest, match=r"no option 'zzz'$"):
        check(options)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"temprature": 1, "top_k": "4", "raw": 1}, ["temprature", "top_k", "raw"]),
        ({"temperature": -1, "top_p": 2, "seed": -1}, ["temperature", "top_p", "seed"]),
    ],
)
def test_every_wrong_option_is_named_at_once_in_a_line_each(options: Any, names: list[str]):
    with pytest.raises(InvalidRequest) as caught:
        check(options)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(names)
    assert all(any(name in line for line in lines) for name in names)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_that_do_not_weigh_costs_get_a_shorter_block(policy: Any):
    assert check({"policy": policy}).max_block == (MAX_ROWS if policy == "auto" else 8)
    assert check({"policy": policy, "max_block": 3}).max_block == 3


def test_without_a_seed_one_is_drawn_each_time():
    drawn = {check({}).sampling.seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**64 for seed in drawn)
    assert check({"seed": 0}).sampling.seed == 0


def test_one_stop_string_equals_a_list_of_one():
    assert check({"stop": "end"}).stop == check({"stop": ["end"]}).stop == ("end",)


def test_an_answer_ends_with_the_models_end_tokens_unless_they_are_ignored():
    options: Options = {"stop": "x", "max_tokens": 3}
    stopping = check(options).stopping([1, 2])
    assert (stopping.max_tokens, stopping.stop_token_ids, stopping.stop) == (3, {1, 2}, ("x",))
    assert check({"ignore_eos": True}).stopping([1, 2]).stop_token_ids == frozenset()
