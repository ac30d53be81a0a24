"""Tokens of GGUF metadata: their types, special tokens, and end tokens.

Invariant: metadata is untrusted. `vocabulary_fault` comes first; the rest relies on it. The limits
of this module bound the work that follows.
"""

from collections import Counter
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from paceline.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from paceline.storage.gguf_file import NumberArray, short

REQUIRED_FIELDS = ("tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type")

_MAX_TOKENS = 2**20
_MAX_MERGES = 2**22
_MAX_LETTERS = 2**24
"""Maximum characters of all tokens; the largest vocabularies in use have about 2 million."""

_TEXT_TOO = frozenset(["</s>", "<eos>"])
"""Names that end an answer only as control tokens: in Gemma, `</s>` is an HTML tag."""

END_TOKENS = frozenset(
    [
        *("</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>"),
        *("<|call|>", "<|calls|>", "<|flush|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>"),
        *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~["),
    ]
)
"""Control tokens that end an answer, in any model family, from llama.cpp's llama-vocab.cpp."""

_NOT_AN_END = (
    ("<|end|>", ("<|return|>", "<|call|>")),
    ("<|end|>", ("<|calls|>", "<|flush|>")),
    ("</s>", ("<|tool_response>",)),
)
"""Tokens that end a part of an answer, or are text, in a vocabulary that also has the others."""


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def vocabulary_fault(fields: Mapping[str, Any]) -> str | None:
    """Return the first fault of the tokens, their types, scores and merges, or None."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], list_of(fields, "token_type")
    merges, scores = fields.get("tokenizer.ggml.merges", []), list_of(fields, "scores")
    for name, values, kind in (
        ("tokens", tokens, str),
        ("token_type", kinds, int),
        ("merges", merges, str),
        ("scores", scores, (int, float)),
    ):
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            return f"tokenizer.ggml.{name} is not a list of {'text' if kind is str else 'numbers'}"
    for count, limit, what in (
        (len(tokens), _MAX_TOKENS, "tokens"),
        (len(merges), _MAX_MERGES, "merges"),
        (sum(map(len, tokens)), _MAX_LETTERS, "characters in its tokens"),
    ):
        if count > limit:
            return f"there are {count} {what}; at most {limit} are supported"
    for what, values in (("token types", kinds), ("scores", scores or tokens)):
        if len(values) != len(tokens):
            return f"there are {len(values)} {what} for {len(tokens)} tokens"
    known = set(tokens)
    if len(known) != len(tokens):
        token, times = Counter(tokens).most_common(1)[0]
        return f"the token {short(repr(token))} occurs {times} times"
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or not {left, right, left + right} <= known:
            return f"the merge {short(repr(merge))} does not join two tokens to a token"
    return None


def token_types(fields: Mapping[str, Any]) -> list[int]:
    """Return the type of each token; user-defined end tokens are control tokens.

    Fine-tuned models have such tokens; llama.cpp logs a `control-looking token` and does the same.
    """
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    return [
        TokenType.CONTROL
        if kind == TokenType.USER_DEFINED and text in END_TOKENS and text not in _TEXT_TOO
        else kind
        for text, kind in zip(tokens, list_of(fields, "token_type"), strict=True)
    ]


def special_tokens(fields: Mapping[str, Any]) -> dict[str, int]:
    """Map the names of control tokens to their ids."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    return {tokens[i]: i for i, k in enumerate(token_types(fields)) if k == TokenType.CONTROL}


def token_facts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about the tokens that begin a prompt and end an answer."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    bos, eos = (token_id(fields, name) for name in ("bos", "eos"))
    stops = end_ids(special_tokens(fields))
    ends = list_of(fields, "eos_token_ids")
    stops |= {
        token
        for token in (ends if isinstance(ends, list) else [ends])
        if isinstance(token, int) and 0 <= token < len(tokens)
    }
    named = {token_id(fields, name) for name in ("eos", "eot", "eom")}
    return {
        "stop_token_ids": tuple(sorted(stops | (named - {None}))),
        "bos_token_id": bos,
        "add_bos": _adds_bos(fields) and bos is not None,
        "bos_token": None if bos is None else tokens[bos],
        "eos_token": None if eos is None else tokens[eos],
    }


def token_id(fields: Mapping[str, Any], name: str) -> int | None:
    """Return the id of a token ("bos", "eos", "unknown") as llama.cpp reads it, or None."""
    spm = fields.get("tokenizer.ggml.model") == "llama"
    default = {"unknown": 0, "bos": 1, "eos": 2}.get(name) if spm else None
    value = fields.get(f"tokenizer.ggml.{name}_token_id", default)
    size = len(fields["tokenizer.ggml.tokens"])
    return value if isinstance(value, int) and 0 <= value < size else None


def end_ids(special: Mapping[str, int]) -> set[int]:
    """Return the ids of the control tokens that end an answer, by name."""
    parts = {name for name, others in _NOT_AN_END if special.keys() >= {*others}}
    return {number for name, number in special.items() if name in END_TOKENS - parts}


def _adds_bos(fields: Mapping[str, Any]) -> bool:
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind == "gemma4" or pre == "gemma4":
        return True  # as in llama.cpp, because early files have false
    known = PRE_TOKENIZERS.get(pre) if isinstance(pre, str) else None
    default = kind == "llama" or (known is not None and known.add_bos)
    return bool(fields.get("tokenizer.ggml.add_bos_token", default))


def list_of(fields: Mapping[str, Any], name: str) -> Any:
    """Return a metadata array as a list, empty if it is missing; other values are unchanged."""
    value = fields.get(f"tokenizer.ggml.{name}", [])
    return value.values.tolist() if isinstance(value, NumberArray) else value
