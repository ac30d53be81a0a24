"""A model small enough for thousands of forward passes per second, with real slots.

Keys and values live in arrays by sequence. A row is computed from the slots before its end, and
from nothing else: the values of the last two say which tokens the model
likes next, and a hash over every key moves each logit a little. So a stale, missing or misplaced
slot changes the row. Integers wrap and the floats are added one by one: a row's bits do not depend
on how many rows the call had.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np

from paceline.decoding.types import Best, Block
from paceline.engines.base import KVSequence, StepResult
from paceline.engines.kv_blocks import BlockPool, BlockTable, PooledEngine

PADDING = 0


class ToySequence(BlockTable):
    shares_answers = True

    def __init__(self, pool: BlockPool, engine: "ToyEngine") -> None:
        super().__init__(pool, engine.context_length)
        self._engine = engine
        # Slots start as garbage, so that one which nobody wrote to shows when it is read.
        self.keys, self.values = engine.garbage[0].copy(), engine.garbage[1].copy()

    def fork_length(self, length: int) -> int:
        """Whole KV blocks, as in an engine whose sequences share memory."""
        size = self._pool.block_size
        return super().fork_length(length) // size * size

    def _new(self) -> Self:
        return type(self)(self._pool, self._engine)

    def _copy(self, fork: Self, shared: int) -> None:
        fork.keys[:shared], fork.values[:shared] = self.keys[:shared], self.values[:shared]


class ToyEngine(PooledEngine[ToySequence]):
    name = "toy"
    _table_type = ToySequence

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        context_length: int = 256,
        cache_blocks: int = 128,
        block_size: int = 8,
        min_rows: int = 1,
        best: bool = False,
    ) -> None:
        """`best`: returns nothing but the best tokens where that is asked for."""
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.min_rows = min_rows
        self.taps = ()
        self.steps = 0
        self._best = best
        rng = np.random.default_rng(7)
        places = context_length + min_rows  # padding may lie beyond the context
        self.garbage = (
            rng.integers(0, 2**63, places, dtype=np.uint64),
            rng.integers(0, vocab_size, places),
        )
        self._places = rng.integers(0, 2**63, places, dtype=np.uint64) | np.uint64(1)
        self._columns = rng.integers(0, 2**63, vocab_size, dtype=np.uint64) | np.uint64(1)
        self._likes = rng.normal(0, 1, (2, vocab_size, vocab_size)).astype(np.float32)
        # A favourite after each token, in rounds of eight: texts come back to where they were.
        tokens = np.arange(vocab_size)
        self._likes[0, tokens, tokens // 8 * 8 + (tokens + 1) % 8] += 6
        self._pool = BlockPool(cache_blocks, block_size)
        self._logits = np.empty((0, vocab_size), np.float32)

    def open(self) -> ToySequence:
        return ToySequence(self._pool, self)

    def step(self, work: Sequence[tuple[KVSequence, Block]]) -> StepResult:
        tables = self._reserve(work)
        blocks = [block for _, block in work]
        self.steps += 1
        for table, block in zip(tables, blocks, strict=True):
            self._write(table, [*block.tokens, *[PADDING] * self._padding(block)])
        # As in a real engine, the last call's result is invalid now.
        self._logits.fill(np.nan)
        count = sum(block.rows for _, block in work)
        if count > len(self._logits):
            self._logits = np.empty((count, self.vocab_size), np.float32)
        logits = []
        at = 0
        for table, block in zip(tables, blocks, strict=True):
            rows = self._logits[at : at + block.rows]
            at += block.rows
            if block.rows:
                rows[...] = self._read(table, block)
            logits.append(rows)
        # Made-up time, so that policies which look at it decide the same in every run.
        seconds = 1e-3 + 1e-4 * sum(len(block.tokens) for _, block in work)
        best = [
            Best(rows.argmax(axis=1), rows.max(axis=1)) if block.best and self._best else None
            for rows, (_, block) in zip(logits, work, strict=True)
        ]
        for rows, chosen in zip(logits, best, strict=True):
            if chosen is not None:
                rows[...] = np.nan
        return StepResult(logits, [{} for _ in work], seconds, best)

    def describe(self) -> dict[str, str]:
        return {"engine": self.name, "min_rows": str(self.min_rows)}

    def _padding(self, block: Block) -> int:
        return max(self.min_rows - len(block.tokens), 0)

    def _write(self, table: ToySequence, tokens: list[int]) -> None:
        where = slice(table.length, table.length + len(tokens))
        ids = np.array(tokens, np.uint64)
        places = np.arange(where.start, where.stop, dtype=np.uint64)
        table.keys[where] = (ids * np.uint64(0x9E3779B97F4A7C15)) ^ (places << np.uint64(20))
        table.values[where] = tokens

    def _read(self, table: ToySequence, block: Block) -> np.ndarray:
        end = table.length + len(block.tokens)
        mixed = np.cumsum(table.keys[:end] * self._places[:end], dtype=np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes = mixed[end - block.rows :, None] * self._columns >> np.uint64(40)
        noise = hashes.astype(np.float32) * np.float32(2.0**-23)
        last = table.values[end - block.rows : end]
        before = np.concatenate([[0], table.values[:end]])[end - block.rows : end]
        return self._likes[0][last] + self._likes[1][before] + noise
