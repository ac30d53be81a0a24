"""Batches ask their drafters while that is worth its time, from made-up gains and prices."""

import random

import pytest

from paceline.runtime.batching.batch import DraftGate

CALLS = 2000


def asked(gains: list[float], price: float) -> list[int]:
    """The calls that ask, where asking brings these gains at this price."""
    gate, calls = DraftGate(), []
    for call, gain in enumerate(gains):
        if gate.asks():
            gate.learn(gain, price)
            calls.append(call)
    return calls


@pytest.mark.parametrize(("price", "burst"), [(0.03, 8), (0.2, 8), (0.2, 1), (0.5, 1), (1.0, 1)])
@pytest.mark.parametrize("worth", [0.0, 0.5, 2.0, 4.0])
def test_drafts_are_asked_for_if_they_pay_and_seldom_if_not(price: float, burst: int, worth: float):
    """`worth` is the mean gain over the price; one call in `burst` has all of the gain."""
    drawn = random.Random(int(100 * price))
    gains = [burst * worth * price * (drawn.random() < 1 / burst) for _ in range(CALLS)]
    always = sum(gain - price for gain in gains)
    gained = sum(gains[call] - price for call in asked(gains, price))
    if worth > 1:
        assert gained > 0.8 * always
    else:
        assert always <= gained < 0
        assert gained > -2 / 32 * CALLS


def test_drafts_that_begin_to_pay_are_asked_for_soon_and_those_that_cease_no_more():
    calls = asked([0.0] * 300 + [2.0] * 300 + [0.0] * 300, 1.0)
    assert sum(300 <= call < 600 for call in calls) > 260
    assert sum(call < 300 or call >= 600 for call in calls) < 60
