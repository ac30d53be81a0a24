from hypothesis import example, given
from hypothesis import strategies as st

from paceline.drafters.suffix import START, Match, SuffixAutomaton

texts = st.lists(st.integers(0, 2), max_size=40)


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


@given(text=texts)
def test_the_longest_repeat_equals_a_plain_search(text: list[int]):
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, start=1):
        automaton.append(token)
        seen = text[:end]
        assert automaton.longest_repeat() == longest_suffix(seen, seen, before=end - 1)


@given(text=texts, other=texts)
def test_a_cursor_matches_the_longest_suffix_of_another_text(text: list[int], other: list[int]):
    automaton = automaton_of([*text, -1])  # a separator, as an answer history has
    cursor = START
    for end, token in enumerate(other, start=1):
        cursor = automaton.advance(cursor, token)
        assert automaton.at(cursor) == longest_suffix(other[:end], text, before=len(text))


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
        match = automaton.at(cursor)
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
        assert length <= automaton.at(cursor).next_at <= 1000
