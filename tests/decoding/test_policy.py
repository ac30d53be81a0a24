from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.policy import Adaptive, Fixed, Kelly
from paceline.decoding.types import NO_PROPOSAL, DecodeOutcome, Policy, Proposal
from support.drafters import Says, drafted

POLICIES = [Fixed, Adaptive, Kelly]

outcomes = st.lists(
    st.tuples(st.integers(0, 15), st.integers(0, 15), st.floats(0, 1, allow_nan=False)).map(
        lambda one: outcome(one[0], min(one[1], one[0]), one[2])
    ),
    max_size=30,
)


def outcome(drafted: int, accepted: int, seconds: float = 0.0) -> DecodeOutcome:
    return DecodeOutcome(Proposal([1] * drafted, "ngram"), accepted, seconds)


def after(policy: Policy, seen: Sequence[DecodeOutcome]) -> Policy:
    for one in seen:
        policy.observe(one)
    return policy


@pytest.mark.parametrize("kind", POLICIES)
@given(max_block=st.integers(1, 16), seen=outcomes)
def test_draft_length_is_within_the_largest_block(
    kind: type, max_block: int, seen: list[DecodeOutcome]
):
    assert 0 <= after(kind(max_block), seen).draft_length() <= max_block - 1


@pytest.mark.parametrize("kind", POLICIES)
def test_the_first_proposal_with_tokens_is_taken_whole(kind: type):
    first, second = Proposal([1], "ngram"), Proposal([2], "suffix", 9)
    assert drafted(kind(8), first, second) == first
    assert drafted(kind(8), Proposal((), "ngram"), second) == second
    assert drafted(kind(8)) == NO_PROPOSAL


@pytest.mark.parametrize("kind", POLICIES)
def test_drafters_after_the_first_with_a_proposal_are_not_asked(kind: type):
    second = Says(Proposal([1, 2], "suffix"))
    kind(8).draft([Says(Proposal([1], "ngram")), second], [], 8)
    assert second.asked == []


@pytest.mark.parametrize(
    ("accepted", "limit"),
    [
        ([], 7),
        ([0], 1),
        ([0, 0, 2], 1),
        ([1], 2),
        ([1, 2, 2], 2),
        ([2], 7),
        ([0, 3, 3], 7),
        ([0, 0, 0, 2, 2, 2], 7),  # only the last three count
        ([7, 7, 7, 0, 0, 0], 1),
    ],
)
def test_adaptive_shortens_its_block_after_low_acceptance(accepted: list[int], limit: int):
    assert after(Adaptive(8), [outcome(7, count) for count in accepted]).draft_length() == limit


def test_adaptive_does_not_count_steps_without_drafts():
    assert after(Adaptive(8), [outcome(7, 2), outcome(0, 0), outcome(0, 0)]).draft_length() == 7


def best_block(alpha: float, a: float, b: float, longest: int) -> int:
    """The definition: (ea + 1) / (a + b g), ea summed token by token."""
    rates = {
        g: (sum(alpha**i for i in range(1, g)) + 1) / (a + b * g) for g in range(2, longest + 1)
    }
    return max(rates, key=rates.__getitem__)


@pytest.mark.parametrize("accepted", range(11))
def test_kelly_takes_the_block_with_the_best_expected_rate(accepted: int):
    # Times on a line of 10 ms and 2 ms a row.
    seen = [outcome(10, accepted, 0.010 + 0.002 * 11), outcome(0, 0, 0.010 + 0.002)]
    assert after(Kelly(16), seen).draft_length() == best_block(accepted / 10, 0.010, 0.002, 16) - 1


def test_kelly_starts_from_the_constants_of_its_source():
    assert Kelly(16).draft_length() == best_block(0.5, 0.0470, 0.0087, 16) - 1
    # One block size does not determine a line.
    assert after(Kelly(16), [outcome(4, 2, 5.0)] * 3).draft_length() == Kelly(16).draft_length()


def test_kelly_forgets_old_steps():
    poor, good = [outcome(4, 0)] * 20, [outcome(4, 4)] * 8
    assert after(Kelly(16), poor + good).draft_length() == after(Kelly(16), good).draft_length()
    assert after(Kelly(16), poor + good).draft_length() > after(Kelly(16), poor).draft_length()
