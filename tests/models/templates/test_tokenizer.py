"""Tokenizers: texts and ids, bytes and names of tokens, and fill-in-the-middle prompts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from paceline.errors import InvalidRequest, ModelError
from paceline.models import Tokenizer
from paceline.models.files import ModelFiles
from paceline.models.gguf.tokenizer import build_tokenizer
from paceline.models.templates.marks import infill_of
from paceline.models.templates.tokenizer import TokenBytes
from paceline.runtime.model import Model
from support.errors import raises
from support.tiny import END, START, tokenizer_fields

PRE = ("default", "llama3", "qwen2", "smollm")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokenizer]:
    """The tiny vocabulary as a tokenizer of some kind."""
    folder = tmp_path_factory.mktemp("tokenizers")

    def build(pre: str, **options: Any) -> Tokenizer:
        path = folder / f"{pre}.json"
        if not path.exists():
            fields = {**tokenizer_fields("llama"), "tokenizer.ggml.pre": pre}
            path.write_text(build_tokenizer(path, fields), encoding="utf-8")
        return Tokenizer(path, **options)

    return build


@pytest.mark.parametrize("pre", PRE)
@given(text=st.text(max_size=80))
@example(text="I'll pay 12345 €\n\n\t now —  naïve 漢字 😀👩‍👩‍👧 \x00\x7f\ufeff")
@example(text="<|im_end|><|endoftext|><tool>")
@example(text="e\u0301 \u1100\u1161")
@settings(max_examples=60)
def test_text_round_trips_unchanged(pre: str, text: str, build: Callable[..., Tokenizer]):
    import unicodedata

    tokenizer = build(pre)
    # qwen2's own tokenizer normalises first.
    expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert tokenizer.decode(tokenizer.encode(text)) == expected


def test_special_tokens_are_parsed_in_prompts_and_spelled_out_in_plain_text(
    build: Callable[..., Tokenizer],
):
    tokenizer = build("smollm")
    assert tokenizer.encode(f"{START}a{END}", special=True)[::2] == [1, 2]
    literal = tokenizer.encode(f"{START}a{END}")
    assert not {0, 1, 2} & {*literal}
    assert tokenizer.decode(literal) == f"{START}a{END}"
    assert tokenizer.special_tokens() == {"<|endoftext|>": 0, START: 1, END: 2}


def test_special_tokens_decode_to_nothing_and_added_words_to_text(build: Callable[..., Tokenizer]):
    tokenizer = build("smollm")
    tool = tokenizer.token_id("<tool>")
    assert tool is not None
    assert tokenizer.decode([1, tool, 2]) == "<tool>"
    assert tool in tokenizer.encode("<tool>", special=True)
    assert tokenizer.token_id("<nothing>") is None


def test_bos_is_added_once_and_only_to_a_whole_prompt(build: Callable[..., Tokenizer]):
    tokenizer = build("smollm", bos_token_id=1, add_bos=True)
    assert tokenizer.encode("ab", special=True) == [1, *tokenizer.encode("ab")]
    assert tokenizer.encode(f"{START}ab", special=True).count(1) == 1
    assert tokenizer.encode("", special=True) == [1]
    assert 1 not in tokenizer.encode("ab")
    assert 1 not in build("smollm", bos_token_id=1).encode("ab", special=True)


def test_a_lone_surrogate_and_an_invalid_token_id_are_rejected(build: Callable[..., Tokenizer]):
    tokenizer: Any = build("smollm")
    for special in (False, True):
        with raises(InvalidRequest, "character 2"):
            tokenizer.encode("ab\ud800", special=special)
    for ids in ([-1], [2**40], ["a"]):
        with raises(InvalidRequest, "0 or more"):
            tokenizer.decode(ids)


def test_a_missing_or_invalid_tokenizer_file_is_named_in_one_line(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    for content in (None, b"", b"\xff", b'{"model": {"type": "X"}}'):
        if content is not None:
            path.write_bytes(content)
        with raises(ModelError, path):
            Tokenizer(path)


# Made with this code in November 2026, when OpenVINO GenAI's own tokenizer gave the same ids for
# 500 random strings.
GOLDEN = {
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n": "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 "
    "19712 8182 2 198",
    "In 2024 we'll pay 1,234.50 euros (+10 %).": "788 216 34 32 34 36 392 3060 2290 216 33 28 34 "
    "35 36 30 37 32 39236 30425 33 32 2471 595",
    "def f(x):\n\treturn  x ** 2  # naïve 漢字 😀\n": "1604 275 24 104 727 198 197 5406 216 1792 "
    "1903 216 34 216 907 15486 46494 17097 137 112 36518 40303 218 198",
}


@pytest.mark.real_model
@pytest.mark.parametrize("text", GOLDEN)
def test_the_default_models_token_ids_do_not_change(text: str, real_model: Model):
    tokenizer = real_model.files.tokenizer
    assert tokenizer.encode(text, special=True) == [int(i) for i in GOLDEN[text].split()]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.fixture
def sentences(tmp_path: Path) -> TokenBytes:
    """A vocabulary with SentencePiece's space markers and bytes."""
    known = {"<unk>": 0, "\u2581the": 1, "é": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    tokenizer = Backend(models.BPE(known, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return TokenBytes(Tokenizer(path))


def test_sentencepiece_spaces_and_byte_tokens_decode_to_bytes(sentences: TokenBytes):
    assert sentences.bytes_of(1) == b" the"
    assert sentences.bytes_of(2) == "é".encode()
    assert sentences.bytes_of(3 + 0xF0) == b"\xf0"
    assert sentences.name(3 + 0xF0) == "bytes:\\xf0"
    assert sentences.name(3 + ord("a")) == "a"
    assert sentences.text([259, 1, 259]) == "<s> the<s>"


def test_byte_level_letters_decode_to_bytes(tiny_files: ModelFiles):
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
def test_continued_text_keeps_its_first_space(decoder: Any, tmp_path: Path):
    backend = Backend(models.BPE({"\u2581": 0, "\u2581the": 1, "e": 2}, []))
    backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.continuation([1, 1]) == " the the"
    assert tokenizer.continuation([2, 0]) == "e "
    assert tokenizer.continuation([]) == ""


QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
DEEPSEEK = (
    "<\uff5cfim\u2581begin\uff5c>",
    "<\uff5cfim\u2581hole\uff5c>",
    "<\uff5cfim\u2581end\uff5c>",
)


def tokenizer(folder: Path, *names: str, bos: bool = False) -> Tokenizer:
    """A letter is its place in the alphabet; then come `names`, and <s>."""
    letters = {chr(ord("a") + i): i for i in range(26)}
    backend = Backend(models.BPE(letters, []))
    backend.add_tokens([AddedToken(name, normalized=False) for name in names])
    backend.add_special_tokens(["<s>"])
    path = folder / "tokenizer.json"
    backend.save(str(path))
    return Tokenizer(path, bos_token_id=26 + len(names), add_bos=bos)


@pytest.mark.parametrize(
    ("names", "prompt"),
    [
        (QWEN, [26, 0, 1, 27, 2, 3, 28]),
        (DEEPSEEK, [26, 0, 1, 27, 2, 3, 28]),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), [26, 0, 1, 27, 2, 3, 28]),
        (("[PREFIX]", "[SUFFIX]"), [27, 2, 3, 26, 0, 1]),  # Codestral
        ((*QWEN, "<|file_sep|>"), [26, 0, 1, 27, 2, 3, 28]),  # which ends the infill
    ],
)
def test_a_prompt_uses_its_vocabulary_and_its_stop_tokens(
    names: tuple[str, ...], prompt: list[int], tmp_path: Path
):
    assert infill_of(tokenizer(tmp_path, *names[:1])) is None, "a model that lacks one of them"
    infill = infill_of(tokenizer(tmp_path, *names))
    assert infill is not None
    assert infill.prompt([0, 1], "cd") == prompt
    assert infill.stops == names
    begun = infill_of(tokenizer(tmp_path, *names, bos=True))
    assert begun is not None
    start = 26 + len(names)
    for text in ([start, 0, 1], [0, 1]):
        assert begun.prompt(text, "cd") == [start, *prompt], "the beginning token is first, once"
