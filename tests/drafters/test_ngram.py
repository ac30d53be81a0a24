from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters import NgramDrafter

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
