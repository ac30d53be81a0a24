"""Passes with rows of several sequences: chooses the blocks that share one, and runs it.

The sequences of a context have their own KV, and numbers. The library splits a pass whose sequences
have different row counts, or numbers that are not consecutive. So shorter blocks are padded, and so
are sequences in between; if that wastes too much, a block gets another pass:

    sequence          0     1     2     3     4
    rows              1     1     -     1     8
    a pass of four    1     1     1     1           sequence 2 has none: a row of padding
    and of one                                8     32 rows of padding would be too many

Independent of the tokens. The rows of a pass are in the class of decode together.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from paceline.decoding.types import Block, Logits
from paceline.engines.llamacpp.native import NativeSequence, Rows
from paceline.engines.llamacpp.sequence import PADDING
from paceline.engines.rows import grouped

_WASTE = 2
"""A shared pass has at most this many times the rows of its blocks."""


class SharedBlock(NamedTuple):
    place: NativeSequence
    block: Block


def shared_calls(blocks: Mapping[int, SharedBlock], max_rows: int) -> Iterator[list[int]]:
    order = sorted(
        blocks, key=lambda key: (id(blocks[key].place.context), blocks[key].place.number)
    )
    return grouped(order, lambda keys: _may_share([blocks[key] for key in keys], max_rows))


def _may_share(blocks: Sequence[SharedBlock], max_rows: int) -> bool:
    """Return whether one pass may run blocks, given in the order of their numbers."""
    first, last = blocks[0].place, blocks[-1].place
    if first.context is not last.context:
        return False
    rows = max(len(block.tokens) for _, block in blocks)
    places = last.number - first.number + 1
    between = first.context.sequences[first.number : last.number + 1]
    return places * rows <= min(
        max_rows, _WASTE * sum(len(block.tokens) for _, block in blocks)
    ) and all(place.length + rows <= place.slots for place in between)


def run_shared(blocks: Mapping[int, SharedBlock]) -> dict[int, Logits]:
    places = [place for place, _ in blocks.values()]
    context = places[0].context
    rows = max(len(block.tokens) for _, block in blocks.values())
    numbers = [place.number for place in places]
    by_number = {place.number: block for place, block in blocks.values()}
    work, lengths = [], []
    for place in context.sequences[min(numbers) : max(numbers) + 1]:
        block = by_number.get(place.number, Block([], 0))
        count = len(block.tokens)
        outputs = slice(count - max(block.rows, 1), count) if count else slice(0, 0)
        work.append(Rows(place, [*block.tokens, *[PADDING] * (rows - count)], outputs))
        lengths.append(place.length + count)
    logits = dict(zip((place.number for place, *_ in work), context.decode(work), strict=True))
    for (place, *_), length in zip(work, lengths, strict=True):
        place.truncate(length)
    return {
        key: logits[place.number][max(block.rows, 1) - block.rows :].copy()
        for key, (place, block) in blocks.items()
    }
