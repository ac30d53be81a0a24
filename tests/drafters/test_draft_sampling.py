"""A drafter's picks follow the target's: equal rows, equal tokens; similar rows, mostly."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.decoding.sampling import Sampler, Sampling
from paceline.drafters.draft_sampling import DraftSampler

VOCAB = 64


def rows(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (count, VOCAB)).astype(np.float32)


@settings(max_examples=60)
@given(
    how=st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.2, 0.8, 1.0]),
        top_k=st.sampled_from([0, 5]),
        top_p=st.sampled_from([0.7, 1.0]),
        min_p=st.sampled_from([0.0, 0.1]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        logit_bias=st.sampled_from([{}, {3: 2.0}]),
        seed=st.integers(0, 9),
    ),
    seed=st.integers(0, 99),
)
def test_equal_rows_give_the_targets_pick(how: Sampling, seed: int):
    prompt = [1, 2, 3]
    target, drafter = Sampler(how, prompt, VOCAB), DraftSampler(how, len(prompt), VOCAB)
    text = list(prompt)
    for row in rows(12, seed):
        # A draft that is rejected, in between, changes nothing.
        drafter.follow([*text, 7, 7, 7])
        drafter.follow(text)
        token = target.pick(row, len(text))
        drafted, probability = drafter.pick(row, len(text))
        assert drafted == token
        assert 0 < probability <= 1
        target.push(token)
        text.append(token)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_a_reduced_vocabulary_samples_like_a_masked_full_one(temperature: float):
    tokens = np.arange(3, VOCAB, 4)
    drafter = DraftSampler(Sampling(temperature=temperature, top_p=0.9, top_k=9), 0, VOCAB)
    for at, row in enumerate(rows(50, 7)):
        whole = np.full(VOCAB, -1e9, np.float32)
        whole[tokens] = row[tokens]
        assert drafter.pick(row[tokens], at, tokens) == drafter.pick(whole, at)


def test_a_bias_outside_the_drafters_vocabulary_is_ignored():
    how = Sampling(logit_bias={VOCAB + 5: 9.0, 4: 99.0})
    assert DraftSampler(how, 0, VOCAB).pick(rows(1, 0)[0], 0)[0] == 4


@pytest.mark.parametrize(("temperature", "distance"), [(0.5, 1.0), (1.0, 0.3)])
def test_acceptance_is_near_the_theoretical_maximum(temperature: float, distance: float):
    # No coupling of two samples agrees more often than 1 - TV; this one at least by (1 - TV) /
    # (1 + TV) (Daliri, Musco and Suresh 2024, theorem 3), an independent argmax far less.
    how = Sampling(temperature=temperature, seed=3)
    target, drafter = Sampler(how, (), VOCAB), DraftSampler(how, 0, VOCAB)
    given_rows = rows(3000, 1)
    noise = np.random.default_rng(2).normal(0, distance, given_rows.shape).astype(np.float32)
    drafts = given_rows + noise
    agreed = argmax_agreed = 0
    lower, upper = [], []
    for at, (row, draft) in enumerate(zip(given_rows, drafts, strict=True)):
        token = target.pick(row, at)
        agreed += drafter.pick(draft, at)[0] == token
        argmax_agreed += int(draft.argmax()) == token
        one, other = (np.exp((item - item.max()) / temperature) for item in (row, draft))
        distance_tv = np.abs(one / one.sum() - other / other.sum()).sum() / 2
        lower.append((1 - distance_tv) / (1 + distance_tv))
        upper.append(1 - distance_tv)
    spread = 3 * math.sqrt(0.25 / len(given_rows))
    share = agreed / len(given_rows)
    assert np.mean(lower) - spread < share < np.mean(upper) + spread
    assert share > argmax_agreed / len(given_rows) + 0.02


def test_the_acceptance_estimate_ranks_drafts_correctly():
    # Drafts that were estimated as more likely are accepted more often.
    how = Sampling(temperature=1.0, seed=4)
    target, drafter = Sampler(how, (), VOCAB), DraftSampler(how, 0, VOCAB)
    given_rows = rows(3000, 5)
    noise = np.random.default_rng(6).normal(0, 1, given_rows.shape).astype(np.float32)
    results = []
    for at, (row, draft) in enumerate(zip(given_rows, given_rows + noise, strict=True)):
        token, estimate = drafter.pick(draft, at)
        results.append((estimate, token == target.pick(row, at)))
    results.sort()
    thirds = [np.mean([hit for _, hit in results[at : at + 1000]]) for at in (0, 1000, 2000)]
    assert thirds[0] + 0.1 < thirds[1] < thirds[2] - 0.1
