from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.auto import Acceptance, Auto, prior_probability
from paceline.decoding.costs import CostTable
from paceline.decoding.types import NO_PROPOSAL, DecodeOutcome, Drafter, Proposal
from support.drafters import FixedDrafter, drafted

FLAT = CostTable({1: 1.0, 16: 1.0})
CHEAP = CostTable({1: 1.0, 16: 2.0})


def draft(length: int, match: int = 4, source: str = "suffix") -> Proposal:
    return Proposal(list(range(length)), source, match)


def picks(proposal: Proposal, accepted: int) -> list[int]:
    """The target's tokens if it accepts the first `accepted` draft tokens."""
    return [*proposal.tokens[:accepted], 999]


def learn(acceptance: Acceptance, proposal: Proposal, accepted: int) -> None:
    acceptance.observe(proposal, picks(proposal, accepted))


def steps(policy: Auto, drafter: Drafter, accepted: int, count: int) -> Proposal:
    for _ in range(count):
        proposal = policy.draft([drafter], [], 99)
        kept = min(accepted, len(proposal.tokens))
        policy.observe(DecodeOutcome(proposal, kept, 0.0, picks(draft(99), accepted)))
    return proposal


def taught(length: int, accepted: int, times: int = 40, match: int = 4) -> Acceptance:
    acceptance = Acceptance()
    for _ in range(times):
        learn(acceptance, draft(length, match), accepted)
    return acceptance


def probability(acceptance: Acceptance, match: int, source: str = "suffix") -> float:
    return next(acceptance.probabilities(draft(1, match, source)))


def chosen(cost: CostTable, acceptance: Acceptance, *proposals: Proposal, block: int = 16) -> int:
    return len(drafted(Auto(block, cost, acceptance), *proposals).tokens)


# --- acceptance probability


def test_the_prior_acceptance_probability_rises_with_the_match_length():
    probabilities = [prior_probability(match) for match in range(30)]
    assert probabilities == sorted(probabilities)
    assert 0 < probabilities[0] < probabilities[-1] < 1
    assert probability(Acceptance(), 3) == prior_probability(3)


def test_acceptance_raises_the_estimate_and_rejection_lowers_it():
    acceptance = Acceptance()
    learn(acceptance, draft(5, match=2), 2)
    # Match lengths 2 and 3 were accepted, 4 was rejected, and 5 was not observed.
    assert probability(acceptance, 2) > prior_probability(2)
    assert probability(acceptance, 3) > prior_probability(3)
    assert probability(acceptance, 4) < prior_probability(4)
    assert probability(acceptance, 5) == prior_probability(5)
    assert probability(acceptance, 4, "ngram") == prior_probability(4), "each drafter has its own"
    acceptance = taught(1, 0, match=24)
    assert probability(acceptance, 500) == probability(acceptance, 24) < 0.1, "none is longer"


@given(seen=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=60))
def test_an_acceptance_estimate_is_always_a_probability(seen: list[tuple[int, int]]):
    acceptance = Acceptance()
    for length, accepted in seen:
        learn(acceptance, draft(length), min(accepted, length))
    for learned in (acceptance, acceptance.discounted()):
        assert all(0 < probability < 1 for probability in learned.probabilities(draft(16)))


def test_old_acceptance_evidence_decays():
    acceptance = taught(1, 1, times=300)
    for _ in range(100):
        learn(acceptance, draft(1), 0)
    assert probability(acceptance, 4) < 0.3


def test_the_next_request_inherits_acceptance_estimates_but_learns_faster():
    acceptance = taught(1, 1, times=300)
    inherited = acceptance.discounted()
    assert prior_probability(4) < probability(inherited, 4) <= probability(acceptance, 4)
    for learning in (acceptance, inherited):
        for _ in range(10):
            learn(learning, draft(1), 0)
    assert probability(inherited, 4) < probability(acceptance, 4)


# --- draft length


def test_the_better_of_two_proposals_is_taken_in_either_order():
    known = taught(8, 3, times=300)
    good, poor = draft(8), draft(8, match=0, source="ngram")
    for proposals in ([good, poor], [poor, good]):
        assert drafted(Auto(16, CHEAP, known), *proposals) == Proposal([0, 1, 2], "suffix", 4)


slopes = st.floats(0, 1.2, allow_nan=False)
learned = st.builds(taught, st.integers(1, 15), st.integers(0, 15), st.integers(0, 60))


@given(first=slopes, slope=slopes, acceptance=learned, length=st.integers(1, 15))
def test_the_chosen_draft_length_has_the_greatest_gain(
    first: float, slope: float, acceptance: Acceptance, length: int
):
    cost = CostTable({1: 1.0, 2: 1.0 + first, 16: 1.0 + first + 14 * slope})
    probabilities = [*acceptance.probabilities(draft(length))]
    # A new request runs at one token per call.
    tokens = [1.0, *(1.0 + more for more in accumulate(accumulate(probabilities, mul)))]
    gains = [tokens[n] - cost(n + 1) / cost(1) for n in range(length + 1)]
    taken = chosen(cost, acceptance, draft(length))
    assert gains[taken] == pytest.approx(max(gains), abs=1e-9)


@given(block=st.integers(1, 16))
def test_auto_requests_at_most_the_draft_tokens_of_the_largest_block(block: int):
    drafter = FixedDrafter(draft(99))
    taken = Auto(block, FLAT, taught(15, 15)).draft([drafter], [], 99)
    assert len(taken.tokens) == block - 1
    assert drafter.asked == [block - 1] * (block > 1)


def test_a_fast_request_verifies_shorter_uncertain_drafts():
    # Its time is worth more tokens. Another drafter made it fast.
    lengths = []
    for length in (0, 15):
        auto = Auto(16, CostTable({1: 1.0, 16: 4.0}), Acceptance())
        for _ in range(30):
            other = draft(length, source="other")
            auto.observe(DecodeOutcome(other, length, 0.0, picks(other, length)))
        lengths.append(len(drafted(auto, draft(15, match=12)).tokens))
    slow, fast = lengths
    assert 0 < fast < slow


def test_auto_learns_from_proposals_that_were_not_verified():
    known = taught(8, 8)
    auto = Auto(16, CHEAP, known)
    for _ in range(40):
        proposal = auto.draft([FixedDrafter(draft(8)), FixedDrafter(draft(2, 1, "other"))], [], 8)
        assert proposal.source == "suffix"
        auto.observe(DecodeOutcome(proposal, 8, 0.0, picks(draft(8), 8)))
    assert probability(known, 1, "other") > 0.9 > prior_probability(1)


# --- costly drafters


def sure(length: int, source: str, probability: float = 0.99) -> Proposal:
    return Proposal(list(range(length)), source, probabilities=[probability] * length)


def times_asked(
    slow: FixedDrafter, *others: FixedDrafter, steps: int = 200, cost: CostTable = CHEAP
) -> int:
    auto = Auto(16, cost, Acceptance())
    for _ in range(steps):
        proposal = auto.draft([slow, *others], [], 15)
        auto.observe(DecodeOutcome(proposal, len(proposal.tokens), 0.0, [*proposal.tokens, 999]))
    return len(slow.asked)


def test_a_costly_drafter_that_saves_time_is_called_in_every_step():
    assert times_asked(FixedDrafter(sure(4, "slow"), seconds=0.2)) == 200
    as_good = FixedDrafter(sure(8, "free"))
    assert times_asked(FixedDrafter(sure(8, "slow"), seconds=0.2), as_good) <= 7


def test_retries_of_costly_drafters_are_rarer():
    asked = {}
    for calls in (0.1, 1.0, 3.0):  # cost of a proposal over that of a call
        slow = FixedDrafter(sure(1, "slow", 0.1), seconds=calls * CHEAP(1))
        steps(Auto(16, CHEAP, Acceptance()), slow, accepted=0, count=300)
        asked[calls] = len(slow.asked)
    # After 8, 16, 32 and 64 steps; after 50, 50, 50 and 64; after 150.
    assert asked == {0.1: 7, 1.0: 6, 3.0: 2}


def test_an_improving_costly_drafter_is_called_more_often_again():
    auto = Auto(16, CHEAP, Acceptance())
    poor, good = (
        FixedDrafter(sure(4, "slow", probability), seconds=0.2) for probability in (0.05, 0.99)
    )
    for drafter, steps in ((poor, 100), (good, 200)):
        for _ in range(steps):
            proposal = auto.draft([drafter], [], 15)
            auto.observe(
                DecodeOutcome(proposal, len(proposal.tokens), 0.0, [*proposal.tokens, 999])
            )
    assert len(poor.asked) < 10
    assert len(good.asked) > 130


def test_a_request_inherits_a_costly_drafters_earlier_results():
    slow, acceptance = FixedDrafter(sure(1, "slow", 0.1), seconds=3.0), Acceptance()
    for _ in range(10):
        acceptance = acceptance.discounted()
        steps(Auto(16, CHEAP, acceptance), slow, accepted=0, count=20)
    assert len(slow.asked) == 2  # in the first step, and after 150


def test_a_costly_drafter_drafts_about_as_many_tokens_as_are_worth_a_row():
    steep = CostTable({1: 1.0, 4: 1.1, 5: 9.0, 16: 99.0})
    for cost, least, most in ((steep, 4, 6), (CHEAP, 15, 15)):
        slow = FixedDrafter(sure(15, "slow"), seconds=0.2)
        times_asked(slow, steps=60, cost=cost)
        assert least <= slow.asked[-1] <= most


def test_drafting_time_is_priced_at_the_rate_of_plain_decoding():
    policy = Auto(16, CostTable({1: 1.0, 2: 1.8}), Acceptance())
    steps(policy, FixedDrafter(sure(1, "slow"), seconds=0.1), accepted=0, count=5)
    assert policy.rate == 1.0


# --- a drafter's own estimates


def test_a_drafters_own_estimate_is_scaled_by_three_quarters():
    proposal = Proposal([1, 2, 3], "table", probabilities=[0.9, 0.5, 0.1])
    assert [*Acceptance().probabilities(proposal)] == pytest.approx([0.675, 0.375, 0.075])


def test_an_overestimate_is_corrected():
    acceptance = Acceptance()
    high, low = sure(1, "table", 0.9), sure(1, "table", 0.4)
    for i in range(200):
        learn(acceptance, high, int(i % 2))
    assert [*acceptance.probabilities(high)] == pytest.approx([0.5], abs=0.07)
    assert [*acceptance.probabilities(low)] == pytest.approx([0.3])


MATCH = Proposal([1, 2, 3, 4], "suffix", match=3)
ESTIMATE = Proposal([7, 8, 9, 6], "table", probabilities=[0.8, 0.95, 0.95, 0.95])
"""Has a greater gain than the match unless the match contradicts it."""


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_estimate_weighs_less_if_a_match_contradicts_it(order: tuple[int, int]):
    def source(match: Proposal) -> str:
        offered = (match, ESTIMATE)
        return drafted(Auto(16, CHEAP, Acceptance()), *(offered[at] for at in order)).source

    assert source(MATCH) == "suffix"
    agreeing = Proposal([7, 2, 3, 4], "suffix", match=1)
    assert source(agreeing) == "table"
    assert source(NO_PROPOSAL) == "table"


def test_estimates_contradicted_by_a_match_are_counted_separately():
    for accepted, expected in ((4, "table"), (0, "suffix")):
        policy = Auto(16, CHEAP, acceptance := Acceptance())
        for _ in range(30):
            taken = policy.draft([FixedDrafter(MATCH), FixedDrafter(ESTIMATE)], [], 99)
            kept = accepted if taken.source == "table" else 0
            policy.observe(DecodeOutcome(taken, kept, 0.0, picks(ESTIMATE, accepted)))
        assert taken.source in (expected, "none")
        # Estimates without a contradicting match are unchanged.
        assert next(acceptance.probabilities(ESTIMATE)) == pytest.approx(0.6)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(("first", "tokens"), [(7, 2), (8, 1)], ids=["agree", "contradict"])
def test_a_match_confirmed_by_an_estimate_is_drafted_further(
    first: int, tokens: int, order: tuple[int, int]
):
    match = Proposal([7, 2, 3, 4], "suffix", match=2)
    offered = match, sure(1, "table", 0.1)._replace(tokens=[first])
    cost = CostTable({1: 1.0, 2: 1.0, 3: 1.25, 32: 8.5})
    taken = drafted(Auto(16, cost, Acceptance()), *(offered[at] for at in order))
    assert (taken.source, len(taken.tokens)) == ("suffix", tokens)


def test_matches_confirmed_by_an_estimate_are_counted_separately():
    policy = Auto(16, CHEAP, acceptance := Acceptance())
    match, estimate = Proposal([7], "suffix", match=2), sure(1, "table", 0.1)._replace(tokens=[7])
    for _ in range(30):
        taken = policy.draft([FixedDrafter(match), FixedDrafter(estimate)], [], 99)
        policy.observe(DecodeOutcome(taken, 1, 0.0, [7, 5]))
    assert next(acceptance.probabilities(match)) == prior_probability(2)
    assert next(acceptance.probabilities(match, others_agree=True)) > 0.95


def test_a_match_does_not_contradict_a_costly_drafter():
    policy = Auto(16, CHEAP, Acceptance())
    taken = policy.draft([FixedDrafter(MATCH), FixedDrafter(ESTIMATE, seconds=1e-9)], [], 99)
    assert taken.source == "table"


def test_drafts_get_shorter_as_the_batch_grows():
    cost = CostTable({1: 1.0, 16: 1.3, 32: 5.0})
    offered = Proposal(list(range(15)), "guess", 0, [0.85] * 15)
    lengths = []
    for others in (0, 1, 3, 7):
        policy = Auto(16, cost, Acceptance())
        if others:
            policy.set_batch_load(1 + 0.5 * others, 0.1, others * policy.rate / 2)
        lengths.append(len(drafted(policy, offered).tokens))
    assert lengths[0] > 6
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < lengths[0] / 2


def test_drafts_get_shorter_if_rows_cost_more_at_a_longer_context():
    # Rows are nearly free at a short context; at a long one each row reads all of it.
    cost = CostTable({1: 1.0, 16: 1.3}, 256, {1: 1e-3, 16: 1e-2})
    offered = Proposal(list(range(15)), "guess", 0, [0.99] * 15)
    lengths = []
    for context in (0, 256, 2048, 8192):
        policy = Auto(16, cost, Acceptance(), context)
        lengths.append(len(policy.draft([FixedDrafter(offered)], [1] * context, 99).tokens))
        grown = Auto(16, cost, Acceptance())
        # Its rate is that of a short context, and so higher.
        assert len(grown.draft([FixedDrafter(offered)], [1] * context, 99).tokens) <= lengths[-1]
    assert lengths[0] >= lengths[1] > 6
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < lengths[0] / 2


def test_draft_lengths_recover_when_the_batch_load_is_cleared():
    cost = CostTable({1: 1.0, 16: 1.3, 32: 5.0})
    offered = Proposal(list(range(15)), "guess", 0, [0.99] * 15)
    alone, shared = Auto(16, cost, Acceptance()), Auto(16, cost, Acceptance())
    shared.set_batch_load(2.0, 0.5, 9.0)
    assert drafted(shared, offered) != drafted(alone, offered)
    shared.clear_batch_load()
    assert drafted(shared, offered) == drafted(alone, offered)


def test_a_draft_may_be_used_after_the_batch_load_changes():
    # As that of a request that was preempted before its call: by then drafters are not asked.
    cost = CostTable({1: 1.0, 16: 1.3})
    policy = Auto(16, cost, Acceptance())
    policy.set_batch_load(2.0, 0.01, 0.5)
    proposal = drafted(policy, Proposal(list(range(15)), "guess", 0, [0.99] * 15))
    assert len(proposal.tokens) > 6
    policy.set_batch_load(9.0, 0.01, 0.5, drafts=False)
    assert not drafted(policy, proposal).tokens
    policy.observe(DecodeOutcome(proposal, 3, 9.0, proposal.tokens[:4]))
    assert policy.rate == pytest.approx(5 / (1.0 + 9.0 + 0.01 * len(proposal.tokens)), rel=0.1)


def test_the_batch_load_still_applies_after_the_context_grows():
    policy = Auto(16, CostTable({1: 1.0, 16: 1.3}, 256), Acceptance(), 256)
    policy.set_batch_load(1.5, 10.0, 0.5)
    offered = Proposal(list(range(15)), "guess", 0, [0.99] * 15)
    assert not policy.draft([FixedDrafter(offered)], [1] * 900, 99).tokens
