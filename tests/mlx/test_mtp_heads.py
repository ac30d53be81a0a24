"""The heads of `mtp` compute what the papers say, compared with plain numpy."""

from collections.abc import Callable

import numpy as np
import pytest

from paceline.decoding.sampling import Sampling
from paceline.decoding.types import ComputedBlock, Proposal
from paceline.drafters import DraftKV, RequestContext, create
from paceline.drafters.draft_sampling import DraftSampler
from paceline_mlx.heads.context import DraftCost
from paceline_mlx.heads.mtp import drafter as module
from paceline_mlx.heads.mtp.drafter import MtpDrafter
from paceline_mlx.heads.mtp.network import ChainCost
from support.heads import DRAFTS, FORMS, HeadCase, Text, assert_chain
from support.mtp import Chain
from support.networks import shared

pytestmark = pytest.mark.mlx

MakeHead = Callable[[str], HeadCase]


@pytest.fixture(scope="module")
def make_head(tmp_path_factory: pytest.TempPathFactory) -> MakeHead:
    cases: dict[str, HeadCase] = {}

    def make(form: str) -> HeadCase:
        if form not in cases:
            cases[form] = HeadCase(FORMS[form], tmp_path_factory.mktemp("head"))
        return cases[form]

    return make


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest, make_head: MakeHead) -> HeadCase:
    return make_head(request.param)


@pytest.fixture(scope="module")
def case(make_head: MakeHead) -> HeadCase:
    return make_head("eagle3")


@pytest.fixture(autouse=True)
def whole_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random heads give every token a small probability."""
    monkeypatch.setattr(module, "LEAST_CHANCE", 0.0)


# -- what a head computes --------------------------------------------------------------------------


def at_once(case: HeadCase, text: Text) -> Chain:
    return case.head.draft(case.head.new_cache(), text.rows(), DRAFTS, 0.0)


def in_parts(case: HeadCase, text: Text) -> Chain:
    cache, count = case.head.new_cache(), len(text.hidden)
    for start in range(0, count - 1, 7):
        case.head.prefill(cache, text.rows(start, min(start + 7, count - 1)))
    return case.head.draft(cache, text.rows(count - 1), DRAFTS, 0.0)


def while_drafting(case: HeadCase, text: Text) -> Chain:
    cache, start, count = case.head.new_cache(), 0, len(text.hidden)
    for end in (*range(3, count, 3), count):
        drafts = case.head.draft(cache, text.rows(start, end), 1 + end % 4 if end < count else 5, 0)
        start = end
    return drafts


@pytest.mark.pairs
@pytest.mark.parametrize("way", [at_once, in_parts, while_drafting])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_a_chain_equals_the_reference(
    form: HeadCase, length: int, way: Callable[[HeadCase, Text], Chain]
):
    text = form.text(length)
    assert_chain(way(form, text), form.expected(text))


@pytest.mark.pairs
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_sampler_picks_each_draft_of_a_chain(form: HeadCase, temperature: float):
    text = form.text(12)
    sampler = DraftSampler(Sampling(temperature=temperature, seed=3), 0, 320)
    cache = form.head.new_cache()
    drafts, _ = form.head.draft(cache, text.rows(), DRAFTS, 0.0, sampler=sampler)
    vocab = None if form.form.drafted is None else np.array(form.form.drafted)
    # Each draft is picked after those that were drafted, at its own position.
    expected = form.expected(text, chosen=drafts).logits
    for at, (token, logits) in enumerate(zip(drafts, expected, strict=True)):
        assert token == sampler.pick(logits.astype(np.float32), 13 + at, vocab)[0]


def test_the_reference_depends_on_all_its_inputs(form: HeadCase):
    # Without this, a head that ignores its context would pass the test above.
    text = form.text(12)
    expected = form.expected(text)
    others = [
        Text(text.hidden[::-1], text.tokens),
        Text(text.hidden + np.eye(12)[5][:, None], text.tokens),
        Text(text.hidden, [*text.tokens[:6], 9, *text.tokens[7:]]),
        Text(text.hidden, [*text.tokens[:-1], 9]),
    ]
    places = [*range(6), *range(10, 16)]
    result = [form.expected(other) for other in others] + [form.expected(text, positions=places)]
    for other in result:
        assert not np.allclose(other.logits[0], expected.logits[0], rtol=1e-3)
        assert not np.allclose(other.logits[-1], expected.logits[-1], rtol=1e-3)
    assert (
        len({token for seed in range(3) for token in form.expected(form.text(12, seed)).tokens}) > 1
    )


def test_a_chain_ends_where_it_is_likely_wrong(form: HeadCase):
    text = form.text(9)
    expected = form.expected(text, 6)
    least = float(np.prod(expected.chances[:3])) * 1.01
    tokens, chances = form.head.draft(form.head.new_cache(), text.rows(), 6, least)
    assert (len(tokens), len(chances)) == (3, 3)


# -- drafting with it ------------------------------------------------------------------------------


def drafter_of(case: HeadCase, length: int = DRAFTS) -> MtpDrafter:
    return MtpDrafter(case.head, case.head.new_cache(), Sampling(), 0, length)


def assert_drafts(proposal: Proposal, expected: Chain) -> None:
    assert proposal.tokens
    assert (proposal.source, proposal.match) == ("mtp", 0)
    assert_chain((proposal.tokens, proposal.probabilities), expected)


def test_the_draft_is_empty_before_hidden_states_are_observed(case: HeadCase):
    drafter, text = drafter_of(case), case.text(3)
    assert drafter.propose(text.tokens, 7) == Proposal((), "mtp")
    drafter = drafter_of(case)
    drafter.observe(ComputedBlock(text.tokens[:3], 0, 3))
    assert not drafter.propose(text.tokens, 7).tokens, "an engine without taps"


def test_only_kept_rows_become_context(form: HeadCase):
    drafter, text = drafter_of(form), form.text(20)
    drafter.observe(text.seen(form.form, 0, 12))
    drafter.propose(text.tokens[:13], 7)
    drafter.observe(text.seen(form.form, 12, 15, wrong=5))
    drafter.observe(text.seen(form.form, 15, 20, wrong=2))
    assert_drafts(drafter.propose(text.tokens, 7), form.expected(text))


def test_an_engine_may_overwrite_its_taps_after_observe(case: HeadCase):
    drafter, text = drafter_of(case), case.text(12)
    shown = text.seen(case.form, 0, 12)
    drafter.observe(shown)
    for array in shown.taps.values():
        array[:] = np.nan
    assert_drafts(drafter.propose(text.tokens, 7), case.expected(text))


def test_a_long_prompt_is_prefilled_in_chunks(case: HeadCase):
    cache = case.head.new_cache()
    drafter, text = MtpDrafter(case.head, cache, Sampling(), 0, 2), case.text(1000)
    for start in range(0, 1000, 250):
        drafter.observe(text.seen(case.form, start, start + 250))
        assert cache.pending_count <= 750
    assert len(cache) == 750
    assert_drafts(drafter.propose(text.tokens, 7), case.expected(text, 2))


def test_a_prompt_may_begin_in_the_prefix_cache(form: HeadCase):
    drafter, text = drafter_of(form), form.text(12)
    drafter.observe(text.seen(form.form, 0, 12, shift=40))
    expected = form.expected(text, positions=range(40, 52))
    assert_drafts(drafter.propose([1] * 40 + text.tokens, 7), expected)


def test_observed_blocks_may_have_gaps(case: HeadCase):
    drafter, text = drafter_of(case), case.text(20)
    drafter.observe(text.seen(case.form, 0, 12))
    drafter.observe(text.seen(case.form, 12, 20, shift=48))
    # The token after the last row before the gap is not known: that row is left out.
    kept = [*range(11), *range(12, 20)]
    tokens = [*text.tokens[:12], *text.tokens[13:]]
    expected = case.expected(
        Text(text.hidden[kept], tokens), positions=[*range(11), *range(60, 68)]
    )
    context = [1] * 48 + text.tokens
    assert_drafts(drafter.propose(context, 7), expected)


@pytest.mark.pairs
@pytest.mark.parametrize("cut", [30, 20, 17, 0])
@pytest.mark.parametrize("asked", [False, True])
def test_the_next_turn_has_the_context_before_the_truncation(case: HeadCase, cut: int, asked: bool):
    resources, memory = shared(), DraftKV()
    text, others = case.text(30, 1), case.text(25, 2)
    (first,) = create(case.spec, resources, RequestContext(memory))
    first.observe(text.seen(case.form, 0, 20))
    if asked:
        first.propose(text.tokens[:21], 7)
    first.observe(text.seen(case.form, 20, 30))
    memory = memory.copy_prefix(cut) if cut % 2 else memory
    memory.truncate(cut)
    (second,) = create(case.spec, resources, RequestContext(memory))
    for at in (0, 10):
        second.observe(others.seen(case.form, at, at + (10, 15)[at > 0], shift=cut))
    # A row's token is the next one, which is another now. It can be replaced while it is pending.
    kept = list(range(cut))
    if asked and 0 < cut <= 20:
        kept.pop()
    hidden = np.concatenate([text.hidden[kept], others.hidden])
    whole = [*text.tokens[:cut], *others.tokens]
    following = [whole[at + 1] for at in [*kept, *range(cut, cut + 25)]]
    expected = case.expected(
        Text(hidden, [0, *following]), positions=[*kept, *range(cut, cut + 25)]
    )
    assert_drafts(second.propose(whole, 7), expected)
    assert len(resources.heads) == 1


def test_the_cost_is_that_of_chains_so_far(case: HeadCase, monkeypatch: pytest.MonkeyPatch):
    assert case.head.cost.first.base > 0
    monkeypatch.setattr(case.head, "cost", ChainCost(DraftCost(0.5, 0.01), 0.1))
    drafter, text = drafter_of(case), case.text(60)
    drafter.observe(text.seen(case.form, 0, 20))
    assert drafter.cost(7) == pytest.approx(0.7)
    for at in range(20, 60):
        drafter.propose(text.tokens[: at + 1], 7)
        drafter.observe(text.seen(case.form, at, at + 1))
    assert drafter.cost(7) == pytest.approx(0.5 + 0.6 + 0.4, abs=0.01)
    assert drafter.cost(2) == pytest.approx(0.5 + 0.6 + 0.1)
