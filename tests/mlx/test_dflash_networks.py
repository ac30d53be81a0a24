"""DFlash computes what the paper says, in all its forms, compared with plain numpy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from paceline.decoding.sampling import Sampling
from paceline.decoding.types import ComputedBlock, Proposal
from paceline.drafters import DraftKV, RequestContext, create
from paceline.drafters.draft_sampling import DraftSampler
from paceline_mlx.heads.context import DraftCost
from paceline_mlx.heads.dflash.drafter import DFlashDrafter
from support.dflash import Drafted, parts
from support.networks import (
    FIRST_TOKENS,
    WAYS,
    Case,
    MakeCase,
    assert_same,
    prefilled,
    seen,
    shared,
)

pytestmark = pytest.mark.mlx

# -- what a network computes -----------------------------------------------------------------------


@pytest.mark.pairs
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [0, 1, 100])
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


def test_a_sampler_picks_from_the_logits_of_each_row(form: Case):
    rows = form.tapped(30)
    same = []
    for temperature in (0.5, 1.0):
        sampler = DraftSampler(Sampling(temperature=temperature, seed=5), 0, 320)
        for token in FIRST_TOKENS:
            network = form.network
            drafts, chances = network.draft(
                network.new_cache(), token, 30, rows, 0, sampler=sampler
            )
            logits = form.expected(rows, token).logits.astype(np.float32)
            expected = [sampler.pick(row, 31 + at) for at, row in enumerate(logits)]
            same += [a == b for a, (b, _) in zip(drafts, expected, strict=True)]
            assert np.mean(np.isclose(chances, [item for _, item in expected], rtol=1e-3)) > 0.8
            assert all(type(item) is int for item in drafts)
    assert np.mean(same) > 0.99


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
@pytest.mark.parametrize("window", [1, 64, 300])
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


# -- drafting with it ------------------------------------------------------------------------------


def drafter_of(case: Case) -> DFlashDrafter:
    return DFlashDrafter(case.network, case.network.new_cache(), Sampling(), 0)


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


def test_only_kept_rows_become_context(case: Case):
    drafter, rows = drafter_of(case), case.tapped(20)
    wrong = case.tapped(8, seed=9)
    drafter.observe(seen(rows[:12], 0))
    drafter.propose([1] * 13, 7)
    drafter.observe(seen(np.concatenate([rows[12:15], wrong]), 12, kept=3))
    drafter.observe(seen(np.concatenate([rows[15:], wrong]), 15, kept=5))
    assert_drafts(drafter.propose([1] * 20 + [8], 7), case.expected(rows, 8))


def test_an_engine_may_overwrite_its_taps_after_observe(case: Case):
    drafter, rows = drafter_of(case), case.tapped(12)
    shown = seen(rows.copy(), 0)
    drafter.observe(shown)
    for array in shown.taps.values():
        array[:] = np.nan
    assert_drafts(drafter.propose([1] * 12 + [8], 7), case.expected(rows, 8))


@pytest.mark.parametrize("cut", [1000, 512])
def test_a_long_prompt_is_prefilled_in_chunks(case: Case, cut: int):
    cache = case.network.new_cache()
    drafter, rows = DFlashDrafter(case.network, cache, Sampling(), 0), case.tapped(1000)
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
@pytest.mark.parametrize("cut", [30, 20, 12, 0])
@pytest.mark.parametrize("asked", [False, True])
def test_the_next_turn_has_the_context_before_the_truncation(case: Case, cut: int, asked: bool):
    resources, memory = shared(), DraftKV()
    rows, others = case.tapped(30, 1), case.tapped(25, 2)
    (first,) = create(case.spec, resources, RequestContext(memory))
    first.observe(seen(rows[:20], 0))
    if asked:
        first.propose([1] * 21, 7)
    first.observe(seen(rows[20:], 20))
    (cache,) = memory.values()
    cache.truncate(cut)
    (second,) = create(case.spec, resources, RequestContext(memory))
    if cut:
        assert_drafts(second.propose([1] * cut + [8], 7), case.expected(rows[:cut], 8))
    second.observe(seen(others, cut))
    both = np.concatenate([rows[:cut], others])
    assert_drafts(second.propose([1] * len(both) + [9], 7), case.expected(both, 9))
    assert len(resources.heads) == 1


def test_a_spec_has_the_folder_and_options(case: Case):
    rows = case.tapped(100)
    (drafter,) = create(f"{case.spec},window=64", shared())
    assert isinstance(drafter, DFlashDrafter)
    for start, part in parts(rows, 50):
        drafter.observe(seen(part, start))
        drafter.propose([1] * (start + 50), 7)
    expected = case.expected(rows[36:], 8, 100, positions=range(36, 100))
    assert_drafts(drafter.propose([1] * 100 + [8], 7), expected)
