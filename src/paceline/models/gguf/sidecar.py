"""Finds a `tokenizer.json` for a GGUF file whose own tokenizer cannot be read.

Invariant: a file that is used has the GGUF file's tokens under the same ids.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.models.gguf.vocabulary import TokenType, token_types
from paceline.models.manifest import TOKENIZER
from paceline.storage.gguf_file import short

_EMBEDDED = "tokenizer.huggingface.json"
_HUB = re.compile(r"https?://huggingface\.co/([\w.-]+/[\w.-]+)/?")
_MAX_BYTES = 2**27


def find_tokenizer(path: Path, fields: Mapping[str, Any]) -> tuple[str | None, str]:
    """Text of a tokenizer.json that fits, and a sentence part about those that do not.

    Looked for in the metadata, beside the file, and in the hub's cache under the name of the base
    model. Nothing is fetched.
    """
    reasons = []
    for name, text in _candidates(path, fields):
        fault = _misfit(text, fields)
        if fault is None:
            return text, ""
        reasons.append(f"{name} does not fit: {fault}")
    return None, "; ".join(reasons)


def base_model(fields: Mapping[str, Any]) -> str | None:
    """Hub name of the model that this one was made of, if the metadata has one."""
    for key in ("general.base_model.0.repo_url", "general.source.repo_url", "general.repo_url"):
        url = fields.get(key)
        if isinstance(url, str) and (match := _HUB.fullmatch(url)):
            return match[1]
    return None


def _candidates(path: Path, fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    embedded = fields.get(_EMBEDDED)
    if isinstance(embedded, str):
        yield "the tokenizer.json in the metadata", embedded
    places = [path.parent / TOKENIZER]
    base = base_model(fields)
    with contextlib.suppress(HFValidationError):
        if base is not None and isinstance(cached := try_to_load_from_cache(base, TOKENIZER), str):
            places.append(Path(cached))
    for place in places:
        try:
            if place.is_file() and place.stat().st_size <= _MAX_BYTES:
                yield str(place), place.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue


def _misfit(text: str, fields: Mapping[str, Any]) -> str | None:
    """Why a tokenizer.json is not the GGUF file's; None if it is."""
    from tokenizers import Tokenizer

    try:
        known: dict[str, int] = Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises bare Exception
        return f"it is not a valid tokenizer ({short(error)})"
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    # GGUF writers spell added tokens and fillers in their own way.
    plain = {
        i
        for i, kind in enumerate(token_types(fields))
        if kind in (TokenType.NORMAL, TokenType.BYTE)
    }
    if len(known) > len(tokens):
        return f"it has {len(known)} tokens, the file {len(tokens)}"
    for name, number in known.items():
        if number >= len(tokens) or (number in plain and tokens[number] != name):
            return f"its token {number} is {short(repr(name))}"
    if missing := plain - set(known.values()):
        return f"it has no token {min(missing)}"
    return None
