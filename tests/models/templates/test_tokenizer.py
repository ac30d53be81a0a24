from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidRequest, ModelError
from paceline.models import Tokenizer
from paceline.models.gguf.tokenizer import build_tokenizer
from paceline.runtime.model import Model
from support.errors import raises
from support.tiny import END, START, vocabulary

PRE = ("default", "llama3", "qwen2", "smollm")


def fields(pre: str) -> dict[str, Any]:
    tokens, types, merges = vocabulary()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokenizer]:
    """The tiny vocabulary as a tokenizer of some kind."""
    folder = tmp_path_factory.mktemp("tokenizers")

    def build(pre: str, **options: Any) -> Tokenizer:
        path = folder / f"{pre}.json"
        if not path.exists():
            path.write_text(build_tokenizer(path, fields(pre)), encoding="utf-8")
        return Tokenizer(path, **options)

    return build


@pytest.mark.parametrize("pre", PRE)
@given(text=st.text(max_size=80))
@example(text="I'll pay 12345 €\n\n\t now —  naïve 漢字 😀👩‍👩‍👧 \x00\x7f\ufeff")
@example(text="<|im_end|><|endoftext|><tool>")
@example(text="e\u0301 \u1100\u1161")
@settings(max_examples=60)
def test_text_comes_back_as_it_was(pre: str, text: str, build: Callable[..., Tokenizer]):
    import unicodedata

    tokenizer = build(pre)
    # qwen2's own tokenizer normalises first.
    expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert tokenizer.decode(tokenizer.encode(text)) == expected


def test_control_tokens_are_words_in_a_prompt_and_letters_in_plain_text(
    build: Callable[..., Tokenizer],
):
    tokenizer = build("smollm")
    assert tokenizer.encode(f"{START}a{END}", special=True)[::2] == [1, 2]
    literal = tokenizer.encode(f"{START}a{END}")
    assert not {0, 1, 2} & {*literal}
    assert tokenizer.decode(literal) == f"{START}a{END}"
    assert tokenizer.special_tokens() == {"<|endoftext|>": 0, START: 1, END: 2}


def test_control_tokens_have_no_text_and_added_words_have(build: Callable[..., Tokenizer]):
    tokenizer = build("smollm")
    tool = tokenizer.token_id("<tool>")
    assert tool is not None
    assert tokenizer.decode([1, tool, 2]) == "<tool>"
    assert tool in tokenizer.encode("<tool>", special=True)
    assert tokenizer.token_id("<nothing>") is None


def test_the_beginning_token_comes_once_and_only_before_a_whole_prompt(
    build: Callable[..., Tokenizer],
):
    tokenizer = build("smollm", bos_token_id=1, add_bos=True)
    assert tokenizer.encode("ab", special=True) == [1, *tokenizer.encode("ab")]
    assert tokenizer.encode(f"{START}ab", special=True).count(1) == 1
    assert tokenizer.encode("", special=True) == [1]
    assert 1 not in tokenizer.encode("ab")
    assert 1 not in build("smollm", bos_token_id=1).encode("ab", special=True)


def test_the_same_text_gives_the_same_ids_whatever_was_encoded_before(
    build: Callable[..., Tokenizer],
):
    tokenizer = build("smollm")
    first = tokenizer.encode("the user", special=True)
    for text in ("x" * 5000, END, ""):
        tokenizer.encode(text)
        tokenizer.encode(text, special=True)
    assert tokenizer.encode("the user", special=True) == first


@pytest.mark.parametrize("special", [False, True])
def test_half_of_a_surrogate_pair_is_refused(special: bool, build: Callable[..., Tokenizer]):
    with raises(InvalidRequest, "character 2"):
        build("smollm").encode("ab\ud800", special=special)


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"]])
def test_what_is_no_id_is_refused(ids: Any, build: Callable[..., Tokenizer]):
    with raises(InvalidRequest, "0 or more"):
        build("smollm").decode(ids)


def test_a_file_that_is_no_tokenizer_or_not_there_is_one_line_that_names_it(tmp_path: Path):
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
def test_the_default_models_ids_are_those_they_always_were(text: str, real_model: Model):
    tokenizer = real_model.files.tokenizer
    assert tokenizer.encode(text, special=True) == [int(i) for i in GOLDEN[text].split()]
    assert tokenizer.decode(tokenizer.encode(text)) == text
