"""Rollback in every engine, with caches poisoned where nothing may be read. Bitwise."""

from contextlib import closing

import pytest

from paceline.engines.base import Engine, KVSequence
from support.engine_rows import Plain, feed, random_text, run, same
from support.poison import poison


@pytest.mark.parametrize("kept", [1, 3, 7, 8])
def test_poisoned_slots_of_rejected_rows_and_freed_blocks_change_no_row(
    engine: Engine, plain: Plain, sequence: KVSequence, other: KVSequence, kept: int
):
    text = random_text(engine, 64)
    wrong = [(token + 1) % engine.vocab_size for token in text]
    feed(engine, other, random_text(engine, 40, 1))
    feed(engine, sequence, text[:10])
    other.close()
    while sequence.length < 40:
        poison(engine, sequence)
        start = sequence.length
        block = text[start : start + kept] + wrong[start + kept : start + 8]
        (logits,) = run(engine, (sequence, block, 8))
        assert same(logits[:kept], plain(text, 10)[start : start + kept]), f"block at {start}"
        sequence.commit(kept)


@pytest.mark.parametrize("length", [1, 9, 31, 32, 33])
def test_poisoned_slots_after_a_rewind_change_no_row(
    engine: Engine, plain: Plain, sequence: KVSequence, length: int
):
    first, second = random_text(engine, 48, 1), random_text(engine, 48, 2)
    text = first[:length] + second[length:]
    feed(engine, sequence, first)
    run(engine, (sequence, second[:6], 6))
    sequence.commit(5)
    sequence.rewind(length)
    for start in range(sequence.length, 45, 3):
        poison(engine, sequence)
        (logits,) = run(engine, (sequence, text[start : start + 3], 3))
        assert same(logits, plain(text, length)[start : start + 3])
        sequence.commit(3)


def test_poisoned_slots_of_a_closed_parent_change_no_row_of_its_fork(
    engine: Engine, plain: Plain, sequence: KVSequence
):
    text = random_text(engine, 84)
    feed(engine, sequence, text[:70])
    with closing(sequence.fork(64)) as child:
        feed(engine, child, text[child.length : 70])
        sequence.close()
        for start in range(70, 82, 4):
            poison(engine, child)
            (logits,) = run(engine, (child, text[start : start + 4], 4))
            assert same(logits, plain(text, 70)[start : start + 4])
            child.commit(4)


def test_a_poisoned_slot_that_is_read_changes_rows(
    engine: Engine, plain: Plain, sequence: KVSequence
):
    # Without this, poison that reaches no cache would pass every test above.
    text = random_text(engine, 40)
    feed(engine, sequence, text[:30])
    (logits,) = run(engine, (sequence, text[30:34], 4))
    sequence.commit(4)
    poison(engine, sequence, 20)
    (logits,) = run(engine, (sequence, text[34:38], 4))
    assert not same(logits, plain(text, 30)[34:38])
