"""Tokens as bytes and names, in both kinds of vocabulary."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from paceline.models.files import ModelFiles
from paceline.models.templates.tokenizer import TokenBytes
from paceline.models.templates.tokenizer import Tokenizer as Ours


@pytest.fixture
def sentences(tmp_path: Path) -> TokenBytes:
    """A vocabulary with SentencePiece's marks and bytes."""
    known = {"<unk>": 0, "\u2581the": 1, "é": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    tokenizer = Tokenizer(models.BPE(known, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return TokenBytes(Ours(path))


def test_marks_are_spaces_and_bytes_are_bytes(sentences: TokenBytes):
    assert sentences.bytes_of(1) == b" the"
    assert sentences.bytes_of(2) == "é".encode()
    assert sentences.bytes_of(3 + 0xF0) == b"\xf0"
    assert sentences.name(3 + 0xF0) == "bytes:\\xf0"
    assert sentences.name(3 + ord("a")) == "a"
    assert sentences.text([259, 1, 259]) == "<s> the<s>"


def test_letters_of_a_byte_level_vocabulary_are_bytes(tiny_files: ModelFiles):
    tokenizer = tiny_files.tokenizer
    words = TokenBytes(tokenizer)
    text = "né 😀\n the"
    assert b"".join(map(words.bytes_of, tokenizer.encode(text))) == text.encode()
    assert words.name(2) == "<|im_end|>"
    assert words.bytes_of(10**6) == b""


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()]),
    ],
)
def test_text_that_follows_keeps_its_first_space(decoder: Any, tmp_path: Path):
    backend = Tokenizer(models.BPE({"\u2581": 0, "\u2581the": 1, "e": 2}, []))
    backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Ours(tmp_path / "tokenizer.json")
    assert tokenizer.continuation([1, 1]) == " the the"
    assert tokenizer.continuation([2, 0]) == "e "
    assert tokenizer.continuation([]) == ""
