"""Contexts of the engine llamacpp: created, reused, kept and freed."""

import random
from typing import Any

import pytest

from paceline.engines.llamacpp.binding import ContextSettings
from paceline.engines.llamacpp.sequence import Contexts


class OpenContext:
    def __init__(self, settings: ContextSettings, held: list[int]) -> None:
        self.settings = settings
        self.sequences = [Place(self, number) for number in range(settings.sequences)]
        self._held = held
        held.append(settings.slots * settings.sequences)

    def close(self) -> None:
        self._held.remove(self.settings.slots * self.settings.sequences)


class Place:
    def __init__(self, context: OpenContext, number: int) -> None:
        self.context, self.number, self.length = context, number, 0
        self.slots = context.settings.slots

    def truncate(self, length: int) -> None:
        self.length = length

    def state(self) -> int:
        return self.length

    def restore(self, state: int, length: int, recurrent: None) -> None:
        assert length <= state <= self.slots
        self.length = length


class Opener:
    def __init__(self) -> None:
        self.held: list[int] = []
        self.binding: Any = self
        self.is_full, self.span, self.offload = False, 0, None

    def context(self, settings: ContextSettings) -> OpenContext:
        return OpenContext(settings, self.held)


@pytest.fixture
def model() -> Opener:
    return Opener()


def contexts_of(model: Any, max_slots: int = 8192, sequences: int = 1) -> Contexts:
    settings = ContextSettings(0, 256, 1, sequences=sequences)
    return Contexts(model, 8192, settings, max_contexts=12, max_slots=max_slots)


def run(contexts: Contexts, sequence: object, length: int) -> Any:
    place: Any = None
    for at in range(0, length, 256):
        end = min(at + 256, length)
        place = contexts.acquire(sequence, end)
        place.length = end
    return place


@pytest.mark.parametrize("length", [500, 8192])
def test_a_released_context_is_reused(model: Opener, length: int):
    contexts = contexts_of(model, max_slots=8448)
    first = run(contexts, "one", length)
    contexts.forget("one")
    assert model.held == [first.slots]
    assert contexts.acquire("two", max(300, length - 1)) is first


def test_a_short_sequence_does_not_take_a_long_context(model: Opener):
    contexts = contexts_of(model)
    long = contexts.acquire("long", 3000)
    contexts.forget("long")
    assert run(contexts, "short", 100).slots == 512
    assert contexts.acquire("other", 2500) is long


def test_released_contexts_do_not_grow_beyond_the_cache(model: Opener):
    contexts = contexts_of(model)
    draw = random.Random(3)
    running: list[int] = []
    for number in range(2000):
        if running and draw.random() < 0.5:
            contexts.forget(running.pop(draw.randrange(len(running))))
        elif len(running) < 12:
            running.append(number)
            run(contexts, number, draw.choice([60, 200, 500, 700, 1500]))
        # Contexts double as they grow, and none is smaller than the first.
        assert sum(model.held) <= 8192 + 12 * 2048
    for sequence in running:
        contexts.forget(sequence)
    assert sum(model.held) <= 8192
    assert len(model.held) <= 2


def test_idle_sequences_are_saved_and_few_contexts_remain(model: Opener):
    contexts = contexts_of(model)
    lengths = {f"{number}": 100 * number for number in range(1, 9)}
    for sequence, length in lengths.items():
        run(contexts, sequence, length)
    contexts.rest()
    assert len(model.held) <= 2
    for sequence, length in lengths.items():
        assert contexts.acquire(sequence, length).length == length


@pytest.mark.parametrize("call", ["state", "restore"])
def test_a_failed_move_loses_no_sequence(model: Opener, monkeypatch: pytest.MonkeyPatch, call: str):
    contexts = contexts_of(model)
    run(contexts, "one", 500)

    def faulty(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Place, call, faulty)
    with pytest.raises(MemoryError):
        contexts.acquire("one", 600)  # it grows
    monkeypatch.undo()
    assert contexts.acquire("one", 600).length == 500


def test_batched_sequences_take_the_first_places_of_the_largest_context(model: Opener):
    contexts = contexts_of(model, sequences=4)
    short = [run(contexts, f"short {n}", 100) for n in range(2)]
    assert [place.number for place in short] == [0, 1]
    grown = run(contexts, "short 0", 700)  # moves to a larger one
    assert (grown.slots, grown.number) == (1024, 0)
    assert run(contexts, "new", 100).context is grown.context
    contexts.forget("short 0")
    again = run(contexts, "again", 100)
    assert (again.context, again.number) == (grown.context, 0)
    # Of 8,192 slots 6,144 are taken: a context of 2,048 has one place.
    long = run(contexts, "long", 2000)
    assert (long.slots, len(long.context.sequences)) == (2048, 1)
