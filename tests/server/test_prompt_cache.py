"""Slots of ended answers, for prompts that begin the same."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.drafters.dflash import ContextCache, HostKV
from paceline.server.prefix_cache import Begun, PromptCache
from support.toy import ToyEngine

TEXT = list(range(40))


@pytest.fixture
def engine() -> Iterator[ToyEngine]:
    """With blocks of eight slots; a test that leaves slots behind fails."""
    made = ToyEngine(cache_blocks=16)
    free = made.free_slots
    yield made
    assert made.free_slots == free


@pytest.fixture
def cache(engine: ToyEngine) -> Iterator[PromptCache]:
    made = PromptCache(engine)
    yield made
    made.clear()


def tokens(text: Sequence[int]) -> np.ndarray:
    return np.array(text, np.int64)


def run(engine: ToyEngine, begun: Begun, text: Sequence[int]) -> None:
    """Compute what is not there yet."""
    rest = text[begun.slots.length :]
    engine.step([(begun.slots, Block(rest, 0))])  # type: ignore[list-item]
    begun.slots.commit(len(rest))


def answered(cache: PromptCache, engine: ToyEngine, text: Sequence[int], salt: str = "") -> int:
    """Compute a text and leave it in the cache; how much of it was there."""
    begun = cache.begin(tokens(text), salt)
    found = begun.slots.length
    run(engine, begun, text)
    cache.keep(tokens(text), begun, salt)
    return found


def test_whole_blocks_are_shared(cache: PromptCache, engine: ToyEngine):
    assert answered(cache, engine, TEXT) == 0
    assert answered(cache, engine, [*TEXT[:21], 50, 51, 52]) == 16
    assert answered(cache, engine, [*TEXT[:9], 60]) == 8
    assert answered(cache, engine, [50, *TEXT]) == 0
    assert cache.asked == 40 + 24 + 10 + 41
    assert cache.found == 16 + 8


def test_the_last_token_is_left_to_be_run(cache: PromptCache, engine: ToyEngine):
    answered(cache, engine, TEXT[:16])
    begun = cache.begin(tokens(TEXT[:16]))
    assert begun.slots.length == 8
    begun.slots.close()


def test_what_is_the_beginning_of_another_is_kept_once(cache: PromptCache, engine: ToyEngine):
    for length in (10, 20, 40):
        answered(cache, engine, TEXT[:length])
    assert len(cache) == 1
    assert cache.tokens == 40


def test_what_goes_on_can_be_shared_as_far_as_it_is(cache: PromptCache, engine: ToyEngine):
    reading = cache.begin(tokens(TEXT))
    cache.show(tokens(TEXT), reading)
    assert cache.awaited(tokens(TEXT)) == 39
    assert cache.awaited(tokens([*TEXT[:20], 50])) == 20
    assert cache.awaited(tokens(TEXT), "other") == 0
    run(engine, reading, TEXT[:20])
    assert cache.awaited(tokens(TEXT)) == 19
    assert len(cache) == cache.tokens == 0
    # Room is not made of what somebody else holds.
    assert not cache.make_room(engine.free_slots + 1)
    other = cache.begin(tokens(TEXT))
    assert other.slots.length == 16
    run(engine, reading, TEXT)
    assert cache.awaited(tokens(TEXT)) == 0
    cache.hide(reading)
    assert cache.find(tokens(TEXT)) == 0
    for each in (reading, other):
        each.slots.close()


def test_salts_keep_apart(cache: PromptCache, engine: ToyEngine):
    answered(cache, engine, TEXT, "mine")
    assert answered(cache, engine, TEXT, "yours") == 0
    assert answered(cache, engine, TEXT, "mine") == 32
    assert len(cache) == 2


def test_the_least_recently_used_goes_first(cache: PromptCache, engine: ToyEngine):
    texts = [[number, *TEXT[:23]] for number in (1, 2, 3)]
    for text in texts:
        answered(cache, engine, text)
    cache.begin(tokens(texts[0])).slots.close()  # used again
    assert cache.make_room(10 * 8)
    assert len(cache) == 2
    assert answered(cache, engine, texts[1]) == 0
    assert answered(cache, engine, texts[0]) == 16


def test_room_that_cannot_be_made_is_said(cache: PromptCache, engine: ToyEngine):
    held = cache.begin(tokens(TEXT))
    run(engine, held, TEXT)
    assert not cache.make_room(16 * 8)
    held.slots.close()
    assert cache.make_room(16 * 8)


def test_room_is_not_waited_for_where_evicted_slots_do_not_come_back(
    cache: PromptCache, engine: ToyEngine, monkeypatch: pytest.MonkeyPatch
):
    answered(cache, engine, TEXT)
    kept = cache._entries[0].slots

    def fails() -> None:
        raise RuntimeError("the engine cannot close it")

    with monkeypatch.context() as patch:
        patch.setattr(kept, "close", fails)
        assert not cache.make_room(16 * 8)
    assert len(cache) == 0
    kept.close()


def test_a_short_one_goes_on_itself(cache: PromptCache, engine: ToyEngine):
    """Too short to share a block; most of it is wanted, and nobody else could use it."""
    answered(cache, engine, TEXT[:6])
    begun = cache.begin(tokens([*TEXT[:5], 50, 51]))
    assert begun.slots.length == 5
    assert len(cache) == 0
    begun.slots.close()


def test_what_drafters_know_goes_along(cache: PromptCache, engine: ToyEngine):
    begun = cache.begin(tokens(TEXT))
    known = begun.memory.setdefault("dflash", ContextCache(HostKV(1, 1, 2)))
    rows = np.arange(40 * 2, dtype=np.float32).reshape(40, 1, 2)
    known.kv.write(0, [rows, rows], 40)
    known.positions += range(40)
    run(engine, begun, TEXT)
    cache.keep(tokens(TEXT), begun)
    other = cache.begin(tokens([*TEXT[:20], 50, 51]))
    copied = other.memory["dflash"]
    assert copied.positions == list(range(16))
    assert (copied.kv.padded(0, 16)[0, :16] == rows[:16]).all()
    # Each goes its own way from here.
    copied.kv.write(16, [rows[:1] * 0, rows[:1] * 0], 1)
    copied.positions.append(16)
    assert known.positions == list(range(40))
    assert (known.kv.padded(0, 40)[0, 16] == rows[16]).all()
    other.slots.close()


def test_an_answer_that_never_began_leaves_nothing(cache: PromptCache, engine: ToyEngine):
    cache.keep(tokens(TEXT), cache.begin(tokens(TEXT)))
    assert len(cache) == 0
