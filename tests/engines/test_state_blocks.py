"""State blocks of hybrid models, with recurrent layers whose state is the tokens themselves."""

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from paceline.decoding.types import Block
from paceline.engines.base import LEAST_STATES, EngineSettings
from paceline.engines.kv_blocks import BlockPool
from paceline.engines.openvino.batch import parts_of
from paceline.engines.state_blocks import StatePool, StateTable, restore_and_take
from paceline.errors import CacheFull
from support.errors import raises

SIZE = 8
CONTEXT = 200


class Layers:
    """What the recurrent layers of an engine do with state blocks, and all that a call needs."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(400, SIZE)
        self.states = StatePool(blocks)
        self.memory: dict[int, tuple[int, ...]] = {self.states.zero: ()}
        self.rerun = 0

    def open(self) -> StateTable:
        return StateTable(self.pool, self.states, CONTEXT)

    def run(self, table: StateTable, block: Block, past: int, padding: int = 0) -> None:
        rows = len(block.tokens) + padding
        (read, *written), interval = table.state_rows(rows, past)
        state = self.memory[read]
        assert len(state) == past
        for at, token in enumerate([*block.tokens, *[-1] * padding], start=past + 1):
            state = (*state, token)
            if at == past + rows or (interval and at % interval == 0):
                self.memory[written.pop(0)] = state
        assert not written
        assert self.memory[self.states.zero] == ()

    def run_again(self, table: StateTable, block: Block, past: int) -> None:
        self.rerun += len(block.tokens)
        self.run(table, block, past)

    def step(self, *work: tuple[StateTable, Block], most: int = CONTEXT) -> None:
        """Run blocks in calls of at most `most` rows, as the engine does."""
        for table, block in work:
            table.reserve(len(block.tokens))
        call = [(table, block, table.length) for table, block in work]
        for part in parts_of(call, most):
            placed = [(table, block, past) for _, (table, block, past) in part]
            restore_and_take(self.states, placed, self.run_again)
            for number, (table, block, past) in part:
                table.ran(call[number][1])
                self.run(table, block, past, padding=len(block.tokens) == 1)
                if past + len(block.tokens) < call[number][2] + len(call[number][1].tokens):
                    table.keep_written()


def read(layers: Layers, table: StateTable, tokens: list[int], rows: int = 1) -> None:
    layers.step((table, Block(tokens, rows, prefill=True)))
    table.commit(len(tokens))


def decode(layers: Layers, table: StateTable, tokens: list[int], kept: int) -> None:
    layers.step((table, Block(tokens, len(tokens))))
    table.commit(kept)


@pytest.mark.parametrize("kept", range(9))
def test_accepting_rows_keeps_one_state_and_frees_the_others(kept: int):
    layers = Layers(20)
    table = layers.open()
    read(layers, table, list(range(11)))
    before = layers.states.free
    decode(layers, table, list(range(8)), kept)
    assert layers.states.free >= before - 1
    decode(layers, table, [1, 2], 2)
    assert not layers.rerun


def test_a_fork_begins_at_the_last_checkpoint_and_makes_one_where_it_was_wanted():
    layers = Layers(20)
    table, tokens = layers.open(), list(range(100))
    read(layers, table, tokens)
    assert table.fork(99).length == 96
    assert table.fork(95).length == 0
    child = table.fork(61)
    read(layers, child, tokens[:80])
    assert child.fork(61).length == 56
    assert child.fork(79).length == 72
    assert not layers.rerun


def test_a_prompt_is_written_to_few_blocks():
    layers = Layers(20)
    table = layers.open()
    block = Block(list(range(100)), 1, prefill=True)
    table.reserve(100)
    restore_and_take(layers.states, [(table, block, 0)], layers.run_again)
    (read, *written), interval = table.state_rows(100, 0)
    assert (read, interval, len(written)) == (layers.states.zero, 96, 2)


def test_a_prompt_of_whole_kv_blocks_is_found_again():
    layers = Layers(20)
    table = layers.open()
    read(layers, table, list(range(32)))
    assert table.fork(31).length == 24  # the last token of a prompt is always run


def test_a_sequence_keeps_few_checkpoints():
    layers = Layers(50)
    table = layers.open()
    for at in range(0, 192, SIZE):
        read(layers, table, list(range(at, at + SIZE)), rows=0)
    assert 50 - layers.states.free <= 6


def test_rewinding_to_the_end_of_the_prompt_runs_nothing_again():
    layers = Layers(20)
    table = layers.open()
    read(layers, table, list(range(27)))
    for token in range(9):
        decode(layers, table, [token, 0, 0], 1)
    table.rewind(27)
    decode(layers, table, [5, 6], 2)
    assert not layers.rerun
    table.rewind(26)
    decode(layers, table, [5, 6], 2)
    assert layers.rerun == 2  # from the checkpoint at 24


def test_a_state_of_other_tokens_is_not_found_after_rewinding():
    layers = Layers(20)
    table = layers.open()
    read(layers, table, list(range(48)))
    read(layers, table, list(range(52)))
    table.rewind(48)
    read(layers, table, list(range(60)))
    assert table.fork(103).length == 48  # the checkpoint at 96 was of the old tokens
    assert table.fork(104).length == 104


def test_a_new_sequence_evicts_the_oldest_states_and_they_are_computed_again():
    layers = Layers(6)
    first, second = layers.open(), layers.open()
    read(layers, first, list(range(20)))
    for at in range(3):
        decode(layers, second, [at, at + 1, at + 2, 7, 7], 3)
    decode(layers, first, [1, 2, 3], 2)
    assert layers.rerun == 20
    first.close()
    second.close()
    assert layers.states.free == 6


def test_a_block_longer_than_the_pool_keeps_every_row_all_the_same():
    layers = Layers(6)
    table = layers.open()
    read(layers, table, list(range(20)))
    for kept in (30, 17, 4):
        decode(layers, table, list(range(30)), kept)
        decode(layers, table, [0, 1], 1)
    assert layers.rerun == 17 - 4  # there was room for the states of four rows, and of the last


def test_a_call_of_more_sequences_than_blocks_changes_nothing():
    layers = Layers(5)
    tables = [layers.open() for _ in range(3)]
    for table in tables:
        read(layers, table, [1, 2, 3])
    with raises(CacheFull, "5 state blocks"):
        layers.step(*((table, Block([4], 1)) for table in tables))
    for table in tables:
        assert table.length == 3
        with raises(ValueError, "commit"):
            table.commit(1)
        decode(layers, table, [4, 5], 2)


def test_the_sequences_that_a_pool_has_states_for_run_in_one_call_whatever_was_evicted():
    layers = Layers(12)
    most = layers.states.most_sequences
    assert most == 3
    texts = [[number] * 90 for number in range(2 * most)]
    tables = [layers.open() for _ in texts]
    for table, text in zip(tables, texts, strict=True):  # long prompts, with checkpoints
        for at in range(0, len(text), 15):
            read(layers, table, text[at : at + 15])
    for _ in range(3):  # each half evicts the other's states
        for half in (tables[:most], tables[most:]):
            layers.step(*((table, Block([7, 8, 9], 3)) for table in half))
            for table in half:
                table.commit(2)
    assert layers.rerun > 0
    for table in tables:
        table.close()
    prompts = [layers.open() for _ in range(most)]
    layers.step(*((table, Block([5] * 50, 1, prefill=True)) for table in prompts))


class AnyUse(RuleBasedStateMachine):
    """Any calls of any sequences; `Layers.run` asserts that the state read is that of the tokens.

    The pool is too small for all of them, so states are evicted all the time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers(12)
        self.tokens = count()  # no two are equal, so a state shows all of its tokens
        self.held: list[tuple[StateTable, list[int]]] = []

    def teardown(self) -> None:
        for table, _ in self.held:
            table.close()
        assert self.layers.states.free == 12
        assert self.layers.pool.free == 400

    @precondition(lambda self: len(self.held) < 5)
    @rule()
    def open(self) -> None:
        self.held.append((self.layers.open(), []))

    @precondition(lambda self: self.held)
    @rule(
        asks=st.dictionaries(
            st.integers(0, 4),
            st.tuples(st.integers(1, 20), st.integers(0, 20), st.booleans(), st.booleans()),
            min_size=1,
            max_size=3,
        ),
        most=st.integers(4, 60),
    )
    def step(self, asks: dict[int, tuple[int, int, bool, bool]], most: int) -> None:
        work = []
        for place, (rows, kept, prefill, committed) in asks.items():
            if place < len(self.held):
                table, tokens = self.held[place]
                new = [next(self.tokens) for _ in range(min(rows, 180 - len(tokens)))]
                if new:
                    prompt = prefill and table.shareable_length == table.length
                    work.append((table, tokens, Block(new, 1, prefill=prompt), kept, committed))
        if work:
            self.layers.step(*((table, block) for table, _, block, _, _ in work), most=most)
        for table, tokens, block, kept, committed in work:
            if committed:
                new = block.tokens[: min(kept, len(block.tokens))]
                table.commit(len(new))
                tokens.extend(new)
            self.check(table, tokens)

    @precondition(lambda self: self.held)
    @rule(place=st.integers(0, 4), percent=st.integers(0, 100))
    def rewind(self, place: int, percent: int) -> None:
        table, tokens = self.held[place % len(self.held)]
        table.rewind(len(tokens) * percent // 100)
        del tokens[table.length :]

    @precondition(lambda self: 0 < len(self.held) < 5)
    @rule(place=st.integers(0, 4), percent=st.integers(0, 110))
    def fork(self, place: int, percent: int) -> None:
        table, tokens = self.held[place % len(self.held)]
        length = len(tokens) * percent // 100
        expected = table.fork_length(length)
        child = table.fork(length)
        assert child.length == expected
        assert child.length <= min(length, table.shareable_length)
        self.held.append((child, tokens[: child.length]))
        self.check(*self.held[-1])

    @precondition(lambda self: self.held)
    @rule(place=st.integers(0, 4))
    def close(self, place: int) -> None:
        self.held.pop(place % len(self.held))[0].close()

    def check(self, table: StateTable, tokens: list[int]) -> None:
        """The state is that of the tokens, once the lost rows were run again."""
        self.layers.step((table, Block([-2, -3], 2)))
        block = table.state_rows(2, table.length)[0][0]
        assert self.layers.memory[block] == tuple(tokens)
        table.commit(0)


def test_any_use_in_any_order_reads_the_state_of_the_tokens():
    run_state_machine_as_test(AnyUse, settings=settings(max_examples=60, stateful_step_count=30))


@pytest.mark.parametrize(
    ("contexts", "block_bytes", "blocks"),
    [(1, 1 << 10, 46), (8, 1 << 10, 130), (1, 1 << 26, 32), (1, 1 << 30, LEAST_STATES)],
)
def test_the_pool_of_states_is_bounded_in_bytes(contexts: int, block_bytes: int, blocks: int):
    assert EngineSettings(contexts=contexts).state_blocks(block_bytes) == blocks
