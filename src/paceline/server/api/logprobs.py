"""Logprobs in OpenAI's two formats.

Invariant: the texts of the listed tokens, joined, are the answer's text.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from paceline.decoding.types import Piece, TokenLogprob
from paceline.models import TokenBytes

_MIN_LOGPROB = -9999.0
"""The logprob of a probability of 0: JSON has no infinity."""


def chat_logprobs(token_bytes: TokenBytes, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """Return the chat format: an object for each token, with its bytes."""
    return [
        {
            **_entry(piece.text, _logprobs(piece).logprob, _bytes(token_bytes, piece)),
            "top_logprobs": [
                _entry(token_bytes.name(token), logprob, token_bytes.bytes_of(token))
                for token, logprob in _logprobs(piece).top
            ],
        }
        for piece in pieces
    ]


def completion_logprobs(
    token_bytes: TokenBytes, pieces: Sequence[Piece], top: int, start: int
) -> dict[str, Any]:
    """Return the completion format: a list per field; `start` is the offset of the first text.

    A token without logprobs has null: the first token of an echoed prompt. The token itself is in
    its `top_logprobs` even if it is not among the most likely.
    """
    texts = [piece.text for piece in pieces]
    return {
        "tokens": texts,
        "token_logprobs": [
            None if piece.logprobs is None else _clipped(piece.logprobs.logprob) for piece in pieces
        ],
        "top_logprobs": [_tops(token_bytes, piece) for piece in pieces] if top else None,
        "text_offset": [*accumulate(map(len, texts), initial=start)][:-1],
    }


def _entry(text: str, logprob: float, known: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": _clipped(logprob), "bytes": list(known)}


def _bytes(token_bytes: TokenBytes, piece: Piece) -> bytes:
    if piece.token in token_bytes.special:
        return b""
    known = token_bytes.bytes_of(piece.token)
    try:
        whole = known.decode() != "" and "\ufffd" not in piece.text
    except UnicodeDecodeError:
        whole = False  # only part of a character
    return piece.text.encode() if whole else known


def _tops(token_bytes: TokenBytes, piece: Piece) -> dict[str, float] | None:
    if piece.logprobs is None:
        return None
    tops: dict[str, float] = {}
    # Of tokens with the same name, only the most likely is kept.
    for token, logprob in [*piece.logprobs.top, piece.logprobs[:2]]:
        tops.setdefault(token_bytes.name(token), _clipped(logprob))
    return tops


def _logprobs(piece: Piece) -> TokenLogprob:
    assert piece.logprobs is not None
    return piece.logprobs


def _clipped(logprob: float) -> float:
    return min(max(logprob, _MIN_LOGPROB), 0.0)
