from typing import Self

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.decoding.types import Block
from paceline.engines.kv_blocks import BlockPool, BlockTable
from paceline.errors import CacheFull
from support.errors import raises

SIZE = 4
CONTEXT = 40


class Table(BlockTable):
    copied = 0

    def _new(self) -> Self:
        return type(self)(self._pool, CONTEXT)

    def _copy(self, fork: Self, shared: int) -> None:
        fork.copied = shared


@pytest.fixture
def table() -> Table:
    return Table(BlockPool(10, SIZE), CONTEXT)


def grow(table: Table, rows: int, *, prefill: bool = True) -> None:
    table.reserve(rows)
    table.ran(Block([0] * rows, 0, prefill=prefill))
    table.commit(rows)


def test_an_exhausted_pool_error_has_its_size_and_a_fix():
    with raises(CacheFull, "0 slots", "cache_tokens"):
        BlockPool(0, SIZE).take(1)


def test_commits_beyond_the_reservation_and_negative_forks_are_rejected(table: Table):
    grow(table, 6)
    table.reserve(12)
    table.rewind(6)
    for one in (table, table.fork(6)):
        with raises(ValueError, "commit"):
            one.commit(1)
    with raises(ValueError, "fork(-1)"):
        table.fork(-1)


def test_only_prefilled_slots_are_shared_unless_answers_are_too(table: Table):
    grow(table, 6)
    grow(table, 3, prefill=False)
    assert (table.length, table.shareable_length, table.fork(9).copied) == (9, 6, 6)
    table.rewind(5)
    assert table.shareable_length == 5
    table.shares_answers = True
    grow(table, 3, prefill=False)
    assert table.fork(9).copied == 8


def test_a_fork_without_room_is_empty(table: Table):
    grow(table, 24)
    fork = table.fork(24)
    assert (fork.length, fork.copied, table.length) == (0, 0, 24)


MOST = 5
places = st.integers(0, MOST - 1)


class Tables(RuleBasedStateMachine):
    """Any use of several tables: each has blocks for its slots, and no block is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, SIZE)
        self.tables: list[Table] = []

    @initialize()
    def begin(self):
        self.new()

    @precondition(lambda self: len(self.tables) < MOST)
    @rule()
    def new(self):
        self.tables.append(Table(self.pool, CONTEXT))

    @rule(place=places, rows=st.integers(1, 14), keep=st.integers(0, 14))
    def step(self, place: int, rows: int, keep: int):
        table = self.tables[place % len(self.tables)]
        free, length = self.pool.free, table.length
        try:
            table.reserve(rows)
        except CacheFull:
            assert (self.pool.free, table.length) == (free, length)
            return
        assert table.blocks * SIZE >= length + rows
        table.commit(min(keep, rows))
        assert table.length == length + min(keep, rows)

    @rule(place=places, length=st.integers(0, CONTEXT))
    def rewind(self, place: int, length: int):
        table = self.tables[place % len(self.tables)]
        length = min(length, table.length)
        table.rewind(length)
        assert (table.length, table.blocks) == (length, -(-length // SIZE))

    @precondition(lambda self: len(self.tables) < MOST)
    @rule(place=places, length=st.integers(0, CONTEXT))
    def fork(self, place: int, length: int):
        table = self.tables[place % len(self.tables)]
        other = table.fork(length)
        assert other.length in (0, table.fork_length(length))
        self.tables.append(other)

    @precondition(lambda self: len(self.tables) > 1)
    @rule(place=places)
    def close(self, place: int):
        self.tables.pop(place % len(self.tables)).close()

    @invariant()
    def every_block_is_free_or_held(self):
        assert self.pool.free + sum(table.blocks for table in self.tables) == 12

    def teardown(self) -> None:
        for table in self.tables:
            table.close()
        assert self.pool.free == 12, "a block was lost"


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=40)
