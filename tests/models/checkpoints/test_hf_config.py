import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, processors

from paceline.errors import ModelError
from paceline.models.checkpoints import read_facts, read_template
from support.errors import raises

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
def test_the_context_length_is_found_under_each_of_its_names(key: str, write: Write):
    assert read_facts(write(config={key: 99})).context_length == 99


def test_the_text_half_of_a_config_counts(write: Write):
    inner = {"max_position_embeddings": 7, "eos_token_id": 1}
    facts = read_facts(write(config={"max_position_embeddings": 9, "text_config": inner}))
    assert facts.context_length == 7
    assert 1 in facts.stop_token_ids


def test_an_answer_ends_with_any_end_that_any_file_names(write: Write):
    facts = read_facts(
        write(
            config={"max_position_embeddings": 64, "eos_token_id": 0},
            generation_config={"eos_token_id": [1, 17]},
            tokenizer_config={"eos_token": {"content": "</s>"}},
        )
    )
    assert facts.stop_token_ids == (0, 1, 3, 4, 17), "4 by its usual name"
    assert facts.eos_token == "</s>"


def test_nonsense_where_ids_should_be_counts_as_nothing(write: Write):
    facts = read_facts(
        write(config={"max_position_embeddings": 64, "eos_token_id": "2", "bos_token_id": True})
    )
    assert facts.stop_token_ids == (3, 4)
    assert facts.bos_token_id is None


@pytest.mark.parametrize(
    ("begins", "asked"), [(True, None), (False, None), (True, False), (False, True)]
)
def test_the_beginning_token_is_put_first_if_the_config_says_so_or_else_the_tokenizer(
    begins: bool, asked: bool | None, write: Write
):
    words: dict[str, Any] = {"bos_token": "<s>"}
    if asked is not None:
        words["add_bos_token"] = asked
    facts = read_facts(write(begins=begins, tokenizer_config=words))
    assert facts.bos_token_id == 2
    assert facts.add_bos == (begins if asked is None else asked)


def test_a_config_without_a_context_length_is_refused(write: Write):
    with raises(ModelError, "context"):
        read_facts(write(config={"max_position_embeddings": "many"}))


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
def test_the_chat_template_is_found_in_each_of_its_places(files: Any, write: Write):
    folder = write(**files)
    assert read_template(folder) == "T"
    (folder / "chat_template.jinja").write_text("first")
    assert read_template(folder) == "first"


def test_no_template_is_no_fault_and_one_that_is_no_text_is_named(write: Write):
    folder = write(tokenizer_config={"chat_template": 3})
    assert read_template(folder) is None
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe\xff")
    with raises(ModelError, "chat_template.jinja"):
        read_template(folder)
