"""Drafts from what was said before, and the automaton that finds it."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.drafters import AnswerHistory
from paceline.drafters.suffix import START, Match, SuffixAutomaton, SuffixDrafter

texts = st.lists(st.integers(0, 2), max_size=40)


@given(text=texts, limit=st.integers(1, 12))
def test_suffix_continues_the_latest_occurrence_of_the_longest_repeat(text: list[int], limit: int):
    expected: list[int] = []
    longest = 0
    for length in range(len(text) - 1, 0, -1):
        ends = [e for e in range(length, len(text)) if text[e - length : e] == text[-length:]]
        if ends:
            longest = length
            # At the end of the text the draft continues with its own tokens.
            extended = list(text)
            for at in range(limit):
                extended.append(extended[ends[-1] + at])
            expected = extended[len(text) :]
            break
    proposal = SuffixDrafter().propose(text, limit)
    assert (list(proposal.tokens), proposal.match) == (expected, longest)


@pytest.fixture
def history() -> AnswerHistory:
    history = AnswerHistory()
    history.add([10, 11, 12, 13, 14])
    history.add([20, 21])
    return history


@pytest.mark.parametrize(
    ("text", "tokens", "source", "match"),
    [
        ([1, 10, 11], [12, 13], "earlier", 2),
        ([10, 11, 99, 10, 11], [99, 10], "suffix", 2),  # the own text wins a tie
        # No draft and no match crosses from one earlier answer to the next.
        ([12, 13], [14], "earlier", 2),
        ([13, 14], [], "suffix", 0),
        ([14, 99, 13, 14], [99, 13], "suffix", 1),
        ([13, 14, 20], [21], "earlier", 1),
    ],
)
def test_an_earlier_response_with_a_longer_match_is_used(
    text: list[int], tokens: list[int], source: str, match: int, history: AnswerHistory
):
    proposal = SuffixDrafter(history).propose(text, 2)
    assert (list(proposal.tokens), proposal.match) == (tokens, match)
    assert proposal.source == source or not tokens


def test_a_response_added_during_a_request_is_found(history: AnswerHistory):
    drafter = SuffixDrafter(history)
    assert not drafter.propose([1, 30, 31], 2).tokens
    history.add([30, 31, 32, 33])
    assert list(drafter.propose([1, 30, 31, 30, 31], 2).tokens) == [30, 31]
    assert list(drafter.propose([1, 30, 31, 30, 31, 32], 2).tokens) == [33]


def test_a_full_history_evicts_the_oldest_responses_first():
    history = AnswerHistory(max_tokens=20)
    for first in range(0, 100, 10):
        history.add(range(first, first + 6))
        assert len([token for token in history.automaton.text if token >= 0]) <= 20
    assert list(SuffixDrafter(history).propose([90, 91], 2).tokens) == [92, 93]
    assert list(SuffixDrafter(history).propose([0, 1], 2).tokens) == []


def test_a_request_continues_when_the_history_is_rebuilt():
    history = AnswerHistory(max_tokens=20)
    history.add([10, 11, 12, 13])
    drafter = SuffixDrafter(history)
    assert list(drafter.propose([10, 11], 1).tokens) == [12]
    for first in (30, 40, 50, 60):
        history.add(range(first, first + 6))
    # The old answers were evicted; new tokens match those that were added.
    assert list(drafter.propose([10, 11, 12], 1).tokens) == []
    assert list(drafter.propose([10, 11, 12, 60, 61], 1).tokens) == [62]


def automaton_of(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    return automaton


def longest_suffix(suffix: list[int], text: list[int], *, before: int) -> Match | None:
    """Plain search: the longest suffix in `text`, at its latest position up to `before`."""
    for length in range(len(suffix), 0, -1):
        for end in range(min(before, len(text)), length - 1, -1):
            if text[end - length : end] == suffix[-length:]:
                return Match(length, end)
    return None


@given(text=texts, other=texts)
def test_a_cursor_matches_the_longest_suffix_of_another_text(text: list[int], other: list[int]):
    automaton = automaton_of([*text, -1])  # a separator, as an answer history has
    cursor = START
    for end, token in enumerate(other, start=1):
        cursor = automaton.advance(cursor, token)
        assert automaton.match_at(cursor) == longest_suffix(other[:end], text, before=len(text))


@given(text=texts, others=st.lists(st.tuples(st.integers(0, 2), texts), max_size=12))
# The 1 was followed as the end of 2 0 1; then that state is split, its shorter part ending in 0 1.
@example(text=[2, 0, 1], others=[(1, [0, 0, 1, 2]), (2, [])])
def test_a_cursor_stays_correct_when_the_text_grows(
    text: list[int], others: list[tuple[int, list[int]]]
):
    # Another request's answer may be added between two tokens of this one.
    automaton = automaton_of(text)
    cursor, followed = START, []
    for token, added in others:
        followed.append(token)
        cursor = automaton.advance(cursor, token)
        match = automaton.match_at(cursor)
        if match:
            start = match.next_at - match.length
            assert followed[-match.length :] == automaton.text[start : match.next_at]
        for more in added:
            automaton.append(more)


def test_a_long_run_of_one_token_stays_correct():
    # Runs make the longest chains of states, of which only _MAX_UPDATES are updated per token.
    automaton = automaton_of([5] * 1000)
    repeat = automaton.longest_repeat()
    assert repeat == Match(999, 999)
    cursor = START
    for length in range(1, 1001):
        cursor = automaton.advance(cursor, 5)
        assert cursor.length == length
        assert length <= automaton.match_at(cursor).next_at <= 1000
