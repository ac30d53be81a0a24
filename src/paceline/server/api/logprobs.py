"""How likely tokens were, in the two shapes that OpenAI has for it.

Knows pieces and words. The rule: put together, the tokens' texts are the answer's text.
"""

from collections.abc import Sequence
from typing import Any

from paceline.decoding.logprobs import TokenLogprob
from paceline.models.token_bytes import Words
from paceline.server.stream_text import Piece

_LEAST = -9999.0
"""What stands for a probability of nothing: JSON has no infinity."""


def chat_logprobs(words: Words, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """The shape of chats: an object for each token, with its bytes."""
    return [
        {
            **_entry(piece.text, _likely(piece).logprob, _bytes(words, piece)),
            "top_logprobs": [
                _entry(words.name(token), logprob, words.bytes_of(token))
                for token, logprob in _likely(piece).top
            ],
        }
        for piece in pieces
    ]


def completion_logprobs(words: Words, pieces: Sequence[Piece], top: int) -> dict[str, Any]:
    """The shape of completions: a list for each kind of thing.

    What nothing was said of has null: the first token of an echoed prompt. The token itself is
    among its `top_logprobs` even where it was not among the most likely.
    """
    return {
        "tokens": [piece.text for piece in pieces],
        "token_logprobs": [
            None if piece.likely is None else _clipped(piece.likely.logprob) for piece in pieces
        ],
        "top_logprobs": [_tops(words, piece) for piece in pieces] if top else None,
        "text_offset": [piece.start for piece in pieces],
    }


def _entry(text: str, logprob: float, known: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": _clipped(logprob), "bytes": list(known)}


def _bytes(words: Words, piece: Piece) -> bytes:
    """What of a token's bytes is in the text."""
    if piece.token in words.special:
        return b""
    known = words.bytes_of(piece.token)
    try:
        whole = known.decode() != "" and "\ufffd" not in piece.text
    except UnicodeDecodeError:
        whole = False  # a part of a character
    return piece.text.encode() if whole else known


def _tops(words: Words, piece: Piece) -> dict[str, float] | None:
    if piece.likely is None:
        return None
    found: dict[str, float] = {}
    # Of tokens that look the same the most likely one stands.
    for token, logprob in [*piece.likely.top, piece.likely[:2]]:
        found.setdefault(words.name(token), _clipped(logprob))
    return found


def _likely(piece: Piece) -> TokenLogprob:
    assert piece.likely is not None
    return piece.likely


def _clipped(logprob: float) -> float:
    return min(max(logprob, _LEAST), 0.0)
