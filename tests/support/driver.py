"""Run generations on an engine, all due blocks in one forward pass, like a scheduler."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from paceline.decoding.auto import Acceptance, Auto
from paceline.decoding.costs import CostTable
from paceline.decoding.generation import Generation, Rules, Speculation, Target
from paceline.decoding.policy import Adaptive, Fixed, Kelly
from paceline.decoding.types import Counters, Drafter, FinishReason, Policy
from paceline.engines.base import Engine, KVSequence

CHEAP = CostTable({1: 1.0, 32: 1.5})
"""Rows cost next to nothing, so that `Auto` drafts."""

POLICIES: dict[str, Callable[[int], Policy]] = {
    "fixed": Fixed,
    "adaptive": Adaptive,
    "kelly": Kelly,
    "auto": lambda block: Auto(block, CHEAP, Acceptance()),
}

# Letters, two words with spaces, and the bytes of a two-byte and of a four-byte character.
_PIECES = [bytes([letter]) for letter in b"abcdefghijklmnopqrstuvwxyz.,\n"]
_PIECES += [b" the", b" and ", *(bytes([byte]) for byte in "é😀".encode())]


def decode(ids: Sequence[int]) -> str:
    return b"".join(_PIECES[i % len(_PIECES)] for i in ids).decode("utf-8", "replace")


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    text: str
    finish_reason: FinishReason | None


def generation(
    engine: Engine,
    prompt: Sequence[int],
    *,
    drafters: Sequence[Drafter] = (),
    policy: Policy | None = None,
    cached: int = 0,
    prefill_chunk: int = 512,
    **rules: Any,
) -> Generation:
    target = Target(engine.vocab_size, engine.context_length, decode, prefill_chunk=prefill_chunk)
    given = {name: value for name, value in rules.items() if value is not None}
    return Generation(
        prompt, target, Rules(**given), Speculation(policy or Fixed(8), drafters), cached
    )


def run(
    engine: Engine,
    generations: Sequence[Generation],
    arrivals: Sequence[int] | None = None,
    sequences: Sequence[KVSequence] | None = None,
) -> list[Answer]:
    """Drive them to their ends; generation i takes part from call number arrivals[i] on.

    `sequences` have what each generation counts as cached, and are closed; None: empty ones.
    """
    texts = ["" for _ in generations]
    with ExitStack() as stack:
        sequences = sequences or [engine.open() for _ in generations]
        for sequence in sequences:
            stack.enter_context(closing(sequence))
        call = 0
        while any(not generation.finished for generation in generations):
            due = [
                i
                for i, generation in enumerate(generations)
                if not generation.finished and (arrivals is None or arrivals[i] <= call)
            ]
            call += 1
            if not due:
                continue
            result = engine.step([(sequences[i], generations[i].next_block()) for i in due])
            bests = result.best or [None] * len(due)
            for i, logits, best, taps in zip(due, result.logits, bests, result.taps, strict=True):
                step = generations[i].accept(logits, best=best, taps=taps, seconds=result.seconds)
                sequences[i].commit(step.accepted_rows)
                assert sequences[i].length == generations[i].length
                texts[i] += step.text
                if generations[i].finished:
                    generations[i].close()
    return [
        Answer(generation.answer, text, generation.finish_reason)
        for generation, text in zip(generations, texts, strict=True)
    ]


def answer(engine: Engine, prompt: Sequence[int], **settings: Any) -> Answer:
    return run(engine, [generation(engine, prompt, **settings)])[0]


def total(generations: Sequence[Generation]) -> Counters:
    counters = Counters()
    for one in generations:
        counters.steps += one.counters.steps
        counters.drafted += one.counters.drafted
        counters.accepted += one.counters.accepted
    return counters
