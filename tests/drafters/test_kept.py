"""Drafts from kept answers: what follows a match, what is counted, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafters import KeptText
from paceline.drafters.kept import MATCH, KeptDrafter, KeptFacts, due
from paceline.errors import ModelError
from paceline.storage.columns import write_columns
from support.errors import raises

VOCAB = 40
SAID = [*range(12), 20, 21, 22, 23]
AGAIN = [*range(12), 30, 31]
FACTS = KeptFacts("abc", VOCAB, 0)

answers = st.lists(st.lists(st.integers(0, 5), max_size=30), max_size=6)


def test_eight_matching_tokens_continue_as_in_the_latest_response():
    drafter = KeptDrafter(KeptText.count([SAID, AGAIN], VOCAB))
    proposal = drafter.propose([9, 9, *range(4, 12)], 9)
    assert (proposal.tokens, proposal.source) == ([30, 31], "kept text")
    assert proposal.match == MATCH
    assert not proposal.probabilities
    earlier = KeptDrafter(KeptText.count([AGAIN, SAID], VOCAB))
    assert earlier.propose([*range(12)], 2).tokens == [20, 21]


def test_the_match_length_counts_all_equal_tokens_of_one_response():
    kept = KeptText.count([[*range(39)]], VOCAB)
    lengths = [kept.match([39, *range(at, 38)]) for at in (0, 20, 29, 30, 31)]
    assert [length and length.length for length in lengths] == [24, 18, 9, 8, None]
    assert [length and length.next_at for length in lengths] == [38, 38, 38, 38, None]
    kept = KeptText.count([[1, 2, 3, 4], [5, 6, 7, 8, 9]], VOCAB)
    assert kept.match([1, 2, 3, 4, 5, 6, 7, 8]) is None
    assert KeptText.count([[*range(8)]], VOCAB).match([*range(8)]) is None


def test_without_a_match_frequent_successors_are_drafted_with_probabilities():
    drafter = KeptDrafter(KeptText.count([[1, 2, 3] * 9], VOCAB))
    proposal = drafter.propose([7, 1], 4)
    assert (proposal.tokens, proposal.source) == ([2, 3, 1, 2], "kept")
    assert len(proposal.probabilities) == 4


@pytest.mark.parametrize("texts", [[], [[]], [[3]], [[1, 2]]])
def test_too_little_text_gives_no_drafts(texts: list[list[int]]):
    drafter = KeptDrafter(KeptText.count(texts, VOCAB))
    assert not drafter.propose([], 4).tokens
    assert not drafter.propose([8] * 12, 4).tokens
    assert not KeptDrafter(None).propose([1, 2], 4).tokens


@settings(max_examples=40)
@given(texts=answers, context=st.lists(st.integers(0, 5), max_size=40))
def test_a_saved_file_proposes_from_its_counts(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], context: list[int]
):
    path = tmp_path_factory.getbasetemp() / "kept" / "counts.bin"
    path.parent.mkdir(exist_ok=True)
    counted = KeptText.count(texts, VOCAB)
    counted.write(path, FACTS)
    opened, facts = KeptText.open(path, "abc", VOCAB)
    assert facts == FACTS
    proposal = KeptDrafter(opened).propose(context, 9)
    assert proposal == KeptDrafter(counted).propose(context, 9)
    if proposal.source == "kept text":
        copied = [*context[-MATCH:], *proposal.tokens]
        assert any(
            text[at : at + len(copied)] == copied for text in texts for at in range(len(text))
        )


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("successors", lambda column: np.where(column > 0, VOCAB, column), "damaged"),
        ("text", lambda column: np.where(column == 3, VOCAB + 1, column), "damaged"),
        ("matches", lambda column: column + 99, "damaged"),
        ("keys", lambda column: column[:-1], "damaged"),
        ("matches", lambda column: column[:-1], "damaged"),
        ("text", None, "expected"),
    ],
)
def test_corrupt_counts_and_those_of_another_model_are_rejected(
    tmp_path: Path, name: str, change: Any, words: str
):
    kept, path = KeptText.count([SAID], VOCAB), tmp_path / "x"
    kept.write(path, FACTS)
    for other in (("abd", VOCAB), ("abc", VOCAB + 1)):
        with raises(ModelError, "another model"):
            KeptText.open(path, *other)
    columns = {name: np.array(value) for name, value in kept._columns.items()}
    column = columns.pop(name)
    if change is not None:
        columns[name] = change(column).astype(column.dtype)
    about = {"fingerprint": "abc", "vocab_size": VOCAB, "log_bytes": 0}
    write_columns(path, "paceline kept counts", about, columns)
    with raises(ModelError, words):
        KeptText.open(path, "abc", VOCAB)


def test_responses_are_recounted_when_an_eighth_is_new():
    assert [due(tokens, 0) for tokens in (0, 999, 1000)] == [False, False, True]
    assert [due(tokens, 80_000) for tokens in (81_000, 89_999, 90_000)] == [False, False, True]
