"""Costs of longer blocks are corrected by the calls of answers, relative to plain decoding's."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engines.profile import CostProfile, known_profile, mark_outdated, store_profile
from paceline.engines.profile_watch import CostsInUse
from support.toy import ToyEngine

SECONDS = {1: 1.0, 2: 1.0, 4: 1.2, 8: 1.2, 16: 2.2}
PROFILE = CostProfile(
    SECONDS, True, 0.0, 256, {rows: 2 * value for rows, value in SECONDS.items()}, 2304
)
Call = tuple[int, int, float]


def answer(factors: Mapping[int, float], speed: float = 1.0, count: int = 16) -> list[Call]:
    """Calls of `count` blocks of each T, which take these factors of the profile's seconds."""
    cost = PROFILE.cost.at_context(256)
    return [(rows, 300, cost(rows) * by * speed) for rows, by in factors.items()] * count


@given(st.lists(st.floats(0.2, 5.0), min_size=40, max_size=40), st.floats(0.6, 1.8))
def test_a_correction_converges_whatever_the_machines_speed_is(speeds: list[float], factor: float):
    in_use, profile = CostsInUse(PROFILE), PROFILE
    for speed in speeds:
        corrections = in_use.add(answer({1: 1.0, 2: 1.0, 8: factor}, speed))
        profile = profile if corrections is None else replace(profile, corrections=corrections)
    assert profile.cost(2) == PROFILE.cost(2)
    assert profile.cost(8) == pytest.approx(max(PROFILE.cost(8) * factor, 1.0), rel=0.09)
    assert profile.cost(16) / profile.cost(8) == pytest.approx(2.2 / max(1.2, 1 / factor), rel=0.09)


def test_a_busy_call_now_and_then_hardly_changes_a_correction():
    rng, in_use, profile = Random(0), CostsInUse(PROFILE), PROFILE
    for _ in range(40):
        calls = answer({1: 1.0, 3: 1.0, 8: 1.0, 12: 1.0})
        noisy = [(rows, at, took * (1 + 4 * (rng.random() < 0.2))) for rows, at, took in calls]
        corrections = in_use.add(noisy)
        profile = profile if corrections is None else replace(profile, corrections=corrections)
    assert all(abs(by - 1) < 0.1 for by in profile.corrections.values())


def test_costs_at_a_longer_context_are_corrected_alike():
    profile = replace(PROFILE, corrections={4: 1.5})
    assert profile.cost.at_context(2304)(4) == pytest.approx(2.4 * 1.5)
    assert profile.cost.at_context(2304)(2) == PROFILE.cost.at_context(2304)(2)


@pytest.mark.parametrize(
    "calls",
    [
        [],
        answer({8: 2.0}),
        answer({1: 1.0, 8: 2.0}, count=7),
        answer({1: 1.0, 8: 1.02}),
        [(1, 300, 1.0), (64, 300, 9.0)] * 16,
        [(1, 300, 1.0), (8, 9000, 9.0)] * 16,
    ],
    ids=["no calls", "no plain ones", "few", "as in the profile", "longer blocks", "far context"],
)
def test_calls_that_prove_nothing_correct_nothing(calls: list[Call]):
    assert CostsInUse(PROFILE).add(calls) is None


def test_a_correction_has_limits_and_is_continued_by_the_next_process():
    profile = PROFILE
    for _ in range(4):
        in_use = CostsInUse(profile)
        for _ in range(40):
            profile = replace(
                profile, corrections=in_use.add(answer({1: 1.0, 8: 9.0})) or profile.corrections
            )
    assert profile.corrections[8] == 2.0
    in_use = CostsInUse(profile)
    for _ in range(40):
        profile = replace(
            profile, corrections=in_use.add(answer({1: 1.0, 8: 1.5})) or profile.corrections
        )
    assert profile.corrections[8] == pytest.approx(1.5, rel=0.05)


def test_a_stored_correction_is_read_again_and_takes_no_mark_away(tmp_path: Path):
    engine = ToyEngine()
    store_profile(engine, "model", tmp_path, PROFILE)
    assert mark_outdated(engine, "model", tmp_path, "slow")
    corrected = replace(PROFILE, corrections={8: 1.25})
    store_profile(engine, "model", tmp_path, corrected, measured=False)
    assert known_profile(engine, "model", tmp_path) == (corrected, "slow")
    store_profile(engine, "model", tmp_path, PROFILE)
    assert known_profile(engine, "model", tmp_path) == (PROFILE, "")


@pytest.mark.parametrize("damaged", [0.0, -1.0, float("nan")])
def test_a_profile_with_an_impossible_correction_is_not_used(tmp_path: Path, damaged: float):
    engine = ToyEngine()
    store_profile(engine, "model", tmp_path, replace(PROFILE, corrections={8: damaged}))
    assert known_profile(engine, "model", tmp_path) == (None, "")
