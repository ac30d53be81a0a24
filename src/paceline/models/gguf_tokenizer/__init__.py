"""Tokenizers in GGUF metadata: a `tokenizer.json` for each kind that is read.

`pre_tokenizers.py` has what the names in `tokenizer.ggml.pre` mean, `build.py` makes the file,
`vocabulary.py` checks the tokens and finds those that end an answer, and `beside.py` looks for the
model's own tokenizer.json where the metadata is not enough.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ModelError
from paceline.models.gguf_tokenizer.beside import base_model, find_tokenizer
from paceline.models.gguf_tokenizer.build import Unread, make_tokenizer
from paceline.models.gguf_tokenizer.vocabulary import (
    REQUIRED_FIELDS,
    TokenFacts,
    special_tokens,
    token_facts,
    token_id,
    vocabulary_faults,
)

__all__ = [
    "REQUIRED_FIELDS",
    "TokenFacts",
    "build_tokenizer",
    "special_tokens",
    "token_facts",
    "token_id",
    "vocabulary_faults",
]


def build_tokenizer(path: Path, fields: Mapping[str, Any]) -> str:
    """Text of a tokenizer.json for the checked metadata of the file at `path`.

    Where the metadata is not enough, or has no pre-tokenizer's name, one that lies beside the file,
    or that the hub's cache has for the base model, is used if its tokens are the file's.

    Raises ModelError, which says what would work, if there is none.
    """
    unnamed = fields.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.pre" not in fields
    if unnamed and (found := find_tokenizer(path, fields)[0]) is not None:
        return found
    try:
        return make_tokenizer(fields).to_str()
    except Unread as error:
        text, misfit = find_tokenizer(path, fields)
        if text is not None:
            return text
        where = base_model(fields) or "the model it was made of"
        raise ModelError(
            f"{path} has {error}{f' ({misfit})' if misfit else ''}. What works: the tokenizer.json "
            f"of {where} beside the file, or its Hugging Face checkpoint: "
            "`paceline convert FOLDER --to openvino`"
        ) from error
