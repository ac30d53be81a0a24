"""Picks of tokens from rows, and their logprobs."""

import math
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.decoding import sampling
from paceline.decoding.sampling import Sampler, Sampling, exponentials, noise_key, token_logprob


def row(*logits: float) -> np.ndarray:
    return np.array(logits, np.float32)


def sampler(
    *, prompt: Sequence[int] = (), vocab_size: int = 8, answer: Sequence[int] = (), **how: object
) -> Sampler:
    instance = Sampler(Sampling(**how), prompt, vocab_size)
    for token in answer:
        instance.push(token)
    return instance


def picked(sampler: Sampler, logits: np.ndarray, positions: range = range(200)) -> set[int]:
    return {sampler.pick(logits, position) for position in positions}


# Written down when paceline 0.1.0 was: (seed, position, key), and the numbers of the tail and of
# tokens 0, 1 and 49151.
GOLDEN = [
    (
        0,
        0,
        2271152774672154522,
        [0.8940873559679, 2.4133763512904, 0.7045547639828, 0.8690263641568],
    ),
    (
        0,
        1,
        10748397194273482063,
        [0.7459408752105, 0.8637942340394, 1.3234442097604, 0.4119507918360],
    ),
    (
        42,
        1000,
        13137562977172310887,
        [0.1699617026575, 0.8849247861407, 1.3424366396659, 0.4051832737324],
    ),
    (
        2**64 - 1,
        2**32,
        5603259091148282353,
        [1.342890304815, 0.266863989422, 1.603014345051, 0.635436958948],
    ),
]


@pytest.mark.parametrize(("seed", "position", "key", "numbers"), GOLDEN)
def test_a_positions_random_numbers_are_the_same_on_every_machine(
    seed: int, position: int, key: int, numbers: list[float]
):
    # Answers that users made with a seed must come out again with the next version.
    assert noise_key(seed, position) == key
    tokens = np.array([-1, 0, 1, 49151])
    assert exponentials(key, tokens) == pytest.approx(numbers, rel=1e-11)
    # Whichever other tokens are asked for.
    assert exponentials(key, tokens[2:])[0] == exponentials(key, tokens)[2]


def test_a_pick_depends_only_on_row_history_and_position():
    # Other picks before or in between, as for rejected draft tokens, do not matter.
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 2, (30, 8)).astype(np.float32)
    how = {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
    plain, drafting = sampler(seed=3, **how), sampler(seed=3, **how)
    for position, logits in enumerate(rows):
        for ahead in range(position + 1, min(position + 4, 30)):
            drafting.pick(rows[ahead], ahead)
        token = plain.pick(logits, position)
        # Nor does the row's place in memory.
        block = np.zeros((3, 8), np.float32)
        block[1] = logits
        assert drafting.pick(block[1], position) == token
        plain.push(token)
        drafting.push(token)


def test_pick_does_not_modify_the_row():
    logits = row(1, 2, 3, 4, 5, 6, 7, 8)
    logits.flags.writeable = False
    sampler(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1).pick(logits, 0)
    sampler(
        repetition_penalty=2.0, presence_penalty=1.0, logit_bias={0: 1.0}, prompt=[1], answer=[2]
    ).pick(logits, 0)


CHI_SQUARE_999 = 24.32
"""99.9 % quantile for 7 degrees of freedom. The seeds are fixed: it holds always or never."""


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("varied", ["positions", "seeds"])
def test_token_frequencies_follow_the_softmax(temperature: float, varied: str):
    logits = row(1.5, 1.0, 0.5, 0.0, 0.0, -0.5, 0.2, 1.2)
    draws = 4000
    if varied == "positions":
        one = sampler(temperature=temperature, seed=11)
        tokens = [one.pick(logits, position) for position in range(draws)]
    else:
        tokens = [sampler(temperature=temperature, seed=s).pick(logits, 7) for s in range(draws)]
    weights = np.exp(logits.astype(np.float64) / temperature)
    expected = draws * weights / weights.sum()
    seen = np.bincount(tokens, minlength=8)
    assert ((seen - expected) ** 2 / expected).sum() < CHI_SQUARE_999


def kept(weight: Sequence[float], how: Sampling) -> tuple[list[int], float]:
    ranked = sorted(range(len(weight)), key=lambda token: -weight[token])
    margin = 1.0
    if how.top_k:
        least = weight[ranked[: how.top_k][-1]]
        ranked = [token for token in ranked if weight[token] >= least]
    if how.top_p < 1:
        total, mass, least = sum(weight[token] for token in ranked), 0.0, 0.0
        for token in ranked:
            margin = min(margin, abs(mass / total - how.top_p))
            if mass < how.top_p * total:
                mass, least = mass + weight[token], weight[token]
        # Tokens that tie with the last one needed stay.
        ranked = [token for token in ranked if weight[token] >= least]
    if how.min_p:
        margin = min([margin, *(abs(weight[token] - how.min_p) for token in ranked)])
        ranked = [token for token in ranked if weight[token] >= how.min_p]
    return sorted(ranked), margin


@settings(max_examples=300)
@given(
    # Quarters, so that ties are frequent.
    logits=st.lists(st.integers(-8, 8).map(lambda x: x / 4), min_size=3, max_size=12),
    how=st.builds(
        Sampling,
        temperature=st.sampled_from([0.5, 1.0, 2.0]),
        top_k=st.integers(0, 6) | st.just(12),
        top_p=st.sampled_from([0.3, 0.5, 0.7, 0.8, 0.9, 0.99, 1.0]),
        min_p=st.sampled_from([0.0, 0.0, 0.03, 0.4, 0.99]),
        seed=st.integers(0, 99),
    ),
)
def test_sampling_filters_follow_their_definitions(logits: list[float], how: Sampling):
    weight = [math.exp((x - max(logits)) / how.temperature) for x in logits]
    tokens, margin = kept(weight, how)
    assume(margin > 1e-5)  # float32 may fall on the other side
    one = Sampler(how, (), len(logits))
    for position in range(40):
        # The first arrival of a race: each kept token's rate is its weight.
        numbers = exponentials(noise_key(how.seed, position), np.array(tokens))
        arrivals = numbers / [weight[token] for token in tokens]
        first, second = np.sort([*arrivals, math.inf])[:2]
        if second - first > 1e-5 * first:
            assert one.pick(row(*logits), position) == tokens[int(arrivals.argmin())]


def test_the_tail_of_the_distribution_is_sampled_at_its_probability():
    # Four tokens just within and thousands beyond the window that is looked at first.
    size, beyond = 20_004, 20_000
    logits = np.full(size, -10.5, np.float32)
    logits[:4] = [0, -1, -2, -9.9]
    one = sampler(temperature=1.0, seed=8, vocab_size=size)
    draws = 4000
    tokens = np.array([one.pick(logits, position) for position in range(draws)])
    weights = np.exp(logits.astype(np.float64))
    shares = np.array([*weights[:3], weights[3] + weights[4:].sum()]) / weights.sum()
    seen = np.bincount(np.minimum(tokens, 3), minlength=4)
    assert ((seen - draws * shares) ** 2 / (draws * shares)).sum() < 16.27  # 99.9 %, 3 degrees
    tail = tokens[tokens >= 4]
    # Evenly over all of it.
    quarters = np.bincount((tail - 4) * 4 // beyond, minlength=4)
    assert ((quarters - len(tail) / 4) ** 2 / (len(tail) / 4)).sum() < 16.27


@settings(max_examples=300)
@given(
    data=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.5, 3.0, 6.0, 12.0]),
    lead=st.sampled_from([0.0, 8.0, 18.0]),
    far=st.sampled_from([10.5, 12.0, 20.0]),
    how=st.builds(
        Sampling,
        temperature=st.sampled_from([1e-4, 0.3, 0.8, 1.0, 2.5]),
        top_k=st.sampled_from([0, 0, 1, 40, 1999, 2000, 3000]),
        top_p=st.sampled_from([1.0, 1.0, 0.01, 0.9, 0.999999, 1 - 1e-15]),
        min_p=st.sampled_from([0.0, 0.0, 1e-12, 0.05]),
        seed=st.integers(0, 99),
    ),
)
def test_the_truncated_first_pass_changes_no_pick(
    data: int, spread: float, lead: float, far: float, how: Sampling
):
    rng = np.random.default_rng(data)
    logits = (spread * rng.normal(size=2000)).astype(np.float32)
    logits[rng.integers(2000)] += lead
    logits[rng.random(2000) < 0.1] = -np.inf  # as under a grammar
    scaled = (logits - logits.max()) / np.float32(how.temperature)
    for position in range(5):
        key = noise_key(how.seed, position)
        whole = sampling._pick(scaled, np.arange(2000), how, key, 0.0)
        assert whole is not None
        with patch.object(sampling, "_FAR", far):
            token, scores = sampling._sample(logits, how, position)
        assert token == whole[0]
        assert np.array_equal(scores, whole[1])


def test_a_masked_token_is_never_sampled():
    logits = row(-math.inf, 0, -math.inf, 0, -math.inf)
    for how in ({}, {"top_k": 4}, {"top_p": 0.99}, {"min_p": 0.001}):
        assert picked(sampler(temperature=1.0, **how), logits) == {1, 3}


def test_the_nucleus_of_a_flat_distribution_exceeds_the_window():
    # One likely token; the many unlikely ones hold nearly half of the mass together.
    size = 30_000
    logits = np.full(size, -10.5, np.float32)
    logits[7] = 0
    assert picked(sampler(temperature=1.0, top_p=0.1, vocab_size=size), logits) == {7}
    # Equally likely, so all of them are in, and hardly one comes twice.
    assert len(picked(sampler(temperature=1.0, top_p=0.9, vocab_size=size), logits)) > 50


@pytest.mark.parametrize(
    ("temperature", "tokens"), [(0.0, {1}), (1e-6, {1}), (9.9e-6, {1}), (1e-5, {1, 2, 4})]
)
def test_greedy_picks_the_first_of_equally_likely_tokens(temperature: float, tokens: set[int]):
    # Dividing by so little would overflow; the tie must fall the same way everywhere.
    how = sampler(temperature=temperature, top_p=0.5 if len(tokens) == 1 else 1.0, seed=5)
    assert picked(how, row(1, 4, 4, 2, 4)) == tokens
    assert Sampling(temperature=temperature).greedy == (len(tokens) == 1)


def greedy_after(logits: np.ndarray, **how: object) -> int:
    return sampler(**how).pick(logits, 0)


def test_penalties_in_a_long_response_follow_its_counts():
    """The response has more distinct tokens than are counted at first."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 3, 2000).astype(np.float32)
    prompt, answer = rng.integers(0, 2000, 300).tolist(), rng.integers(0, 2000, 900).tolist()
    how = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    expected = logits.copy()
    for token in {*prompt, *answer}:
        expected[token] *= 1 / 1.3 if expected[token] > 0 else 1.3
    for token in {*answer}:
        expected[token] -= 0.5 + 0.25 * answer.count(token)
    ranks = np.argsort(-expected)[:50].tolist()
    one = sampler(prompt=prompt, answer=answer, vocab_size=2000, **how, temperature=0)
    best = []
    for _ in ranks:
        best.append(one.pick(logits, 0, banned=best))
    assert best == ranks


def test_penalties_and_bias_apply_in_the_documented_order():
    # 4 / 2 - 1 - 0.5 + 0.2 = 0.7 for token 0. The repetition penalty last would give 1.35, the
    # bias before it 0.6; token 1 lies between, so another order picks another token.
    how = {
        "repetition_penalty": 2.0,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "logit_bias": {0: 0.2},
        "answer": [0],
    }
    assert greedy_after(row(4.0, 0.69), **how) == 0
    assert greedy_after(row(4.0, 0.71), **how) == 1


ROWS = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40)


def reference(row: np.ndarray) -> np.ndarray:
    wide = np.exp(row.astype(np.longdouble) - row.max())
    result: np.ndarray = np.log(wide / wide.sum()).astype(np.float64)
    return result


@given(ROWS, st.data())
def test_logprobs_are_the_log_softmax(values: list[float], data: st.DataObject):
    row = np.array(values, np.float32)
    token = data.draw(st.integers(0, len(row) - 1))
    top = data.draw(st.integers(0, len(row) + 2))
    result = token_logprob(row, token, top)
    expected = reference(row)
    assert result.token == token
    assert result.logprob == pytest.approx(expected[token], abs=1e-9)
    order = sorted(range(len(row)), key=lambda item: (-row[item], item))[:top]
    assert [entry for entry, _ in result.top] == order
    assert [logprob for _, logprob in result.top] == pytest.approx(expected[order], abs=1e-9)


def test_the_logprob_of_a_masked_token_is_minus_infinity():
    logprob = token_logprob(np.array([0, -np.inf, 0], np.float32), 1, 3)
    assert logprob.logprob == -np.inf
    assert logprob.top[2] == (1, -np.inf)
