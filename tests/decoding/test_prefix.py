import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.types import common_prefix_length

texts = st.lists(st.integers(0, 1), max_size=8)


@pytest.mark.parametrize("kind", [list, np.array])
@given(one=texts, other=texts)
def test_common_prefix_length_is_that_of_the_longest_equal_prefix(
    kind: type, one: list[int], other: list[int]
):
    equal = [n for n in range(min(len(one), len(other)) + 1) if one[:n] == other[:n]]
    assert common_prefix_length(kind(one), kind(other)) == max(equal)
