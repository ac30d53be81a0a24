"""Criteria of `golden`: each row's cosine and error, a format's loss, near ties."""

import re

import numpy as np
import pytest

from paceline_coreml.golden import compare
from paceline_coreml.golden.checks import FormatCheck, format_loss
from paceline_coreml.golden.compare import centred, cosines
from paceline_coreml.golden.texts import Text, row_names

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


NAMES = row_names([Text("text", range(10))])


def faults(found: np.ndarray, rows: np.ndarray) -> list[str]:
    return compare.nearness(NAMES, found, rows).faults(THRESHOLD)


def parity(found: np.ndarray, expected: np.ndarray) -> compare.Parity:
    return compare.parity(NAMES, found, expected, 0.5)


def test_a_correct_first_row_does_not_hide_a_wrong_row(rows: np.ndarray, rng: np.random.Generator):
    found = off(rows, 4, rng, 0.5)
    flat = cosines(found.reshape(1, -1), rows.reshape(1, -1))[0]
    assert flat > 0.99999, "all rows at once look right"
    (fault,) = faults(found, rows)
    assert fault.startswith("cosine 0.")
    assert "at row 4 of text, expected 0.99 or more" in fault


def test_scale_errors_nan_and_infinity_are_reported(rows: np.ndarray):
    assert faults(rows * 1.1, rows) == []
    for factor in (1.2, 0.8):
        (fault,) = faults(rows * factor, rows)
        assert re.match(
            r"off by 0\.2 of its length at row \d of text, expected at most 0.14", fault
        )
    for row, number in ((0, np.nan), (3, np.inf), (8, np.nan)):
        found = rows.copy()
        found[row, 5] = number
        assert faults(found, rows)


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


def test_a_number_format_may_lose_what_the_references_does(rng: np.random.Generator):
    exact = rng.normal(size=(9, 50))
    half = format_loss(exact.astype(np.float16), exact)
    assert 0 < half < 1e-6
    assert FormatCheck(2 * half, half).faults("f16") == []
    coarse = format_loss(np.round(exact, 1), exact)
    (fault,) = FormatCheck(coarse, half).faults("f16")
    assert fault.startswith("f16 loses 0.000")
    rerouted = exact.copy()
    rerouted[4] = rng.normal(size=50)
    assert format_loss(rerouted, exact) < 1e-12
    assert FormatCheck(format_loss(exact * np.inf, exact), half).faults("f16")
    assert FormatCheck(2 * half, np.inf).faults("f16") == []
    assert FormatCheck(np.inf, np.inf).faults("f16")
