import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.auto import Acceptance, Auto, prior_probability
from paceline.decoding.costs import CostTable, expected_tokens
from paceline.decoding.generation import Stopping
from paceline.decoding.types import NO_PROPOSAL, DecodeOutcome, Drafter, Proposal
from paceline.drafters import create
from support.drafters import Oracle, Says, drafted
from support.driver import generation, run
from support.toy import ToyEngine

FLAT = CostTable({1: 1.0, 16: 1.0})
CHEAP = CostTable({1: 1.0, 16: 2.0})
STEEP = CostTable({1: 1.0, 2: 2.0})
"""Every row costs as much as a call."""


def guess(length: int, match: int = 4, source: str = "suffix") -> Proposal:
    return Proposal(list(range(length)), source, match)


def came(proposal: Proposal, accepted: int) -> list[int]:
    """What the target said where so many drafts stood."""
    return [*proposal.tokens[:accepted], 999]


def learn(acceptance: Acceptance, proposal: Proposal, accepted: int) -> None:
    acceptance.observe(proposal, came(proposal, accepted))


def steps(policy: Auto, drafter: Drafter, accepted: int, count: int) -> Proposal:
    """Run so many steps in which so many of the drafts stand; the last that was drafted."""
    for _ in range(count):
        proposal = policy.draft([drafter], [], 99)
        stood = min(accepted, len(proposal.tokens))
        policy.observe(DecodeOutcome(proposal, stood, 0.0, came(guess(99), accepted)))
    return proposal


def taught(length: int, accepted: int, times: int = 40, match: int = 4) -> Acceptance:
    acceptance = Acceptance()
    for _ in range(times):
        learn(acceptance, guess(length, match), accepted)
    return acceptance


def probability(acceptance: Acceptance, match: int, source: str = "suffix") -> float:
    return acceptance.probabilities(guess(1, match, source))[0]


def chosen(cost: CostTable, acceptance: Acceptance, *proposals: Proposal, block: int = 16) -> int:
    """How many drafts a request takes at its beginning."""
    return len(drafted(Auto(block, cost, acceptance), *proposals).tokens)


# --- how likely a draft stands


def test_a_longer_match_is_believed_more_before_anything_was_seen():
    probabilities = [prior_probability(match) for match in range(30)]
    assert probabilities == sorted(probabilities)
    assert 0 < probabilities[0] < probabilities[-1] < 1
    assert probability(Acceptance(), 3) == prior_probability(3)


def test_every_place_of_a_draft_counts_as_a_match_longer_by_one():
    probabilities = Acceptance().probabilities(guess(3, match=2))
    assert probabilities == [prior_probability(2), prior_probability(3), prior_probability(4)]


def test_what_stood_is_believed_more_and_what_fell_less():
    acceptance = Acceptance()
    learn(acceptance, guess(5, match=2), 2)
    # Matches 2 and 3 stood, 4 fell, and nobody knows about 5.
    assert probability(acceptance, 2) > prior_probability(2)
    assert probability(acceptance, 3) > prior_probability(3)
    assert probability(acceptance, 4) < prior_probability(4)
    assert probability(acceptance, 5) == prior_probability(5)


def test_a_draft_that_stood_whole_says_nothing_beyond_its_end():
    acceptance = Acceptance()
    learn(acceptance, guess(2, match=2), 2)
    assert probability(acceptance, 4) == prior_probability(4)


def test_drafters_are_believed_each_for_itself():
    acceptance = taught(3, 0)
    assert probability(acceptance, 4) < 0.1
    assert probability(acceptance, 4, "ngram") == prior_probability(4)


def test_very_long_matches_are_all_one():
    acceptance = taught(1, 0, match=24)
    assert probability(acceptance, 500) == probability(acceptance, 24) < 0.1


@given(seen=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=60))
def test_a_chance_is_always_a_probability(seen: list[tuple[int, int]]):
    acceptance = Acceptance()
    for length, accepted in seen:
        learn(acceptance, guess(length), min(accepted, length))
    for learned in (acceptance, acceptance.discounted()):
        assert all(0 < probability < 1 for probability in learned.probabilities(guess(16)))


def test_the_estimate_comes_to_the_share_that_stands():
    acceptance = Acceptance()
    for i in range(400):
        learn(acceptance, guess(1), int(i % 4 != 0))
    assert probability(acceptance, 4) == pytest.approx(0.75, abs=0.05)


def test_old_evidence_fades():
    acceptance = taught(1, 1, times=300)
    for _ in range(100):
        learn(acceptance, guess(1), 0)
    assert probability(acceptance, 4) < 0.3


def test_the_next_request_takes_belief_over_but_learns_faster():
    acceptance = taught(1, 1, times=300)
    carried = acceptance.discounted()
    believed = probability(carried, 4)
    assert prior_probability(4) < believed <= probability(acceptance, 4)
    for learning in (acceptance, carried):
        for _ in range(10):
            learn(learning, guess(1), 0)
    assert probability(carried, 4) < probability(acceptance, 4)


def test_carried_belief_is_a_copy():
    acceptance = taught(1, 1, times=3)
    before = probability(acceptance, 4)
    learn(acceptance.discounted(), guess(1), 0)
    assert probability(acceptance, 4) == before
    assert probability(acceptance.discounted(), 4) == pytest.approx(before)


# --- how much is drafted


def test_nothing_is_drafted_where_a_row_costs_as_much_as_a_call():
    assert chosen(STEEP, taught(15, 15, times=300), guess(15)) == 0


def test_nothing_proposed_is_nothing_drafted():
    assert drafted(Auto(16, FLAT, Acceptance())) == NO_PROPOSAL


def test_a_sure_thing_is_drafted_to_its_end():
    sure = taught(15, 15, times=300)
    assert chosen(FLAT, sure, guess(15)) == 15
    assert chosen(CHEAP, sure, guess(15)) == 15


def test_free_rows_are_all_used():
    assert chosen(FLAT, taught(15, 0), guess(15)) == 15


def test_what_never_stands_is_not_drafted():
    assert chosen(CHEAP, taught(1, 0, times=300), guess(1)) == 0


def test_the_draft_is_cut_where_the_tokens_stop_standing():
    # Three stand every time, the fourth never does.
    assert chosen(CHEAP, taught(8, 3, times=300), guess(8)) == 3


def test_the_better_of_two_proposals_is_taken_whatever_their_order():
    known = taught(8, 8)
    good, poor = guess(8), guess(8, match=0, source="recycle")
    for proposals in ([good, poor], [poor, good]):
        assert drafted(Auto(16, CHEAP, known), *proposals).source == "suffix"


def test_a_cut_proposal_keeps_its_source_and_match():
    taken = drafted(Auto(16, CHEAP, taught(8, 3, times=300)), guess(8))
    assert taken == Proposal([0, 1, 2], "suffix", 4)


slopes = st.floats(0, 1.2, allow_nan=False)
learned = st.builds(taught, st.integers(1, 15), st.integers(0, 15), st.integers(0, 60))


@given(slope=slopes, acceptance=learned, length=st.integers(1, 15))
def test_no_other_length_would_gain_more(slope: float, acceptance: Acceptance, length: int):
    cost = CostTable({1: 1.0, 16: 1.0 + 15 * slope})
    probabilities = acceptance.probabilities(guess(length))
    # At its beginning a request runs at a token a call.
    gains = [expected_tokens(probabilities[:n]) - cost(n + 1) / cost(1) for n in range(length + 1)]
    taken = chosen(cost, acceptance, guess(length))
    assert gains[taken] == pytest.approx(max(gains), abs=1e-9)


@given(slope=slopes, more=slopes, acceptance=learned)
def test_the_steeper_the_cost_the_shorter_the_draft(
    slope: float, more: float, acceptance: Acceptance
):
    lengths = [
        chosen(CostTable({1: 1.0, 16: 1.0 + 15 * each}), acceptance, guess(15))
        for each in (slope, slope + more)
    ]
    assert lengths[0] >= lengths[1]


@given(
    slope=slopes, accepted=st.integers(0, 14), times=st.integers(1, 60), length=st.integers(1, 15)
)
def test_the_more_has_stood_the_longer_the_draft(
    slope: float, accepted: int, times: int, length: int
):
    cost = CostTable({1: 1.0, 16: 1.0 + 15 * slope})
    fewer = chosen(cost, taught(15, accepted, times), guess(length))
    assert chosen(cost, taught(15, accepted + 1, times), guess(length)) >= fewer


@given(slope=slopes, acceptance=learned, unit=st.sampled_from([1e-4, 0.1, 30.0]))
def test_a_machine_that_is_slower_throughout_drafts_the_same(
    slope: float, acceptance: Acceptance, unit: float
):
    # Slopes on a coarse grid: an exact tie may be decided by rounding.
    slope = round(slope, 1) + 0.0317
    tables = [CostTable({1: u, 16: u * (1 + 15 * slope)}) for u in (1.0, unit)]
    first, second = (chosen(table, acceptance, guess(15)) for table in tables)
    assert first == second


@given(block=st.integers(1, 16))
def test_it_asks_for_what_the_longest_block_holds_and_chooses_no_more(block: int):
    drafter = Says(guess(99))
    taken = Auto(block, FLAT, taught(15, 15)).draft([drafter], [], 99)
    assert len(taken.tokens) == block - 1
    assert drafter.asked == [block - 1] * (block > 1)


def test_a_request_that_runs_fast_spends_less_on_a_doubtful_guess():
    # A second is worth more tokens there. What made it fast was another drafter.
    lengths = []
    for length in (0, 15):
        auto = Auto(16, CostTable({1: 1.0, 16: 4.0}), Acceptance())
        for _ in range(30):
            other = guess(length, source="other")
            auto.observe(DecodeOutcome(other, length, 0.0, came(other, length)))
        lengths.append(len(drafted(auto, guess(15, match=12)).tokens))
    slow, fast = lengths
    assert 0 < fast < slow


def test_it_learns_from_what_it_verified():
    auto = Auto(16, CHEAP, Acceptance())
    before = len(drafted(auto, guess(8)).tokens)
    assert len(steps(auto, Says(guess(8)), accepted=0, count=40).tokens) == 0 < before


def test_it_learns_from_what_was_offered_and_not_taken():
    known = taught(8, 8)
    auto = Auto(16, CHEAP, known)
    for _ in range(40):
        proposal = auto.draft([Says(guess(8)), Says(guess(2, 1, "other"))], [], 8)
        assert proposal.source == "suffix"
        auto.observe(DecodeOutcome(proposal, 8, 0.0, came(guess(8), 8)))
    assert probability(known, 1, "other") > 0.9 > prior_probability(1)


def test_a_step_without_drafts_teaches_nothing_about_drafters():
    acceptance = Acceptance()
    Auto(16, CHEAP, acceptance).observe(DecodeOutcome(NO_PROPOSAL, 0, 0.0))
    assert acceptance.counts == {}


# --- in a whole request


def test_on_a_machine_with_steep_costs_a_request_decodes_plainly():
    one = generation(
        ToyEngine(),
        [1, 2, 3] * 4,
        stopping=Stopping(max_tokens=60),
        drafters=create("ngram+suffix+recycle"),
        policy=Auto(16, STEEP, Acceptance()),
    )
    run(ToyEngine(), [one])
    assert (one.counters.drafted, one.counters.steps) == (0, 59)


def test_a_drafter_that_is_always_right_is_soon_followed_as_far_as_it_goes():
    engine, prompt = ToyEngine(context_length=512), [1, 2, 3]
    (plain,) = run(engine, [generation(engine, prompt, stopping=Stopping(max_tokens=400))])
    oracle = Oracle(prompt + plain.tokens, match=0)
    one = generation(
        engine,
        prompt,
        stopping=Stopping(max_tokens=400),
        drafters=[oracle],
        policy=Auto(16, CHEAP, Acceptance()),
    )
    run(engine, [one])
    assert one.counters.steps < 400 / 16 + 15
    assert one.counters.accepted == one.counters.drafted


# --- drafters that take time


def test_a_drafter_that_takes_time_is_asked_after_those_that_do_not():
    slow, free = Says(guess(8, source="slow"), seconds=0.01), Says(guess(8, source="free"))
    auto = Auto(16, CHEAP, Acceptance())
    auto.draft([slow, free], [], 8)
    assert (len(slow.asked), len(free.asked)) == (1, 1)


def sure(length: int, source: str, probability: float = 0.99) -> Proposal:
    return Proposal(list(range(length)), source, probabilities=[probability] * length)


def times_asked(slow: Says, *others: Says, steps: int = 200, cost: CostTable = CHEAP) -> int:
    """How often a request asks, where what is drafted always stands."""
    auto = Auto(16, cost, Acceptance())
    for _ in range(steps):
        proposal = auto.draft([slow, *others], [], 15)
        auto.observe(DecodeOutcome(proposal, len(proposal.tokens), 0.0, [*proposal.tokens, 999]))
    return len(slow.asked)


def test_a_drafter_that_is_worth_its_time_is_asked_in_every_step():
    assert times_asked(Says(sure(4, "slow"), seconds=0.2)) == 200


def test_a_drafter_that_is_not_worth_its_time_is_asked_ever_less():
    slow = Says(sure(1, "slow", 0.1), seconds=0.5)
    steps(Auto(16, CHEAP, Acceptance()), slow, accepted=0, count=200)
    # After the first time at 4, 8, 16, 32 and then every 64 steps.
    assert len(slow.asked) <= 7


def test_the_dearer_a_drafter_the_longer_it_is_not_asked_again():
    asked = {}
    for calls in (0.1, 1.0, 3.0):  # what asking takes, over what a call takes
        slow = Says(sure(1, "slow", 0.1), seconds=calls * CHEAP(1))
        steps(Auto(16, CHEAP, Acceptance()), slow, accepted=0, count=300)
        asked[calls] = len(slow.asked)
    # After 8, 16, 32 and 64 steps; after 50, 50, 50 and 64; after 150.
    assert asked == {0.1: 7, 1.0: 6, 3.0: 2}


def test_a_drafter_is_not_asked_where_a_free_one_knows_as_much():
    slow = Says(sure(8, "slow"), seconds=0.2)
    assert times_asked(slow, Says(sure(8, "free"))) <= 7


def test_a_drafter_that_has_got_better_is_asked_again():
    auto = Auto(16, CHEAP, Acceptance())
    poor, good = (Says(sure(4, "slow", probability), seconds=0.2) for probability in (0.05, 0.99))
    for drafter, steps in ((poor, 100), (good, 200)):
        for _ in range(steps):
            proposal = auto.draft([drafter], [], 15)
            auto.observe(
                DecodeOutcome(proposal, len(proposal.tokens), 0.0, [*proposal.tokens, 999])
            )
    assert len(poor.asked) < 10
    assert len(good.asked) > 130


# --- a drafter's own estimates


def test_a_drafters_own_estimate_counts_three_quarters_before_anything_was_seen():
    proposal = Proposal([1, 2, 3], "table", probabilities=[0.9, 0.5, 0.1])
    assert Acceptance().probabilities(proposal) == pytest.approx([0.675, 0.375, 0.075])


def test_an_estimate_that_promises_too_much_is_corrected():
    acceptance = Acceptance()
    boasting, modest = sure(1, "table", 0.9), sure(1, "table", 0.4)
    for i in range(200):
        learn(acceptance, boasting, int(i % 2))
    assert acceptance.probabilities(boasting) == pytest.approx([0.5], abs=0.07)
    assert acceptance.probabilities(modest) == pytest.approx([0.3])


MATCH = Proposal([1, 2, 3, 4], "suffix", match=3)
ESTIMATE = Proposal([7, 8, 9, 6], "table", probabilities=[0.8, 0.95, 0.95, 0.95])
"""Expects more than the match, as long as nothing speaks against it."""


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_estimate_is_believed_less_where_a_match_proposes_another_token(order: tuple[int, int]):
    def source(match: Proposal) -> str:
        offered = (match, ESTIMATE)
        return drafted(Auto(16, CHEAP, Acceptance()), *(offered[at] for at in order)).source

    assert source(MATCH) == "suffix"
    agreeing = Proposal([7, 2, 3, 4], "suffix", match=3)
    assert source(agreeing) == "table"
    assert source(NO_PROPOSAL) == "table"


def test_an_estimate_that_a_match_contradicts_is_judged_for_itself():
    for came_true, expected in ((4, "table"), (0, "suffix")):
        policy = Auto(16, CHEAP, acceptance := Acceptance())
        for _ in range(30):
            taken = policy.draft([Says(MATCH), Says(ESTIMATE)], [], 99)
            stood = came_true if taken.source == "table" else 0
            policy.observe(DecodeOutcome(taken, stood, 0.0, came(ESTIMATE, came_true)))
        assert taken.source in (expected, "none")
        # What contradicted estimates did says nothing of those that no match contradicts.
        assert acceptance.probabilities(ESTIMATE)[0] == pytest.approx(0.6)


def test_a_drafter_that_takes_time_is_not_doubted_for_a_match():
    policy = Auto(16, CHEAP, Acceptance())
    taken = policy.draft([Says(MATCH), Says(ESTIMATE, seconds=1e-9)], [], 99)
    assert taken.source == "table"


def test_a_cut_proposal_keeps_the_estimates_of_its_tokens():
    taken = drafted(
        Auto(16, CHEAP, Acceptance()), Proposal([7, 8], "table", probabilities=[0.95, 0.01])
    )
    assert taken == Proposal([7], "table", probabilities=[0.95])


def test_with_others_in_the_call_a_row_must_bring_more():
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


def test_behind_a_long_text_a_row_must_bring_more_where_it_costs_more_there():
    # Rows are nearly free behind a short text; behind a long one each reads it for itself.
    cost = CostTable({1: 1.0, 16: 1.3}, 256, {1: 1e-3, 16: 1e-2})
    offered = Proposal(list(range(15)), "guess", 0, [0.99] * 15)
    lengths = []
    for context in (0, 256, 2048, 8192):
        policy = Auto(16, cost, Acceptance(), context)
        lengths.append(len(policy.draft([Says(offered)], [1] * context, 99).tokens))
        # Also when the text only became so long.
        grown = Auto(16, cost, Acceptance())
        assert grown.draft([Says(offered)], [1] * context, 99).tokens or context > 256
    assert lengths[0] >= lengths[1] > 6
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < lengths[0] / 2


def test_alone_again_it_drafts_as_before():
    cost = CostTable({1: 1.0, 16: 1.3, 32: 5.0})
    offered = Proposal(list(range(15)), "guess", 0, [0.99] * 15)
    alone, shared = Auto(16, cost, Acceptance()), Auto(16, cost, Acceptance())
    shared.set_batch_load(2.0, 0.5, 9.0)
    assert drafted(shared, offered) != drafted(alone, offered)
    shared.clear_batch_load()
    assert drafted(shared, offered) == drafted(alone, offered)


def test_in_a_shared_call_too_a_row_must_bring_more_behind_a_long_text():
    cost = CostTable({1: 1.0, 16: 1.3}, 256, {1: 1e-3, 16: 1e-2})
    offered = Proposal(list(range(15)), "guess", 0, [0.99] * 15)
    lengths = []
    for context in (256, 1024, 8192):
        policy = Auto(16, cost, Acceptance(), context)
        policy.set_batch_load(1.5, 0.05, 0.5)
        lengths.append(len(policy.draft([Says(offered)], [1] * context, 99).tokens))
        policy.set_batch_load(1.5, 10.0, 0.5)  # and goes on to count when the text has grown
        assert not policy.draft([Says(offered)], [1] * (context + 600), 99).tokens
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < lengths[0]
