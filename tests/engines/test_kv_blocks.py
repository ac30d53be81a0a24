import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.engines.kv_blocks import BlockPool, BlockTable, reserve_all
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


def test_a_pool_hands_out_every_block_once(pool: BlockPool):
    assert sorted(pool.take() for _ in range(10)) == list(range(10))
    assert pool.free == 0


def test_an_empty_pool_says_how_large_it_is_and_what_to_do():
    with raises(CacheFull, "0 slots", "cache_tokens"):
        BlockPool(0, SIZE).take()


def test_a_block_is_free_again_when_its_last_holder_gives_it_back(pool: BlockPool):
    block = pool.take()
    assert not pool.shared(block)
    assert pool.share(block) == block
    assert pool.shared(block)
    pool.give_back(block)
    assert not pool.shared(block)
    assert pool.free == 9
    pool.give_back(block)
    assert pool.free == 10


# --- one table


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (40, 10)])
def test_a_block_takes_as_many_cache_blocks_as_its_rows_need(
    pool: BlockPool, table: BlockTable, rows: int, blocks: int
):
    table.reserve(rows)
    assert table.length == 0
    assert len(table.blocks(rows)) == blocks == 10 - pool.free
    table.reserve(rows)  # again: nothing more
    assert pool.free == 10 - blocks


def test_slots_stay_where_they_are_as_a_sequence_grows(table: BlockTable):
    grow(table, 6)
    first = table.blocks(0)
    grow(table, 9)
    assert table.blocks(0)[:2] == first
    assert len(table.blocks(0)) == 4
    assert len(table.blocks(1)) == 4
    assert table.length == 15


def test_what_was_not_kept_is_written_over_by_the_next_block(table: BlockTable):
    grow(table, 8, keep=3)
    held = table.blocks(5)
    grow(table, 5)
    assert table.length == 8
    assert table.blocks(0) == held


def test_the_blocks_of_a_call_end_with_its_last_row(table: BlockTable):
    # A longer block before left a KV block more than the next one needs.
    grow(table, 12, keep=1)
    table.reserve(2)
    assert len(table.blocks(2)) == 1


@pytest.mark.parametrize("rows", [-1, 4])
def test_only_rows_of_the_last_block_can_be_kept(table: BlockTable, rows: int):
    grow(table, 9)
    table.reserve(3)
    with raises(ValueError, f"commit({rows})", "3 rows"):
        table.commit(rows)
    assert table.length == 9
    table.commit(3)
    assert table.length == 12


def test_nothing_can_be_kept_before_a_block_was_run(table: BlockTable):
    with raises(ValueError, "0 rows"):
        table.commit(1)


def test_rows_beyond_those_reserved_lie_in_the_spare_block(pool: BlockPool, table: BlockTable):
    grow(table, 3)
    table.reserve(1)
    assert table.blocks(1) == table.blocks(0)
    assert table.blocks(2) == [*table.blocks(1), pool.spare]
    assert pool.free == 9
    assert pool.spare not in {pool.take() for _ in range(9)}


def test_a_context_that_is_full_takes_no_more(pool: BlockPool, table: BlockTable):
    grow(table, 38)
    with raises(CacheFull, "41 slots"):
        table.reserve(3)
    assert table.length == 38
    grow(table, 2)
    assert table.length == 40
    assert pool.free == 0


def test_a_pool_that_runs_out_leaves_the_table_as_it_was(pool: BlockPool, table: BlockTable):
    other = BlockTable(pool, CONTEXT)
    grow(other, 24)
    grow(table, 6)
    free, held = pool.free, table.blocks(0)
    with pytest.raises(CacheFull):
        table.reserve(30)
    assert (table.length, pool.free, table.blocks(0)) == (6, free, held)
    with raises(ValueError, "commit"):
        table.commit(1)
    other.close()
    grow(table, 30)
    assert table.length == 36


def test_a_call_gets_slots_for_all_its_blocks_or_for_none(pool: BlockPool, table: BlockTable):
    other = BlockTable(pool, CONTEXT)
    grow(table, 3)
    grow(other, 3)
    with pytest.raises(CacheFull):
        reserve_all([(table, 10), (other, 32)])
    assert (table.length, other.length, pool.free) == (3, 3, 8)
    for one in (table, other):
        with raises(ValueError, "commit"):
            one.commit(1)
    reserve_all([(table, 5), (other, 29)])
    assert pool.free == 0
    table.commit(4)
    other.commit(29)


# --- going back


@pytest.mark.parametrize("length", range(11))
def test_a_rewind_frees_the_blocks_after_it(pool: BlockPool, table: BlockTable, length: int):
    grow(table, 10)
    blocks = table.blocks(0)
    table.rewind(length)
    assert table.length == length
    kept = -(-length // SIZE)
    assert table.blocks(0) == blocks[:kept]
    assert pool.free == 10 - kept


def test_a_rewind_to_the_present_gives_back_what_was_only_reserved(
    pool: BlockPool, table: BlockTable
):
    grow(table, 6)
    table.reserve(12)
    table.rewind(6)
    assert pool.free == 8
    with raises(ValueError, "commit"):
        table.commit(1)


@pytest.mark.parametrize("length", [-1, 7])
def test_a_rewind_to_where_the_sequence_never_was_is_refused(table: BlockTable, length: int):
    grow(table, 6)
    with raises(ValueError, f"rewind({length})", "6 slots"):
        table.rewind(length)


def test_a_rewind_into_a_shared_block_goes_back_to_its_beginning(table: BlockTable):
    # The next row would be written to slot 5, in a block that the other one reads.
    grow(table, 10)
    other = table.fork(8)
    table.rewind(5)
    assert table.length == 4
    grow(table, 4)
    assert table.blocks(0)[0] == other.blocks(0)[0]
    assert table.blocks(0)[1] != other.blocks(0)[1]


def test_a_rewind_into_a_block_that_is_shared_no_more_keeps_its_slots(table: BlockTable):
    grow(table, 10)
    table.fork(8).close()
    table.rewind(5)
    assert table.length == 5


def test_a_closed_table_holds_nothing_and_may_be_closed_again(pool: BlockPool, table: BlockTable):
    grow(table, 10)
    table.close()
    table.close()
    assert (table.length, pool.free) == (0, 10)


# --- sharing


@pytest.mark.parametrize(
    ("length", "shared"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (9, 8), (10, 8), (99, 8)]
)
def test_a_fork_shares_the_full_blocks_and_no_others(
    pool: BlockPool, table: BlockTable, length: int, shared: int
):
    grow(table, 10)
    other = table.fork(length)
    assert other.length == shared
    assert other.blocks(0) == table.blocks(0)[: shared // SIZE]
    assert pool.free == 7
    with raises(ValueError, "commit"):
        other.commit(1)


def test_a_fork_of_less_than_nothing_is_refused(table: BlockTable):
    grow(table, 10)
    with raises(ValueError, "fork(-1)"):
        table.fork(-1)


def test_shared_blocks_are_free_when_all_that_share_them_are_closed(
    pool: BlockPool, table: BlockTable
):
    grow(table, 10)
    child = table.fork(10)
    grandchild = child.fork(8)
    table.close()
    assert pool.free == 8
    child.close()
    assert pool.free == 8
    grandchild.close()
    assert pool.free == 10


MOST = 5
places = st.integers(0, MOST - 1)
"""Which of the open tables, counted round."""


class Tables(RuleBasedStateMachine):
    """Any use of several tables: each keeps seeing what it wrote, and no block is lost."""

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

    @rule(
        place=places,
        rows=st.integers(1, 14),
        padding=st.integers(0, 2),
        keep=st.integers(0, 14),
    )
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
        # No more goes than the started KV block.
        assert length - length % SIZE <= table.length <= length
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

    def teardown(self) -> None:
        for table in self.tables:
            table.close()
        assert self.pool.free == 12, "a block was lost"


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=40)


@given(lengths=st.lists(st.integers(1, 30), max_size=8))
def test_no_block_is_lost_when_tables_are_closed_in_any_order(lengths: list[int]):
    pool = BlockPool(100, SIZE)
    tables = [BlockTable(pool, CONTEXT) for _ in lengths]
    for table, length in zip(tables, lengths, strict=True):
        grow(table, length, keep=length // 2)
    held = [
        block
        for table, n in zip(tables, lengths, strict=True)
        for block in table.blocks(n - n // 2)
    ]
    assert len(held) == len(set(held))
    for table in sorted(tables, key=lambda table: table.length):
        table.close()
    assert pool.free == 100
