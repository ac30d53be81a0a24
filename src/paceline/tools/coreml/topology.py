"""How a model is cut into packages: which layers together, which tokens of the head together.

Knows sizes and limits only. Too small a package falls back to the CPU (under about 14 MB), too
large a one is not taken by the Neural Engine; both limits are others' findings (docs/coreml.md).
"""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.errors import InvalidRequest


class Span(NamedTuple):
    """Layers, or tokens, [start, end)."""

    start: int
    end: int


def parse_topology(text: str, count: int, what: str = "layers") -> list[Span]:
    """`20+4+6+2` as spans that cover `count` layers.

    Raises:
        InvalidRequest: it is no such sum, or of another number of layers.
    """
    parts = text.split("+")
    if not all(part.isdigit() and int(part) for part in parts):
        raise InvalidRequest(f"{text!r} is no topology; expected numbers of {what}, as 20+4+6+2")
    sizes = [int(part) for part in parts]
    if sum(sizes) != count:
        raise InvalidRequest(f"{text} is {sum(sizes)} {what}; the model has {count}")
    return _spans(sizes)


def even_topology(bytes_each: Sequence[int], limit: int) -> list[Span]:
    """As few spans as there can be with at most `limit` bytes each, of about the same size."""
    fewest = max(-(-sum(bytes_each) // limit), 1)
    for parts in range(fewest, len(bytes_each) + 1):
        spans = _spans(_even(len(bytes_each), parts))
        if all(sum(bytes_each[span.start : span.end]) <= limit for span in spans):
            return spans
    return _spans([1] * len(bytes_each))


def split_evenly(count: int, most: int) -> list[Span]:
    """As few spans of [0, count) as there can be with at most `most` each."""
    return _spans(_even(count, -(-count // most)))


def _even(count: int, parts: int) -> list[int]:
    return [count * (i + 1) // parts - count * i // parts for i in range(parts)]


def _spans(sizes: Sequence[int]) -> list[Span]:
    spans, at = [], 0
    for size in sizes:
        spans.append(Span(at, at + size))
        at += size
    return spans
