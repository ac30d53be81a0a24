"""Grammars with special tokens, such as tags of tool calls."""

import json
from pathlib import Path

import pytest
from gguf import TokenType

from paceline.constraints.grammar import Grammars
from paceline.decoding.sampling import Sampling
from paceline.decoding.text import showing
from paceline.decoding.types import FinishReason
from paceline.engines.base import Engine
from paceline.models import Tokenizer
from paceline.models.gguf.tokenizer import build_tokenizer
from support.driver import answer
from support.grammars import (
    COLUMNS,
    FUNCTIONS,
    STOPS,
    WEATHER,
    Unforced,
    allowed,
    follows,
    settings_for,
)
from support.tiny import END, START, tokenizer_fields

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def marked_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny vocabulary with tokens for tool and reasoning tags, like Qwen's models."""
    fields = tokenizer_fields("qwen2")
    tags = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    fields["tokenizer.ggml.tokens"][-4:] = tags
    fields["tokenizer.ggml.token_type"][-4:] = [TokenType.USER_DEFINED] * 4
    path = tmp_path_factory.mktemp("marked") / "tokenizer.json"
    path.write_text(build_tokenizer(path, fields), encoding="utf-8")
    return path


@pytest.mark.parametrize("choice", ["auto", "required", "weather"])
def test_tags_with_their_own_tokens_are_generated_as_these_tokens(choice: str, marked_path: Path):
    tokenizer = Tokenizer(marked_path)
    grammars = Grammars(marked_path, vocab_size=COLUMNS, stop_token_ids=STOPS)
    tokens = tokenizer.encode(f"{WEATHER}\n{WEATHER}", special=True)
    mark = tokenizer.token_id("<tool_call>")
    assert tokens.count(mark) == 2
    assert follows(grammars.tools(FUNCTIONS, choice), tokens) == len(tokens) + 1
    assert follows(grammars.tools(FUNCTIONS, choice, parallel=False), tokens) < len(tokens)
    assert (tokenizer.encode("\n")[0] in allowed(grammars.tools(FUNCTIONS, choice))) is (
        choice == "auto"
    )


def test_free_text_allows_every_token_that_does_not_start_a_call(marked_path: Path):
    tokenizer = Tokenizer(marked_path)
    grammars = Grammars(marked_path, vocab_size=COLUMNS, stop_token_ids=STOPS)
    text = f"<think>the user</think>and {START}then {WEATHER} <think> or </think>"
    tokens = tokenizer.encode(text, special=True)
    assert follows(grammars.tools(FUNCTIONS), tokens) == len(tokens) + 1
    after = grammars.tools(FUNCTIONS)
    mark = tokenizer.token_id("<tool_call>")
    assert mark is not None
    after.push(mark)
    assert allowed(after) == set(tokenizer.encode("\n"))
    strings = allowed(grammars.regex("(.|\n)*"))
    assert not strings & set(tokenizer.encode(f"<think>{START}", special=True))


def test_special_token_tags_are_generated_as_these_tokens(marked_path: Path, tmp_path: Path):
    parsed = json.loads(marked_path.read_text(encoding="utf-8"))
    for token in parsed["added_tokens"]:
        token["special"] = True
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(parsed), encoding="utf-8")
    grammars = Grammars(path, vocab_size=COLUMNS, stop_token_ids=STOPS)
    tokenizer = Tokenizer(path)
    tokens = tokenizer.encode(WEATHER, special=True)
    mark = tokenizer.token_id("<tool_call>")
    assert mark in tokens
    for choice in ("auto", "required"):
        assert follows(grammars.tools(FUNCTIONS, choice), tokens) == len(tokens) + 1
    shown = {number: name for name, number in tokenizer.special_tokens().items()}
    assert showing(tokenizer.decode, shown)(tokens) == WEATHER


def test_free_text_masks_only_invalid_bytes_and_closing_tags(marked_path: Path):
    tokenizer = Tokenizer(marked_path)
    grammars = Grammars(marked_path, vocab_size=COLUMNS, stop_token_ids=STOPS)
    barred = set(range(COLUMNS)) - allowed(grammars.tools(FUNCTIONS))
    # Bytes that begin no character, and the mark that ends a call.
    assert {tokenizer.decode([token]) for token in barred} == {"\ufffd", "</tool_call>"}


@pytest.mark.parametrize(
    "text", ["<think>", f"a{END}b", f"<{START}>", "e\u0301 <think", "</think>\n"]
)
def test_text_equal_to_a_special_token_is_plain_text(text: str, marked_path: Path, engine: Engine):
    tokenizer = Tokenizer(marked_path)
    grammars = Grammars(marked_path, vocab_size=COLUMNS, stop_token_ids=STOPS)
    schema = {"const": {"the user": text}}
    result = answer(engine, [5], **settings_for(grammars.json_schema(schema), Sampling()))
    assert result.finish_reason is FinishReason.STOP
    assert json.loads(tokenizer.decode(result.tokens)) == schema["const"]
    unforced = Unforced(grammars.json_schema(schema))
    assert answer(engine, [5], **settings_for(unforced, Sampling())) == result


def test_byte_fallback_tokenizers_are_supported(tmp_path: Path, engine: Engine):
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Backend

    pieces = ["<s>", "<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*'▁{}":,etho', "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    added = [AddedToken(piece, special=True, normalized=False) for piece in pieces[:3]]
    backend.add_special_tokens(added)
    backend.save(str(tmp_path / "tokenizer.json"))

    grammars = Grammars(tmp_path / "tokenizer.json", vocab_size=COLUMNS, stop_token_ids=STOPS)
    schema = {"const": {"the": "é of the </s>"}}
    result = answer(engine, [5], **settings_for(grammars.json_schema(schema), Sampling()))
    assert (
        json.loads(Tokenizer(tmp_path / "tokenizer.json").decode(result.tokens)) == schema["const"]
    )
    assert vocab["▁the"] in result.tokens
