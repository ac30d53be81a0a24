"""JSON files of checkpoints and GGUF metadata: settings, stop tokens, lengths and templates."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, processors

from paceline.errors import ModelError
from paceline.models import ModelFiles, check_models, resolve, settings_of
from paceline.models.checkpoints import read_facts, read_generation_config, read_template
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


def test_every_generation_config_sampling_key_is_translated(tmp_path: Path):
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
def test_do_sample_turns_sampling_on_and_off(
    config: dict[str, Any], temperature: float | None, tmp_path: Path
):
    assert said(tmp_path, **config).get("temperature") == temperature


def test_null_and_other_disabling_values_are_recognized(tmp_path: Path):
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
def test_an_invalid_sampling_setting_is_reported_with_its_file(
    config: dict[str, Any], exported: Path
):
    path = exported / GENERATION
    with raises(ModelError, *config, path, "--generation-config none", lines=3) as caught:
        said(exported, **config, top_p=0.9)
    assert "top_p: " not in str(caught.value)
    said(exported, temperature=-1)
    with raises(ModelError, "temperature", "--generation-config none"):
        defaults_of(open_checkpoint(exported, "mine"))


# -- GGUF ------------------------------------------------------------------------------------------


def test_gguf_sampling_keys_are_read(tmp_path: Path, tiny_files: ModelFiles):
    path = write_tiny(tmp_path / "m.gguf", fields=SAMPLING)
    assert resolve(str(path), tmp_path).settings == SAID
    assert resolve(str(path), tmp_path).settings == SAID  # from the cache
    assert check_models(tmp_path) == 1
    assert tiny_files.settings == {}, "a file without settings has none"


def test_a_repetition_penalty_over_zero_tokens_and_odd_values_are_ignored():
    assert sampling_settings({**SAMPLING, "general.sampling.penalty_last_n": 0}).keys() == {
        *SAID.keys() - {"repetition_penalty"}
    }
    assert (
        sampling_settings({"general.sampling.temp": "warm", "general.sampling.top_k": True}) == {}
    )
    assert sampling_settings({"general.sampling.mirostat": 2, "general.name": "x"}) == {}


# -- the registry ----------------------------------------------------------------------------------


def test_the_registry_has_default_model_settings_for_every_format():
    settings = settings_of(DEFAULT_MODEL)
    assert settings == REGISTRY[DEFAULT_MODEL].settings == settings_of(f"{DEFAULT_MODEL}@coreml")
    assert (settings["temperature"], settings["top_p"]) == (0.2, 0.9)
    assert settings_of("/some/folder") == settings_of("owner/name") == {}


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A folder with the JSON files given by name, and a tokenizer with five tokens."""

    def write(*, begins: bool = False, **files: dict[str, Any]) -> Path:
        for name, value in {"config": {"max_position_embeddings": 64}, **files}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(value))
        tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
        special = [AddedToken(t, special=True) for t in ("<s>", "</s>", "<|im_end|>")]
        tokenizer.add_special_tokens(special)
        if begins:
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", 2)]
            )
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    return write


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions", "seq_length"])
def test_the_context_length_is_found_under_each_name_and_in_the_text_config(key: str, write: Write):
    assert read_facts(write(config={key: 99})).context_length == 99
    inner = {key: 7, "eos_token_id": 1}
    facts = read_facts(write(config={"max_position_embeddings": 9, "text_config": inner}))
    assert facts.context_length == 7
    assert 1 in facts.stop_token_ids
    with raises(ModelError, "context"):
        read_facts(write(config={key: "many"}))


def test_a_response_ends_at_any_stop_token_in_any_config_file(write: Write):
    facts = read_facts(
        write(
            config={"max_position_embeddings": 64, "eos_token_id": 0},
            generation_config={"eos_token_id": [1, 17]},
            tokenizer_config={"eos_token": {"content": "</s>"}},
        )
    )
    assert facts.stop_token_ids == (0, 1, 3, 4, 17), "4 by its usual name"
    assert facts.eos_token == "</s>"
    nonsense = {"max_position_embeddings": 64, "eos_token_id": "2", "bos_token_id": True}
    facts = read_facts(write(config=nonsense, generation_config={}, tokenizer_config={}))
    assert (facts.stop_token_ids, facts.bos_token_id) == ((3, 4), None)


@pytest.mark.parametrize(
    ("begins", "asked"), [(True, None), (False, None), (True, False), (False, True)]
)
def test_the_config_or_else_the_tokenizer_decides_about_the_bos_token(
    begins: bool, asked: bool | None, write: Write
):
    words: dict[str, Any] = {"bos_token": "<s>"}
    if asked is not None:
        words["add_bos_token"] = asked
    facts = read_facts(write(begins=begins, tokenizer_config=words))
    assert facts.bos_token_id == 2
    assert facts.add_bos == (begins if asked is None else asked)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"chat_template": "T"}},
        {"chat_template": {"chat_template": "T"}, "tokenizer_config": {"chat_template": "other"}},
        {
            "tokenizer_config": {
                "chat_template": [
                    {"name": "tools", "template": "no"},
                    "nonsense",
                    {"name": "default", "template": "T"},
                ]
            }
        },
    ],
)
def test_the_chat_template_is_found_in_every_location(files: Any, write: Write):
    folder = write(**files)
    assert read_template(folder) == "T"
    (folder / "chat_template.jinja").write_text("first")
    assert read_template(folder) == "first"
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe\xff")
    with raises(ModelError, "chat_template.jinja"):
        read_template(folder)


def test_a_missing_template_is_allowed(write: Write):
    assert read_template(write(tokenizer_config={"chat_template": 3})) is None
