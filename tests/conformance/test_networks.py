"""Conformance of DFlash networks: all must compute what the paper says. Add one to NETWORKS."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from paceline.decoding.draft_sampling import DraftSampler
from paceline.decoding.sampling import Sampling
from paceline.decoding.types import ComputedBlock, Proposal
from paceline.drafters import DraftKV, RequestContext, create
from paceline.drafters.dflash import DFlashDrafter
from paceline.drafters.networks.context import DraftCost
from support.dflash import Drafted, parts
from support.networks import (
    FIRST_TOKENS,
    WAYS,
    Case,
    MakeCase,
    assert_same,
    prefilled,
    seen,
    without_prefill,
)

# -- what a network computes -----------------------------------------------------------------------


@pytest.mark.pairs
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [0, 1, 5, 100, 300])
def test_a_draft_equals_the_reference(form: Case, length: int, way: Callable[..., Any]):
    rows = form.tapped(length)
    drafts = [way(form.network, rows, token) for token in FIRST_TOKENS]
    assert_same(drafts, [form.expected(rows, token) for token in FIRST_TOKENS])


def test_the_reference_depends_on_all_its_inputs(form: Case):
    # Without this, a network that ignores its context would pass the test above.
    rows = form.tapped(30)
    drafted = form.expected(rows, 3)
    near = [rows + np.eye(30)[at][:, None] for at in (0, 15, 29)]
    others = [
        form.expected(rows, 4),
        form.expected(rows, 3, 31),
        form.expected(rows[::-1], 3),
        *(form.expected(changed, 3) for changed in near if None in form.config.windows),
    ]
    assert len({token for first in FIRST_TOKENS for token in form.expected(rows, first).tokens}) > 2
    for other in others:
        assert not np.allclose(other.hidden, drafted.hidden, rtol=1e-3)


def test_a_sliding_window_masks_earlier_rows(make_case: MakeCase):
    case = make_case({"windows": (20, 20)})
    rows = case.tapped(60)
    # The first row of a block at 60 attends to rows from 41 on.
    changed = rows.copy()
    changed[:41] += 1
    one, other = (
        [list(item) for item in prefilled(case.network, entry, 3)] for entry in (rows, changed)
    )
    assert one == other
    changed[:42] += 1
    assert [list(item) for item in prefilled(case.network, changed, 3)] != one


def test_only_tokens_of_a_reduced_vocabulary_are_drafted(make_case: MakeCase):
    case = make_case({}, [4, 9, 200])
    drafts = [without_prefill(case.network, case.tapped(5), token)[0] for token in FIRST_TOKENS]
    assert {token for draft in drafts for token in draft} <= {4, 9, 200}


def test_a_sampler_picks_from_the_logits_of_each_row(form: Case):
    rows = form.tapped(30)
    vocab = None if form.draft_vocab is None else np.array(form.draft_vocab)
    same = []
    for temperature in (0.5, 0.8, 1.0):
        sampler = DraftSampler(Sampling(temperature=temperature, seed=5), 0, 320)
        for token in FIRST_TOKENS:
            network = form.network
            drafts, chances = network.draft(
                network.new_cache(), token, 30, rows, 0, sampler=sampler
            )
            logits = form.expected(rows, token).logits.astype(np.float32)
            expected = [sampler.pick(row, 31 + at, vocab) for at, row in enumerate(logits)]
            same += [a == b for a, (b, _) in zip(drafts, expected, strict=True)]
            assert np.mean(np.isclose(chances, [item for _, item in expected], rtol=1e-3)) > 0.8
            assert all(type(item) is int for item in drafts)
    assert np.mean(same) > 0.99


def test_drafts_follow_the_requests_noise(case: Case):
    rows = case.tapped(12)
    drafts = set()
    for seed in (1, 2):
        how = Sampling(temperature=1.0, seed=seed)
        drafter = DFlashDrafter(case.network, case.network.new_cache(), how, 12)
        drafter.observe(seen(rows, 0))
        proposal = drafter.propose([1] * 12 + [8], 7)
        logits = case.expected(rows, 8).logits.astype(np.float32)
        expected, _ = DraftSampler(how, 12, 320).pick_rows(logits, 13)
        assert list(proposal.tokens) == expected
        drafts.add(tuple(proposal.tokens))
    assert len(drafts) == 2


def test_other_rows_replace_truncated_ones(form: Case):
    kept, dropped, others = form.tapped(60, 1), form.tapped(45, 2), form.tapped(290, 3)
    network, cache = form.network, form.network.new_cache()
    network.prefill(cache, np.concatenate([kept, dropped[:40]]), 0)
    network.draft(cache, 5, 105, dropped[40:], 100)
    cache.truncate(60)
    assert len(cache) == 60
    network.prefill(cache, others[:284], 60)
    drafts = [network.draft(cache, 5, 350, others[284:], 344)]
    drafts += [network.draft(cache, token, 350, others[:0], 350) for token in FIRST_TOKENS]
    rows = np.concatenate([kept, others])
    assert_same(drafts, [form.expected(rows, token) for token in (5, *FIRST_TOKENS)])


def test_a_cache_may_be_truncated_many_times(case: Case):
    rows = case.tapped(300)
    network, cache = case.network, case.network.new_cache()
    for end in (300, 256, 255, 30, 0):
        cache.truncate(end)
        network.prefill(cache, rows[len(cache) : end], len(cache))
        drafts = [network.draft(cache, token, end, rows[:0], end) for token in FIRST_TOKENS]
        assert_same(drafts, [case.expected(rows[:end], token) for token in FIRST_TOKENS])


def test_positions_may_have_gaps(form: Case):
    rows = form.tapped(30)
    network, cache = form.network, form.network.new_cache()
    network.prefill(cache, rows[:15], 10)
    drafts = [network.draft(cache, 3, 105, rows[15:], 90)]
    drafts += [network.draft(cache, token, 105, rows[:0], 105) for token in FIRST_TOKENS]
    drafts += [network.draft(cache, 3, 110, rows[:0], 105)]
    asked = [(3, 105), *((token, 105) for token in FIRST_TOKENS), (3, 110)]
    expected = partial(form.expected, rows, positions=[*range(10, 25), *range(90, 105)])
    assert_same(drafts, [expected(token, at) for token, at in asked])


def test_new_rows_may_end_before_the_block(form: Case):
    rows = form.tapped(20)
    drafts = form.network.draft(form.network.new_cache(), 3, 40, rows, 10)
    assert_same([drafts], [form.expected(rows, 3, 40, positions=range(10, 30))])


@pytest.mark.pairs
@pytest.mark.parametrize("window", [1, 7, 64, 256, 300])
@pytest.mark.parametrize("layers", [(None, None), (20, None)], ids=str)
def test_the_option_window_limits_the_context(
    make_case: MakeCase, layers: tuple[int | None, ...], window: int
):
    case = make_case({"windows": layers})
    network = case.opened(window=window)
    rows = case.tapped(280)
    last = list(range(280))[-window:]
    expected = [case.expected(rows[last], token, 280, positions=last) for token in FIRST_TOKENS]
    for way in WAYS:
        assert_same([way(network, rows, token) for token in FIRST_TOKENS], expected)


@pytest.mark.parametrize("window", [10, 3])
def test_new_rows_count_for_the_option_window(case: Case, window: int):
    network = case.opened(window=window)
    rows = case.tapped(40)
    cache = network.new_cache()
    network.prefill(cache, rows[:35], 0)
    drafts = network.draft(cache, 3, 40, rows[35:], 35)
    positions = range(40 - window, 40)
    assert_same([drafts], [case.expected(rows[40 - window :], 3, 40, positions=positions)])


def test_caches_are_independent(case: Case):
    rows = case.tapped(40)
    network, first, second = case.network, case.network.new_cache(), case.network.new_cache()
    network.prefill(first, rows[:20], 0)
    network.prefill(second, rows[20:], 0)
    drafts = [
        network.draft(cache, token, 20, rows[:0], 20)
        for token in FIRST_TOKENS
        for cache in (first, second)
    ]
    expected = [
        case.expected(part, token) for token in FIRST_TOKENS for part in (rows[:20], rows[20:])
    ]
    assert_same(drafts, expected)


# -- drafting with it ------------------------------------------------------------------------------


def drafter_of(case: Case) -> DFlashDrafter:
    return DFlashDrafter(case.network, case.network.new_cache())


def assert_drafts(proposal: Proposal, expected: Drafted) -> None:
    assert_same([(list(proposal.tokens), list(proposal.probabilities))], [expected])
    assert (proposal.source, proposal.match) == ("dflash", 0)


def test_the_draft_is_empty_before_hidden_states_are_observed(case: Case):
    drafter = drafter_of(case)
    assert drafter.propose([1, 2, 3], 7) == Proposal((), "dflash")
    drafter.observe(ComputedBlock([1, 2, 3], 0, 3))
    assert not drafter.propose([1, 2, 3], 7).tokens, "an engine without taps"
    drafter.observe(seen(case.tapped(3), 0, kept=0))
    assert not drafter.propose([1, 2, 3], 7).tokens, "nothing was kept"


def test_a_block_is_drafted_from_observed_hidden_states(case: Case):
    drafter, rows = drafter_of(case), case.tapped(12)
    drafter.observe(seen(rows, 0))
    assert_drafts(drafter.propose([1] * 12 + [8], 7), case.expected(rows, 8))


def test_proposing_twice_gives_the_same_draft(case: Case):
    drafter, rows = drafter_of(case), case.tapped(12)
    drafter.observe(seen(rows, 0))
    first = drafter.propose([1] * 12 + [8], 7)
    for limit in (7, 3, 7):
        again = drafter.propose([1] * 12 + [8], limit)
        assert list(again.tokens) == list(first.tokens)[:limit]
        assert list(again.probabilities) == list(first.probabilities)[:limit]


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 100])
def test_a_draft_has_at_most_limit_tokens(case: Case, limit: int):
    drafter = drafter_of(case)
    drafter.observe(seen(case.tapped(12), 0))
    proposal = drafter.propose([1] * 13, limit)
    expected = min(limit, case.config.block_size - 1)
    assert len(proposal.tokens) == len(proposal.probabilities) == expected


def test_only_kept_rows_become_context(case: Case):
    drafter, rows = drafter_of(case), case.tapped(20)
    wrong = case.tapped(8, seed=9)
    drafter.observe(seen(rows[:12], 0))
    drafter.propose([1] * 13, 7)
    drafter.observe(seen(np.concatenate([rows[12:15], wrong]), 12, kept=3))
    drafter.observe(seen(np.concatenate([rows[15:], wrong]), 15, kept=5))
    assert_drafts(drafter.propose([1] * 20 + [8], 7), case.expected(rows, 8))


def test_a_step_may_pass_without_a_proposal(case: Case):
    drafter, rows = drafter_of(case), case.tapped(100)
    at = 0
    for count in (10, 1, 1, 30, 2, 1, 20, 35):
        drafter.observe(seen(rows[at : at + count], at))
        at += count
        if count == 30:
            drafter.propose([1] * (at + 1), 7)
    assert_drafts(drafter.propose([1] * 100 + [8], 7), case.expected(rows, 8))


def test_an_engine_may_overwrite_its_taps_after_observe(case: Case):
    drafter, rows = drafter_of(case), case.tapped(12)
    shown = seen(rows.copy(), 0)
    drafter.observe(shown)
    for array in shown.taps.values():
        array[:] = np.nan
    assert_drafts(drafter.propose([1] * 12 + [8], 7), case.expected(rows, 8))


@pytest.mark.parametrize("cut", [1000, 900, 512, 20])
def test_a_long_prompt_is_prefilled_in_chunks(case: Case, cut: int):
    cache = case.network.new_cache()
    drafter, rows = DFlashDrafter(case.network, cache), case.tapped(1000)
    for start, part in parts(rows, 250):
        drafter.observe(seen(part, start))
        assert sum(map(len, cache.pending)) <= 750
    assert len(cache) >= 750
    cache.truncate(cut)
    assert_drafts(drafter.propose([1] * cut + [8], 7), case.expected(rows[:cut], 8))


def test_a_prompt_may_begin_in_the_prefix_cache(case: Case):
    drafter, rows = drafter_of(case), case.tapped(12)
    drafter.observe(seen(rows, 40))
    expected = case.expected(rows, 8, 52, positions=range(40, 52))
    assert_drafts(drafter.propose([1] * 52 + [8], 7), expected)


@pytest.mark.pairs
@pytest.mark.parametrize("asked", [False, True])
def test_observed_blocks_may_have_gaps(case: Case, asked: bool):
    drafter, rows = drafter_of(case), case.tapped(20)
    drafter.observe(seen(rows[:12], 0))
    if asked:
        drafter.propose([1] * 13, 7)
    drafter.observe(seen(rows[12:], 60))
    expected = case.expected(rows, 8, 68, positions=[*range(12), *range(60, 68)])
    assert_drafts(drafter.propose([1] * 68 + [8], 7), expected)


def test_the_cost_of_a_draft_is_that_of_a_block(case: Case):
    cost = case.network.cost
    assert drafter_of(case).cost(1) == drafter_of(case).cost(15) == cost.base > 0
    assert cost.per_token >= 0
    assert cost.max_context is None


def test_the_cost_of_a_draft_grows_with_the_context(case: Case, monkeypatch: pytest.MonkeyPatch):
    drafter, rows = drafter_of(case), case.tapped(30)
    monkeypatch.setattr(case.network, "cost", DraftCost(0.5, 0.01, max_context=25))
    drafter.observe(seen(rows[:20], 0))
    assert drafter.cost(7) == pytest.approx(0.7)
    drafter.propose([1] * 21, 7)
    drafter.observe(seen(rows[20:22], 20))
    assert drafter.cost(7) == pytest.approx(0.72)
    drafter.observe(seen(rows[22:], 22))
    assert drafter.cost(7) == pytest.approx(0.75)


@pytest.mark.pairs
@pytest.mark.parametrize("cut", [30, 20, 17, 12, 5, 0])
@pytest.mark.parametrize("asked", [False, True])
def test_the_next_turn_has_the_context_before_the_truncation(case: Case, cut: int, asked: bool):
    shared, memory = case.shared(), DraftKV()
    rows, others = case.tapped(30, 1), case.tapped(25, 2)
    (first,) = create(case.spec, shared, RequestContext(memory))
    first.observe(seen(rows[:20], 0))
    if asked:
        first.propose([1] * 21, 7)
    first.observe(seen(rows[20:], 20))
    (cache,) = memory.values()
    cache.truncate(cut)
    (second,) = create(case.spec, shared, RequestContext(memory))
    if cut:
        assert_drafts(second.propose([1] * cut + [8], 7), case.expected(rows[:cut], 8))
    second.observe(seen(others, cut))
    both = np.concatenate([rows[:cut], others])
    assert_drafts(second.propose([1] * len(both) + [9], 7), case.expected(both, 9))
    assert len(shared.networks) == 1


def test_requests_share_no_context(case: Case):
    shared = case.shared()
    first, second = (create(case.spec, shared)[0] for _ in range(2))
    first.observe(seen(case.tapped(20), 0))
    assert not second.propose([1] * 21, 7).tokens


def test_a_spec_has_the_folder_and_options(case: Case):
    rows = case.tapped(100)
    (drafter,) = create(f"{case.spec},window=64", case.shared())
    assert isinstance(drafter, DFlashDrafter)
    for start, part in parts(rows, 50):
        drafter.observe(seen(part, start))
        drafter.propose([1] * (start + 50), 7)
    expected = case.expected(rows[36:], 8, 100, positions=range(36, 100))
    assert_drafts(drafter.propose([1] * 100 + [8], 7), expected)
