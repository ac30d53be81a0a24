import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters import AnswerHistory, SuffixDrafter

texts = st.lists(st.integers(0, 2), max_size=30)


@given(text=texts, limit=st.integers(1, 12))
def test_it_goes_on_from_the_latest_place_of_the_longest_repeat(text: list[int], limit: int):
    expected: list[int] = []
    longest = 0
    for length in range(len(text) - 1, 0, -1):
        ends = [e for e in range(length, len(text)) if text[e - length : e] == text[-length:]]
        if ends:
            longest = length
            # Beyond the end of the text its own guess goes on, in the same period.
            going = list(text)
            for at in range(limit):
                going.append(going[ends[-1] + at])
            expected = going[len(text) :]
            break
    proposal = SuffixDrafter().propose(text, limit)
    assert (list(proposal.tokens), proposal.match) == (expected, longest)


def test_a_period_is_continued_beyond_the_end_of_the_text():
    proposal = SuffixDrafter().propose([9, 1, 2, 3, 1, 2, 3], 7)
    assert list(proposal.tokens) == [1, 2, 3, 1, 2, 3, 1]


@pytest.fixture
def corpus() -> AnswerHistory:
    corpus = AnswerHistory()
    corpus.add([10, 11, 12, 13, 14])
    corpus.add([20, 21])
    return corpus


def test_an_earlier_answer_is_followed_where_the_own_text_knows_less(corpus: AnswerHistory):
    proposal = SuffixDrafter(corpus).propose([1, 10, 11], 2)
    assert (list(proposal.tokens), proposal.source, proposal.match) == ([12, 13], "earlier", 2)


def test_the_own_text_wins_a_tie(corpus: AnswerHistory):
    proposal = SuffixDrafter(corpus).propose([10, 11, 99, 10, 11], 1)
    assert (list(proposal.tokens), proposal.source) == ([99], "suffix")


def test_a_longer_earlier_match_wins_over_a_shorter_own_one(corpus: AnswerHistory):
    proposal = SuffixDrafter(corpus).propose([12, 99, 10, 11, 12], 1)
    assert (list(proposal.tokens), proposal.source, proposal.match) == ([13], "earlier", 3)


def test_no_proposal_goes_over_the_border_between_answers(corpus: AnswerHistory):
    assert list(SuffixDrafter(corpus).propose([12, 13], 5).tokens) == [14]
    # At the very end of an answer there is nothing to go on with; the own text may have more.
    assert list(SuffixDrafter(corpus).propose([13, 14], 5).tokens) == []
    assert list(SuffixDrafter(corpus).propose([14, 99, 13, 14], 1).tokens) == [99]


def test_no_match_goes_over_the_border_between_answers(corpus: AnswerHistory):
    proposal = SuffixDrafter(corpus).propose([13, 14, 20], 1)
    assert (list(proposal.tokens), proposal.match) == ([21], 1)


def test_an_answer_added_meanwhile_is_found(corpus: AnswerHistory):
    drafter = SuffixDrafter(corpus)
    assert not drafter.propose([1, 30, 31], 2).tokens
    corpus.add([30, 31, 32, 33])
    assert list(drafter.propose([1, 30, 31, 30, 31], 2).tokens) == [30, 31]
    assert list(drafter.propose([1, 30, 31, 30, 31, 32], 2).tokens) == [33]


def test_a_text_that_stood_nowhere_is_not_guessed_at(corpus: AnswerHistory):
    proposal = SuffixDrafter(corpus).propose([1, 2, 3], 4)
    assert (list(proposal.tokens), proposal.source) == ([], "suffix")


def test_a_full_corpus_forgets_the_oldest_answers_first():
    corpus = AnswerHistory(max_tokens=20)
    for first in range(0, 100, 10):
        corpus.add(range(first, first + 6))
        assert len([token for token in corpus.automaton.text if token >= 0]) <= 20
    assert list(SuffixDrafter(corpus).propose([90, 91], 2).tokens) == [92, 93]
    assert list(SuffixDrafter(corpus).propose([0, 1], 2).tokens) == []


def test_an_answer_longer_than_the_corpus_is_kept_all_the_same():
    corpus = AnswerHistory(max_tokens=4)
    corpus.add([1, 2])
    corpus.add([10, 11, 12, 13, 14, 15])
    assert list(SuffixDrafter(corpus).propose([10, 11], 2).tokens) == [12, 13]
    assert list(SuffixDrafter(corpus).propose([1], 2).tokens) == []


def test_a_request_goes_on_when_the_corpus_is_rebuilt_under_it():
    corpus = AnswerHistory(max_tokens=20)
    corpus.add([10, 11, 12, 13])
    drafter = SuffixDrafter(corpus)
    assert list(drafter.propose([10, 11], 1).tokens) == [12]
    for first in (30, 40, 50, 60):
        corpus.add(range(first, first + 6))
    # The old match is gone with the old answers; new tokens match what is there now.
    assert list(drafter.propose([10, 11, 12], 1).tokens) == []
    assert list(drafter.propose([10, 11, 12, 60, 61], 1).tokens) == [62]
