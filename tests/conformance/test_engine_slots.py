"""Slots of every engine: reject, rewind, fork, free, full cache. Comparisons are bitwise.

Where `poison` is called, slots and blocks that nothing may read have numbers of usual size.
Tokens are fed to a sequence as its prompt; tokens that are run after it are its answer.
"""

from contextlib import ExitStack, closing

import numpy as np
import pytest

from paceline.engines.base import Engine, KVSequence
from paceline.errors import CacheFull
from support.engine_rows import Plain, Rows, feed, random_text, run, same
from support.errors import raises
from support.poison import poison


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("kept", [1, 3, 4, 7, 8])
def test_rejected_drafts_and_freed_blocks_leave_no_trace(
    engine: Engine, plain: Plain, sequence: KVSequence, other: KVSequence, kept: int, poisoned: bool
):
    text = random_text(engine, 64)
    wrong = [(token + 1) % engine.vocab_size for token in text]
    feed(engine, other, random_text(engine, 40, 1))
    feed(engine, sequence, text[:10])
    other.close()
    while sequence.length < 45:
        if poisoned:
            poison(engine, sequence)
        start = sequence.length
        block = text[start : start + kept] + wrong[start + kept : start + 8]
        (logits,) = run(engine, (sequence, block, 8))
        assert same(logits[:kept], plain(text, 10)[start : start + kept])
        sequence.commit(kept)
    # Shorter than the blocks before: garbage lies right behind it.
    (logits,) = run(engine, (sequence, text[sequence.length :][:1], 1))
    assert same(logits, plain(text, 10)[sequence.length :][:1])


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("length", [0, 1, 8, 9, 31, 32, 33, 48])
def test_a_rewound_sequence_continues_as_if_it_had_never_been_longer(
    engine: Engine, plain: Plain, sequence: KVSequence, length: int, poisoned: bool
):
    first, second = random_text(engine, 48, 1), random_text(engine, 48, 2)
    text = first[:length] + second[length:]
    feed(engine, sequence, first)
    run(engine, (sequence, second[:6], 6))
    sequence.commit(5)
    assert 48 <= sequence.shareable_length <= 53
    sequence.rewind(length)
    assert sequence.length == sequence.shareable_length == length, "no block is shared"
    for start in range(length, 45, 3):
        if poisoned:
            poison(engine, sequence)
        (logits,) = run(engine, (sequence, text[start : start + 3], 3))
        assert same(logits, plain(text, length)[start : start + 3])
        sequence.commit(3)


def test_poisoned_slots_of_a_closed_parent_do_not_change_its_fork(
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


def test_reading_a_poisoned_slot_changes_rows(engine: Engine, plain: Plain, sequence: KVSequence):
    # Without this, poison that reaches no cache would pass every test above.
    text = random_text(engine, 40)
    feed(engine, sequence, text[:30])
    (logits,) = run(engine, (sequence, text[30:34], 4))
    sequence.commit(4)
    poison(engine, sequence, 20)
    (logits,) = run(engine, (sequence, text[34:38], 4))
    assert not same(logits, plain(text, 30)[34:38])


@pytest.mark.pairs
@pytest.mark.parametrize("rows", [1, 2, 7, 24])
@pytest.mark.parametrize("beside", [False, True])
def test_recomputing_decode_rows_in_large_passes_gives_identical_kv(
    engine: Engine, plain: Plain, sequence: KVSequence, other: KVSequence, rows: int, beside: bool
):
    """A preempted response resumes with blocks that need no logits."""
    text = random_text(engine, 60)
    feed(engine, sequence, text[:20])
    feed(engine, other, random_text(engine, 20, 1))
    for start in range(20, 44, rows):
        block = text[start : min(start + rows, 44)]
        company = [(other, [1, 2], 2)] if beside else []
        run(engine, (sequence, block, 0), *company)
        sequence.commit(len(block))
    for start in range(44, 60, 4):
        (logits,) = run(engine, (sequence, text[start : start + 4], 4))
        assert same(logits, plain(text, 20)[start : start + 4])
        sequence.commit(4)


def test_shared_slots_freed_by_closing_are_counted_once(engine: Engine):
    before = engine.free_slots
    text = random_text(engine, 70)
    with ExitStack() as stack:
        parent = stack.enter_context(closing(engine.open()))
        feed(engine, parent, text)
        child = stack.enter_context(closing(parent.fork(70)))
        feed(engine, child, text[child.length :])
        held = before - engine.free_slots
        assert engine.freed_by([parent, child]) == held
        alone = [engine.freed_by([one]) for one in (parent, child)]
        assert sum(alone) <= held
        child.close()
        assert before - engine.free_slots == held - alone[1]
        assert engine.freed_by([parent]) == held - alone[1]
    assert engine.freed_by([]) == 0


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("committed", [0, 20])
def test_a_sequence_commits_no_more_rows_than_ran_and_is_not_rewound_past_its_length(
    engine: Engine, sequence: KVSequence, rows: int, committed: int
):
    # Padding rows that an engine adds on its own are not the block's.
    text = random_text(engine, committed + rows)
    feed(engine, sequence, text[:committed])
    run(engine, (sequence, text[committed:], rows))
    for too_many in (rows + 1, -1):
        with raises(ValueError, f"commit({too_many})"):
            sequence.commit(too_many)
    assert sequence.length == committed
    sequence.commit(rows)
    for length in (-1, committed + rows + 1):
        with raises(ValueError, f"rewind({length})"):
            sequence.rewind(length)
    assert sequence.length == committed + rows
    with raises(ValueError, "commit"):
        sequence.commit(1)


def _next_row(engine: Engine, sequence: KVSequence, token: int) -> Rows:
    (row,) = run(engine, (sequence, [token], 1))
    sequence.commit(1)
    return row


def test_a_sequence_cannot_exceed_its_context(
    engine: Engine, sequence: KVSequence, other: KVSequence
):
    text = random_text(engine, engine.context_length)
    for one in (other, sequence):
        feed(engine, one, text[:-4])
    expected = np.concatenate([_next_row(engine, other, token) for token in text[-4:]])
    with raises(CacheFull, engine.context_length):
        run(engine, (sequence, text[-5:], 5))
    assert sequence.length == engine.context_length - 4
    (logits,) = run(engine, (sequence, text[-4:], 4))
    assert same(logits, expected)
    sequence.commit(4)
    with pytest.raises(CacheFull):
        run(engine, (sequence, text[:1], 1))
    assert sequence.length == engine.context_length


def fill(engine: Engine, stack: ExitStack) -> list[KVSequence]:
    """Open sequences that hold all free slots; all but the last span a whole context."""
    filling: list[KVSequence] = []
    text = random_text(engine, engine.context_length)
    chunk = 64
    while True:
        if not filling or filling[-1].length == engine.context_length:
            filling.append(stack.enter_context(closing(engine.open())))
        at = filling[-1].length
        try:
            feed(engine, filling[-1], text[at : at + chunk])
        except CacheFull:
            if chunk == 1:
                return filling
            chunk //= 4


def grows(engine: Engine) -> bool:
    """Return whether a sequence takes slots as it grows, not a whole context at its start."""
    free = engine.free_slots
    with closing(engine.open()) as sequence:
        feed(engine, sequence, random_text(engine, 2))
        return free - engine.free_slots < engine.context_length


def test_a_full_cache_opens_no_sequence(engine: Engine, plain: Plain):
    text = random_text(engine, 64)
    expected = plain(text, 0)
    with ExitStack() as stack, closing(engine.open()) as fresh:
        filling = fill(engine, stack)
        with raises(CacheFull, "full"):
            run(engine, (fresh, text, 64))
        assert fresh.length == 0
        filling[0].close()
        (logits,) = run(engine, (fresh, text, 64))
        assert same(logits, expected)


def test_a_full_cache_rejects_a_block_and_changes_nothing(
    engine: Engine, plain: Plain, sequence: KVSequence
):
    if not grows(engine):
        pytest.skip("a sequence has all its slots from the start")
    text = random_text(engine, 84)
    expected = plain(text, 20)[20:]
    feed(engine, sequence, text[:20])
    with ExitStack() as stack:
        filling = fill(engine, stack)
        for _ in range(2):
            with raises(CacheFull, "full"):
                run(engine, (sequence, text[20:], 64))
            assert sequence.length == 20
            with raises(ValueError, "commit"):
                sequence.commit(1)  # nothing was run
        filling[0].close()
        (logits,) = run(engine, (sequence, text[20:], 64))
        assert same(logits, expected)


def test_a_forward_pass_that_does_not_fit_takes_no_slots(
    engine: Engine, plain: Plain, sequence: KVSequence, other: KVSequence
):
    if not grows(engine):
        pytest.skip("a sequence has all its slots from the start")
    text = random_text(engine, engine.context_length * 7 // 10)
    # Read as a prompt, which is one call and not hundreds.
    block, expected = text[20:], plain(text, len(text))[20:]
    half = block[: engine.context_length // 2]
    feed(engine, sequence, text[:20])
    feed(engine, other, text[:20])
    with ExitStack() as stack:
        fill(engine, stack)[0].close()
        for one in (sequence, other):
            # There is room for either of them, not for both.
            with pytest.raises(CacheFull):
                run(engine, (sequence, half, 0), (other, block, 0))
            assert (sequence.length, other.length) == (20, 20)
            with raises(ValueError, "commit"):
                one.commit(1)
            (logits,) = run(engine, prompts=[(one, block, len(block))])
            assert same(logits, expected)
            one.rewind(20)
