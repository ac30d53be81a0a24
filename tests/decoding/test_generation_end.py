"""How a generation ends: limits, stop tokens and strings, cancelling."""

import numpy as np
import pytest

from paceline.decoding.policy import Fixed
from paceline.decoding.stopping import Stopping
from paceline.decoding.text import TextPiece
from paceline.decoding.types import FinishReason
from support.drafters import Oracle
from support.errors import raises
from support.generation import (
    ANSWER,
    PROMPT,
    TEXT,
    VOCABULARY,
    decode,
    finished,
    new_generation,
    past_the_prompt,
    step,
)

# -- stopping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [None, 10, 11])
def test_the_context_limit_ends_the_answer(max_tokens: int | None):
    generation = new_generation(
        context_length=len(PROMPT) + 10,
        stopping=Stopping(max_tokens=max_tokens),
        drafters=[Oracle(TEXT)],
    )
    finished(generation)
    assert generation.answer == ANSWER[:10]
    assert generation.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("at", [0, 1, 2, 9])
def test_an_end_token_inside_an_accepted_block_ends_the_answer_with_it(at: int):
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


def test_text_that_was_held_back_comes_with_the_last_token():
    generation = new_generation(stopping=Stopping(max_tokens=3, stop=("hex",)))
    steps = finished(generation)
    assert [one.text for one in steps] == ["T", "", "he"]
    assert generation.finish_reason is FinishReason.LENGTH


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
    assert generation.cancel() == TextPiece()
    assert generation.finished
    assert generation.finish_reason is FinishReason.CANCELLED
    assert (generation.answer, generation.length) == (answer, length)
    with raises(RuntimeError, "finished"):
        generation.next_block()
    with raises(RuntimeError, "block"):
        generation.accept(np.zeros((3, VOCABULARY), np.float32))


def test_cancel_returns_the_text_held_back_once():
    generation = past_the_prompt(stopping=Stopping(stop=("There",)))
    step(generation)
    assert generation.cancel().final == "Th"
    assert generation.cancel() == TextPiece()
