from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.generation import Generation
from paceline.decoding.logprobs import token_logprob
from paceline.decoding.policy import Fixed
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.decoding.text import TextPiece
from paceline.decoding.types import (
    FORCED,
    NO_PROPOSAL,
    Best,
    Block,
    DecodeOutcome,
    Drafter,
    FinishReason,
    Proposal,
    Step,
)
from paceline.drafters import Probe, create
from support.drafters import Oracle

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
    """A fixed policy that records its limits and outcomes."""

    def __init__(self, max_block: int) -> None:
        super().__init__(max_block)
        self.limits: list[int] = []
        self.outcomes: list[DecodeOutcome] = []

    def draft(self, drafters: Sequence[Drafter], context: Sequence[int], limit: int) -> Proposal:
        self.limits.append(limit)
        return super().draft(drafters, context, limit)

    def observe(self, outcome: DecodeOutcome) -> None:
        self.outcomes.append(outcome)


def made(prompt: Sequence[int] = PROMPT, **settings: Any) -> Generation:
    return Generation(
        prompt,
        **{
            "vocab_size": VOCABULARY,
            "context_length": 100,
            "sampling": Sampling(),
            "stopping": Stopping(max_tokens=len(ANSWER)),
            "drafters": [],
            "policy": Fixed(8),
            "decode": decode,
            **settings,
        },
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
    """A generation with the first token of its answer."""
    generation = made(**settings)
    while generation.prefilling:
        step(generation, text)
    return generation


# --- prefill


def test_prefill_in_chunks_needs_only_the_last_row():
    generation = made(prefill_chunk=2)
    seen = []
    while generation.prefilling:
        block = generation.next_block()
        seen.append((generation.length, list(block.tokens), block.rows))
        brought = step(generation)
        assert (brought.kept, brought.drafted, brought.accepted) == (len(block.tokens), 0, 0)
    assert seen == [(0, [1, 2], 0), (2, [3, 4], 0), (4, [5], 1)]
    assert brought.tokens == [ord("T")]
    assert brought.text == "T"
    assert generation.length == generation.prompt_length == len(PROMPT)


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 6])
def test_prefill_chunks_before_the_last_add_no_tokens(chunk: int):
    generation = made(prefill_chunk=chunk)
    for _ in range(-(-5 // chunk) - 1):
        assert step(generation) == Step(chunk, [], [])
    assert step(generation).tokens == ANSWER[:1]
    assert not generation.prefilling


@pytest.mark.parametrize("cached", range(6))
def test_prefill_skips_cached_tokens_except_the_last(cached: int):
    generation = made(cached=cached)
    assert generation.length == min(cached, 4)
    assert generation.next_block() == Block(PROMPT[min(cached, 4) :], 1, best=True, prefill=True)
    finished(generation)
    assert generation.answer == ANSWER
    assert generation.tokens == TEXT


def test_prefill_drafts_nothing():
    oracle, policy = Oracle(TEXT), Recording(8)
    generation = made(drafters=[oracle], policy=policy, prefill_chunk=2)
    for _ in range(3):
        step(generation)
    assert oracle.asked == policy.limits == policy.outcomes == []
    assert generation.counters.steps == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": []}, "the prompt is empty; expected at least one token"),
        ({"context_length": 5}, "the prompt has 5 tokens and the context holds 5"),
        ({"context_length": 4}, "the prompt has 5 tokens and the context holds 4"),
        ({"prompt": [1, VOCABULARY]}, "token ids outside 0 to 299"),
        ({"prompt": [1, -1]}, "token ids outside 0 to 299"),
        ({"cached": 6}, "cached is 6; expected 0 to 5"),
        ({"cached": -1}, "cached is -1; expected 0 to 5"),
        ({"sampling": Sampling(logit_bias={300: 1.0})}, "logit_bias names token 300"),
    ],
)
def test_an_impossible_prompt_is_rejected(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        made(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; expected 1 or more"),
        ({"stop": ("a", "")}, "a stop string is empty"),
    ],
)
def test_impossible_stopping_options_are_rejected(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Stopping(**settings)


# --- decode


def test_plain_decode_adds_one_token_per_step():
    generation = past_the_prompt()
    block = generation.next_block()
    assert block == Block([ord("T")], 1, best=True)
    assert step(generation) == Step(1, [ord("h")], [TextPiece("h", "h")])
    assert generation.length == 6
    steps = finished(generation)
    assert [len(one.tokens) for one in steps] == [1] * (len(ANSWER) - 2)
    assert generation.answer == ANSWER
    assert generation.finish_reason is FinishReason.LENGTH


def test_a_decode_block_is_the_last_token_and_the_draft_and_needs_all_rows():
    generation = past_the_prompt(drafters=[Oracle(TEXT)], policy=Fixed(4))
    assert generation.next_block() == Block(list(b"The "), 4, best=True)


@pytest.mark.parametrize("accepted", range(8))
def test_draft_tokens_are_accepted_up_to_the_first_mismatch(accepted: int):
    # Seven draft tokens, of which the one after the first `accepted` is wrong.
    oracle = Oracle(TEXT, wrong_at=[len(PROMPT) + 1 + accepted])
    generation = past_the_prompt(drafters=[oracle], policy=Fixed(8))
    before = generation.length
    brought = step(generation)
    # And the bonus token.
    tokens = ANSWER[1 : accepted + 2]
    assert (brought.kept, brought.tokens, brought.text) == (accepted + 1, tokens, decode(tokens))
    assert (brought.drafted, brought.accepted, brought.source) == (7, accepted, "oracle")
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
    assert (brought.kept, brought.tokens, brought.text) == (2, ANSWER[1:3], "he")
    assert (brought.drafted, brought.accepted) == (3, 1)


@given(
    block=st.integers(1, 16),
    wrong=st.sets(st.integers(len(PROMPT), len(TEXT))),
    chunk=st.integers(1, 6),
    most=st.integers(1, len(ANSWER)),
)
def test_tokens_and_text_are_the_same_whatever_is_drafted(
    block: int, wrong: set[int], chunk: int, most: int
):
    generation = made(
        drafters=[Oracle(TEXT, wrong)],
        policy=Fixed(block),
        prefill_chunk=chunk,
        stopping=Stopping(max_tokens=most),
    )
    steps = finished(generation)
    assert generation.answer == ANSWER[:most]
    assert [token for one in steps for token in one.tokens] == ANSWER[:most]
    assert "".join(one.text for one in steps) == decode(ANSWER[:most])
    assert sum(one.kept for one in steps) == generation.length == len(PROMPT) + most - 1
    assert sum(one.drafted for one in steps) == generation.counters.drafted
    assert sum(one.accepted for one in steps) == generation.counters.accepted


def test_next_block_is_the_same_until_accept():
    oracle = Oracle(TEXT)
    generation = past_the_prompt(drafters=[oracle])
    assert generation.next_block() is generation.next_block()
    assert len(oracle.asked) == 1
    assert not generation.prefilling
    assert generation.answer == ANSWER[:1]


def test_the_policy_gets_the_number_of_tokens_that_can_be_kept_as_limit():
    silent, knowing = Oracle([]), Oracle(TEXT)
    policy = Recording(4)
    generation = past_the_prompt(drafters=[silent, knowing], policy=policy)
    assert generation.next_block().tokens == list(b"The ")
    assert silent.asked == knowing.asked == [3]
    assert policy.limits == [len(ANSWER) - 2]


def test_drafters_are_not_asked_if_the_policy_does_not_draft():
    oracle = Oracle(TEXT)
    generation = past_the_prompt(drafters=[oracle], policy=Fixed(1))
    assert generation.next_block() == Block([ord("T")], 1, best=True)
    assert oracle.asked == []


# --- stopping


@pytest.mark.parametrize("most", range(1, 12))
@pytest.mark.parametrize("block", [1, 2, 3, 5, 16])
def test_max_tokens_is_met_exactly_and_no_draft_exceeds_it(most: int, block: int):
    oracle = Oracle(TEXT)
    generation = made(stopping=Stopping(max_tokens=most), drafters=[oracle], policy=Fixed(block))
    while not generation.finished:
        rest = most - len(generation.answer)
        assert generation.prefilling or len(generation.next_block().tokens) <= rest
        step(generation)
    assert generation.answer == ANSWER[:most]
    assert generation.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("max_tokens", [None, 10, 11])
def test_the_context_limit_ends_the_answer(max_tokens: int | None):
    generation = made(
        context_length=len(PROMPT) + 10,
        stopping=Stopping(max_tokens=max_tokens),
        drafters=[Oracle(TEXT)],
    )
    finished(generation)
    assert generation.answer == ANSWER[:10]
    assert generation.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("at", range(10))
def test_an_end_token_inside_an_accepted_block_ends_the_answer_with_it(at: int):
    eos = 256
    text = [*PROMPT, *ANSWER[:at], eos, *ANSWER[at:]]
    for block in (1, 2, 4, 16):
        generation = made(
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


def test_an_end_token_adds_no_text():
    generation = made(stopping=Stopping(stop_token_ids=frozenset({ord("r")})))
    steps = finished(generation)
    assert "".join(one.text for one in steps) == "The "
    assert generation.answer == list(b"The r")


def test_draft_tokens_after_the_end_are_not_counted_as_accepted():
    generation = past_the_prompt(
        stopping=Stopping(stop_token_ids=frozenset({ord(" ")})), drafters=[Oracle(TEXT)]
    )
    brought = step(generation)
    assert (brought.kept, brought.tokens, brought.text) == (3, list(b"he "), "he")
    assert (brought.drafted, brought.accepted) == (7, 3)


@pytest.mark.parametrize("block", range(1, 10))
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
    generation = made(
        stopping=Stopping(max_tokens=len(ANSWER), stop=stop),
        drafters=[Oracle(TEXT)],
        policy=Fixed(block),
    )
    steps = finished(generation)
    assert "".join(one.text for one in steps) == text
    assert generation.answer == list(tokens.encode())
    assert generation.finish_reason is FinishReason.STOP


def test_text_that_was_held_back_comes_with_the_last_token():
    generation = made(stopping=Stopping(max_tokens=3, stop=("hex",)))
    steps = finished(generation)
    assert [one.text for one in steps] == ["T", "", "he"]
    assert generation.finish_reason is FinishReason.LENGTH


def test_text_that_was_held_back_comes_with_the_end_token():
    text = [*PROMPT, *b"he", 256]
    generation = made(stopping=Stopping(stop_token_ids=frozenset({256}), stop=("hex",)))
    assert [one.text for one in finished(generation, text)] == ["", "", "he"]
    assert generation.finish_reason is FinishReason.STOP


def test_a_stop_string_that_the_end_completes_stops():
    # Half a character stays broken only once max_tokens is reached.
    text = [*PROMPT, ord("a"), 0xF0, 0x9F]
    generation = made(stopping=Stopping(max_tokens=3, stop=("\ufffd",)))
    assert [one.text for one in finished(generation, text)] == ["a", "", ""]
    assert generation.finish_reason is FinishReason.STOP


def test_next_block_after_the_end_raises():
    generation = made(stopping=Stopping(max_tokens=1))
    finished(generation)
    with pytest.raises(RuntimeError, match="after the generation finished"):
        generation.next_block()
    with pytest.raises(RuntimeError, match="without a block"):
        generation.accept(np.zeros((1, VOCABULARY), np.float32))


# --- cancelling


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
@pytest.mark.parametrize("block_is_out", [False, True])
def test_a_generation_can_be_cancelled_at_any_time(steps: int, block_is_out: bool):
    generation = made(prefill_chunk=3, drafters=[Oracle(TEXT)], policy=Fixed(3))
    for _ in range(steps):
        step(generation)
    answer, length = generation.answer, generation.length
    if block_is_out:
        generation.next_block()
    assert generation.cancel() == TextPiece()
    assert generation.finished
    assert generation.finish_reason is FinishReason.CANCELLED
    assert (generation.answer, generation.length) == (answer, length)
    with pytest.raises(RuntimeError, match="finished"):
        generation.next_block()
    with pytest.raises(RuntimeError, match="without a block"):
        generation.accept(np.zeros((3, VOCABULARY), np.float32))


def test_cancel_returns_the_text_held_back_once():
    generation = past_the_prompt(stopping=Stopping(stop=("There",)))
    step(generation)
    assert generation.cancel().final == "Th"
    assert generation.cancel() == TextPiece()


def test_cancel_after_the_end_changes_nothing():
    generation = made(stopping=Stopping(max_tokens=2, stop=("There",)))
    finished(generation)
    assert generation.cancel() == TextPiece()
    assert generation.finish_reason is FinishReason.LENGTH


# --- wrong rows


def test_accept_without_a_block_raises():
    with pytest.raises(RuntimeError, match="accept\\(\\) without a block from next_block"):
        made().accept(np.zeros((1, VOCABULARY), np.float32))


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_accept_rejects_a_wrong_number_of_rows_and_keeps_the_block(count: int):
    generation = past_the_prompt(drafters=[Oracle(TEXT)], policy=Fixed(3))
    block = generation.next_block()
    with pytest.raises(ValueError, match=f"got {count} rows of logits; the block asked for 3"):
        generation.accept(np.zeros((count, VOCABULARY), np.float32))
    assert generation.next_block() is block
    assert step(generation).tokens == list(b"he ")


# --- what drafters and policies observe


def test_every_drafter_observes_every_step():
    first, second = Oracle(TEXT, wrong_at=[8]), Oracle([])
    generation = made(
        drafters=[first, second],
        policy=Fixed(4),
        prefill_chunk=3,
        stopping=Stopping(max_tokens=6),
    )
    taps = {"layer": np.ones((3, 2), np.float32)}
    step(generation, taps=taps)
    finished(generation)
    seen = [(list(v.tokens), v.start, v.kept, len(v.logits)) for v in first.seen]
    assert seen == [
        ([1, 2, 3], 0, 3, 0),
        ([4, 5], 3, 2, 1),
        ([*b"The", ord(" ") ^ 1], 5, 3, 4),
        (list(b" r"), 8, 2, 2),
    ]
    assert second.seen == first.seen
    assert first.seen[0].taps is taps
    assert first.seen[1].taps == {}


def test_the_policy_observes_outcome_and_time_of_each_decode_step():
    policy = Recording(4)
    generation = made(drafters=[Oracle(TEXT[:9], wrong_at=[7])], policy=policy)
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
    generation = made(drafters=[first, second], policy=Fixed(4), stopping=Stopping(max_tokens=12))
    finished(generation)
    counters = generation.counters
    # "he" and a wrong space; then " rid" and "ers", of which the last needs no row.
    assert counters.drafted_by == {"oracle": 3, "other": 3 + 3}
    assert counters.accepted_by == {"oracle": 2, "other": 3 + 3}
    assert (counters.drafted_at, counters.accepted_at) == ([3, 3, 3], [3, 3, 2])
    assert (counters.steps, counters.drafted, counters.accepted) == (3, 9, 8)


def test_sampling_is_keyed_by_the_position_in_the_whole_text():
    # Flat rows: the token shows which random number was used.
    flat = np.zeros((8, VOCABULARY), np.float32)

    def drawn(prompt: list[int], text: Sequence[int] = ()) -> list[int]:
        generation = made(
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


# --- argmax in place of logits


class Reader(Drafter):
    """Learns from logits."""

    name = "reader"
    reads_logits = True

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        return NO_PROPOSAL


@pytest.mark.parametrize(
    ("settings", "best"),
    [
        ({}, True),
        ({"sampling": Sampling(temperature=0.7)}, False),
        ({"sampling": Sampling(repetition_penalty=1.1)}, False),
        ({"sampling": Sampling(presence_penalty=0.1)}, False),
        ({"sampling": Sampling(frequency_penalty=-0.1)}, False),
        ({"sampling": Sampling(logit_bias={3: 1.0})}, False),
        ({"drafters": [Reader()]}, False),
        ({"drafters": [Probe(Reader(), 3)]}, False),
        ({"drafters": create("suffix+ngram")}, True),
        ({"drafters": create("recycle")}, False),
    ],
)
def test_a_block_asks_for_the_argmax_if_nothing_reads_logits(settings: Any, best: bool):
    generation = made(**settings)
    assert generation.next_block().best is best
    while not generation.finished:
        assert generation.next_block().best is best
        step(generation)


def test_argmax_gives_the_same_steps_as_logits():
    expected = made(drafters=create("ngram"))
    finished(expected)
    generation = made(drafters=create("ngram"))
    nothing = np.empty((0, VOCABULARY), np.float32)
    while not generation.finished:
        whole = rows(generation.next_block(), generation.length)
        generation.accept(nothing, best=Best(whole.argmax(axis=1), whole.max(axis=1)))
    assert generation.answer == expected.answer
    assert generation.counters == expected.counters


def test_accept_rejects_too_few_argmax_rows():
    generation = made()
    generation.next_block()
    few = Best(np.zeros(3, np.int64), np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"got 3 rows of logits; the block asked for 1"):
        generation.accept(np.empty((0, VOCABULARY), np.float32), best=few)


# --- logprobs


def graded(block: Block, start: int) -> np.ndarray:
    """Rows of the text whose logits all differ."""
    found = rows(block, start)
    for row in range(block.rows):
        rng = np.random.default_rng(start + len(block.tokens) - block.rows + row)
        found[row] = found[row] * 9 + rng.random(VOCABULARY, np.float32)
    return found


def run_graded(generation: Generation, most: int | None = None) -> None:
    while not generation.finished:
        block = generation.next_block(most)
        generation.accept(graded(block, generation.length))


@pytest.mark.parametrize("drafters", ["none", "ngram"])
def test_every_token_of_the_answer_has_its_logprob(drafters: str):
    generation = made(logprobs=3, drafters=create(drafters), prefill_chunk=2)
    run_graded(generation)
    assert generation.answer == ANSWER
    assert len(generation.logprobs) == len(ANSWER)
    for at, found in enumerate(generation.logprobs):
        row = graded(Block(TEXT[: len(PROMPT) + at], 1), 0)[0]
        assert found == token_logprob(row, ANSWER[at], 3)


@pytest.mark.parametrize("chunk", [1, 2, 4, 99])
def test_every_token_of_the_prompt_has_its_logprob(chunk: int):
    generation = made(logprobs=2, prompt_logprobs=True, prefill_chunk=chunk)
    run_graded(generation)
    assert generation.answer == ANSWER
    first, *rest = generation.prompt_logprobs
    assert first is None
    assert len(rest) == len(PROMPT) - 1
    for at, found in enumerate(rest, start=1):
        assert found == token_logprob(graded(Block(PROMPT[:at], 1), 0)[0], PROMPT[at], 2)
    assert len(generation.logprobs) == len(ANSWER)


def test_logprobs_are_those_of_the_model_before_sampling():
    sampling = Sampling(logit_bias={ANSWER[0]: -100.0})
    generation = made(logprobs=1, sampling=sampling, stopping=Stopping(max_tokens=1))
    run_graded(generation)
    (found,) = generation.logprobs
    assert found.token == generation.answer[0] != ANSWER[0]
    assert found.top[0][0] == ANSWER[0]
    assert found.logprob < found.top[0][1]


# --- row limit


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_a_block_has_at_most_max_rows(most: int):
    generation = made(drafters=[Oracle(TEXT)], policy=Fixed(8))
    longest = 0
    while not generation.finished:
        block = generation.next_block(most)
        longest = max(longest, len(block.tokens))
        generation.accept(rows(block, generation.length))
    assert generation.answer == ANSWER
    assert longest == most


# --- banned tokens and constraints


def test_stop_tokens_are_banned_before_min_tokens():
    stops = frozenset({ANSWER[3], ANSWER[6]})
    generation = made(stopping=Stopping(max_tokens=20, stop_token_ids=stops, min_tokens=5))
    finished(generation)
    assert generation.answer[3] != ANSWER[3]
    early = made(stopping=Stopping(max_tokens=20, stop_token_ids=stops))
    finished(early)
    assert early.answer == ANSWER[:4]


def test_a_negative_min_tokens_is_rejected():
    with pytest.raises(ValueError, match="min_tokens is -1"):
        Stopping(min_tokens=-1)


class Only:
    """Allows one text, and then its end token."""

    def __init__(self, text: Sequence[int], *, forces: bool) -> None:
        self.text, self.forces, self.at = list(text), forces, 0

    def masked(self, logits: np.ndarray) -> np.ndarray:
        found = np.full_like(logits, -np.inf)
        found[self.text[self.at]] = logits[self.text[self.at]]
        return found

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
    wanted = list(b'{"a": 1}')
    policy = Recording(4)
    generation = made(
        constraint=Only(wanted, forces=forces),
        sampling=sampling,
        stopping=Stopping(max_tokens=len(wanted)),
        drafters=[Oracle(TEXT)],
        policy=policy,
    )
    steps = finished(generation)
    assert generation.answer == wanted
    if forces:
        # One step for the prompt, then all forced tokens in one block.
        assert [each.forced for each in steps] == [0, len(wanted) - 2]
        assert steps[1].source == FORCED
        # Forced tokens are not drafted.
        assert [each.drafted for each in steps] == [0, 0]
        assert generation.counters.accepted_by == {}
        assert generation.counters.forced == len(wanted) - 2
        assert policy.outcomes == []
