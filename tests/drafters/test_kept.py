"""Drafts from kept answers: what follows a match, what is counted, and what is refused."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafters import KeptText
from paceline.drafters.kept import MATCH, KeptDrafter, due
from paceline.errors import ModelError
from support.errors import raises

VOCAB = 40
SAID = [*range(12), 20, 21, 22, 23]
AGAIN = [*range(12), 30, 31]

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
    assert not KeptDrafter(KeptText.count((), 0)).propose([1, 2], 4).tokens


@settings(max_examples=40)
@given(texts=answers, context=st.lists(st.integers(0, 5), max_size=40))
def test_a_saved_file_proposes_from_its_counts(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], context: list[int]
):
    path = tmp_path_factory.getbasetemp() / "kept" / "counts.npz"
    path.parent.mkdir(exist_ok=True)
    counted = KeptText.count(texts, VOCAB)
    counted.write(path, "abc", 7)
    opened, log_bytes = KeptText.open(path, "abc", VOCAB)
    assert log_bytes == 7
    proposal = KeptDrafter(opened).propose(context, 9)
    assert proposal == KeptDrafter(counted).propose(context, 9)
    if proposal.source == "kept text":
        copied = [*context[-MATCH:], *proposal.tokens]
        assert any(
            text[at : at + len(copied)] == copied for text in texts for at in range(len(text))
        )


def test_corrupt_counts_and_those_of_another_model_are_rejected(tmp_path: Path):
    path = tmp_path / "x.npz"
    KeptText.count([SAID], VOCAB).write(path, "abc", 0)
    for other in (("abd", VOCAB), ("abc", VOCAB + 1)):
        with raises(ModelError, "another model"):
            KeptText.open(path, *other)
    content = path.read_bytes()
    at = content.index(bytes([20, 0, 21, 0]))  # in the text
    for damaged in (content[:-80], content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]):
        path.write_bytes(damaged)
        with raises(ModelError, "damaged"):
            KeptText.open(path, "abc", VOCAB)


def test_responses_are_recounted_when_an_eighth_is_new():
    assert [due(tokens, 0) for tokens in (0, 999, 1000)] == [False, False, True]
    assert [due(tokens, 80_000) for tokens in (81_000, 89_999, 90_000)] == [False, False, True]
