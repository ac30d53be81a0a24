"""Repetition detection: loops, and text that only looks like one."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.stopping import DEFAULT, MAX_PATTERN_SIZE, Repetition, RepetitionDetector
from support.errors import raises


def first_stop(rule: Repetition, tokens: Sequence[int]) -> int | None:
    """Return the response length at which the rule stops it, or None."""
    stop = RepetitionDetector(rule)
    return next((n for n, token in enumerate(tokens, start=1) if stop.push(token)), None)


def is_loop(rule: Repetition, tokens: Sequence[int]) -> bool:
    """Apply the definition to the last tokens: a pattern repeated `count` times in a row."""
    for size in range(max(rule.min_pattern_size, 1), rule.max_pattern_size + 1):
        count = max(rule.min_count, -(-rule.min_tokens // size))
        tail = list(tokens[-size * count :])
        if len(tail) == size * count and tail == tail[-size:] * count:
            return True
    return False


rules = st.builds(
    lambda sizes, count, least: Repetition(max(sizes), min(sizes), count, least),
    st.tuples(st.integers(0, 6), st.integers(1, 6)),
    st.integers(2, 5),
    st.integers(0, 14),
)
# Few different tokens, and runs of one pattern: most are close to a loop.
texts = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 6)), max_size=8
).map(lambda runs: [token for pattern, times in runs for token in pattern * times])


@given(tokens=texts, rule=rules)
def test_a_repetition_stays_detected_while_the_loop_continues(tokens: list[int], rule: Repetition):
    stop = RepetitionDetector(rule)
    assert [stop.push(token) for token in tokens] == [
        is_loop(rule, tokens[:n]) for n in range(1, len(tokens) + 1)
    ]


@pytest.mark.parametrize("size", [1, 2, 7, 30, 64, 128])
def test_the_default_rule_stops_exact_repetition_of_patterns_up_to_its_maximum(size: int):
    start = [9_000 + i for i in range(50)]
    number = first_stop(DEFAULT, [*start, *list(range(size)) * 300])
    assert number is not None
    assert number <= len(start) + max(256 + size, 4 * size)


@pytest.mark.parametrize(
    "tokens",
    [
        list(range(129)) * 20,  # a pattern above the maximum size
        [7] * 255,  # a rule of dashes, a row of dots
        [1, 2, 3, 4, 5] * 51,  # a table's line between head and rows, and empty rows
        list(range(100)) * 3,  # the same paragraph three times
        [token for n in range(40) for token in (1, 2, 100 + n, 3, 4)],  # a numbered list
        [token for n in range(40) for token in [*range(30), 500 + n]],  # cases by number
        [
            token
            for verse in range(9)
            for token in [*range(1000 * verse, 1000 * verse + 60), *[5] * 9]
        ],
    ],
    ids=["long", "rule", "table", "paragraphs", "numbered list", "numbered lines", "refrain"],
)
def test_ordinary_repetition_does_not_end_a_response(tokens: list[int]):
    assert first_stop(DEFAULT, tokens) is None


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ((MAX_PATTERN_SIZE + 1, 1, 2, 0), "max_pattern_size"),
        ((3, 4, 2, 0), "min_pattern_size"),
        ((3, 1, 1, 0), "min_count"),
        ((3, 1, 2, -1), "min_tokens"),
        ((3, 1, True, 0), "min_count"),
    ],
)
def test_an_out_of_range_repetition_rule_is_rejected_by_name(values: tuple[int, ...], name: str):
    with raises(ValueError, name):
        Repetition(*values)
