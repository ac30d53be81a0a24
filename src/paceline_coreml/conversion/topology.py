"""Splits a model into packages: ranges of layers, and ranges of the head's tokens.

A package under about 14 MB may run on the CPU. One that is too large or has too many states does
not run on the Neural Engine. The rules in `lint/weights.py` and `lint/states.py` name the sources
of these limits.
"""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.errors import InvalidRequest


class Span(NamedTuple):
    """A range of layers or tokens, [start, end)."""

    start: int
    end: int


class LayerSize(NamedTuple):
    """The size that a layer adds to its package."""

    bytes: int
    states: int


def parse_topology(text: str, count: int) -> list[Span]:
    """Parse a topology, such as `20+4+6+2`, into spans that cover `count` layers.

    Raises InvalidRequest if it is not such a sum, or if the sum is not `count`.
    """
    parts = text.split("+")
    if not all(part.isdigit() and int(part) for part in parts):
        raise InvalidRequest(f"{text!r} is not a topology; expected layers per package: 20+4+6+2")
    sizes = [int(part) for part in parts]
    if sum(sizes) != count:
        raise InvalidRequest(f"{text} is {sum(sizes)} layers; the model has {count}")
    return _spans(sizes)


def even_topology(layers: Sequence[LayerSize], limit: LayerSize) -> list[Span]:
    """Return the fewest spans of about equal length whose sums are within the limit.

    If a single layer exceeds the limit, every layer gets its own span.
    """
    for parts in range(1, len(layers) + 1):
        spans = _spans(_even(len(layers), parts))
        if all(_fits(layers[slice(*span)], limit) for span in spans):
            return spans
    return _spans([1] * len(layers))


def _fits(layers: Sequence[LayerSize], limit: LayerSize) -> bool:
    return (
        sum(layer.bytes for layer in layers) <= limit.bytes
        and sum(layer.states for layer in layers) <= limit.states
    )


def split_evenly(count: int, max_size: int) -> list[Span]:
    """Split [0, count) into the fewest spans of at most `max_size`, of about equal length."""
    return _spans(_even(count, -(-count // max_size)))


def _even(count: int, parts: int) -> list[int]:
    return [count * (i + 1) // parts - count * i // parts for i in range(parts)]


def _spans(sizes: Sequence[int]) -> list[Span]:
    spans, at = [], 0
    for size in sizes:
        spans.append(Span(at, at + size))
        at += size
    return spans
