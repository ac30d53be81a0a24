import json
import re
from inspect import cleandoc
from itertools import product
from typing import Any

import numpy as np
import pytest

from paceline.decoding.stopping import DEFAULT, Repetition, Stopping
from paceline.engines.costs import MAX_ROWS
from paceline.errors import InvalidRequest
from paceline.options import POLICIES, RANGES, Options
from paceline.runtime.conversation import Conversation
from paceline.runtime.load import load
from paceline.runtime.model import Model
from paceline.runtime.request import Defaults, Setting, check


def test_the_default_options_are_greedy_up_to_the_context_limit():
    request = check({})
    assert request.sampling.greedy
    assert (request.max_tokens, request.stop, request.raw) == (None, (), False)
    assert (str(request.drafter), request.probe) == ("auto", None)
    assert (request.policy, request.max_block) == ("auto", MAX_ROWS)


def test_every_option_reaches_the_request():
    sampling = {
        **{"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1},
        **{"presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {7: -1.0}, "seed": 11},
    }
    same = {
        **{"max_tokens": 5, "ignore_eos": True, "policy": "kelly", "max_block": 5, "raw": True},
        **{"min_tokens": 3, "logprobs": 2, "prompt_logprobs": True, "prediction": [4, 5]},
    }
    repetition = {"max_pattern_size": 9, "min_count": 3}
    named = {"drafter": "ngram:min=2", "probe": "suffix", "stop": ["a", "b"]}
    options: Any = {**sampling, **same, **named, "repetition_detection": repetition}
    request = check(options)
    assert {name: getattr(request.sampling, name) for name in sampling} == sampling
    assert {name: getattr(request, name) for name in same} == same
    assert (str(request.drafter), str(request.probe)) == ("ngram:min=2", "suffix")
    rules = request.rules([1, 2])
    assert rules.stopping == Stopping(5, frozenset(), ("a", "b"), 3, Repetition(9, 0, 3))
    assert check({}).rules([1, 2]).stopping.stop_token_ids == {1, 2}


def test_numpy_numbers_are_accepted():
    options: Any = {"max_tokens": np.int64(3), "temperature": np.float32(0.5), "seed": np.int32(4)}
    request = check(options)
    settings = {name: setting.value for name, setting in request.settings.items()}
    assert (request.max_tokens, request.sampling.seed) == (3, 4)
    assert json.loads(json.dumps(settings))["temperature"] == 0.5


def test_repetition_detection_is_off_by_default():
    for off in (False, None, {}, {"max_pattern_size": 0, "min_pattern_size": 0, "min_count": 0}):
        assert check({"repetition_detection": off}).repetition is None
    assert check({}).repetition is None
    assert check({"repetition_detection": True}).repetition == DEFAULT


@pytest.mark.parametrize(
    ("name", "near"),
    [
        *(("temprature", "temperature"), ("zzz", None)),
        *(("temp", "temperature"), ("n_predict", "max_tokens"), ("num_predict", "max_tokens")),
        *(("max_new_tokens", "max_tokens"), ("stop_sequences", "stop"), ("schema", "json_schema")),
    ],
)
def test_an_unknown_option_is_reported_with_the_closest_match(name: str, near: str | None):
    options: Any = {name: 1}
    hint = rf"; did you mean {near}\?" if near else ""
    with pytest.raises(InvalidRequest, match=f"unknown option '{name}'{hint}$"):
        check(options)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        *(("n_ctx", "cache_tokens"), ("num_ctx", "cache_tokens"), ("n_gpu_layers", "device")),
        *(("n_threads", "threads"), ("thread", "threads"), ("model_path", "name_or_path")),
        ("draft_model", "drafters"),
    ],
)
def test_an_unknown_load_setting_is_reported_with_the_closest_match(name: str, near: str):
    settings: Any = {name: 1}
    with pytest.raises(InvalidRequest, match=rf"'{name}'; did you mean {near}\?"):
        load("no model is looked for", **settings)


def test_help_lists_every_option_with_its_range():
    methods = (Model.generate, Model.stream, Model.as_completed, Model.agenerate, Model.astream)
    for method in (*methods, Conversation.send):
        about, _, listed = str(method.__doc__).partition("\n\nOptions, each a keyword:\n")
        assert about == cleandoc(about), "not indented as in the class"
        lines = dict(re.findall(r"^    (\w+): (.+)$", listed, re.MULTILINE))
        assert {*lines} == {*Options.__annotations__}
        for name, limits in RANGES.items():
            assert lines[name].removesuffix(", or None").endswith(f"; {limits}")


def test_all_invalid_options_are_reported_one_per_line():
    options: Any = {"temprature": 1, "top_k": "4", "raw": 1, "seed": -1}
    with pytest.raises(InvalidRequest) as caught:
        check(options)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(options)
    assert [name for name in options if sum(name in line for line in lines) != 1] == []


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_that_ignore_costs_get_a_shorter_block(policy: Any):
    assert check({"policy": policy}).max_block == (MAX_ROWS if policy == "auto" else 8)
    assert check({"policy": policy, "max_block": 3}).max_block == 3


def test_the_default_seed_is_random_each_time():
    drawn = {check({}).sampling.seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**64 for seed in drawn)
    assert check({"seed": 0}).sampling.seed == 0


def test_one_stop_string_equals_a_list_of_one():
    assert check({"stop": "end"}).stop == check({"stop": ["end"]}).stop == ("end",)


def test_the_first_layer_with_a_setting_wins():
    values = {"request": 0.1, "registry": 0.2, "model": 0.3, "fallback": 0.4}
    for named in product([True, False], repeat=4):
        said = {
            layer: {"temperature": values[layer]} if is_named else {}
            for layer, is_named in zip(values, named, strict=True)
        }
        options: Any = said["request"]
        request = check(options, Defaults(said["registry"], said["model"], said["fallback"]))
        first = next((layer for layer in values if said[layer]), None)
        expected = 0.0 if first is None else values[first]
        assert request.settings["temperature"] == Setting(expected, first or "fallback"), named
        assert request.sampling.temperature == expected


def test_an_explicit_unlimited_length_overrides_the_models_limit():
    under = Defaults(model={"max_tokens": 9}, fallback={"max_tokens": 5})
    assert check({}, under).max_tokens == 9
    assert check({"max_tokens": None}, under).max_tokens is None
    assert check({"max_tokens": None}, under).settings["max_tokens"] == Setting(None, "request")


def test_generation_config_none_ignores_registry_and_model_but_not_the_fallback():
    under = Defaults({"temperature": 0.2}, {"top_k": 20}, {"max_tokens": 5})
    found = check({"generation_config": "none"}, under)
    assert found.sampling.greedy
    assert (found.sampling.top_k, found.max_tokens) == (0, 5)
    assert {each.source for each in found.settings.values()} == {"fallback"}
    assert check({"generation_config": "auto"}, under).sampling.temperature == 0.2
