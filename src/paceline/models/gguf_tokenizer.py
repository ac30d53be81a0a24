"""Converts the tokenizer in GGUF metadata to a `tokenizer.json`: byte-level BPE only.

GGUF has only the name of a pre-tokenizer (`tokenizer.ggml.pre`). The regular expressions here are
those in the models' own tokenizer.json files.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ModelError
from paceline.models.gguf_file import NumberArray, short

REQUIRED_FIELDS = ("tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type")

_CONTROL = 3
"""`tokenizer.ggml.token_type` of control tokens."""
_USER_DEFINED = 4
"""The type of added text tokens."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_PRE = ("default", "gpt-2", "llama-bpe", "llama3", "qwen2", "smollm")


def _types(fields: Mapping[str, Any]) -> Any:
    """Return `tokenizer.ggml.token_type`, as a list if it is an array of numbers."""
    value = fields["tokenizer.ggml.token_type"]
    return value.values.tolist() if isinstance(value, NumberArray) else value


def special_tokens(fields: Mapping[str, Any]) -> dict[str, int]:
    """Control tokens: name -> id."""
    tokens, types = fields["tokenizer.ggml.tokens"], _types(fields)
    return {tokens[i]: i for i, kind in enumerate(types) if kind == _CONTROL}


def vocabulary_faults(fields: Mapping[str, Any]) -> list[str]:
    """Faults of the tokens, their types and the merges."""
    tokens, types = fields["tokenizer.ggml.tokens"], _types(fields)
    merges = fields.get("tokenizer.ggml.merges", [])
    faults = [
        f"tokenizer.ggml.{name} is not a list of {kind.__name__}"
        for name, value, kind in (
            ("tokens", tokens, str),
            ("token_type", types, int),
            ("merges", merges, str),
        )
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value)
    ]
    if faults:
        return faults
    if len(types) != len(tokens):
        return [f"there are {len(types)} token types for {len(tokens)} tokens"]
    known = set(tokens)
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or not {left, right, left + right} <= known:
            return [f"the merge {short(repr(merge))} does not join two tokens to a token"]
    return []


def build_tokenizer(path: Path, fields: Mapping[str, Any]) -> str:
    """Text of a tokenizer.json. Raises ModelError for an unsupported kind."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in _PRE:
        raise ModelError(
            f"{path} has a tokenizer of kind {short(kind)}/{short(pre)}; expected byte-level BPE "
            f"({', '.join(_PRE)}). Its Hugging Face checkpoint works: "
            "`paceline convert FOLDER --to openvino`"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = _types(fields)
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", ())]
    llama3 = pre in ("llama-bpe", "llama3")
    tokenizer = Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=llama3)
    )
    if pre == "smollm":
        steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    elif llama3 or pre == "qwen2":
        pattern = Regex(_LLAMA3 if llama3 else _QWEN2)
        steps = [Split(pattern, "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        steps = [ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = Sequence(steps)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for text, type_ in zip(tokens, types, strict=True):
        if type_ in (_CONTROL, _USER_DEFINED):
            added = AddedToken(text, special=type_ == _CONTROL, normalized=False)
            (tokenizer.add_special_tokens if type_ == _CONTROL else tokenizer.add_tokens)([added])
    return tokenizer.to_str()
