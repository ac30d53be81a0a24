"""Splits a model into packages: ranges of layers, and ranges of the head's tokens.

A package under about 14 MB may run on the CPU, and one that is too large does not run on the Neural
Engine; the rules in `lint/weights.py` have the sources of both limits.
"""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.errors import InvalidRequest


class Span(NamedTuple):
    """A range of layers or tokens, [start, end)."""

    start: int
    end: int


def parse_topology(text: str, count: int, what: str = "layers") -> list[Span]:
    """`20+4+6+2` as spans that cover `count` layers.

    Raises InvalidRequest if it is not such a sum, or not of `count` layers.
    """
    parts = text.split("+")
    if not all(part.isdigit() and int(part) for part in parts):
        raise InvalidRequest(f"{text!r} is not a topology; expected numbers of {what}, as 20+4+6+2")
    sizes = [int(part) for part in parts]
    if sum(sizes) != count:
        raise InvalidRequest(f"{text} is {sum(sizes)} {what}; the model has {count}")
    return _spans(sizes)


def even_topology(layer_bytes: Sequence[int], limit: int) -> list[Span]:
    """The fewest spans of at most `limit` bytes, of about equal length."""
    fewest = max(-(-sum(layer_bytes) // limit), 1)
    for parts in range(fewest, len(layer_bytes) + 1):
        spans = _spans(_even(len(layer_bytes), parts))
        if all(sum(layer_bytes[span.start : span.end]) <= limit for span in spans):
            return spans
    return _spans([1] * len(layer_bytes))


def split_evenly(count: int, most: int) -> list[Span]:
    """The fewest spans of [0, count) of at most `most`, of about equal length."""
    return _spans(_even(count, -(-count // most)))


def _even(count: int, parts: int) -> list[int]:
    return [count * (i + 1) // parts - count * i // parts for i in range(parts)]


def _spans(sizes: Sequence[int]) -> list[Span]:
    spans, at = [], 0
    for size in sizes:
        spans.append(Span(at, at + size))
        at += size
    return spans
