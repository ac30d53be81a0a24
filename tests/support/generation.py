"""A `Generation` whose target generates a known text, without a model."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.decoding.generation import Generation, Rules, Speculation, Target
from paceline.decoding.policy import Fixed
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import Block, DecodeOutcome, Drafter, Policy, Proposal, Step

VOCABULARY = 300
PROMPT = [1, 2, 3, 4, 5]
ANSWER = list(b"The riders draft each other.")
TEXT = PROMPT + ANSWER
ELSE = 299
"""The target's token after a draft token that is not in the text."""


def decode(ids: Sequence[int]) -> str:
    """Token i is byte i; those beyond are special and have no text."""
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


class Recording(Fixed):
    def __init__(self, max_block: int) -> None:
        super().__init__(max_block)
        self.limits: list[int] = []
        self.outcomes: list[DecodeOutcome] = []

    def draft(self, drafters: Sequence[Drafter], context: Sequence[int], limit: int) -> Proposal:
        self.limits.append(limit)
        return super().draft(drafters, context, limit)

    def observe(self, outcome: DecodeOutcome) -> None:
        self.outcomes.append(outcome)


def new_generation(
    prompt: Sequence[int] = PROMPT,
    *,
    drafters: Sequence[Drafter] = (),
    policy: Policy | None = None,
    cached: int = 0,
    context_length: int = 100,
    prefill_chunk: int = 512,
    **rules: Any,
) -> Generation:
    rules = {"stopping": Stopping(max_tokens=len(ANSWER)), **rules}
    target = Target(VOCABULARY, context_length, decode, prefill_chunk=prefill_chunk)
    return Generation(
        prompt, target, Rules(**rules), Speculation(policy or Fixed(8), drafters), cached
    )


def rows(block: Block, start: int, text: Sequence[int] = TEXT) -> np.ndarray:
    """Logits of a target that generates `text`, for a block at slots [start, start + T)."""
    logits = np.zeros((block.rows, VOCABULARY), np.float32)
    for row in range(block.rows):
        end = start + len(block.tokens) - block.rows + row + 1
        true = list(block.tokens[: end - start]) == list(text[start:end]) and end < len(text)
        logits[row, text[end] if true else ELSE] = 1
    return logits


def step(generation: Generation, text: Sequence[int] = TEXT, **evidence: Any) -> Step:
    return generation.accept(rows(generation.next_block(), generation.length, text), **evidence)


def finished(generation: Generation, text: Sequence[int] = TEXT) -> list[Step]:
    steps = []
    while not generation.finished:
        steps.append(step(generation, text))
    return steps


def past_the_prompt(text: Sequence[int] = TEXT, **settings: Any) -> Generation:
    generation = new_generation(**settings)
    while generation.prefilling:
        step(generation, text)
    return generation
