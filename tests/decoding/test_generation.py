"""The state machine of a request: prefill, decode, and the events for drafters and policies."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.policy import Fixed
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import NO_PROPOSAL, Block, DecodeOutcome
from support.drafters import Oracle
from support.errors import raises
from support.generation import (
    ANSWER,
    ELSE,
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

# -- prefill ---------------------------------------------------------------------------------------


def test_prefill_in_chunks_needs_only_the_last_row():
    generation = new_generation(prefill_chunk=2)
    seen = []
    while generation.prefilling:
        block = generation.next_block()
        seen.append((generation.length, list(block.tokens), block.rows))
        brought = step(generation)
        assert (brought.accepted_rows, brought.drafted, brought.accepted) == (
            len(block.tokens),
            0,
            0,
        )
    assert seen == [(0, [1, 2], 0), (2, [3, 4], 0), (4, [5], 1)]
    assert brought.tokens == [ord("T")]
    assert brought.text == "T"
    assert generation.length == generation.prompt_length == len(PROMPT)


@pytest.mark.parametrize("cached", [0, 1, 4, 5])
def test_prefill_skips_cached_tokens_except_the_last(cached: int):
    generation = new_generation(cached=cached)
    assert generation.length == min(cached, 4)
    assert generation.next_block() == Block(PROMPT[min(cached, 4) :], 1, best=True, prefill=True)
    finished(generation)
    assert generation.answer == ANSWER
    assert generation.tokens == TEXT


def test_prefill_drafts_nothing():
    oracle, policy = Oracle(TEXT), Recording(8)
    generation = new_generation(drafters=[oracle], policy=policy, prefill_chunk=2)
    for _ in range(3):
        step(generation)
    assert oracle.asked == policy.limits == policy.outcomes == []
    assert generation.counters.steps == 0


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"prompt": []}, "prompt"),
        ({"context_length": 5}, "5 tokens"),
        ({"context_length": 4}, "holds 4"),
        ({"cached": 6}, "cached is 6"),
        ({"cached": -1}, "cached is -1"),
        ({"sampling": Sampling(logit_bias={300: 1.0})}, "token 300"),
    ],
)
def test_an_impossible_prompt_is_rejected(settings: dict[str, Any], value: str):
    with raises(ValueError, value):
        new_generation(**settings)


# -- decode ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", [0, 1, 7])
def test_draft_tokens_are_accepted_up_to_the_first_mismatch(accepted: int):
    # Seven draft tokens; the one after the first `accepted` is wrong.
    oracle = Oracle(TEXT, wrong_at=[len(PROMPT) + 1 + accepted])
    generation = past_the_prompt(drafters=[oracle], policy=Fixed(8))
    before = generation.length
    brought = step(generation)
    # And the bonus token.
    tokens = ANSWER[1 : accepted + 2]
    assert (brought.accepted_rows, brought.tokens, brought.text) == (
        accepted + 1,
        tokens,
        decode(tokens),
    )
    assert (brought.drafted, brought.accepted, brought.proposal.source) == (7, accepted, "oracle")
    assert generation.length == before + accepted + 1
    # The next block begins with the last token, whose slot is not filled yet.
    assert generation.next_block().tokens[0] == tokens[-1]
    finished(generation)
    assert generation.answer == ANSWER


def test_a_draft_token_after_a_rejected_one_is_never_accepted():
    # The row of the rejected token picks ELSE, which is the next draft token.
    text = [*TEXT[:7], ELSE - 1, ELSE, ELSE]
    generation = past_the_prompt(drafters=[Oracle(text)], policy=Fixed(4))
    brought = step(generation)
    assert (brought.accepted_rows, brought.tokens, brought.text) == (2, ANSWER[1:3], "he")
    assert (brought.drafted, brought.accepted) == (3, 1)


@given(
    block=st.integers(1, 16),
    wrong=st.sets(st.integers(len(PROMPT), len(TEXT))),
    chunk=st.integers(1, 6),
    most=st.integers(1, len(ANSWER)),
)
def test_tokens_and_text_do_not_depend_on_the_draft(
    block: int, wrong: set[int], chunk: int, most: int
):
    generation = new_generation(
        drafters=[Oracle(TEXT, wrong)],
        policy=Fixed(block),
        prefill_chunk=chunk,
        stopping=Stopping(max_tokens=most),
    )
    steps = finished(generation)
    assert generation.answer == ANSWER[:most]
    assert [token for one in steps for token in one.tokens] == ANSWER[:most]
    assert "".join(one.text for one in steps) == decode(ANSWER[:most])
    assert sum(one.accepted_rows for one in steps) == generation.length == len(PROMPT) + most - 1
    assert sum(one.drafted for one in steps) == generation.counters.drafted
    assert sum(one.accepted for one in steps) == generation.counters.accepted


def test_the_policys_limit_is_the_number_of_tokens_that_can_be_kept():
    silent, knowing = Oracle([]), Oracle(TEXT)
    policy = Recording(4)
    generation = past_the_prompt(drafters=[silent, knowing], policy=policy)
    assert generation.next_block().tokens == list(b"The ")
    assert silent.asked == knowing.asked == [3]
    assert policy.limits == [len(ANSWER) - 2]


# -- wrong rows ------------------------------------------------------------------------------------


def test_accept_rejects_a_wrong_number_of_rows_and_keeps_the_block():
    with raises(RuntimeError, "next_block"):
        new_generation().accept(np.zeros((1, VOCABULARY), np.float32))
    generation = past_the_prompt(drafters=[Oracle(TEXT)], policy=Fixed(3))
    block = generation.next_block()
    for count in (2, 4):
        with raises(ValueError, f"{count} rows"):
            generation.accept(np.zeros((count, VOCABULARY), np.float32))
        assert generation.next_block() is block
    assert step(generation).tokens == list(b"he ")


# -- what drafters and policies observe ------------------------------------------------------------


def test_every_drafter_observes_every_step():
    first, second = Oracle(TEXT, wrong_at=[8]), Oracle([])
    generation = new_generation(
        drafters=[first, second], policy=Fixed(4), prefill_chunk=3, stopping=Stopping(max_tokens=6)
    )
    taps = {"layer": np.ones((3, 2), np.float32)}
    step(generation, taps=taps)
    finished(generation)
    seen = [(list(v.tokens), v.start, v.accepted_rows) for v in first.seen]
    assert seen == [
        ([1, 2, 3], 0, 3),
        ([4, 5], 3, 2),
        ([*b"The", ord(" ") ^ 1], 5, 3),
        (list(b" r"), 8, 2),
    ]
    assert second.seen == first.seen
    assert first.seen[0].taps is taps
    assert first.seen[1].taps == {}


def test_the_policy_observes_outcome_and_time_of_each_decode_step():
    policy = Recording(4)
    generation = new_generation(drafters=[Oracle(TEXT[:9], wrong_at=[7])], policy=policy)
    step(generation, seconds=9.0)
    step(generation, seconds=0.5)
    step(generation)
    step(generation, seconds=0.25)
    (first, second, third) = policy.outcomes
    assert (list(first.proposal.tokens), first.accepted, first.seconds) == ([104, 100, 32], 1, 0.5)
    assert (list(second.proposal.tokens), second.accepted) == ([ord(" ")], 1)
    assert third == DecodeOutcome(NO_PROPOSAL, 0, 0.25, [ord("i")])
    assert first.tokens == list(b"he")


def test_the_policy_does_not_observe_the_last_step():
    # The end left the rest of the draft unverified.
    policy = Recording(8)
    generation = past_the_prompt(
        policy=policy,
        drafters=[Oracle(TEXT)],
        stopping=Stopping(stop_token_ids=frozenset({ord(" ")})),
    )
    step(generation)
    assert generation.finished
    assert policy.outcomes == []
    assert generation.counters.steps == 1


def test_steps_and_drafts_are_counted_by_drafter_and_by_position():
    first, second = Oracle(TEXT[:9], wrong_at=[8]), Oracle(TEXT)
    second.name = "other"
    generation = new_generation(
        drafters=[first, second], policy=Fixed(4), stopping=Stopping(max_tokens=12)
    )
    finished(generation)
    counters = generation.counters
    # "he" and a wrong space; then " rid" and "ers", whose last token needs no row.
    assert counters.drafted_by == {"oracle": 3, "other": 3 + 3}
    assert counters.accepted_by == {"oracle": 2, "other": 3 + 3}
    assert (counters.drafted_at, counters.accepted_at) == ([3, 3, 3], [3, 3, 2])
    assert (counters.steps, counters.drafted, counters.accepted) == (3, 9, 8)
    assert counters.fallbacks == 1


def test_sampling_is_keyed_by_the_absolute_position():
    # Flat rows: the token shows which random number was used.
    flat = np.zeros((8, VOCABULARY), np.float32)

    def drawn(prompt: list[int], text: Sequence[int] = ()) -> list[int]:
        generation = new_generation(
            prompt,
            sampling=Sampling(temperature=1.0, seed=1),
            drafters=[Oracle(text, wrong_at=[9, 14])],
        )
        while not generation.finished:
            generation.accept(flat[: generation.next_block().rows])
        assert generation.counters.accepted > 10 or not text
        return generation.answer

    plain = drawn([1, 2])
    assert drawn([1, 2], [1, 2, *plain]) == plain
    # One more prompt token moves every position of the answer by one.
    assert drawn([1])[1:] == plain[:-1]


# -- row limit -------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 3])
def test_a_block_has_at_most_max_rows(most: int):
    generation = new_generation(drafters=[Oracle(TEXT)], policy=Fixed(8))
    longest = 0
    while not generation.finished:
        block = generation.next_block(most)
        longest = max(longest, len(block.tokens))
        generation.accept(rows(block, generation.length))
    assert generation.answer == ANSWER
    assert longest == most
