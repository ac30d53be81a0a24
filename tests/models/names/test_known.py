"""Short names of models."""

import pytest

from paceline.models.names import REGISTRY, hub_name_of, is_short, known, known_models
from paceline.models.names.hub_names import HubName, is_hub_name, is_model, parse_hub_name


def test_about_a_dozen_models_have_a_short_name_and_what_is_known_of_each():
    models = known_models()
    assert len(models) >= 12
    assert not models.keys() & REGISTRY.keys()
    for name, model in models.items():
        assert "/" not in name
        assert ":" not in name
        assert is_hub_name(model.repository)
        assert is_model(model.file)
        assert parse_hub_name(f"{model.repository}/{model.file}") is not None
        assert model.license
        assert model.bytes > 10**8
        assert model.revision is None or len(model.revision) == 40


def test_a_short_name_stands_for_a_file_at_a_commit():
    name, model = next(iter(known_models().items()))
    assert known(name) == HubName(model.repository, file=model.file, revision=model.revision)
    assert known(f"{name}:Q8_0") == HubName(model.repository, tag="Q8_0")
    assert is_short(name)
    assert hub_name_of(name) == known(name)


@pytest.mark.parametrize("name", ["", ":", "qwen3", "qwen3-0.6b:", "qwen3-0.6b:a:b", "Q4_K_M"])
def test_other_names_are_not_short_names(name: str):
    result = known(name)
    assert result is None or result == known_models()["qwen3-0.6b"].hub_name
