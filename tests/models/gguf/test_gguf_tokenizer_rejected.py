"""Unsupported tokenizers in GGUF metadata: their errors, and the fixes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelError
from paceline.models.gguf.tokenizer import build_tokenizer
from paceline.models.gguf.vocabulary import vocabulary_fault
from support.errors import raises
from support.tokenizer_lines import byte_pairs, sentence_piece


def refusal(fields: Mapping[str, Any], path: Path = Path("a.gguf")) -> str:
    with raises(ModelError) as caught:
        build_tokenizer(path, fields)
    return str(caught.value)


BYTES = {**byte_pairs(9), "tokenizer.ggml.pre": "gpt-2"}
SPACE_FIRST = "tokenizer.ggml.add_space_prefix"


def scored(*scores: float) -> Mapping[str, Any]:
    """Pieces of text with these scores, in turn."""
    fields = sentence_piece(words="ab")
    count = len(fields["tokenizer.ggml.tokens"])
    return fields | {"tokenizer.ggml.scores": [*scores * count][:count]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({**BYTES, "tokenizer.ggml.pre": "of-tomorrow"}, "gpt2/of-tomorrow"),
        ({**sentence_piece(), "tokenizer.ggml.model": "t5"}, "t5/default"),
        (scored(-1000.0), "all equal"),
        (scored(-1.5, -2.25, -3.125), "Unigram"),
        (scored(float("nan"), -1.0), "without scores"),
        (sentence_piece(remove_extra_whitespaces=True), "remove_extra_whitespaces"),
        (sentence_piece(add_eos_token=True), "add_eos_token"),
        ({**BYTES, SPACE_FIRST: True}, "add_space_prefix"),
    ],
)
def test_a_tokenizer_that_would_give_different_ids_is_rejected(
    fields: Mapping[str, Any], words: str
):
    assert words in refusal(fields)


def test_disabled_tokenizer_options_are_accepted():
    for off in ({"remove_extra_whitespaces": False}, {"add_eos_token": False}):
        build_tokenizer(Path("a.gguf"), sentence_piece(**off))
    build_tokenizer(Path("a.gguf"), {**BYTES, SPACE_FIRST: False})


def test_a_tokenizer_json_next_to_the_file_is_used_if_its_tokens_match(tmp_path: Path):
    fields = {**byte_pairs(9), "tokenizer.ggml.pre": "qwen2"}
    text = build_tokenizer(tmp_path / "a.gguf", fields)
    unread = {**fields, "tokenizer.ggml.pre": "of-tomorrow"}
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    assert build_tokenizer(tmp_path / "a.gguf", unread) == text
    unread["tokenizer.ggml.tokens"] = ["other", *unread["tokenizer.ggml.tokens"][1:]]
    message = refusal(unread, tmp_path / "a.gguf")
    assert "tokenizer.json does not fit" in message
    assert "its token 0" in message


def test_a_file_without_a_pre_tokenizer_uses_the_tokenizer_json_next_to_it(tmp_path: Path):
    fields = byte_pairs(9)
    alone = build_tokenizer(tmp_path / "a.gguf", fields)
    assert alone == build_tokenizer(Path("a.gguf"), {**fields, "tokenizer.ggml.pre": "default"})
    text = build_tokenizer(Path("a.gguf"), {**fields, "tokenizer.ggml.pre": "qwen2"})
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    assert build_tokenizer(tmp_path / "a.gguf", fields) == text


@pytest.mark.parametrize("content", [b"{}", b"\xff"])
def test_an_invalid_tokenizer_json_does_not_replace_an_unknown_pre_tokenizer(
    content: bytes, tmp_path: Path
):
    (tmp_path / "tokenizer.json").write_bytes(content)
    fields = {**byte_pairs(9), "tokenizer.ggml.pre": "of-tomorrow"}
    message = refusal(fields, tmp_path / "a.gguf")
    assert "of-tomorrow" in message
    assert "put the tokenizer.json of the original model next to the file" in message


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"tokens": ["a"] * (2**20 + 1)}, "tokens"),
        ({"tokens": ["a" * 2**24, "b"], "token_type": [1, 1], "scores": []}, "characters"),
        ({"merges": ["a b"] * (2**22 + 1)}, "merges"),
        ({"tokens": ["a", "b", "a"], "token_type": [1] * 3, "scores": []}, "'a' occurs 2 times"),
        ({"scores": [1.0]}, "1 scores"),
        ({"token_type": [1]}, "1 token types"),
        ({"merges": ["a bb"]}, "does not join"),
    ],
)
def test_vocabulary_errors_are_named(change: dict[str, Any], fault: str):
    fields = sentence_piece() | {f"tokenizer.ggml.{name}": v for name, v in change.items()}
    assert fault in (vocabulary_fault(fields) or "")
