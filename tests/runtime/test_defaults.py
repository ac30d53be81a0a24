"""Settings in layers: request, registry, model, fallback; each decides on its own."""

from itertools import product
from typing import Any

from paceline.runtime.request import Defaults, Setting, check


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
