import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.engines.kv_blocks import BlockPool, BlockTable
from paceline.errors import CacheFull
from support.errors import raises

SIZE = 4
CONTEXT = 40


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(10, SIZE)


@pytest.fixture
def table(pool: BlockPool) -> BlockTable:
    return BlockTable(pool, CONTEXT)


def grow(table: BlockTable, rows: int, *, keep: int | None = None) -> None:
    table.reserve(rows)
    table.commit(rows if keep is None else keep)


# --- the pool


def test_an_exhausted_pool_error_has_its_size_and_a_fix():
    with raises(CacheFull, "0 slots", "cache_tokens"):
        BlockPool(0, SIZE).take()


def test_unreserved_rows_use_the_spare_block(pool: BlockPool, table: BlockTable):
    grow(table, 3)
    table.reserve(1)
    assert table.blocks(1) == table.blocks(0)
    assert table.blocks(2) == [*table.blocks(1), pool.spare]
    assert pool.free == 9
    assert pool.spare not in {pool.take() for _ in range(9)}


# --- going back


def test_a_rewind_into_a_shared_block_drops_to_its_start(table: BlockTable):
    # The next row would be written to slot 5, in a block that the other one reads.
    grow(table, 10)
    other = table.fork(8)
    table.rewind(5)
    assert table.length == 4
    grow(table, 4)
    assert table.blocks(0)[0] == other.blocks(0)[0]
    assert table.blocks(0)[1] != other.blocks(0)[1]


def test_a_rewind_into_a_formerly_shared_block_keeps_its_slots(table: BlockTable):
    grow(table, 10)
    table.fork(8).close()
    table.rewind(5)
    assert table.length == 5


def test_commits_beyond_the_reservation_and_negative_forks_are_rejected(table: BlockTable):
    grow(table, 6)
    table.reserve(12)
    table.rewind(6)
    for one in (table, table.fork(6)):
        with raises(ValueError, "commit"):
            one.commit(1)
    with raises(ValueError, "fork(-1)"):
        table.fork(-1)


# --- any use of several


MOST = 5
places = st.integers(0, MOST - 1)


class Tables(RuleBasedStateMachine):
    """Any use of several tables: each still reads its own writes, and no block is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, SIZE)
        self.tables: list[BlockTable] = []
        self.texts: list[list[int]] = []  # what each table wrote to the slots that are its own
        self.slots: dict[tuple[int, int], int] = {}  # (KV block, offset) -> written there last
        self.written = 0

    @initialize()
    def begin(self):
        self.new()

    @precondition(lambda self: len(self.tables) < MOST)
    @rule()
    def new(self):
        self.tables.append(BlockTable(self.pool, CONTEXT))
        self.texts.append([])

    @rule(place=places, rows=st.integers(1, 14), padding=st.integers(0, 2), keep=st.integers(0, 14))
    def step(self, place: int, rows: int, padding: int, keep: int):
        table = self.tables[place % len(self.tables)]
        text = self.texts[place % len(self.tables)]
        free, length = self.pool.free, table.length
        try:
            table.reserve(rows)
        except CacheFull:
            assert (self.pool.free, table.length) == (free, length)
            return
        blocks = table.blocks(rows + padding)
        assert len(blocks) == -(-(length + rows + padding) // SIZE)
        for slot in range(length, length + rows + padding):
            self.written += 1
            self.slots[blocks[slot // SIZE], slot % SIZE] = self.written
            text.append(self.written)
        table.commit(min(keep, rows))
        assert table.length == length + min(keep, rows)
        del text[table.length :]

    @rule(place=places, length=st.integers(0, CONTEXT))
    def rewind(self, place: int, length: int):
        table = self.tables[place % len(self.tables)]
        length = min(length, table.length)
        table.rewind(length)
        # At most the partial KV block is dropped, and all reserved slots.
        assert length - length % SIZE <= table.length <= length
        assert len(table._numbers) == -(-table.length // SIZE)
        del self.texts[place % len(self.tables)][table.length :]

    @precondition(lambda self: len(self.tables) < MOST)
    @rule(place=places, length=st.integers(0, CONTEXT))
    def fork(self, place: int, length: int):
        table = self.tables[place % len(self.tables)]
        other = table.fork(length)
        assert other.length == min(length, table.length) // SIZE * SIZE
        self.texts.append(self.texts[place % len(self.tables)][: other.length])
        self.tables.append(other)

    @precondition(lambda self: len(self.tables) > 1)
    @rule(place=places)
    def close(self, place: int):
        self.texts.pop(place % len(self.tables))
        self.tables.pop(place % len(self.tables)).close()

    @invariant()
    def every_table_still_sees_what_it_wrote(self):
        for table, text in zip(self.tables, self.texts, strict=True):
            blocks = table.blocks(0)
            assert [self.slots[blocks[at // SIZE], at % SIZE] for at in range(table.length)] == text

    @invariant()
    def every_block_is_free_or_held(self):
        held = {number for table in self.tables for number in table._numbers}
        assert self.pool.free + len(held) == 12

    def teardown(self) -> None:
        for table in self.tables:
            table.close()
        assert self.pool.free == 12, "a block was lost"


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=40)
