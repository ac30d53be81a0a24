"""Drafts from the caller's prediction of the answer, and from n-grams."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.prediction import PredictionDrafter

PROMPT = [60, 61, 62]
TEXT = list(range(30))


LATER = [1, 2, 3, 9, 5, 6, 3, 4, 1, 2, 3, 4, 7]


@pytest.mark.parametrize(
    ("prediction", "answer", "tokens"),
    [
        *((TEXT, TEXT[:done], TEXT[done : done + 4]) for done in (0, 1, 10, 26, 29, 30)),
        (TEXT, [0, 1, 2, 50, 3, 4], [5, 6, 7, 8]),  # an insertion
        (TEXT, [0, 1, 2, 7, 8], [9, 10, 11, 12]),  # a deletion
        (TEXT, [0, 1, 50, 51, 4, 5], [6, 7, 8, 9]),  # a replacement
        (TEXT, [40, 41, 20, 21], [22, 23, 24, 25]),  # another start
        (LATER, [50, 1, 2, 3, 4], [7]),  # the longest match decides
        # They differ.
        (TEXT, [0, 1, 2, 50], []),
        (TEXT, [0, 1, 2, 50, 51, 52], []),
        ([], [1], []),
    ],
)
def test_drafts_follow_the_prediction_while_it_matches_the_response(
    prediction: list[int], answer: list[int], tokens: list[int]
):
    drafter = PredictionDrafter(prediction, len(PROMPT))
    assert list(drafter.propose([*PROMPT, *answer], 4).tokens) == tokens


def test_the_match_grows_while_response_and_prediction_agree():
    drafter = PredictionDrafter(TEXT, len(PROMPT))
    changed = [*TEXT[:5], 50, *TEXT[5:7]]
    first = drafter.propose([*PROMPT, *changed], 4).match
    later = drafter.propose([*PROMPT, *changed, *TEXT[7:20]], 4).match
    assert first == 2
    assert later == first + 13


texts = st.lists(st.integers(0, 3), max_size=40)


def looked_up(text: list[int], sizes: range, length: int) -> tuple[list[int], int]:
    """Plain lookup: the longest n-gram at the end that occurs earlier, its latest position.

    The draft continues over its own tokens.
    """
    for size in reversed(sizes):
        ending = text[-size:]
        for end in range(len(text) - 1, size - 1, -1):
            if len(ending) == size and text[end - size : end] == ending:
                copied = list(text)
                for at in range(end, end + length):
                    copied.append(copied[at])
                return copied[len(text) :], size
    return [], 0


@given(
    text=texts,
    shortest=st.integers(1, 3),
    more=st.integers(0, 4),
    length=st.integers(1, 6),
    limit=st.integers(1, 6),
)
def test_ngram_lookup_matches_a_naive_search(
    text: list[int], shortest: int, more: int, length: int, limit: int
):
    drafter = NgramDrafter(min_match=shortest, max_match=shortest + more, length=length)
    for end in range(len(text) + 1):
        proposal = drafter.propose(text[:end], limit)
        sizes = range(shortest, shortest + more + 1)
        expected = looked_up(text[:end], sizes, min(length, limit))
        assert (list(proposal.tokens), proposal.match) == expected
