import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters import AnswerHistory, SuffixDrafter

texts = st.lists(st.integers(0, 2), max_size=30)


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


def test_an_earlier_answer_is_used_if_it_has_the_longer_match(history: AnswerHistory):
    proposal = SuffixDrafter(history).propose([1, 10, 11], 2)
    assert (list(proposal.tokens), proposal.source, proposal.match) == ([12, 13], "earlier", 2)


def test_the_own_text_wins_a_tie(history: AnswerHistory):
    proposal = SuffixDrafter(history).propose([10, 11, 99, 10, 11], 1)
    assert (list(proposal.tokens), proposal.source) == ([99], "suffix")


def test_no_draft_crosses_from_one_earlier_answer_to_the_next(history: AnswerHistory):
    assert list(SuffixDrafter(history).propose([12, 13], 5).tokens) == [14]
    # The end of an answer has no continuation; the own text may have one.
    assert list(SuffixDrafter(history).propose([13, 14], 5).tokens) == []
    assert list(SuffixDrafter(history).propose([14, 99, 13, 14], 1).tokens) == [99]


def test_no_match_crosses_from_one_earlier_answer_to_the_next(history: AnswerHistory):
    proposal = SuffixDrafter(history).propose([13, 14, 20], 1)
    assert (list(proposal.tokens), proposal.match) == ([21], 1)


def test_an_answer_added_meanwhile_is_found(history: AnswerHistory):
    drafter = SuffixDrafter(history)
    assert not drafter.propose([1, 30, 31], 2).tokens
    history.add([30, 31, 32, 33])
    assert list(drafter.propose([1, 30, 31, 30, 31], 2).tokens) == [30, 31]
    assert list(drafter.propose([1, 30, 31, 30, 31, 32], 2).tokens) == [33]


def test_a_full_history_evicts_the_oldest_answers_first():
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
