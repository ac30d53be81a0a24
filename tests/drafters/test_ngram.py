import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters import NgramDrafter
from support.errors import raises

texts = st.lists(st.integers(0, 3), max_size=40)


def looked_up(text: list[int], sizes: range, length: int) -> tuple[list[int], int]:
    """Plain lookup: the longest n-gram at the end that occurs earlier, its latest position."""
    for size in reversed(sizes):
        ending = text[-size:]
        for end in range(len(text) - 1, size - 1, -1):
            if len(ending) == size and text[end - size : end] == ending:
                return text[end : end + length], size
    return [], 0


@given(
    text=texts,
    shortest=st.integers(1, 3),
    more=st.integers(0, 4),
    length=st.integers(1, 6),
    limit=st.integers(1, 6),
)
def test_ngram_lookup_equals_a_plain_search(
    text: list[int], shortest: int, more: int, length: int, limit: int
):
    drafter = NgramDrafter(min_match=shortest, max_match=shortest + more, length=length)
    for end in range(len(text) + 1):
        proposal = drafter.propose(text[:end], limit)
        sizes = range(shortest, shortest + more + 1)
        expected = looked_up(text[:end], sizes, min(length, limit))
        assert (list(proposal.tokens), proposal.match) == expected


def test_the_longest_match_wins_over_a_later_shorter_one():
    #       1 2 3 -> 7            3 -> 8
    text = [1, 2, 3, 7, 7, 7, 0, 3, 8, 1, 2, 3]
    assert list(NgramDrafter().propose(text, 1).tokens) == [7]
    assert list(NgramDrafter(max_match=1).propose(text, 1).tokens) == [8]


def test_of_equal_matches_the_latest_wins():
    text = [1, 2, 7, 1, 2, 8, 1, 2]
    assert list(NgramDrafter().propose(text, 2).tokens) == [8, 1]


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"min_match": 0}, "min=0, max=4"),
        ({"min_match": 3, "max_match": 2}, "min=3, max=2"),
        ({"length": 0}, "length=0"),
        ({"length": 65}, "length=65"),
        ({"max_match": 20_000_000}, "max=20000000"),
    ],
)
def test_impossible_ngram_settings_are_rejected_by_name(options: dict[str, int], value: str):
    with raises(ValueError, value):
        NgramDrafter(**options)
