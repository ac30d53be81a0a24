"""Row invariance: whether a row's bits depend on how it is computed, measured by condition.

The reference is one sequence alone: its prompt is prefilled in one call, its answer is decoded
token by token. Its rows are compared bit for bit with rows of the same tokens

- `block_length`: in blocks of several rows;
- `batch`: in calls with another sequence, in prefill or in decode;
- `chunked_prefill`: after a prefill in other chunks;
- `prefix_cache`: in a fork that shares the slots of a prompt, or of a prompt and its answer.

Independent of models and policies. Conditions that do not fit into the free slots are not measured.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from paceline.decoding.types import Block, Logits
from paceline.engines.base import Engine, KVSequence
from paceline.errors import CacheFull

BLOCK_LENGTH = "block_length"
BATCH = "batch"
CHUNKED_PREFILL = "chunked_prefill"
PREFIX_CACHE = "prefix_cache"

CONDITIONS = (BLOCK_LENGTH, BATCH, CHUNKED_PREFILL, PREFIX_CACHE)

_TEXT = 64
"""Tokens of prompt and answer together, if they fit."""
_ANSWER = 3
_MORE = 2
"""Tokens of the next turn."""
_LEAST = 4 * _ANSWER
_CHUNK = 31
_SHORT = 4
"""Rows at the end of a prompt that are read alone: few rows may take another kernel than many."""
_LENGTHS = (1, 2, 4, 8, 16, 32)
"""Rows of the blocks that are compared."""
_SECONDS = 2.0
"""Time limit after which a further condition makes one comparison only."""


@dataclass(frozen=True, slots=True)
class Compared:
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

    def __add__(self, other: "Compared") -> "Compared":
        return Compared(
            self.rows + other.rows,
            self.differing + other.differing,
            self.other_picks + other.other_picks,
            max(self.largest_difference, other.largest_difference),
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with rates."""
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


def compare(logits: Logits, expected: Logits) -> Compared:
    """Compare logits, [rows, vocab] float32, bit for bit."""
    differing = (logits.view(np.uint32) != expected.view(np.uint32)).any(axis=1)
    if not differing.any():
        return Compared(len(logits))
    picks = logits[differing].argmax(axis=1) != expected[differing].argmax(axis=1)
    largest = float(np.abs(logits[differing] - expected[differing]).max())
    return Compared(len(logits), int(differing.sum()), int(picks.sum()), largest)


def has_room(engine: Engine) -> bool:
    """True if two more sequences fit, which is enough for every condition."""
    return _room(engine, 2) >= _LEAST


def measure_invariance(engine: Engine, names: Container[str] = CONDITIONS) -> dict[str, Compared]:
    """Condition -> comparison, of those in `names`; conditions that do not fit are missing."""
    alone = not has_room(engine)
    room = _room(engine, 1 if alone else 2)
    if room < _LEAST:
        return {}
    started = perf_counter()
    text = np.random.default_rng(1).integers(0, engine.vocab_size, 2 * _TEXT).tolist()
    texts = _Texts(engine, text[: _size(engine, room)], text[_TEXT:], room)
    comparisons: dict[str, Compared] = {}
    checks: dict[str, Callable[[], Iterator[Compared]]] = {
        BLOCK_LENGTH: texts.block_length,
        CHUNKED_PREFILL: texts.chunked_prefill,
        **({} if alone else {BATCH: texts.batch, PREFIX_CACHE: texts.prefix_cache}),
    }
    with closing(texts):
        for name, check in checks.items():
            if name not in names:
                continue
            try:
                for compared in check():
                    comparisons[name] = comparisons.get(name, Compared()) + compared
                    if perf_counter() - started > _SECONDS:
                        break
            except CacheFull:  # sequences of some engines take more slots than their length
                comparisons.pop(name, None)
    return comparisons


def _room(engine: Engine, sequences: int) -> int:
    """Tokens per sequence that fit into `sequences` new sequences."""
    blocks = engine.free_slots // engine.block_size // sequences
    return min(blocks * engine.block_size, engine.context_length - engine.min_rows)


def _size(engine: Engine, room: int) -> int:
    """Tokens of the text: whole KV blocks, which can be shared, if `_MORE` tokens fit too."""
    blocks = (min(_TEXT, room - _MORE)) // engine.block_size
    return blocks * engine.block_size or min(_TEXT, room)


class _Texts:
    """A prompt and its answer with their reference rows, and another text."""

    def __init__(self, engine: Engine, text: list[int], other: list[int], room: int) -> None:
        """`room`: most tokens of a sequence."""
        self._engine, self._other, self._room = engine, other, room
        self._prompt, self._answer = text[:-_ANSWER], text[-_ANSWER:]
        self._next = [*text, *other[:_MORE]][:room]
        self._sequence = engine.open()
        try:
            self._expected = self._rows(self._sequence, self._prompt, self._answer)
        except BaseException:
            self._sequence.close()
            raise

    def close(self) -> None:
        self._sequence.close()

    def block_length(self) -> Iterator[Compared]:
        """The answer as one block, and the first rows of longer blocks."""
        self._begin_answer()
        longest = min(_LENGTHS[-1], self._room - len(self._prompt))
        tokens = [*self._answer, *self._other[:longest]]
        for count in sorted({len(self._answer), *(min(count, longest) for count in _LENGTHS)}):
            logits = self._engine.step([(self._sequence, Block(tokens[:count], count))]).logits[0]
            yield compare(logits[: len(self._answer)], self._expected[1 : 1 + count])

    def batch(self) -> Iterator[Compared]:
        """In a batch with a prefill, and in a batch with a decode."""
        sequence = self._sequence
        self._begin_answer()
        with closing(self._engine.open()) as other:
            half = len(self._prompt) // 2
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

    def chunked_prefill(self) -> Iterator[Compared]:
        """In chunks; all tokens but the last, then the last; and all but a few, then those."""
        for chunk in (_CHUNK, len(self._prompt) - 1, len(self._prompt) - _SHORT):
            self._sequence.rewind(0)
            rows = self._rows(self._sequence, self._prompt, self._answer, chunk)
            yield compare(rows, self._expected)

    def prefix_cache(self) -> Iterator[Compared]:
        """A fork of all prompt slots, of all but a few, of half, and of prompt and answer."""
        self._begin_answer()
        size = len(self._prompt)
        for length in (size - 1, size - _SHORT, size // 2):
            with closing(self._sequence.fork(length)) as child:
                yield compare(self._rows(child, self._prompt, self._answer), self._expected)
        for token in self._answer:
            self._engine.step([(self._sequence, Block([token], 1))])
            self._sequence.commit(1)
        # The next turn of a chat: the answer is now part of the prompt.
        text, further = self._next[:-1], self._next[-1:]
        with closing(self._engine.open()) as fresh:
            expected = self._rows(fresh, text, further)
        with closing(self._sequence.fork(len(text) - 1)) as child:
            yield compare(self._rows(child, text, further), expected)

    def _begin_answer(self) -> None:
        """Prefill the prompt anew, in one call."""
        self._sequence.rewind(0)
        self._prefill(self._sequence, self._prompt, len(self._prompt))

    def _rows(
        self,
        sequence: KVSequence,
        prompt: Sequence[int],
        answer: Sequence[int],
        chunk: int | None = None,
    ) -> Logits:
        """Commit prompt and answer; logits of the last prompt row and on, [1 + answer, vocab]."""
        rows = [self._prefill(sequence, prompt[sequence.length :], chunk or len(prompt))]
        for token in answer:
            rows.append(self._engine.step([(sequence, Block([token], 1))]).logits[0].copy())
            sequence.commit(1)
        return np.concatenate(rows)

    def _prefill(self, sequence: KVSequence, tokens: Sequence[int], chunk: int) -> Logits:
        """Prefill in chunks; logits of the last row, [1, vocab]."""
        for at in range(0, len(tokens), chunk):
            part = Block(tokens[at : at + chunk], 1, prefill=True)
            row = self._engine.step([(sequence, part)]).logits[0].copy()
            sequence.commit(len(part.tokens))
        return row
