"""Criteria of `golden`: the first position, small rows, factors, experts, near ties."""

import numpy as np
import pytest

from paceline_coreml.golden import compare
from paceline_coreml.golden.compare import Nearness, centred, cosines
from paceline_coreml.golden.texts import Text, rows_of

pytestmark = pytest.mark.coreml

THRESHOLD = 0.99


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def rows(rng: np.random.Generator) -> np.ndarray:
    """Ten rows, the first of which is a sink: one channel of it outweighs all others."""
    found = rng.normal(size=(10, 32))
    found[0, 7] = 10_000
    return found


def off(rows: np.ndarray, row: int, rng: np.random.Generator, by: float) -> np.ndarray:
    """Adds to one row a random vector of `by` times its length."""
    other = rng.normal(size=rows.shape[1])
    changed = rows.copy()
    changed[row] += other / np.linalg.norm(other) * np.linalg.norm(rows[row]) * by
    return changed


def nearness(found: np.ndarray, rows: np.ndarray, low: int | None = None) -> Nearness:
    return compare.nearness(rows_of([Text("text", range(len(rows)), low)]), found, rows)


def faults(
    found: np.ndarray, rows: np.ndarray, low: int | None = None, *, experts: bool = False
) -> list[str]:
    return nearness(found, rows, low).faults(THRESHOLD, experts=experts)


def parity(found: np.ndarray, expected: np.ndarray) -> compare.Parity:
    rows = rows_of([Text("text", range(len(found)))])
    return compare.parity(rows, ~rows.low, found, expected, 0.5)


def test_a_correct_first_row_does_not_hide_a_wrong_row(rows: np.ndarray, rng: np.random.Generator):
    found = off(rows, 4, rng, 0.5)
    flat = cosines(found.reshape(1, -1), rows.reshape(1, -1))[0]
    assert flat > 0.99999, "all rows at once look right"
    (fault,) = faults(found, rows)
    assert fault.startswith("cosine 0.")
    assert "at row 4 of text, expected 0.99 or more" in fault


def test_the_first_position_has_its_own_criterion(rows: np.ndarray):
    near = nearness(rows, rows)
    assert near.first_length > 1000
    assert near.faults(THRESHOLD, experts=False) == []
    found = rows.copy()
    found[0] = np.roll(found[0], 1)
    (fault,) = faults(found, rows)
    assert "at the first position" in fault


@pytest.mark.parametrize("low", [None, 6])
def test_the_direction_of_a_near_zero_row_is_ignored(
    rows: np.ndarray, rng: np.random.Generator, low: int | None
):
    rows[6:] *= 1e-3
    found = rows.copy()
    found[6:] = rng.normal(size=(4, 32)) * 1e-3
    assert cosines(found, rows)[6:].max() < 0.9
    assert faults(found, rows, low) == []
    found[8] = rows[3]
    (fault,) = faults(found, rows, low)
    assert fault.startswith("low-norm rows are off by ")


def test_scale_errors_nan_and_infinity_are_reported(rows: np.ndarray):
    assert faults(rows * 1.1, rows) == []
    for factor in (1.2, 0.8):
        (fault,) = faults(rows * factor, rows)
        assert fault == f"rows are {factor:.3g} times as long as expected"
    for row, number in ((0, np.nan), (3, np.inf), (8, np.nan)):
        found = rows.copy()
        found[row, 5] = number
        assert faults(found, rows, 7)


def test_with_experts_the_median_row_is_compared(rows: np.ndarray, rng: np.random.Generator):
    found = off(rows, 4, rng, 1.5)
    assert faults(found, rows)
    assert faults(found, rows, experts=True) == []
    for row in range(1, 10):
        found = off(found, row, rng, 0.5)
    (fault,) = faults(found, rows, experts=True)
    assert "at the median row" in fault


def test_a_common_offset_of_logits_is_removed(rng: np.random.Generator):
    logits = rng.normal(size=(4, 50))
    wrong = rng.normal(size=(4, 50))
    assert cosines(wrong + 30, logits + 30).min() > 0.99
    assert cosines(centred(wrong + 30), centred(logits + 30)).max() < 0.5


def test_a_top_token_mismatch_is_weighed_by_the_reference_margin():
    expected = np.array([[2.0, 1.9, 0, 0, 0, 0, 0], [5, 3, 0, 0, 0, 0, 0], [1, 0, 4, 0, 0, 0, 0]])
    found = expected.copy()
    found[0, 1] = 3  # a near tie flipped
    one = parity(found, expected)
    assert (one.rows, one.equal, one.decided, one.decided_equal) == (3, 2, 2, 2)
    assert (one.worst, one.at, one.contained) == (pytest.approx(0.1), "row 0 of text", 3)
    # The first two are near, but the third is the top token.
    found[0] = [0, 0, 3, 0.5, 0.4, 0.3, 0.2]
    far = parity(found, expected)
    assert (far.worst, far.contained) == (2.0, 2)
    assert far.divergence > one.divergence > 0
    assert parity(expected, expected).divergence == 0
