import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.logprobs import token_logprob

ROWS = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40)


def reference(row: np.ndarray) -> np.ndarray:
    wide = np.exp(row.astype(np.longdouble) - row.max())
    result: np.ndarray = np.log(wide / wide.sum()).astype(np.float64)
    return result


@given(ROWS, st.data())
def test_logprobs_are_logarithms_of_the_softmax(values: list[float], data: st.DataObject):
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
