"""Drafts from the caller's prediction of the answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.policy import Fixed
from paceline.decoding.stopping import Stopping
from paceline.drafters import PredictionDrafter
from support.driver import answer
from support.toy import ToyEngine

PROMPT = [60, 61, 62]
TEXT = list(range(30))


def drafted(prediction: list[int], answer: list[int], limit: int = 4) -> list[int]:
    drafter = PredictionDrafter(prediction, len(PROMPT))
    return list(drafter.propose([*PROMPT, *answer], limit).tokens)


@pytest.mark.parametrize("done", [0, 1, 10, 26, 29, 30])
def test_drafts_follow_the_prediction(done: int):
    assert drafted(TEXT, TEXT[:done]) == TEXT[done : done + 4]


@pytest.mark.parametrize(
    ("answer", "next_token"),
    [
        ([0, 1, 2, 50, 3, 4], 5),  # an insertion
        ([0, 1, 2, 7, 8], 9),  # a deletion
        ([0, 1, 50, 51, 4, 5], 6),  # a replacement
        ([40, 41, 20, 21], 22),  # another start
    ],
)
def test_drafts_resume_where_answer_and_prediction_agree_again(answer: list[int], next_token: int):
    assert drafted(TEXT, answer, 1) == [next_token]


def test_no_draft_while_the_answer_diverges_from_the_prediction():
    assert drafted(TEXT, [0, 1, 2, 50]) == []
    assert drafted(TEXT, [0, 1, 2, 50, 51, 52]) == []
    assert drafted([], [1]) == []


def test_drafts_resume_at_the_position_with_the_longest_match():
    prediction = [1, 2, 3, 9, 5, 6, 3, 4, 1, 2, 3, 4, 7]
    assert drafted(prediction, [50, 1, 2, 3, 4], 1) == [7]


def test_the_match_grows_while_answer_and_prediction_agree():
    drafter = PredictionDrafter(TEXT, len(PROMPT))
    changed = [*TEXT[:5], 50, *TEXT[5:7]]
    first = drafter.propose([*PROMPT, *changed], 4).match
    later = drafter.propose([*PROMPT, *changed, *TEXT[7:20]], 4).match
    assert first == 2
    assert later == first + 13


@given(st.lists(st.integers(0, 63), max_size=40), st.integers(2, 9))
def test_no_prediction_changes_a_token(prediction: list[int], block: int):
    engine, common = ToyEngine(), {"stopping": Stopping(max_tokens=24)}
    plain = answer(engine, PROMPT, **common)
    for text in (prediction, plain.tokens[:9] + prediction + plain.tokens[9:]):
        drafters = [PredictionDrafter(text, len(PROMPT))]
        assert answer(engine, PROMPT, drafters=drafters, policy=Fixed(block), **common) == plain
