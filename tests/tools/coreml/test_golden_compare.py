"""Which nearness counts: the first position, small rows, factors, experts, near ties."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from paceline.tools.coreml.golden.compare import (
    RowPairs,
    allowed_error,
    centred,
    cosines,
    nearest,
    nearness,
    parity,
)

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
    """Another direction in one row, by so much of its length."""
    other = rng.normal(size=rows.shape[1])
    changed = rows.copy()
    changed[row] += other / np.linalg.norm(other) * np.linalg.norm(rows[row]) * by
    return changed


def faults(*texts: RowPairs, experts: bool = False) -> list[str]:
    return nearness(texts).faults(THRESHOLD, experts=experts)


def test_a_row_that_is_off_is_not_hidden_by_the_first(rows: np.ndarray, rng: np.random.Generator):
    found = off(rows, 4, rng, 0.5)
    flat = cosines(found.reshape(1, -1), rows.reshape(1, -1))[0]
    assert flat > 0.99999, "all rows at once look right"
    (fault,) = faults(RowPairs("text", found, rows))
    assert fault.startswith("cosine 0.")
    assert "at row 4 of text, expected 0.99 or more" in fault


def test_the_first_position_is_judged_apart(rows: np.ndarray):
    near = nearness([RowPairs("text", rows, rows)])
    assert near.first_length > 1000
    assert near.faults(THRESHOLD, experts=False) == []
    found = rows.copy()
    found[0] = np.roll(found[0], 1)
    (fault,) = faults(RowPairs("text", found, rows))
    assert "at the first position" in fault


@pytest.mark.parametrize("low", [None, 6])
def test_the_direction_of_a_row_next_to_zero_does_not_count(
    rows: np.ndarray, rng: np.random.Generator, low: int | None
):
    rows[6:] *= 1e-3
    found = rows.copy()
    found[6:] = rng.normal(size=(4, 32)) * 1e-3
    assert cosines(found, rows)[6:].max() < 0.9
    assert faults(RowPairs("text", found, rows, low)) == []
    found[8] = rows[3]
    (fault,) = faults(RowPairs("text", found, rows, low))
    assert fault.startswith("rows of low norm are off by ")


def test_a_token_of_low_norm_is_held_to_an_ordinary_rows_length(
    rows: np.ndarray, rng: np.random.Generator
):
    allowed = allowed_error(THRESHOLD)
    usual = np.median(np.linalg.norm(rows[1:6], axis=1))
    for share, passed in ((0.9, True), (1.1, False)):
        error = rng.normal(size=32)
        found = rows.copy()
        found[8] += error / np.linalg.norm(error) * usual * allowed * share
        assert (faults(RowPairs("text", found, rows, 6)) == []) is passed


@pytest.mark.parametrize(("factor", "passed"), [(1.1, True), (1.2, False), (0.8, False)])
def test_a_factor_counts_although_no_cosine_sees_it(
    rows: np.ndarray, factor: float, *, passed: bool
):
    found = faults(RowPairs("text", rows * factor, rows))
    assert found == ([] if passed else [f"rows are {factor:.3g} times as long as they should be"])


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("row", [0, 3, 8])
def test_what_is_no_number_is_never_near(rows: np.ndarray, row: int, number: float):
    found = rows.copy()
    found[row, 5] = number
    assert faults(RowPairs("text", found, rows, 7))


def test_with_experts_the_median_row_counts(rows: np.ndarray, rng: np.random.Generator):
    found = off(rows, 4, rng, 1.5)
    assert faults(RowPairs("text", found, rows))
    assert faults(RowPairs("text", found, rows), experts=True) == []
    for row in range(1, 10):
        found = off(found, row, rng, 0.5)
    (fault,) = faults(RowPairs("text", found, rows), experts=True)
    assert "at the median row" in fault


def test_what_is_nearest_is_found_although_all_have_a_good_cosine(rng: np.random.Generator):
    first = rng.normal(size=(10, 64))
    streams = [first + rng.normal(size=first.shape) * 0.05 * k for k in range(4)]
    found = streams[2] + rng.normal(size=first.shape) * 0.01
    assert cosines(found, streams[1]).min() > THRESHOLD
    assert nearest([[RowPairs("text", found, stream)] for stream in streams]) == 2


def test_what_all_logits_have_in_common_says_nothing(rng: np.random.Generator):
    logits = rng.normal(size=(4, 50))
    wrong = rng.normal(size=(4, 50))
    assert cosines(wrong + 30, logits + 30).min() > 0.99
    assert cosines(centred(wrong + 30), centred(logits + 30)).max() < 0.5


def test_a_pick_counts_by_what_the_reference_loses():
    expected = np.array([[2.0, 1.9, 0, 0, 0, 0, 0], [5, 3, 0, 0, 0, 0, 0], [1, 0, 4, 0, 0, 0, 0]])
    found = expected.copy()
    found[0, 1] = 3  # a near tie turned
    one = parity([RowPairs("text", found, expected)], 0.5)
    assert (one.rows, one.equal, one.decided, one.decided_equal) == (3, 2, 2, 2)
    assert (one.worst, one.at, one.contained) == (pytest.approx(0.1), "row 0 of text", 3)
    # The first two are near, but the third is what was picked.
    found[0] = [0, 0, 3, 0.5, 0.4, 0.3, 0.2]
    far = parity([RowPairs("text", found, expected)], 0.5)
    assert (far.worst, far.contained) == (2.0, 2)
    assert far.divergence > one.divergence > 0
    assert parity([RowPairs("text", expected, expected)], 0.5).divergence == 0
