"""Any sequence of calls to every engine. All comparisons of logits are bitwise.

Tokens are fed to a sequence as its prompt; tokens that are run after it are its answer.
"""

from contextlib import closing

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paceline.decoding.types import Block
from paceline.engines.base import Engine, KVSequence
from support.engine_rows import Rows, random_text, run, same


class TrackedSequence:
    """A sequence, its expected tokens, and the number of prompt tokens among them."""

    def __init__(self, sequence: KVSequence, tokens: list[int], read: int = 0) -> None:
        self.sequence = sequence
        self.tokens = tokens
        self.read = read


LONGEST = 60
MOST = 6


places = st.integers(0, MOST - 1)


class AnyUse(RuleBasedStateMachine):
    """Open, run, commit, rewind, fork and close in any order; rows must match plain decoding."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.held: list[TrackedSequence] = []
        self.known: dict[tuple[int, ...], Rows] = {}

    def fresh(self, text: list[int], prompt: int) -> Rows:
        """Return all rows of a text in an unused sequence."""
        key = (prompt, *text)
        if key not in self.known:
            rows = []
            with closing(self.engine.open()) as sequence:
                if prompt:
                    rows += run(self.engine, prompts=[(sequence, text[:prompt], prompt)])
                    sequence.commit(prompt)
                if text[prompt:]:
                    rows += run(self.engine, (sequence, text[prompt:], len(text) - prompt))
            self.known[key] = np.concatenate(rows)
        return self.known[key]

    def teardown(self) -> None:
        for one in self.held:
            one.sequence.close()

    @initialize()
    def begin(self):
        self.held.append(TrackedSequence(self.engine.open(), []))

    @precondition(lambda self: len(self.held) < MOST)
    @rule()
    def open(self):
        self.held.append(TrackedSequence(self.engine.open(), []))

    @precondition(lambda self: self.held)
    @rule(
        asks=st.dictionaries(
            places,
            st.tuples(st.integers(1, 12), st.integers(0, 12), st.integers(0, 99), st.booleans()),
            min_size=1,
            max_size=4,
        )
    )
    def step(self, asks: dict[int, tuple[int, int, int, bool]]):
        work = []
        for place, (length, kept, seed, reading) in asks.items():
            if place < len(self.held):
                one = self.held[place]
                tokens = random_text(self.engine, min(length, LONGEST - len(one.tokens)), seed)
                prompt = reading and one.read == len(one.tokens)  # no prompt behind an answer
                if tokens:
                    block = Block(tokens, len(tokens), prefill=prompt)
                    work.append((one, block, min(kept, len(tokens))))
        if not work:
            return
        result = self.engine.step([(one.sequence, block) for one, block, _ in work])
        copies = [logits.copy() for logits in result.logits]
        for logits, (one, block, kept) in zip(copies, work, strict=True):
            before, text = len(one.tokens), one.tokens + list(block.tokens)
            prompt = len(text) if block.prefill else one.read
            assert same(logits, self.fresh(text, prompt)[before:])
            one.sequence.commit(kept)
            one.tokens = text[: before + kept]
            one.read += kept * block.prefill
            assert one.sequence.length == len(one.tokens)
            assert one.read <= one.sequence.shareable_length <= len(one.tokens)

    @precondition(lambda self: self.held)
    @rule(place=places, length=st.integers(0, LONGEST))
    def rewind(self, place: int, length: int):
        one = self.held[place % len(self.held)]
        one.sequence.rewind(min(length, len(one.tokens)))
        assert one.sequence.length <= length
        del one.tokens[one.sequence.length :]
        one.read = min(one.read, len(one.tokens))

    @precondition(lambda self: 0 < len(self.held) < MOST)
    @rule(place=places, length=st.integers(0, LONGEST))
    def fork(self, place: int, length: int):
        one = self.held[place % len(self.held)]
        expected = one.sequence.fork_length(length)
        child = one.sequence.fork(length)
        assert child.length == expected
        self.held.append(TrackedSequence(child, one.tokens[: child.length], child.length))
        assert child.length <= min(length, one.sequence.shareable_length)

    @precondition(lambda self: len(self.held) > 1)
    @rule(place=places)
    def close(self, place: int):
        self.held.pop(place % len(self.held)).sequence.close()


def test_any_sequence_of_operations_matches_a_fresh_sequence(engine: Engine):
    several = engine.name == "mlx" or "states" in engine.describe()  # of that kind
    examples = 12 if several else 40
    run_state_machine_as_test(
        lambda: AnyUse(engine), settings=settings(max_examples=examples, stateful_step_count=30)
    )
