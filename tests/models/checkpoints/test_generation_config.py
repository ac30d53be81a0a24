"""The sampling settings that a model comes with: from files of both kinds, kept in the cache."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelError
from paceline.models import ModelFiles, check_models, resolve, settings_of
from paceline.models.checkpoints import read_generation_config
from paceline.models.files import open_checkpoint
from paceline.models.gguf import sampling_settings
from paceline.models.manifest import GENERATION
from paceline.models.names import DEFAULT_MODEL, REGISTRY
from paceline.runtime.request import defaults_of
from support.errors import raises
from support.tiny import write_tiny

# As llama.cpp's converter writes them; a GGUF file has f32.
SAMPLING: dict[str, Any] = {
    "general.sampling.temp": 0.6,
    "general.sampling.top_k": 20,
    "general.sampling.top_p": 0.95,
    "general.sampling.min_p": 0.05,
    "general.sampling.penalty_repeat": 1.05,
}
SAID = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}


def said(folder: Path, **config: Any) -> Any:
    (folder / GENERATION).write_text(json.dumps(config), encoding="utf-8")
    return read_generation_config(folder)


def test_every_sampling_key_of_a_generation_config_has_our_name(tmp_path: Path):
    assert read_generation_config(tmp_path) == {}
    config = {**SAID, "do_sample": True, "max_new_tokens": 512}
    assert said(tmp_path, **config, eos_token_id=[1, 2], transformers_version="5.0") == {
        **SAID,
        "max_tokens": 512,
    }


@pytest.mark.parametrize(
    ("config", "temperature"),
    [
        ({}, None),
        ({"temperature": 0.7}, 0.7),  # as vLLM and llama.cpp read it
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": None, "temperature": None}, None),
    ],
)
def test_do_sample_decides_whether_decoding_is_greedy(
    config: dict[str, Any], temperature: float | None, tmp_path: Path
):
    assert said(tmp_path, **config).get("temperature") == temperature


def test_null_and_the_other_ways_to_say_off_are_understood(tmp_path: Path):
    assert said(tmp_path, top_k=-1, top_p=None, min_p=None, repetition_penalty=1) == {
        "top_k": 0,
        "repetition_penalty": 1.0,
    }
    assert said(tmp_path, top_k=20.0, temperature=1) == {"top_k": 20, "temperature": 1.0}


@pytest.mark.parametrize(
    "config",
    [
        {"temperature": True},
        {"top_k": 2.5, "temperature": "hot"},
        {"temperature": 1e300},
        {"temperature": float("nan")},
    ],
    ids=str,
)
def test_a_sampling_setting_that_is_no_number_is_named_with_its_file(
    config: dict[str, Any], tmp_path: Path
):
    path = tmp_path / GENERATION
    with raises(ModelError, *config, path, "--generation-config none", lines=3) as caught:
        said(tmp_path, **config, top_p=0.9)
    assert "top_p: " not in str(caught.value)


def test_a_sampling_setting_out_of_range_is_an_error_of_the_model(exported: Path):
    said(exported, temperature=-1)
    with raises(ModelError, "temperature", "--generation-config none"):
        defaults_of(open_checkpoint(exported, "mine"))


# -- GGUF ------------------------------------------------------------------------------------------


def test_the_sampling_keys_of_a_gguf_file_are_kept(tmp_path: Path, tiny_files: ModelFiles):
    path = write_tiny(tmp_path / "m.gguf", fields=SAMPLING)
    assert resolve(str(path), tmp_path).settings == SAID
    assert resolve(str(path), tmp_path).settings == SAID  # from the cache
    assert check_models(tmp_path) == 1
    assert tiny_files.settings == {}, "a file that says nothing has none"


def test_a_repetition_penalty_over_no_tokens_and_odd_values_are_left_out():
    assert sampling_settings({**SAMPLING, "general.sampling.penalty_last_n": 0}).keys() == {
        *SAID.keys() - {"repetition_penalty"}
    }
    assert (
        sampling_settings({"general.sampling.temp": "warm", "general.sampling.top_k": True}) == {}
    )
    assert sampling_settings({"general.sampling.mirostat": 2, "general.name": "x"}) == {}


# -- the registry ----------------------------------------------------------------------------------


def test_the_registry_has_settings_for_the_default_model_in_every_form():
    settings = settings_of(DEFAULT_MODEL)
    assert settings == REGISTRY[DEFAULT_MODEL].settings == settings_of(f"{DEFAULT_MODEL}@coreml")
    assert (settings["temperature"], settings["top_p"]) == (0.2, 0.9)
    assert settings_of("/some/folder") == settings_of("owner/name") == {}
