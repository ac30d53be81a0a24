"""Published vocabularies, compared with tokens recorded by llama.cpp and with tokenizer.json."""

import json
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from paceline.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from paceline.models.gguf.tokenizer import build_tokenizer, make_tokenizer
from paceline.storage.gguf_file import read_gguf
from support.errors import raises
from support.published import llama_cpp_models, npm_tokenizer
from support.tokenizer_lines import CONTROL, NORMAL, SPACE, UNUSED, USER_DEFINED, lines

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

RECORDED = (
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe"),
    *("llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
"""Vocabularies with texts that llama.cpp's tests read."""
UNREAD = {"bert-bge": "bert", "nomic-bert-moe": "remove_extra_whitespaces"}
"""Vocabularies that are refused -> a part of the reason."""
WITHOUT_TEXTS = ("aquila", "baichuan", "gpt-neox")
BETWEEN_TEXTS = "\n__ggml_vocab_test__\n"
TEXTS = 2000


def vocabulary(name: str) -> tuple[Path, Mapping[str, Any]]:
    path = llama_cpp_models() / f"ggml-vocab-{name}.gguf"
    return path, read_gguf(path).fields


def test_every_published_vocabulary_is_tested():
    names = {path.name for path in llama_cpp_models().glob("*.gguf")}
    known = (*RECORDED, *UNREAD, *WITHOUT_TEXTS)
    assert names == {f"ggml-vocab-{name}.gguf" for name in known}


@pytest.mark.parametrize("name", RECORDED)
def test_a_published_vocabulary_gives_the_recorded_tokens(name: str):
    path, fields = vocabulary(name)
    tokenizer = make_tokenizer(fields)
    texts = Path(f"{path}.inp").read_text("utf-8").split(BETWEEN_TEXTS)
    recorded = Path(f"{path}.out").read_text("utf-8").split("\n")
    assert "".join(recorded[len(texts) :]) == ""
    different = [
        text
        for text, tokens in zip(texts, recorded, strict=False)
        if tokenizer.encode(text, add_special_tokens=False).ids != [*map(int, tokens.split())]
    ]
    pre = PRE_TOKENIZERS.get(fields.get("tokenizer.ggml.pre", ""))
    if pre is not None and pre.nfc:
        # llama.cpp normalizes nothing, and the models' own tokenizers compose first: the published
        # tokenizer.json of Qwen 3 (below) and transformers' class for Qwen 3.5 have NFC.
        texts = [text for text in different if not unicodedata.is_normalized("NFC", text)]
        assert len(texts) == (3 if name == "qwen35" else 0)
        different = [text for text in different if text not in texts]
    assert different == []


@pytest.mark.parametrize("name", UNREAD)
def test_an_unsupported_published_vocabulary_is_rejected_by_its_type(name: str):
    from paceline.errors import ModelError

    with raises(ModelError, UNREAD[name]):
        build_tokenizer(*vocabulary(name))


@pytest.mark.parametrize(
    ("published", "vocabulary_of", "pre"),
    [
        ("qwen3", "qwen2", ""),
        ("llama3_1", "llama-bpe", ""),
        ("deepseek_v3", "", "deepseek-v3"),
        ("gptoss", "", "gpt-4o"),
    ],
)
def test_gguf_metadata_tokenizes_like_the_published_tokenizer(
    published: str, vocabulary_of: str, pre: str
):
    """Use files made by conversion scripts, or metadata in their format."""
    path = npm_tokenizer(published) / "tokenizer.json"
    content = path.read_text("utf-8")
    fields = vocabulary(vocabulary_of)[1] if vocabulary_of else converted(json.loads(content), pre)
    theirs = tokenizers.Tokenizer.from_str(content)
    ours = make_tokenizer(fields)
    theirs.encode_special_tokens = ours.encode_special_tokens = True
    # The space marker in a text itself: Gemma's file joins it with adjacent spaces, llama.cpp not.
    texts = [text for text in lines(TEXTS) if SPACE not in text]
    pairs = zip(*(_ids(item, texts) for item in (theirs, ours)), strict=True)
    different = [text for text, (a, b) in zip(texts, pairs, strict=True) if a != b]
    assert different == []


def _ids(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def converted(published: Mapping[str, Any], pre: str) -> dict[str, Any]:
    """Metadata of a GGUF file from the content of a tokenizer.json."""
    ids: dict[str, int] = dict(published["model"]["vocab"])
    kinds = {}
    for token in published["added_tokens"]:
        ids[token["content"]] = token["id"]
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    names = {place: name for name, place in ids.items()}
    count = max(names) + 1
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in published["model"]["merges"]
    ]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [names.get(place, f"[PAD{place}]") for place in range(count)],
        "tokenizer.ggml.token_type": [
            kinds.get(place, NORMAL) if place in names else UNUSED for place in range(count)
        ],
        "tokenizer.ggml.merges": merges,
    }
