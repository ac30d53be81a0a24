"""Compares an engine's rows with those of plain decoding, bit for bit, on this machine.

An engine verifies its row rules with `rows_hold` when it opens. `exact` in a result relies on
`measure_invariance`, and `verify` compares more (`compare_rows`). The reference is one sequence
alone: its prompt is prefilled in one pass, its answer decoded token by token. The conditions:

- `block_length`: the answer in blocks of several rows;
- `batch`: in passes with another sequence, in prefill or in decode;
- `chunked_prefill`: after a prefill in other chunks;
- `prefix_cache`: in a fork that shares the slots of a prompt, or of a prompt and its answer.

Independent of runtimes, models and policies. A measurement proves nothing about setups that it did
not run: other thread counts, CPUs or longer contexts.
"""

from collections.abc import Container, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from paceline.decoding.types import Block, Logits
from paceline.engines.base import Engine, KVSequence
from paceline.errors import CacheFull

BLOCK_LENGTH = "block_length"
BATCH = "batch"
CHUNKED_PREFILL = "chunked_prefill"
PREFIX_CACHE = "prefix_cache"

CONDITIONS = (BLOCK_LENGTH, BATCH, CHUNKED_PREFILL, PREFIX_CACHE)

_TEXT, _MIN_TEXT = 64, 12
"""Prompt and answer tokens together, if they fit, and the minimum that is compared."""
_MORE = 2
"""Tokens of the next turn."""
_CALL = 1024
"""Maximum rows of a prompt's forward pass."""
_SHORT = 4
"""Rows at the end of a prompt that run alone: few rows may use another kernel than many."""
_SECONDS, _RULE_SECONDS = 2.0, 4.0
"""Time limit: a later condition makes only one comparison, and rules are not verified further."""


class Depth(NamedTuple):
    """The amount of rows that are compared after a context."""

    answer: int
    blocks: Sequence[int]
    """Rows of the blocks that decode it."""
    chunks: Sequence[int] = ()
    """Rows of the passes that read the prompt; if negative: all but this many, and then those."""
    after: int = 1
    """Rows of the blocks that decode the answer after such passes, and in forks."""


_MANY_KEYS, _FEW_KEYS = 600, 40
"""Keys of two sequences that share passes: runtimes split keys at 512 or more."""
_RUN, _NEXT = 16, 5
"""Rows of an answer that verifies rules, and rows of the turn after it."""
_CHUNKS, _READ_AGAIN = (7, 33), 144
"""Rows of the passes that read the end of its prompt again, by context, and of that end."""

_QUICK = Depth(3, (3, 1, 2, 4, 8, 16, 32), (31, -1, -_SHORT))


@dataclass(frozen=True, slots=True)
class RowComparison:
    """Rows under one condition, compared with the reference."""

    rows: int = 0
    differing: int = 0
    """Rows that differ in any bit."""
    other_picks: int = 0
    """Rows whose best token differs."""
    largest_difference: float = 0.0
    """Largest difference between logits of one position."""

    @property
    def holds(self) -> bool:
        """True if rows were compared and none differs."""
        return self.rows > 0 and not self.differing

    def __add__(self, other: "RowComparison") -> "RowComparison":
        return RowComparison(
            self.rows + other.rows,
            self.differing + other.differing,
            self.other_picks + other.other_picks,
            max(self.largest_difference, other.largest_difference),
        )

    def as_dict(self) -> dict[str, Any]:
        rows = max(self.rows, 1)
        return {
            "holds": self.holds,
            "rows": self.rows,
            "differing": self.differing,
            "differing_rate": self.differing / rows,
            "other_picks": self.other_picks,
            "other_picks_rate": self.other_picks / rows,
            "largest_difference": self.largest_difference,
        }


def compare(logits: Logits, expected: Logits) -> RowComparison:
    """Compare logits, [rows, vocab] float32, bit for bit."""
    differing = (logits.view(np.uint32) != expected.view(np.uint32)).any(axis=1)
    if not differing.any():
        return RowComparison(len(logits))
    picks = logits[differing].argmax(axis=1) != expected[differing].argmax(axis=1)
    largest = float(np.abs(logits[differing] - expected[differing]).max())
    return RowComparison(len(logits), int(differing.sum()), int(picks.sum()), largest)


def measure_invariance(
    engine: Engine, names: Container[str] = CONDITIONS
) -> dict[str, RowComparison]:
    """Compare the conditions in `names`; those that do not fit into the engine are missing."""
    sequences = 2 if room_for(engine, 2) >= _MIN_TEXT else 1
    room = room_for(engine, sequences)
    if room < _MIN_TEXT:
        return {}
    # Whole KV blocks, which can be shared, if the next turn also fits.
    blocks = min(_TEXT, room - _MORE) // engine.block_size
    length = blocks * engine.block_size or min(_TEXT, room)
    left_out = () if sequences > 1 else (BATCH, PREFIX_CACHE)
    wanted = [name for name in CONDITIONS if name in names and name not in left_out]
    return compare_rows(engine, length - _QUICK.answer, _QUICK, wanted, seconds=_SECONDS)


def rows_hold(engine: Engine, contexts: Sequence[int]) -> bool:
    """Return True if rows do not depend on blocks, a prompt's chunks, or a text's author.

    They are compared after those of `contexts` that fit: single rows after all of them, until
    `_RULE_SECONDS` have passed, and more after the first ones. A difference is easily missed:
    activations are rounded to 8 bits, which hides nearly all small differences: only one row in
    eight differed where another kernel had run. So answers are runs of rows: a difference stays.
    """
    started = perf_counter()
    fitting = [at for at in contexts if at + _RUN + _NEXT <= room_for(engine, 2)]
    tokens = _random(engine, max(fitting, default=0) + _RUN + _NEXT)
    with closing(engine.open()) as sequence:
        for number, context in enumerate(fitting):
            if number >= len(_CHUNKS) and perf_counter() - started > _RULE_SECONDS:
                break
            text, answered = tokens[:context], tokens[: context + _RUN]
            run, further = answered[context:], tokens[context + _RUN :][:_NEXT]
            expected = _rows(engine, sequence, text, run, _RUN)[-_RUN:]
            pairs = []
            for count in (1,) if number else (5, 1):
                sequence.rewind(context)
                pairs.append((_rows(engine, sequence, text, run, count), expected))
            if number < len(_CHUNKS):
                with closing(sequence.fork(max(context - _READ_AGAIN, 0))) as other:
                    rows = _rows(engine, other, text, run, _RUN, chunk=_CHUNKS[number])
                    pairs.append((rows[-_RUN:], expected))
                    if sequence.shareable_length == len(answered):  # by the next prompt
                        other.rewind(context)
                        rows = _rows(engine, other, answered, further, _NEXT)[-_NEXT:]
                        pairs.append((rows, _rows(engine, sequence, answered, further, _NEXT)))
            sequence.rewind(context)
            if any(compare(*pair).differing for pair in pairs):
                return False
    return bool(fitting)


def together_holds(engine: Engine) -> bool:
    """Return True if rows of two sequences in one pass have the same bits as alone.

    Several rows per pass are not compared: `rows_hold` has compared numbers of rows.
    """
    many = min(_MANY_KEYS, room_for(engine, 2) - _RUN)
    tokens, lengths = _random(engine, many + _RUN), (many, min(_FEW_KEYS, many))
    with closing(engine.open()) as first, closing(engine.open()) as second:
        pairs = [*zip((first, second), lengths, strict=True)]
        alone = [
            _rows(engine, each, tokens[:length], tokens[length : length + _RUN], _RUN)[-_RUN:]
            for each, length in pairs
        ]
        for count in (1, _RUN // 4):
            for each, length in pairs:
                each.rewind(length)
            for at in range(0, _RUN, count):
                work = [(each, Block(tokens[each.length :][:count], count)) for each, _ in pairs]
                for rows, expected in zip(engine.step(work).logits, alone, strict=True):
                    if compare(rows, expected[at : at + count]).differing:
                        return False
                for each, _ in pairs:
                    each.commit(count)
    return True


def room_for(engine: Engine, sequences: int) -> int:
    """Return the tokens per sequence that fit into `sequences` new sequences."""
    blocks = engine.free_slots // engine.block_size // sequences
    return min(blocks * engine.block_size, engine.context_length - engine.min_rows)


def compare_rows(
    engine: Engine,
    context: int,
    depth: Depth,
    names: Container[str] = CONDITIONS,
    *,
    seconds: float = inf,
) -> dict[str, RowComparison]:
    """Compare the rows of an answer after a prompt of `context` tokens, by condition.

    Conditions whose sequences need more slots than there are, as in some engines, are missing.
    After `seconds`, a further condition makes only one comparison.
    """
    started = perf_counter()
    several = BATCH in names or PREFIX_CACHE in names
    comparisons: dict[str, RowComparison] = {}
    room = room_for(engine, 2 if several else 1)
    with closing(engine.open()) as sequence:
        text = _Text(engine, sequence, context, depth, room)
        checks: dict[str, Iterator[RowComparison]] = {
            BLOCK_LENGTH: text.block_length(),
            CHUNKED_PREFILL: text.chunked_prefill(),
            BATCH: text.batch(),
            PREFIX_CACHE: text.prefix_cache(),
        }
        for name in (name for name in checks if name in names):
            try:
                for compared in checks[name]:
                    comparisons[name] = comparisons.get(name, RowComparison()) + compared
                    if perf_counter() - started > seconds:
                        break
            except CacheFull:
                comparisons.pop(name, None)
    return comparisons


class _Text:
    """A prompt and its answer with their reference rows, and another text."""

    def __init__(
        self, engine: Engine, sequence: KVSequence, context: int, depth: Depth, room: int
    ) -> None:
        """Compute the reference in `sequence`; `room` is the maximum tokens of one."""
        length = context + depth.answer + max(depth.blocks)
        tokens = _random(engine, 2 * length)
        self._engine, self._depth = engine, depth
        self._other = tokens[length:]
        self._prompt = tokens[:context]
        self._tokens = tokens[context : min(length, room)]  # the answer, and more
        self._answer = self._tokens[: depth.answer]
        self._sequence = sequence
        self._expected = _rows(engine, sequence, self._prompt, self._answer, 1)

    def block_length(self) -> Iterator[RowComparison]:
        """Decode the answer in blocks; the last block has more rows, which are dropped."""
        for count in self._depth.blocks:
            self._sequence.rewind(len(self._prompt))
            for at in range(0, len(self._answer), count):
                block = self._tokens[at : at + count]
                kept = min(count, len(self._answer) - at)
                work = [(self._sequence, Block(block, len(block)))]
                rows = self._engine.step(work).logits[0][:kept]
                yield compare(rows, self._expected[1 + at :][:kept])
                self._sequence.commit(kept)

    def batch(self) -> Iterator[RowComparison]:
        """Run it in a batch with a prefill, and in a batch with a decode."""
        sequence = self._sequence
        self._begin_answer()
        with closing(self._engine.open()) as other:
            half = max(len(self._prompt) // 2, 1)
            prefill = Block(self._other[:half], 1, prefill=True)
            alone = self._engine.step([(other, prefill)]).logits[0].copy()
            block = Block(self._answer, len(self._answer))
            logits = self._engine.step([(sequence, block), (other, prefill)]).logits
            yield compare(logits[0].copy(), self._expected[1:])
            logits = self._engine.step([(other, prefill), (sequence, block)]).logits
            yield compare(logits[0].copy(), alone) + compare(logits[1].copy(), self._expected[1:])
            other.commit(half)
            for count in (1, 2):
                other_block = Block(self._other[half : half + 3 - count], 3 - count)
                work = [(other, other_block), (sequence, Block(self._answer[:count], count))]
                rows = self._engine.step(work).logits[1].copy()
                yield compare(rows, self._expected[1 : 1 + count])

    def chunked_prefill(self) -> Iterator[RowComparison]:
        """Prefill the prompt in chunks, and then decode the answer."""
        for chunk in self._depth.chunks:
            rows = chunk if chunk > 0 else len(self._prompt) + chunk
            if 0 < rows < len(self._prompt):
                self._sequence.rewind(0)
                yield compare(self._after(self._sequence, rows), self._expected)

    def prefix_cache(self) -> Iterator[RowComparison]:
        """Fork all prompt slots, all but a few, half, and those of prompt and answer."""
        self._begin_answer()
        size = len(self._prompt)
        for length in (size - 1, max(size - _SHORT, 0), size // 2):
            with closing(self._sequence.fork(length)) as child:
                yield compare(self._after(child, _CALL), self._expected)
        for token in self._answer:
            self._engine.step([(self._sequence, Block([token], 1))])
            self._sequence.commit(1)
        # The next turn of a chat: the answer is now part of the prompt.
        tokens = [*self._prompt, *self._tokens[: self._depth.answer + _MORE]]
        text, further = tokens[:-1], tokens[-1]
        with closing(self._engine.open()) as fresh:
            expected = _rows(self._engine, fresh, text, [further], 1)
        with closing(self._sequence.fork(len(text) - 1)) as child:
            yield compare(_rows(self._engine, child, text, [further], 1), expected)

    def _begin_answer(self) -> None:
        self._sequence.rewind(0)
        _rows(self._engine, self._sequence, self._prompt, [], 1)

    def _after(self, sequence: KVSequence, chunk: int) -> Logits:
        """Return the reference's rows, after the tokens in a sequence and a chunked prefill."""
        count = self._depth.after
        return _rows(self._engine, sequence, self._prompt, self._answer, count, chunk=chunk)


def _rows(
    engine: Engine,
    sequence: KVSequence,
    prompt: Sequence[int],
    answer: Sequence[int],
    count: int,
    *,
    chunk: int = _CALL,
) -> Logits:
    """Commit the rest of a prompt, in chunks, and an answer, in blocks of `count` rows.

    Returns:
        Logits of the last prompt row, if it was missing, and of the answer, [rows, vocab].
    """
    rows = []
    while sequence.length < len(prompt):
        part = Block(prompt[sequence.length :][:chunk], 1, prefill=True)
        rows = [engine.step([(sequence, part)]).logits[0].copy()]
        sequence.commit(len(part.tokens))
    for at in range(0, len(answer), count):
        block = answer[at : at + count]
        rows.append(engine.step([(sequence, Block(block, len(block)))]).logits[0].copy())
        sequence.commit(len(block))
    return np.concatenate(rows)


def _random(engine: Engine, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(1).integers(0, engine.vocab_size, count).tolist()
    return tokens
