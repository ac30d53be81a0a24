"""Prompts for filling in the middle, by the names of a vocabulary's tokens."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from paceline.models.templates.marks import infill_of
from paceline.models.templates.tokenizer import Tokenizer

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
    "names", [QWEN, DEEPSEEK, ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")]
)
def test_prefix_suffix_middle(names: tuple[str, ...], tmp_path: Path):
    infill = infill_of(tokenizer(tmp_path, *names))
    assert infill is not None
    assert infill.prompt([0, 1], "cd") == [26, 0, 1, 27, 2, 3, 28]
    assert infill.stops == names


def test_codestral_has_the_suffix_first_and_no_middle(tmp_path: Path):
    infill = infill_of(tokenizer(tmp_path, "[PREFIX]", "[SUFFIX]"))
    assert infill is not None
    assert infill.prompt([0, 1], "cd") == [27, 2, 3, 26, 0, 1]


def test_the_beginning_token_stays_first_and_comes_once(tmp_path: Path):
    infill = infill_of(tokenizer(tmp_path, *QWEN, bos=True))
    assert infill is not None
    assert infill.prompt([29, 0], "b") == [29, 26, 0, 27, 1, 28]
    assert infill.prompt([0], "b") == [29, 26, 0, 27, 1, 28]


def test_tokens_that_end_what_was_filled_in_are_stops(tmp_path: Path):
    infill = infill_of(tokenizer(tmp_path, *QWEN, "<|file_sep|>"))
    assert infill is not None
    assert infill.stops == (*QWEN, "<|file_sep|>")


def test_a_model_that_lacks_one_of_them_is_not_asked(tmp_path: Path):
    assert infill_of(tokenizer(tmp_path, *QWEN[:2])) is None
