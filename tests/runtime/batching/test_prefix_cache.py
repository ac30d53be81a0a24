"""The prefix cache: sharing, recency, eviction."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.runtime.batching.prefix_cache import CachedPrefix, PrefixCache
from support.toy import ToyEngine

TEXT = list(range(40))


@pytest.fixture
def engine() -> Iterator[ToyEngine]:
    """A toy engine with blocks of eight slots; a test that leaks slots fails."""
    toy_engine = ToyEngine(cache_blocks=16)
    free = toy_engine.free_slots
    yield toy_engine
    assert toy_engine.free_slots == free


@pytest.fixture
def cache(engine: ToyEngine) -> Iterator[PrefixCache]:
    prefix_cache = PrefixCache(engine)
    yield prefix_cache
    prefix_cache.clear()


def tokens(text: Sequence[int]) -> np.ndarray:
    return np.array(text, np.int64)


def run(engine: ToyEngine, prefix: CachedPrefix, text: Sequence[int]) -> None:
    """Compute the rest of a text."""
    rest = text[prefix.sequence.length :]
    engine.step([(prefix.sequence, Block(rest, 0))])  # type: ignore[list-item]
    prefix.sequence.commit(len(rest))


def answered(cache: PrefixCache, engine: ToyEngine, text: Sequence[int], salt: str = "") -> int:
    """Compute a text and insert it; return its cached tokens."""
    prefix = cache.open(tokens(text), salt)
    length = prefix.sequence.length
    run(engine, prefix, text)
    cache.insert(tokens(text), prefix, salt)
    return length


def test_whole_blocks_are_shared(cache: PrefixCache, engine: ToyEngine):
    assert answered(cache, engine, TEXT) == 0
    assert answered(cache, engine, [*TEXT[:21], 50, 51, 52]) == 16
    assert answered(cache, engine, [*TEXT[:9], 60]) == 8
    assert answered(cache, engine, [50, *TEXT]) == 0
    assert cache.queried_tokens == 40 + 24 + 10 + 41
    assert cache.hit_tokens == 16 + 8


def test_the_last_prompt_token_is_never_a_hit(cache: PrefixCache, engine: ToyEngine):
    answered(cache, engine, TEXT[:16])
    prefix = cache.open(tokens(TEXT[:16]))
    assert prefix.sequence.length == 8
    prefix.sequence.close()


def test_an_entry_that_is_a_prefix_of_another_is_removed(cache: PrefixCache, engine: ToyEngine):
    for length in (10, 20, 40):
        answered(cache, engine, TEXT[:length])
    assert len(cache) == 1
    assert cache.tokens == 40


def test_a_running_prefill_is_shared_up_to_its_progress(cache: PrefixCache, engine: ToyEngine):
    reading = cache.open(tokens(TEXT))
    cache.register(tokens(TEXT), reading)
    assert cache.pending_prefix(tokens(TEXT)) == 39
    assert cache.pending_prefix(tokens([*TEXT[:20], 50])) == 20
    assert cache.pending_prefix(tokens(TEXT), "other") == 0
    run(engine, reading, TEXT[:20])
    assert cache.pending_prefix(tokens(TEXT)) == 19
    assert len(cache) == cache.tokens == 0
    # A running request's slots are not evicted.
    assert not cache.evict_for(engine.free_slots + 1)
    other = cache.open(tokens(TEXT))
    assert other.sequence.length == 16
    run(engine, reading, TEXT)
    assert cache.pending_prefix(tokens(TEXT)) == 0
    cache.unregister(reading)
    assert cache.find(tokens(TEXT)) == 0
    for item in (reading, other):
        item.sequence.close()


def test_the_least_recently_used_entry_is_evicted_first(cache: PrefixCache, engine: ToyEngine):
    texts = [[number, *TEXT[:23]] for number in (1, 2, 3)]
    for text in texts:
        answered(cache, engine, text)
    cache.open(tokens(texts[0])).sequence.close()  # used again
    assert cache.evict_for(10 * 8)
    assert len(cache) == 2
    assert answered(cache, engine, texts[1]) == 0
    assert answered(cache, engine, texts[0]) == 16


def test_eviction_reports_whether_enough_slots_are_free(cache: PrefixCache, engine: ToyEngine):
    held = cache.open(tokens(TEXT))
    run(engine, held, TEXT)
    assert not cache.evict_for(16 * 8)
    held.sequence.close()
    assert cache.evict_for(16 * 8)


def test_eviction_ends_if_slots_of_evicted_entries_are_not_freed(
    cache: PrefixCache, engine: ToyEngine, monkeypatch: pytest.MonkeyPatch
):
    answered(cache, engine, TEXT)
    kept = cache._entries[0].sequence

    def fails() -> None:
        raise RuntimeError("the engine cannot close it")

    with monkeypatch.context() as patch:
        patch.setattr(kept, "close", fails)
        assert not cache.evict_for(16 * 8)
    assert len(cache) == 0
    kept.close()


def test_a_short_entry_is_moved_instead_of_shared(cache: PrefixCache, engine: ToyEngine):
    """The entry has no whole block to share, and the prompt matches most of it."""
    answered(cache, engine, TEXT[:6])
    prefix = cache.open(tokens([*TEXT[:5], 50, 51]))
    assert prefix.sequence.length == 5
    assert len(cache) == 0
    prefix.sequence.close()


class Memory:
    """A fake cache of a draft head, with only positions."""

    def __init__(self, length: int) -> None:
        self.length = length

    def copy(self, position: int) -> "Memory":
        return Memory(min(position, self.length))

    def truncate(self, position: int) -> None:
        self.length = min(position, self.length)


def test_draft_kv_is_copied_with_the_prefix(cache: PrefixCache, engine: ToyEngine):
    prefix = cache.open(tokens(TEXT))
    known = prefix.memory.setdefault("dflash", Memory(40))
    run(engine, prefix, TEXT)
    cache.insert(tokens(TEXT), prefix)
    other = cache.open(tokens([*TEXT[:20], 50, 51]))
    copied = other.memory["dflash"]
    assert isinstance(copied, Memory)
    assert copied is not known
    assert copied.length == 16
    other.sequence.close()


def test_a_sequence_without_kv_is_not_inserted(cache: PrefixCache, engine: ToyEngine):
    cache.insert(tokens(TEXT), cache.open(tokens(TEXT)))
    assert len(cache) == 0
