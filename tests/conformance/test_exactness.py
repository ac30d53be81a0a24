"""The promise: every drafter gives the tokens of plain decoding."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import cycle, product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.decoding.costs import CostTable
from paceline.decoding.policy import Fixed
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Repetition, Stopping
from paceline.decoding.types import Block, Drafter, FinishReason
from paceline.drafters import (
    AnswerHistory,
    DrafterResources,
    DraftModel,
    KeptText,
    RequestContext,
    create,
)
from paceline.drafters.ahead import AheadDrafter
from paceline.engines.base import Engine
from support.drafters import SPECS, Oracle, write_toy_table
from support.driver import POLICIES, Answer, answer, generation, run, total
from support.engines import ENGINES
from support.pairs import pairs
from support.toy import ToyEngine

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.4, seed=1),
    Sampling(temperature=1.0, seed=2),
    Sampling(temperature=1.6, seed=3),
    Sampling(temperature=0.9, top_k=5, seed=4),
    Sampling(temperature=1.0, top_p=0.7, seed=5),
    Sampling(temperature=1.2, min_p=0.05, seed=6),
    Sampling(repetition_penalty=1.2),
    Sampling(temperature=0.8, presence_penalty=0.6, frequency_penalty=1.5, seed=7),
    Sampling(
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.1,
        frequency_penalty=0.8,
        logit_bias={3: 2.0, 4: -5.0},
        seed=8,
    ),
    Sampling(temperature=1.0, seed=2**64 - 1),
]

TOKENS = 24


Plainly = Callable[..., Answer]


def prompt_of(engine: Engine, which: int) -> list[int]:
    """Prompts that repeat themselves a little, of different lengths."""
    rng = np.random.default_rng(100 + which)
    part = rng.integers(0, engine.vocab_size, 3 + which).tolist()
    return [*part, *rng.integers(0, engine.vocab_size, 2 + which % 5).tolist(), *part]


DRAFTERS = ["none", *SPECS, "model:itself", "suffix+model:itself"]


BLOCKS = range(2, 17)
RANDOM = [name for name in ENGINES if not name.startswith("toy")]
"""Models of random weights, whose calls take milliseconds: they see pairs, toys the product."""


def toy(engine: Engine) -> bool:
    return isinstance(engine, ToyEngine)


def drafters_of(name: str) -> Sequence[str]:
    """Return drafters for rules independent of the engine: a quarter per engine, all for a toy."""
    return DRAFTERS[RANDOM.index(name) % 4 :: 4] if name in RANDOM else DRAFTERS


@pytest.fixture
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["engine"])


def some(engine: Engine, cases: Sequence[Any]) -> Sequence[Any]:
    """Return the cases, or a tenth of them if forward passes are slower than the tested logic."""
    return cases if toy(engine) else cases[::10]


@pytest.fixture(scope="module")
def plainly(engine: Engine) -> Plainly:
    """Plain decoding's answer, alone on the engine, one row at a time."""
    known: dict[tuple[int, int], Answer] = {}

    def plain(prompt: int, sampling: int) -> Answer:
        key = prompt, sampling
        if key not in known:
            known[key] = answer(
                engine,
                prompt_of(engine, prompt),
                sampling=SAMPLINGS[sampling],
                stopping=Stopping(max_tokens=TOKENS),
            )
        return known[key]

    return plain


class Shared(NamedTuple):
    resources: DrafterResources
    kept: KeptText

    def create(self, spec: str) -> list[Drafter]:
        return create(spec, self.resources, RequestContext(kept=self.kept))


@pytest.fixture(scope="module")
def shared(engine: Engine, plainly: Plainly, tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """Answers to some of the prompts, as a process would have them from before, and tables."""
    answers = [plainly(prompt, 0).tokens for prompt in range(4)]
    history = AnswerHistory()
    for tokens in answers:
        history.add(tokens)
    table = write_toy_table(tmp_path_factory.mktemp("table"), answers, engine.vocab_size)
    resources = DrafterResources(
        vocab_size=engine.vocab_size,
        history=history,
        shipped={"table": table},
        # The engine drafts for itself: right where it is greedy, often wrong where it is sampled.
        open_model=lambda _: DraftModel(engine, CostTable({1: 0.01}), min_probability=0.3),
    )
    return Shared(resources, KeptText.count(answers, engine.vocab_size))


def test_responses_differ_between_prompts_sampling_options_and_seeds(plainly: Plainly):
    # Without this, an engine that always says the same would pass every test below.
    told = {tuple(plainly(prompt, sampling).tokens) for prompt in (0, 1) for sampling in range(11)}
    assert len(told) > 16


class Case(NamedTuple):
    """Drafting options, and the first sampling options of the sequences in a pass."""

    policy: str
    block: int
    sampling: int


PAIRS: dict[tuple[str, str], list[Case]] = defaultdict(list)
"""Engine and drafter -> a few cases; any two of all these meet in one engine or another."""
for name, spec, *case in pairs(RANDOM, DRAFTERS, list(POLICIES), BLOCKS, range(len(SAMPLINGS))):
    PAIRS[name, spec].append(Case(*case))
PRODUCT = [Case(policy, block, block % len(SAMPLINGS)) for policy in POLICIES for block in BLOCKS]


@pytest.mark.parametrize("spec", DRAFTERS)
def test_drafters_and_policies_change_no_token(
    engine: Engine, engine_name: str, plainly: Plainly, shared: Shared, spec: str
):
    ran = defaultdict(list)
    for policy, block, first in PAIRS[engine_name, spec] if engine_name in RANDOM else PRODUCT:
        # Several sequences share a call, every one with its own sampling and prompt length.
        count = 1 + block % (8 if toy(engine) else 3)
        asks = [(i % (8 if toy(engine) else 2), (first + i) % len(SAMPLINGS)) for i in range(count)]
        going = [
            generation(
                engine,
                prompt_of(engine, prompt),
                sampling=SAMPLINGS[sampling],
                stopping=Stopping(max_tokens=TOKENS),
                drafters=shared.create(spec),
                policy=POLICIES[policy](block),
            )
            for prompt, sampling in asks
        ]
        ran[policy] += going
        for (prompt, sampling), told in zip(asks, run(engine, going), strict=True):
            assert told == plainly(prompt, sampling), (
                f"{policy} {block=} {prompt=} {SAMPLINGS[sampling]}"
            )
    for counters in map(total, ran.values()):
        if spec == "none":
            assert counters.drafted == 0
        # Otherwise nothing was shown: some drafts must have stood, and some must have fallen.
        elif toy(engine):
            assert 0 < counters.accepted < counters.drafted
        elif spec == "model:itself":
            assert counters.drafted > 0


EVERY = (1, 2, 5, TOKENS)
"""A draft's every nth token is wrong; with the last, none is."""
REJECTED: dict[str, list[Any]] = defaultdict(list)
"""Engine -> a block, a sampling, and which tokens are wrong."""
for name, *case in pairs(RANDOM, BLOCKS, range(len(SAMPLINGS)), EVERY):
    REJECTED[name].append(case)
EVERYWHERE = [*product(BLOCKS, range(len(SAMPLINGS)), EVERY)]


def test_drafts_rejected_at_any_position_change_no_token(
    engine: Engine, engine_name: str, plainly: Plainly
):
    prompt = prompt_of(engine, 0)
    for block, sampling, every in REJECTED.get(engine_name, EVERYWHERE):
        expected = plainly(0, sampling)
        text = prompt + expected.tokens
        wrong_at = range(len(prompt) + every, len(text), every)
        one = generation(
            engine,
            prompt,
            sampling=SAMPLINGS[sampling],
            stopping=Stopping(max_tokens=TOKENS),
            drafters=[Oracle(text, wrong_at)],
            policy=Fixed(block),
        )
        assert run(engine, [one]) == [expected], f"{block=} {every=} {SAMPLINGS[sampling]}"
        if every == TOKENS:
            # All drafts were accepted, in the minimum number of forward passes for these tokens.
            assert one.counters.steps == -(-(TOKENS - 1) // block)
        if every == 1:
            assert one.counters.accepted == 0


@pytest.mark.parametrize("block", [2, 5, 16])
def test_drafting_ahead_changes_no_token(engine: Engine, plainly: Plainly, block: int):
    used = 0
    with ThreadPoolExecutor(1) as worker:
        for sampling in some(engine, range(len(SAMPLINGS))):
            prompt, expected = prompt_of(engine, 1), plainly(1, sampling)
            text = prompt + expected.tokens
            for every in (3, 7, TOKENS):
                oracle = Oracle(text, range(len(prompt) + every, len(text), every))
                ahead = AheadDrafter(oracle, worker)
                one = generation(
                    engine,
                    prompt,
                    sampling=SAMPLINGS[sampling],
                    stopping=Stopping(max_tokens=TOKENS),
                    drafters=[ahead],
                    policy=Fixed(block),
                )
                assert run(engine, [one]) == [expected], f"{every=} {SAMPLINGS[sampling]}"
                used += ahead.used
    assert used > 0


sampled = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 20]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-0.5, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.2]),
    logit_bias=st.dictionaries(st.integers(0, 40), st.sampled_from([-4.0, 3.0]), max_size=3),
    seed=st.integers(0, 2**64 - 1),
)


asked = st.lists(
    st.tuples(
        st.integers(0, 7),  # prompt
        sampled,
        st.sampled_from(DRAFTERS),
        st.sampled_from(sorted(POLICIES)),
        st.integers(1, 16),  # block
        st.integers(1, 9),  # prefill chunk
        st.integers(0, 12),  # arrival
        st.integers(1, 24),  # max_tokens
    ),
    min_size=1,
    max_size=8,
)


def test_requests_starting_and_ending_in_any_order_change_no_token(engine: Engine, shared: Shared):
    @settings(max_examples=40 if toy(engine) else 5)
    @given(asks=asked)
    def check(asks: list[tuple[Any, ...]]) -> None:
        come_and_go(engine, shared, asks)

    check()


def come_and_go(engine: Engine, shared: Shared, asks: list[tuple[Any, ...]]) -> None:
    expected, going = [], []
    for prompt, sampling, spec, policy, block, chunk, _, most in asks:
        common = {"sampling": sampling, "stopping": Stopping(max_tokens=most)}
        expected.append(answer(engine, prompt_of(engine, prompt), **common))
        drafters, chosen = shared.create(spec), POLICIES[policy](block)
        going.append(
            generation(
                engine,
                prompt_of(engine, prompt),
                drafters=drafters,
                policy=chosen,
                prefill_chunk=chunk,
                **common,
            )
        )
    assert run(engine, going, arrivals=[ask[6] for ask in asks]) == expected


FEW = Sampling(temperature=1.0, logit_bias={3: 60.0, 4: 60.0, 5: 60.0}, seed=1)
"""Leaves three tokens to pick from: such an answer soon repeats itself."""
LOOP = Repetition(max_pattern_size=4, min_count=3)


def test_a_response_ends_at_the_same_token_with_every_drafter(
    engine: Engine, engine_name: str, plainly: Plainly, shared: Shared
):
    prompt, whole = prompt_of(engine, 0), plainly(0, 0)
    string, place = whole.text[9:11], whole.tokens.index(whole.tokens[13]) + 1
    ends = [
        (SAMPLINGS[0], Stopping(max_tokens=11)),
        (SAMPLINGS[0], Stopping(stop_token_ids=frozenset(whole.tokens[13:14]))),
        (SAMPLINGS[0], Stopping(max_tokens=TOKENS, stop=(string,))),
        (FEW, Stopping(max_tokens=200, repetition=LOOP)),
    ]
    expected = [answer(engine, prompt, sampling=how, stopping=end) for how, end in ends]
    assert [one.tokens for one in expected[:2]] == [whole.tokens[:11], whole.tokens[:place]]
    assert expected[2].text == whole.text[: whole.text.index(string)]
    length, stop, repetition = FinishReason.LENGTH, FinishReason.STOP, FinishReason.REPETITION
    assert [one.finish_reason for one in expected] == [length, stop, stop, repetition]
    texts = [*[whole.tokens] * 3, expected[3].tokens]
    cases = [*product(["all right", *DRAFTERS], POLICIES, (2, 5, 16))]
    if not toy(engine):
        few = [("fixed", 8), ("adaptive", 2), ("kelly", 5), ("auto", 16)]
        specs = ["all right", *drafters_of(engine_name)]
        cases = [(spec, *case) for spec, case in zip(specs, cycle(few))]
    for spec, policy, block in cases:
        going = [
            generation(
                engine,
                prompt,
                sampling=how,
                stopping=end,
                drafters=[Oracle([*prompt, *told])] if spec == "all right" else shared.create(spec),
                policy=POLICIES[policy](block),
            )
            for (how, end), told in zip(ends, texts, strict=True)
        ]
        assert run(engine, going) == expected, f"{spec} {policy} {block=}"


def test_a_response_may_reach_the_end_of_the_context(
    engine: Engine, engine_name: str, shared: Shared
):
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, engine.vocab_size, engine.context_length - 20).tolist()
    expected = answer(engine, prompt)
    assert len(expected.tokens) == 20
    assert expected.finish_reason is FinishReason.LENGTH
    for spec in drafters_of(engine_name):
        told = answer(engine, prompt, drafters=shared.create(spec), policy=Fixed(16))
        assert told == expected, spec


@pytest.mark.parametrize("known", [1, 8, 33, 69, 70])
def test_a_partly_cached_prompt_gives_the_same_response(engine: Engine, known: int):
    rng = np.random.default_rng(6)
    prompt = rng.integers(0, engine.vocab_size, 70).tolist()
    expected = answer(engine, prompt, stopping=Stopping(max_tokens=TOKENS))
    with closing(engine.open()) as first:
        engine.step([(first, Block(prompt, 0, prefill=True))])
        first.commit(70)
        # The last prompt token is always run, so it need not be shared.
        with closing(first.fork(min(known, 69))) as sequence:
            one = generation(
                engine,
                prompt,
                cached=sequence.length,
                stopping=Stopping(max_tokens=TOKENS),
                drafters=create("suffix+ngram:min=1"),
            )
            while not one.finished:
                result = engine.step([(sequence, one.next_block())])
                best = result.best[0] if result.best else None
                sequence.commit(one.accept(result.logits[0], best=best).accepted_rows)
            assert one.answer == expected.tokens
