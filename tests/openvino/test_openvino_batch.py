"""What goes into a call of OpenVINO, and when its attention takes the kernel that it should."""

from itertools import pairwise

import pytest

from paceline.decoding.types import Block
from paceline.engines.kv_blocks import BlockPool, PrefillTable
from paceline_openvino.batch import CallInputs, is_deterministic
from paceline_openvino.graph import OUTPUT_ROWS

SIZE = 4
SPARE = 10


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(SPARE, SIZE)


def holding(pool: BlockPool, tokens: int, more: int) -> PrefillTable:
    """A sequence of so many tokens, with room for more."""
    slots = PrefillTable(pool, 32)
    slots.reserve(tokens)
    slots.commit(tokens)
    slots.reserve(more)
    return slots


def test_each_row_of_an_answer_is_a_sequence_and_a_prompt_is_one(pool: BlockPool):
    answer, prompt = holding(pool, 6, 3), holding(pool, 0, 5)
    call = CallInputs(2, threads=2, spare=SPARE)
    call.add(answer, Block([7, 8, 9], 3), 6)
    call.add(prompt, Block([1, 2, 3, 4, 5], 1, prefill=True), 0)
    assert call.inputs() == {
        "input_ids": [7, 8, 9, 1, 2, 3, 4, 5],
        "position_ids": [6, 7, 8, 0, 1, 2, 3, 4],
        "past_lens": [6, 7, 8, 0],
        "subsequence_begins": [0, 1, 2, 3, 8],
        "block_indices": [0, 1, 0, 1, 0, 1, 2, 3, 4],
        "block_indices_begins": [0, 2, 4, 7, 9],
        "max_context_len": 9,
        OUTPUT_ROWS: [0, 1, 2, 7],
    }


def test_a_row_of_a_prompt_is_never_alone(pool: BlockPool):
    call = CallInputs(2, threads=2, spare=SPARE)
    call.add(holding(pool, 4, 1), Block([7], 1, prefill=True), 4)
    inputs = call.inputs()
    assert inputs["subsequence_begins"] == [0, 2]
    assert inputs["position_ids"] == [4, 5]
    assert inputs[OUTPUT_ROWS] == [0, 0]


@pytest.mark.parametrize(
    ("rows", "least", "threads", "sequences"),
    [
        (1, 2, 2, [1, 1]),
        (2, 2, 2, [1, 1]),
        (3, 8, 2, [1, 1, 1, 5]),
        (7, 8, 8, [1] * 8),
        (8, 8, 8, [1] * 8),
        # There are fewer sequences than threads: one of two rows is put beside them.
        (1, 2, 4, [1, 2]),
        (2, 2, 4, [1, 1, 2]),
        (3, 2, 16, [1, 1, 1, 2]),
        (4, 2, 4, [1] * 4),
        # One row is all there is to be computed, whatever comes of it.
        (1, 1, 16, [1]),
    ],
)
def test_rows_that_fill_up_are_a_sequence_in_the_spare_block(
    pool: BlockPool, rows: int, least: int, threads: int, sequences: list[int]
):
    call = CallInputs(least, threads=threads, spare=SPARE)
    call.add(holding(pool, 3, rows), Block([7] * rows, rows), 3)
    inputs = call.inputs()
    begins = inputs["subsequence_begins"]
    assert isinstance(begins, list)
    assert [end - begin for begin, end in pairwise(begins)] == sequences
    if filling := sum(sequences) - rows:
        assert inputs["past_lens"][-1] == 0  # type: ignore[index]
        assert inputs["block_indices"][-1] == SPARE  # type: ignore[index]
        assert inputs["position_ids"][-filling:] == [*range(filling)]  # type: ignore[index]


def test_what_fits_is_as_many_sequences_as_threads_or_one_of_several_rows():
    assert is_deterministic(1, 1, 2)
    assert not is_deterministic(1, 0, 2)
    assert not is_deterministic(5, 1, 8)
    assert is_deterministic(5, 2, 8)
    assert is_deterministic(8, 0, 8)


def test_only_what_was_read_as_a_prompt_is_reused(pool: BlockPool):
    slots = PrefillTable(pool, 32)
    for tokens, prompt, reusable in ((6, True, 6), (2, True, 8), (3, False, 8), (2, True, 8)):
        slots.ran(Block([1] * tokens, 0, prefill=prompt))
        slots.reserve(tokens)
        slots.commit(tokens)
        assert slots.shareable_length == reusable
    assert slots.length == 13
    child = slots.fork(13)
    assert (child.length, child.shareable_length) == (8, 8)
    slots.rewind(9)
    assert slots.shareable_length == 8
    slots.rewind(5)
    assert slots.shareable_length == slots.length == 4, "its block is shared"
    slots.close()
    assert slots.shareable_length == 0
