"""The contract of every drafter, for any text and any history."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.decoding.types import ComputedBlock, Drafter, Proposal
from paceline.drafters import AnswerHistory, DrafterResources, KeptText, RequestContext
from paceline.drafters import create as create_for
from support.drafters import MATCHERS, SPECS

VOCABULARY = 6

KEPT = KeptText.count([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 3, 1], [5, 4] * 3 + [1] * 11], VOCABULARY)

# So few different tokens that everything repeats.
texts = st.lists(st.integers(0, VOCABULARY - 1), max_size=40)


class Growth(NamedTuple):
    """A step that extends the context, and its tokens as the drafters observe them."""

    tokens: list[int]
    rejected: list[int]
    logits_seed: int
    in_prompt: bool


growths = st.lists(
    st.builds(
        Growth,
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=7),
        st.lists(st.integers(0, VOCABULARY - 1), max_size=4),
        st.integers(0, 99),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@pytest.fixture(params=SPECS, scope="module")
def spec(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def shared(toy_table: Path) -> DrafterResources:
    history = AnswerHistory()
    history.add([0, 1, 2, 3, 4, 5, 0, 0, 1])
    history.add([5, 5, 4])
    return DrafterResources(vocab_size=VOCABULARY, history=history, shipped={"table": toy_table})


def create(spec: str, shared: DrafterResources | None = None) -> list[Drafter]:
    return create_for(spec, shared, RequestContext(kept=KEPT))


def contexts(drafters: list[Drafter], grown: list[Growth]) -> Iterator[list[int]]:
    context: list[int] = []
    for tokens, rejected, seed, in_prompt in grown:
        # A block is the last token and drafts; its result is the tokens of the kept rows.
        block = tokens if in_prompt else [*context[-1:], *tokens[:-1], *rejected]
        rows = 0 if in_prompt else len(block)
        logits = np.random.default_rng(seed).normal(size=(rows, VOCABULARY)).astype(np.float32)
        kept = min(len(tokens), len(block))
        computed = ComputedBlock(block, max(len(context) - (not in_prompt), 0), kept, logits)
        context += tokens
        for drafter in drafters:
            drafter.observe(computed)
        yield context


def proposals(drafters: list[Drafter], grown: list[Growth], limit: int) -> list[Proposal]:
    return [
        drafter.propose(context, limit)
        for context in contexts(drafters, grown)
        for drafter in drafters
    ]


@settings(max_examples=40)
@given(grown=growths, limit=st.integers(1, 20))
def test_proposals_respect_limit_and_vocabulary_and_follow_from_the_history(
    spec: str, shared: DrafterResources, grown: list[Growth], limit: int
):
    first = proposals(create(spec, shared), grown, limit)
    for proposal in first:
        assert len(proposal.tokens) <= limit
        assert all(token in range(VOCABULARY) for token in proposal.tokens)
        assert proposal.match >= 0
    assert proposals(create(spec, shared), grown, limit) == first


@settings(max_examples=40)
@given(grown=growths, limit=st.integers(1, 20))
def test_proposing_again_changes_neither_the_draft_nor_the_context(
    spec: str, shared: DrafterResources, grown: list[Growth], limit: int
):
    drafters = create(spec, shared)
    for context in contexts(drafters, grown):
        before = list(context)
        for drafter in drafters:
            first = drafter.propose(context, limit)
            kept = list(first.tokens)
            assert drafter.propose(context, limit) == first
            # A proposal does not change when the context grows.
            context.append(0)
            assert list(first.tokens) == kept
            context.pop()
        assert context == before


@settings(max_examples=40)
@given(text=texts, growth=st.integers(1, 7), limit=st.integers(1, 20))
def test_a_context_may_grow_by_any_number_of_tokens(
    spec: str, shared: DrafterResources, text: list[int], growth: int, limit: int
):
    leaping, stepping = create(spec, shared), create(spec, shared)
    for end in range(growth, len(text) + 1, growth):
        for seen in range(end - growth + 1, end):
            for drafter in stepping:
                drafter.propose(text[:seen], limit)
        for leaps, steps in zip(leaping, stepping, strict=True):
            assert leaps.propose(text[:end], limit) == steps.propose(text[:end], limit)


@pytest.mark.parametrize("spec", MATCHERS)
@pytest.mark.parametrize("context", [[], [3]], ids=["empty", "one token"])
def test_a_matcher_proposes_nothing_before_a_repetition(spec: str, context: list[int]):
    for drafter in create(spec):
        assert not drafter.propose(context, 4).tokens
        # And it starts from there as from any other context.
        grown = [*context, *[1, 2, 3, 4] * 4]
        assert list(drafter.propose(grown, 1).tokens) == [1]
