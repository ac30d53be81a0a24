"""Prompts for filling in the middle (FIM): the text between a prefix and a suffix.

A model that was trained for it has tokens for the places (Bavarian et al., 2022, arXiv 2207.14255).
Their names are recognised in the vocabulary, as llama.cpp does (llama-vocab.cpp).
"""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.models.tokenizer import Tokenizer


class _Form(NamedTuple):
    """The tokens of a family of models."""

    prefix: str
    suffix: str
    middle: str
    """Empty: the prefix comes last, and the answer follows it."""


_FORMS = (
    # Qwen2.5-Coder and Qwen3-Coder, CodeGemma
    _Form("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, Granite, StableCode
    _Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    _Form("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # Code Llama
    _Form("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    _Form("<PRE>", "<SUF>", "<MID>"),
    # DeepSeek Coder
    _Form(
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
    ),
    # GLM 4
    _Form("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    # Codestral
    _Form("[PREFIX]", "[SUFFIX]", ""),
)

_ENDS = ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>", "\u2581<EOT>")
"""Tokens with which some of these models end what they fill in."""


class Infill:
    """How a model is asked to fill in the middle."""

    def __init__(self, form: _Form, tokenizer: Tokenizer) -> None:
        """See `infill_of`."""
        self._tokenizer = tokenizer
        self._form = form
        self.stops = tuple(
            name for name in (*form, *_ENDS) if name and tokenizer.token_id(name) is not None
        )
        """Texts that end an answer, besides the model's own end."""

    def prompt(self, prefix: Sequence[int], suffix: str) -> list[int]:
        """The tokens that ask for what is between two texts.

        Args:
            prefix: token ids of the text before, perhaps with a beginning-of-sequence token, which
                stays first.
            suffix: the text after.

        Raises InvalidRequest for a suffix that is not valid Unicode.
        """
        bos = self._tokenizer.encode("", special=True)
        before = list(prefix)
        if bos and before[: len(bos)] == bos:
            before = before[len(bos) :]
        after = self._tokenizer.encode(suffix)
        if not self._form.middle:
            return [*bos, self._id(self._form.suffix), *after, self._id(self._form.prefix), *before]
        marks = [self._id(name) for name in self._form]
        return [*bos, marks[0], *before, marks[1], *after, marks[2]]

    def _id(self, name: str) -> int:
        found = self._tokenizer.token_id(name)
        assert found is not None
        return found


def infill_of(tokenizer: Tokenizer) -> Infill | None:
    """How a model is asked to fill in the middle; None if it has no tokens for it."""
    for form in _FORMS:
        if all(tokenizer.token_id(name) is not None for name in form if name):
            return Infill(form, tokenizer)
    return None
