"""Row invariance of every engine. All comparisons of logits are bitwise.

Tokens are fed to a sequence as its prompt; tokens that are run after it are its answer.
"""

from contextlib import ExitStack, closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.decoding.types import Block
from paceline.engines.base import Engine, KVSequence
from support.engine_rows import Plain, feed, random_text, run, same
from support.packages import NEEDED, missing


def test_plain_decoding_depends_on_every_previous_token(engine: Engine, plain: Plain):
    # Without this, rows that ignore the cache altogether would pass every test below.
    text = random_text(engine, 40)
    changed = [(text[0] + 1) % engine.vocab_size, *text[1:]]
    for prompt in (0, 20, 40):
        rows, others = plain(text, prompt), plain(changed, prompt)
        assert not any(same(row, other) for row, other in zip(rows, others, strict=True))


@pytest.mark.parametrize("rows", range(2, 17))
def test_a_row_is_bit_identical_at_any_place_in_a_block_of_any_length(
    engine: Engine, plain: Plain, sequence: KVSequence, rows: int
):
    text = random_text(engine, 64)
    feed(engine, sequence, text[:20])
    # Blocks that begin one slot further each time put a position into each place in turn.
    for start in range(20, 20 + rows + 12):
        block = text[start : start + rows]
        (logits,) = run(engine, (sequence, block, rows))
        assert same(logits, plain(text, 20)[start : start + rows]), f"block at {start}"
        sequence.commit(1)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 8, 16, 31, 32, 33, 64])
def test_a_prompt_may_be_split_into_chunks_of_any_length(
    engine: Engine, plain: Plain, sequence: KVSequence, chunk: int
):
    text = random_text(engine, 64)
    for start in range(0, 60, chunk):
        block = text[start : min(start + chunk, 60)]
        (logits,) = run(engine, prompts=[(sequence, block, len(block))])
        assert same(logits, plain(text, 60)[start : start + len(block)])
        sequence.commit(len(block))
    assert sequence.shareable_length == 60
    (logits,) = run(engine, (sequence, text[60:], 4))
    assert same(logits, plain(text, 60)[60:])


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6])
def test_a_forward_pass_returns_the_requested_number_of_trailing_rows(
    engine: Engine, plain: Plain, sequence: KVSequence, rows: int
):
    text = random_text(engine, 30)
    feed(engine, sequence, text[:24])
    (logits,) = run(engine, (sequence, text[24:], rows))
    assert logits.shape == (rows, engine.vocab_size)
    assert logits.dtype == np.float32
    assert same(logits, plain(text, 24)[30 - rows :])


def test_a_forward_pass_returns_results_in_block_order(
    engine: Engine, sequence: KVSequence, other: KVSequence
):
    text = random_text(engine, 8)
    result = engine.step([(sequence, Block(text, 3)), (other, Block(text[:2], 0))])
    assert [len(logits) for logits in result.logits] == [3, 0]
    assert len(result.taps) == 2
    assert 0 < result.seconds < 60


@settings(max_examples=30)
@given(data=st.data())
def test_sequences_in_one_forward_pass_do_not_affect_each_other(
    engine: Engine, plain: Plain, data: st.DataObject
):
    # Each has its own context and block length: parts of prompts and of answers are mixed.
    count = data.draw(st.integers(2, 5), label="sequences")
    texts = [random_text(engine, 48, seed) for seed in range(count)]
    starts = [data.draw(st.integers(0, 32), label="context") for _ in texts]
    with ExitStack() as stack:
        work, expected = [], []
        for text, start in zip(texts, starts, strict=True):
            end = start + data.draw(st.integers(1, 16), label="block")
            rows = data.draw(st.integers(0, end - start), label="rows")
            prompt = data.draw(st.booleans(), label="prompt")
            sequence = stack.enter_context(closing(engine.open()))
            feed(engine, sequence, text[:start])
            work.append((sequence, Block(text[start:end], rows, prefill=prompt)))
            expected.append(plain(text[:end], end if prompt else start)[end - rows :])
        for logits, rows_alone in zip(engine.step(work).logits, expected, strict=True):
            assert same(logits, rows_alone)


def test_an_engine_describes_itself_with_strings(engine: Engine):
    facts = engine.describe()
    assert facts["engine"] == engine.name
    assert all(isinstance(value, str) for value in facts.values())
    assert facts == engine.describe()


@pytest.mark.parametrize("name", NEEDED)
def test_engines_with_missing_packages_are_skipped(name: str):
    if absent := missing(name):
        pytest.skip(f"all tests of {name} are left out: {', '.join(absent)} not installed")
