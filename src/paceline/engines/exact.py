"""Which rows have the bits that they have in plain decoding, measured on this machine.

`measure_rules` chooses the rules of `rows.py` when an engine opens, from calls that a `Prober`
makes of its runtime. A difference is easily missed: activations are rounded to 8 bits, which hides
nearly all that is small, so that one row in eight differed where another kernel had run. So single
rows are compared in runs, in which a difference stays.

`compare_rows` then compares what `Engine.step` gives, by condition: `exact` in a result rests on
it, and `verify` does the same after more contexts. The reference is one sequence alone: its prompt
is prefilled in one call, its answer decoded token by token. Conditions are

- `block_length`: the answer in blocks of several rows;
- `batch`: in calls with another sequence, in prefill or in decode;
- `chunked_prefill`: after a prefill in other chunks;
- `prefix_cache`: in a fork that shares the slots of a prompt, or of a prompt and its answer.

Independent of runtimes, models and policies. A measurement proves nothing for what it did not run:
other threads, another processor, longer contexts.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np

from paceline.decoding.types import Block, Logits
from paceline.engines.base import Engine, KVSequence
from paceline.engines.rows import RowRange, RowRules
from paceline.errors import CacheFull

_ROWS = 7
"""Positions that calls of different sizes compare."""

_SINGLE_CONTEXTS = (40, 400, 608, 1072)
"""Keys before runs of single rows: under and over 256, where llama.cpp's libraries begin to drop
masked keys, and 512 and 1,024."""

_CALLS = (2, 3, 5, 8, 16, 32)
"""Rows of calls one after another, with those numbers between which kernels change."""

LONGEST = _SINGLE_CONTEXTS[-1] + 16
"""Positions of the longest run."""

_SECONDS = 2.0
"""Time after which single rows are tried no further, and a condition makes one comparison only."""


# -- rules for calls -------------------------------------------------------------------------------


class Prober(Protocol):
    """Makes the calls of a measurement, in one sequence with the same tokens at every position."""

    room: int
    """Positions that the sequence can have."""
    contexts: Sequence[int]
    """Keys before the calls that are compared."""
    sizes: Sequence[int]
    """Rows of calls that are compared, beside those that a rule suggests."""

    def prefill(self, length: int, rows: RowRange) -> None:
        """Drop all positions from `length` on; compute those up to it that are missing.

        Their calls have numbers of rows in `rows`.
        """
        ...

    def rows(self, length: int, count: int, outputs: int) -> Logits:
        """Run `count` rows after `length` positions, in one call.

        Returns:
            Logits of the first `outputs` rows, [outputs, vocab] float32.
        """
        ...


def measure_rules(
    prober: Prober,
    candidates: Sequence[RowRules],
    may_be_single: Callable[[int], bool] = lambda _: False,
) -> RowRules | None:
    """The cheapest candidate whose calls give equal bits; None: no candidate does.

    Candidates are ordered by ascending cost. `may_be_single` returns whether a single row after so
    many keys may have the bits of others.
    """
    started, runs = perf_counter(), 0
    rules = next((rules for rules in candidates if _agree(prober, rules, started)), None)
    if rules is None or rules.decode.most == 1:
        return rules
    started = perf_counter()
    for context in _SINGLE_CONTEXTS:
        late = runs and perf_counter() - started > _SECONDS
        if late or context + rules.decode.most > prober.room:
            break
        keys = range(context, context + rules.decode.most)
        if not all(map(may_be_single, keys)):
            continue
        prober.prefill(context, rules.prefill)
        run = [prober.rows(key, 1, 1).tobytes() for key in keys]
        if b"".join(run) != prober.rows(context, len(keys), len(keys)).tobytes():
            return rules
        runs += 1
    return rules._replace(single=runs > 0)


def _agree(prober: Prober, rules: RowRules, started: float) -> bool:
    """True if calls of several sizes give the same bits, in both roles, after every context.

    After `_SECONDS` since `started` the first context is compared alone.
    """
    for context in prober.contexts:
        if context != prober.contexts[0] and perf_counter() - started > _SECONDS:
            break
        prober.prefill(context, rules.prefill)
        roles = dict.fromkeys((rules.decode, rules.prefill))
        if not all(_equal(prober, context, rows, rules.decode) for rows in roles):
            return False
        if rules.one_class and len(roles) > 1 and not _equal_after(prober, context, rules):
            return False
    return True


def _equal_after(prober: Prober, context: int, rules: RowRules) -> bool:
    """True if calls of a prompt and of an answer leave the same keys and values.

    A difference in any of them stays, and later rows have it. It may still be missed: that of a
    kernel for 32 rows and more showed in 93 of 150 texts. So candidates are those that a library's
    source allows.
    """
    end = context + sum(_CALLS)
    if end + rules.decode.most > prober.room:
        return False
    bits = []
    for calls in (_CALLS, (sum(_CALLS),)):
        at = context
        prober.prefill(at, rules.prefill)
        for rows in calls:
            prober.prefill(at := at + rows, RowRange(rows, rows))
        bits.append(prober.rows(end, rules.decode.most, rules.decode.most).tobytes())
    return bits[0] == bits[1]


def _equal(prober: Prober, context: int, rows: RowRange, outputs: RowRange) -> bool:
    """True if calls of several sizes in `rows` give the same bits after a context.

    Numbers of rows in `outputs` get logits: the head is a product of its own, and one row of it
    differed from two at 2 of 300 positions. Only runs of single rows show that it may be one.
    """
    least, most = rows.least, min(rows.most, prober.room - context)
    if most < least:
        return False
    expected = _bits(prober, context, most, outputs)
    fewest = prober.rows(context, least, min(least, outputs.least))
    if fewest[0].tobytes() != expected[0]:
        return False
    # At other places in calls of one size.
    if least > 1 and _bits(prober, context + 1, least, outputs)[:-1] != expected[1:]:
        return False
    sizes = {least, least + 1, 2 * least + 1, *prober.sizes} & {*range(least, most)}
    return all(_bits(prober, context, size, outputs) == expected for size in sorted(sizes))


def _bits(prober: Prober, start: int, size: int, outputs: RowRange) -> Sequence[bytes]:
    """Bits of `_ROWS` positions from `start` on, from calls of `size` rows."""
    bits: list[bytes] = []
    while len(bits) < _ROWS:
        count = min(size, outputs.most, max(outputs.least, _ROWS))
        logits = prober.rows(start + len(bits), size, count)
        bits += [row.tobytes() for row in logits]
    return bits[:_ROWS]


# -- comparisons of an engine's rows ---------------------------------------------------------------

BLOCK_LENGTH = "block_length"
BATCH = "batch"
CHUNKED_PREFILL = "chunked_prefill"
PREFIX_CACHE = "prefix_cache"

CONDITIONS = (BLOCK_LENGTH, BATCH, CHUNKED_PREFILL, PREFIX_CACHE)

_TEXT, _LEAST = 64, 12
"""Tokens of prompt and answer together, if they fit, and the fewest that are compared."""
_MORE = 2
"""Tokens of the next turn."""
_CALL = 1024
"""Most rows of a call of a prompt."""
_SHORT = 4
"""Rows at the end of a prompt that are read alone: few rows may take another kernel than many."""


class Depth(NamedTuple):
    """How much is compared after a context."""

    answer: int
    """Rows of the answer."""
    blocks: Sequence[int]
    """Rows of the blocks in which it is decoded."""
    chunks: Sequence[int] = ()
    """Rows of the calls that read the prompt; below 0: all but so many, and then those."""
    after: int = 1
    """Rows of the blocks that decode the answer after such calls, and in forks."""


_QUICK = Depth(3, (3, 1, 2, 4, 8, 16, 32), (31, -1, -_SHORT))


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


def measure_invariance(engine: Engine, names: Container[str] = CONDITIONS) -> dict[str, Compared]:
    """Condition -> comparison, of those in `names`; conditions that do not fit are missing."""
    sequences = 2 if room_for(engine, 2) >= _LEAST else 1
    room = room_for(engine, sequences)
    if room < _LEAST:
        return {}
    # Whole KV blocks, which can be shared, if the next turn fits too.
    blocks = min(_TEXT, room - _MORE) // engine.block_size
    length = blocks * engine.block_size or min(_TEXT, room)
    left_out = () if sequences > 1 else (BATCH, PREFIX_CACHE)
    wanted = [name for name in CONDITIONS if name in names and name not in left_out]
    return compare_rows(engine, length - _QUICK.answer, _QUICK, wanted, seconds=_SECONDS)


def room_for(engine: Engine, sequences: int) -> int:
    """Tokens per sequence that fit into `sequences` new sequences."""
    blocks = engine.free_slots // engine.block_size // sequences
    return min(blocks * engine.block_size, engine.context_length - engine.min_rows)


def compare_rows(
    engine: Engine,
    context: int,
    depth: Depth,
    names: Container[str] = CONDITIONS,
    *,
    seconds: float = inf,
) -> dict[str, Compared]:
    """Condition -> comparison of the rows of an answer after a prompt of `context` tokens.

    Conditions whose sequences take more slots than there are, as some engines' do, are missing.
    After `seconds` a further condition makes one comparison only.
    """
    started = perf_counter()
    several = BATCH in names or PREFIX_CACHE in names
    comparisons: dict[str, Compared] = {}
    with closing(_Text(engine, context, depth, room_for(engine, 2 if several else 1))) as text:
        checks: dict[str, Iterator[Compared]] = {
            BLOCK_LENGTH: text.block_length(),
            CHUNKED_PREFILL: text.chunked_prefill(),
            BATCH: text.batch(),
            PREFIX_CACHE: text.prefix_cache(),
        }
        for name in (name for name in checks if name in names):
            try:
                for compared in checks[name]:
                    comparisons[name] = comparisons.get(name, Compared()) + compared
                    if perf_counter() - started > seconds:
                        break
            except CacheFull:
                comparisons.pop(name, None)
    return comparisons


class _Text:
    """A prompt and its answer with their reference rows, and another text."""

    def __init__(self, engine: Engine, context: int, depth: Depth, room: int) -> None:
        """`room`: most tokens of a sequence."""
        length = context + depth.answer + max(depth.blocks)
        tokens = np.random.default_rng(1).integers(0, engine.vocab_size, 2 * length).tolist()
        self._engine, self._depth = engine, depth
        self._other = tokens[length:]
        self._prompt = tokens[:context]
        self._tokens = tokens[context : min(length, room)]  # the answer, and more
        self._answer = self._tokens[: depth.answer]
        self._sequence = engine.open()
        try:
            self._expected = self._rows(self._sequence, self._prompt, self._answer, 1)
        except BaseException:
            self._sequence.close()
            raise

    def close(self) -> None:
        self._sequence.close()

    def block_length(self) -> Iterator[Compared]:
        """The answer in blocks, one after another; the last has more rows, which are dropped."""
        for count in self._depth.blocks:
            self._sequence.rewind(len(self._prompt))
            for at in range(0, len(self._answer), count):
                block = self._tokens[at : at + count]
                kept = min(count, len(self._answer) - at)
                work = [(self._sequence, Block(block, len(block)))]
                rows = self._engine.step(work).logits[0][:kept]
                yield compare(rows, self._expected[1 + at :][:kept])
                self._sequence.commit(kept)

    def batch(self) -> Iterator[Compared]:
        """In a batch with a prefill, and in a batch with a decode."""
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

    def chunked_prefill(self) -> Iterator[Compared]:
        """The prompt in chunks, and then the answer."""
        for chunk in self._depth.chunks:
            rows = chunk if chunk > 0 else len(self._prompt) + chunk
            if 0 < rows < len(self._prompt):
                self._sequence.rewind(0)
                yield compare(self._after(self._sequence, rows), self._expected)

    def prefix_cache(self) -> Iterator[Compared]:
        """A fork of all prompt slots, of all but a few, of half, and of prompt and answer."""
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
            expected = self._rows(fresh, text, [further], 1)
        with closing(self._sequence.fork(len(text) - 1)) as child:
            yield compare(self._rows(child, text, [further], 1), expected)

    def _begin_answer(self) -> None:
        """Prefill the prompt anew."""
        self._sequence.rewind(0)
        self._prefill(self._sequence, self._prompt)

    def _after(self, sequence: KVSequence, chunk: int) -> Logits:
        """The rows of the reference, after what is in a sequence and a prefill in chunks."""
        return self._rows(sequence, self._prompt, self._answer, self._depth.after, chunk)

    def _rows(
        self,
        sequence: KVSequence,
        prompt: Sequence[int],
        answer: Sequence[int],
        count: int,
        chunk: int = _CALL,
    ) -> Logits:
        """Commit prompt and answer, in chunks and in blocks of `count` rows.

        Returns:
            Logits of the last prompt row and on, [1 + answer, vocab].
        """
        rows = [self._prefill(sequence, prompt[sequence.length :], chunk)]
        for at in range(0, len(answer), count):
            block = answer[at : at + count]
            rows.append(self._engine.step([(sequence, Block(block, len(block)))]).logits[0].copy())
            sequence.commit(len(block))
        return np.concatenate(rows)

    def _prefill(self, sequence: KVSequence, tokens: Sequence[int], chunk: int = _CALL) -> Logits:
        """Prefill in chunks; logits of the last row, [1, vocab]."""
        for at in range(0, len(tokens), chunk):
            part = Block(tokens[at : at + chunk], 1, prefill=True)
            row = self._engine.step([(sequence, part)]).logits[0].copy()
            sequence.commit(len(part.tokens))
        return row
