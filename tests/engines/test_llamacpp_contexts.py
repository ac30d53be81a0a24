"""Contexts of the engine llamacpp: which are made, lent again, kept and freed."""

import random
from typing import Any

import pytest

from paceline.engines.llamacpp.binding import ContextSettings
from paceline.engines.llamacpp.contexts import Contexts


class OpenContext:
    """A context without keys and values."""

    def __init__(self, settings: ContextSettings, held: list[int]) -> None:
        self.settings, self.length = settings, 0
        self._held = held
        held.append(settings.slots)

    def truncate(self, length: int) -> None:
        self.length = length

    def state(self) -> int:
        return self.length

    def restore(self, state: int, length: int, recurrent: None) -> None:
        assert length <= state <= self.settings.slots
        self.length = length

    def close(self) -> None:
        self._held.remove(self.settings.slots)


class Opener:
    """Opens contexts as a model does."""

    def __init__(self) -> None:
        self.held: list[int] = []
        """Slots of the contexts that are open."""
        self.binding: Any = self
        self.is_full = False

    def context(self, settings: ContextSettings) -> OpenContext:
        return OpenContext(settings, self.held)


@pytest.fixture
def model() -> Opener:
    return Opener()


def contexts_of(model: Any, most_slots: int = 8192) -> Contexts:
    return Contexts(model, 8192, ContextSettings(0, 256, 1), most=12, most_slots=most_slots)


def run(contexts: Contexts, sequence: object, length: int) -> Any:
    """Compute `length` positions, 256 at a time."""
    context: Any = None
    for at in range(0, length, 256):
        end = min(at + 256, length)
        context = contexts.of(sequence, end)
        context.length = end
    return context


def test_a_context_is_lent_again(model: Opener):
    contexts = contexts_of(model)
    first = run(contexts, "one", 500)
    contexts.forget("one")
    assert run(contexts, "two", 300) is first
    assert model.held == [512]


def test_a_short_sequence_leaves_a_long_context_to_a_long_one(model: Opener):
    contexts = contexts_of(model)
    long = contexts.of("long", 3000)
    contexts.forget("long")
    assert run(contexts, "short", 100).settings.slots == 512
    assert contexts.of("other", 2500) is long


def test_what_many_sequences_leave_does_not_grow_beyond_the_cache(model: Opener):
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


def test_a_context_as_long_as_the_cache_is_kept(model: Opener):
    contexts = contexts_of(model, most_slots=8448)
    long = contexts.of("long", 8192)
    contexts.forget("long")
    assert model.held == [long.settings.slots]


def test_at_rest_sequences_are_parked_and_few_contexts_are_left(model: Opener):
    contexts = contexts_of(model)
    lengths = {f"{number}": 100 * number for number in range(1, 9)}
    for sequence, length in lengths.items():
        run(contexts, sequence, length)
    contexts.rest()
    assert len(model.held) <= 2
    for sequence, length in lengths.items():
        assert contexts.of(sequence, length).length == length
