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
def test_no_policy_asks_for_more_than_its_longest_block_holds(
    kind: type, max_block: int, seen: list[DecodeOutcome]
):
    assert 0 <= after(kind(max_block), seen).limit() <= max_block - 1


@pytest.mark.parametrize("kind", POLICIES)
def test_the_first_drafter_with_a_guess_is_taken_whole(kind: type):
    first, second = Proposal([1], "ngram"), Proposal([2], "suffix", 9)
    assert drafted(kind(8), first, second) == first
    assert drafted(kind(8), Proposal((), "ngram"), second) == second
    assert drafted(kind(8)) == NO_PROPOSAL


@pytest.mark.parametrize("kind", POLICIES)
def test_nobody_is_asked_for_more_than_there_is_room_for(kind: type):
    drafter = Says(Proposal([1] * 20, "ngram"))
    assert len(kind(8).draft([drafter], [], 1).tokens) == 1
    assert drafter.asked == [1]


@pytest.mark.parametrize("kind", POLICIES)
def test_who_stands_behind_one_with_a_guess_is_not_asked(kind: type):
    second = Says(Proposal([1, 2], "suffix"))
    kind(8).draft([Says(Proposal([1], "ngram")), second], [], 8)
    assert second.asked == []


@pytest.mark.parametrize("kind", POLICIES)
def test_a_policy_is_known_by_its_name(kind: type):
    assert kind(4).name == kind.__name__.lower()


def test_fixed_never_changes_its_block():
    fixed = after(Fixed(6), [outcome(5, 0)] * 20)
    assert fixed.limit() == 5


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
def test_adaptive_shortens_its_block_after_poor_steps(accepted: list[int], limit: int):
    assert after(Adaptive(8), [outcome(7, count) for count in accepted]).limit() == limit


def test_adaptive_does_not_count_steps_without_drafts():
    assert after(Adaptive(8), [outcome(7, 2), outcome(0, 0), outcome(0, 0)]).limit() == 7


def test_adaptive_keeps_to_a_longest_block_that_is_shorter_than_its_rule():
    assert after(Adaptive(2), [outcome(1, 1)] * 3).limit() == 1


def best_block(alpha: float, a: float, b: float, longest: int) -> int:
    """The definition: (ea + 1) / (a + b g), ea summed draft by draft."""
    rates = {
        g: (sum(alpha**i for i in range(1, g)) + 1) / (a + b * g) for g in range(2, longest + 1)
    }
    return max(rates, key=rates.__getitem__)


@pytest.mark.parametrize("accepted", range(11))
def test_kelly_takes_the_block_with_the_best_expected_rate(accepted: int):
    # Times on a line of 10 ms and 2 ms a row.
    seen = [outcome(10, accepted, 0.010 + 0.002 * 11), outcome(0, 0, 0.010 + 0.002)]
    assert after(Kelly(16), seen).limit() == best_block(accepted / 10, 0.010, 0.002, 16) - 1


def test_kelly_starts_from_the_constants_of_its_source():
    assert Kelly(16).limit() == best_block(0.5, 0.0470, 0.0087, 16) - 1
    # One block size says nothing about a line.
    assert after(Kelly(16), [outcome(4, 2, 5.0)] * 3).limit() == Kelly(16).limit()


def test_kelly_drafts_to_the_end_when_all_stands_and_rows_cost_little():
    seen = [outcome(7, 7, 0.1), outcome(3, 3, 0.1)]
    assert after(Kelly(16), seen).limit() == 15


def test_kelly_drafts_as_little_as_it_can_when_nothing_stands():
    seen = [outcome(7, 0, 0.8), outcome(3, 0, 0.4)]
    assert after(Kelly(16), seen).limit() == 1


def test_kelly_forgets_what_was_long_ago():
    poor, good = [outcome(4, 0)] * 20, [outcome(4, 4)] * 8
    assert after(Kelly(16), poor + good).limit() == after(Kelly(16), good).limit()
    assert after(Kelly(16), poor + good).limit() > after(Kelly(16), poor).limit()


def test_kelly_learns_no_times_where_nobody_measured():
    seen = [outcome(7, 3, 0.0), outcome(3, 1, 0.0)]
    alpha = (3 / 7 + 1 / 3) / 2
    assert after(Kelly(16), seen).limit() == best_block(alpha, 0.0470, 0.0087, 16) - 1
