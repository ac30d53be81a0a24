"""Tokenizers from GGUF metadata match those of llama.cpp and SentencePiece."""

import ctypes
import hashlib
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from paceline.decoding.text import TextStream
from paceline.engines.llamacpp.llama_h import load_library
from paceline.models.gguf import write_derived
from paceline.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from paceline.models.gguf.tokenizer import build_tokenizer
from paceline.models.gguf.vocabulary import special_tokens, token_facts
from paceline.models.templates.tokenizer import TokenBytes, Tokenizer
from paceline.storage.gguf_file import read_gguf
from support.tiny import byte_letters
from support.tokenizer_lines import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    USER_DEFINED,
    byte_pairs,
    lines,
    sentence_piece,
    write_vocabulary,
)

DATA = Path(__file__).parents[2] / "data" / "gguf_tokenizers.json"


def pieces(fields: Mapping[str, Any], text: str) -> list[str]:
    """Tokens of a whole prompt, by name."""
    backend = tokenizers.Tokenizer.from_str(build_tokenizer(Path("a.gguf"), fields))
    return [fields["tokenizer.ggml.tokens"][i] for i in backend.encode(text).ids]


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    def opened(fields: Mapping[str, Any]) -> Tokenizer:
        path = tmp_path / "tokenizer.json"
        path.write_text(build_tokenizer(path, fields), encoding="utf-8")
        return Tokenizer(path)

    return opened


PIECES: Any = json.loads(DATA.read_text(encoding="utf-8"))["sentencepiece"]
"""Metadata and ids of two small models that SentencePiece was trained for: with a space before the
text, and without one and with line breaks and runs of spaces as tokens of their own, as Gemma's."""
MEANT = {**dict.fromkeys(("tekken", "gpt-4o", "llama4", "kanana2", "minimax-m2"), 12)}
MEANT |= {"deepseek-llm": 5, "deepseek-coder": 3}
"""Lines out of 100 whose ids differ between ours and llama.cpp's: see `pre_tokenizers.py`."""


def vocabulary_for(pre: str, pairs: int) -> dict[str, Any]:
    """Metadata for a pre-tokenizer."""
    if not PRE_TOKENIZERS[pre].marks_spaces:
        return {**byte_pairs(pairs), "tokenizer.ggml.pre": pre}
    pieces = PIECES[1]["fields"]
    known = dict(zip(pieces["tokenizer.ggml.tokens"], pieces["tokenizer.ggml.scores"], strict=True))
    merges = [
        (-score, f"{text[:cut]} {text[cut:]}")
        for text, score in known.items()
        for cut in range(1, len(text))
        if {text[:cut], text[cut:]} <= known.keys() and " " not in text
    ]
    more = {"model": "gpt2", "pre": pre, "merges": [merge for _, merge in sorted(merges)]}
    more |= {"bos_token_id": 1, "eos_token_id": 2}
    return {**pieces, **{f"tokenizer.ggml.{name}": value for name, value in more.items()}}


def llama_cpp(fields: Mapping[str, Any], path: Path) -> Callable[[str], list[int]]:
    """Return llama.cpp's own tokens of a literal text."""
    api = load_library(None)
    of_model, encode = api._lib.llama_model_get_vocab, api._lib.llama_tokenize
    of_model.restype, of_model.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    encode.argtypes = [
        *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32),
        *(ctypes.c_bool, ctypes.c_bool),
    ]
    params = api.llama_model_default_params()
    params.vocab_only = True
    model = api.llama_model_load_from_file(bytes(write_vocabulary(path, fields)), params)
    vocabulary, ids = of_model(model), (ctypes.c_int32 * 4096)()

    def encoded(text: str) -> list[int]:
        data = text.encode()
        return list(ids[: encode(vocabulary, data, len(data), ids, len(ids), False, False)])

    return encoded


def literal(fields: Mapping[str, Any]) -> Callable[[str], list[int]]:
    """Return our tokens of the same text."""
    backend = tokenizers.Tokenizer.from_str(build_tokenizer(Path("a.gguf"), fields))
    backend.encode_special_tokens = True
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)


def different(pre: str, count: int, pairs: int, folder: Path) -> list[str]:
    """Lines whose ids are not llama.cpp's."""
    fields = vocabulary_for(pre, pairs)
    ours, theirs = literal(fields), llama_cpp(fields, folder / "m.gguf")
    texts = lines(count)
    if PRE_TOKENIZERS[pre].nfc:  # llama.cpp normalizes nothing
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    return [text for text in texts if ours(text) != theirs(text)]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_each_pre_tokenizer_splits_like_llama_cpp(pre: str, tmp_path: Path):
    texts = different(pre, 100, 6000, tmp_path)
    assert len(texts) == MEANT.get(pre, 0), texts[:1]


@pytest.mark.soak
@pytest.mark.parametrize("pre", {value: name for name, value in PRE_TOKENIZERS.items()}.values())
def test_each_pre_tokenizer_splits_many_lines_like_llama_cpp(pre: str, tmp_path: Path):
    texts = different(pre, 5000, 12_000, tmp_path)
    # Contractions ignore case, as in the models' own files: this is also an s.
    assert pre in MEANT or [text for text in texts if "'\u017f" not in text] == []


@pytest.mark.parametrize("recorded", PIECES)
def test_a_trained_sentencepiece_model_tokenizes_like_llama_cpp(recorded: Any, tmp_path: Path):
    fields = recorded["fields"]
    ours, theirs = literal(fields), llama_cpp(fields, tmp_path / "m.gguf")
    texts = lines(len(recorded["ids"]) // 8)
    results = [ours(text) for text in texts]
    assert "".join(map(digest, results)) == recorded["ids"]
    assert results == [theirs(text) for text in texts]
    backend = tokenizers.Tokenizer.from_str(build_tokenizer(Path("a.gguf"), fields))
    assert [backend.decode(ids) for ids in results] == [text.replace(SPACE, " ") for text in texts]


def digest(ids: Sequence[int]) -> str:
    """Eight hexadecimal digits."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:8]


def test_pairs_merge_by_result_score_leftmost_first():
    fields = sentence_piece(words="ab bc abc cc")
    assert pieces(fields, "abc") == [SPACE, "abc"]
    assert pieces(fields, "bccc") == [SPACE, "bc", "cc"]
    assert pieces(fields, "ccc") == [SPACE, "cc", "c"]
    fields = sentence_piece(words="aa aaaa aaa", add_space_prefix=False)
    assert pieces(fields, "a" * 7) == ["aaaa", "aaa"]


def test_unknown_text_becomes_byte_tokens_or_else_a_single_unk():
    assert pieces(sentence_piece(), "a\u00e9\n") == [SPACE, "a", "<0xC3>", "<0xA9>", "<0x0A>"]
    fields = sentence_piece()
    keep = [i for i, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind != BYTE]
    for name in ("tokens", "token_type", "scores"):
        values = fields[f"tokenizer.ggml.{name}"]
        fields[f"tokenizer.ggml.{name}"] = [values[i] for i in keep]
    assert pieces(fields, "a\u00e9\u00e8b") == [SPACE, "a", "<unk>", "b"]


@pytest.mark.parametrize(("prefix", "expected"), [(True, [SPACE, "a"]), (False, ["a"])])
def test_the_space_prefix_follows_the_file(prefix: bool, expected: list[str], opened: Any):
    fields = sentence_piece(add_space_prefix=prefix)
    assert pieces(fields, "a") == expected
    assert pieces(fields, "<s>a") == ["<s>", *expected]
    tokenizer = opened(fields)
    for text in ("a", " a", "  a b ", "", "\u2581a"):
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace(SPACE, " ")


def test_user_defined_tokens_match_in_any_text_and_special_tokens_in_prompts(opened: Any):
    fields = sentence_piece(("  ", USER_DEFINED), ("<b>", USER_DEFINED), ("<c>", CONTROL))
    tokenizer = opened({**fields, "tokenizer.ggml.add_space_prefix": False})
    names = fields["tokenizer.ggml.tokens"]
    assert [names[i] for i in tokenizer.encode("a  b<b>", special=False)] == ["a", "  ", "b", "<b>"]
    assert "<c>" not in [names[i] for i in tokenizer.encode("<c>")]
    assert [names[i] for i in tokenizer.encode("<c>a", special=True)] == ["<c>", "a"]
    assert tokenizer.decode(tokenizer.encode("<c>a  b", special=True)) == "a  b"


@pytest.mark.parametrize(("architecture", "kept"), [("phi3", []), ("llama", [SPACE, "<0x0A>"])])
def test_phi3_strips_the_space_after_special_tokens(architecture: str, kept: list[str]):
    fields = sentence_piece(("<|user|>", CONTROL), ("<|end|>", CONTROL))
    fields["general.architecture"] = architecture
    texts = pieces(fields, "<|user|>\n<|end|>\n<s> a")
    assert texts == ["<|user|>", *kept, "<|end|>", *kept, "<s>", SPACE, SPACE, "a"]


@given(text=st.text(max_size=60), kept=st.integers(0, 4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_streamed_text_keeps_its_first_space(text: str, kept: int, opened: Any):
    tokenizer = opened(sentence_piece(words=f"th {SPACE}th {SPACE}the {SPACE}{SPACE}"))
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer.continuation)
    streamed = "".join(stream.push(i).final for i in ids) + stream.finish().final
    expected = f" {text}".replace(SPACE, " ") if text else ""
    assert streamed == tokenizer.continuation(ids) == expected
    assert b"".join(map(TokenBytes(tokenizer).bytes_of, ids)).decode() == expected
    rest = ids[kept:]
    assert tokenizer.decode(ids[:kept]) + tokenizer.continuation(rest) == tokenizer.decode(ids) or (
        "\ufffd" in tokenizer.decode(ids[:kept]) or not ids[:kept]
    )


@given(data=st.binary(max_size=24), kept=st.integers(0, 3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(data="\U0001f600".encode() + b"\xff a", kept=0)
def test_invalid_bytes_leave_adjacent_characters_intact(data: bytes, kept: int, opened: Any):
    tokenizer = opened(sentence_piece(words=f"{SPACE}a"))
    first = tokenizer.token_id("<0x00>")
    words = [tokenizer.token_id(f"{SPACE}a"), 1][:kept]
    ids = [*words, *(first + byte for byte in data), *words]
    expected = (b" a" * bool(kept) + data + b" a" * bool(kept)).decode("utf-8", "replace")
    assert tokenizer.continuation(ids) == expected
    stream = TextStream(tokenizer.continuation)
    assert "".join(stream.push(i).final for i in ids) + stream.finish().final == expected


def test_byte_text_is_decoded_in_windows(opened: Any):
    tokenizer, text = opened(sentence_piece()), "\u6f22\u00e9\U0001f600" * 100
    longest = 0

    def decode(ids: Any) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.continuation(ids)

    stream = TextStream(decode)
    assert "".join(stream.push(i).final for i in tokenizer.encode(text)) == f" {text}"
    assert longest <= 24


def test_gpt2_letters_alone_do_not_make_a_vocabulary_byte_level(opened: Any):
    letters = [letter for letter in byte_letters() if letter not in "abcdefghijklmnopqrstuvwxyz."]
    fields = sentence_piece(*((letter, NORMAL) for letter in letters), words=f"{SPACE}a")
    tokenizer = opened(fields)
    known = TokenBytes(tokenizer)
    text = "\u0120a\n \u010a"
    assert b"".join(map(known.bytes_of, tokenizer.encode(text))).decode() == f" {text}"


def test_a_file_provides_a_tokenizer_and_its_metadata(tmp_path: Path):
    named = [(name, USER_DEFINED) for name in ("<|im_end|>", "<eos>", "<|x|>")]
    fields = sentence_piece(*named, words=f"th {SPACE}th {SPACE}the")
    assert {*special_tokens(fields)} == {"<s>", "</s>", "<|im_end|>"}
    path = write_vocabulary(tmp_path / "a.gguf", {**fields, "llama.context_length": 64})
    facts = write_derived(path, read_gguf(path).fields, tmp_path)
    end = fields["tokenizer.ggml.tokens"].index("<|im_end|>")
    assert facts.stop_token_ids == (2, end)
    assert (facts.bos_token, facts.eos_token, facts.add_bos) == ("<s>", "</s>", True)
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", bos_token_id=1, add_bos=facts.add_bos)
    names = [fields["tokenizer.ggml.tokens"][i] for i in tokenizer.encode("the", special=True)]
    assert names == ["<s>", f"{SPACE}the"]


def test_constrained_decoding_supports_sentencepiece_bytes(tmp_path: Path):
    llguidance = pytest.importorskip("llguidance")
    fields = sentence_piece(("\n\n", USER_DEFINED), words=f"th {SPACE}th {SPACE}the é")
    path = tmp_path / "tokenizer.json"
    path.write_text(build_tokenizer(path, fields), encoding="utf-8")
    read = llguidance.LLTokenizer(path.read_text(encoding="utf-8"), eos_token=[2])
    known, count = TokenBytes(Tokenizer(path)), len(fields["tokenizer.ggml.tokens"])
    different = [i for i in range(3, count) if read.decode_bytes([i]) != known.bytes_of(i)]
    # llguidance marks control tokens with this byte, which is never in UTF-8.
    assert [fields["tokenizer.ggml.tokens"][i] for i in different] == ["<0xFF>"]


def test_the_docs_list_every_pre_tokenizer():
    page = Path(__file__).parents[3] / "docs" / "decisions" / "gguf-tokenizers.md"
    text = page.read_text(encoding="utf-8")
    assert not [name for name in PRE_TOKENIZERS if f"`{name}`" not in text]


def test_a_byte_level_vocabulary_may_lack_some_bytes(opened: Any):
    fields = {**byte_pairs(300), "tokenizer.ggml.pre": "falcon"}
    kept = [i for i, text in enumerate(fields["tokenizer.ggml.tokens"]) if "\u010b" not in text]
    for name in ("tokens", "token_type"):
        values = fields[f"tokenizer.ggml.{name}"]
        fields[f"tokenizer.ggml.{name}"] = [values[i] for i in kept]
    merges = fields["tokenizer.ggml.merges"]
    fields["tokenizer.ggml.merges"] = [merge for merge in merges if "\u010b" not in merge]
    tokenizer = opened(fields)
    known = TokenBytes(tokenizer)
    assert (
        b"".join(map(known.bytes_of, tokenizer.encode("the \u00e9\n"))) == "the \u00e9\n".encode()
    )


def test_a_response_ends_at_every_stop_token_in_the_metadata():
    fields = sentence_piece(
        *((name, CONTROL) for name in ("<|eot_id|>", "<|a|>", "<|b|>", "<|c|>")),
        eos_token_ids=[3, 10**9],
        eot_token_id=4,
        eom_token_id=5,
        eos_token_id=6,
    )
    end = fields["tokenizer.ggml.tokens"].index("<|eot_id|>")
    assert token_facts(fields)["stop_token_ids"] == (2, 3, 4, 5, 6, end)


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (["<|end|>"], ["<|end|>"]),
        (["<|end|>", "<|return|>", "<|call|>"], ["<|return|>", "<|call|>"]),
        (["<turn|>", "<|tool_response>"], ["<turn|>", "<|tool_response>"]),
    ],
)
def test_a_delimiter_inside_a_response_does_not_end_it(names: list[str], ends: list[str]):
    fields = {**byte_pairs(0), "tokenizer.ggml.pre": "gpt-4o", "tokenizer.ggml.eos_token_id": 0}
    fields["tokenizer.ggml.tokens"] += names
    fields["tokenizer.ggml.token_type"] += [CONTROL] * len(names)
    tokens = fields["tokenizer.ggml.tokens"]
    result = {tokens[i] for i in token_facts(fields)["stop_token_ids"] if i}
    assert result - {"</s>"} == {*ends}
    assert ("</s>" in result) == ("<|tool_response>" not in names)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model": "llama"}, True),
        ({"model": "llama", "add_bos_token": False}, False),
        ({"model": "gpt2", "pre": "llama-bpe"}, True),
        ({"model": "gpt2", "pre": "qwen2"}, False),
        ({"model": "gpt2", "pre": "llama-bpe", "add_bos_token": False}, False),
        ({"model": "gemma4", "add_bos_token": False}, True),
        ({"model": "llama", "bos_token_id": 10**9}, False),
    ],
)
def test_prompts_start_with_bos_like_llama_cpp(options: dict[str, Any], expected: bool):
    fields = sentence_piece(bos_token_id=1)
    fields |= {f"tokenizer.ggml.{name}": value for name, value in options.items()}
    assert token_facts(fields)["add_bos"] is expected
