"""The rows that a generation reads, and how it ends."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline.decoding.generation import Generation
from paceline.decoding.policy import Fixed
from paceline.decoding.sampling import Sampling, token_logprob
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import FORCED, NO_TOKEN, Best, Block, FinishReason, Step
from paceline.drafters import create
from support.drafters import Oracle
from support.errors import raises
from support.generation import (
    ANSWER,
    PROMPT,
    TEXT,
    VOCABULARY,
    Recording,
    decode,
    finished,
    new_generation,
    past_the_prompt,
    rows,
    step,
)

# -- argmax in place of logits ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "best"),
    [
        ({}, True),
        ({"sampling": Sampling(temperature=0.7)}, False),
        ({"sampling": Sampling(repetition_penalty=1.1)}, False),
        ({"sampling": Sampling(presence_penalty=0.1)}, False),
        ({"sampling": Sampling(frequency_penalty=-0.1)}, False),
        ({"sampling": Sampling(logit_bias={3: 1.0})}, False),
        ({"drafters": create("suffix+ngram")}, True),
    ],
)
def test_a_block_requests_only_the_argmax_if_nothing_reads_logits(settings: Any, best: bool):
    generation = new_generation(**settings)
    assert generation.next_block().best is best
    while not generation.finished:
        assert generation.next_block().best is best
        step(generation)


def test_argmax_and_logits_give_the_same_steps():
    expected = new_generation(drafters=create("ngram"))
    finished(expected)
    generation = new_generation(drafters=create("ngram"))
    nothing = np.empty((0, VOCABULARY), np.float32)
    while not generation.finished:
        whole = rows(generation.next_block(), generation.length)
        generation.accept(nothing, best=Best(whole.argmax(axis=1), whole.max(axis=1)))
    assert generation.answer == expected.answer
    assert generation.counters == expected.counters


# -- logprobs --------------------------------------------------------------------------------------


def graded(block: Block, start: int) -> np.ndarray:
    result = rows(block, start)
    for row in range(block.rows):
        rng = np.random.default_rng(start + len(block.tokens) - block.rows + row)
        result[row] = result[row] * 9 + rng.random(VOCABULARY, np.float32)
    return result


def run_graded(generation: Generation) -> list[Step]:
    steps = []
    while not generation.finished:
        block = generation.next_block()
        steps.append(generation.accept(graded(block, generation.length)))
    return steps


@pytest.mark.parametrize("drafters", ["none", "ngram"])
def test_every_response_token_has_a_logprob(drafters: str):
    generation = new_generation(logprobs=3, drafters=create(drafters), prefill_chunk=2)
    steps = run_graded(generation)
    assert generation.answer == ANSWER
    assert [len(step.logprobs) for step in steps] == [len(step.tokens) for step in steps]
    assert [result for step in steps for result in step.logprobs] == generation.logprobs
    for at, logprob in enumerate(generation.logprobs):
        row = graded(Block(TEXT[: len(PROMPT) + at], 1), 0)[0]
        assert logprob == token_logprob(row, ANSWER[at], 3)


@pytest.mark.parametrize("chunk", [1, 2, 4, 99])
def test_every_prompt_token_has_a_logprob(chunk: int):
    generation = new_generation(logprobs=2, prompt_logprobs=True, prefill_chunk=chunk)
    run_graded(generation)
    assert generation.answer == ANSWER
    first, *rest = generation.prompt_logprobs
    assert first is None
    assert len(rest) == len(PROMPT) - 1
    for at, item in enumerate(rest, start=1):
        assert item == token_logprob(graded(Block(PROMPT[:at], 1), 0)[0], PROMPT[at], 2)
    assert len(generation.logprobs) == len(ANSWER)


def test_logprobs_are_computed_before_sampling():
    sampling = Sampling(logit_bias={ANSWER[0]: -100.0})
    generation = new_generation(logprobs=1, sampling=sampling, stopping=Stopping(max_tokens=1))
    run_graded(generation)
    (logprobs,) = generation.logprobs
    assert logprobs.token == generation.answer[0] != ANSWER[0]
    assert logprobs.top[0][0] == ANSWER[0]
    assert logprobs.logprob < logprobs.top[0][1]


# -- banned tokens and constraints -----------------------------------------------------------------


def test_stop_tokens_are_banned_before_min_tokens():
    stops = frozenset({ANSWER[3], ANSWER[6]})
    generation = new_generation(
        stopping=Stopping(max_tokens=20, stop_token_ids=stops, min_tokens=5)
    )
    finished(generation)
    assert generation.answer[3] != ANSWER[3]
    early = new_generation(stopping=Stopping(max_tokens=20, stop_token_ids=stops))
    finished(early)
    assert early.answer == ANSWER[:4]


class Only:
    def __init__(self, text: Sequence[int], *, forces: bool) -> None:
        self.text, self.forces, self.at = list(text), forces, 0

    def masked(self, logits: np.ndarray) -> np.ndarray:
        values = np.full_like(logits, -np.inf)
        values[self.text[self.at]] = logits[self.text[self.at]]
        return values

    def push(self, token: int) -> None:
        assert token == self.text[self.at]
        self.at += 1

    def forced(self, limit: int) -> Sequence[int]:
        return self.text[self.at : self.at + limit] if self.forces else ()

    def allowed_length(self, tokens: Sequence[int]) -> int:
        same = [a == b for a, b in zip(tokens, self.text[self.at :], strict=False)]
        return same.index(False) if False in same else len(same)


@pytest.mark.parametrize("forces", [True, False])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)])
def test_a_constraint_restricts_and_forces_tokens(forces: bool, sampling: Sampling):
    results = list(b'{"a": 1}')
    policy = Recording(4)
    generation = new_generation(
        constraint=Only(results, forces=forces),
        sampling=sampling,
        stopping=Stopping(max_tokens=len(results)),
        drafters=[Oracle(TEXT)],
        policy=policy,
    )
    steps = finished(generation)
    assert generation.answer == results
    if forces:
        # One step for the prompt, then all forced tokens in one block.
        assert [step.forced for step in steps] == [0, len(results) - 2]
        assert steps[1].proposal.source == FORCED
        # Forced tokens are not drafted.
        assert [step.drafted for step in steps] == [0, 0]
        assert generation.counters.accepted_by == {}
        assert generation.counters.forced == len(results) - 2
        assert policy.outcomes == []


# -- stopping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [None, 10, 11])
def test_the_context_limit_ends_the_response(max_tokens: int | None):
    generation = new_generation(
        context_length=len(PROMPT) + 10,
        stopping=Stopping(max_tokens=max_tokens),
        drafters=[Oracle(TEXT)],
    )
    finished(generation)
    assert generation.answer == ANSWER[:10]
    assert generation.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("at", [0, 1, 2, 9])
def test_a_stop_token_inside_an_accepted_block_ends_the_response(at: int):
    eos = 256
    text = [*PROMPT, *ANSWER[:at], eos, *ANSWER[at:]]
    for block in (1, 2, 4, 16):
        generation = new_generation(
            stopping=Stopping(stop_token_ids=frozenset({eos, 257})),
            drafters=[Oracle(text)],
            policy=Fixed(block),
        )
        steps = finished(generation, text)
        assert generation.answer == [*ANSWER[:at], eos]
        assert "".join(one.text for one in steps) == decode(ANSWER[:at])
        assert generation.finish_reason is FinishReason.STOP
        # The end token was picked, not run: its slot is not part of the sequence.
        assert generation.length == len(PROMPT) + at


@pytest.mark.parametrize("block", [1, 3, 9])
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        (("ride",), "The ", "The ride"),
        (("riders draft",), "The ", "The riders draft"),
        (("T",), "", "T"),
        (("er", "rs", "id"), "The r", "The rid"),
        (("ride!", "s d"), "The rider", "The riders d"),
        (("each other.",), "The riders draft ", "The riders draft each other."),
    ],
)
def test_a_stop_string_may_span_tokens_and_blocks(
    block: int, stop: tuple[str, ...], text: str, tokens: str
):
    generation = new_generation(
        stopping=Stopping(max_tokens=len(ANSWER), stop=stop),
        drafters=[Oracle(TEXT)],
        policy=Fixed(block),
    )
    steps = finished(generation)
    assert "".join(one.text for one in steps) == text
    assert generation.answer == list(tokens.encode())
    assert generation.finish_reason is FinishReason.STOP


# -- cancelling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("block_is_out", [False, True])
def test_a_generation_can_be_cancelled_at_any_time(steps: int, block_is_out: bool):
    generation = new_generation(prefill_chunk=3, drafters=[Oracle(TEXT)], policy=Fixed(3))
    for _ in range(steps):
        step(generation)
    answer, length = generation.answer, generation.length
    if block_is_out:
        generation.next_block()
    assert generation.cancel() == NO_TOKEN
    assert generation.finished
    assert generation.finish_reason is FinishReason.CANCELLED
    assert (generation.answer, generation.length) == (answer, length)
    with raises(RuntimeError, "finished"):
        generation.next_block()
    with raises(RuntimeError, "block"):
        generation.accept(np.zeros((3, VOCABULARY), np.float32))


def test_held_back_text_is_emitted_once_at_the_end_or_on_cancel():
    generation = new_generation(stopping=Stopping(max_tokens=3, stop=("hex",)))
    assert [one.text for one in finished(generation)] == ["T", "", "he"]
    assert generation.finish_reason is FinishReason.LENGTH
    generation = past_the_prompt(stopping=Stopping(stop=("There",)))
    step(generation)
    assert generation.cancel().final == "Th"
    assert generation.cancel() == NO_TOKEN
